"""Collectives in a problem: when they run, what that bounds, and what of theirs may not leave meanwhile."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from drawn import drawn_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import (
    links,
    make_region,
    make_storage,
    make_swap,
    problems,
    problems_with_swaps,
    using_collectives,
    with_collectives,
)
from programs import some_recipes, tight_problems

from tencache_fx.errors import BudgetError, InvariantError
from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.collectives import busy_ns, exposed_ns, ideal_ns, in_between, one_by_one, paced_ns, scaled
from tencache_fx.planning.explain import find_reasons
from tencache_fx.planning.loads import loads_of
from tencache_fx.planning.plan import Plan, PoolClass, Transfer
from tencache_fx.planning.planner import build_plan, least_step_ns, lower_bound_ns
from tencache_fx.planning.problem import Budgets, Collective, CollectiveKind, Kind, Problem, Recipe, Step, Storage, Tier
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.simulator import simulate
from tencache_fx.planning.step import Visit, join
from tencache_fx.planning.swap_region import SwapRegion, frugal_transfers
from tencache_fx.planning.verify import verify_plan
from tencache_fx.records import RegionRecord
from tencache_fx.reporting.tables import show_summary
from tencache_fx.reporting.timeline import Lane, region_timeline
from tencache_fx.serialization import from_json, to_json

STAGING = (PoolClass(nbytes=4096, count=2),)


def gather(name: str, begin: int, needed_at: int, nbytes: int = 200, **changes: Any) -> Collective:
    """Return a gather over two ranks that takes half a ns for each byte, and a latency."""
    given = {"kind": CollectiveKind.ALL_GATHER, "ranks": 2, "latency_ns": 10, "bytes_per_s": 10**9, **changes}
    return Collective(name=name, nbytes=nbytes, begin=Step(begin), needed_at=Step(needed_at), **given)


def scattered() -> Problem:
    """Six ops of 100 ns; a storage that is gathered from step 1 to 3 crosses the boundary, another one does besides."""
    return make_region(
        [100] * 6,
        4,
        make_storage("part", 50, (0, 1, 2, 3)),
        make_storage("whole", 100, (1, 3, 5), spillable=True),
        make_storage("x", 100, (0, 5), spillable=True),
        collectives=(gather("a", 1, 3, reads=("part",), writes=("whole",)),),
        links=links(),
        budgets=Budgets(device_bytes=1000, host_bytes=1 << 20),
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "traffic"),
    [
        (CollectiveKind.ALL_GATHER, 4, 600),
        (CollectiveKind.REDUCE_SCATTER, 4, 600),
        (CollectiveKind.ALL_REDUCE, 4, 1200),
        (CollectiveKind.ALL_REDUCE, 2, 800),
        (CollectiveKind.OTHER, 4, 800),
        (CollectiveKind.ALL_REDUCE, 1, 0),
        (CollectiveKind.OTHER, 1, 0),
    ],
)
def test_traffic_of_each_kind(kind: CollectiveKind, ranks: int, traffic: int):
    assert kind.traffic(800, ranks) == traffic
    one = gather("a", 0, 1, nbytes=800, kind=kind, ranks=ranks)
    assert one.duration_ns == (10 + traffic if ranks > 1 else 0)


def test_a_schedule_by_hand():
    """Steps of 100, 20, 30, 50 and 10 ns; `a` takes 110 ns behind step 0, `b` then 60, and nobody waits for `c`."""
    problem = make_region(
        [100, 20, 30, 50, 10],
        5,
        collectives=(gather("a", 0, 2), gather("b", 1, 3, nbytes=100), gather("c", 4, 5, nbytes=180)),
    )
    replay = simulate(problem, ())
    assert replay.starts_ns == (0, 100, 210, 270, 320)
    assert [(each.start_ns, each.end_ns, each.stall_ns) for each in replay.collectives] == [
        (100, 210, 90),
        (210, 270, 30),
        (330, 430, 100),
    ]
    assert replay.makespan_ns == replay.ideal_ns == 430
    assert list(paced_ns(problem)) == [100, 20, 120, 80, 110]
    assert (exposed_ns(problem), busy_ns(problem), replay.stall_collective_ns) == (220, 270, 220)
    assert ideal_ns(one_by_one(problem)) == 210 + 270


@drawn_cases(100)
@given(case=problems_with_swaps(), data=st.data())
def test_the_link_runs_one_after_the_other_and_waits_end_behind_it(
    case: tuple[Problem, tuple[Transfer, ...]], data: st.DataObject
):
    problem = data.draw(with_collectives(case[0]))
    replay = simulate(problem, case[1], STAGING)
    starts = (*replay.starts_ns, replay.makespan_ns)
    for one, following in pairwise(replay.collectives):
        assert one.end_ns <= following.start_ns
    for each, times in zip(problem.collectives, replay.collectives, strict=True):
        assert each.name == times.name
        assert starts[each.begin] + problem.ops[each.begin].duration_ns <= times.start_ns
        assert times.start_ns + each.duration_ns == times.end_ns <= starts[each.needed_at]
    assert sum(each.stall_ns for each in replay.collectives) == replay.stall_collective_ns <= busy_ns(problem)
    assert replay.ideal_ns <= replay.makespan_ns
    slower = scaled(problem, bytes_per_s=data.draw(st.integers(10**8, 10**9)))
    assert replay.makespan_ns <= simulate(slower, case[1], STAGING).makespan_ns
    in_turn = simulate(one_by_one(problem), (), STAGING)
    assert in_turn.makespan_ns == sum(op.duration_ns for op in problem.ops) + busy_ns(problem)
    assert replay.ideal_ns <= in_turn.makespan_ns


@drawn_cases(60)
@given(problem=problems(), data=st.data())
def test_collectives_that_take_no_time_change_no_plan(problem: Problem, data: st.DataObject):
    alone = scaled(data.draw(with_collectives(problem)), ranks=1)
    try:
        plan = make_plan(problem, "joint")
    except BudgetError:
        with pytest.raises(BudgetError):
            make_plan(alone, "joint")
        return
    assert make_plan(alone, "joint") == plan
    verify_plan(alone, plan)


@drawn_cases(60)
@given(problem=problems(), data=st.data())
def test_no_plan_beats_the_bounds(problem: Problem, data: st.DataObject):
    problem = data.draw(with_collectives(problem))
    try:
        plan = make_plan(problem, "joint")
    except BudgetError:
        assume(False)
        return
    verify_plan(problem, plan)
    forecast = plan.forecast
    assert max(ideal_ns(problem), lower_bound_ns(problem), joint_lower_bound_ns(problem)) <= forecast.makespan_ns
    assert least_step_ns(problem) <= forecast.makespan_ns
    busy = {load.name: load.busy_ns for load in loads_of(problem, plan)}
    assert busy["compute"] == sum(op.duration_ns for op in problem.ops)
    assert busy["collectives"] == busy_ns(problem) <= forecast.makespan_ns


def holds(transfer: Transfer | None, storage: Storage, step: int) -> bool:
    """Say by the transfer's four steps whether the whole storage is on the device while a step runs."""
    if transfer is None or transfer.out is None:
        return storage.birth <= step < storage.death
    return storage.birth <= step < transfer.freed_at or transfer.needed_at <= step < storage.death


@drawn_cases(150)
@given(data=st.data(), policy=st.sampled_from(("10cache", "teraio", "joint")))
def test_plans_leave_alone_what_collectives_use(data: st.DataObject, policy: str):
    """Told step by step, not by the checker: what is under way has all that it uses, and leaves none of its results."""
    problem = data.draw(using_collectives(data.draw(problems())))
    try:
        plan = make_plan(problem, policy)
    except BudgetError:
        assume(False)
        return
    verify_plan(problem, plan)
    transfers = {transfer.name: transfer for transfer in plan.transfers}
    storages = {storage.name: storage for storage in problem.storages}
    for each in problem.collectives:
        for name in (*each.reads, *each.writes):
            steps = range(each.begin, min(each.needed_at + 1, len(problem.ops)))
            assert all(holds(transfers.get(name), storages[name], step) for step in steps)
        for name in each.writes:
            assert name not in transfers or transfers[name].copy_out_after >= each.needed_at


@drawn_cases(100)
@given(data=st.data())
def test_collectives_have_what_they_use_whatever_runs_again(data: st.DataObject):
    problem = data.draw(using_collectives(data.draw(tight_problems())))
    held = in_between(problem)
    problem = replace(problem, recipes=tuple(each for each in problem.recipes if each.name not in held))
    again = recompute(problem, some_recipes(data.draw, problem)).within(device_bytes=None)
    names = {storage.name: storage for storage in again.storages}
    for before, now in zip(problem.collectives, again.collectives, strict=True):
        assert again.ops[now.begin] == problem.ops[before.begin]
        assert now.needed_at == len(again.ops) or again.ops[now.needed_at] == problem.ops[before.needed_at]
        for name in (*now.reads, *now.writes):
            assert names[name].birth <= now.begin < min(now.needed_at + 1, len(again.ops)) <= names[name].death
    verify_plan(again, make_plan(again, "none"))


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.FETCHED])
def test_what_runs_again_does_not_read_what_a_collective_used_meanwhile(kind: Kind):
    """Step 2 makes y while the part is gathered, and reads x only."""
    problem = scattered()
    lives = {storage.name: storage for storage in problem.storages}
    part = replace(lives["part"], kind=kind, parameter="w" if kind is Kind.FETCHED else "")
    x = replace(lives["x"], uses=(Step(0), Step(2), Step(5)))
    y = make_storage("y", 100, (2, 4), spillable=True)
    recipes = (Recipe(name="y", steps=(Step(2),)),)
    problem = replace(problem, storages=(part, lives["whole"], x, y), recipes=recipes)
    again = recompute(problem, ["y"])
    found = {storage.name: storage for storage in again.storages}
    assert found["part"] == part
    assert found["y#again"].birth == 4
    assert found["x"].uses == (0, 2, 4, 6)
    assert set(found) == {"part", "whole", "x", "y", "y#again"}


def plan_of(problem: Problem, *transfers: Transfer) -> Plan:
    return build_plan(problem, "joint", transfers)


def swap(name: str, *steps: int) -> Transfer:
    out, freed, back, needed = map(Step, steps)
    times = {"copy_out_after": out, "freed_at": freed, "prefetch_at": back, "needed_at": needed}
    return make_swap(name=name, nbytes=100, tier=Tier.HOST, **times)


def test_what_no_collective_uses_may_leave():
    problem = scattered()
    verify_plan(problem, plan_of(problem, swap("x", 0, 2, 4, 5), swap("whole", 3, 4, 5, 5)))


def changed(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, collectives=(replace(problem.collectives[0], **changes),))


@pytest.mark.parametrize(
    ("rule", "changes", "transfer"),
    [
        ("collective-writes", {}, swap("whole", 1, 4, 5, 5)),
        ("collective-holds", {"needed_at": Step(5), "reads": ()}, swap("whole", 3, 4, 5, 5)),
        ("collective-holds", {"reads": ("x",)}, swap("x", 0, 3, 4, 5)),
        ("collective-liveness", {"needed_at": Step(4)}, None),
        ("collective-liveness", {"begin": Step(0)}, None),
        ("collective-storage", {"reads": ("y",)}, None),
        ("collective-steps", {"needed_at": Step(1)}, None),
        ("collective-steps", {"needed_at": Step(7)}, None),
    ],
)
def test_the_checker_names_the_broken_rule(rule: str, changes: dict[str, Any], transfer: Transfer | None):
    right = scattered()
    plan = plan_of(right, *(() if transfer is None else (transfer,)))
    problem = changed(right, **changes)
    with pytest.raises(InvariantError, match=rf"rule {rule}\b"):
        verify_plan(problem, plan)


def test_the_checker_counts_what_collectives_take():
    problem = scattered()
    plan = plan_of(problem)
    wrong = replace(plan, forecast=replace(plan.forecast, collective_ns=1))
    with pytest.raises(InvariantError, match="rule forecast-collectives"):
        verify_plan(problem, wrong)


def test_problems_with_collectives_are_read_back_and_checked():
    problem = scattered()
    text = to_json(problem)
    assert from_json(Problem, text) == problem
    with pytest.raises(ValueError, match="begins at step 1, and step 1 waits"):
        from_json(Problem, to_json(changed(problem, needed_at=Step(1))))
    with pytest.raises(ValueError, match="ends with step 7, of 6"):
        from_json(Problem, to_json(changed(problem, needed_at=Step(7))))
    with pytest.raises(ValueError, match="two collectives have one name"):
        from_json(Problem, to_json(replace(problem, collectives=(gather("a", 1, 3), gather("a", 1, 3)))))
    with pytest.raises(ValueError, match="collectives are out of order"):
        from_json(Problem, to_json(replace(problem, collectives=(gather("a", 2, 3), gather("b", 1, 3)))))


def test_steps_that_run_again_move_collectives_and_rename_what_they_read():
    """`x` is made again before step 5, where a collective begins that reads it."""
    problem = make_region(
        [100] * 8,
        4,
        make_storage("x", 100, (1, 2, 5, 6, 7), spillable=True),
        collectives=(gather("early", 1, 2, reads=("x",)), gather("late", 6, 7, reads=("x",))),
        recipes=(Recipe(name="x", steps=(Step(0), Step(1))),),
    )
    early, late = recompute(problem, ("x",)).collectives
    assert (early.begin, early.needed_at, early.reads) == (1, 2, ("x",))
    assert (late.begin, late.needed_at, late.reads) == (8, 9, ("x#again",))
    verify_plan(recompute(problem, ("x",)), plan_of(recompute(problem, ("x",))))


def test_a_step_has_the_collectives_of_each_run():
    """What the forward begins and nobody waits for there ends before the run does."""
    problem = make_region(
        [100] * 6, 3, collectives=(gather("a", 0, 1), gather("b", 2, 4), gather("c", 3, 6)), links=links()
    )
    region = SwapRegion(problem=problem, transfers=frugal_transfers(problem), points=((), ()), original=problem)
    visits = [
        Visit(index=7, call=call, backward=backward, region=region, held_bytes=0)
        for call, backward in ((0, False), (1, False), (1, True), (0, True))
    ]
    joined = join(visits, problem.links, problem.budgets).problem
    found = [(each.name, each.begin, each.needed_at) for each in joined.collectives]
    assert found == [
        ("7.0:a", 1, 2),
        ("7.0:b", 3, 4),
        ("7.1:a", 5, 6),
        ("7.1:b", 7, 8),
        ("7.1:c", 9, 12),
        ("7.0:c", 13, 16),
    ]
    in_turn = replace(problem, collectives=(gather("a", 0, 1), gather("b", 2, 3), gather("c", 3, 6)))
    assert ideal_ns(joined) == 2 * ideal_ns(in_turn)


def test_pictures_and_prices_have_a_lane_of_collectives():
    problem = scattered()
    plan = plan_of(problem)
    record = RegionRecord(
        region=0,
        name="f",
        torch_version="",
        device="cpu",
        options=(),
        problem=problem,
        captured=problem,
        plan=plan,
        listings=(),
    )
    timeline = region_timeline(record)
    (bar,) = timeline.lane(Lane.COLLECTIVE)
    assert (bar.name, bar.start_ns, bar.end_ns) == ("a", 200, 310)
    assert bar.note == "all gather of 200 B over 2 ranks; compute waits 10 ns for it"
    (stall,) = (bar for bar in timeline.lane(Lane.COMPUTE) if bar.sort == "stall")
    assert (stall.start_ns, stall.end_ns, stall.note) == (300, 310, "waits for a")
    (price,) = (each for each in find_reasons(problem, plan).prices if each.resource == "collectives")
    assert (price.amount, price.change_ns, price.copying_ns) == (10, -10, 10)
    assert "110 ns under way, 10 ns of it exposed" in show_summary(problem, plan, problem)
