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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.plan import Plan, Transfer, TransferKind
from tencache_fx.planning.planner import build_plan, over_tiers
from tencache_fx.planning.problem import Budgets, Collective, Kind, Links, Op, Problem, Step, Storage, Tier
from tencache_fx.planning.swap_region import SwapRegion


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


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One run of a region's forward or backward graph in a step.

    The device held `held_bytes` when it began, without the storages that stayed by a schedule, and up to `gap_bytes`
    between the run before and this one. Calls that are `checkpointed` all recompute the same.
    """

    index: int
    call: int
    backward: bool
    region: SwapRegion = field(repr=False)
    held_bytes: int
    gap_bytes: int = 0
    checkpointed: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device while it runs, with every storage away that can be."""
        return self.held_bytes + self.region.peak_bytes(backward=self.backward)


def with_regions(visits: Sequence[Visit], regions: Mapping[tuple[int, int], SwapRegion]) -> list[Visit]:
    """Return the same runs of other `regions`, by index and call: forwards that wait keep as much as these do.

    Nothing was kept by those that are followed by no backward, as checkpointed ones are when they run first.
    """
    found: list[Visit] = []
    returning = {(visit.index, visit.call) for visit in visits if visit.backward}
    more_bytes = 0  # what those that wait keep more than when it was measured
    for visit in visits:
        region = regions[visit.index, visit.call]
        changed_bytes = region.pending_bytes - visit.region.pending_bytes
        held_bytes = max(0, visit.held_bytes + more_bytes)
        gap_bytes = max(0, visit.gap_bytes + more_bytes)
        found.append(replace(visit, region=region, held_bytes=held_bytes, gap_bytes=gap_bytes))
        if (visit.index, visit.call) in returning:
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

    @cached_property
    def acts(self) -> Mapping[tuple[int, int, bool], Mapping[int, tuple[tuple[SwapKey, ...], tuple[SwapKey, ...]]]]:
        """What is freed and prefetched, by the run of a graph (region, call, backward) and the position in it."""
        found: dict[tuple[int, int, bool], dict[int, tuple[tuple[SwapKey, ...], tuple[SwapKey, ...]]]] = {}
        for point in self.frees.keys() | self.prefetches.keys():
            run = found.setdefault((point.region, point.call, point.backward), {})
            run[point.position] = self.frees.get(point, ()), self.prefetches.get(point, ())
        return found


OWN_POINTS = MappingProxyType({"release": "release", "prefetch": "prefetch", "fetch": "prefetch"})
"""The graph ops at which a storage's bytes are freed, or its copy in is issued, where no schedule says otherwise."""

FRUGAL = StepSchedule()
"""Everything leaves at once and comes back when it is needed: no schedule holds less."""


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """Which offloaded parameters the calls of a step read, as far as was seen.

    `names` has one name of each, by the calls and what the region calls it. Updates of those `freed_at_once` follow the
    graph that stores the gradient. Those `on_disk` are read from there.
    """

    names: Mapping[SwapKey, str] = field(default_factory=lambda: MappingProxyType({}))
    freed_at_once: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()


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
    visits: Sequence[Visit],
    links: Links,
    budgets: Budgets,
    shared: Collection[tuple[int, str]] = (),
    parameters: ParameterNames | None = None,
) -> StepProblem:
    """Return the problem of these runs, one after the other; before each there is a step for the time between.

    Every forward that has a backward in the step may have its storages away in between, but for those that are
    `shared` with their caller, by region and label. `parameters` are those that the calls were seen to fetch.
    O(steps + storages).
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
            own.get(OWN_POINTS.get(point.deed, ""), {})[SwapKey(visit.index, visit.call, point.label)] = position
        places = [first, *(Step(first + point.step - steps.start) for point in written), Step(first + len(steps))]
        points += [
            (step, Point(visit.index, visit.call, visit.backward, position)) for position, step in enumerate(places)
        ]
    storages: list[Storage] = []
    keys: dict[str, SwapKey] = {}
    parameters = parameters or ParameterNames()
    gradients: dict[str, list[tuple[int, Step]]] = {}  # by parameter, with when their graph's caller has them
    for visit, behind in zip(visits, (*starts, Step(len(ops)))[1:], strict=True):
        found = _parameters(visit, begins[visit.index, visit.call, visit.backward], parameters)
        if not visit.backward and (visit.index, visit.call, True) in begins:
            shifts = begins[visit.index, visit.call, False], begins[visit.index, visit.call, True]
            found = chain(found, _swapped(visit, *shifts, shared))
        for key, storage, held in found:  # what is counted for a storage is not counted for its region
            for span in held:
                base[span.start : span.stop] -= storage.nbytes
            keys[storage.name] = key
            if storage.kind is Kind.STORED:
                gradients.setdefault(storage.parameter, []).append((len(storages), Step(min(behind + 1, len(ops)))))
            storages.append(storage)
    _free_gradients(storages, gradients, parameters.freed_at_once)
    ops = [replace(op, scratch_bytes=nbytes) for op, nbytes in zip(ops, np.maximum(base, 0).tolist(), strict=True)]
    boundary = next((start for visit, start in zip(visits, starts, strict=True) if visit.backward), Step(len(ops)))
    problem = Problem(
        ops=tuple(ops),
        boundary=boundary,
        storages=tuple(storages),
        links=links,
        budgets=budgets,
        copies_parameters=True,
        collectives=tuple(_collectives(visits, begins, storages)),
    )
    return StepProblem(
        problem=problem,
        keys=MappingProxyType(keys),
        points=tuple(points),
        releases=MappingProxyType(own["release"]),
        prefetches=MappingProxyType(own["prefetch"]),
    )


def _collectives(
    visits: Sequence[Visit], begins: Mapping[tuple[int, int, bool], Step], storages: Sequence[Storage]
) -> Iterator[Collective]:
    """Yield the collectives of all runs: a run waits for all that it has begun before it ends.

    Of what they use, those storages are named whose whole life the step's problem has; the others stay where they are.
    """
    moved = {storage.name for storage in storages if storage.kind in (Kind.FETCHED, Kind.STORED)}
    for visit in visits:
        key, steps = SwapKey(visit.index, visit.call, ""), visit.region.steps(backward=visit.backward)
        shift = begins[visit.index, visit.call, visit.backward]
        for each in (each for each in visit.region.problem.collectives if each.begin in steps):
            reads, writes = ([str(key._replace(label=name)) for name in used] for used in (each.reads, each.writes))
            yield replace(
                each,
                name=str(key._replace(label=each.name)),
                begin=Step(each.begin + shift),
                needed_at=Step(min(each.needed_at, steps.stop) + shift),
                reads=tuple(name for name in reads if name in moved),
                writes=tuple(name for name in writes if name in moved),
            )


def _free_gradients(
    storages: list[Storage], gradients: Mapping[str, list[tuple[int, Step]]], freed_at_once: Collection[str]
) -> None:
    """State until when each gradient lives if it stays: the first of a parameter up to its update, the others less.

    `gradients` has the places of each parameter's among `storages`, and when what called their graphs has them.
    """
    for parameter, parts in gradients.items():
        for place, freed in parts[1:]:  # they are added to the first
            storages[place] = replace(storages[place], caller_frees_at=freed)
        place, (_, last) = parts[0][0], parts[-1]
        storages[place] = replace(storages[place], caller_frees_at=last if parameter in freed_at_once else Step(0))


def _swapped(
    visit: Visit, shift: Step, back: Step, shared: Collection[tuple[int, str]]
) -> Iterator[tuple[SwapKey, Storage, tuple[range, ...]]]:
    """Yield the storages that a call may have away between its graphs, and when these hold their bytes anyway.

    `shift` and `back` are the steps that a step of the forward, and of the backward, is further on in the problem.
    """
    for swap in (each for each in visit.region.swaps if (visit.index, each.name) not in shared):
        key = SwapKey(visit.index, visit.call, swap.name)
        gone, asked, death = swap.freed_at + shift, swap.prefetch_at + back, swap.needed_at + back + 1
        storage = Storage(
            name=str(key),
            nbytes=swap.nbytes,
            kind=Kind.ACTIVATION,
            birth=Step(gone - 1),
            death=Step(death),
            uses=(Step(gone - 1), Step(asked)),
            spillable=True,
        )
        yield key, storage, (range(gone - 1, gone), range(asked, death))


def _parameters(
    visit: Visit, shift: Step, parameters: ParameterNames
) -> Iterator[tuple[SwapKey, Storage, tuple[range, ...]]]:
    """Yield the offloaded parameters and gradients of a run, and when its graph holds their bytes by itself.

    `shift` are the steps that a step of the region is further on in the step's problem.
    """
    region = visit.region
    by_name = {storage.name: storage for storage in region.problem.storages}
    for transfer in (each for each in region.transfers if each.kind is not TransferKind.SWAP):
        storage = by_name[transfer.name]
        if (storage.birth >= region.problem.boundary) != visit.backward:
            continue
        first = storage.birth if transfer.back is None else transfer.prefetch_at
        last = storage.death if transfer.out is None else transfer.freed_at
        key = SwapKey(visit.index, visit.call, storage.name)
        name = parameters.names.get(key._replace(label=storage.parameter))
        tier = storage.tier  # calls that share their code may read others' in other places
        if name is not None and storage.kind is Kind.FETCHED:
            tier = Tier.NVME if name in parameters.on_disk else Tier.HOST
        moved = replace(
            storage,
            name=str(key),
            birth=Step(storage.birth + shift),
            death=Step(storage.death + shift),
            uses=tuple(Step(use + shift) for use in storage.uses),
            ready=Step(0 if transfer.back is None else first + shift),
            parameter=name or str(key._replace(label=storage.parameter)),
            tier=tier,
        )
        yield key, moved, (range(first + shift, last + shift),)


def align(joined: StepProblem, plan: Plan) -> Plan:
    """Return `plan` with every copy back issued, and all bytes freed, at a point where the graphs can do so.

    A copy back begins at the point before, if memory allows that, and else at the one behind, or at its own op. Bytes
    are freed at the point behind, if memory allows that, and else at the one before. Swaps to disk are left alone,
    whose order keeps staging buffers from running out. The forecast is that of what will run. O(transfers x steps).
    """
    problem, steps = joined.problem, [step for step, _ in joined.points]
    limit, places = problem.budgets.device_bytes, frozenset(steps)
    live = live_bytes(problem, plan.transfers)

    def hold(transfer: Transfer, begin: Step, end: Step) -> bool:
        """Count the bytes of a transfer for some more steps, if there is room for them."""
        if limit is not None and bool((live[begin:end] + transfer.nbytes > limit).any()):
            return False
        live[begin:end] += transfer.nbytes
        return True

    transfers: list[Transfer] = []
    for transfer in plan.transfers:
        moved = transfer
        if transfer.out is not None and transfer.tier is Tier.HOST:
            before = steps[max(bisect_right(steps, transfer.freed_at) - 1, joined.releases[joined.keys[transfer.name]])]
            moved = transfer.leaving(freed_at=min(before, transfer.freed_at))
            live[moved.freed_at : transfer.freed_at] -= transfer.nbytes
        transfers.append(moved)
    returning = [
        (transfer.needed_at, place)
        for place, transfer in enumerate(transfers)
        if transfer.back is not None and (transfer.tier is Tier.HOST or transfer.kind is TransferKind.LOAD)
    ]
    for _, place in sorted(returning):
        transfer = transfers[place]
        first = transfer.freed_at if transfer.out is not None else Step(0)
        if transfer.needed_at >= problem.boundary:
            first = max(first, problem.boundary)
        at = steps[max(0, bisect_right(steps, transfer.prefetch_at) - 1)]
        if not (first <= at <= transfer.prefetch_at and hold(transfer, at, transfer.prefetch_at)):
            own = joined.prefetches[joined.keys[transfer.name]]
            at = min(steps[min(bisect_left(steps, transfer.prefetch_at), own)], transfer.needed_at)
            live[transfer.prefetch_at : at] -= transfer.nbytes
        transfers[place] = transfer.prefetched(at)
    for place, (transfer, planned) in enumerate(zip(transfers, plan.transfers, strict=True)):
        if transfer.out is None or transfer.freed_at == planned.freed_at:
            continue
        behind = steps[min(bisect_left(steps, planned.freed_at), len(steps) - 1)]
        if transfer.back is not None:
            last = transfer.prefetch_at if transfer.copy_out_after >= problem.boundary else problem.boundary
            behind = min(behind, last, transfer.prefetch_at)
        if behind in places and behind > transfer.freed_at and hold(transfer, transfer.freed_at, behind):
            transfers[place] = transfer.leaving(freed_at=behind)
    aligned = build_plan(problem, plan.policy, transfers, plan.forecast.floor_bytes)
    if over_tiers(problem, aligned.forecast) > over_tiers(problem, plan.forecast):  # more is away at once
        return plan
    return aligned.with_decisions_of(plan)


def to_schedule(joined: StepProblem, plan: Plan) -> StepSchedule:
    """Return the schedule of a step's plan: bytes are freed no later, and come back no sooner, than the plan says.

    Of points at one step, bytes are freed at the first that can, and come back at the last: kernels may run in between.
    """
    steps = [step for step, _ in joined.points]  # they never fall: a graph ends where the time behind it begins
    away: dict[SwapKey, Tier] = {}
    one_way = {joined.keys[each.name] for each in plan.transfers if each.kind is not TransferKind.SWAP}
    frees: dict[Point, list[SwapKey]] = {}
    prefetches: dict[Point, list[SwapKey]] = {}
    for transfer in plan.transfers:
        key = joined.keys[transfer.name]
        if transfer.kind is TransferKind.SWAP:
            away[key] = transfer.tier
        if transfer.out is not None:
            last = bisect_right(steps, transfer.freed_at) - 1
            if (freed := bisect_left(steps, steps[last])) > joined.releases[key]:
                frees.setdefault(joined.points[freed][1], []).append(key)
        if transfer.back is not None:
            first = bisect_left(steps, transfer.prefetch_at)
            if (asked := bisect_right(steps, steps[first]) - 1) < joined.prefetches[key]:
                prefetches.setdefault(joined.points[asked][1], []).append(key)
    return StepSchedule(
        kept=frozenset(joined.keys.values()) - away.keys() - one_way,
        away=MappingProxyType(away),
        deferred=frozenset(key for keys in frees.values() for key in keys),
        frees=MappingProxyType({point: tuple(keys) for point, keys in frees.items()}),
        prefetches=MappingProxyType({point: tuple(keys) for point, keys in prefetches.items()}),
    )
