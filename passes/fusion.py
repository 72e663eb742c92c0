"""What Inductor will never write to memory: values that live in registers, inside the kernel of their readers.

Modelled after Inductor's own rule (torch: `_inductor/graph.py: run_node`, `_inductor/ir.py: StorageBox.mark_reuse`): a
pointwise value is inlined into readers that Inductor generates too; with several readers only while it is cheap to
compute again, that is, while it reads few buffers. `REALIZE_READS` is Inductor's `realize_reads_threshold`.
"""

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.tensors import tensors_of

REALIZE_READS = 4

Registers = Mapping[fx.Node, frozenset[fx.Node]]


def find_registers(capture: RegionGraphs) -> Registers:
    """Return the values of a region that stay in registers."""
    return registers_among(capture.nodes)


def registers_among(nodes: Iterable[fx.Node]) -> Registers:
    """Return the values that stay in registers, each with the materialised values it is computed from.

    Views of such values are among them. O(nodes + users).
    """
    registers: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        sources = frozenset().union(*(registers.get(argument, {argument}) for argument in node.all_input_nodes))
        if _packet(node) in _CONSTANTS and _is_inlined(node, 0):
            registers[node] = frozenset()
        elif is_view(node):
            if node.all_input_nodes and node.all_input_nodes[0] in registers:
                registers[node] = sources
        elif is_loop_body(node) and _packet(node) is not _aten.cat and _is_inlined(node, len(sources)):
            registers[node] = sources
    return registers


def _is_inlined(node: fx.Node, reads: int) -> bool:
    readers = readers_of(node)
    if not readers or not all(is_loop_body(reader) or is_reduction(reader) for reader in readers):
        return False
    return len(readers) == 1 or (reads <= REALIZE_READS and _packet(node) not in _HEAVY)


def is_view(node: fx.Node) -> bool:
    """Return whether a node only names bytes that exist already: all that it returns, one tensor or several."""
    if node.target is operator.getitem:
        return True
    given = {
        tensor.untyped_storage()._cdata
        for argument in node.all_input_nodes
        for tensor in tensors_of(argument)
        if tensor.layout is torch.strided
    }
    made = tensors_of(node)
    return bool(made) and all(t.layout is torch.strided and t.untyped_storage()._cdata in given for t in made)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node is elementwise by torch's own tag, and so can be fused into its readers."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and not node.target._schema.is_mutable
    )


def readers_of(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read a value's bytes, its views looked through."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= readers_of(user) if is_view(user) else {user}
    return found


def is_constant(node: fx.Node) -> bool:
    """Return whether Inductor computes a node from nothing, wherever it is read."""
    return _packet(node) in _CONSTANTS


def is_loop_body(node: fx.Node) -> bool:
    """Return whether Inductor computes each element of a node by itself: pointwise, or an indexed load or copy.

    It computes nothing on complex numbers: those go to eager kernels (torch: `_inductor/lowering.py:
    fallback_node_due_to_unsupported_type`).
    """
    touched = (node, *node.all_input_nodes)
    if any(tensor.is_complex() for each in touched for tensor in tensors_of(each)):
        return False
    return is_pointwise(node) or _packet(node) in _LOADS


def scatter_base(node: fx.Node) -> fx.Node | None:
    """Return what a scatter begins with, if nobody else reads it and Inductor computes it; None for other nodes.

    Inductor lets scatters write into a copy of their first argument, and such a one is computed as that copy
    (torch: `_inductor/lowering.py: index_put, scatter`).
    """
    if _packet(node) not in _SCATTERS:
        return None
    base, *others = tree_leaves((node.args, node.kwargs))
    if not isinstance(base, fx.Node) or is_view(base) or readers_of(base) != {node}:
        return None
    read_again = any(isinstance(other, fx.Node) and base_of(other) is base for other in others)
    computed = (is_constant(base) or is_loop_body(base)) and _packet(base) is not _aten.cat  # that is a buffer first
    complex_ = any(tensor.is_complex() for tensor in tensors_of(base))
    return base if computed and not complex_ and not read_again else None


def base_of(node: fx.Node) -> fx.Node:
    """Return the node that made the bytes `node` names, views looked through."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node is a reduction that Inductor generates itself, and so can fuse with what it reads."""
    return _packet(node) in _REDUCTIONS


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


_aten = torch.ops.aten
_REDUCTIONS = frozenset(
    (_aten.sum, _aten.mean, _aten.prod, _aten.amax, _aten.amin, _aten.max, _aten.min, _aten.any, _aten.all)
    + (_aten.argmax, _aten.argmin, _aten.var, _aten.var_mean, torch.ops.prims.sum, torch.ops.prims.var)
)
_CONSTANTS = frozenset((_aten.full, _aten.arange, _aten.scalar_tensor, torch.ops.prims.iota))
_LOADS = frozenset(
    (_aten.gather, _aten.index, _aten.embedding, _aten.clone, _aten.copy, _aten._to_copy)
    + (_aten.lift_fresh_copy,)
    + (_aten.cat, _aten.select_scatter, _aten.slice_scatter, _aten.constant_pad_nd, _aten.flip, _aten.repeat)
)
_SCATTERS = frozenset(
    (_aten.index_put, _aten._unsafe_index_put, _aten._unsafe_masked_index_put_accumulate)
    + (_aten.scatter, _aten.scatter_add, _aten.scatter_reduce)
)
_HEAVY = frozenset((_aten.exp, _aten.sigmoid))
