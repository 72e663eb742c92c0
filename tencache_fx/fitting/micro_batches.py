"""Which micro-batch, accumulated how often, takes a step's samples through the device fastest. No torch here.

A problem is captured at two micro-batches; in between, and beyond, bytes and times grow evenly. Each setting gets a
quick estimate of its step; those that promise most are planned, until none is left that promises to be faster.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tencache_fx.errors import BudgetError
from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.host_work import HostWork
from tencache_fx.planning.parameter_schedule import host_memory_ns, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Kind, Op, Problem, Storage
from tencache_fx.planning.search import policy_floor_bytes
from tencache_fx.region.kept_plans import kept_region_plan
from tencache_fx.reporting.fit_report import Setting
from tencache_fx.serialization import MOST

_MOST_SETTINGS = 8
_MOST_PLANS = 3
_CLOSE = 1.1  # estimates count no stalls, of which smaller micro-batches have more


Planned = tuple[Problem, Plan] | BudgetError


class Planner(Protocol):
    """Plans one problem at a time, while this process does something else."""

    def begin_plan(self, captured: Problem, policy: str) -> None:
        """Begin to plan as `plan_region` does."""

    def planned(self) -> Planned | None:
        """Wait for what comes of it; None if nothing does."""


class NotEvenError(ValueError):
    """A problem has other ops or storages at another micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The fastest setting with its plan, or the one that misses the budget least; and all that were looked at."""

    setting: Setting
    captured: Problem
    planned: tuple[Problem, Plan] | None
    settings: tuple[Setting, ...]


def divisors(samples: int) -> list[int]:
    """Return micro-batches that make up `samples`, from the smallest, at most eight of them.

    >>> divisors(32), divisors(7)
    ([1, 2, 4, 8, 16, 32], [1, 7])
    """
    found = [each for each in range(1, samples + 1) if samples % each == 0]
    if len(found) <= _MOST_SETTINGS:
        return found
    last = len(found) - 1
    return [found[round(index * last / (_MOST_SETTINGS - 1))] for index in range(_MOST_SETTINGS)]


def between(low: Problem, high: Problem, micro_batches: tuple[int, int], wanted: int) -> Problem:
    """Return the problem at another micro-batch than the two that `low` and `high` are for.

    Raises `NotEvenError` if they differ in more than bytes and times.
    """
    first, second = micro_batches
    if wanted in micro_batches or first == second:
        return low if wanted == first else high

    def at(a: int, b: int) -> int:
        return max(0, a + (b - a) * (wanted - first) // (second - first)) if a != b else a

    def op(a: Op, b: Op) -> Op:
        duration_ns, scratch_bytes = at(a.duration_ns, b.duration_ns), at(a.scratch_bytes, b.scratch_bytes)
        return Op(name=a.name, duration_ns=duration_ns, scratch_bytes=scratch_bytes)

    def storage(a: Storage, b: Storage) -> Storage:
        return a if a.nbytes == b.nbytes else replace(a, nbytes=at(a.nbytes, b.nbytes))

    if not _is_alike(low, high):
        raise NotEvenError("the ops at one micro-batch are not those at another.")
    return replace(
        low,
        ops=tuple(map(op, low.ops, high.ops)),
        storages=tuple(map(storage, low.storages, high.storages)),
        external_bytes=at(low.external_bytes, high.external_bytes),
        collectives=tuple(
            replace(a, nbytes=at(a.nbytes, b.nbytes)) for a, b in zip(low.collectives, high.collectives, strict=True)
        ),
    )


def _is_alike(low: Problem, high: Problem) -> bool:
    if [op.name for op in low.ops] != [op.name for op in high.ops] or len(low.storages) != len(high.storages):
        return False
    pairs = zip(low.storages, high.storages, strict=True)
    if [c.name for c in low.collectives] != [c.name for c in high.collectives]:
        return False
    return low.recipes == high.recipes and all(replace(b, nbytes=a.nbytes) == a for a, b in pairs)


def find_setting(
    problems: Callable[[int], Problem],
    samples: int,
    tried: Sequence[int],
    policy: str,
    host: HostWork,
    other: Planner | None = None,
) -> Found:
    """Return the fastest way to take `samples` through, of these micro-batches.

    The largest one of those that promise about the fastest step is planned first, then, as long as there may be a
    faster one, a neighbour of the fastest so far, or else another. At most three are planned; the others' times are
    estimates. While one is planned, `other` plans what is likely to come next; what then does not is as if it had not
    been planned.
    """
    captured = {each: replace(problems(each), accumulation=samples // each) for each in tried}
    settings = {each: _estimated(problem, each, policy, host) for each, problem in captured.items()}
    hopeful = [each for each in tried if not settings[each].refusal]
    plans, planned = _Plans(captured, policy, other), dict[int, tuple[Problem, Plan]]()
    for left in reversed(range(_MOST_PLANS)):
        if (chosen := _next(hopeful, settings, planned)) is None:
            break
        if left and (likely := _likely_next(hopeful, settings, planned, chosen)) is not None:
            plans.prepare(chosen, likely)
        setting, made = settings[chosen], plans.find(chosen)
        if isinstance(made, BudgetError):
            settings[chosen] = replace(setting, refusal=str(made), step_ns=0)
            hopeful.remove(chosen)
            continue
        planned[chosen] = problem, plan = made
        took_ns = max(step_ns(problem, plan.forecast), host.load([(1, problem, plan)]).busy_ns)
        peak_bytes = plan.forecast.peak_bytes
        settings[chosen] = replace(setting, planned=True, step_ns=took_ns, peak_bytes=peak_bytes)
    if planned:
        best = min(planned, key=lambda each: settings[each].step_ns)
    else:
        best = min(settings, key=lambda each: settings[each].floor_bytes)
    return Found(
        setting=settings[best],
        captured=captured[best],
        planned=planned.get(best),
        settings=tuple(settings.values()),
    )


class _Plans:
    """The plans of settings, or why there are none: made here, or by another planner at the same time."""

    def __init__(self, captured: Mapping[int, Problem], policy: str, other: Planner | None) -> None:
        self._captured, self._policy, self._other = captured, policy, other
        self._elsewhere: int | None = None  # what the other one plans
        self._made: dict[int, Planned] = {}

    def prepare(self, chosen: int, likely: int) -> None:
        """Use the time until `chosen` is planned: have the other one plan `likely`, or plan that while it is busy."""
        if self._other is None or likely in self._made:
            return
        if self._elsewhere is None and chosen not in self._made:
            self._other.begin_plan(self._captured[likely], self._policy)
            self._elsewhere = likely
        elif self._elsewhere == chosen:
            self._made[likely] = self._plan_here(likely)

    def find(self, micro_batch: int) -> Planned:
        """Return the plan of a setting."""
        if micro_batch == self._elsewhere:
            assert self._other is not None
            self._elsewhere = None
            if (made := self._other.planned()) is not None:
                self._made[micro_batch] = made
        if micro_batch not in self._made:
            self._made[micro_batch] = self._plan_here(micro_batch)
        return self._made[micro_batch]

    def _plan_here(self, micro_batch: int) -> Planned:
        try:
            return kept_region_plan(self._captured[micro_batch], self._policy)
        except BudgetError as refusal:
            return refusal


def _next(hopeful: Sequence[int], settings: Mapping[int, Setting], planned: Collection[int]) -> int | None:
    """Return the micro-batch to plan next; None if none of the others may be faster than the fastest so far."""
    rest = [each for each in hopeful if each not in planned]
    if not rest:
        return None
    if not planned:
        least_ns = min(settings[each].step_ns for each in rest)
        return max(each for each in rest if settings[each].step_ns <= least_ns * _CLOSE)
    best = min(planned, key=lambda each: settings[each].step_ns)
    faster = [each for each in rest if settings[each].step_ns < settings[best].step_ns]
    near = [each for each in _near(hopeful, best) if each in faster]
    return min(near or faster, key=lambda each: settings[each].step_ns, default=None)


def _likely_next(
    hopeful: Sequence[int], settings: Mapping[int, Setting], planned: Collection[int], chosen: int
) -> int | None:
    """Return what `_next` does once `chosen` is planned, if that is no faster than what is; None if it may be none."""
    if planned:
        return _next(hopeful, {**settings, chosen: replace(settings[chosen], step_ns=MOST)}, {*planned, chosen})
    return min(_near(hopeful, chosen), key=lambda each: settings[each].step_ns, default=None)


def _near(hopeful: Sequence[int], micro_batch: int) -> list[int]:
    place = hopeful.index(micro_batch)
    return [each for each in hopeful[max(0, place - 1) : place + 2] if each != micro_batch]


def _estimated(captured: Problem, micro_batch: int, policy: str, host: HostWork) -> Setting:
    """Return a setting with about what its step takes: no less than its busiest resource, and without stalls.

    Of the room beside the least that the rest takes the most is expected: it saves copies in of as many bytes, and,
    where it has gradients and state as well, copies out and updates in host memory.
    """
    floor, accumulation = policy_floor_bytes(captured, policy), captured.accumulation
    limit = captured.budgets.device_bytes
    if limit is not None and floor > limit:
        needed = f"device_budget is below the least that has a plan, {floor:,} bytes."
        return Setting(micro_batch=micro_batch, accumulation=accumulation, floor_bytes=floor, refusal=needed)
    loads = [s for s in captured.storages if s.kind is Kind.FETCHED]
    weight_bytes = sum({s.parameter: s.nbytes for s in loads}.values())
    room_bytes = weight_bytes if limit is None else limit - floor
    streamed = 1 - min(1.0, room_bytes / max(1, weight_bytes))
    in_bytes = int(streamed * sum(s.nbytes for s in loads))
    stored = [s for s in captured.storages if s.kind is Kind.STORED]
    stored_bytes = sum(s.nbytes for s in stored)
    state_bytes = sum({s.parameter: s.state_bytes for s in stored}.values())
    updated = 1 - min(1.0, room_bytes / max(1, weight_bytes + stored_bytes + state_bytes))
    out_bytes = int(updated * stored_bytes)
    busy_ns = (
        accumulation * joint_lower_bound_ns(captured),
        accumulation * in_bytes * 1_000_000_000 // captured.links.h2d_bytes_per_s,
        accumulation * out_bytes * 1_000_000_000 // captured.links.d2h_bytes_per_s,
        int(updated * host_memory_ns(captured, in_bytes + out_bytes)),
        host.load([(1, captured, None)]).busy_ns,
    )
    return Setting(micro_batch=micro_batch, accumulation=accumulation, floor_bytes=floor, step_ns=max(busy_ns))
