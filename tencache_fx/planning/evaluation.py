"""A candidate, one answer to every question of the search, and its evaluation: planned and simulated once."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tencache_fx.errors import BudgetError
from tencache_fx.planning.collectives import ideal_ns
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import has_offloaded, keep_resident, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes, plan_transfers
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.tuning import TUNING, Tuning

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is decided about a region before its transfers are chosen.

    `recomputed` are storages by name, sorted; `resident` the offloaded parameters pinned on the device, of which
    gradients and optimizer state of those in `updated_here` are there as well, and only gradients of those in
    `summed_here`. The other parameters are prefetched up to `lead` copy times before the latest safe start. Of the
    device budget `reserved_bytes` are left to others. Then `policy` chooses the transfers; "joint" is several variants,
    and the fastest is taken.
    """

    policy: str
    recomputed: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    updated_here: tuple[str, ...] = ()
    summed_here: tuple[str, ...] = ()
    reserved_bytes: int = 0
    lead: float = 0.0

    def recomputing(self, names: Iterable[str]) -> "Candidate":
        """Return the same candidate with the storages `names` recomputed."""
        return replace(self, recomputed=tuple(sorted(names)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a plan costs: the time of a whole step, that of the device alone, and the bytes copied over the links."""

    step_ns: int
    makespan_ns: int
    copied_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a candidate comes to: a plan and its costs, or the refusal that says what does not fit."""

    plan: Plan | None = None
    costs: Costs | None = None
    refusal: BudgetError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What no plan for a choice can beat, whatever the budget: its time, and the peak without transfers."""

    peak_bytes: int
    busy_ns: int


class Evaluator:
    """Plans the candidates for one captured region, each once, and counts what that has cost.

    `spent_looks` is the search's clock: a plan is `Tuning.looks_per_plan` looks, whatever machine it runs on, so that
    the same problem always gets the same plan.
    """

    def __init__(self, captured: Problem, tuning: Tuning = TUNING) -> None:
        self.captured, self.tuning = captured, tuning
        self.spent_looks = 0
        self._outcomes: dict[Candidate, Outcome] = {}
        self._limits: dict[Candidate, Limits] = {}
        self._floors: dict[Candidate, int] = {}
        kept = max(4, tuning.steps_kept // max(1, len(captured.ops)))  # not all: problems are large
        recomputed = lru_cache(maxsize=kept)(partial(recompute, captured))

        @lru_cache(maxsize=2)  # the limits, the floor and the plan of one candidate are asked for in a row
        def pinned(names: Names, *choice: Names) -> Problem:
            return keep_resident(recomputed(names), *choice)

        self._pinned = pinned

    def problem_for(self, candidate: Candidate) -> Problem:
        """Return the problem that is left when all that `candidate` decides is decided."""
        choice = candidate.resident, candidate.updated_here, candidate.summed_here
        problem = self._pinned(candidate.recomputed, *choice)
        return problem.with_less(candidate.reserved_bytes)

    def limits(self, candidate: Candidate) -> Limits:
        """Return what no plan for what `candidate` recomputes and pins can beat."""
        key = replace(candidate, policy="", reserved_bytes=0, lead=0.0)
        if key not in self._limits:
            problem = self.problem_for(key)
            self._limits[key] = Limits(
                peak_bytes=int(live_bytes(problem).max(initial=problem.external_bytes)),
                busy_ns=ideal_ns(problem),
            )
        return self._limits[key]

    def floor_bytes(self, candidate: Candidate) -> int:
        """Return the floor of what `candidate` recomputes and pins."""
        key = replace(candidate, policy="", reserved_bytes=0, lead=0.0)
        if key not in self._floors:
            self._floors[key] = floor_bytes(self.problem_for(key))
        return self._floors[key]

    def evaluate(self, candidate: Candidate) -> Outcome:
        """Return the plan for `candidate` and its costs, or why there is none. Known candidates cost nothing."""
        if candidate not in self._outcomes:
            self.spent_looks += self.tuning.looks_per_plan
            self._outcomes[candidate] = self._plan(candidate)
        return self._outcomes[candidate]

    def _plan(self, candidate: Candidate) -> Outcome:
        problem, known = self.problem_for(candidate), None
        if candidate.policy == "joint" and (before := self._outcomes.get(replace(candidate, policy="teraio"))):
            known = before.plan
        try:
            plan = plan_transfers(problem, candidate.policy, candidate.lead, known)
        except BudgetError as refusal:
            return Outcome(refusal=refusal.with_traceback(None))  # its frames hold the problem
        forecast = plan.forecast
        return Outcome(
            plan=replace(
                plan,
                recomputed=candidate.recomputed,
                resident=candidate.resident,
                updated_here=candidate.updated_here,
                summed_here=candidate.summed_here,
            ),
            costs=Costs(
                step_ns=step_ns(problem, forecast),
                makespan_ns=forecast.makespan_ns,
                copied_bytes=forecast.d2h_bytes + forecast.h2d_bytes,
            ),
        )

    def stated(self, candidate: Candidate) -> tuple[Problem, Plan]:
        """Return the plan for `candidate` and the problem that it is for; raises the `BudgetError` if there is none."""
        outcome = self.evaluate(candidate)
        if outcome.refusal is not None:
            raise outcome.refusal
        assert outcome.plan is not None
        problem, plan = self.problem_for(candidate), outcome.plan
        if has_offloaded(self.captured):  # only then left open: it takes as long to find as all the rest
            plan = replace(plan, forecast=replace(plan.forecast, floor_bytes=floor_bytes(problem)))
        return problem, plan
