"""The level of the search that chooses the parameters to pin on the device, and when the others are copied.

The choices are shares of all parameters by themselves, with gradients, and with gradients and optimizer state, and
leads of the copies of the others. A large problem is searched as a coarser one, whose best choices are then tried.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tencache_fx.errors import BudgetError
from tencache_fx.planning.coarsening import coarsen_within
from tencache_fx.planning.evaluation import Candidate, Costs, Evaluator
from tencache_fx.planning.parameter_schedule import first_parameters, least_bytes_beside_parameters, pinned_bytes
from tencache_fx.planning.plan import TransferKind
from tencache_fx.planning.planner import least_step_ns
from tencache_fx.planning.problem import Kind


class _Shares(NamedTuple):
    """The shares of parameters that are pinned, with state, or at least with their gradient; the others' lead."""

    resident: float
    updated_here: float
    lead: float
    with_gradient: float = 0.0


def choose_parameters(evaluator: Evaluator, base: Candidate, *, compare: bool = False) -> Candidate:
    """Return `base` with the fastest choice of the parameters to pin, and of the others' lead.

    First the leads, then shares of the parameters, by themselves or with their gradients and state; the latter beside
    as many by themselves as are best without state, and beside none. Where backwards add up gradients, shares with
    gradients follow, beside the best share with state, half of it, and none. Of those within half a percent of the
    fastest, the one that copies least: that leaves host memory to others. Its parameters are prefetched as early as
    costs no more than that. "joint" takes the variants of its policies only to the best of these. Raises `BudgetError`,
    that of the choice with the least on the device, if there is no plan.

    With `compare` the lead is left as it is. Of a large problem only those are tried that are best in a coarser one.
    """
    quick = "teraio" if base.policy == "joint" else base.policy
    coarsely = not compare and base.policy != "none" and len(evaluator.captured.ops) > evaluator.tuning.coarse_from
    tried = _Tried(evaluator, replace(base, policy=quick))
    if coarsely:
        tried.add(_likely_shares(evaluator, tried.base), enough=2)
        finalists = [tried.best()] if tried.planned else []
    if not tried.planned:
        coarsely = False
        tried, finalists = _try_shares(evaluator, base, (quick, base.policy), [base.lead] if compare else None)
    if tried.base.policy != base.policy:
        tried = _Tried(evaluator, base)
        tried.add(finalists)
    return tried.planned[tried.best()] if compare or coarsely else tried.earlier()


def _likely_shares(evaluator: Evaluator, base: Candidate) -> list[_Shares]:
    """Return the choices that are best in a coarser problem, the best first."""
    coarse = coarsen_within(replace(evaluator.problem_for(base), recipes=()), evaluator.tuning)
    small = Evaluator(coarse.problem, evaluator.tuning)
    try:
        tried, _ = _try_shares(small, Candidate(policy=base.policy, lead=base.lead), (base.policy,))
    except BudgetError:
        return []
    best = tried.earlier()
    found = sorted(tried.planned, key=lambda each: (tried.planned[each] != best, tried.step_ns(each)))
    return found[: evaluator.tuning.likely_shares]


def _try_shares(
    evaluator: Evaluator, base: Candidate, policies: Sequence[str], leads: Sequence[float] | None = None
) -> "tuple[_Tried, list[_Shares]]":
    """Return the choices tried with the first of `policies` that has a plan for any, and the best of these."""
    tuning = evaluator.tuning
    for policy in dict.fromkeys(policies):
        tried = _Tried(evaluator, replace(base, policy=policy))
        first, *more = tuning.resident_shares
        tried.add(_Shares(first, 0.0, lead) for lead in leads or tuning.leads)
        finalists = [tried.best()] if tried.planned else []
        lead = finalists[0].lead if finalists else tuning.leads[0]
        tried.add(_Shares(share, 0.0, lead) for share in more)
        if tried.planned:
            tried.add_state(lead)
            tried.add_gradients()
            return tried, [*finalists, tried.best()]
    raise tried.refusals[0]


class _Tried:
    """The choices of parameters that were tried: those that have a plan, and why the others have none."""

    def __init__(self, evaluator: Evaluator, base: Candidate) -> None:
        self._evaluator, self.base = evaluator, base
        self._problem = evaluator.problem_for(base)
        self._beside_bytes = least_bytes_beside_parameters(self._problem)
        self.planned: dict[_Shares, Candidate] = {}
        self.refusals: list[BudgetError] = []

    def add(self, choices: Iterable[_Shares], *, enough: int | None = None) -> None:
        """Try these choices; only until `enough` of them have a plan."""
        found = 0
        for shares in choices:
            candidate = self._pin(shares)
            if self._cannot_fit(candidate) or self._is_too_slow(candidate):
                continue
            refusal = self._evaluator.evaluate(candidate).refusal
            if refusal is not None:
                self.refusals.append(refusal)
                continue
            self.planned[shares] = candidate
            found += 1
            if found == enough:
                break

    def _cannot_fit(self, candidate: Candidate) -> bool:
        """Whether what `candidate` pins is too much, whatever its plan; to ask for one takes longer."""
        limit = self._problem.budgets.device_bytes
        pinned = pinned_bytes(self._problem, candidate.resident, candidate.updated_here, candidate.summed_here)
        return limit is not None and pinned > 0 and self._beside_bytes + pinned > limit

    def _is_too_slow(self, candidate: Candidate) -> bool:
        """Whether `candidate` cannot be chosen, whatever its plan: something that has one is too much faster."""
        if not self.planned:
            return False
        enough_ns = self._tolerable(min(costs_of(self._evaluator, each).step_ns for each in self.planned.values()))
        return least_step_ns(self._evaluator.problem_for(candidate)) > enough_ns

    def add_state(self, lead: float) -> None:
        """Try parameters that are pinned with gradient and state; who sets no budget has not said how much may be."""
        tuning = self._evaluator.tuning
        if self._problem.budgets.device_bytes is None or not tuning.state_shares:
            return
        others = dict.fromkeys((self.best().resident, 0.0))  # pinned by themselves they may be in the way of state
        for resident in others:
            choices = [_Shares(max(share, resident), share, lead) for share in tuning.state_shares]
            self.add((each for each in choices if each not in self.planned), enough=tuning.state_plans)
        for finer in tuning.finer_state_shares:
            share = max(each.updated_here for each in self.planned) + finer
            if share <= 1:
                self.add(_Shares(max(share, resident), share, lead) for resident in others)

    def add_gradients(self) -> None:
        """Try parameters that are pinned with the gradients that several backwards add up, and updated on the host.

        In host memory each addition reads and writes three times their bytes. Updates that do not wait for the last
        backward have nothing added up. Where host memory has no room for all gradients and state, an update would find
        none for what is copied out.
        """
        problem, tuning = self._problem, self._evaluator.tuning
        adds = problem.accumulation > 1 and not problem.updates_in_backward
        budgets, may_stay = problem.budgets, adds and problem.sums_stay
        if budgets.device_bytes is None or budgets.host_lacking_bytes or not may_stay:
            return
        best = self.best()
        for updated_here in dict.fromkeys((best.updated_here, best.updated_here / 2, 0.0)):
            shares = (share for share in tuning.gradient_shares if share > updated_here)
            choices = (_Shares(max(share, best.resident), updated_here, best.lead, share) for share in shares)
            self.add(choices, enough=tuning.state_plans)
        if (best := self.best()).with_gradient:
            finer = (best.updated_here + share for share in tuning.finer_state_shares)
            choices = (best._replace(updated_here=share) for share in finer if share <= best.with_gradient)
            self.add(choices, enough=1)

    def step_ns(self, shares: _Shares) -> int:
        """Return how long a step takes with one of the choices that have a plan."""
        return costs_of(self._evaluator, self.planned[shares]).step_ns

    def best(self) -> _Shares:
        """Return the choice that copies least, of those within half a percent of the fastest."""
        costs = {shares: costs_of(self._evaluator, candidate) for shares, candidate in self.planned.items()}
        enough_ns = self._tolerable(min(each.step_ns for each in costs.values()))
        fast = [shares for shares, each in costs.items() if each.step_ns <= enough_ns]
        return min(fast, key=lambda shares: (costs[shares].copied_bytes, costs[shares].makespan_ns))

    def earlier(self) -> Candidate:
        """Return the best choice with the largest lead that costs no more than half a percent.

        Others use the links in bursts, as updates that stream through the device do: a copy that begins with no time to
        spare is then late. Half a percent is of the fastest step, and of the best choice's makespan and bytes copied.
        """
        best = self.best()
        chosen = self.planned[best]
        plan = self._evaluator.evaluate(chosen).plan
        assert plan is not None
        if not any(transfer.kind is TransferKind.LOAD for transfer in plan.transfers):
            return chosen
        most_ns = self._tolerable(min(costs_of(self._evaluator, each).step_ns for each in self.planned.values()))
        costs = costs_of(self._evaluator, chosen)
        for lead in sorted((lead for lead in self._evaluator.tuning.leads if lead > best.lead), reverse=True):
            shares = best._replace(lead=lead)
            early = self._pin(shares)
            found = self._evaluator.evaluate(early).costs
            if (
                found is not None
                and found.step_ns <= most_ns
                and found.makespan_ns <= self._tolerable(costs.makespan_ns)
                and found.copied_bytes <= self._tolerable(costs.copied_bytes)
            ):
                self.planned[shares] = early
                return early
        return chosen

    def _pin(self, shares: _Shares) -> Candidate:
        here = first_parameters(self._problem, shares.updated_here, Kind.STORED)
        updated = set(here)
        summed = first_parameters(self._problem, shares.with_gradient, Kind.STORED) if shares.with_gradient else ()
        resident = tuple(dict.fromkeys((*here, *summed, *first_parameters(self._problem, shares.resident))))
        return replace(
            self.base,
            resident=resident,
            updated_here=here,
            summed_here=tuple(each for each in summed if each not in updated),
            lead=shares.lead,
        )

    def _tolerable(self, least: int) -> int:
        """Return the cost that is as good as the least."""
        return least * (1000 + self._evaluator.tuning.tolerance_per_mille) // 1000


def costs_of(evaluator: Evaluator, candidate: Candidate) -> Costs:
    """Return the costs of a candidate that is known to have a plan."""
    costs = evaluator.evaluate(candidate).costs
    assert costs is not None
    return costs
