"""What a device holds while a step follows its plan, from swap point to swap point: no more than the plan says."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import Block, faulty_engine
from meter import Meter, counting_steps
from problems import links
from step_trace import spans_of
from torch import Tensor, nn

import tencache_fx
from tencache_fx.hardware import rates
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.optim import AdamW
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points

LAYERS, WIDTH, ROWS = 8, 128, 512
HOST_BYTES = 1 << 28


@pytest.fixture
def meter() -> Iterator[Meter]:
    with counting_steps() as found:
        yield found


@pytest.fixture
def engine(meter: Meter) -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=HOST_BYTES) as found:
        yield found


def pretend_rates(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let the machine have links and a device of any speed."""
    draw = random.Random(seed)
    rate = int(10 ** draw.uniform(7.5, 11))
    roofline = Roofline(
        flops_per_s=(("float32", int(10 ** draw.uniform(10.5, 13.5))),),
        memory_bytes_per_s=int(10 ** draw.uniform(10, 12.5)),
        launch_ns=draw.choice((200, 20_000)),
        issue_ns=0,
    )
    found = links(rate, d2h_duplex_bytes_per_s=int(rate * draw.uniform(0.5, 1)))
    patch.setattr(rates, "links", lambda *args, **more: found)
    patch.setattr(rates, "roofline", lambda *args, **more: roofline)


def build(meter: Meter, budget: int, *, offloaded: bool) -> nn.Sequential:
    torch.manual_seed(0)
    with contextlib.nullcontext() if offloaded else meter:  # host memory is none of the device
        model = nn.Sequential(*(Block(WIDTH, 2) for _ in range(LAYERS)))
    if offloaded:
        tencache_fx.offload(model, "cpu")
    options = {"device_budget": budget, "scope": "step", "compiler": "eager", "host_budget": HOST_BYTES}
    for block in model:
        block.compile(backend="tencache", options=options)
    return model


def train_step(meter: Meter, model: nn.Sequential, step: int, optimizer: AdamW | None) -> int:
    """Return the most that is held in a step."""
    model.zero_grad(set_to_none=True)
    meter.peak = meter.held
    with meter:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    results: list[Tensor] = [model(x)]
    with meter:
        results.pop().square().mean().backward()
    peak_bytes = meter.peak
    if optimizer is not None:
        optimizer.step()
    return peak_bytes


@pytest.mark.parametrize(
    ("share", "seed", "offloaded"),
    [
        *[(0.5, 0, False), (0.55, 5, False), (0.75, 2, False), (0.3, 0, True)],
        *[
            pytest.param(share, seed, share < 0.5, marks=pytest.mark.slow)
            for share in (0.3, 0.4, 0.5, 0.55, 0.6, 0.75)
            for seed in range(6, 12)
        ],
    ],
)
def test_steps_hold_what_their_plan_says(
    meter: Meter, engine: Engine, share: float, seed: int, *, offloaded: bool
) -> None:
    model = build(meter, 1 << 30, offloaded=offloaded)
    optimizer = AdamW(model.parameters()) if offloaded else None
    budget = int(share * max(train_step(meter, model, step, optimizer) for step in range(3)))
    del model, optimizer
    torch.compiler.reset()
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        pretend_rates(patch, seed)
        model = build(meter, budget, offloaded=offloaded)
        optimizer = AdamW(model.parameters()) if offloaded else None
        peaks = [train_step(meter, model, step, optimizer) for step in range(5)]
        assert max(peaks) <= budget, [peak / budget for peak in peaks]
        spans = spans_of(swap_points(engine), lambda: train_step(meter, model, 5, optimizer))
    assert spans
    over = [span for span in spans if span.held_bytes > span.planned_bytes]
    assert not over, "\n".join(map(str, over))
    plan = tencache_fx.steps()[-1].plan
    planned_bytes = max(span.planned_bytes for span in spans)
    assert plan.forecast.peak_bytes == planned_bytes
    if not plan.resident:  # they are made where the meter does not look, as are the smallest tensors
        assert max(span.held_bytes for span in spans) > planned_bytes - 4096


class Joint(nn.Module):
    """A block of the sum of two activations, both of which its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.block = nn.Linear(WIDTH, WIDTH), Block(WIDTH, 2)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.block(torch.sigmoid(self.gate(skipped)) * x)


def run_unet(net: nn.ModuleList, x: Tensor) -> Tensor:
    """Run half of the blocks down and half up: what is skipped over is there for that long."""
    skipped: list[Tensor] = []
    for block in net[:4]:
        x = block(x)
        skipped.append(x)
    for block in net[4:]:
        x = block(x, skipped.pop())
    return x


def run_decoder(net: nn.ModuleList, x: Tensor) -> Tensor:
    """Run half of the blocks as an encoder, whose result all others read."""
    for block in net[:4]:
        x = block(x)
    encoded = x
    for block in net[4:]:
        x = block(x, encoded)
    return x


def build_net(meter: Meter, budget: int) -> nn.ModuleList:
    torch.manual_seed(0)
    with meter:
        net = nn.ModuleList([*(Block(WIDTH, 2) for _ in range(4)), *(Joint() for _ in range(4))])
    for block in net:
        options = {"device_budget": budget, "scope": "step", "compiler": "eager", "host_budget": HOST_BYTES}
        block.compile(backend="tencache", options=options)
    return net


def train_net(meter: Meter, net: nn.ModuleList, run: Callable[[nn.ModuleList, Tensor], Tensor]) -> int:
    """Return the most that is held in a step."""
    net.zero_grad(set_to_none=True)
    meter.peak = meter.held
    with meter:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    results = [run(net, x)]
    with meter:
        results.pop().square().mean().backward()
    return meter.peak


@pytest.mark.parametrize("run", [run_unet, run_decoder])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_an_activation_that_several_blocks_read_is_planned_as_long_as_it_is_there(
    meter: Meter, engine: Engine, run: Callable[[nn.ModuleList, Tensor], Tensor], seed: int
) -> None:
    net = build_net(meter, 1 << 30)
    budget = int(random.Random(seed).uniform(0.6, 0.97) * max(train_net(meter, net, run) for _ in range(3)))
    del net
    torch.compiler.reset()
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        pretend_rates(patch, seed)
        net = build_net(meter, budget)
        peaks = [train_net(meter, net, run) for _ in range(8)]
        assert max(peaks) <= budget, [peak / budget for peak in peaks]
        spans = spans_of(swap_points(engine), lambda: train_net(meter, net, run))
    over = [span for span in spans if span.held_bytes > span.planned_bytes]
    assert not over, "\n".join(map(str, over))


def test_a_step_is_measured_and_planned_anew_once_its_caller_was_seen_to_keep_an_input(
    meter: Meter, engine: Engine
) -> None:
    """What was measured before counts the input as bytes that could leave; what was planned, too."""
    net, points = build_net(meter, 1 << 30), swap_points(engine)
    for _ in range(4):
        train_net(meter, net, run_decoder)
        if points.shared:
            break
    assert points.shared
    recorder_of(points).settle()
    assert not recorder_of(points).programs
    for _ in range(2):
        train_net(meter, net, run_decoder)
    spans = spans_of(points, lambda: train_net(meter, net, run_decoder))
    assert not [span for span in spans if span.held_bytes > span.planned_bytes]
