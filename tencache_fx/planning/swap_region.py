"""A region whose graphs have swap points: what it holds with everything away, and the plan in which all leaves.

`step.py` joins the calls of such regions to the problem of a step. No torch here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, starmap
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tencache_fx.planning.liveness import clip_to_barriers, inactive_intervals, is_candidate, live_bytes, swap_to_host
from tencache_fx.planning.parameter_schedule import schedule_parameters
from tencache_fx.planning.plan import Plan, Transfer, TransferKind
from tencache_fx.planning.planner import build_plan, check_tiers
from tencache_fx.planning.pool_sizing import staging_classes, total_bytes
from tencache_fx.planning.problem import Kind, Problem, Step, Tier

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class GraphPoint(NamedTuple):
    """A runtime op in a region's graph: it runs before this step of the region's problem."""

    step: Step
    deed: str
    label: str


Points: TypeAlias = tuple[tuple[GraphPoint, ...], tuple[GraphPoint, ...]]
"""The runtime ops of forward and backward in their order."""


@dataclass(frozen=True, kw_only=True)
class SwapRegion:
    """A region whose graphs have swap points, and in which the storages `recomputed` are not saved.

    `original` is the problem in which nothing more is recomputed than torch's partitioner does, with recipes.
    `transfers` are what the graphs do where no schedule says otherwise, `points` the runtime ops of forward and
    backward in their order. Behind the n-th of them generated code holds `margins[graph][n]` bytes more than the
    graphs show, or fewer. People know it by its `name`.
    """

    problem: Problem
    transfers: tuple[Transfer, ...]
    points: Points
    original: Problem
    recomputed: frozenset[str] = frozenset()
    margins: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    name: str = ""

    def resized(self, resize: Callable[[Problem], Problem]) -> "SwapRegion":
        """Return the same region at other sizes, which `resize` gives to its problems.

        What generated code holds more grows as the activations do; what it holds less as whatever grows least.
        """
        problem = resize(self.problem)
        nbytes = {storage.name: storage.nbytes for storage in problem.storages}
        transfers = tuple(replace(each, nbytes=nbytes[each.name]) for each in self.transfers)
        resized = replace(self, problem=problem, original=resize(self.original), transfers=transfers)
        now_bytes, before_bytes = (each.activation_bytes or max(1, each.nbytes) for each in (resized, self))
        # What code holds less are storages that it never makes: scores of attention grow as texts' square, weights not.
        pairs = [(nbytes[each.name], each.nbytes) for each in self.problem.storages if each.nbytes]
        least = min(starmap(Fraction, pairs), default=Fraction(1))
        forward, backward = (
            tuple(-(-each * now_bytes // before_bytes) if each > 0 else math.ceil(each * least) for each in margins)
            for margins in self.margins
        )
        return replace(resized, margins=(forward, backward))

    def holding(self, code_bytes: Sequence[Sequence[int]], unseen: Sequence[int] = (0,)) -> "SwapRegion":
        """Return the region with margins from the bytes that generated code holds behind each runtime op of each graph.

        The code is that in which every storage leaves. It shows nothing of the bytes `unseen`, of each step, that
        kernels are taken to allocate for themselves: these come on top. If it has other runtime ops than the graphs, or
        lacks a graph, all steps get the same margin: what the code holds at most, beyond the peak that the graphs show.
        """
        live = self._live(self.transfers) - np.asarray(unseen)
        if [len(held) for held in code_bytes] != [1 + len(points) for points in self.points]:
            most_bytes = max(0, max(map(max, code_bytes)) - int(live.max(initial=0)))
            forward, backward = ((most_bytes,) * (1 + len(points)) for points in self.points)
        else:
            forward, backward = (
                tuple(nbytes - int(live[part].max()) for nbytes, part in zip(held, parts, strict=True))
                for held, parts in zip(code_bytes, (self._parts(backward=back) for back in (False, True)), strict=True)
            )
        return replace(self, margins=(forward, backward))

    def _parts(self, *, backward: bool) -> Iterator[slice]:
        """Yield the steps before the first runtime op of a graph, and behind each.

        Nothing runs between two ops at one step: what is there is what the step before has left.
        """
        steps = self.steps(backward=backward)
        edges = [steps.start, *(point.step for point in self.points[backward]), steps.stop]
        for begin, end in pairwise(edges):
            first = max(steps.start, min(begin, steps.stop - 1))
            yield slice(first, end) if first < end else slice(max(steps.start, first - 1), first + 1)

    @cached_property
    def swaps(self) -> tuple[Transfer, ...]:
        """The transfers from the forward to the backward."""
        return tuple(each for each in self.transfers if each.kind is TransferKind.SWAP)

    def steps(self, *, backward: bool) -> range:
        """Return the steps of one of its graphs."""
        boundary = self.problem.boundary
        return range(boundary, len(self.problem.ops)) if backward else range(boundary)

    @cached_property
    def own_bytes(self) -> tuple[Bytes, Bytes]:
        """The bytes of each step of forward and backward, every storage away, beyond those there when it began."""
        return self._needed(self.transfers)

    @cached_property
    def kept_bytes(self) -> tuple[Bytes, Bytes]:
        """The same where every storage stays, and is there when the backward begins."""
        return self._needed(tuple(each for each in self.transfers if each.kind is not TransferKind.SWAP))

    def _needed(self, transfers: tuple[Transfer, ...]) -> tuple[Bytes, Bytes]:
        problem, boundary = self.problem, self.problem.boundary
        live = self._live(transfers)
        away = {swap.name for swap in self.swaps}
        inputs = (Kind.PARAMETER, Kind.INPUT)
        given = sum(s.nbytes for s in problem.storages if s.birth == 0 and s.kind in inputs)
        handed = sum(
            s.nbytes
            for s in problem.storages
            if s.death > boundary
            and ((s.birth < boundary and s.name not in away) or (s.birth == boundary and s.kind is Kind.INPUT))
        )
        more = np.zeros_like(live)
        for backward, margins in enumerate(self.margins):
            parts = zip(margins, self._parts(backward=bool(backward)), strict=False)
            for margin_bytes, part in sorted(parts, key=itemgetter(0)):  # a step of two parts is of the larger one
                more[part] = margin_bytes
        live = live + more
        return live[:boundary] - given, live[boundary:] - handed

    def _live(self, transfers: Sequence[Transfer]) -> Bytes:
        """Return the bytes of each step; a donated input that has a swap point is free behind its last use.

        The backward waits for it, and holds nothing but what that returns.
        """
        live = live_bytes(replace(self.problem, external_bytes=0, boundary_bytes=0), transfers).copy()
        away = {swap.name for swap in self.swaps}
        for storage in self.problem.storages:
            if storage.caller_frees_at and storage.name in away:
                live[storage.uses[-1] + 1 :] -= storage.nbytes
        return live

    @cached_property
    def swapped_bytes(self) -> int:
        """The bytes of all storages with swap points."""
        return sum(swap.nbytes for swap in self.swaps)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all storages that it ever makes or is given: other sizes have others."""
        return sum(storage.nbytes for storage in self.original.storages)

    @cached_property
    def activation_bytes(self) -> int:
        """The bytes of all activations where nothing more is recomputed: they grow with texts, as weights do not."""
        return sum(storage.nbytes for storage in self.original.storages if storage.kind is Kind.ACTIVATION)

    @cached_property
    def pending_bytes(self) -> int:
        """The bytes that a forward keeps on the device for its backward, with every storage away that can be."""
        boundary, away = self.problem.boundary, {swap.name for swap in self.swaps}
        return sum(
            storage.nbytes
            for storage in self.problem.storages
            if storage.kind is Kind.ACTIVATION and storage.birth < boundary < storage.death and storage.name not in away
        )

    def peak_bytes(self, *, backward: bool) -> int:
        """Return the most that one of its graphs needs beyond what is there when it begins."""
        return int(self.own_bytes[backward].max(initial=0))


def frugal_transfers(problem: Problem) -> tuple[Transfer, ...]:
    """Return the transfers that hold least: all leaves at once, and comes back when it is needed."""
    return (*boundary_swaps(problem), *schedule_parameters(problem.within(device_bytes=0), 0.0))


def boundary_swaps(problem: Problem) -> tuple[Transfer, ...]:
    """Return a swap without slack for each storage that can be away from the forward graph to the backward graph."""
    found = []
    for storage in (each for each in problem.storages if is_candidate(problem, each)):
        for last, following in inactive_intervals(storage):
            if not last < problem.boundary <= following:
                continue
            swap = swap_to_host(storage, last, Step(last + 1), following, following)
            if (clipped := clip_to_barriers(problem, swap)) is not None:
                found.append(clipped)
    return tuple(found)


def within_swap_points(problem: Problem, plan: Plan) -> Problem:
    """Return the problem with the budgets that `plan_swap_points` keeps to: the step's plan keeps to the others."""
    unlimited = problem.within(device_bytes=None)
    if problem.budgets.disk_bytes:
        return unlimited
    return unlimited.within(host_bytes=max(problem.budgets.host_bytes, plan.forecast.host_bytes))


def plan_swap_points(problem: Problem, policy: str) -> Plan:
    """Return the plan in which all leaves that can, for a region whose transfers a schedule of the step decides.

    It has the buffers for one call, and those through which storages go to disk once host memory is full. Raises
    `BudgetError` if that holds neither what one call has away, nor what is on its way to disk. Without a disk the
    buffers may be more than there is room for: what finds none stays on the device, and is checked as it runs.
    """
    unlimited = problem.within(device_bytes=None)
    plan = build_plan(unlimited, policy, frugal_transfers(unlimited), floor=0)
    if not problem.budgets.disk_bytes:
        return plan
    to_disk = [
        replace(transfer, tier=Tier.NVME) if transfer.kind is TransferKind.SWAP else transfer
        for transfer in plan.transfers
    ]
    staging = staging_classes(to_disk, problem.budgets.host_bytes - total_bytes(plan.pool))
    if total_bytes(plan.pool) + total_bytes(staging) > problem.budgets.host_bytes:
        plan = build_plan(unlimited, policy, to_disk, floor=0)
        check_tiers(unlimited, plan.forecast)
        return plan
    forecast = replace(plan.forecast, host_bytes=total_bytes(plan.pool) + total_bytes(staging))
    return replace(plan, staging=staging, forecast=forecast)
