"""What the first steps teach: how long the forward and the backward really take, against what was forecast. No torch.

A plan is as good as its durations (design: costs). Once some steps have been measured, each graph's ops are taken to be
off by one factor, the one with which the replay of the plan takes as long as was measured. What a new plan would gain
is then known before anything is compiled.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tencache_fx.errors import BudgetError
from tencache_fx.planning.parameter_schedule import host_memory_ns, step_ns
from tencache_fx.planning.plan import Plan, PoolClass, Transfer
from tencache_fx.planning.planner import build_plan
from tencache_fx.planning.problem import Budgets, Op, Problem, Step
from tencache_fx.planning.search import plan_region
from tencache_fx.planning.simulator import simulate

_LEAST, _MOST = 0.2, 5.0  # what one look corrects: a forecast further off takes several runs of a program to correct
_MOST_EVER = 1e6  # what several runs have corrected
_HALVINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """How long the forward and the backward graph of a region take, in ns."""

    forward_ns: int
    backward_ns: int

    @property
    def total_ns(self) -> int:
        """Both."""
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """By what the durations of the forward's and the backward's ops are to be multiplied."""

    forward: float = 1.0
    backward: float = 1.0

    def check(self) -> None:
        """Raise `ValueError` for scales that nothing was measured to be off by."""
        for factor in (self.forward, self.backward):
            if not 1 / _MOST_EVER <= factor <= _MOST_EVER:
                raise ValueError(f"a factor is {factor}; none is below {1 / _MOST_EVER} or above {_MOST_EVER}.")

    def scale(self, ops: Sequence[Op], boundary: Step) -> tuple[Op, ...]:
        """Return `ops`, those from `boundary` on the backward's, with their durations scaled."""
        return tuple(
            dataclasses.replace(
                op, duration_ns=round(op.duration_ns * (self.forward if k < boundary else self.backward))
            )
            for k, op in enumerate(ops)
        )

    def apply(self, problem: Problem) -> Problem:
        """Return `problem` with its durations scaled."""
        return dataclasses.replace(
            problem,
            ops=self.scale(problem.ops, problem.boundary),
            recompute_ns=round(problem.recompute_ns * self.backward),
        )

    def off_by(self, share: float) -> bool:
        """Whether a forecast was off by more than `share`, in either direction."""
        return any(abs(math.log(factor)) > math.log1p(share) for factor in (self.forward, self.backward))

    @property
    def are_bounds(self) -> bool:
        """Whether a forecast may be further off than these say: they are the most that one look corrects."""
        return self.off_by(_MOST * 0.99 - 1)

    def after(self, earlier: "Scales") -> "Scales":
        """Return the scales of both, one after the other."""
        return Scales(forward=self.forward * earlier.forward, backward=self.backward * earlier.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCorrection:
    """What is kept of a region between processes: the scales to plan with, and beyond these, those to forecast with.

    The second differ from 1 where planning with them, too, gives no faster plan.
    """

    planning: Scales = Scales()
    forecast: Scales = Scales()


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What the first steps taught: the `scales` that explain their times, and whether planning anew with them pays."""

    scales: Scales
    pays: bool


def reconsider(captured: Problem, problem: Problem, plan: Plan, measured: PhaseTimes) -> Correction | None:
    """Return what is learned from `measured`, or None if the forecast was good: off by a fiftieth or less.

    `captured` is the region before more was recomputed, `problem` the one that `plan` is for. Planning anew pays if the
    forecast was off by more than a tenth, and the new plan is faster by more than a thirtieth on the corrected
    durations. Raises `BudgetError` if, close to the floor, the search on the corrected durations finds no plan.
    """
    scales = fit_scales(problem, plan.transfers, plan.staging, measured)
    if not scales.off_by(0.02):
        return None
    if not scales.off_by(0.1):
        return Correction(scales=scales, pays=False)
    staying_ns = simulate(scales.apply(problem), plan.transfers, plan.staging).makespan_ns
    _, better = plan_region(scales.apply(captured), plan.policy)
    return Correction(scales=scales, pays=better.forecast.makespan_ns * 30 < staying_ns * 29)


def pays_accumulated(captured: Problem, problem: Problem, plan: Plan, accumulation: int) -> bool:
    """Return whether a plan made for so many backwards before an update is faster by more than a thirtieth.

    `captured` and `problem` are as for `reconsider`; they may have been stated for another number.
    """
    if not host_memory_ns(captured, 0):  # nothing is updated in host memory, or how fast that is is not known
        return False
    staying_ns = step_ns(dataclasses.replace(problem, accumulation=accumulation), plan.forecast)
    try:
        better = plan_region(dataclasses.replace(captured, accumulation=accumulation), plan.policy)
    except BudgetError:
        return False
    return step_ns(better[0], better[1].forecast) * 30 < staying_ns * 29


def pays_within(budgets: Budgets, captured: Problem, problem: Problem, plan: Plan) -> bool:
    """Return whether a plan made for other `budgets` is faster by more than a thirtieth.

    `captured` and `problem` are as for `reconsider`.
    """
    try:
        better = plan_region(dataclasses.replace(captured, budgets=budgets), plan.policy)
    except BudgetError:
        return False
    return step_ns(better[0], better[1].forecast) * 30 < step_ns(problem, plan.forecast) * 29


def correct(captured: Problem, problem: Problem, plan: Plan, scales: Scales) -> dict[str, Any]:
    """Return all three, by these names, with durations scaled: the same transfers, forecast anew."""
    scaled = scales.apply(problem)
    again = build_plan(scaled, plan.policy, plan.transfers).with_decisions_of(plan)
    return {"captured": scales.apply(captured), "problem": scaled, "plan": again}


def forecast_phases(problem: Problem, transfers: Sequence[Transfer], staging: Sequence[PoolClass]) -> PhaseTimes:
    """Return how long each graph takes in the replay of a plan, its stalls included."""
    replay = simulate(problem, transfers, staging)
    starts = (*replay.starts_ns, replay.makespan_ns)
    forward_ns = starts[problem.boundary]
    return PhaseTimes(forward_ns=forward_ns, backward_ns=replay.makespan_ns - forward_ns)


def fit_scales(
    problem: Problem, transfers: Sequence[Transfer], staging: Sequence[PoolClass], measured: PhaseTimes
) -> Scales:
    """Return the scales with which the plan's replay takes as long as was measured, forward first.

    A graph that waits for copies throughout takes as long whatever its ops do: its factor is then the smallest that
    explains the time. Bisection: 24 replays.
    """

    def forward_ns(factor: float) -> int:
        return forecast_phases(Scales(forward=factor).apply(problem), transfers, staging).forward_ns

    forward = _solve(forward_ns, measured.forward_ns)
    if problem.boundary == len(problem.ops):  # inference: there is nothing to learn of a backward
        return Scales(forward=forward)

    def backward_ns(factor: float) -> int:
        scaled = Scales(forward=forward, backward=factor).apply(problem)
        return forecast_phases(scaled, transfers, staging).backward_ns

    return Scales(forward=forward, backward=_solve(backward_ns, measured.backward_ns))


def _solve(time_ns: Callable[[float], int], wanted_ns: int) -> float:
    """Return the least factor with which `time_ns`, which never falls as it grows, reaches `wanted_ns`."""
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if time_ns(middle) >= wanted_ns:
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)
