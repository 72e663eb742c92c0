"""Optimizers whose step is taken in a function that torch compiles: the graph ends there, and the step is the same."""

import copy
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import tencache_fx
from tencache_fx.optim import AdamW, Muon, OffloadedOptimizer

WIDTH = 128
PACKAGE = os.path.dirname(tencache_fx.__file__)
OPTIONS = {"compiler": "eager", "calibrate": False, "device_budget": 4_000_000}
Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        lambda model: AdamW(model.parameters(), lr=1e-2),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    ),
    "in the backward": (
        lambda model: AdamW(model.parameters(), lr=1e-2, step_in_backward=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    ),
    "SGD": (
        lambda model: OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ),
    "Muon": (
        lambda model: Muon(model.parameters(), lr=1e-2),
        lambda model: torch.optim.Muon(model.parameters(), lr=1e-2),
    ),
}


class Uncompiled(nn.Linear):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """Break the graph: what loads and offloads this layer's weights is called in the backward."""
        return super().forward(x)


def batch(step: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(("name", "offloads"), [("AdamW", False), *((name, True) for name in OPTIMIZERS)])
@pytest.mark.parametrize("whole", [False, True], ids=["step", "whole loop"])
def test_a_step_may_be_a_part_of_what_is_compiled(name: str, *, whole: bool, offloads: bool) -> None:
    """Nothing of the package is compiled with it, be it called from the function or by the backward's hooks."""
    clear_compilation_metrics()
    torch.manual_seed(0)
    kinds = (nn.Linear, nn.Linear, Uncompiled, nn.Linear)
    plain = nn.Sequential(*(kind(WIDTH, WIDTH, bias=False) for kind in kinds))
    model = copy.deepcopy(plain)
    if offloads:
        tencache_fx.offload(model, "cpu")
    mine, true = (make(each) for make, each in zip(OPTIMIZERS[name], (model, plain), strict=True))
    run = torch.compile(train, backend="tencache", options=OPTIONS) if whole else train
    if not whole:
        model.compile(backend="tencache", options=OPTIONS)
        mine.step = torch.compile(mine.step)  # type: ignore[method-assign]
    for step in range(4):
        torch.testing.assert_close(run(model, mine, batch(step)), train(plain, true, batch(step)))
    after = model.state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(after[key], value, rtol=1e-3, atol=1e-4)
    compiled = {f"{each.co_filename}: {each.co_name}" for each in get_compilation_metrics()}
    assert not [each for each in compiled if each.startswith(PACKAGE)]
