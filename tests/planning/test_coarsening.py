"""Coarser problems: what they keep of the problem they stand for, and that a search in one finds as good a choice."""

from dataclasses import replace

import pytest
from captured import read_problem, read_runs
from drawn import drawn_cases
from hypothesis import HealthCheck, given
from programs import tight_problems

from tencache_fx.planning import search
from tencache_fx.planning.coarsening import coarsen, coarsen_within
from tencache_fx.planning.evaluation import Evaluator
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Kind, Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.tuning import TUNING
from tencache_fx.planning.verify import verify_plan

NAMES = sorted({run.problem for run in read_runs()})
LARGE = ("gpt2-tied", "llama", "lstm", "resnet", "unet", "vit")
STRETCHES = 60


def check_kept(problem: Problem, stretches: int) -> None:
    """Raise unless a coarser `problem` takes as long and needs as much, and has every recipe worth it once."""
    coarse = coarsen(problem, stretches)
    found = coarse.problem
    assert sum(op.duration_ns for op in found.ops) == sum(op.duration_ns for op in problem.ops)
    assert live_bytes(found).max() >= live_bytes(problem).max()
    for storage in found.storages:
        storage.check()
    members = [name for names in coarse.members.values() for name in names]
    least = problem.min_spill_bytes
    worth = [r.name for r in problem.recipes if any(s.name == r.name and s.nbytes >= least for s in problem.storages)]
    if found is not problem:
        assert sorted(members) == sorted(worth)
    assert {recipe.name for recipe in found.recipes} == set(coarse.members)
    assert coarse.fine(coarse.members) == tuple(sorted(members))
    for kind in (Kind.FETCHED, Kind.STORED):
        sizes = [sum(s.nbytes + s.state_bytes for s in p.storages if s.kind is kind) for p in (problem, found)]
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_coarser_problem_takes_as_long_and_needs_as_much(name: str) -> None:
    problem = read_problem(name)
    check_kept(problem, STRETCHES)
    assert len(coarsen(problem, STRETCHES).problem.ops) * 2 <= len(problem.ops)


@drawn_cases(200, suppress_health_check=[HealthCheck.too_slow])
@given(problem=tight_problems(most_forward=14, most_backward=14))
def test_any_problem_can_be_coarser(problem: Problem) -> None:
    check_kept(problem, 4)
    check_kept(problem, 1)


@pytest.mark.parametrize("name", LARGE)
def test_recomputing_everything_takes_as_long(name: str) -> None:
    """Stretches have an op for each set of recipes that share its steps."""
    problem = read_problem(name)
    coarse = coarsen(problem, STRETCHES)
    fine = recompute(problem, coarse.fine(coarse.members))
    assert recompute(coarse.problem, list(coarse.members)).recompute_ns == pytest.approx(fine.recompute_ns, rel=0.02)


def test_a_coarse_search_finds_as_good_a_choice() -> None:
    """On average, within a hundredth; and what it finds fits."""
    ratios = []
    for run in read_runs():
        if run.policy != "joint" or run.problem not in ("gpt2-tied", "lstm", "resnet", "unet"):
            continue
        problem = read_problem(run.problem).within(device_bytes=run.device_bytes)
        names = search._choose_recomputed(Evaluator(problem, replace(TUNING, coarse_from=100)))
        chosen = recompute(problem, names)
        assert floor_bytes(chosen) <= run.device_bytes
        plan = make_plan(chosen, "joint")
        verify_plan(keep_resident(chosen, **plan.pinned), plan)
        assert run.figures is not None
        ratios.append(plan.forecast.makespan_ns / run.figures.makespan_ns)
    assert len(ratios) == 8
    assert sum(ratios) / len(ratios) < 1.01


def test_what_does_not_fit_is_searched_again_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = read_problem("resnet").within(device_bytes=1_973_017_952)
    asked: list[int | None] = []

    def choose(evaluator: Evaluator) -> tuple[str, ...]:
        asked.append(evaluator.captured.budgets.device_bytes)
        return ()

    monkeypatch.setattr(search, "_search_turns", choose)
    evaluator = Evaluator(problem.within(device_bytes=floor_bytes(problem) - 10), replace(TUNING, coarse_from=0))
    assert search._choose_recomputed(evaluator) == ()
    assert asked == [floor_bytes(problem) - 10, floor_bytes(problem) - 20]


@pytest.mark.parametrize("name", ["gpt2-tied", "llama", "llama-adapted"])
def test_parameters_are_chosen_as_well_coarsely(name: str) -> None:
    runs = [run for run in read_runs() if run.problem == name and run.policy == "teraio"]
    assert len(runs) == 2
    for run in runs:
        problem = read_problem(name).within(device_bytes=run.device_bytes)
        tuning = replace(TUNING, coarse_from=100)
        fine, coarse = make_plan(problem, "teraio"), make_plan(problem, "teraio", tuning=tuning)
        verify_plan(keep_resident(problem, coarse.resident, coarse.updated_here), coarse)
        assert coarse.forecast.makespan_ns <= fine.forecast.makespan_ns * 1.01


def test_stretches_are_longer_where_they_hold_many_ops_unless_the_budget_is_near_the_floor() -> None:
    problem = read_problem("resnet")
    short = coarsen(problem, TUNING.stretches).problem
    assert coarsen_within(problem).problem == short
    few = replace(TUNING, coarse_ops=len(short.ops) // 2)
    longer = coarsen_within(problem.within(device_bytes=2 * floor_bytes(problem)), few).problem
    assert len(longer.ops) < len(short.ops)
    tight = problem.within(device_bytes=floor_bytes(problem))
    assert len(coarsen_within(tight, few).problem.ops) == len(short.ops)
