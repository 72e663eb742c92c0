"""The copy lanes beside compute, and the events that order them.

Several lines of work run side by side: *compute* (whatever the caller's current stream is), and lanes *out* (device to
host) and *in* (host to device): two for what graphs copy, and two for an optimizer's updates on the device, whose
copies wait for kernels of their own and must not hold up the others. A lane does its work in the order it was given;
between lanes only events order anything.
`CudaStreams` (`cuda_streams.py`) maps lanes to CUDA streams; `CpuStreams` has a thread for each lane, with the same
rules, so that every path and every race of the runtime exists on a machine without a GPU.

Never `record_stream`: it delays reuse by an unknown time and does not protect memory that the compiler recycles.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tencache_fx.errors import InvariantError
from tencache_fx.runtime.worker import Worker
from tencache_fx.tensors import raw_bytes

STUCK_S = 60.0
"""A single copy that takes longer than this counts as stuck."""


class Lane(StrEnum):
    """A copy line beside compute."""

    OUT = "out"
    IN = "in"
    UPDATE_OUT = "update-out"
    UPDATE_IN = "update-in"


class Event(Protocol):
    """A point in a line of work; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Return whether everything before the point is done, without waiting."""

    def synchronize(self) -> None:
        """Block the host until it is."""


class Watch(Protocol):
    """Measures how long compute stood still between its creation and `stop()`."""

    def stop(self) -> None:
        """End the measurement, in stream order."""

    def elapsed_ns(self) -> int | None:
        """Return the time compute stood still, or None while that is not known yet; never waits."""


class Streams(ABC):
    """Orders copies against compute. Safe to call from several threads."""

    device: torch.device
    keeps_tensors = False
    """Whether a lane has tensors of its own of what it copies, until it has."""

    @abstractmethod
    def record_compute(self) -> Event:
        """Return an event behind everything queued on the caller's compute stream so far."""

    def copy(self, lane: Lane, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        """Queue the copy of all bytes of `src` to `dst` on `lane`, once all of `after` happened; return its event.

        Both are dense tensors of as many bytes, whatever their dtypes and shapes.
        Does not block the host. On the CPU the lane keeps both tensors alive; on CUDA the caller must.
        """
        return self.copy_all(lane, [(dst, src)], after)

    @abstractmethod
    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        """Queue several copies, `(dst, src)`, one behind the other, as `copy` does; return the last one's event."""

    @abstractmethod
    def record(self, lane: Lane) -> Event:
        """Return an event behind everything queued on `lane` so far, by whichever thread."""

    @abstractmethod
    def beside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the caller's compute stream is one beside all others, the same at each call."""

    @abstractmethod
    def wait_compute(self, event: Event) -> None:
        """Make the caller's compute stream wait for `event`; raises what the copy raised, where copies can."""

    def compute_key(self) -> object:
        """Return what tells the caller's compute stream from all others there ever are; None where nothing does."""
        return None

    def check(self, event: Event) -> None:  # noqa: B027 - an optional hook
        """Raise what the copy of an event that has happened has raised, where copies can: nobody has to wait for it."""

    @abstractmethod
    def wait_host(self, events: Iterable[Event]) -> None:
        """Block the host until `events` happened, well or not: enough for memory that is about to be overwritten."""

    @abstractmethod
    def watch(self) -> Watch:
        """Start measuring a stall of the caller's compute stream."""

    @abstractmethod
    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", threads: int | None = None) -> bool:
        """Make page-aligned host `memory` fast to copy from and to; False when the system refuses.

        It has several threads for that, `threads` at most, if these are given.
        """

    @abstractmethod
    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """Undo `pin`. Every copy that touches `memory` must be over."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all lanes are idle, then stop them. Idempotent."""

    @abstractmethod
    def transfer(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each `(dst, src)` now: on the CPU in the calling thread, which is the lane's, on CUDA in its stream."""

    def after_release(self, src: Tensor) -> None:  # noqa: B027 - an optional hook
        """Called with a dense source once compute has waited for its copy out: nobody may read its bytes again."""

    def after_return(self, memory: Tensor, after: tuple[Event, ...]) -> tuple[Event, ...]:
        """Called when a buffer is released that is free behind `after`; returns the events that replace these."""
        return after


class CpuEvent:
    """The completion of a lane's job."""

    __slots__ = ("_job",)

    def __init__(self, job: "Future[None]") -> None:
        self._job = job

    def query(self) -> bool:
        """Return whether the job is over, well or not."""
        return self._job.done()

    def synchronize(self) -> None:
        """Block until the job is over; raises `InvariantError` when it failed or is stuck."""
        self.wait_host()
        if (error := self._job.exception()) is not None:
            # A new exception: its traceback will hold the caller's tensors, and the job lives as long as its event.
            raise InvariantError(f"a copy between device and host memory failed: {error!r}.") from error

    def wait_host(self) -> None:
        """Block until the job is over, well or not: for memory that is reused, whatever became of its old value."""
        if not self._job.done() and wait_futures([self._job], STUCK_S).not_done:
            raise InvariantError(f"a copy did not finish within {STUCK_S:.0f} s; the copy lane is stuck.")


class CpuWatch:
    """A stall of a calling thread."""

    __slots__ = ("_start_ns", "_stop_ns")

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()
        self._stop_ns: int | None = None

    def stop(self) -> None:
        """End the measurement."""
        self._stop_ns = time.perf_counter_ns()

    def elapsed_ns(self) -> int | None:
        """Return the time between creation and `stop()`."""
        return None if self._stop_ns is None else self._stop_ns - self._start_ns


class CpuStreams(Streams):
    """Lanes as threads; compute is the calling thread, so what it "queued so far" is done."""

    keeps_tensors = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.lanes = {lane: Worker(f"tencache-{lane}") for lane in Lane}
        past: Future[None] = Future()
        past.set_result(None)
        self._past = CpuEvent(past)

    def record_compute(self) -> Event:
        """Return an event that has happened."""
        return self._past

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        """Queue the copies on the lane's thread."""
        waiting = deque((raw_bytes(dst), raw_bytes(src)) for dst, src in pairs)

        def job() -> None:
            self.wait_host(after)
            some = list(waiting)
            waiting.clear()
            self.transfer(lane, some)
            some.clear()  # before the event happens: whoever waits for it may count on being the last to hold them

        return self.submit(lane, job)

    def record(self, lane: Lane) -> Event:
        """Queue a job that does nothing."""
        return self.submit(lane, lambda: None)

    def submit(self, lane: Lane, job: Callable[[], None]) -> CpuEvent:
        """Queue any job on the lane's thread."""
        return CpuEvent(self.lanes[lane].begin(job))

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """Return an empty context: each thread computes for itself."""
        return contextlib.nullcontext()

    def wait_compute(self, event: Event) -> None:
        """Block the calling thread."""
        event.synchronize()

    def compute_key(self) -> object:
        """Return the same for every thread: what one has waited for is over."""
        return self.device

    def check(self, event: Event) -> None:
        """Raise what the job has raised."""
        event.synchronize()

    def wait_host(self, events: Iterable[Event]) -> None:
        """Block the calling thread, whatever became of the jobs."""
        for event in events:
            assert isinstance(event, CpuEvent)
            event.wait_host()

    def watch(self) -> Watch:
        """Start a clock."""
        return CpuWatch()

    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", threads: int | None = None) -> bool:
        """Accept: there is no device to pin for."""
        return True

    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """Do nothing."""

    def close(self) -> None:
        """Finish all queued copies and join the threads."""
        for worker in self.lanes.values():
            worker.stop()

    def transfer(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy in the calling thread."""
        for dst, src in pairs:
            dst.copy_(src)
