"""Offloaded parameters that stay on the device in planned steps, with their optimizer's state: who, and how long."""

from collections.abc import Iterator

import pytest
import torch
from conftest import collect
from harness import faulty_engine
from test_step_parameters import LARGE, OPTIONS, TIGHT, blocks, offloaded, once, plain, trained, updated
from test_step_plans import inputs
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import AdamW
from tencache_fx.region import budget_check
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28, delay_s=0.001) as found:
        yield found


def expected(loop: object, optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW) -> list[Tensor]:
    reference = plain()
    found = trained(reference, optimizer_class(reference.parameters(), lr=1e-2), loop)
    torch.compiler.reset()
    return found


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    worst = max(float((mine - true).abs().max()) for mine, true in zip(found, wanted, strict=True))
    assert worst < 1e-5, "the two optimizers differ in rounding"


def settled(budget: int = LARGE, steps: int = 4) -> tuple[nn.Sequential, AdamW]:
    """Return a model after some steps, by when it is decided who stays, and its optimizer."""
    model = offloaded(budget)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        once(model, optimizer, step)
    return model, optimizer


def stay(model: nn.Module) -> list[bool]:
    """Return of each offloaded parameter whether it is on the device, with its optimizer's state."""
    found = [each for p in model.parameters() if (each := find_offloaded(p)) is not None]
    assert found
    return [each.on_device and each.device_state_bytes > 0 for each in found]


def test_the_budget_decides_anew_who_stays(engine: Engine) -> None:
    """It shrinks in mid-training, and grows again."""
    budgets = [LARGE, LARGE, LARGE, TIGHT, TIGHT, LARGE, LARGE, LARGE]
    found: list[list[bool]] = []

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        losses = []
        for budget in budgets:
            if isinstance(optimizer, AdamW):
                tencache_fx.configure(device_budget=budget)
            losses.append(once(model, optimizer, step))
            if isinstance(optimizer, AdamW):
                found.append(stay(model))
        return torch.stack(losses)

    wanted = expected(loop)
    model = tencache_fx.offload(blocks(), "cpu")
    for block in model:
        block.compile(backend="tencache", options=dict(OPTIONS))
    tencache_fx.configure(device_budget=LARGE)
    try:
        mine = trained(model, AdamW(model.parameters(), lr=1e-2), loop)
    finally:
        tencache_fx.configure(device_budget=None)
    assert_close(mine, wanted)
    assert all(found[2])
    assert not any(found[4])
    assert all(found[7])


def test_an_order_that_is_not_known_leaves_residents_where_they_are(engine: Engine) -> None:
    """Evaluations, and another number of micro-batches, come in between."""
    seen: list[bool] = []

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        losses = [once(model, optimizer, 3 * step)]
        for part in range(step % 3):
            result = model(inputs(3 * step + part)).square().mean()
            result.backward()
            losses.append(result.detach())
        with torch.no_grad():
            losses.append(model(inputs(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, AdamW):
            seen.append(all(stay(model)))
        return torch.stack(losses)

    wanted = expected(loop)
    model = offloaded(LARGE)
    assert_close(trained(model, AdamW(model.parameters(), lr=1e-2), loop), wanted)
    assert all(seen[2:])


def test_two_models_of_one_code_share_the_budget(engine: Engine) -> None:
    """They run in turns: each as if it were alone, though the device has room for one of them."""

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        return torch.stack([once(model, optimizer, 2 * step), once(model, optimizer, 2 * step + 1)])

    wanted = expected(loop)
    models = [offloaded(7_500_000), offloaded(7_500_000)]
    optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
    losses: list[list[Tensor]] = [[], []]
    points = recorder_of(swap_points(engine)).points
    most_bytes = 0
    for step in range(5):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            losses[place].append(loop(model, optimizer, step))
            most_bytes = max(most_bytes, points.resident_bytes)
    for model, lost in zip(models, losses, strict=True):
        with tencache_fx.summon(model):
            assert_close([*lost, *(p.detach().clone() for p in model.parameters())], wanted)
    assert 0 < most_bytes <= 7_500_000


def test_nobody_stays_for_a_model_that_is_gone(engine: Engine) -> None:
    model, optimizer = settled()
    points = recorder_of(swap_points(engine)).points
    assert points.resident_bytes > 0
    del model, optimizer
    torch.compiler.reset()
    collect()
    assert points.resident_bytes == 0


def test_accumulated_gradients_stay_as_one(engine: Engine) -> None:
    """A gradient that is added to another one does not count any more."""

    def loop(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        losses = []
        for part in range(3):
            loss = model(inputs(3 * step + part)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses)

    wanted = expected(loop)
    model = offloaded(LARGE)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    assert_close(trained(model, optimizer, loop), wanted)
    points = recorder_of(swap_points(engine)).points
    whole = sum(p.nbytes for p in model.parameters() if find_offloaded(p) is not None)
    assert points.resident_bytes <= 4 * whole, "weights, and a state of three arrays; no gradient"
    engine.stats.take()
    loop(model, optimizer, 9)
    assert engine.stats.take()["d2h_bytes"] == 0


def test_who_reads_more_decides_for_all(engine: Engine) -> None:
    """A step of one block is planned first; then whole steps, in turns with it."""
    model = offloaded(LARGE)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        updated(model[2](inputs(step)), optimizer)
    for step in range(3):
        once(model, optimizer, step)
        updated(model[2](inputs(step)), optimizer)
    assert all(stay(model))
    engine.stats.take()
    once(model, optimizer, 3)
    assert engine.stats.take()["h2d_bytes"] == 0


def test_who_needs_the_room_decides_anew_and_others_follow(engine: Engine) -> None:
    """Of few rows all parameters fit; of many rows not beside them."""
    model = offloaded(4_600_000)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        updated(model(inputs(step, 16)), optimizer)
    assert all(find_offloaded(p).on_device for p in model.parameters() if find_offloaded(p) is not None)
    for step in range(6):
        once(model, optimizer, step)
        updated(model(inputs(step, 16)), optimizer)
    plans = [record.plan for record in tencache_fx.steps()[-2:]]
    assert len({len(plan.resident) for plan in plans}) == 1, "they count on the same residents"
    assert not all(stay(model))


def test_parameters_that_stayed_leave_with_the_steps(engine: Engine) -> None:
    model, optimizer = settled(steps=3)
    assert all(stay(model))
    torch.compiler.reset()
    for block in model:
        block.compile(backend="tencache", options={**OPTIONS, "scope": "region", "device_budget": TIGHT})
    for step in range(3):
        once(model, optimizer, step)
    assert recorder_of(swap_points(engine)).points.resident_bytes == 0


def test_nothing_is_remembered_of_models_that_are_gone(engine: Engine) -> None:
    residency = recorder_of(swap_points(engine)).planner._residency
    for _ in range(2):
        model, optimizer = settled(steps=3)
        assert len(residency._decisions) == len(stay(model))
        del model, optimizer
        torch.compiler.reset()
        collect()
        engine.enter()  # releases the buffers of dead parameters
    assert not residency._decisions


def test_an_evaluation_takes_the_room_of_those_that_stay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits without them, and they come back for the next step."""
    points = recorder_of(swap_points(engine)).points
    # A CPU's allocator does not count: these count as held, as they do on a GPU.
    monkeypatch.setattr(budget_check, "held_bytes", lambda device: points.resident_bytes)
    model = offloaded(6_500_000)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    x = torch.cat([inputs(0)] * 4)[:1800]
    with torch.no_grad():
        model(x)
    for step in range(4):
        updated(model(inputs(step, 128)), optimizer)
    assert points.resident_bytes > 1_000_000
    with torch.no_grad():
        mine = model(x)
    assert points.resident_bytes == 0
    with torch.no_grad(), tencache_fx.summon(model):
        true = nn.Sequential.forward(model, x)
    assert torch.allclose(mine, true, atol=1e-5)
    updated(model(inputs(5, 128)), optimizer)
    assert points.resident_bytes > 1_000_000


def test_gradients_of_the_round_before_are_held(engine: Engine) -> None:
    """Whoever accumulates has those of the first micro-batch on the device beside the second."""
    model, _optimizer = settled()
    assert all(stay(model))
    found = recorder_of(swap_points(engine))
    result = model(inputs(4))
    before_bytes = found._visits[0].held_bytes
    result.square().mean().backward()
    nbytes = sum(p.grad.nbytes for p in model.parameters() if find_offloaded(p) is not None and p.grad is not None)
    del result
    second = model(inputs(5))
    assert second.requires_grad
    assert found._visits[0].held_bytes >= before_bytes + nbytes > before_bytes
