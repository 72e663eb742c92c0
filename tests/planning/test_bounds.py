"""No plan beats the bound, and the bound is near what plans reach."""

import subprocess
import sys
from dataclasses import replace
from itertools import chain, combinations

import pytest
from drawn import drawn_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from outcomes import Outcomes
from problems import (
    GIB,
    links,
    make_region,
    make_storage,
    moving_problems,
    offloaded_weights,
    problems,
    recipes_of_matmuls,
    transformer,
)

from tencache_fx.errors import BudgetError
from tencache_fx.planning import search
from tencache_fx.planning.bounds import _Relaxation, joint_lower_bound_ns, moves_too_much
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import lower_bound_ns
from tencache_fx.planning.problem import Budgets, Kind, Problem, Recipe, Step
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import make_plan, plan_region, policy_floor_bytes

SEEN = Outcomes()


@st.composite
def problems_with_recipes(draw: st.DrawFn) -> Problem:
    """Regions in which some saved activations can be made again, by steps that they may share."""
    problem = draw(problems())
    made = (replace(s, uses=tuple(sorted({s.birth, *s.uses}))) for s in problem.storages)  # what makes it touches it
    problem = replace(problem, storages=tuple(made))
    recipes = []
    for storage in problem.storages:
        early = storage.uses[0] < problem.boundary <= storage.uses[-1]
        if storage.kind is Kind.ACTIVATION and early and len(recipes) < 4:
            others = draw(st.sets(st.integers(0, problem.boundary - 1), max_size=3))
            recipes.append(Recipe(name=storage.name, steps=tuple(map(Step, sorted({storage.birth, *others})))))
    return replace(problem, recipes=tuple(recipes))


def subsets(names: list[str]) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(names, size) for size in range(len(names) + 1)))


def plan_or_none(problem: Problem, policy: str) -> Plan | None:
    try:
        return make_plan(problem, policy)
    except BudgetError:
        return None


@SEEN.reaching(0.4, "recomputed", "stalls")
@drawn_cases(300)
@given(problem=problems_with_recipes())
def test_no_plan_of_any_choice_of_recipes_beats_the_bound(problem: Problem) -> None:
    bound = joint_lower_bound_ns(problem)
    for names in subsets([recipe.name for recipe in problem.recipes]):
        changed = recompute(problem, names)
        for policy in ("10cache", "teraio"):
            plan = plan_or_none(changed, policy)
            if plan is not None:
                stalls = plan.forecast.makespan_ns > plan.forecast.ideal_ns
                SEEN.note("recomputed" if names else "stalls" if stalls else "neither")
                assert bound <= plan.forecast.makespan_ns, names


@SEEN.reaching(0.25, "recomputes", "said")
@drawn_cases(60)
@given(problem=problems_with_recipes(), data=st.data())
def test_without_links_the_best_choice_of_recipes_does_not_beat_the_bound(
    problem: Problem, data: st.DataObject
) -> None:
    """Where nothing can move, all choices can be tried, and most budgets ask for some of them."""
    assume(problem.recipes)
    choices = {}
    for names in subsets([recipe.name for recipe in problem.recipes]):
        changed = recompute(problem, names)
        choices[names] = int(live_bytes(changed).max()), sum(op.duration_ns for op in changed.ops)
    limit = data.draw(st.sampled_from(sorted({peak for peak, _ in choices.values()})))
    best_ns = min(duration_ns for peak, duration_ns in choices.values() if peak <= limit)
    stuck = replace(problem.within(device_bytes=limit), links=links(0))
    bound = joint_lower_bound_ns(stuck)
    SEEN.note("neither" if best_ns == choices[()][1] else "said" if bound > choices[()][1] else "recomputes")
    assert bound <= best_ns


@drawn_cases(100)
@given(problem=problems_with_recipes())
def test_joint_never_beats_the_bound(problem: Problem) -> None:
    try:
        planned_for, plan = plan_region(problem, "joint")
    except BudgetError:
        assume(False)
    assert joint_lower_bound_ns(problem) <= plan.forecast.makespan_ns
    assert planned_for == recompute(problem, plan.recomputed)


@drawn_cases(100)
@given(problem=problems())
def test_without_recipes_the_bound_is_one_for_transfers_alone(problem: Problem) -> None:
    """And as good as the plain one, but for the steps it skips and the cells it rounds down to."""
    plan = plan_or_none(problem, "teraio")
    assume(plan is not None)
    assert plan is not None
    bound = joint_lower_bound_ns(problem)
    assert 0.97 * lower_bound_ns(problem) - 1 <= bound <= plan.forecast.makespan_ns


@drawn_cases(100)
@given(problem=problems_with_recipes())
def test_steps_are_passed_over_only_where_they_do_not_matter(problem: Problem) -> None:
    passing, every = joint_lower_bound_ns(problem), _Relaxation.at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Relaxation, "at", lambda self, step, over_bytes, _known_ns: every(self, step, over_bytes))
        assert joint_lower_bound_ns(problem) == passing


def test_memory_held_between_the_graphs_counts_where_the_backward_begins_after_recomputing() -> None:
    """External memory held between the graphs is not held at a step that recomputing puts behind the first one."""
    problem = make_region(
        (0, 1, 0, 0, 0),
        3,
        make_storage("free", 2, (0, 3)),
        make_storage("costly", 2, (1, 4)),
        make_storage("g", 1, (3,), kind=Kind.INPUT),
        budgets=Budgets(device_bytes=6, host_bytes=GIB),
        boundary_bytes=4,
        recipes=(Recipe(name="free", steps=(Step(0),)), Recipe(name="costly", steps=(Step(1),))),
    )
    changed = recompute(problem, ["free"])
    assert int(live_bytes(problem).max()) > 6 >= int(live_bytes(changed).max())
    assert joint_lower_bound_ns(problem) == sum(op.duration_ns for op in changed.ops) == 1


def test_a_step_that_two_recipes_share_is_counted_once() -> None:
    problem = make_region(
        (100,) * 5,
        3,
        make_storage("a", 8, (1, 4), spillable=True),
        make_storage("b", 2, (2, 4), spillable=True),
        make_storage("c", 9, (3,), spillable=True),
        budgets=Budgets(device_bytes=10, host_bytes=0),
        recipes=(Recipe(name="a", steps=(Step(0), Step(1))), Recipe(name="b", steps=(Step(0), Step(2)))),
    )
    # At step 3 nine bytes are over: all of a (100 ns, and 8 parts in 10 of step 0's), half of b (100 ns and 2 parts).
    assert joint_lower_bound_ns(problem) == 500 + (100 + 80) + (100 + 20) // 2
    everything = recompute(problem, ["a", "b"])
    assert sum(op.duration_ns for op in everything.ops) == 500 + 300


def test_more_memory_lowers_the_bound_and_recipes_do_too() -> None:
    problem = transformer(layers=4)
    able = replace(problem, recipes=recipes_of_matmuls(problem))
    peak = int(live_bytes(problem).max())
    bounds = []
    for share in (0.4, 0.6, 0.8, 1.0):
        budgets = replace(problem.budgets, device_bytes=int(peak * share))
        pair = [joint_lower_bound_ns(replace(p, budgets=budgets)) for p in (problem, able)]
        assert pair[1] <= pair[0]
        bounds.append(pair)
    assert bounds[0][1] < bounds[0][0]
    for column in zip(*bounds, strict=True):
        assert list(column) == sorted(column, reverse=True)
    assert bounds[-1] == [sum(op.duration_ns for op in problem.ops)] * 2


def test_joint_comes_near_the_bound() -> None:
    problem = transformer(layers=4, device_bytes=8 * GIB)
    problem = replace(problem, recipes=recipes_of_matmuls(problem))
    bound = joint_lower_bound_ns(problem)
    _, plan = plan_region(problem, "joint")
    assert plan.recomputed
    assert bound <= plan.forecast.makespan_ns <= 1.05 * bound
    assert bound > 1.02 * plan.forecast.ideal_ns


def test_a_disk_slower_than_the_link_raises_the_bound() -> None:
    times = [
        joint_lower_bound_ns(transformer(layers=4, device_bytes=8 * GIB, host_bytes=host * GIB, disk_bytes=64 * GIB))
        for host in (64, 1)
    ]
    assert times[1] > 1.5 * times[0]


def test_the_floor_of_a_policy_is_where_it_fits() -> None:
    problem = transformer(layers=2)
    problem = replace(problem, recipes=recipes_of_matmuls(problem))
    for policy in ("none", "teraio", "joint"):
        floor = policy_floor_bytes(problem, policy)
        budgets = replace(problem.budgets, device_bytes=floor)
        _, plan = plan_region(replace(problem, budgets=budgets), policy)
        assert plan.forecast.peak_bytes <= floor
        if policy != "joint":
            with pytest.raises(BudgetError):
                plan_region(problem.within(device_bytes=floor - 1), policy)


def test_planning_a_region_imports_no_torch() -> None:
    code = "import sys, tencache_fx.planning.search, tencache_fx.planning.bounds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@SEEN.reaching(0.1, "moves too much", "has a plan")
@drawn_cases(150)
@given(problem=st.one_of(problems(), moving_problems()), share=st.floats(0, 1))
def test_what_moves_too_much_has_no_plan(problem: Problem, share: float) -> None:
    peak, limit = int(live_bytes(problem).max(initial=0)), problem.budgets.device_bytes
    problem = problem.within(host_bytes=int(share * max(0, peak - (limit or 0)) * 1.2), disk_bytes=0)
    try:
        make_plan(problem, "joint")
    except BudgetError:
        SEEN.note("moves too much" if moves_too_much(problem) else "has none")
    else:
        SEEN.note("has a plan")
        assert not moves_too_much(problem)


def test_what_moves_too_much_is_not_planned_if_recomputing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer(layers=6)
    problem = replace(problem, recipes=recipes_of_matmuls(problem))
    limit = policy_floor_bytes(problem, "joint") * 5 // 4
    problem = problem.within(device_bytes=limit, host_bytes=(int(live_bytes(problem).max()) - limit) // 2)
    assert moves_too_much(problem)
    found = plan_region(problem, "joint")
    assert found[1].recomputed
    monkeypatch.setattr(search, "moves_too_much", lambda problem: False)
    assert plan_region(problem, "joint") == found


@SEEN.reaching(0.1, "moves", "fits")
@drawn_cases(150)
@given(problem=st.one_of(problems(), moving_problems()))
def test_what_cannot_gain_is_no_faster(problem: Problem) -> None:
    """Whatever is pinned on the device: without offloaded parameters there is more room, and less to copy."""
    try:
        plan = make_plan(problem, "joint")
    except BudgetError:
        assume(False)
    planned_for = keep_resident(problem, **plan.pinned)
    SEEN.note("moves" if plan.transfers else "fits")
    assert not search._cannot_gain(problem, step_ns(planned_for, plan.forecast))


def test_what_cannot_gain_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = offloaded_weights(transformer(layers=6))
    problem = replace(problem, recipes=recipes_of_matmuls(problem), links=links(10**7))
    problem = problem.within(device_bytes=policy_floor_bytes(problem, "joint") * 5 // 4)
    settled, settle = [], search._settle

    def noted(evaluator: Evaluator, base: Candidate) -> Candidate:
        settled.append(bool(base.recomputed))
        return settle(evaluator, base)

    monkeypatch.setattr(search, "_settle", noted)
    found = plan_region(problem, "joint")
    assert settled == [True]
    monkeypatch.setattr(search, "_cannot_gain", lambda captured, known_ns: False)
    assert plan_region(problem, "joint") == found
    assert settled == [True, True, False]
