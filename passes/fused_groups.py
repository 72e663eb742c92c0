"""Kernels that Inductor makes of several ops hold all they read, and all they write, at once.

A materialised result that is read by another generated op before any extern kernel runs will mostly be computed in the
same kernel as that reader; so will two generated ops that read the same value. What the earlier op reads for the last
time is then held until the later op is done (torch: `_inductor/scheduler.py: can_fuse_vertical, can_fuse_horizontal`).
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from tencache_fx.passes.costs import count_flops
from tencache_fx.passes.fusion import Registers, is_constant, is_loop_body, is_reduction, is_view, readers_of
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.lifetimes import StorageNodes
from tencache_fx.planning.problem import Step, Storage
from tencache_fx.tensors import byte_hint, tensors_of


def hold_fused_operands(
    capture: RegionGraphs, registers: Registers, storages: Sequence[StorageNodes]
) -> tuple[StorageNodes, ...]:
    """Return `storages`, those that die inside a fused kernel held until its last op is done.

    Never too short; too long where Inductor declines to fuse. O(nodes + arguments).
    """
    last_of = last_steps(capture, registers)
    return tuple(dataclasses.replace(item, storage=_hold(item, last_of)) for item in storages)


def _hold(item: StorageNodes, last_of: Sequence[int]) -> Storage:
    storage = item.storage
    if not storage.uses or storage.death != storage.uses[-1] + 1:
        return storage  # it outlives the region, or another result has taken its place
    return dataclasses.replace(storage, death=Step(last_of[storage.uses[-1]] + 1))


def last_steps(capture: RegionGraphs, registers: Registers) -> Sequence[int]:
    """Return for every step the last step of the kernel that it is part of. O(nodes + arguments)."""
    parent = list(range(len(capture.nodes)))

    def root(step: int) -> int:
        while parent[step] != step:
            parent[step] = parent[parent[step]]
            step = parent[step]
        return step

    made: dict[fx.Node, int] = {}  # since the last extern kernel: by value, the step that made it or read it first
    for step, node in enumerate(capture.nodes):
        if step == capture.boundary:
            made.clear()
        if is_view(node) or node in registers or is_constant(node):
            continue
        if not (is_loop_body(node) or is_reduction(node)):
            made.clear()
            continue
        for source in _read(node, registers):
            first = made.setdefault(source, step)
            older, newer = sorted((root(first), root(step)))
            parent[older] = newer  # the root of a kernel is its last step
        made[node] = step
    return [root(step) for step in range(len(parent))]


def find_early(capture: RegionGraphs, registers: Registers) -> Mapping[fx.Node, Step]:
    """Return the results that Inductor may compute before a heavy op that stands before them, with the earliest step.

    They go into the kernel of an earlier op that reads what they read, in a loop of the same shape, if all that they
    read is there before that kernel has to run; and that is before the next heavy op (`barriers.PinOrder`). What only
    generated kernels read is left out: it mostly stays inside its kernel.
    O(nodes + arguments x readers).
    """
    nodes, boundary = capture.nodes, capture.boundary
    heavy = [step for step, node in enumerate(nodes) if count_flops(node) > 0]
    made: dict[fx.Node, int] = {}
    readers: dict[fx.Node, list[int]] = {}
    found: dict[fx.Node, Step] = {}
    for step, node in enumerate(nodes):
        if step == boundary:
            made, readers = {}, {}
        made[node] = step
        if is_view(node) or node in registers or is_constant(node) or not (is_loop_body(node) or is_reduction(node)):
            continue
        sources = set(_read(node, registers))
        ready = max((made[source] for source in sources if source in made), default=0)
        escapes = not all(is_loop_body(reader) or is_reduction(reader) for reader in readers_of(node))
        for partner in sorted({earlier for source in sources for earlier in readers.get(source, ())}):
            due = bisect_left(heavy, partner)
            if escapes and due < len(heavy) and ready < heavy[due] < step and _loop(nodes[partner]) == _loop(node):
                found[node] = Step(max(partner, ready))
                break
        for source in sources:
            readers.setdefault(source, []).append(step)
    return found


def _loop(node: fx.Node) -> tuple[int, ...]:
    """Return the elements that a kernel of this node loops over: of its result, and of what it reduces."""
    results = tensors_of(node)[:1]
    reduced = tensors_of(node.all_input_nodes[0])[:1] if is_reduction(node) else ()
    return tuple(byte_hint(tensor.numel()) for tensor in (*results, *reduced))


def _read(node: fx.Node, registers: Registers) -> Iterable[fx.Node]:
    """Return the materialised values behind a node's arguments, views looked through."""
    for argument in node.all_input_nodes:
        for source in registers.get(argument, (argument,)):
            while is_view(source) and source.all_input_nodes:
                source = source.all_input_nodes[0]
            yield source
