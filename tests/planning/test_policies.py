"""Every policy on random regions, and on a transformer of real size."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import pytest
from drawn import drawn_cases
from hypothesis import assume, given
from outcomes import Outcomes
from problems import GIB, PLENTY, boundary_bytes, crowded_region, links, moving_problems, problems, transformer
from work import counted_calls

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident
from tencache_fx.planning.plan import Plan, Transfer, TransferKind
from tencache_fx.planning.planner import POLICIES, floor_bytes
from tencache_fx.planning.problem import Problem, Tier
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.simulator import simulate
from tencache_fx.planning.tuning import TUNING, Tuning
from tencache_fx.planning.verify import verify_plan

SEEN = Outcomes()
SPILLING = [name for name in POLICIES if name != "none"]


def with_device(problem: Problem, device_bytes: int | None) -> Problem:
    return problem.within(device_bytes=device_bytes)


def plan_or_refusal(problem: Problem, policy: str, tuning: Tuning = TUNING) -> tuple[Plan | None, str]:
    try:
        return make_plan(problem, policy, tuning=tuning), ""
    except BudgetError as error:
        return None, str(error)


def held(problem: Problem, transfers: tuple[Transfer, ...], step: int) -> int:
    """Device bytes at one step, counted one storage at a time."""
    away = {s.name for s in transfers if s.freed_at <= step < s.prefetch_at}
    live = [s.nbytes for s in problem.storages if s.birth <= step < s.death and s.name not in away]
    beside = problem.external_bytes + boundary_bytes(problem, step)
    return sum(live) + problem.ops[step].scratch_bytes + beside


@SEEN.reaching(0.2, "with transfers", "with disk")
@drawn_cases(200)
@given(problem=problems())
def test_plan_keeps_every_rule_or_the_budget_is_refused(problem: Problem) -> None:
    for policy in SPILLING:
        check_plan(policy, problem)


@pytest.mark.slow
@SEEN.reaching(0.2, "with transfers", "with disk")
@drawn_cases(1000)
@given(problem=problems())
def test_plans_of_many_regions_keep_every_rule(problem: Problem) -> None:
    for policy in SPILLING:
        check_plan(policy, problem)


def check_plan(policy: str, problem: Problem) -> None:
    limit = problem.budgets.device_bytes
    plan, refusal = plan_or_refusal(problem, policy)
    assert ("on the device" in refusal) == (limit is not None and floor_bytes(problem) > limit)
    if plan is None:
        SEEN.note("device refused" if "on the device" in refusal else "tier refused")
        assert "on the device" in refusal or problem.budgets.host_bytes < PLENTY
        return
    disk = any(transfer.tier is Tier.NVME for transfer in plan.transfers)
    SEEN.note("with disk" if disk else "with transfers" if plan.transfers else "left alone")
    verify_plan(problem, plan)
    peak = max(held(problem, plan.transfers, step) for step in range(len(problem.ops)))
    assert plan.forecast.peak_bytes == peak == held(problem, plan.transfers, plan.forecast.peak_step)
    assert limit is None or peak <= limit
    assert plan.forecast.lower_bound_ns <= plan.forecast.makespan_ns
    assert plan == make_plan(problem, policy)


@SEEN.reaching(0.2, "loaded")
@drawn_cases(60)
@given(problem=moving_problems())
def test_parameters_and_gradients_are_transferred_by_every_rule(problem: Problem) -> None:
    for policy in POLICIES:
        check_moves(policy, problem)


@pytest.mark.slow
@SEEN.reaching(0.2, "loaded")
@drawn_cases(500)
@given(problem=moving_problems())
def test_parameters_and_gradients_of_many_regions_are_transferred_by_every_rule(problem: Problem) -> None:
    for policy in POLICIES:
        check_moves(policy, problem)


def check_moves(policy: str, problem: Problem) -> None:
    plan, refusal = plan_or_refusal(problem, policy)
    if plan is None:
        SEEN.note("device refused" if "on the device" in refusal else "tier refused")
        return
    staying = keep_resident(problem, **plan.pinned)
    loaded = any(transfer.kind is TransferKind.LOAD for transfer in plan.transfers)
    SEEN.note("loaded" if loaded else "resident" if plan.resident else "neither")
    verify_plan(staying, plan)
    assert plan.forecast.makespan_ns >= sum(op.duration_ns for op in problem.ops)
    streamed, _ = plan_or_refusal(problem, policy, replace(TUNING, resident_shares=(0.0,), state_shares=()))
    if streamed is not None:  # what arrives ahead of its use can need more than what stays
        assert plan.forecast.makespan_ns * 1000 <= streamed.forecast.makespan_ns * 1005


@pytest.mark.parametrize(
    "seeds", [range(80), pytest.param(range(80, 400), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_plans_of_crowded_regions_keep_every_rule(seeds: range) -> None:
    outcomes = dict.fromkeys(("planned", "with disk", "tier refused"), 0)
    makespans: dict[str, list[int]] = {policy: [] for policy in SPILLING}
    for seed in seeds:
        problem = crowded_region(seed)
        for policy in SPILLING:
            plan, refusal = plan_or_refusal(problem, policy)
            assert "on the device" not in refusal, seed
            if plan is None:
                assert problem.budgets.host_bytes < PLENTY, seed
                outcomes["tier refused"] += 1
                continue
            verify_plan(problem, plan)
            assert plan.forecast.lower_bound_ns <= plan.forecast.makespan_ns, seed
            outcomes["planned"] += len(plan.transfers) > 0
            outcomes["with disk"] += any(transfer.tier is Tier.NVME for transfer in plan.transfers)
            if problem.budgets.host_bytes == PLENTY:
                makespans[policy].append(plan.forecast.makespan_ns)
    assert outcomes["planned"] > 1.6 * len(seeds)
    assert min(outcomes.values()) > 0, outcomes
    assert sum(makespans["teraio"]) < sum(makespans["10cache"])


@drawn_cases(50)
@given(problem=problems())
def test_a_region_that_fits_is_left_alone(problem: Problem) -> None:
    peak = int(live_bytes(problem).max())
    for policy, device_bytes in product(POLICIES, (None, peak)):
        plan = make_plan(with_device(problem, device_bytes), policy)
        assert (plan.transfers, plan.pool, plan.staging) == ((), (), ())
        assert plan.forecast.makespan_ns == plan.forecast.ideal_ns == plan.forecast.lower_bound_ns


@drawn_cases(50)
@given(problem=problems())
def test_none_refuses_what_does_not_fit(problem: Problem) -> None:
    peak = int(live_bytes(problem).max())
    assume(peak > 0)
    with pytest.raises(BudgetError, match=r'policy="none" never spills; the budget is'):
        make_plan(with_device(problem, peak - 1), "none")


@pytest.mark.parametrize("policy", SPILLING)
def test_the_floor_can_be_reached(policy: str) -> None:
    problem = transformer(layers=3)
    floor = floor_bytes(problem)
    plan = make_plan(with_device(problem, floor), policy)
    verify_plan(problem, plan)
    assert plan.forecast.peak_bytes <= floor == plan.forecast.floor_bytes
    with pytest.raises(BudgetError, match="on the device"):
        make_plan(with_device(problem, floor - 1), policy)


def test_teraio_hides_what_the_link_can_carry() -> None:
    """The case of the targets: 20.9 GiB in 16.8 GiB, on a link that can carry away about 4.3 GiB during forward."""
    problem = transformer(device_bytes=int(16.8 * GIB))
    plan = make_plan(problem, "teraio")
    verify_plan(problem, plan)
    assert plan.forecast.makespan_ns <= 1.02 * plan.forecast.ideal_ns
    window = make_plan(problem, "10cache")
    verify_plan(problem, window)
    assert plan.forecast.makespan_ns < window.forecast.makespan_ns


def test_transformer_has_the_measured_shape() -> None:
    """So that the case above is the one that was measured on a GPU."""
    problem = transformer()
    forward = sum(op.duration_ns for op in problem.ops[: problem.boundary])
    backward = sum(op.duration_ns for op in problem.ops[problem.boundary :])
    saved = [s for s in problem.storages if s.spillable and s.birth < problem.boundary <= s.uses[-1]]
    saved = [s for s in saved if s.name != "log_softmax"]
    assert forward == pytest.approx(98e6, rel=0.05)
    assert backward == pytest.approx(200e6, rel=0.05)
    assert int(live_bytes(problem).max()) == pytest.approx(20.9 * GIB, rel=0.03)
    assert sum(s.nbytes for s in saved) == pytest.approx(14 * GIB, rel=0.05)


@pytest.mark.parametrize("policy", SPILLING)
def test_nvme_takes_what_host_memory_cannot(policy: str) -> None:
    problem = transformer(device_bytes=14 * GIB, host_bytes=4 * GIB, disk_bytes=32 * GIB)
    plan = make_plan(problem, policy)
    verify_plan(problem, plan)
    assert {transfer.tier for transfer in plan.transfers} == {Tier.HOST, Tier.NVME}
    assert plan.forecast.host_bytes <= 4 * GIB
    assert plan.forecast.disk_write_bytes == plan.forecast.disk_read_bytes > 0


@pytest.mark.parametrize("policy", SPILLING)
def test_tiers_too_small_are_refused_with_both_numbers(policy: str) -> None:
    problem = transformer(device_bytes=14 * GIB, host_bytes=2 * GIB)
    with pytest.raises(BudgetError, match=r"need 7\.\d+ GB of pinned host memory; host_budget is 2\.15 GB") as caught:
        make_plan(problem, policy)
    assert "spill_dir" in str(caught.value)
    with pytest.raises(BudgetError):
        make_plan(problem.within(disk_bytes=2 * GIB), policy)


def test_more_memory_is_not_slower() -> None:
    problem = transformer()
    times = [make_plan(with_device(problem, b * GIB), "teraio").forecast.makespan_ns for b in range(12, 22)]
    assert all(less >= 0.995 * more for less, more in pairwise(times))


def test_a_slower_link_never_overruns() -> None:
    """Late copies are stalls: with links at half the planned rate the same plan holds the same bytes, only longer."""
    problem = transformer(device_bytes=17 * GIB)
    plan = make_plan(problem, "teraio")
    slow = replace(problem, links=links(24 * 10**9))
    verify_plan(slow, plan)
    times = [simulate(p, plan.transfers, plan.staging).makespan_ns for p in (problem, slow)]
    assert times[0] < times[1] < plan.forecast.ideal_ns + 2 * plan.forecast.d2h_bytes / 24
    near = replace(problem, links=links(46 * 10**9))
    assert simulate(near, plan.transfers, plan.staging).makespan_ns <= 1.01 * plan.forecast.ideal_ns


def test_device_refusal_reads_well() -> None:
    problem = transformer(layers=2, device_bytes=2 * GIB)
    with pytest.raises(BudgetError) as caught:
        make_plan(problem, "teraio")
    first, held_line, floor_line, remedy = str(caught.value).splitlines()
    assert first.startswith("step ")
    assert "the budget is 2.15 GB." in first
    assert held_line.count("B (activation)") + held_line.count("B (parameter)") == 5
    assert " more " in held_line
    assert f"Set device_budget to {-(-floor_bytes(problem) // 2**20)}MiB" in remedy
    assert "floor" in floor_line
    enough = -(-floor_bytes(problem) // 2**20) * 2**20
    verify_plan(problem_at := with_device(problem, enough), make_plan(problem_at, "teraio"))


def test_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="Did you mean 'teraio'"):
        make_plan(transformer(layers=1), "terraio")


def test_planning_imports_no_torch() -> None:
    code = "import sys, tencache_fx.planning.planner, tencache_fx.planning.verify; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", SPILLING)
@pytest.mark.parametrize(("layers", "split", "million_calls"), [(32, 5, 5), (80, 5, 20)])
def test_planning_takes_bounded_work(policy: str, layers: int, split: int, million_calls: int) -> None:
    problem = transformer(layers=layers, split=split, host_bytes=PLENTY)
    peak = int(live_bytes(problem).max())
    middle = (peak + floor_bytes(problem)) // 2
    problem = with_device(problem, middle)
    plan, calls = counted_calls(lambda: make_plan(problem, policy))
    assert calls < million_calls * 1_000_000
    verify_plan(problem, plan)


def test_steps_are_plain_integers() -> None:
    """Not numpy's: a plan is written as JSON."""
    plan = make_plan(transformer(layers=2, device_bytes=6 * GIB), "teraio")
    assert plan.transfers
    for transfer in plan.transfers:
        assert all(type(v) is int for v in (*transfer.steps, transfer.nbytes))
