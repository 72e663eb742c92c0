"""Whether a region is planned a second time with its collectives one by one, and which of the two plans is taken."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import links, make_region, make_storage, problems, with_collectives

from tencache_fx.errors import BudgetError
from tencache_fx.planning.collectives import ideal_ns, one_by_one
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Budgets, Collective, CollectiveKind, Problem, Step
from tencache_fx.planning.search import make_plan
from tencache_fx.region.candidate import Candidate
from tencache_fx.region.overlap_choice import better, leaves_room, may_gain_in_turn


@dataclass(frozen=True)
class Planner:
    """What is asked of a `RegionPlanner`."""

    device_budget: int | None
    by_step: bool = False


@dataclass(frozen=True)
class Planned:
    """What is asked of a `Candidate`."""

    problem: Problem
    plan: Plan | BudgetError

    rank = Candidate.rank


@dataclass(frozen=True)
class Split:
    """What `leaves_room` asks of a `Candidate`."""

    captured: Problem
    problem: Problem


def planned(problem: Problem) -> Planned:
    try:
        return Planned(problem, make_plan(problem, "joint"))
    except BudgetError as error:
        return Planned(problem, error)


def copying(device_bytes: int | None, *, rate: int = 10**9) -> Problem:
    """Six ops of 100 ns, a gather of 100 ns over the second; `x` is away for three of them where there is no room."""
    gather = Collective(
        name="a",
        kind=CollectiveKind.ALL_GATHER,
        nbytes=200,
        ranks=2,
        begin=Step(0),
        needed_at=Step(2),
        latency_ns=0,
        bytes_per_s=10**9,
    )
    return make_region(
        [100] * 6,
        3,
        make_storage("x", 300, (0, 5), spillable=True),
        make_storage("y", 300, (2, 3)),
        collectives=(gather,),
        links=links(rate),
        budgets=Budgets(device_bytes=device_bytes, host_bytes=1 << 20),
    )


def test_a_region_that_waits_for_nothing_is_planned_once():
    assert not may_gain_in_turn(Planner(None), planned(copying(None)))
    roomy = planned(copying(1000))
    assert roomy.plan.forecast.makespan_ns == 600
    assert not may_gain_in_turn(Planner(1000), roomy)


def test_a_region_that_waits_for_copies_or_has_no_plan_is_planned_again():
    slow = planned(copying(400, rate=10**8))
    assert slow.plan.forecast.makespan_ns > 2 * ideal_ns(one_by_one(slow.problem))
    assert may_gain_in_turn(Planner(400), slow)
    none = planned(copying(299))
    assert isinstance(none.plan, BudgetError)
    assert may_gain_in_turn(Planner(299), none)


def test_what_is_recomputed_may_be_saved():
    """700 ns without overlapping, of which 100 may then be unnecessary: 600 is to be a thirtieth less."""
    one = planned(copying(1000))
    for makespan_ns, gains in ((620, False), (621, True)):
        plan = replace(one.plan, forecast=replace(one.plan.forecast, makespan_ns=makespan_ns))
        assert may_gain_in_turn(Planner(1000), Planned(replace(one.problem, recompute_ns=100), plan)) == gains


@pytest.mark.parametrize(("limit", "again"), [(None, False), (599, True), (600, False)])
def test_a_region_that_is_planned_with_its_step_leaves_room_for_others(limit: int | None, *, again: bool):
    one = planned(copying(None))
    assert floor_bytes(one.problem) == 300
    assert may_gain_in_turn(Planner(limit, by_step=True), one) == again


@pytest.mark.parametrize(("limit", "early"), [(None, True), (599, False), (600, True)])
def test_what_was_chosen_to_stay_takes_no_room(limit: int | None, *, early: bool):
    """Another plan gives its room back, for a rank with less memory, or for larger inputs."""
    captured = copying(None)
    split = Split(captured, replace(captured, external_bytes=200))  # state that is to be on the device
    assert (floor_bytes(split.captured), floor_bytes(split.problem)) == (300, 500)
    assert leaves_room(Planner(limit), split) == early


@settings(max_examples=150)
@given(problem=problems(), data=st.data())
def test_no_gain_is_missed(problem: Problem, data: st.DataObject):
    """Where nothing is planned again, collectives one by one would have gained less than a thirtieth."""
    problem = data.draw(with_collectives(problem))
    overlapping, planner = planned(problem), Planner(problem.budgets.device_bytes)
    assume(planner.device_budget is not None)
    in_turn = planned(one_by_one(problem))
    chosen = better(planner, overlapping, in_turn)
    assert chosen.rank() == min(overlapping.rank(), in_turn.rank())
    assert chosen is overlapping or in_turn.rank() < overlapping.rank()
    if not may_gain_in_turn(planner, overlapping) and isinstance(in_turn.plan, Plan):
        assert in_turn.plan.forecast.makespan_ns >= overlapping.plan.forecast.makespan_ns * 29 / 30


def test_with_its_step_a_region_takes_the_plan_of_less_memory():
    """Be it slower; but not one that there is none of."""
    large, small = planned(copying(1000)), planned(copying(1000, rate=10**8))
    small = replace(small, problem=replace(small.problem, storages=()))
    none = planned(copying(299))
    stepwise = Planner(1000, by_step=True)
    assert better(stepwise, large, small) is small
    assert better(stepwise, small, large) is small
    assert better(stepwise, large, large) is large
    assert better(stepwise, large, none) is large
    assert better(stepwise, none, large) is large
    assert better(Planner(1000), none, large) is large
