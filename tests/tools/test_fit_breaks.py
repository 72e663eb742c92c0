"""`tencache fit` of models whose graph breaks: branches on data, and regions that run several times in a step."""

from typing import Any

import pytest
import torch
from harness import Block
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import UsageError
from tencache_fx.hardware.profiles import workspace_bytes
from tencache_fx.reporting.fit_report import Fit
from tencache_fx.reporting.fit_text import show_fit

WIDTH, ROWS = 192, 512
GIVEN = {"compiler": "eager", "calibrate": False, "recompute": "none", "host_budget": "1GiB"}


class Skipping(nn.Module):
    """Its layers are skipped at random while it trains; with `drops` 0 none is, but Python looks."""

    def __init__(self, layers: int, drops: float = 0.1) -> None:
        super().__init__()
        self.layers, self.drops = nn.ModuleList(Block(WIDTH) for _ in range(layers)), drops

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.drops:
                    continue
            x = layer(x)
        return x


class Looping(Skipping):
    """The same layers, without a look at data."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Doubting(nn.Module):
    """It looks whether a result is finite, and goes on by `how` it looks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "condition":
            if x.isnan().any():
                x = x.nan_to_num()
        elif self.how == "number":
            torch._dynamo.graph_break()
            x = x * x.max().item()
        return self.second(x)


def fitted(model: nn.Module, **target: Any) -> Fit:
    torch.compiler.reset()
    return tencache_fx.fit(model, torch.randn(ROWS, WIDTH), **({"device_profile": "h200"} | GIVEN | target))


def test_layers_that_may_be_skipped_all_count() -> None:
    """A draw counts as its mean: at a rate of 0.1 no layer is skipped, and at 0.9 each is."""
    few, many, plain = fitted(Skipping(3)), fitted(Skipping(9)), fitted(Looping(9))
    assert many.guessed_conditions == 0
    assert sum(region.calls for region in many.regions) >= 9
    assert many.step_ns == pytest.approx(plain.step_ns, rel=0.2)
    assert many.whole_step_ns > 2 * few.whole_step_ns
    assert many.offloaded_bytes == plain.offloaded_bytes
    assert many.gradient_bytes == plain.gradient_bytes
    assert many.all_on_device_bytes == pytest.approx(plain.all_on_device_bytes, rel=0.1)
    assert " x " in show_fit(many).splitlines()[-1]


def test_what_each_call_leaves_adds_up_on_the_device() -> None:
    plain, beside = fitted(Looping(9)), workspace_bytes(9)
    budget = beside + (plain.peak_bytes - beside) * 4 // 10
    tight = fitted(Skipping(9), device_budget=budget)
    assert tight.fits
    assert tight.peak_bytes <= budget
    assert sum(region.calls * region.in_bytes for region in tight.regions) > 0
    refused = fitted(Skipping(9), device_budget=beside + (plain.peak_bytes - beside) // 20)
    assert not refused.fits
    assert refused.least_device_bytes is not None
    assert fitted(Skipping(9), device_budget=refused.least_device_bytes).fits


def test_a_condition_that_no_draw_decides_counts_as_false_and_is_told() -> None:
    found = fitted(Doubting("condition"))
    assert found.guessed_conditions == 1
    assert len(found.regions) == 2
    assert "\nconditions" in show_fit(found)
    assert "\nconditions" not in show_fit(fitted(Doubting("nothing")))


def test_a_number_that_only_a_run_knows_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="reads the value of a tensor at .*test_fit_breaks.py:[0-9]+, in forward"):
        fitted(Doubting("number"))
