"""Who lives where, for the checker of rewritten graphs: followed from node to node, not taken from the passes."""

import itertools
from collections.abc import Iterator

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import WAIT, source_of

Key = tuple[int, int]  # one storage: the node that made it, and which of its tensors


def owners_of(
    graph: fx.Graph, carried: dict[str, dict[int, Key]], registers: frozenset[fx.Node]
) -> dict[fx.Node, dict[int, Key]]:
    """Return, for every node, the storages its tensors live in: an argument's where the fakes alias, else new ones.

    A `wait` always begins anew: it lives in the bytes that its prefetch took. One for a collective returns what it is
    given, though its schema does not say so. A value in `registers` has no memory;
    it stands for all that it is computed from. `carried` has the storages of values from another graph, by name.
    """
    owner: dict[fx.Node, dict[int, Key]] = {}
    entered: dict[int, Key] = {}  # inputs may alias one another
    for node in graph.nodes:
        keys = [tensor.untyped_storage()._cdata for tensor in strided(node)]
        if node.op == "placeholder" and node.name in carried:
            owner[node] = carried[node.name]
        elif node.op == "placeholder":
            owner[node] = {key: entered.setdefault(key, (id(node), i)) for i, key in enumerate(keys)}
        elif node.target is WAIT:
            owner[node] = {keys[0]: (id(source_of(node)), 0)}
        else:
            inherited = {key: name for argument in node.all_input_nodes for key, name in owner[argument].items()}
            if node in registers:
                owner[node] = inherited
                continue
            if inherited and _is_view(node) and not set(keys) <= set(inherited):  # of a number: a new one
                raise InvariantError(f"aliasing: {node.name} is a view by its schema, but its fake stands alone.")
            owner[node] = {key: inherited.get(key, (id(node), i)) for i, key in enumerate(keys)}
    return owner


def under_new_fake(owned: dict[int, Key], taken: fx.Node) -> dict[int, Key]:
    """Return the storage of a saved tensor under the fake that the backward's placeholder has for it."""
    return dict(zip((tensor.untyped_storage()._cdata for tensor in strided(taken)), owned.values(), strict=True))


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    if schema.name == "_c10d_functional::wait_tensor":
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def strided(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the fake tensors of a node that have a storage."""
    value = node.meta.get("val")
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield item


def handed(forward: fx.Graph, backward: fx.Graph, num_outputs: int) -> list[tuple[fx.Node, fx.Node | None]]:
    """Return the tensors that the forward saves, each with the placeholder at its position in the backward."""
    (output,) = forward.find_nodes(op="output")
    saved = [v for v in output.args[0][num_outputs:] if isinstance(v, fx.Node) and is_tensor(v)]
    taken = [p for p in backward.find_nodes(op="placeholder") if is_tensor(p)]
    return list(itertools.zip_longest(saved, taken[: len(saved)]))


def is_tensor(node: fx.Node) -> bool:
    """Return whether a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)
