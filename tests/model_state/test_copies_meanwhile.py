"""Copies in that begin while a step waits for a number: weights and states are torch's, whatever ends the step."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from harness import faulty_engine
from optimizer_steps import are_same, found, interrupt_steps
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tencache_fx
from tencache_fx.model_state import offloading, scalar_reads, streamed_optimizer, streamed_update, update_chunks
from tencache_fx.model_state.chunk_queue import ChunkQueue
from tencache_fx.model_state.scalar_reads import ScalarReads, StepReads
from tencache_fx.model_state.streamed_update import Chunk, UpdateStream
from tencache_fx.optim import StreamedOptimizer
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.streams import Event, Lane

SIDE = 144
INTERRUPTED = ("chunk_queue.py", "scalar_reads.py", "streamed_optimizer.py", "streamed_update.py")


class Passing(TorchDispatchMode):
    """It changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Scaled(torch.optim.AdamW):
    """Its steps divide a gradient by its norm, read on the host, if that is large."""

    inside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with self.inside:
            for p in self.param_groups[0]["params"]:
                p.grad.div_(max(1.0, p.grad.norm().item()))
            super().step()


class Waiting:
    """Numbers are read as on a GPU, where the host waits for each; `starts` has the sizes of chunks begun meanwhile."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.now = False

    def reads(self, device: torch.device, waits: Callable[[], None]) -> ScalarReads:
        def read(number: Tensor) -> Tensor:
            self.now = True
            try:
                waits()
            finally:
                self.now = False
            return number.clone()

        return ScalarReads(device, read)


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Weights and states in host memory, and each parameter updated by itself, two at a time copied in."""
    found = Waiting()
    start = UpdateStream.start

    def started(stream: UpdateStream, chunk: Chunk) -> None:
        if found.now:
            found.starts.append(len(chunk.updates))
        start(stream, chunk)

    monkeypatch.setattr(UpdateStream, "start", started)
    monkeypatch.setattr(scalar_reads, "read_past_copies", found.reads)
    monkeypatch.setattr(streamed_update, "_DEPTH", 2)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 0)
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)
    return found


def made(cls: type[torch.optim.Optimizer], count: int = 5, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(SIDE, SIDE).to(dtype)) for _ in range(count))
    tencache_fx.offload(model, "cpu")
    return model, StreamedOptimizer(model.parameters(), cls)


def set_gradients(parameters: Any, step: int) -> None:
    for index, p in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + index)
        p.grad = torch.randn(SIDE, SIDE, generator=generator).to(p.dtype)


def train(parameters: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 20])
@pytest.mark.parametrize("room_bytes", [1, 400_000, 1 << 29])
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Scaled])
def test_weights_are_those_of_torch(
    cls: type[torch.optim.Optimizer],
    room_bytes: int,
    chunk_bytes: int,
    waiting: Waiting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With late copies, poisoned memory, and one chunk, some or all of them under way."""
    monkeypatch.setattr(streamed_update, "ROOM_BYTES", room_bytes)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", chunk_bytes)
    plain = [nn.Parameter(torch.empty(SIDE, SIDE)) for _ in range(24)]
    with faulty_engine():
        model, optimizer = made(cls, 24, torch.bfloat16)
        for p, value in zip(plain, model.state_dict().values(), strict=True):
            p.data.copy_(value)
        train(model, optimizer, range(4))
        torch_own = cls(plain)
        for step in range(4):
            set_gradients(plain, step)
            for p in plain:
                assert p.grad is not None
                p.grad = p.grad.bfloat16().float()
            torch_own.step()
        for value, p in zip(model.state_dict().values(), plain, strict=True):
            assert torch.equal(value, p.detach().bfloat16())
        assert waiting.starts
        del model, optimizer


def test_copies_in_begin_in_the_last_read_of_a_step(waiting: Waiting) -> None:
    """All but the first two, which begin before, and the third: nothing is known at the first of the steps."""
    model, optimizer = made(torch.optim.Adafactor, 7)
    train(model, optimizer, range(2))
    assert waiting.starts == [1] * 2 * 4


def test_nothing_begins_where_calls_of_torch_go_elsewhere(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made(Scaled)
    train(*expected, range(2))
    assert waiting.starts
    waiting.starts.clear()
    monkeypatch.setattr(Scaled, "inside", Passing())
    model, optimizer = made(Scaled)
    train(model, optimizer, range(2))
    assert not waiting.starts
    with Passing():  # of the caller: the same as before the step
        train(model, optimizer, range(2, 3))
    train(*expected, range(2, 3))
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), found(*expected), strict=True))


class NoCopiesIn(FaultyCpuStreams):
    """It takes no copy in of updates from the one of number `fails` on."""

    fails: int | None = None
    begun = 0

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        if lane is Lane.UPDATE_IN:
            self.begun += 1
            if self.fails is not None and self.begun > self.fails:
                raise RuntimeError("refused")
        return super().copy_all(lane, pairs, after)


@pytest.mark.parametrize("fails", range(5))
def test_an_error_of_copies_that_begin_meanwhile_is_not_of_the_step(fails: int) -> None:
    """All whose copies in had begun before are updated, and the others are as they were, as without any reads."""
    streams = NoCopiesIn()
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=streams))
    values = []
    model, optimizer = made(Scaled)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        values.append(found(model, optimizer))
    model, optimizer = made(Scaled)
    train(model, optimizer, range(1))
    streams.begun, streams.fails = 0, fails
    with pytest.raises(RuntimeError, match="refused"):
        train(model, optimizer, range(1, 2))
    streams.fails = None
    done = max(0, fails - 1)  # the one before is updated only where there is no room for the next
    for index, each in enumerate(found(model, optimizer)):
        assert are_same(each, values[1 if index < done else 0][index])
    del model, optimizer


@pytest.mark.filterwarnings("ignore:.*could not be updated.*:UserWarning")
def test_an_interrupt_at_any_line_leaves_no_mixture_of_steps(waiting: Waiting) -> None:
    """At one line in nine, and with late copies."""
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=FaultyCpuStreams(delay_s=0.0002)))
    model, optimizer = made(Scaled, 4)
    expected = []
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        expected.append(found(model, optimizer))
    begun_meanwhile: list[bool] = []

    def begin() -> tuple[nn.ParameterList, StreamedOptimizer]:
        model, optimizer = made(Scaled, 4)
        train(model, optimizer, range(1))
        set_gradients(model, 1)
        waiting.starts.clear()
        return model, optimizer

    whole, told = interrupt_steps(begin, INTERRUPTED, 9, expected, lambda: begun_meanwhile.append(bool(waiting.starts)))
    assert all("go back to a checkpoint" in each for each in told)
    assert sum(begun_meanwhile) > 10
    assert whole > len(told) / 2


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is freed is freed by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_nothing_keeps_the_memory_of_a_step_that_has_ended(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Any]] = []
    for module, cls in (
        (streamed_optimizer, UpdateStream),
        (streamed_optimizer, ChunkQueue),
        (streamed_update, StepReads),
    ):
        monkeypatch.setattr(module, cls.__name__, noted(cls, kept))
    model, optimizer = made(Scaled)
    train(model, optimizer, range(2))
    assert len(kept) == 2 * 3
    assert all(each() is None for each in kept)
    assert waiting.starts


def noted(cls: type[Any], kept: list[weakref.ref[Any]]) -> Callable[..., Any]:
    def make(*args: Any, **options: Any) -> Any:
        found = cls(*args, **options)
        kept.append(weakref.ref(found))
        return found

    return make
