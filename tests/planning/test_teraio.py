"""The greedy choice of `teraio` scores few transfers closely, and chooses as if it had scored all."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from outcomes import Outcomes
from problems import crowded_region, moving_problems, problems, transformer

from tencache_fx.errors import BudgetError
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.plan import Plan, Transfer
from tencache_fx.planning.planner import POLICIES, floor_bytes, plan_transfers
from tencache_fx.planning.policies import teraio
from tencache_fx.planning.policies.teraio import _Greedy, _minimal_transfers, _Offer, choose_teraio
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.tuning import TUNING

SEEN = Outcomes()
ALL = 0.0  # every score is enough to be looked at closely


class Watched(_Greedy):
    """Compares each choice with all that could have been chosen, each scored closely."""

    candidates: tuple[Transfer, ...] = ()

    def take_free(self, candidates: tuple[Transfer, ...]) -> None:
        self.candidates = tuple(candidates)
        super().take_free(candidates)

    def _commit(self, offer: _Offer) -> None:
        share = teraio.TUNING.enough_of_best_score
        for transfer in self.candidates:
            if transfer.name not in self.chosen and (other := self._offer(transfer, ALL)) is not None:
                SEEN.note("compared")
                assert other.score * share <= offer.score * (1 + 1e-9)
                glanced = self._offer(transfer, 1e99)
                assert glanced is not None
                assert glanced.score >= other.score
                assert (glanced.gone, glanced.fetch) == (other.gone, other.fetch)
        super()._commit(offer)


def check_choices(problem: Problem, share: float) -> None:
    limit = problem.budgets.device_bytes
    if limit is None or floor_bytes(problem) > limit:
        SEEN.note("nothing to choose")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teraio, "TUNING", replace(TUNING, enough_of_best_score=share))
        patch.setattr(teraio, "_LONG", 0)
        Watched(problem, limit).take_free(_minimal_transfers(problem))


@pytest.mark.parametrize("share", [1.0, TUNING.enough_of_best_score])
def test_what_is_chosen_is_the_best_or_nearly(share: float) -> None:
    @SEEN.reaching(0.5, "compared")
    @settings(max_examples=150, deadline=None)
    @given(problem=problems())
    def best(problem: Problem) -> None:
        check_choices(problem, share)

    best()
    for seed in range(20):
        check_choices(crowded_region(seed), share)


class Close(_Greedy):
    """Scores every transfer closely."""

    def _offer(self, transfer: Transfer, enough: float = ALL) -> _Offer | None:
        return super()._offer(transfer, min(enough, ALL))


def test_passing_over_by_a_bound_changes_no_choice_of_the_best() -> None:
    """In regions in which no two transfers are alike."""
    differ = 0
    for seed in range(60):
        problem = crowded_region(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(teraio, "TUNING", replace(TUNING, enough_of_best_score=1.0))
            patch.setattr(teraio, "_LONG", 0)
            found = choose_teraio(problem)
            patch.setattr(teraio, "_Greedy", Close)
            assert choose_teraio(problem) == found, seed
        differ += found != choose_teraio(problem)
    assert differ > 0, "nearly the best is not always the best"


def test_few_transfers_of_a_deep_model_are_scored_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer(layers=16)
    peak = int(live_bytes(problem).max())
    problem = problem.within(device_bytes=(peak + floor_bytes(problem)) // 2)
    scored: dict[bool, int] = {True: 0, False: 0}
    score = _Greedy._score

    def counting(self: _Greedy, transfer: Transfer, enough: float) -> _Offer | None:
        offer = score(self, transfer, enough)
        scored[offer is not None and offer.score >= enough] += 1
        return offer

    monkeypatch.setattr(_Greedy, "_score", counting)
    monkeypatch.setattr(teraio, "_LONG", 0)
    chosen = choose_teraio(problem)
    assert scored[True] <= 2 * len(chosen)
    assert scored[False] > 0


def test_the_first_variant_of_joint_is_teraio() -> None:
    first = POLICIES["joint"][0]
    assert isinstance(first, partial)
    assert first.func is choose_teraio is POLICIES["teraio"][0]
    problem = transformer(layers=3)
    problem = problem.within(device_bytes=floor_bytes(problem) * 5 // 4)
    assert first(problem) == choose_teraio(problem)


@SEEN.reaching(0.3, "planned")
@settings(max_examples=100, deadline=None)
@given(problem=moving_problems())
def test_joint_is_the_same_whether_the_plan_of_teraio_is_known(problem: Problem) -> None:
    def plan(policy: str, known: Plan | None = None) -> Plan | None:
        try:
            return plan_transfers(problem, policy, 1.0, known)
        except BudgetError:
            return None

    known = plan("teraio")
    SEEN.note("planned" if known else "refused")
    assert plan("joint", known) == plan("joint")
    evaluator, base = Evaluator(problem), Candidate(policy="teraio", lead=1.0)
    evaluator.evaluate(base)
    found = evaluator.evaluate(replace(base, policy="joint")).plan
    assert found == plan("joint")
