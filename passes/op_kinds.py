"""What the nodes of a graph are by torch's own word: views, elementwise ops, writes, matmul-class ops, their flops."""

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from tencache_fx.ops import arguments_of
from tencache_fx.tensors import byte_hint, storage_of, tensors_of

_WITH_STATE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


def packet_of(node: fx.Node) -> object:
    """Return the op that a node calls, without its overload; None if it calls none of torch's."""
    return getattr(node.target, "overloadpacket", None)


def is_view(node: fx.Node) -> bool:
    """Return whether a node only names bytes that exist already: all that it returns, one tensor or several."""
    if node.target is operator.getitem:
        return True
    made = tensors_of(node)
    if not made or any(tensor.layout is not torch.strided for tensor in made):
        return False
    named = {tensor.untyped_storage()._cdata for tensor in made}
    for given in node.all_input_nodes:
        for tensor in tensors_of(given):  # asked of most nodes, most of which name nothing
            if (storage := storage_of(tensor)) is not None:
                named.discard(storage._cdata)
        if not named:
            return True
    return False


def storages_of(node: fx.Node) -> set[int]:
    """Return the storages that a node's tensors live in, by the identity of their fakes."""
    return {storage._cdata for tensor in tensors_of(node) if (storage := storage_of(tensor)) is not None}


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node is elementwise by torch's own tag, and so can be fused into its readers."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and not node.target._schema.is_mutable
    )


def is_composite(node: fx.Node) -> bool:
    """Return whether an op runs as several where nothing compiles it (torch: `_inductor/inductor_prims.py`)."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "prims"


def is_mutating(node: fx.Node) -> bool:
    """Return whether a node changes bytes that exist already, such as `copy_`."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def draws_numbers(node: fx.Node) -> bool:
    """Return whether a node draws random numbers: by torch's own tag, or with a state kept for it.

    Torch: `_prims/rng_prims.py`, which partitioners put around ops that are to draw the same numbers again.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.target.name() in _WITH_STATE
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that a node writes to, by its schema."""
    if not is_mutating(node):
        return
    assert isinstance(node.target, torch._ops.OpOverload)
    given = arguments_of(node)
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else (value,)
            yield from (item for item in values if isinstance(item, fx.Node))


def readers_of(node: fx.Node, is_view: Callable[[fx.Node], bool] = is_view) -> set[fx.Node]:
    """Return the nodes that read a value's bytes, its views looked through; `is_view` may know answers already."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= readers_of(user, is_view) if is_view(user) else {user}
    return found


def users_through(node: fx.Node, registers: Collection[fx.Node]) -> set[fx.Node]:
    """Return all that uses a value, one of its views, or what is computed from it and is in `registers`, with these."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                if is_view(user) or user in registers:
                    waiting.append(user)
    return found


def base_of(node: fx.Node, is_view: Callable[[fx.Node], bool] = is_view) -> fx.Node:
    """Return the node that made the bytes `node` names, views looked through; `is_view` may know answers already."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def nbytes_of(node: fx.Node) -> int:
    """Return the bytes of all tensors that a node returns."""
    return sum(byte_hint(tensor.numel()) * tensor.element_size() for tensor in tensors_of(node))


def is_heavy(node: fx.Node) -> bool:
    """Return whether a node becomes an extern kernel of its own: matmul class or convolution, one tensor out."""
    return isinstance(node.meta.get("val"), torch.Tensor) and count_flops(node) > 0


def count_flops(node: fx.Node, *, on_gpu: bool = False) -> int:
    """Return the floating-point operations of a matmul-class or attention node by torch's own formulas, else 0.

    torch has none for a CPU's attention, which `on_gpu` stands for that of a GPU.
    """
    op, args, kwargs = called_op(node)
    packet = getattr(op, "overloadpacket", op)
    formula = flop_registry.get(_GPU_ATTENTION.get(packet, packet) if on_gpu else packet)
    if formula is None:
        return 0
    value = node.meta["val"]
    args, kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    assert isinstance(op, torch._ops.OpOverload)
    if "scaled_dot_product" in op.__name__:
        args = _with_all_heads(op, args)
    return byte_hint(formula(*args, **kwargs, out_val=value))


def called_op(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what a node calls, with its arguments: the op that is to draw by a given state, where it is one of those.

    Torch: `_prims/rng_prims.py`; before 2.14 the attention of what is checkpointed is such an op.
    """
    ops = [place for place, value in enumerate(node.args) if isinstance(value, torch._ops.OpOverload)]
    if not ops or not draws_numbers(node):
        return node.target, node.args, dict(node.kwargs)
    named = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return node.args[ops[0]], node.args[ops[0] + 1 :], named


_aten = torch.ops.aten
_GPU_ATTENTION: dict[object, object] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def _with_all_heads(target: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give attention's keys and values, of which a group of queries shares one, as many heads as there are queries.

    That is what its kernels compute; before torch 2.13 the formulas refuse groups.
    """
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, args, strict=False))
    query = given.get("query")
    if not isinstance(query, torch.Tensor):
        return args
    for name in ("key", "value"):
        if isinstance(tensor := given[name], torch.Tensor):
            given[name] = torch.Size((*tensor.shape[:1], query.shape[1], *tensor.shape[2:]))  # formulas ask for shapes
    return tuple(given.values())
