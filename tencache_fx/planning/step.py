"""A training step of many region calls as one problem, and its plan as a schedule that the runtime looks up.

A region's graphs have *swap points*: for each storage that crosses from the forward to the backward an offload, a
release, a prefetch and a wait, where they hold least. A schedule tells for each call of each region which storages stay
on the device, and of the others when their bytes are freed, and when their copies back are issued, be it while another
region runs. The compiled code is the same in every call, and another schedule needs no compilation.

The problem is stated beside what the device was measured to hold while nothing stayed (`Visit.held_bytes`): each step
of a graph needs what its region needs with every storage away, on top of what was there when the graph began. Storages
that may stay are added to that. No torch here.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tencache_fx.planning.liveness import clip_to_barriers, inactive_intervals, is_candidate, live_bytes, swap_to_host
from tencache_fx.planning.plan import Plan, Transfer
from tencache_fx.planning.problem import Budgets, Kind, Links, Op, Problem, Step, Storage, Tier


class SwapKey(NamedTuple):
    """A storage of one call: `call` counts the calls of the region in a step."""

    region: int
    call: int
    label: str

    def __str__(self) -> str:
        """Return the name of the storage in the step's problem, such as "3.0:mm_5"."""
        return f"{self.region}.{self.call}:{self.label}"


class Point(NamedTuple):
    """A place where a schedule may act: the begin of a graph's run (0), before each runtime op of it, and its end."""

    region: int
    call: int
    backward: bool
    position: int


class GraphPoint(NamedTuple):
    """A runtime op in a region's graph: it runs before this step of the region's problem."""

    step: Step
    deed: str
    label: str


@dataclass(frozen=True, kw_only=True)
class SwapRegion:
    """A region whose graphs have swap points, and in which the storages `recomputed` are not saved.

    `original` is the problem in which nothing more is recomputed than torch's partitioner does, with recipes.
    `swaps` are what the graphs do where no schedule says otherwise, `points` the runtime ops of forward and backward in
    their order. Generated code holds `margin_bytes` more than the graphs show. People know it by its `name`.
    """

    problem: Problem
    swaps: tuple[Transfer, ...]
    points: tuple[tuple[GraphPoint, ...], tuple[GraphPoint, ...]]
    original: Problem
    recomputed: frozenset[str] = frozenset()
    margin_bytes: int = 0
    name: str = ""

    def resized(self, problem: Problem) -> "SwapRegion":
        """Return the same region with the storages of `problem`, which differs in its sizes."""
        nbytes = {storage.name: storage.nbytes for storage in problem.storages}
        swaps = tuple(replace(swap, nbytes=nbytes[swap.name]) for swap in self.swaps)
        return replace(self, problem=problem, swaps=swaps)

    def steps(self, *, backward: bool) -> range:
        """Return the steps of one of its graphs."""
        boundary = self.problem.boundary
        return range(boundary, len(self.problem.ops)) if backward else range(boundary)

    @cached_property
    def own_bytes(self) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]":
        """The bytes of each step of forward and backward, every storage away, beyond those there when it began."""
        problem, boundary = replace(self.problem, external_bytes=0, boundary_bytes=0), self.problem.boundary
        live = live_bytes(problem, self.swaps)
        away = {swap.name for swap in self.swaps}
        inputs = (Kind.PARAMETER, Kind.INPUT)
        given = sum(s.nbytes for s in problem.storages if s.birth == 0 and s.kind in inputs)
        handed = sum(
            s.nbytes
            for s in problem.storages
            if s.death > boundary
            and ((s.birth < boundary and s.name not in away) or (s.birth == boundary and s.kind is Kind.INPUT))
        )
        return live[:boundary] - given + self.margin_bytes, live[boundary:] - handed + self.margin_bytes

    @cached_property
    def swapped_bytes(self) -> int:
        """The bytes of all storages with swap points."""
        return sum(swap.nbytes for swap in self.swaps)

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


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One run of a region's forward or backward graph in a step.

    The device held `held_bytes` when it began, without the storages that stayed by a schedule, and up to `gap_bytes`
    between the run before and this one.
    """

    index: int
    call: int
    backward: bool
    region: SwapRegion = field(repr=False)
    held_bytes: int
    gap_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device while it runs, with every storage away that can be."""
        return self.held_bytes + self.region.peak_bytes(backward=self.backward)


def with_regions(visits: Sequence[Visit], regions: Mapping[int, SwapRegion]) -> list[Visit]:
    """Return the same runs of other `regions`, by index: forwards that wait keep as much as these do."""
    found: list[Visit] = []
    more_bytes = 0  # what those that wait keep more than when it was measured
    for visit in visits:
        region = regions[visit.index]
        changed_bytes = region.pending_bytes - visit.region.pending_bytes
        held_bytes = max(0, visit.held_bytes + more_bytes)
        gap_bytes = max(0, visit.gap_bytes + more_bytes)
        found.append(replace(visit, region=region, held_bytes=held_bytes, gap_bytes=gap_bytes))
        more_bytes += -changed_bytes if visit.backward else changed_bytes
    return found


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """What each swap point does in each call. A storage that is neither in `kept` nor in `away` leaves at once.

    `away` has the tier that a storage goes to. `frees` and `prefetches` have the storages whose bytes are freed, and
    whose copies back are issued, at a point that is not their own op's.
    """

    kept: frozenset[SwapKey] = frozenset()
    away: Mapping[SwapKey, Tier] = field(default_factory=lambda: MappingProxyType({}))
    deferred: frozenset[SwapKey] = frozenset()
    frees: Mapping[Point, tuple[SwapKey, ...]] = field(default_factory=lambda: MappingProxyType({}))
    prefetches: Mapping[Point, tuple[SwapKey, ...]] = field(default_factory=lambda: MappingProxyType({}))


FRUGAL = StepSchedule()
"""Everything leaves at once and comes back when it is needed: no schedule holds less."""


@dataclass(frozen=True, kw_only=True)
class StepProblem:
    """The problem of a whole step; `keys` are its storages' by name, `points` where a schedule may act, in order.

    `releases` and `prefetches` say which of the points are a storage's own ops.
    """

    problem: Problem
    keys: Mapping[str, SwapKey]
    points: tuple[tuple[Step, Point], ...]
    releases: Mapping[SwapKey, int]
    prefetches: Mapping[SwapKey, int]


def join(
    visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]] = ()
) -> StepProblem:
    """Return the problem of these runs, one after the other; before each there is a step for the time between.

    Every forward that has a backward in the step may have its storages away in between, but for those that are
    `shared` with their caller, by region and label. O(steps + storages).
    """
    lengths = [1 + len(visit.region.steps(backward=visit.backward)) for visit in visits]
    starts = [Step(start) for start in accumulate(lengths[:-1], initial=0)] if visits else []
    base = np.zeros(sum(lengths), dtype=np.int64)
    ops: list[Op] = []
    points: list[tuple[Step, Point]] = []
    own: dict[str, dict[SwapKey, int]] = {"release": {}, "prefetch": {}}
    begins: dict[tuple[int, int, bool], Step] = {}
    for visit, start in zip(visits, starts, strict=True):
        steps, first = visit.region.steps(backward=visit.backward), Step(start + 1)
        where = f"{visit.index}.{visit.call}"
        base[start] = max(visit.held_bytes, visit.gap_bytes)
        base[first : first + len(steps)] = visit.held_bytes + visit.region.own_bytes[visit.backward]
        ops.append(Op(name=f"before {where}", duration_ns=0))
        ops += [replace(visit.region.problem.ops[step], scratch_bytes=0) for step in steps]
        begins[visit.index, visit.call, visit.backward] = Step(first - steps.start)  # a step of the region is so far on
        written = visit.region.points[visit.backward]
        for position, point in enumerate(written, len(points) + 1):
            own.get(point.deed, {})[SwapKey(visit.index, visit.call, point.label)] = position
        places = [first, *(Step(first + point.step - steps.start) for point in written), Step(first + len(steps))]
        points += [
            (step, Point(visit.index, visit.call, visit.backward, position)) for position, step in enumerate(places)
        ]
    storages: list[Storage] = []
    keys: dict[str, SwapKey] = {}
    for visit in visits:
        if visit.backward or (visit.index, visit.call, True) not in begins:
            continue
        shift, back = begins[visit.index, visit.call, False], begins[visit.index, visit.call, True]
        for swap in (each for each in visit.region.swaps if (visit.index, each.name) not in shared):
            key = SwapKey(visit.index, visit.call, swap.name)
            gone, asked, death = swap.freed_at + shift, swap.prefetch_at + back, swap.needed_at + back + 1
            base[gone - 1] -= swap.nbytes  # what is counted for the storage is not counted for its region
            base[asked:death] -= swap.nbytes
            keys[str(key)] = key
            storages.append(
                Storage(
                    name=str(key),
                    nbytes=swap.nbytes,
                    kind=Kind.ACTIVATION,
                    birth=Step(gone - 1),
                    death=Step(death),
                    uses=(Step(gone - 1), Step(asked)),
                    spillable=True,
                )
            )
    ops = [replace(op, scratch_bytes=nbytes) for op, nbytes in zip(ops, np.maximum(base, 0).tolist(), strict=True)]
    boundary = next((start for visit, start in zip(visits, starts, strict=True) if visit.backward), Step(len(ops)))
    problem = Problem(ops=tuple(ops), boundary=boundary, storages=tuple(storages), links=links, budgets=budgets)
    return StepProblem(
        problem=problem,
        keys=MappingProxyType(keys),
        points=tuple(points),
        releases=MappingProxyType(own["release"]),
        prefetches=MappingProxyType(own["prefetch"]),
    )


def to_schedule(joined: StepProblem, plan: Plan) -> StepSchedule:
    """Return the schedule of a step's plan: bytes are freed no later, and come back no sooner, than the plan says."""
    steps = [step for step, _ in joined.points]  # they never fall: a graph ends where the time behind it begins
    away: dict[SwapKey, Tier] = {}
    frees: dict[Point, list[SwapKey]] = {}
    prefetches: dict[Point, list[SwapKey]] = {}
    for swap in plan.transfers:
        key = joined.keys[swap.name]
        away[key] = swap.tier
        freed, asked = bisect_right(steps, swap.freed_at) - 1, bisect_left(steps, swap.prefetch_at)
        if freed > joined.releases[key]:
            frees.setdefault(joined.points[freed][1], []).append(key)
        if asked < joined.prefetches[key]:
            prefetches.setdefault(joined.points[asked][1], []).append(key)
    return StepSchedule(
        kept=frozenset(joined.keys.values()) - away.keys(),
        away=MappingProxyType(away),
        deferred=frozenset(key for keys in frees.values() for key in keys),
        frees=MappingProxyType({point: tuple(keys) for point, keys in frees.items()}),
        prefetches=MappingProxyType({point: tuple(keys) for point, keys in prefetches.items()}),
    )
