"""Large updates in parts, some on the host and some through the device: the weights of updates in one piece."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import InvariantError
from tencache_fx.model_state.disk_backing import Place
from tencache_fx.model_state.modules import watch
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.model_state.stored_form import BLOCK
from tencache_fx.model_state.update import ParameterUpdate
from tencache_fx.optim import AdamW
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.store import Store

WIDTH = 300  # a matrix is several parts and an end that is no whole block
STEPS = 4
IN_MEMORY, ON_DISK = 1 << 26, 5_800_000  # host budgets: in the second some state is on disk, and updated whole


@pytest.fixture
def engine_in_parts(no_leaks: None, spill_dir: Path) -> Iterator[Callable[[int, int | None], Engine]]:
    """Return what installs an engine whose updates are in parts of so many elements, or whole."""

    def install(host_bytes: int, part_elements: int | None) -> Engine:
        tencache_fx.close()
        streams = FaultyCpuStreams(delay_s=0.0005, poison=True)
        engine = Engine(torch.device("cpu"), host_budget_bytes=host_bytes, streams=streams)
        engine.attach_store(Store([spill_dir], 1 << 28))
        install_engine(engine)
        if part_elements is not None:
            updates = parameters_of(engine).updates
            updates.open_room(4 << 20)
            updates.part_elements = part_elements
        return engine

    yield install
    tencache_fx.close()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[str, int]]]:
    """Note where each part of each parameter ran."""
    found: dict[str, set[tuple[str, int]]] = {}
    on_host, on_device = ParameterUpdate.on_host, ParameterUpdate.on_device

    def noted_on_host(update: ParameterUpdate, part: int) -> None:
        found.setdefault(update.offloaded.name, set()).add(("host", part))
        if update.offloaded.name == "3.weight":
            time.sleep(0.0005)  # the other thread takes some, too
        on_host(update, part)

    def noted_on_device(update: ParameterUpdate, part: int, room: Any) -> Any:
        found.setdefault(update.offloaded.name, set()).add(("device", part))
        return on_device(update, part, room)

    monkeypatch.setattr(ParameterUpdate, "on_host", noted_on_host)
    monkeypatch.setattr(ParameterUpdate, "on_device", noted_on_device)
    return found


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3), nn.Flatten(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
    model = nn.Sequential(*layers[:2], nn.LazyLinear(WIDTH), *layers[2:])
    model(torch.randn(1, 4, 8, 8))
    return model.to(dtype).to(memory_format=torch.channels_last)


def train(dtype: torch.dtype, *, clip: bool, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = tencache_fx.offload(network(dtype))
    optimizer, losses = AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **how), []
    for step in range(STEPS):
        data = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(data).float().square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:  # the weight is set by hand: its master follows
            with tencache_fx.summon(model), torch.no_grad():
                model[3].weight.mul_(1.5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for at, entry in optimizer.state_dict()["state"].items():
        state |= {f"{at} {name}": value.clone() for name, value in entry.items() if isinstance(value, Tensor)}
    return losses, state


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "host_bytes", "clip", "now"),
    [
        (torch.bfloat16, torch.float32, IN_MEMORY, True, False),
        (torch.bfloat16, torch.float32, IN_MEMORY, False, True),
        (torch.bfloat16, "8bit", IN_MEMORY, False, False),
        (torch.bfloat16, torch.bfloat16, IN_MEMORY, True, False),
        (torch.float32, "8bit", IN_MEMORY, False, True),
        (torch.float32, torch.float32, ON_DISK, False, False),
    ],
)
def test_parts_anywhere_give_the_bits_of_the_whole(
    engine_in_parts: Callable[[int, int | None], Engine],
    places: dict[str, set[tuple[str, int]]],
    dtype: torch.dtype,
    state_dtype: object,
    host_bytes: int,
    clip: bool,  # noqa: FBT001
    now: bool,  # noqa: FBT001
) -> None:
    how: dict[str, Any] = {"state_dtype": state_dtype, "clip": clip, "step_in_backward": now}
    engine_in_parts(host_bytes, None)
    expected_losses, expected = train(dtype, **how)
    assert all(part == 0 for found in places.values() for _, part in found)
    places.clear()
    engine = engine_in_parts(host_bytes, 4 * BLOCK)
    losses, found = train(dtype, **how)
    assert losses == expected_losses
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert any({place for place, _ in each} == {"host", "device"} for each in places.values()), "both did some"
    most = WIDTH * WIDTH // (4 * BLOCK)
    assert {part for _, part in places["3.weight"]} == set(range(most + 1))
    counts = engine.stats.take()
    assert counts["updates"] == STEPS * 10, "one for each parameter"
    assert 0 < counts["device_updates"] <= counts["updates"]


def test_a_part_that_fails_is_an_error_of_the_parameter(
    engine_in_parts: Callable[[int, int | None], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_in_parts(IN_MEMORY, 4 * BLOCK)
    model = tencache_fx.offload(network(torch.bfloat16))
    optimizer = AdamW(model.parameters(), lr=0.01)
    on_host, on_device = ParameterUpdate.on_host, ParameterUpdate.on_device

    def check(update: ParameterUpdate, part: int) -> None:
        if update.offloaded.name == "3.weight" and part == 5:
            raise RuntimeError("injected")

    def on_host_or_not(update: ParameterUpdate, part: int) -> None:
        check(update, part)
        on_host(update, part)

    def on_device_or_not(update: ParameterUpdate, part: int, room: Any) -> Any:
        check(update, part)
        return on_device(update, part, room)

    monkeypatch.setattr(ParameterUpdate, "on_host", on_host_or_not)
    monkeypatch.setattr(ParameterUpdate, "on_device", on_device_or_not)
    data = torch.randn(4, 4, 8, 8).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(data).float().square().mean().backward()
    optimizer.step()
    with pytest.raises(InvariantError, match="3.weight could not be updated: RuntimeError.'injected'"):
        model(data)
    monkeypatch.undo()
    after = model.state_dict()
    assert not torch.equal(after["4.weight"], before["4.weight"]), "the others are updated"
    optimizer.zero_grad()
    model(data).float().square().mean().backward()
    optimizer.step()
    assert torch.isfinite(model(data)).all()


def test_weights_on_disk_are_updated_whole(
    engine_in_parts: Callable[[int, int | None], Engine], places: dict[str, set[tuple[str, int]]]
) -> None:
    """With parts, each of several updates could have one of the few buffers, and wait for another's."""
    found = []
    for part_elements in (None, 4 * BLOCK):
        engine = engine_in_parts(IN_MEMORY, part_elements)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))  # fewer than there are buffers
        for name, layer in model.named_children():
            parameters_of(engine).offload(layer.weight, name, engine.device, Place(on_disk=True))
            watch(layer)
        optimizer = AdamW(model.parameters(), lr=0.01, step_in_backward=True)
        for step in range(STEPS):
            data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            model(data).square().mean().backward()
            optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, found[0][name]) for name, value in found[1].items())
    assert {name: {part for _, part in each} for name, each in places.items()} == {"0": {0}, "1": {0}, "2": {0}}
