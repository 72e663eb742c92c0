"""Models with parameters at home on a CUDA device: the same training as on the device, inside the budget."""

from collections.abc import Iterator

import pytest
import torch
from conftest import MIB
from faulty_streams import FaultyCudaStreams
from harness import Block
from torch import nn

import tencache_fx
from tencache_fx.optim import AdamW
from tencache_fx.runtime.engine import Engine, resolve_device
from tencache_fx.runtime.registry import install_engine
from tencache_fx.session import regions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, LAYERS, ROWS = 2048, 16, 2048


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    tencache_fx.close()
    torch.cuda.empty_cache()


def train(budget: str | None, *, steps: int = 5, now: bool = False, clip: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(HIDDEN) for _ in range(LAYERS))).bfloat16()
    model = model.cuda() if budget is None else tencache_fx.offload(model, "cuda")
    run = torch.compile(model, backend="tencache", options={"device_budget": budget})
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=now)
    generator = torch.Generator("cuda").manual_seed(1)
    batch = torch.randn(ROWS, HIDDEN, device="cuda", generator=generator).bfloat16()
    losses = []
    for _ in range(steps):
        loss = (run(batch).float() - 1).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("how", [{}, {"now": True}, {"clip": True}])
def test_training_is_that_of_a_model_on_the_device(how: dict[str, bool]) -> None:
    expected = train(None, **{**how, "now": False})
    torch.compiler.reset()
    tencache_fx.close()
    assert train("224MiB", **how) == pytest.approx(expected, rel=0.02)


def test_late_copies_change_nothing() -> None:
    expected = train("224MiB")
    torch.compiler.reset()
    tencache_fx.close()
    device = resolve_device(torch.device("cuda"))
    streams = FaultyCudaStreams(device, delay_cycles=5_000_000)
    install_engine(Engine(device, host_budget_bytes=2048 * MIB, streams=streams))
    assert train("224MiB", now=True) == pytest.approx(expected, rel=1e-3)


def test_the_peak_is_within_the_budget() -> None:
    train("224MiB", steps=2)  # weights alone are 256 MiB
    torch.cuda.reset_peak_memory_stats()
    assert regions()[-1].plan.spills
    train("224MiB", steps=3)
    assert torch.cuda.max_memory_allocated() <= 224 * MIB * 1.02
