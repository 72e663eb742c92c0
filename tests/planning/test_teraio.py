"""The greedy choice of `teraio` scores few transfers closely, and chooses as if it had scored all."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from drawn import drawn_cases
from hypothesis import given
from hypothesis import strategies as st
from outcomes import Outcomes
from problems import crowded_region, moving_problems, problems, transformer

from tencache_fx.errors import BudgetError
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.liveness import live_bytes, with_windows_of
from tencache_fx.planning.plan import Plan, Transfer
from tencache_fx.planning.planner import POLICIES, floor_bytes, plan_transfers
from tencache_fx.planning.policies import teraio
from tencache_fx.planning.policies.prospects import Calendar, Prospects, Sums
from tencache_fx.planning.policies.teraio import _Greedy, _minimal_transfers, _Offer, choose_teraio
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.schedule import copy_times
from tencache_fx.planning.tuning import TUNING

SEEN = Outcomes()


class Watched(_Greedy):
    """Compares each choice with all that could have been chosen, each scored closely, and their scores with bounds."""

    candidates: tuple[Transfer, ...] = ()

    def take_free(self, candidates: tuple[Transfer, ...], *, latest_first: bool = False) -> None:
        self.candidates = tuple(candidates)
        super().take_free(candidates, latest_first=latest_first)

    def _commit(self, offer: _Offer) -> None:
        share = teraio.TUNING.enough_of_best_score
        prospects = Prospects(self.problem, self.candidates, latest_first=False)
        prospects.renew(self.out, self.into, Sums(self.over, self.durations))
        most = dict(prospects.best_first())
        assert list(most.values()) == sorted(most.values(), reverse=True)
        for place, transfer in enumerate(self.candidates):
            if transfer.name not in self.chosen and (other := self._offer(transfer)) is not None:
                SEEN.note("compared")
                assert other.score * share <= offer.score * (1 + 1e-9)
                assert other.score <= most[place] * (1 + 1e-9)
        super()._commit(offer)


def check_choices(problem: Problem, share: float, *, latest_first: bool) -> None:
    limit = problem.budgets.device_bytes
    if limit is None or floor_bytes(problem) > limit:
        SEEN.note("nothing to choose")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teraio, "TUNING", replace(TUNING, enough_of_best_score=share))
        Watched(problem, limit).take_free(_minimal_transfers(problem), latest_first=latest_first)


@pytest.mark.parametrize("share", [1.0, TUNING.enough_of_best_score])
def test_what_is_chosen_is_the_best_or_nearly(share: float) -> None:
    @SEEN.reaching(0.5, "compared")
    @drawn_cases(150)
    @given(problem=problems(), latest_first=st.booleans())
    def best(problem: Problem, *, latest_first: bool) -> None:
        check_choices(problem, share, latest_first=latest_first)

    best()
    for seed in range(20):
        check_choices(crowded_region(seed), share, latest_first=seed % 2 > 0)


class Close(_Greedy):
    """Scores every transfer closely before each choice."""

    def take_free(self, candidates: tuple[Transfer, ...], *, latest_first: bool = False) -> None:
        while self.over[self.fullest] > 0:
            left = [each for each in candidates if each.name not in self.chosen]
            offers = [(each, offer) for each in left if (offer := self._offer(each)) is not None]
            if not offers:
                break
            self._commit(min(offers, key=lambda each: (-each[1].score, each[0].copy_out_after, each[0].name))[1])


def test_passing_over_by_a_bound_changes_no_choice_of_the_best() -> None:
    """In regions in which few transfers are alike."""
    differ = 0
    for seed in range(60):
        problem = crowded_region(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(teraio, "TUNING", replace(TUNING, enough_of_best_score=1.0))
            found = choose_teraio(problem)
            patch.setattr(teraio, "_Greedy", Close)
            assert choose_teraio(problem) == found, seed
        differ += found != choose_teraio(problem)
    assert differ > 0, "nearly the best is not always the best"


@pytest.mark.parametrize("latest_first", [False, True])
def test_of_equals_the_first_or_the_last_is_chosen(monkeypatch: pytest.MonkeyPatch, *, latest_first: bool) -> None:
    problem = transformer(layers=4)
    problem = problem.within(device_bytes=(int(live_bytes(problem).max()) + floor_bytes(problem)) // 2)
    offer = _Greedy._offer

    def equal(self: _Greedy, transfer: Transfer) -> _Offer | None:
        found = offer(self, transfer)
        return None if found is None else replace(found, score=1e-9)

    monkeypatch.setattr(_Greedy, "_offer", equal)
    greedy = _Greedy(problem, problem.budgets.device_bytes or 0)
    greedy.take_free(_minimal_transfers(problem), latest_first=latest_first)
    leaving = [transfer.copy_out_after for transfer in greedy.chosen.values()]
    assert len(leaving) > 2
    assert leaving == sorted(leaving, reverse=latest_first)


def test_few_transfers_of_a_deep_model_are_scored_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer(layers=16)
    peak = int(live_bytes(problem).max())
    problem = problem.within(device_bytes=(peak + floor_bytes(problem)) // 2)
    scored = 0
    score = _Greedy._score

    def counting(self: _Greedy, transfer: Transfer) -> _Offer | None:
        nonlocal scored
        scored += 1
        return score(self, transfer)

    monkeypatch.setattr(_Greedy, "_score", counting)
    greedy = _Greedy(problem, problem.budgets.device_bytes or 0)
    greedy.take_free(_minimal_transfers(problem))
    assert len(greedy.chosen) <= scored <= 2 * len(greedy.chosen)


def test_the_first_variant_of_joint_is_teraio() -> None:
    first = POLICIES["joint"][0]
    assert isinstance(first, partial)
    assert first.func is choose_teraio is POLICIES["teraio"][0]
    problem = transformer(layers=3)
    problem = problem.within(device_bytes=floor_bytes(problem) * 5 // 4)
    assert first(problem) == choose_teraio(problem)


@SEEN.reaching(0.3, "planned")
@drawn_cases(100)
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


@given(
    free=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    charges=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 30), st.floats(0, 200), st.booleans()), min_size=1, max_size=8
    ),
)
def test_a_charge_takes_from_the_first_or_the_last_steps_what_they_have(
    free: list[int], charges: list[tuple[int, int, float, bool]]
) -> None:
    calendar, left = Calendar(np.array(free, dtype=np.float64)), [float(each) for each in free]
    for start, end, need_ns, late in charges:
        start, end = sorted((min(start, len(free)), min(end, len(free))))
        calendar.charge(start, end, need_ns, late=late)
        for step in reversed(range(start, end)) if late else range(start, end):
            taken = min(left[step], need_ns)
            left[step], need_ns = left[step] - taken, need_ns - taken
        assert calendar.free.tolist() == pytest.approx(left, abs=1e-9)
        assert calendar.before.tolist() == pytest.approx([0.0, *np.cumsum(calendar.free)], abs=1e-9)


def test_transfers_are_offered_by_their_price_and_each_once() -> None:
    problem = crowded_region(0)
    calendar = Calendar(np.zeros(len(problem.ops)))
    step = int(live_bytes(problem).argmax())
    left = teraio._Exposed(problem, _minimal_transfers(problem))
    found = list(left.cheapest(step, 1 << 60, calendar, calendar))
    assert len(found) > 2
    assert all(transfer.freed_at <= step < transfer.prefetch_at for transfer in found)
    ns = [copy_times(problem.links, transfer.nbytes, transfer.tier) for transfer in found]
    prices = [(t.out + t.into) / each.nbytes for t, each in zip(ns, found, strict=True)]
    lengths = [transfer.freed_at - transfer.prefetch_at for transfer in found]
    assert sorted(zip(prices, lengths, strict=True)) == list(zip(prices, lengths, strict=True))
    assert not list(left.cheapest(step, 1 << 60, calendar, calendar))


def test_what_windows_decide_is_worked_out_once_for_all_leads_and_budgets() -> None:
    problem = crowded_region(1)
    other = with_windows_of(replace(problem, links=replace(problem.links, copy_latency_ns=1)), problem)
    smaller = problem.within(device_bytes=1)
    assert _minimal_transfers(problem) is _minimal_transfers(other) is _minimal_transfers(smaller)
    assert _minimal_transfers(replace(problem)) == _minimal_transfers(problem)
    assert _minimal_transfers(replace(problem)) is not _minimal_transfers(problem)
