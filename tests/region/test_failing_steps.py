"""Steps that end early, with values in host memory and on disk: nothing stays acquired, and the next step is right."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import MIB, eventually
from faulty_streams import FaultyCpuStreams
from harness import EAGER, compiled
from torch import Tensor, nn

import tencache_fx
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.store import Store

HIDDEN, LAYERS, ROWS = 192, 6, 512  # weights of 147 kB, and activations of 393 kB


class Switch:
    """Whether the next backward fails inside the region."""

    on = False


@torch.library.custom_op("tencache_tests::switched", mutates_args=())
def switched(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("tencache_tests::switched_backward", mutates_args=())
def switched_backward(grad: Tensor) -> Tensor:
    if Switch.on:
        raise RuntimeError("failed inside")
    return grad.clone()


for op in (switched, switched_backward):
    op.register_fake(torch.empty_like)
switched.register_autograd(lambda ctx, grad: switched_backward(grad))


class Tower(nn.Module):
    """Linear layers, and an op in their midst that may fail in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == LAYERS // 2:
                x = switched(x)
        return x


class Step:
    """A model, its input, and what its step must give."""

    def __init__(self, engine: Engine, options: dict[str, object], *, offloaded: bool) -> None:
        torch.manual_seed(0)
        self.engine, self.model, self.x = engine, Tower(), torch.randn(ROWS, HIDDEN)
        self.model(self.x).square().sum().backward()
        self.truth = [p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad()
        if offloaded:
            tencache_fx.offload(self.model, "cpu")
        self.kept_bytes = engine.pool.acquired_bytes  # the parameters
        self.run = compiled(self.model, {**EAGER, **options})

    def is_right(self) -> bool:
        self.run(self.x).square().sum().backward()
        pairs = zip(self.model.parameters(), self.truth, strict=True)
        right = all(torch.allclose(p.grad.clone(), true, rtol=1e-4, atol=1e-4) for p, true in pairs)
        self.model.zero_grad()
        return right

    def left(self) -> dict[str, int]:
        """Return what is still acquired."""
        torch.ones(1, requires_grad=True).sum().backward()  # torch keeps what was ready to run up to the next backward
        gc.collect()
        gauges = self.engine.stats.take()
        gauges["host_acquired_bytes"] -= self.kept_bytes
        return {
            name: gauges[name] for name in ("host_acquired_bytes", "disk_acquired_bytes", "transfers") if gauges[name]
        }


class Failing(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("failed before")


def fail(grad: Tensor) -> Tensor:
    raise RuntimeError("the hook failed")


def overwrite_result(step: Step) -> None:
    out = step.run(step.x)
    loss = out.square().sum()
    out.detach().add_(1)
    loss.backward()


def overwrite_input(step: Step) -> None:
    loss, before = step.run(step.x).sum(), step.x.clone()
    step.x.add_(1)
    try:
        loss.backward()
    finally:
        step.x.copy_(before)


def overwrite_in_time(step: Step) -> None:
    """While the transfers out are still under way."""
    out = step.run(step.x)
    out.detach().zero_()
    out.sum().backward()


def fail_before(step: Step) -> None:
    Failing.apply(step.run(step.x)).sum().backward()


def fail_inside(step: Step) -> None:
    Switch.on = True
    try:
        step.run(step.x).sum().backward()
    finally:
        Switch.on = False


def fail_at_a_weight(step: Step) -> None:
    handle = step.model.layers[0].weight.register_hook(fail)
    try:
        step.run(step.x).sum().backward()
    finally:
        handle.remove()


def fail_at_a_result(step: Step) -> None:
    out = step.run(step.x)
    out.register_hook(fail)
    out.sum().backward()


OVERWRITTEN = "modified by an inplace operation"
ENDS: dict[Callable[[Step], None], str] = {
    overwrite_result: OVERWRITTEN,
    overwrite_input: OVERWRITTEN,
    overwrite_in_time: OVERWRITTEN,
    fail_before: "failed before",
    fail_inside: "failed inside",
    fail_at_a_weight: "the hook failed",
    fail_at_a_result: "the hook failed",
}


@pytest.fixture
def engine(no_leaks: None, spill_dir: Path) -> Iterator[Engine]:
    made = Engine(torch.device("cpu"), host_budget_bytes=64 * MIB, streams=FaultyCpuStreams(delay_s=0.0005))
    install_engine(made)
    made.attach_store(Store((spill_dir,), 64 * MIB))
    yield made
    made.close()
    assert made.pool.allocated_bytes == 0


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("offloaded", [False, True])
def test_whatever_ends_a_step_leaves_nothing_acquired(
    engine: Engine, spill_dir: Path, place: Tier, compiler: str, *, offloaded: bool
) -> None:
    options: dict[str, object] = {"compiler": compiler, "device_budget": 3_100_000 if offloaded else 4_300_000}
    if place is Tier.NVME:
        options |= {
            "spill_dir": spill_dir,
            "spill_budget": 64 * MIB,
            "host_budget": 2_600_000 if offloaded else 900_000,
        }
    step = Step(engine, options, offloaded=offloaded)
    assert step.is_right()
    assert any(t.tier is place and t.out is not None for t in tencache_fx.regions()[-1].plan.transfers)
    for end, message in ENDS.items():
        with pytest.raises(RuntimeError, match=message):
            end(step)
        step.model.zero_grad()
        assert eventually(lambda: not step.left()), (end, step.left())
        assert step.is_right(), end
        assert eventually(lambda: not step.left()), (end, step.left())


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_graph_that_is_dropped_leaves_nothing_acquired(engine: Engine, *, offloaded: bool) -> None:
    options = {"device_budget": 3_100_000 if offloaded else 4_300_000}
    step = Step(engine, options, offloaded=offloaded)
    kept = [step.run(step.x) for _ in range(3)]
    assert "transfers" in step.left()
    kept[1].sum().backward()
    kept.clear()
    step.model.zero_grad()
    assert eventually(lambda: not step.left()), step.left()
    assert step.is_right()
    assert eventually(lambda: not step.left()), step.left()
