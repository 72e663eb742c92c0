"""Results that Inductor writes over an operand: one storage takes the other's bytes.

Inductor lets a generated kernel write its result in place of an operand that dies in it, if both have the same layout,
each element is read where it is written, and no reduction in that kernel reads the operand too, in an order of its own
(torch: `_inductor/scheduler.py: decide_inplace_update`). That matters where the largest tensors meet: the gradient of
the logits is written over the logits. A scatter writes into what it begins with, where nobody else reads that: the
gradient of an embedding is never there twice.

A value that has been prefetched is never written over. So this is counted only where no transfer could pay: where no
heavy kernel runs between the operand's uses, behind which a copy could hide. Such a storage is then kept. Between the
graphs of a region that is one of a step's the others' kernels run, unless it ends with the loss.

A result that Inductor computes before a heavy op that stands before it (`InductorModel.early`) is born early, if it
takes nobody's place. It takes only that of a value that was read before: of another, the heavy op is still to follow
the writing (`barriers.PinOrder`), and Inductor writes over nothing that is waited for.
"""

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inductor_model import InductorModel, is_constant, is_loop_body, is_reduction
from tencache_fx.passes.lifetimes import StorageNodes
from tencache_fx.passes.op_kinds import base_of, is_pointwise, is_view, packet_of, readers_of
from tencache_fx.passes.scatters import is_scatter
from tencache_fx.planning.problem import Kind, Step, Storage
from tencache_fx.tensors import tensors_of

InPlace = Mapping[fx.Node, fx.Node]
_Asked = Callable[[fx.Node], bool]


def reuse_in_place(
    capture: RegionGraphs, model: InductorModel, storages: Sequence[StorageNodes], *, by_step: bool = False
) -> tuple[tuple[StorageNodes, ...], InPlace]:
    """Return `storages` with the lives of overwritten ones cut short, and for each such result the operand it takes.

    Results that are computed early and take no place are born early. `by_step` says that it is one region of a step.

    O(nodes + storages x steps).
    """
    found = list(storages)
    index_of = {member: i for i, item in enumerate(found) for member in item.members}
    registers, early = model.registers, model.early
    is_contiguous = cache(_is_contiguous)  # asked of each node for all that it is read with
    reductions = frozenset(step for step, node in enumerate(capture.nodes) if is_reduction(node))
    taken: dict[fx.Node, fx.Node] = {}
    others_between = by_step and any(_is_large_gradient(item, capture.boundary) for item in found)
    for step, node in enumerate(capture.nodes):
        if (
            node in registers
            or node not in index_of
            or node in model.views
            or not (is_loop_body(node) or _scatter_base(node))
        ):
            continue
        operand = next(
            (
                i
                for i in _operands(node, registers, index_of, is_contiguous)
                if _dies_here(found[i], found[index_of[node]], step, model, reductions)
                and not (others_between and found[i].storage.birth < capture.boundary <= step)
                and (node not in early or any(use <= early[node] for use in found[i].storage.uses[1:]))
            ),
            None,
        )
        if operand is not None:
            item = found[operand]
            storage = dataclasses.replace(item.storage, death=Step(step), spillable=False)
            found[operand] = dataclasses.replace(item, storage=storage)
            taken[node] = item.members[0]
    for node, born in early.items():
        own = index_of.get(node)
        if own is None or node in taken:
            continue
        operands = (found[i].storage for i in _operands(node, registers, index_of, is_contiguous))
        if not any(_is_written_early(operand, found[own].storage, born, capture.boundary) for operand in operands):
            storage = dataclasses.replace(found[own].storage, birth=min(born, found[own].storage.birth))
            found[own] = dataclasses.replace(found[own], storage=storage)
    return tuple(found), taken


def _is_large_gradient(item: StorageNodes, boundary: int) -> bool:
    """Return whether a storage is a gradient that the backward is given, and not that of one number, such as a loss."""
    is_given = item.storage.kind is Kind.INPUT and item.storage.birth == boundary
    return is_given and not statically_known_true(item.members[0].meta["val"].numel() == 1)


def _is_written_early(operand: Storage, result: Storage, born: Step, boundary: Step) -> bool:
    """Return whether a result that is computed early takes the place of `operand`, which counts until then."""
    return (
        operand.kind is Kind.ACTIVATION
        and operand.nbytes == result.nbytes
        and operand.uses[-1] == result.birth
        and (operand.birth >= boundary) == (born >= boundary)
        and any(use <= born for use in operand.uses[1:])
    )


def _operands(
    node: fx.Node, registers: Collection[fx.Node], index_of: Mapping[fx.Node, int], is_contiguous: _Asked
) -> list[int]:
    """Return the storages that `node` reads element by element, each where it writes, and in no other way."""
    if (base := _scatter_base(node)) is not None:
        return [index_of[base]] if base in index_of else []
    value = node.meta["val"]
    aligned: list[fx.Node] = []
    astray: set[int] = set()
    pending = [(argument, is_pointwise(node)) for argument in node.all_input_nodes]
    while pending:
        source, straight = pending.pop()
        straight = straight and _matches(source, node, is_contiguous)
        if source in registers:
            through = straight and (is_pointwise(source) or is_view(source))
            pending += [(argument, through) for argument in source.all_input_nodes]
        elif source in index_of and straight and source.meta["val"].dtype == value.dtype:
            aligned.append(source)
        elif source in index_of:
            astray.add(index_of[source])
    return [index_of[source] for source in aligned if index_of[source] not in astray]


def _matches(source: fx.Node, node: fx.Node, is_contiguous: _Asked) -> bool:
    """Return whether element i of both, in memory order, is the same element."""
    tensor, value = source.meta.get("val"), node.meta["val"]
    return (
        isinstance(tensor, torch.Tensor)
        and statically_known_true(tensor.numel() == value.numel())
        and is_contiguous(source)
        and is_contiguous(node)
    )


def _scatter_base(node: fx.Node) -> fx.Node | None:
    """Return what a scatter begins with, if nobody else reads it and Inductor computes it as the copy to write into."""
    if not is_scatter(node):
        return None
    base, *others = tree_leaves((node.args, node.kwargs))
    if not isinstance(base, fx.Node) or is_view(base) or readers_of(base) != {node}:
        return None
    read_again = any(isinstance(other, fx.Node) and base_of(other) is base for other in others)
    joined = packet_of(base) is torch.ops.aten.cat  # that is a buffer first
    computed = (is_constant(base) or is_loop_body(base)) and not joined
    complex_ = any(tensor.is_complex() for tensor in tensors_of(base))
    return base if computed and not complex_ and not read_again else None


def _is_contiguous(node: fx.Node) -> bool:
    return is_contiguous_or_false(node.meta["val"])


def _dies_here(
    operand: StorageNodes,
    result: StorageNodes,
    step: int,
    model: InductorModel,
    reductions: frozenset[int],
) -> bool:
    old, new, ends = operand.storage, result.storage, model.kernel_ends
    return (
        old.kind is Kind.ACTIVATION
        and old.uses[-1] == step
        and old.death == step + 1
        and new.birth == step
        and old.nbytes == new.nbytes
        and not any(ends[use] == ends[step] and use in reductions for use in old.uses[:-1])
        and not any(bisect_right(model.heavy, u) < bisect_left(model.heavy, v) for u, v in pairwise(old.uses))
    )


def hold_fused_operands(model: InductorModel, storages: Sequence[StorageNodes]) -> tuple[StorageNodes, ...]:
    """Return `storages`, those that die inside a fused kernel held until its last op is done.

    Never too short; too long where Inductor declines to fuse.
    """
    return tuple(dataclasses.replace(item, storage=_hold(item.storage, model.kernel_ends)) for item in storages)


def _hold(storage: Storage, ends: Sequence[int]) -> Storage:
    if not storage.uses or storage.death != storage.uses[-1] + 1:
        return storage  # it outlives the region, or another result has taken its place
    return dataclasses.replace(storage, death=Step(ends[storage.uses[-1]] + 1))
