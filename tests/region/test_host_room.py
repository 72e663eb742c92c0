"""Steps whose host memory is scarce, without a disk: within the device budget from the first step on, or refused."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import Block, faulty_engine
from meter import Meter
from test_step_plans import meter
from torch import nn

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.store import Store

__all__ = ["meter"]

WIDTH, ROWS, DEPTH, STEPS = 64, 512, 4, 4
DEVICE, PLENTY = 4_200_000, 1 << 30


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch.compiler.reset()
    gc.collect()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))


def train(meter: Meter | None, host_budget: int, device_budget: int = DEVICE, **more: object) -> list[int]:
    """Train blocks that are compiled one by one; see that gradients are right, and return the peak of each step."""
    model, plain, peaks = blocks(), blocks(), []
    given = {"compiler": "eager", "calibrate": False, "scope": "step", "device_budget": device_budget}
    for block in model:
        block.compile(backend="tencache", options={**given, "host_budget": host_budget, **more})
    for step in range(STEPS):
        meter = meter or Meter()
        meter.peak = meter.held
        with meter:
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        plain.zero_grad()
        model(x).square().mean().backward()
        peaks.append(meter.peak)
        plain(x).square().mean().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
    return peaks


@pytest.mark.parametrize("host_budget", [4096, 1_000_000, 2_000_000, 2_500_000, 2_800_000, 3_200_000, 8 << 20])
def test_what_host_memory_has_no_room_for_is_recomputed_from_the_first_step_on(meter: Meter, host_budget: int) -> None:
    with faulty_engine(host_budget_bytes=host_budget):
        peaks = train(meter, host_budget)
    assert max(peaks) <= DEVICE, [peak - DEVICE for peak in peaks]


def test_no_call_recomputes_for_want_of_host_memory_what_then_has_no_room_in_its_backward(meter: Meter) -> None:
    """All that leaves fits into host memory here, and to recompute everything takes more than it is to come back."""
    budgets = {"device_budget": 1_413_120, "host_budget": 1_177_600}
    with faulty_engine(host_budget_bytes=budgets["host_budget"]):
        model = nn.ModuleList(Block(WIDTH) for _ in range(3))
        for block in model:
            block.compile(
                backend="tencache", options={"compiler": "eager", "calibrate": False, "scope": "step", **budgets}
            )
        for _ in range(STEPS):
            model.zero_grad()
            with meter:
                x = torch.randn(ROWS, WIDTH)
            for block in model:
                x = block(x)
            x.square().mean().backward()
            del x
        assert meter.peak <= budgets["device_budget"]
        del model, block


@pytest.mark.parametrize("host_budget", [100_000, 1_000_000, 2_500_000, 2_800_000, 3_400_000])
def test_a_step_that_has_room_nowhere_is_refused_before_the_device_is_over_its_budget(
    meter: Meter, host_budget: int
) -> None:
    text = refusal(meter, host_budget)
    assert meter.peak <= DEVICE
    assert "find no room in host memory" in text
    assert re.search(r"needs [\d.]+ MB on the device, \d+ bytes more than device_budget, which is 4.2 MB", text)
    assert "host_budget is " in text
    assert "set spill_dir" in text
    assert ("the forward of" in text) == bool(re.search(r"that follows saves up to \d+ bytes, which come on top", text))


def refusal(meter: Meter, host_budget: int) -> str:
    """Return the error that ends a training in which nothing may be recomputed; what it refers to is gone then."""
    with faulty_engine(host_budget_bytes=host_budget):
        try:
            train(meter, host_budget, recompute="none")
        except BudgetError as error:
            return str(error)
    pytest.fail("it was not refused")


def advised(text: str, option: str) -> int:
    found = re.search(rf"{option} to (\d+)MiB or more", text)
    assert found is not None
    return int(found[1]) << 20


@pytest.mark.parametrize("option", ["host_budget", "device_budget", "spill_dir"])
def test_each_remedy_of_the_refusal_does(meter: Meter, tmp_path: Path, option: str) -> None:
    budgets = {"host_budget": 3_200_000, "device_budget": DEVICE}
    text = refusal(meter, budgets["host_budget"])
    torch.compiler.reset()
    more: dict[str, object] = {"recompute": "none"}
    with faulty_engine(host_budget_bytes=budgets["host_budget"]) as engine:
        if option == "spill_dir":
            engine.attach_store(Store((tmp_path,), 64 << 20))
            more |= {"spill_dir": str(tmp_path), "spill_budget": "64MiB"}
        else:
            budgets[option] = advised(text, option)
            engine.resize_host_budget(budgets["host_budget"])
        peaks = train(meter, **budgets, **more)
    assert max(peaks) <= budgets["device_budget"]


@pytest.mark.parametrize("recompute", ["auto", "none"])
@pytest.mark.parametrize("host_budget", [4096, 1_000_000, 2_000_000])
def test_where_the_device_has_room_scarce_host_memory_changes_nothing(host_budget: int, recompute: str) -> None:
    before = REGIONS.compilations
    with faulty_engine(host_budget_bytes=host_budget):
        train(None, host_budget, PLENTY, recompute=recompute)
        assert REGIONS.compilations - before == 2, "one for the first block, one for the others"
        (step,) = tencache_fx.steps()
        assert not step.plan.transfers


@pytest.mark.parametrize(
    ("first", "then"),
    [((4_600_000, 8 << 20), (4_600_000, 1_500_000)), ((PLENTY, 1_500_000), (4_600_000, 1_500_000))],
    ids=["host", "device"],
)
def test_lower_budgets_choose_anew_what_is_recomputed_where_nothing_else_fits(
    meter: Meter, first: tuple[int, int], then: tuple[int, int]
) -> None:
    with faulty_engine(host_budget_bytes=first[1]):
        model, counts, peaks = blocks(), [], []
        for block in model:
            block.compile(backend="tencache", options={"compiler": "eager", "calibrate": False, "scope": "step"})
        for device_budget, host_budget in (first, then):
            tencache_fx.configure(device_budget=device_budget, host_budget=host_budget)
            for _ in range(STEPS):
                meter.peak = meter.held
                with meter:
                    x = torch.randn(ROWS, WIDTH)
                model.zero_grad()
                model(x).square().mean().backward()
                peaks.append(meter.peak - device_budget)
            counts.append(REGIONS.compilations)
        assert max(peaks) <= 0, peaks
        assert counts[1] - counts[0] == 2, "each region once"
        del model, block
