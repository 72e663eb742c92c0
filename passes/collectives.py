"""Collectives: a node begins one, which goes on by itself until a wait for its result.

    work = all_gather_into_tensor(shard, ...)      reads `shard`, writes `work`, from here on, beside what follows
    whole = wait_tensor(work)                      the bytes of `work`, whole from here on

Torch: `torch/distributed/_functional_collectives.py`. The names of the ops say what they are: a torch that was built
without them has none.
"""

from collections.abc import Iterator

import torch
from torch import fx

from tencache_fx.passes.op_kinds import draws_numbers, is_mutating, is_view

_NAMESPACE = "_c10d_functional"
_WAIT = "_c10d_functional::wait_tensor"
_WRAP = "_c10d_functional::_wrap_tensor_autograd"
_KNOWN = ("aten", "prims", "inductor", "rngprims", _NAMESPACE)  # namespaces of ops that tell what they do


def begins_collective(node: fx.Node) -> bool:
    """Return whether a node returns while what it began still reads its arguments and writes its results."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == _NAMESPACE
        and target._schema.name not in (_WAIT, _WRAP)
    )


def begins_gathering(node: fx.Node) -> bool:
    """Return whether a node begins to gather all ranks' parts."""
    return begins_collective(node) and "all_gather_into_tensor" in str(node.target)


def is_collective_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a collective: it returns the tensor that it is given, by its fake another one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == _WAIT


def keeps_its_place(node: fx.Node) -> bool:
    """Return whether a node stays where it is with regard to collectives: an input, or an op that may do anything."""
    if node.op != "call_function":
        return True
    if begins_collective(node) or is_collective_wait(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in _KNOWN or is_mutating(node)
    return isinstance(node.target, torch._ops.HigherOrderOperator) and not draws_numbers(node)


def waits_behind(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of this graph that wait for what `node` has begun; nothing for one that begins none."""
    results = [node] if begins_collective(node) else []
    for result in results:
        for user in result.users:
            if is_collective_wait(user):
                yield user
            elif is_view(user):
                results.append(user)
