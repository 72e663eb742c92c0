"""Models with offloaded parameters on a CUDA device: the same training as on the device, inside the budget."""

import gc
from collections.abc import Iterator, Sequence

import pytest
import torch
from conftest import MIB
from faulty_streams import FaultyCudaStreams
from harness import Block
from torch import nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state.step_kernel import StateDtype, find_rule
from tencache_fx.model_state.stored_form import parts_of, store_values
from tencache_fx.optim import AdamW
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine

pytestmark = pytest.mark.gpu

HIDDEN, LAYERS, ROWS = 2048, 16, 2048


def drop_all() -> None:
    """Free what compiled models hold: memory outside of a region counts against its budget."""
    torch.compiler.reset()
    tencache_fx.close()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    drop_all()
    yield
    drop_all()


def train(
    budget: str | None,
    *,
    steps: int = 5,
    parts: int = 1,
    now: bool = False,
    clip: bool = False,
    known_after: int = 0,
    crowded_bytes: int = 0,
    compiler: str = "inductor",
) -> list[float]:
    """Return the losses of `steps` with `parts` backwards each; the device's peak begins anew after `known_after`.

    Beside each loss is taken what the region leaves of `crowded_bytes` in the first step, and a third of what it keeps.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(HIDDEN) for _ in range(LAYERS))).bfloat16()
    model = model.cuda() if budget is None else tencache_fx.offload(model, "cuda")
    run = torch.compile(model, backend="tencache", options={"device_budget": budget, "compiler": compiler})
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=now)
    generator = torch.Generator("cuda").manual_seed(1)
    batch = torch.randn(ROWS, HIDDEN, device="cuda", generator=generator).bfloat16()
    losses: list[torch.Tensor] = []
    taken_bytes = 0
    for _ in range(steps):
        for part in range(parts):
            loss = (run(batch if part == 0 else batch.roll(part)).float() - 1).square().mean()
            if crowded_bytes and not losses:
                held_bytes = torch.cuda.memory_allocated()
                kept_bytes = held_bytes - regions()[-1].problem.external_bytes
                taken_bytes = crowded_bytes - held_bytes + kept_bytes // 3
            torch.empty(taken_bytes, dtype=torch.uint8, device="cuda")
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == known_after:
            torch.cuda.reset_peak_memory_stats()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("how", [{}, {"now": True}, {"clip": True, "parts": 3}])
def test_training_is_that_of_a_model_on_the_device(how: dict[str, bool]) -> None:
    expected = train(None, **{**how, "now": False})
    drop_all()
    assert train("272MiB", **how) == pytest.approx(expected, rel=0.02)


def test_late_copies_change_nothing() -> None:
    """Without Inductor, so that no sum is in another order where late copies lead to another plan."""
    expected = train("272MiB", compiler="eager")
    drop_all()
    device = resolve_device(torch.device("cuda"))
    streams = FaultyCudaStreams(device, delay_cycles=5_000_000)
    install_engine(Engine(device, host_budget_bytes=2048 * MIB, streams=streams))
    assert train("272MiB", now=True, compiler="eager") == expected


@pytest.mark.parametrize(("budget_mib", "crowded"), [(272, False), (480, True)])
def test_the_peak_is_within_the_budget(budget_mib: int, crowded: bool) -> None:  # noqa: FBT001
    """Weights alone are 256 MiB. In the first step the region does not know of the loss."""
    train(f"{budget_mib}MiB", steps=7, known_after=3, crowded_bytes=budget_mib * MIB if crowded else 0)
    assert regions()[-1].plan.transfers
    assert torch.cuda.max_memory_allocated() <= budget_mib * MIB
    assert regions()[-1].problem.boundary_bytes or not crowded


def test_sums_on_the_device_are_within_the_budget() -> None:
    expected = train(None, parts=8, clip=True)
    drop_all()
    assert train("900MiB", steps=5, known_after=3, parts=8, clip=True) == pytest.approx(expected, rel=0.02)
    assert regions()[-1].plan.summed_here
    assert torch.cuda.max_memory_allocated() <= 900 * MIB


class Remembering(nn.Module):
    """Blocks that write each input into a cache of their own, and read all that is in it."""

    def __init__(self, rows: int, places: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(HIDDEN) for _ in range(6))
        for block in self.blocks:
            block.register_buffer("cache", torch.zeros(rows, places, HIDDEN))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.cache.index_copy_(1, place, x[:, None])
            x = block(x + block.cache.sum(1) / (place + 1))
        return x


@torch.no_grad()
def test_inference_writes_caches_while_weights_are_away() -> None:
    torch.manual_seed(0)
    model = Remembering(rows=64, places=8).cuda()
    x = torch.randn(64, HIDDEN, device="cuda")
    places = [torch.tensor([place], device="cuda") for place in range(8)]
    expected = [model(x, place) for place in places]
    for block in model.blocks:
        block.cache.zero_()
    device = resolve_device(torch.device("cuda"))
    install_engine(
        Engine(device, host_budget_bytes=2048 * MIB, streams=FaultyCudaStreams(device, delay_cycles=2_000_000))
    )
    tencache_fx.offload(model, "cuda")  # 192 MiB of weights beside 24 of caches
    run = torch.compile(model, backend="tencache", options={"device_budget": "144MiB"})
    for place, value in zip(places, expected, strict=True):
        torch.testing.assert_close(run(x, place), value, rtol=1e-3, atol=1e-3)
    assert regions()[-1].plan.forecast.h2d_bytes


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"])
@pytest.mark.parametrize(
    ("dtype", "splits"),
    [
        (torch.bfloat16, (False, True)),
        (torch.bfloat16, (True, False)),
        (torch.float16, (False,)),
        (torch.float32, (False,)),
    ],
)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_an_update_has_the_same_bits_on_the_device_as_on_the_host(
    optimizer_class: type[torch.optim.Optimizer],
    dtype: torch.dtype,
    splits: Sequence[bool],
    state_dtype: StateDtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    count = 1_000_003
    options = {} if optimizer_class is torch.optim.AdamW else {"momentum": 0.9}
    rule, group = find_rule(optimizer_class, state_dtype, options)
    for split in splits:  # of one model, some masters are split, and those that stay on the device are not
        change, weight = (torch.randn(count, generator=generator).to(dtype) for _ in range(2))
        arrays = rule.arrays(group, 1, split=split)
        step = rule.step(group, 1, {"step": torch.tensor(3.0)}, arrays, split=split)
        state = [torch.empty(part.count(count), dtype=part.dtype) for part in parts_of(arrays.values())]
        store_values(arrays, state, {name: torch.rand(count, generator=generator) for name in arrays})
        on_host = [change, weight, *state]
        on_device = [each.cuda() for each in on_host]
        step.kernel.compiled(dtype, torch.device("cpu"))(*on_host, step.numbers)
        step.kernel.compiled(dtype, torch.device("cuda", 0))(*on_device, step.numbers.cuda())
        assert all(torch.equal(one, other.cpu()) for one, other in zip(on_host, on_device, strict=True))
