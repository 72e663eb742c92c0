"""What `explain` says of each tensor and each resource, against plans and replays made here by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn import drawn_cases
from hypothesis import assume, given
from outcomes import Outcomes
from problems import GIB, links, transformer
from test_bounds import problems_with_recipes, recipes_of_matmuls
from torch import nn

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.explain import Reasons, find_reasons
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem, Step, Tier
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import make_plan, plan_region
from tencache_fx.planning.simulator import simulate
from tencache_fx.reporting.dump import read_problem

EVERYTHING = 1000
SEEN = Outcomes()


def crowded(device_bytes: int = 6 * GIB, **sizes: int) -> Problem:
    problem = transformer(layers=2, device_bytes=device_bytes, **sizes)
    return replace(problem, recipes=recipes_of_matmuls(problem))


@pytest.fixture(scope="module")
def case() -> tuple[Problem, Problem, Plan, Reasons]:
    captured = crowded()
    problem, plan = plan_region(captured, "joint")
    return captured, problem, plan, find_reasons(captured, plan, most=EVERYTHING)


def test_every_decision_of_the_plan_is_there(case: tuple[Problem, Problem, Plan, Reasons]) -> None:
    captured, _, plan, reasons = case
    decided = {tensor.name: tensor.decision for tensor in reasons.tensors}
    assert reasons.makespan_ns == plan.forecast.makespan_ns
    assert {name for name, decision in decided.items() if decision == "recompute"} == set(plan.recomputed) != set()
    assert (
        {name for name, decision in decided.items() if decision == "host"} == {s.name for s in plan.transfers} != set()
    )
    sizes = [tensor.nbytes for tensor in reasons.tensors]
    assert sizes == sorted(sizes, reverse=True)
    for tensor in reasons.tensors:
        assert tensor.decision not in {choice.decision for choice in tensor.choices}
        assert (tensor.recipe_ns is None) == (tensor.name not in {recipe.name for recipe in captured.recipes})


def test_keeping_what_was_moved_is_the_plan_without_that_swap(case: tuple[Problem, Problem, Plan, Reasons]) -> None:
    _, problem, plan, reasons = case
    limit = problem.budgets.device_bytes
    assert limit is not None
    for transfer in plan.transfers:
        (tensor,) = (tensor for tensor in reasons.tensors if tensor.name == transfer.name)
        (keep,) = (choice for choice in tensor.choices if choice.decision == "keep")
        others = [other for other in plan.transfers if other != transfer]
        assert keep.over_bytes == max(0, int(live_bytes(problem, others).max()) - limit)
        assert keep.change_ns == simulate(problem, others).makespan_ns - plan.forecast.makespan_ns
    copies = {swap.name: swap for swap in simulate(problem, plan.transfers).transfers}
    for tensor in reasons.tensors:
        if tensor.decision == "host":
            swap = copies[tensor.name]
            assert tensor.out_ns == swap.out_end_ns - swap.out_start_ns >= tensor.nbytes * 10**9 // (48 * 10**9)
            assert tensor.stall_ns == swap.stall_out_ns + swap.stall_in_ns


def test_recomputing_more_or_less_is_planned_anew(case: tuple[Problem, Problem, Plan, Reasons]) -> None:
    captured, problem, plan, reasons = case
    again = set(plan.recomputed)
    for tensor in reasons.tensors:
        choices = {choice.decision: choice for choice in tensor.choices}
        if tensor.decision == "recompute":
            other = recompute(captured, again - {tensor.name})
            assert tensor.recipe_ns == problem.recompute_ns - other.recompute_ns
            planned = make_plan(other, "joint")
            moved = {transfer.name for transfer in planned.transfers}
            choice = choices["host" if tensor.name in moved else "keep"]
        elif "recompute" in choices:
            other = recompute(captured, again | {tensor.name})
            assert tensor.recipe_ns == other.recompute_ns - problem.recompute_ns
            planned, choice = make_plan(other, "joint"), choices["recompute"]
        else:
            continue
        assert choice.over_bytes == 0
        assert choice.change_ns == planned.forecast.makespan_ns - plan.forecast.makespan_ns


def test_prices_are_plans_with_more_and_less(case: tuple[Problem, Problem, Plan, Reasons]) -> None:
    captured, _, plan, reasons = case
    less, more, rates = reasons.prices  # host memory is plenty, and there is no disk
    assert [less.resource, more.resource, rates.resource] == ["device", "device", "links"]
    assert (less.amount, more.amount) == (-(6 * GIB // 20), 6 * GIB // 20)  # 5 %: the budget is below 10 GiB
    for price in (less, more):
        budgets = replace(captured.budgets, device_bytes=6 * GIB + price.amount)
        _, other = plan_region(replace(captured, budgets=budgets), "joint")
        assert price.change_ns == other.forecast.makespan_ns - plan.forecast.makespan_ns
    assert less.change_ns is not None
    assert more.change_ns is not None
    assert less.change_ns > 0 > more.change_ns
    moved = plan.forecast.d2h_bytes
    assert rates.copying_ns == pytest.approx(2 * moved / 48 * (1 - 1 / 1.1), rel=1e-6)
    assert rates.change_ns is not None
    assert rates.change_ns <= 0


def test_a_budget_at_the_floor_cannot_be_lowered() -> None:
    captured = transformer(layers=2)
    floor = make_plan(captured, "teraio").forecast.floor_bytes
    captured = captured.within(device_bytes=floor)
    _, plan = plan_region(captured, "teraio")
    reasons = find_reasons(captured, plan, most=2)
    assert reasons.prices[0].change_ns is None
    assert (len(reasons.tensors), reasons.left_out > 0) == (2, True)
    assert "recompute" not in {choice.decision for tensor in reasons.tensors for choice in tensor.choices}


def test_scarce_host_memory_and_disk_are_priced() -> None:
    captured = crowded(5 * GIB, host_bytes=GIB // 2, disk_bytes=64 * GIB)
    _, plan = plan_region(captured, "teraio")
    reasons = find_reasons(captured, plan, most=4)
    host = [price.change_ns for price in reasons.prices if price.resource == "host"]
    assert len(host) == 2
    assert "disk" not in {price.resource for price in reasons.prices}
    assert {tensor.decision for tensor in reasons.tensors} >= {"nvme"}
    short = [c for tensor in reasons.tensors for c in tensor.choices if c.decision == "host"]
    assert {choice.over_tier for choice in short} == {Tier.HOST}
    assert all(choice.over_bytes > 0 for choice in short)


def test_what_a_recipe_needs_is_held_longer() -> None:
    """`gate` is recomputed from `n2`, which would be gone sooner if only the forward read it."""
    captured = crowded()
    boundary = captured.boundary
    short = tuple(
        replace(
            s, uses=tuple(u for u in s.uses if u < boundary), death=Step(max(u for u in s.uses if u < boundary) + 1)
        )
        if s.name == "n2_0"
        else s
        for s in captured.storages
    )
    captured = replace(captured, storages=short, recipes=tuple(r for r in captured.recipes if r.name != "n2_0"))
    _, plan = plan_region(captured, "joint")
    reasons = find_reasons(captured, plan, most=EVERYTHING)
    held = {tensor.name: (tensor.held_longer, tensor.held_longer_bytes) for tensor in reasons.tensors}
    assert held["gate_0"] == (("n2_0",), 2 * 4 * 4096 * 4096)
    assert held["gate_1"] == ((), 0)


@SEEN.reaching(0.7, "fits")
@drawn_cases(50)
@given(problem=problems_with_recipes())
def test_no_choice_that_fits_beats_the_bound(problem: Problem) -> None:
    try:
        _, plan = plan_region(problem, "joint")
    except BudgetError:
        assume(False)
    reasons = find_reasons(problem, plan, most=EVERYTHING)
    bound = joint_lower_bound_ns(problem)
    for tensor in reasons.tensors:
        for choice in tensor.choices:
            fits = choice.change_ns is not None and choice.over_bytes == 0
            SEEN.note("fits" if fits else "does not fit" if choice.change_ns is not None else "impossible")
            assert choice.over_bytes >= 0
            assert choice.change_ns is None or not fits or reasons.makespan_ns + choice.change_ns >= bound


def test_explain_tells_of_live_regions() -> None:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    options = {"device_budget": "2MB", "compiler": "eager", "calibrate": False, "recompute": "none"}
    model = torch.compile(nn.Sequential(*layers), backend=tencache_fx.tencache, options=options)
    model(torch.randn(1024, 64)).square().mean().backward()
    record = tencache_fx.regions()[-1]
    assert record.captured == record.problem
    text = tencache_fx.explain(most=3)
    assert text.startswith(f"region {record.region} ")
    assert record.plan.transfers[0].name in tencache_fx.explain()
    assert " smaller ones are not shown." in text
    known = len(tencache_fx.regions())
    with pytest.raises(tencache_fx.OptionError, match=f"no region {known}"):
        tencache_fx.explain(known)


def test_a_region_that_recomputes_keeps_what_was_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links so slow that no transfer is free."""
    monkeypatch.setattr("tencache_fx.hardware.rates.links", lambda *args, **kwargs: links(5_000_000))
    torch.compiler.reset()
    blocks = (nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.GELU()) for _ in range(6))
    options = {"compiler": "eager", "calibrate": False, "device_budget": "9MB", "dump_dir": str(tmp_path)}
    model = torch.compile(nn.Sequential(*blocks), backend=tencache_fx.tencache, options=options)
    model(torch.randn(1024, 128)).square().mean().backward()
    record = tencache_fx.regions()[-1]
    assert record.plan.recomputed
    assert set(record.plan.recomputed) <= {recipe.name for recipe in record.captured.recipes}
    assert len(record.captured.ops) < len(record.problem.ops)
    (path,) = tmp_path.glob("region-*/record.json")
    assert read_problem(path) == record.captured
    reasons = find_reasons(record.captured, record.plan, most=4)
    assert "recompute" in {tensor.decision for tensor in reasons.tensors}
    assert f"recomputed       {len(record.plan.recomputed)}, " in tencache_fx.report()
