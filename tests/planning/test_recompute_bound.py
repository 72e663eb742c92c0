"""What the search passes over by a bound could not have been better, and the result is the same without the bounds."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from drawn import drawn_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outcomes import Outcomes
from problems import moving_problems, offloaded_weights, trained_offloaded, transformer
from programs import some_recipes, tight_problems, transformer_recipes

from tencache_fx.errors import BudgetError
from tencache_fx.planning import parameter_search
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.link_bound import least_link_ns
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import (
    first_parameters,
    keep_resident,
    least_bytes_beside_parameters,
    pinned_bytes,
)
from tencache_fx.planning.parameter_search import choose_parameters
from tencache_fx.planning.planner import floor_bytes, least_step_ns
from tencache_fx.planning.problem import Kind, Links, Problem, Step, Storage
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_bound import RecomputeBound, least_floor_bytes
from tencache_fx.planning.recompute_search import RecomputeSearch, Score
from tencache_fx.planning.tuning import TUNING

SEEN = Outcomes()
BASE = Candidate(policy="teraio", lead=TUNING.compared_lead)
SLOW = [HealthCheck.too_slow]


def gradient(parameter: str, nbytes: int, birth: int, state_bytes: int) -> Storage:
    return Storage(
        name=f"gradient of {parameter}",
        nbytes=nbytes,
        kind=Kind.STORED,
        birth=Step(birth),
        death=Step(birth + 1),
        uses=(Step(birth),),
        spillable=False,
        parameter=parameter,
        state_bytes=state_bytes,
    )


@st.composite
def trainings(draw: st.DrawFn) -> Problem:
    """Tight problems with recipes, in which parameters are offloaded, and some have gradients and state, too."""
    problem = offloaded_weights(draw(tight_problems()))
    read = {s.parameter: s.nbytes for s in problem.storages if s.kind is Kind.FETCHED}
    births = st.integers(problem.boundary, len(problem.ops) - 1)
    gradients = [
        gradient(parameter, nbytes, draw(births), draw(st.integers(0, 6)) * nbytes)
        for parameter, nbytes in read.items()
        if draw(st.booleans())
    ]
    rate = draw(st.sampled_from((0, 10**8, 10**9, 10**10)))
    problem = replace(
        problem,
        storages=(*problem.storages, *gradients),
        links=replace(problem.links, host_bytes_per_s=rate),
        accumulation=draw(st.sampled_from((1, 1, 2, 7))),
        updates_in_backward=draw(st.booleans()),
    )
    floor, peak = floor_bytes(problem), int(live_bytes(problem).max())
    return problem.within(device_bytes=draw(st.integers(floor, max(floor, peak - 1))))


def pinning(draw: st.DrawFn, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Draw parameters that are pinned, and those of them that are updated on the device."""
    here = first_parameters(problem, draw(st.sampled_from((0.0, 0.5, 1.0))), Kind.STORED)
    others = first_parameters(problem, draw(st.sampled_from((0.0, 0.5, 1.0))))
    return tuple(dict.fromkeys((*here, *others))), here


@SEEN.reaching(0.3, "planned")
@drawn_cases(150, suppress_health_check=SLOW)
@given(problem=trainings(), data=st.data())
def test_no_plan_beats_the_bounds(problem: Problem, data: st.DataObject) -> None:
    names = some_recipes(data.draw, problem)
    resident, here = pinning(data.draw, problem)
    evaluator = Evaluator(problem)
    base = replace(BASE, resident=resident, updated_here=here, reserved_bytes=data.draw(st.integers(0, 4)))
    candidate = base.recomputing(names)
    bound = RecomputeBound(evaluator.problem_for(base))
    quick_ns = bound.least_ns(names)
    least_ns = least_step_ns(evaluator.problem_for(candidate))
    costs = evaluator.evaluate(candidate).costs
    SEEN.note("planned" if costs else "refused")
    assert quick_ns <= least_ns + 1, "the quick one is the better one"
    assert bound.least_of_all_ns() <= quick_ns <= bound.likely_ns(names, 0.6)
    if costs is not None:
        assert max(quick_ns, least_ns) <= costs.step_ns


@given(
    out_bytes=st.integers(0, 100),
    in_bytes=st.integers(0, 100),
    rates=st.tuples(*[st.integers(1, 9)] * 4),
    both_ns=st.integers(0, 200),
)
def test_links_need_no_less_however_long_both_are_busy(
    out_bytes: int, in_bytes: int, rates: tuple[int, int, int, int], both_ns: int
) -> None:
    solo_out, solo_in, duplex_out, duplex_in = rates
    links = Links(
        d2h_bytes_per_s=solo_out * 10**9,
        h2d_bytes_per_s=solo_in * 10**9,
        d2h_duplex_bytes_per_s=duplex_out * 10**9,
        h2d_duplex_bytes_per_s=duplex_in * 10**9,
    )
    (least,) = least_link_ns(links, np.array([out_bytes]), np.array([in_bytes]))
    left_out, left_in = max(0, out_bytes - both_ns * duplex_out), max(0, in_bytes - both_ns * duplex_in)
    assert least <= both_ns + left_out / solo_out + left_in / solo_in + 1e-9


@drawn_cases(150, suppress_health_check=SLOW)
@given(problem=trainings(), data=st.data())
def test_no_choice_needs_less_than_the_least_floor(problem: Problem, data: st.DataObject) -> None:
    resident, here = pinning(data.draw, problem)
    least = least_floor_bytes(keep_resident(problem, resident, here))
    for names in ((), some_recipes(data.draw, problem), tuple(recipe.name for recipe in problem.recipes)):
        assert least <= floor_bytes(keep_resident(recompute(problem, names), resident, here)), names


@pytest.mark.parametrize("kind", ["recipes", "moving"])
def test_what_is_pinned_adds_to_what_is_there_at_least(kind: str) -> None:
    @SEEN.reaching(0.2, "pinned")
    @settings(max_examples=100, suppress_health_check=SLOW)
    @given(problem=trainings() if kind == "recipes" else moving_problems(), data=st.data())
    def adds(problem: Problem, data: st.DataObject) -> None:
        resident, here = pinning(data.draw, problem)
        SEEN.note("pinned" if resident else "nothing is")
        least = least_bytes_beside_parameters(problem) + pinned_bytes(problem, resident, here)
        assert least <= floor_bytes(keep_resident(problem, resident, here))

    adds()


class Unpruned(RecomputeSearch):
    """The same search, which plans whatever it comes by and could fit."""

    def score(self, names: frozenset[str]) -> Score:
        bound = self.bound(names)
        candidate = self.base.recomputing(names)
        if bound.over_bytes:
            return bound
        if (costs := self.evaluator.evaluate(candidate).costs) is not None:
            return Score(0, costs.step_ns)
        return Score(self.evaluator.limits(candidate).peak_bytes - self.limit, bound.needed_ns)

    def consider(self, names: frozenset[str]) -> bool:
        if (score := self.score(names)) < self.best_score:
            self.best, self.best_score = names, score
            return True
        return False

    def worth_ns(self) -> int:
        return 1 << 62


@SEEN.reaching(0.08, "pruned")
@drawn_cases(100, suppress_health_check=SLOW)
@given(problem=trainings(), data=st.data())
def test_a_search_of_unlimited_length_finds_the_same_without_bounds(problem: Problem, data: st.DataObject) -> None:
    resident, here = pinning(data.draw, problem)
    start = replace(BASE, resident=resident, updated_here=here)
    tuning = replace(TUNING, least_plans=100_000, most_plans=100_000, gain_per_mille=0)
    searches = [kind(Evaluator(problem, tuning), start) for kind in (RecomputeSearch, Unpruned)]
    found = [search.run() for search in searches]
    assert found[0] == found[1]
    assert searches[0].best_score == searches[1].best_score
    spent = [search.evaluator.spent_looks for search in searches]
    SEEN.note("pruned" if spent[0] < spent[1] else "nothing to prune")


def test_the_bound_spares_most_plans_where_copies_take_the_memory_that_updates_want() -> None:
    problem = offloaded_weights(transformer_recipes(transformer(layers=8)))
    late = [s for s in problem.storages if s.kind is Kind.FETCHED and s.birth >= problem.boundary]
    gradients = [gradient(s.parameter, s.nbytes, s.uses[-1], 6 * s.nbytes) for s in late]
    problem = replace(
        problem,
        storages=(*problem.storages, *gradients),
        links=replace(problem.links, host_bytes_per_s=10**11),
        updates_in_backward=True,
    )
    floor, peak = floor_bytes(problem), int(live_bytes(problem).max())
    evaluator = Evaluator(problem.within(device_bytes=(floor + peak) // 2))
    assert RecomputeSearch(evaluator, BASE).run()
    assert len(evaluator._outcomes) < TUNING.most_plans // 2


@SEEN.reaching(0.05, "passed over")
@drawn_cases(100, suppress_health_check=SLOW)
@given(problem=trainings())
def test_shares_that_are_passed_over_are_too_slow(problem: Problem) -> None:
    class Checked(parameter_search._Tried):
        def _is_too_slow(self, candidate: Candidate) -> bool:
            found = super()._is_too_slow(candidate)
            SEEN.note("passed over" if found else "looked at")
            costs = self._evaluator.evaluate(candidate).costs if found else None
            if costs is not None:
                fastest_ns = min(map(self.step_ns, self.planned))
                assert costs.step_ns > self._tolerable(fastest_ns)
            return found

    with pytest.MonkeyPatch.context() as patch, suppress(BudgetError):
        patch.setattr(parameter_search, "_Tried", Checked)
        choose_parameters(Evaluator(problem), BASE)


def test_choices_that_recompute_about_as_much_come_last() -> None:
    problem = transformer_recipes(transformer(layers=8)).within(device_bytes=1)
    search = RecomputeSearch(Evaluator(problem, replace(TUNING, rungs=4)), BASE)
    apart = len(search.line) // 4
    assert apart > 1
    near, far = [frozenset(search.line[:count]) for count in range(apart)], frozenset(search.line[:apart])
    assert search.spread_out([*near, far]) == [near[0], far, *near[1:]]


def test_shares_that_cannot_fit_are_not_planned() -> None:
    problem = trained_offloaded(16)
    limit = floor_bytes(problem) + 16 * 3
    evaluator = Evaluator(problem.within(device_bytes=limit))
    choose_parameters(evaluator, BASE)
    refused = [candidate for candidate, outcome in evaluator._outcomes.items() if outcome.refusal is not None]
    beside = least_bytes_beside_parameters(problem)
    for candidate in refused:
        assert beside + pinned_bytes(problem, candidate.resident, candidate.updated_here) <= limit
    assert any(outcome.plan for outcome in evaluator._outcomes.values())
