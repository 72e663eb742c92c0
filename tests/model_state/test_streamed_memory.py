"""Host memory of a whole-matrix optimizer's state is unmapped when no copy touches it any more."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tencache_fx.model_state import streamed_optimizer, update_chunks
from tencache_fx.optim import StreamedOptimizer
from tencache_fx.runtime.buffers import Buffer
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.streams import CpuEvent, CpuStreams, Event, Lane

SIDE = 192  # a matrix takes 144 KiB, and so has a mapping of its own


class LateEvent(CpuEvent):
    """The host knows that the job is over once it has waited for it, or for a later one of its lane."""

    def __init__(self, job: "Future[None]", number: int, known: list[int]) -> None:
        super().__init__(job)
        self._number, self._known = number, known

    @property
    def is_known(self) -> bool:
        return self._number <= self._known[0]

    def query(self) -> bool:
        return self.is_known and super().query()

    def wait_host(self) -> None:
        super().wait_host()
        self._known[0] = max(self._known[0], self._number)


class AheadStreams(CpuStreams):
    """As on a GPU, the host runs ahead of copies: that compute waits for one does not tell the host that it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[LateEvent, set[int]]] = []  # with the places in memory that each touches
        self._numbers = itertools.count()
        self._known = {lane: [-1] for lane in Lane}

    def submit(self, lane: Lane, job: Callable[[], None]) -> CpuEvent:
        return LateEvent(self.lanes[lane].begin(job), next(self._numbers), self._known[lane])

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        places = {each.data_ptr() for pair in pairs for each in pair}
        event = super().copy_all(lane, pairs, after)
        assert isinstance(event, LateEvent)
        self.copies.append((event, places))
        return event

    def wait_compute(self, event: Event) -> None:
        assert isinstance(event, CpuEvent)
        event._job.result()

    def are_known(self, memory: Tensor) -> bool:
        """Return whether the host knows that all copies that touch some memory are over."""
        first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        touching = [event for event, places in self.copies if any(first <= place < last for place in places)]
        return all(event.is_known for event in touching)


class Replacing(torch.optim.Optimizer):
    """It keeps another tensor at each step: of another name, or of another dtype, or of another shape."""

    def __init__(self, params: Any, lr: float = 0.1, change: str = "name") -> None:
        super().__init__(params, {"lr": lr, "change": change})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                steps = state.get("steps", 0) + 1
                name, rows, dtype = "kept", SIDE, torch.float32
                if group["change"] == "name":
                    name = f"kept {steps}"
                elif group["change"] == "dtype":
                    dtype = (torch.float64, torch.float32)[steps % 2]
                else:
                    rows += steps
                state.clear()
                state.update({"steps": steps, name: torch.full((rows, SIDE), float(steps), dtype=dtype)})
                p.sub_(p.grad, alpha=group["lr"])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in host memory, and each matrix updated by itself."""
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 0)


@pytest.mark.parametrize("budget_bytes", [1 << 26, 7 * 8 * SIDE * (SIDE + 4)])
@pytest.mark.parametrize("change", ["name", "dtype", "shape"])
def test_replaced_state_is_unmapped_behind_the_copies_that_read_it(
    change: str, budget_bytes: int, new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is little room, the next state waits for that."""
    streams = AheadStreams()
    engine = new_engine(streams=streams, host_budget_bytes=budget_bytes)
    engine.serves_all = True
    install_engine(engine)
    discard, known = engine.pool.discard, []

    def discarded(buffer: Buffer) -> None:
        known.append(streams.are_known(buffer.memory))
        discard(buffer)

    monkeypatch.setattr(engine.pool, "discard", discarded)
    parameters = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(6)]
    optimizer = StreamedOptimizer(parameters, Replacing, change=change)
    for step in range(1, 5):
        for parameter in parameters:
            parameter.grad = torch.ones(SIDE, SIDE)
        optimizer.step()
        for parameter in parameters:
            (kept,) = (each for each in optimizer.state[parameter].values() if isinstance(each, Tensor))
            assert kept.eq(step).all()
    assert len(known) >= 6 * 2
    assert all(known)
