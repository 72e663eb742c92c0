"""Parameters that a whole-matrix optimizer updates together: weights and states are torch's, and steps are few."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from failing_copies import step_with_failing_copy
from faulty_streams import FaultyCpuStreams, FaultyCudaStreams
from harness import faulty_engine
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError, InvariantError
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state import offloading, streamed_optimizer, streamed_update, update_chunks
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.model_state.update_chunks import Wanted, cut_chunks
from tencache_fx.optim import StreamedOptimizer
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import engines, install_engine
from tencache_fx.runtime.streams import CpuStreams, Event, Lane

SHAPES = [(64, 48), (48,), (48, 96), (96,), (96, 32), (32,), (8, 8), (80, 64), (64,)]
CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Muon, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.01, "foreach": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "foreach": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and state in host memory however small a parameter is."""
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)


class Weights(nn.Module):
    """A model that is its parameters."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)


def set_gradients(parameters: list[nn.Parameter], step: int, dtype: torch.dtype) -> None:
    """Set random gradients, rounded to `dtype`; every third parameter has none at times."""
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(parameters):
        change = torch.randn(p.shape, generator=generator).to(dtype)
        p.grad = None if (index + step) % 3 == 0 and step % 2 else change.to(p.device, p.dtype)


def trained(
    parameters: list[nn.Parameter], make: Make, options: dict[str, Any], dtype: torch.dtype, steps: int = 5
) -> torch.optim.Optimizer:
    """Train two groups of unlike options, of which every second parameter is in the other, with a schedule."""
    more = {**options, "lr": options["lr"] / 4}
    optimizer = make([{"params": parameters[::2], **options}, {"params": parameters[1::2], **more}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        set_gradients(parameters, step, dtype)
        optimizer.step()
        schedule.step()
    return optimizer


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    packed = optimizer.state_dict()["state"]
    return [packed[index] for index in sorted(packed)]


def check_states(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for one, other in zip(states(mine), states(theirs), strict=True):
        known = {name: value for name, value in other.items() if value is not None}
        assert {name for name, value in one.items() if value is not None} - {"master"} == set(known)
        for name, value in known.items():
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(value)), name


def chosen(cls: type[torch.optim.Optimizer]) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if cls is not torch.optim.Muon or len(shape) == 2]


@pytest.mark.parametrize("chunk_bytes", [0, 100_000, 128 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["on the device", "offloaded", "state on the device"])
@pytest.mark.parametrize(("cls", "options"), CLASSES)
def test_weights_and_states_are_those_of_torch_on_fp32_masters(
    cls: type[torch.optim.Optimizer],
    options: dict[str, Any],
    where: str,
    dtype: torch.dtype,
    chunk_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With late copies, poisoned memory, and so little room that copies out are waited for."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(streamed_update, "ROOM_BYTES", 400_000)
    if where == "state on the device":
        monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 1 << 13)
    plain = [nn.Parameter(p.detach().float()) for p in Weights(chosen(cls), dtype).all]
    theirs = trained(plain, cls, options, dtype)
    with faulty_engine():
        model = Weights(chosen(cls), dtype)
        if where == "offloaded":
            tencache_fx.offload(model, "cpu")
        mine = trained(list(model.all), lambda groups: StreamedOptimizer(groups, cls), options, dtype)
        for value, expected in zip(model.state_dict().values(), plain, strict=True):
            assert torch.equal(value, expected.detach().to(dtype))
        check_states(mine, theirs)
        if dtype == torch.bfloat16:
            for state, expected in zip(states(mine), [*plain[::2], *plain[1::2]], strict=True):
                assert torch.equal(state["master"], expected.detach())
        del model, mine


@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor])
def test_fifty_steps(cls: type[torch.optim.Optimizer]) -> None:
    plain = [nn.Parameter(p.detach().float()) for p in Weights(chosen(cls), torch.bfloat16).all]
    trained(plain, cls, {"lr": 0.01}, torch.bfloat16, 50)
    model = tencache_fx.offload(Weights(chosen(cls), torch.bfloat16), "cpu")
    trained(list(model.all), lambda groups: StreamedOptimizer(groups, cls), {"lr": 0.01}, torch.bfloat16, 50)
    for value, expected in zip(model.state_dict().values(), plain, strict=True):
        assert torch.equal(value, expected.detach().bfloat16())


class Noting(torch.optim.SGD):
    """It notes how many parameters it is given at each step, and fails at one of its steps."""

    counts: ClassVar[list[int]] = []
    failing = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts.append(sum(len(group["params"]) for group in self.param_groups))
        super().step()
        if len(self.counts) - 1 == self.failing:
            raise ArithmeticError("no good")


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> type[Noting]:
    monkeypatch.setattr(Noting, "counts", [])
    monkeypatch.setattr(Noting, "failing", -1)
    return Noting


@pytest.mark.parametrize("offloaded", [False, True])
def test_small_parameters_are_updated_by_few_steps(noting: type[Noting], *, offloaded: bool) -> None:
    model = Weights([(64, 64), (64,)] * 50)
    if offloaded:
        tencache_fx.offload(model, "cpu")
    optimizer = StreamedOptimizer(
        [{"params": model.all[:40]}, {"params": model.all[40:], "lr": 0.5}], noting, momentum=0.9
    )
    for step in range(3):
        set_gradients(list(model.all), 2 * step, torch.float32)
        optimizer.step()
    assert noting.counts == [40, 60] * 3


def test_large_parameters_are_updated_by_themselves(noting: type[Noting], monkeypatch: pytest.MonkeyPatch) -> None:
    """The small ones beside them are not, and those whose state is on the device are neither with the others.

    In the first step, it is not known yet whether the class draws random numbers, and all are in order.
    """
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 2 * 12 * 64 * 64 - 1)
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 4 * 32)
    model = Weights([(64, 64), (64,), (16,)] * 6)
    optimizer = StreamedOptimizer(model.parameters(), noting, momentum=0.9)
    for counts in ([1, 2] * 6, [1] * 6 + [6, 6]):
        noting.counts.clear()
        set_gradients(list(model.all), 0, torch.float32)
        optimizer.step()
        assert sorted(noting.counts) == sorted(counts)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 150)), max_size=40),
    most=st.integers(0, 200),
)
def test_chunks_hold_each_parameter_once_and_few_are_small(sizes: list[tuple[int, int]], most: int) -> None:
    groups: list[dict[str, Any]] = [{}, {}, {}]
    sized = [(Wanted(torch.empty(0), groups[group], None), nbytes) for group, nbytes in sizes]
    nbytes_of = {id(wanted.parameter): nbytes for wanted, nbytes in sized}
    place_of = {id(wanted.parameter): place for place, (wanted, _) in enumerate(sized)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_chunks, "CHUNK_BYTES", most)
        chunks = cut_chunks(sized)
    places = [[place_of[id(wanted.parameter)] for wanted in chunk] for chunk in chunks]
    assert sorted(place for some in places for place in some) == list(range(len(sizes)))
    assert all(some == sorted(some) for some in places)
    assert [some[0] for some in places] == sorted(some[0] for some in places)
    totals: dict[int, list[int]] = {}
    for chunk in chunks:
        assert len({id(wanted.group) for wanted in chunk}) == 1
        taken = [nbytes_of[id(wanted.parameter)] for wanted in chunk]
        if max(taken) > most // 2:
            assert len(chunk) == 1
        else:
            assert sum(taken) <= most
            totals.setdefault(id(chunk[0].group), []).append(sum(taken))
    for small in totals.values():
        assert all(2 * total >= most - 1 for total in small[:-1])


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("failing", range(3))
def test_an_error_of_the_class_leaves_what_it_was_given_as_it_was(
    noting: type[Noting], failing: int, monkeypatch: pytest.MonkeyPatch, *, offloaded: bool
) -> None:
    """Three chunks of two; the step after the error goes on from there."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 2 * 12 * 64 * 64)
    with faulty_engine():
        model = Weights([(64, 64)] * 6)
        if offloaded:
            tencache_fx.offload(model, "cpu")
        optimizer = StreamedOptimizer(model.parameters(), noting, lr=0.5, momentum=0.5)
        before = [value.clone() for value in model.state_dict().values()]
        for p in model.all:
            p.grad = torch.ones(64, 64)
        noting.failing = failing
        with pytest.raises(ArithmeticError, match="no good"):
            optimizer.step()
        noting.failing = -1
        done = 2 * failing
        assert len(optimizer.state_dict()["state"]) == done
        for index, (value, old) in enumerate(zip(model.state_dict().values(), before, strict=True)):
            assert torch.equal(value, old - 0.5 if index < done else old)
        optimizer.step()
        for index, (value, old) in enumerate(zip(model.state_dict().values(), before, strict=True)):
            assert torch.equal(value, old - 0.5 - 0.75 if index < done else old - 0.5)
        del model, optimizer, p


class Numbers(torch.optim.AdamW):
    """It keeps a number that is a part of the gradient, counts its steps, and fails at the second one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            assert p.grad is not None
            self.state[p]["first"] = p.grad.flatten()[0]
            if self.state[p]["step"] == 2:
                raise ArithmeticError("no good")


def test_numbers_are_as_they_were_after_an_error_and_keep_nothing_alive() -> None:
    model = tencache_fx.offload(Weights([(64, 64)] * 3), "cpu")
    optimizer = StreamedOptimizer(model.parameters(), Numbers)
    set_gradients(list(model.all), 0, torch.float32)
    optimizer.step()
    weights = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ArithmeticError, match="no good"):
        optimizer.step()
    for state, value, old in zip(states(optimizer), model.state_dict().values(), weights, strict=True):
        assert state["step"] == 1
        assert state["first"].untyped_storage().nbytes() == 4
        assert torch.equal(value, old)


@pytest.mark.parametrize("room_for", range(4))
def test_without_room_for_a_state_in_a_chunk_those_before_it_are_updated(
    room_for: int, new_engine: Callable[..., Engine]
) -> None:
    engine = new_engine(host_budget_bytes=room_for * 4 * 256 * 256 + 8192)
    engine.serves_all = True
    install_engine(engine)
    model = Weights([(256, 256)] * 3)
    optimizer = StreamedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in model.all]
    for p in model.all:
        p.grad = torch.ones(256, 256)
    if room_for < 3:
        with pytest.raises(BudgetError, match="host_budget"):
            optimizer.step()
    else:
        optimizer.step()
    assert list(optimizer.state) == list(model.all)[:room_for]
    for index, (p, old) in enumerate(zip(model.all, before, strict=True)):
        assert torch.equal(p.detach(), old - 0.1 if index < room_for else old)


@pytest.mark.parametrize(("failing", "told"), [(0, 0), (1, 3)])
def test_a_copy_of_a_chunk_that_fails_is_told_of_each_parameter(failing: int, told: int) -> None:
    """The first is the copy in, the other the copy out."""
    assert step_with_failing_copy(failing)[1] == told


class Refusing(CpuStreams):
    """It takes no copies out of updates."""

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        if lane is Lane.UPDATE_OUT:
            raise RuntimeError("refused")
        return super().copy_all(lane, pairs, after)


def test_copies_out_that_cannot_begin_are_told_of_each_parameter() -> None:
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=Refusing()))
    model = tencache_fx.offload(Weights([(64, 64)] * 3), "cpu")
    for p in model.all:
        p.grad = torch.ones(64, 64)
    with pytest.raises(RuntimeError, match="refused"):
        StreamedOptimizer(model.parameters(), torch.optim.SGD).step()
    for p in model.all:
        offloaded = find_offloaded(p)
        assert offloaded is not None
        assert not offloaded.updating
        with pytest.raises(InvariantError, match="refused"):
            offloaded.wait_update()


class SlowIn(CpuStreams):
    """What is copied in for others than updates begins late."""

    def transfer(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if threading.current_thread().name.startswith(f"tencache-{Lane.IN}_"):
            time.sleep(0.1)
        super().transfer(lane, pairs)


def test_weights_are_written_when_nobody_reads_them_any_more() -> None:
    """Of all parameters of a chunk."""
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=SlowIn()))
    model = tencache_fx.offload(Weights([(64, 64)] * 3), "cpu")
    optimizer = StreamedOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    before = [value.clone() for value in model.state_dict().values()]
    for p in model.all:
        p.grad = torch.ones(64, 64)
    read = [torch.empty(64, 64) for _ in model.all]
    events = []
    for p, target in zip(model.all, read, strict=True):
        offloaded = find_offloaded(p)
        assert offloaded is not None
        events.append(offloaded.copy_in(target, ()))
    optimizer.step()
    engines()[0].streams.wait_host(events)
    for target, value, old in zip(read, model.state_dict().values(), before, strict=True):
        assert torch.equal(target, old)
        assert torch.equal(value, old - 0.5)


class Measured(FaultyCpuStreams):
    """It counts the device memory of copies to and fro, and what copies out still hold when others begin."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(delay_s=delay_s)
        self.released_bytes = 0

    def after_release(self, src: Tensor) -> None:
        self.released_bytes += src.nbytes
        super().after_release(src)


@pytest.mark.parametrize("side", [32, 64, 128])
def test_what_is_under_way_has_its_room(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small and of larger parameters; where copies are slow, they are waited for."""
    room_bytes = 16 * 4 * 64 * 64
    monkeypatch.setattr(streamed_update, "ROOM_BYTES", room_bytes)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", room_bytes // 4)
    coming, going = [], []
    start, depart = streamed_update.UpdateStream.start, streamed_update.UpdateStream.depart

    def started(stream: Any, chunk: Any) -> None:
        start(stream, chunk)
        coming.append(sum(stream._coming.values()))

    def departed(stream: Any, done: Any) -> Any:
        departure = depart(stream, done)
        going.append(sum(nbytes for _, _, nbytes in stream._going))
        return departure

    monkeypatch.setattr(streamed_update.UpdateStream, "start", started)
    monkeypatch.setattr(streamed_update.UpdateStream, "depart", departed)
    streams = Measured(delay_s=0.002)
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=streams))
    model = tencache_fx.offload(Weights([(side, side)] * 24), "cpu")
    optimizer = StreamedOptimizer(model.parameters(), torch.optim.SGD, momentum=0.9)
    for step in range(3):
        set_gradients(list(model.all), step, torch.float32)
        optimizer.step()
    one_bytes = 8 * side * side  # weight and momentum
    assert (one_bytes if side < 128 else 0) < max(coming) <= max(room_bytes // 2, one_bytes)
    assert one_bytes <= max(going) <= max(room_bytes // 4, one_bytes)
    assert streams.released_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [0, 128 << 20])
@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor])
def test_fifty_steps_on_a_gpu(
    cls: type[torch.optim.Optimizer], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With late copies, poisoned memory, and so little room that copies out are waited for."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(streamed_update, "ROOM_BYTES", 1 << 23)
    shapes = [(512, 384), (384, 768), (768, 128)] if cls is torch.optim.Muon else [(512, 384), (384,), (384, 768)]
    plain = [nn.Parameter(p.detach().float().cuda()) for p in Weights(shapes, torch.bfloat16).all]
    trained(plain, cls, {"lr": 0.01}, torch.bfloat16, 50)
    device = resolve_device(torch.device("cuda"))
    streams = FaultyCudaStreams(device, delay_cycles=300_000)
    engine = Engine(device, host_budget_bytes=1 << 28, streams=streams)
    install_engine(engine)
    try:
        model = tencache_fx.offload(Weights(shapes, torch.bfloat16).cuda(), "cuda")
        mine = trained(list(model.all), lambda groups: StreamedOptimizer(groups, cls), {"lr": 0.01}, torch.bfloat16, 50)
        for state, expected in zip(states(mine), [*plain[::2], *plain[1::2]], strict=True):
            torch.testing.assert_close(state["master"].cpu(), expected.detach().cpu(), rtol=1e-4, atol=1e-5)
        del model, mine, state
    finally:
        engine.close()
