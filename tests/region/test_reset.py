"""`torch.compiler.reset()` between steps: nothing of the regions before is planned, counted, reported or held."""

import gc
import threading
from collections.abc import Iterator
from weakref import WeakSet

import pytest
import torch
from conftest import collect
from harness import faulty_engine
from problems import links as slow_links
from test_step_parameters import LARGE, offloaded, once
from test_step_plans import BUDGETS, blocks, equal, gradients, inputs, one_by_one, recorder, wanted
from torch import Tensor, nn

import tencache_fx
from tencache_fx.hardware import rates
from tencache_fx.optim import AdamW
from tencache_fx.options import Options
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_planner import Program, StepPlanner
from tencache_fx.runtime.engine import Engine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Regions that other tests have left are not those of this engine: as long as they live, buffers stay."""
    monkeypatch.setattr(REGIONS, "_live", WeakSet())
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


def reset() -> None:
    torch.compiler.reset()
    collect()


def swap_regions() -> int:
    """Return how many regions the process remembers."""
    collect()
    return sum(isinstance(each, SwapRegion) for each in gc.get_objects())


def test_steps_after_a_reset_are_planned_as_the_first_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another budget: of the programs before none is planned again for it."""
    monkeypatch.setattr(rates, "links", lambda *_, **__: slow_links(10**8))
    expected, considered, consider = wanted(4), [], StepPlanner.consider

    def noted(self: StepPlanner, program: Program, options: Options) -> None:
        live = {region.index for region in REGIONS.live()}
        considered.append({visit.index for visit in program.visits} <= live)
        consider(self, program, options)

    monkeypatch.setattr(StepPlanner, "consider", noted)
    model = blocks()
    for budget in (6_200_000, 5_600_000, 6_200_000):
        tencache_fx.configure(device_budget=budget)
        one_by_one(model)
        for step, each in enumerate(expected):
            assert equal(gradients(model, model, inputs(step)), each), f"step {step} in {budget}"
        assert considered
        assert all(considered)
        considered.clear()
        assert tencache_fx.steps()
        reset()
        assert tencache_fx.steps() == ()
        assert recorder(engine).programs == {}
        assert recorder(engine).planner.choices.decided == {}


@pytest.mark.parametrize("ends", ["after a step", "after a forward", "before a backward"])
def test_nothing_of_what_was_compiled_is_held(engine: Engine, ends: str) -> None:
    """Whatever came last: what a loss keeps for its backward goes with the loss."""
    model, threads = blocks(), []
    for _ in range(4):
        one_by_one(model, device_budget=BUDGETS["some"])
        for step in range(3):
            gradients(model, model, inputs(step))
        loss = model(inputs()).square().mean() if ends != "after a step" else None
        if ends == "after a forward":
            loss = None
        reset()
        if loss is not None:
            loss.backward()
            del loss
            collect()
        assert tencache_fx.steps() == ()
        assert swap_regions() == 0
        assert recorder(engine).points.in_use == 0
        gauges = tencache_fx.stats()
        assert gauges["host_acquired_bytes"] == gauges["transfers"] == gauges["host_pool_bytes"] == 0
        threads.append({thread.ident for thread in threading.enumerate()})
    assert threads[0] == threads[-1]


def test_parameters_that_stayed_leave(engine: Engine) -> None:
    """The steps that had them stay will not come again; their models may."""
    model = offloaded(LARGE)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        once(model, optimizer, step)
    points = recorder(engine).points
    assert points.resident_bytes > 0
    reset()
    assert tencache_fx.steps() == ()
    assert points.resident_bytes == 0
    for step in range(4):
        once(model, optimizer, step)
    assert points.resident_bytes > 0


class Interrupted(nn.Module):
    """Two regions: torch compiles the second one while the code of the first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x).tanh()


@pytest.mark.usefixtures("engine")
def test_a_region_ends_though_another_was_compiled_from_its_code() -> None:
    """torch keeps, of each compilation, the code of all callers: it would live on, and all that was planned for it."""
    torch.compile(Interrupted(), backend="tencache", options={"compiler": "eager"})(torch.ones(2, 8)).sum().backward()
    assert len(tencache_fx.regions()) == 2
    reset()
    assert tencache_fx.regions() == ()
