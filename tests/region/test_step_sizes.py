"""Steps of other sizes each time: texts of any length, experts with more or fewer rows. Known plans serve new sizes."""

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import faulty_engine
from meter import Meter
from test_step_plans import blocks, equal, gradients, inputs, meter, one_by_one, recorder
from torch import Tensor, nn

import tencache_fx
from tencache_fx.hardware import memory_gauge
from tencache_fx.hardware.device_memory import AllocatorCounts
from tencache_fx.planning.step import FRUGAL
from tencache_fx.runtime.engine import Engine

__all__ = ["meter"]

PLAIN = "aot_eager_decomp_partition"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


def moved_bytes(engine: Engine) -> int:
    return int(engine.stats.take()["d2h_bytes"])


@pytest.mark.parametrize("budget", [6_200_000, 9_000_000])
def test_texts_of_any_length_run_by_the_plan_of_a_length_that_is_near(
    engine: Engine, meter: Meter, budget: int
) -> None:
    model, plain, draw = one_by_one(blocks(), device_budget=budget), one_by_one(blocks(), PLAIN), random.Random(0)
    lengths = [512, 500, 490, *draw.sample(range(100, 513), k=24)]
    frugal = []
    for step, length in enumerate(lengths):
        x = inputs(step, length)
        expected = gradients(plain, plain, x)
        meter.peak = meter.held
        assert equal(gradients(model, model, x), expected), f"step {step}"
        assert meter.peak <= budget, f"step {step}"
        frugal.append(recorder(engine).points.schedule is FRUGAL)
    assert sum(frugal[3:]) <= 3, "of new lengths, only those that are longer than known ones, or come first"
    planned = [program for program in recorder(engine).programs.values() if program.has_plan]
    assert len(planned) < 16, "24 lengths are near to few"
    moved_bytes(engine)
    for length in (101, 107):
        gradients(model, model, inputs(1, length))
    assert moved_bytes(engine) == 0, "short ones fit by plans for short ones"


def test_what_is_longer_than_planned_for_goes_to_disk_where_host_memory_is_full(
    engine: Engine, meter: Meter, tmp_path: Path
) -> None:
    """Host buffers are those of a plan for shorter texts: others go to disk, or stay while there is room for them."""
    options = {"device_budget": 6_200_000, "host_budget": 2_400_000, "spill_dir": tmp_path, "spill_budget": 1 << 26}
    model, plain, draw = one_by_one(blocks(), **options), one_by_one(blocks(), PLAIN), random.Random(1)
    lengths = [400, 390, *(draw.randint(380, 512) for _ in range(10))]
    read_bytes = []
    for step, length in enumerate(lengths):
        x = inputs(step, length)
        expected = gradients(plain, plain, x)
        meter.peak = meter.held
        assert equal(gradients(model, model, x), expected), f"step {step}"
        assert meter.peak <= 6_200_000, f"step {step}"
        read_bytes.append(int(engine.stats.take()["disk_read_bytes"]))
    assert recorder(engine).points.in_use == 0
    assert any(read_bytes[3:]), read_bytes
    tencache_fx.close()
    torch.compiler.reset()


def test_what_is_longer_than_before_has_more_recomputed_where_host_memory_is_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A plan's buffers are for its sizes: a longer text without any goes over the budget once."""
    with faulty_engine(host_budget_bytes=2_300_000):
        plain, lengths = one_by_one(blocks(), PLAIN), (400, 396, 392, 430, 440, 396, 430, 440)
        expected = [gradients(plain, plain, inputs(1, length)) for length in lengths]
        torch.compiler.reset()
        model, told = one_by_one(blocks(), device_budget=5_200_000, host_budget=2_300_000), []
        for length, each in zip(lengths, expected, strict=True):
            caplog.clear()
            assert equal(gradients(model, model, inputs(1, length)), each), f"length {length}"
            told.append("this once" in caplog.text)
        assert told[:3] == [False] * 3
        assert any(told)
        assert told[-3:] == [False] * 3


@pytest.mark.parametrize("budget", [6_200_000, 8_000_000])
def test_what_has_left_for_room_is_counted_when_it_comes_back(engine: Engine, meter: Meter, budget: int) -> None:
    """The backwards run in the order of the forwards: the oldest storages leave, and are the first to be needed."""
    model, plain, draw = one_by_one(blocks(), device_budget=budget), one_by_one(blocks(), PLAIN), random.Random(0)

    def trained(branches: nn.Module, x: Tensor) -> list[Tensor]:
        branches.zero_grad(set_to_none=True)
        losses = [branch(x).square().mean() for branch in branches]
        while losses:
            losses.pop(0).backward()
        return [parameter.grad for parameter in branches.parameters()]

    for step, length in enumerate([400, 390, 398, *(draw.randint(380, 500) for _ in range(9))]):
        x = inputs(step, length)
        expected = trained(plain, x)
        meter.peak = meter.held
        assert equal(trained(model, x), expected), f"step {step}"
        assert meter.peak <= budget, f"step {step}"


@pytest.fixture
def counting(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Have recorders of steps take a CPU for a device whose allocator counts."""

    def counts(device: torch.device) -> AllocatorCounts:
        return AllocatorCounts(meter.held, meter.peak, meter.ever)

    def forget(device: torch.device) -> None:
        meter.peak = meter.held

    monkeypatch.setattr(memory_gauge, "allocator_counts", counts)
    monkeypatch.setattr(memory_gauge, "forget_peak", forget)
    monkeypatch.setattr(memory_gauge.MemoryGauge, "counts_all", property(lambda self: True))
    return meter


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_a_loss_between_the_graphs_grows_with_the_text(engine: Engine, counting: Meter, share: float) -> None:
    """No region shows what the loss holds. It is known of shorter texts, and more of longer ones."""
    plain = one_by_one(blocks(), PLAIN)

    def peak_of(model: nn.Sequential, x: Tensor) -> int:
        counting.peak = counting.held
        result = model(x)
        model.zero_grad(set_to_none=True)
        with counting:
            result.repeat(1, 4).cos().square().mean().backward()
        return counting.peak

    def train(model: nn.Sequential, budget: int) -> list[int]:
        for block in model:
            block.compile(
                backend="tencache",
                dynamic=True,
                options={"compiler": "eager", "scope": "step", "device_budget": budget, "host_budget": 1 << 28},
            )
        return [peak_of(model, inputs(step, length)) for step, length in enumerate([300, 200, 420, 160, 380, 310, 512])]

    budget = int(share * max(train(blocks(), 1 << 33)))
    torch.compiler.reset()
    gc.collect()  # else what is left of these steps counts, until it is noticed
    model = blocks()
    peaks = train(model, budget)
    assert max(peaks) <= budget, [round(each / budget, 3) for each in peaks]
    peak_of(plain, inputs(6, 512))
    assert equal([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])
    assert any(program.has_plan for program in recorder(engine).programs.values())


class Experts(nn.Module):
    """Layers of experts, each compiled by itself, among which rows are shared out by their first value."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(blocks(experts)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for index, experts in enumerate(self.layers):
            order = (x[:, index].detach() * 3).long().abs() % len(experts)
            rows = [(order == number).nonzero()[:, 0] for number in range(len(experts))]
            parts = [x[some] if len(some) == 0 else expert(x[some]) for expert, some in zip(experts, rows, strict=True)]
            x = torch.zeros_like(x).index_copy(0, torch.cat(rows), torch.cat(parts))
        return x


@pytest.mark.parametrize("budget", [9_000_000, 6_800_000])
def test_experts_with_more_or_fewer_rows_run_by_the_plan_of_another_step(
    engine: Engine, meter: Meter, budget: int
) -> None:

    def compiled(backend: str = "tencache", **options: object) -> Experts:
        torch.manual_seed(0)
        model = Experts(layers=4, experts=4)
        for experts in model.layers:
            one_by_one(experts, backend, **options)
        return model

    def batch(step: int) -> Tensor:
        x = inputs(step)
        if step % 3 == 2:
            x[:, 0] = x[:, 0].sign() / 2  # two experts have nothing to do
        return x

    model, plain = compiled(device_budget=budget), compiled(PLAIN)
    moved, frugal = [], []
    for step in range(12):
        x = batch(step)
        expected = gradients(plain, plain, x)
        meter.peak = meter.held
        assert equal(gradients(model, model, x), expected), f"step {step}"
        assert meter.peak <= budget, f"step {step}"
        moved.append(moved_bytes(engine))
        frugal.append(recorder(engine).points.schedule is FRUGAL)
    assert len(recorder(engine).programs) > 9, "all differ"
    assert max(moved[4:]) < moved[0] / 2, moved
    fits = budget > 7_800_000
    assert not any(frugal[4:]) or not fits, (frugal, moved)
    assert (max(moved[4:]) == 0) == fits
