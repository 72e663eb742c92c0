"""A planned step on the axis of time: what the device holds, what runs, which copies are under way. No torch here.

All times are the simulator's, all bytes those that the plan checker counts: nothing is modelled here but the updates on
the host, which no plan has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

import numpy as np

from tencache_fx.planning.collectives import paced_ns
from tencache_fx.planning.liveness import Profile, device_changes, live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Kind, Problem, Step, Storage, Tier
from tencache_fx.planning.simulator import Replay, TransferTimes, simulate
from tencache_fx.records import RegionRecord, StepRecord
from tencache_fx.reporting.whereabouts import Whereabouts
from tencache_fx.units import format_bytes, format_ns


class Held(StrEnum):
    """What bytes on the device are there for, from the bottom of the picture to its top."""

    EXTERNAL = "external"
    OPTIMIZER = "optimizer state"
    PARAMETERS = "parameters"
    ENDS = "inputs and results"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed"
    SCRATCH = "within ops"


class Lane(StrEnum):
    """What can be busy, from the top of the picture to its bottom."""

    GRAPH = "graphs"
    COMPUTE = "compute"
    COLLECTIVE = "collectives"
    OUT = "copies out"
    IN = "copies in"
    WRITE = "disk writes"
    READ = "disk reads"
    UPDATE = "host updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A lane is busy from `start_ns` to `end_ns`; `storage` is what is copied, `sort` what a bar of compute is.

    That is "op", "recompute", or "stall", when compute stands still.
    """

    lane: Lane
    name: str
    start_ns: int
    end_ns: int
    note: str = ""
    storage: str = ""
    sort: str = ""

    @property
    def duration_ns(self) -> int:
        """How long it takes."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bytes over time: `nbytes[k]` from `times_ns[k]` on."""

    times_ns: tuple[int, ...]
    nbytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of all."""
        return max(self.nbytes, default=0)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A region's plan, or a step's, replayed.

    `held` has for each class the device bytes of each op, which begins at `replay.starts_ns`; `plain` is what the
    device would hold if nothing were offloaded or recomputed by the plan, over the time of a device without limits.
    """

    problem: Problem
    plan: Plan
    replay: Replay
    held: Mapping[Held, Profile]
    plain: Curve
    bars: tuple[Bar, ...]
    host: Curve
    disk: Curve

    @property
    def total_bytes(self) -> Profile:
        """The device bytes of each op."""
        return _total(self.held)

    def lane(self, lane: Lane) -> list[Bar]:
        """Return the bars of a lane by their start."""
        return sorted((bar for bar in self.bars if bar.lane is lane), key=lambda bar: (bar.start_ns, bar.end_ns))


def region_timeline(record: RegionRecord) -> Timeline:
    """Return the timeline of a region that is planned by itself."""
    problem, plan = record.problem, record.plan
    state = {s.parameter: s.state_bytes for s in record.captured.storages if s.kind is Kind.STORED}
    optimizer_bytes = sum(state.get(parameter, 0) for parameter in plan.updated_here)
    gradients = {s.parameter: s.nbytes for s in record.captured.storages if s.kind is Kind.STORED}
    summed = {*plan.updated_here, *plan.summed_here} if problem.accumulation > 1 else ()
    sums = np.full(len(problem.ops), sum(gradients.get(parameter, 0) for parameter in summed), dtype=np.int64)
    external = np.full(len(problem.ops), problem.external_bytes - optimizer_bytes, dtype=np.int64) - sums
    if problem.boundary_excess_bytes:
        external[problem.boundary] += problem.boundary_excess_bytes
    scratch = np.array([op.scratch_bytes for op in problem.ops], dtype=np.int64)
    graphs = [("forward", Step(0), problem.boundary), ("backward", problem.boundary, Step(len(problem.ops)))]
    where = Whereabouts.of_region(record)
    base = {Held.EXTERNAL: external, Held.SCRATCH: scratch, Held.GRADIENTS: sums}
    return _timeline(problem, plan, record.captured, base, optimizer_bytes, graphs, where)


def step_timeline(record: StepRecord, regions: Mapping[int, RegionRecord]) -> Timeline:
    """Return the timeline of a step of several regions; `regions` has the records of those that are known."""
    problem = record.problem
    external = np.zeros(len(problem.ops), dtype=np.int64)
    scratch = np.array([op.scratch_bytes for op in problem.ops], dtype=np.int64)
    for run in record.runs:  # what was held when it began is counted for each of its steps
        external[run.begin - 1] = max(run.held_bytes, run.gap_bytes)
        external[run.begin : run.end] = run.held_bytes
    external = np.minimum(external, scratch)
    graphs = [(str(run), run.begin, run.end) for run in record.runs]
    base = {Held.EXTERNAL: external, Held.SCRATCH: scratch - external}
    where = Whereabouts.of_step(record, regions)
    # Nothing else is beside a step's problem than the state of parameters that stay.
    return _timeline(problem, record.plan, problem, base, problem.external_bytes, graphs, where)


def _timeline(
    problem: Problem,
    plan: Plan,
    captured: Problem,
    base: Mapping[Held, Profile],
    optimizer_bytes: int,
    graphs: Sequence[tuple[str, Step, Step]],
    where: Whereabouts,
) -> Timeline:
    replay = simulate(problem, plan.transfers, plan.staging)
    held = _held(problem, plan)
    for each, nbytes in base.items():
        held[each] = held[each] + nbytes
    held[Held.OPTIMIZER] = held[Held.OPTIMIZER] + optimizer_bytes
    times = {transfer.name: transfer for transfer in replay.transfers}
    notes = dict(_notes(problem, plan, held, where))
    bars = (
        *_graph_bars(replay, graphs),
        *_compute_bars(problem, plan, replay, where),
        *_collective_bars(problem, replay),
        *(bar for each in replay.transfers for bar in _copy_bars(each, notes[each.name])),
        *_update_bars(problem, replay),
    )
    return Timeline(
        problem=problem,
        plan=plan,
        replay=replay,
        held=held,
        plain=Curve(
            times_ns=tuple(accumulate(paced_ns(captured)[:-1], initial=0)) if captured.ops else (),
            nbytes=tuple(live_bytes(_all_on_device(captured)).tolist()),
        ),
        bars=bars,
        host=_curve(_spans_in_host(plan, times)),
        disk=_curve(
            (t.write_start_ns, t.read_end_ns, transfer.nbytes)
            for transfer in plan.transfers
            if transfer.tier is Tier.NVME and transfer.out is not None  # parameters are there all the time
            for t in (times[transfer.name],)
        ),
    )


def _all_on_device(captured: Problem) -> Problem:
    """Return the problem of a device that has all offloaded parameters, their gradients and their state, too."""
    offloaded = {storage.parameter for storage in captured.storages if storage.kind in (Kind.FETCHED, Kind.STORED)}
    return keep_resident(replace(captured, copies_parameters=False), offloaded, offloaded)


_CLASSES = {
    Kind.PARAMETER: Held.PARAMETERS,
    Kind.FETCHED: Held.PARAMETERS,
    Kind.INPUT: Held.ENDS,
    Kind.OUTPUT: Held.ENDS,
    Kind.GRADIENT: Held.GRADIENTS,
    Kind.STORED: Held.GRADIENTS,
}


def _held(problem: Problem, plan: Plan) -> dict[Held, Profile]:
    """Return the bytes of storages by class at each step, under the plan's transfers."""
    count = len(problem.ops)
    deltas = {each: np.zeros(count + 1, dtype=np.int64) for each in Held}
    transfers = {transfer.name: transfer for transfer in plan.transfers}
    for storage in problem.storages:
        delta = deltas[_class_of(storage)]
        delta[storage.birth] += storage.nbytes
        delta[storage.death] -= storage.nbytes
        if (transfer := transfers.get(storage.name)) is not None:
            for step, sign in device_changes(transfer, storage):
                delta[step] += sign * storage.nbytes
    return {each: np.cumsum(delta[:-1], dtype=np.int64) for each, delta in deltas.items()}


def _total(held: Mapping[Held, Profile]) -> Profile:
    total: Profile = np.sum(list(held.values()), axis=0, dtype=np.int64)
    return total


def _class_of(storage: Storage) -> Held:
    """Return the class of a storage; the name of one that is made again ends in a mark (`planning/recompute.py`)."""
    if storage.kind is not Kind.ACTIVATION:
        return _CLASSES[storage.kind]
    if storage.parameter:  # a copy of one that stays
        return Held.PARAMETERS
    return Held.RECOMPUTED if "#" in storage.name else Held.ACTIVATIONS


def _graph_bars(replay: Replay, graphs: Sequence[tuple[str, Step, Step]]) -> Iterator[Bar]:
    ends = (*replay.starts_ns, replay.makespan_ns)
    for name, begin, end in graphs:
        if begin < end:
            yield Bar(lane=Lane.GRAPH, name=name, start_ns=ends[begin], end_ns=ends[end])


def _compute_bars(problem: Problem, plan: Plan, replay: Replay, where: Whereabouts) -> Iterator[Bar]:
    """Yield the ops that take time, and before them the waits, with what is waited for."""
    waited: dict[Step, list[str]] = {}
    for transfer, times in zip(plan.transfers, replay.transfers, strict=True):
        if transfer.out is not None and times.stall_out_ns:
            for at in {Step(transfer.out.after + 1), transfer.out.freed_at}:
                waited.setdefault(at, []).append(transfer.name)
        if transfer.back is not None and times.stall_in_ns:
            waited.setdefault(transfer.back.needed_at, []).append(transfer.name)
    for collective, seen in zip(problem.collectives, replay.collectives, strict=True):
        if seen.stall_ns:
            waited.setdefault(collective.needed_at, []).append(collective.name)
    now = 0
    ends = (*replay.starts_ns, replay.makespan_ns)
    for step, start in enumerate(ends):
        if start > now + 1:  # times are rounded
            names = ", ".join(waited.get(Step(step), ())) or "a copy"
            yield Bar(
                lane=Lane.COMPUTE, name="stall", start_ns=now, end_ns=start, note=f"waits for {names}", sort="stall"
            )
        if step == len(problem.ops):
            return
        op = problem.ops[step]
        now = start + op.duration_ns
        if op.duration_ns:
            yield Bar(
                lane=Lane.COMPUTE,
                name=op.name,
                start_ns=start,
                end_ns=now,
                note=where.op(Step(step)),
                sort="recompute" if Step(step) in where.again else "op",
            )


def _collective_bars(problem: Problem, replay: Replay) -> Iterator[Bar]:
    for each, times in zip(problem.collectives, replay.collectives, strict=True):
        if times.end_ns > times.start_ns:
            note = f"{each.kind} of {format_bytes(each.nbytes)} over {each.ranks} ranks"
            if times.stall_ns:
                note += f"; compute waits {format_ns(times.stall_ns)} for it"
            yield Bar(lane=Lane.COLLECTIVE, name=each.name, start_ns=times.start_ns, end_ns=times.end_ns, note=note)


def _copy_bars(times: TransferTimes, note: str) -> Iterator[Bar]:
    """Yield the copies of a transfer that took place: each takes some time."""
    spans = [
        (Lane.OUT, times.out_start_ns, times.out_end_ns),
        (Lane.IN, times.in_start_ns, times.in_end_ns),
    ]
    if times.tier is Tier.NVME:
        spans += [
            (Lane.WRITE, times.write_start_ns, times.written_ns),
            (Lane.READ, times.read_start_ns, times.read_end_ns),
        ]
    for lane, start, end in spans:
        if end > start:
            yield Bar(lane=lane, name=times.name, start_ns=start, end_ns=end, note=note, storage=times.name)


def _update_bars(problem: Problem, replay: Replay) -> Iterator[Bar]:
    """Yield an update for each offloaded gradient, as soon as it is in host memory, at the rate of that memory.

    Where updates begin after the last backward, they are those of the step before, in the order in which this one reads
    their parameters.

    The bytes are those that planning counts for a step (`planning/parameter_schedule.py: step_ns`).
    """
    rate = problem.links.host_bytes_per_s
    stored = {storage.name: storage for storage in problem.storages if storage.kind is Kind.STORED}
    if not rate:
        return
    landed = {stored[t.name].parameter: t.out_end_ns for t in replay.transfers if t.name in stored}  # the last one
    nbytes: dict[str, int] = {}
    state: dict[str, int] = {}
    for storage in stored.values():
        nbytes[storage.parameter] = nbytes.get(storage.parameter, 0) + 2 * storage.nbytes
        state[storage.parameter] = storage.state_traffic_bytes
    if not problem.updates_in_backward:
        read = sorted((s.birth, s.parameter) for s in problem.storages if s.parameter in landed)
        landed = {parameter: 0 for _, parameter in read}
    free = 0
    for parameter, at in sorted(landed.items(), key=lambda item: item[1]):
        moved = nbytes[parameter] + state[parameter]
        start = max(free, at)
        free = start + moved * 10**9 // rate
        note = f"{format_bytes(moved)} of host memory read and written"
        yield Bar(lane=Lane.UPDATE, name=parameter, start_ns=start, end_ns=free, note=note)


def _notes(problem: Problem, plan: Plan, held: Mapping[Held, Profile], where: Whereabouts) -> Iterator[tuple[str, str]]:
    """Yield for each transfer its storage's name, and where that is from, and why it leaves."""
    total = _total(held)
    storages = {storage.name: storage for storage in problem.storages}
    for transfer in plan.transfers:
        storage = storages[transfer.name]
        head = f"{storage.kind}, {format_bytes(storage.nbytes)}{where.storage(storage)}"
        yield transfer.name, f"{head}<br>{_reason(problem, plan, storage, total)}"


def _reason(problem: Problem, plan: Plan, storage: Storage, total: Profile) -> str:
    if storage.kind is Kind.FETCHED:
        place = "on disk" if storage.tier is Tier.NVME else "in host memory"
        return f"parameter {storage.parameter} is {place}; first read by {_op(problem, storage.birth)}"
    if storage.kind is Kind.STORED:
        return f"gradient of {storage.parameter}, which is updated where its state is"
    transfer = next(each for each in plan.transfers if each.name == storage.name)
    assert transfer.out is not None
    assert transfer.back is not None
    away = slice(transfer.out.freed_at, transfer.back.prefetch_at)
    reason = f"next read by {_op(problem, transfer.back.needed_at)}"
    limit = problem.budgets.device_bytes
    if limit is None or away.start >= away.stop:
        return reason
    fullest = away.start + int(total[away].argmax())
    over = int(total[fullest]) + storage.nbytes - limit
    if over <= 0:
        return reason
    return f"{reason}; if it stayed, {_op(problem, Step(fullest))} would be {format_bytes(over)} over the budget"


def _op(problem: Problem, step: Step) -> str:
    return f"op {step} {problem.ops[step].name}" if step < len(problem.ops) else "the end"


def _spans_in_host(plan: Plan, times: Mapping[str, TransferTimes]) -> Iterator[tuple[int, int, int]]:
    """Yield when swaps have bytes in host memory: those to disk while they are copied, written and read."""
    for transfer in plan.transfers:
        each = times[transfer.name]
        if transfer.out is None or transfer.back is None:
            continue  # buffers of their own, all the time
        if transfer.tier is Tier.NVME:
            yield each.out_start_ns, each.written_ns, transfer.nbytes
            yield each.read_start_ns, each.in_end_ns, transfer.nbytes
        else:
            yield each.out_start_ns, each.in_end_ns, transfer.nbytes


def _curve(spans: Iterator[tuple[int, int, int]]) -> Curve:
    """Return how many bytes there are over time, of spans `(from, until, nbytes)`."""
    changes: dict[int, int] = {0: 0}
    for start, stop, nbytes in spans:
        changes[start] = changes.get(start, 0) + nbytes
        changes[stop] = changes.get(stop, 0) - nbytes
    times = sorted(changes)
    return Curve(times_ns=tuple(times), nbytes=tuple(accumulate(changes[time] for time in times)))
