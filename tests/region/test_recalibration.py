"""What is measured, and fed back, explains the measurement: on values, and in a region that is planned again."""

import re
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import compiled, planned_floor
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import GIB, transformer
from torch import Tensor, nn
from torch._dynamo.utils import counters

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.hardware.cache import cached
from tencache_fx.hardware.rates import device_key
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Links, Step
from tencache_fx.planning.recalibration import PhaseTimes, Scales, correct, fit_scales, forecast_phases, reconsider
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.verify import verify_plan
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.timers import PhaseClock
from tencache_fx.units import format_ns


@settings(max_examples=15)
@given(forward=st.floats(0.5, 2.0), backward=st.floats(0.5, 2.0), device_gib=st.sampled_from([6, 9, 40]))
def test_scales_are_found_again(forward: float, backward: float, device_gib: int) -> None:
    problem = transformer(layers=3, device_bytes=device_gib * GIB)
    plan = make_plan(problem, "teraio")
    real = Scales(forward=forward, backward=backward).apply(problem)
    measured = forecast_phases(real, plan.transfers, plan.staging)
    found = fit_scales(problem, plan.transfers, plan.staging, measured)
    again = forecast_phases(found.apply(problem), plan.transfers, plan.staging)
    assert again.forward_ns == pytest.approx(measured.forward_ns, rel=0.01)
    assert again.backward_ns == pytest.approx(measured.backward_ns, rel=0.01)
    if not plan.transfers:  # nothing is waited for: there is one answer
        assert (found.forward, found.backward) == (pytest.approx(forward, rel=0.01), pytest.approx(backward, rel=0.01))


def test_phases_add_up_to_the_makespan() -> None:
    problem = transformer(layers=2, device_bytes=6 * GIB)
    plan = make_plan(problem, "teraio")
    phases = forecast_phases(problem, plan.transfers, plan.staging)
    assert phases.forward_ns + phases.backward_ns == plan.forecast.makespan_ns
    assert 0 < phases.forward_ns < plan.forecast.makespan_ns


def test_scales_leave_bytes_alone_and_follow_one_another() -> None:
    problem = replace(transformer(layers=1), recompute_ns=1000)
    scaled = Scales(forward=2.0, backward=0.5).apply(problem)
    assert scaled.storages == problem.storages
    assert scaled.recompute_ns == 500
    assert scaled.ops[0].duration_ns == 2 * problem.ops[0].duration_ns
    assert scaled.ops[-1].duration_ns == round(problem.ops[-1].duration_ns / 2)
    assert Scales(forward=2.0).after(Scales(forward=3.0, backward=4.0)) == Scales(forward=6.0, backward=4.0)


def test_without_a_backward_nothing_is_learned_of_it() -> None:
    problem = transformer(layers=1)
    problem = replace(problem, boundary=Step(len(problem.ops)))
    plan = make_plan(problem, "none")
    measured = PhaseTimes(forward_ns=2 * plan.forecast.makespan_ns, backward_ns=0)
    found = fit_scales(problem, plan.transfers, plan.staging, measured)
    assert found.forward == pytest.approx(2.0, rel=0.01)
    assert found.backward == 1.0


def test_a_measurement_of_something_else_is_bounded() -> None:
    problem = transformer(layers=1)
    plan = make_plan(problem, "none")
    huge = PhaseTimes(forward_ns=10**15, backward_ns=0)
    found = fit_scales(problem, plan.transfers, plan.staging, huge)
    assert 4.5 < found.forward <= 5.0
    assert 0.2 <= found.backward < 0.22


def test_a_forecast_is_corrected_where_no_other_plan_is_faster() -> None:
    problem = transformer(layers=3, device_bytes=9 * GIB)
    plan = make_plan(problem, "teraio")
    for factor in (1.05, 1.5):
        real = Scales(forward=factor, backward=factor).apply(problem)
        measured = forecast_phases(real, plan.transfers, plan.staging)
        lesson = reconsider(problem, problem, plan, measured)
        assert lesson is not None
        assert not lesson.pays
        _, corrected, again = correct(problem, problem, plan, lesson.scales).values()
        verify_plan(corrected, again)
        assert again.forecast.makespan_ns == pytest.approx(measured.forward_ns + measured.backward_ns, rel=0.01)
        assert (again.transfers, again.pool, again.forecast.peak_bytes) == (
            plan.transfers,
            plan.pool,
            plan.forecast.peak_bytes,
        )
    assert reconsider(problem, problem, plan, forecast_phases(problem, plan.transfers, plan.staging)) is None


@pytest.fixture
def slow_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that promise seconds of compute hide every copy; the first steps show how little there is to hide in."""
    monkeypatch.setattr(
        "tencache_fx.region.analysis.time_calls", lambda *args, **kwargs: {}
    )  # it would notice beforehand
    cpu = torch.device("cpu")
    rate = 5_000_000
    slow_links = Links(
        d2h_bytes_per_s=rate, h2d_bytes_per_s=rate, d2h_duplex_bytes_per_s=rate, h2d_duplex_bytes_per_s=rate
    )
    slow = Roofline(flops_per_s=(("float32", 10**9),), memory_bytes_per_s=2 * 10**7, launch_ns=0, issue_ns=0)
    cached(device_key("links", cpu), Links, lambda: slow_links, renew=True)
    cached(device_key("roofline", cpu), Roofline, lambda: slow, renew=True)


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.GELU()) for _ in range(6))
    )


@pytest.mark.usefixtures("slow_rates")
def test_a_region_is_planned_again_once_and_remembers() -> None:
    def train(steps: int) -> tuple[list[float], list[tuple[str, ...]]]:
        torch.compiler.reset()
        options = {"compiler": "eager", "device_budget": "9MB"}
        run = torch.compile(tower(), backend="tencache", options=options)
        x = torch.randn(1024, 128)
        losses, recomputed = [], []
        for _ in range(steps):
            loss = run(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            recomputed.append(tencache_fx.regions()[-1].plan.recomputed)
        return losses, recomputed

    losses, recomputed = train(12)
    assert not recomputed[0]
    assert recomputed[-1]
    assert len(set(recomputed)) == 2
    assert len(set(losses)) == 1
    assert train(1) == (losses[:1], recomputed[-1:])


@pytest.mark.slow
def test_the_second_start_neither_searches_nor_compiles_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    links = Links(
        d2h_bytes_per_s=10**7, h2d_bytes_per_s=10**7, d2h_duplex_bytes_per_s=10**7, h2d_duplex_bytes_per_s=10**7
    )
    cached(device_key("links", torch.device("cpu")), Links, lambda: links, renew=True)

    def start() -> tuple[float, tuple[str, ...]]:
        torch.compiler.reset()
        counters.clear()
        run = torch.compile(Loss(), backend="tencache", options={"device_budget": "5MB"})
        loss = run(torch.ones(1024, 128))
        loss.backward()
        return loss.item(), tencache_fx.regions()[-1].plan.recomputed

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    first = start()
    assert first[1]
    assert counters["inductor"]["fxgraph_cache_miss"] >= 2
    for search in ("choose_for_region", "make_plan"):
        monkeypatch.setattr(f"tencache_fx.region.kept_plans.{search}", pytest.fail)
    assert start() == first
    assert (counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]) == (2, 0)


@pytest.mark.usefixtures("slow_rates")
@pytest.mark.parametrize("factor", [0.5, 2])
def test_of_two_plans_the_one_that_was_faster_stays(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The first takes what it takes; the one that seemed faster by what was learned of it half of that, or twice."""
    slower = factor > 1
    rounds = []

    class Clock(PhaseClock):
        def times(self) -> PhaseTimes | None:
            if (found := super().times()) is not None:
                rounds.append(found)
                if len(rounds) == 2:
                    forward_ns, backward_ns = rounds[0].forward_ns, rounds[0].backward_ns
                    found = PhaseTimes(forward_ns=int(factor * forward_ns), backward_ns=int(factor * backward_ns))
            return found

    monkeypatch.setattr("tencache_fx.region.lowering.PhaseClock", Clock)

    def train(steps: int) -> tuple[list[float], list[Plan]]:
        torch.compiler.reset()
        run = torch.compile(tower(), backend="tencache", options={"compiler": "eager", "device_budget": "9MB"})
        x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0))
        losses, plans = [], []
        for _ in range(steps):
            loss = run(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            plans.append(tencache_fx.regions()[-1].plan)
        return losses, plans

    monkeypatch.setattr(REGIONS, "_live", weakref.WeakSet())  # what other tests have left is not of this model
    losses, plans = train(24)
    assert len(rounds) == 2
    times = PhaseTimes(forward_ns=int(factor * rounds[0].forward_ns), backward_ns=int(factor * rounds[0].backward_ns))
    told = rounds[0] if slower else times
    assert f"forward_ns  {format_ns(told.forward_ns)}" in re.sub(" {3,}", "  ", tencache_fx.report())
    assert re.search(
        r"A step takes .* from call to call.* Its bound is .* \(\w.*\): .*% of it is reached", tencache_fx.report()
    )
    assert len(set(losses)) == 1
    recomputed = [plan.recomputed for plan in plans]
    assert not recomputed[0]
    assert recomputed[12]
    assert recomputed[-1] == (recomputed[0] if slower else recomputed[12])
    again = train(14)[1]
    assert len(rounds) == (2 if slower else 3)
    assert again[0].recomputed == recomputed[-1]
    if slower:
        assert len({plan.recomputed for plan in again}) == 1
        assert plans[-1].transfers == plans[0].transfers
        assert again[0].forecast.makespan_ns == plans[-1].forecast.makespan_ns < plans[0].forecast.makespan_ns


class Loss(nn.Module):
    """A tower with its loss, so that all that is held is the region's."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x).square().mean()


@pytest.mark.usefixtures("slow_rates")
def test_what_is_learned_at_large_sizes_is_planned_for_them() -> None:
    model, budget = Loss(), 9_000_000
    run = torch.compile(model, backend="tencache", options={"compiler": "eager", "device_budget": budget})
    own = sum(p.nbytes for p in model.parameters())
    plans, peaks = [], []
    for batch in (600, *[1100] * 12):
        model.zero_grad()
        x = torch.randn(batch, 128)
        torch._dynamo.mark_dynamic(x, 0)
        peak = tencache_fx.peak_bytes(lambda x=x: run(x).backward(), torch.device("cpu"))
        peaks.append(own + x.nbytes + peak)
        plans.append(tencache_fx.regions()[-1].plan)
    assert plans[1].transfers
    assert plans[-1].recomputed != plans[1].recomputed
    assert max(peaks) <= budget + 1024


@pytest.mark.usefixtures("slow_rates")
def test_times_of_other_sizes_teach_nothing() -> None:
    """At a fourth of the size a step takes a fourth of the time: that is not a wrong forecast."""
    run = torch.compile(Loss(), backend="tencache", options={"compiler": "eager", "device_budget": 9_000_000})
    plans = []
    for batch in (1100, *[275] * 14):
        x = torch.randn(batch, 128)
        torch._dynamo.mark_dynamic(x, 0)
        run(x).backward()
        plans.append(tencache_fx.regions()[-1].plan)
    assert plans[0].transfers
    assert len(set(plans)) == 1


class Stack(nn.Module):
    """Keeps every layer's result to the end: it spills in inference, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            kept.append(x)
        for each in reversed(kept):
            x = x * each
        return x


@pytest.mark.usefixtures("slow_rates")
def test_the_only_plan_stays_and_its_forecast_is_corrected() -> None:
    model, x = Loss(), torch.randn(1024, 128)
    options = {"compiler": "eager", "recompute": "none", "policy": "teraio", "device_budget": "9MB"}
    compiled(model, options)(x)
    budget = planned_floor(tencache_fx.regions()[-1].problem)
    torch.compiler.reset()
    run = compiled(model, {**options, "device_budget": budget})
    plans = []
    for _ in range(13):
        run(x).backward()
        plans.append(tencache_fx.regions()[-1].plan)
    assert plans[0].transfers == plans[-1].transfers != ()
    assert plans[-1].forecast.makespan_ns < plans[0].forecast.makespan_ns * 3 // 4  # copies stay as slow as pretended
    assert plans[-1].forecast.peak_bytes == plans[0].forecast.peak_bytes


@pytest.mark.usefixtures("slow_rates")
def test_inference_is_timed_too() -> None:
    model, x = Stack(), torch.randn(1024, 64)
    with torch.no_grad():
        truth = model(x)
        run = torch.compile(model, backend="tencache", options={"compiler": "eager", "device_budget": "1.7MB"})
        assert all(torch.equal(run(x), truth) for _ in range(13))
    assert tencache_fx.regions()[-1].plan.transfers


@pytest.mark.parametrize(
    ("where", "kind", "why", "level"),
    [
        ("region.recalibrator.reconsider", BudgetError, "there is no other plan.", "INFO"),
        ("region.lowering.verify_graphs", RuntimeError, "a bug.", "WARNING"),
    ],
)
@pytest.mark.usefixtures("slow_rates")
def test_whatever_stops_planning_anew_all_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    kind: type[Exception],
    why: str,
    level: str,
) -> None:
    def refuse(*_: object) -> None:
        raise kind(why)  # a new one: its traceback holds the region, and a parameter of a test is there to the end

    run = torch.compile(Loss(), backend="tencache", options={"compiler": "eager", "device_budget": "9MB"})
    x = torch.randn(1024, 128)
    run(x).backward()
    before = tencache_fx.regions()[-1].plan
    with monkeypatch.context() as patch, caplog.at_level("INFO", "tencache_fx"):
        patch.setattr(f"tencache_fx.{where}", refuse)
        for _ in range(13):
            run(x).backward()
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "stays" in record.getMessage()]
    assert [(each, why in text) for each, text in told] == [(level, True)]
    assert tencache_fx.regions()[-1].plan.transfers == before.transfers
    torch.compiler.reset()
    options = {"compiler": "eager", "device_budget": "9MB"}
    torch.compile(Loss(), backend="tencache", options=options)(x).backward()
    assert tencache_fx.regions()[-1].plan.recomputed == before.recomputed  # nor does the next start try what failed
