"""The copy lanes beside compute, and the events that order them.

Several lines of work run side by side: *compute* (whatever the caller's current stream is), and lanes *out* (device to
host) and *in* (host to device): two for what graphs copy, and two for an optimizer's updates on the device, whose
copies wait for kernels of their own and must not hold up the others. A lane does its work in the order it was given;
between lanes only events order anything.
`CudaStreams` maps lanes to CUDA streams; `CpuStreams` has a thread for each lane, with the same rules, so that every
path and every race of the runtime exists on a machine without a GPU.

Never `record_stream`: it delays reuse by an unknown time and does not protect memory that the compiler recycles.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tencache_fx.errors import InvariantError
from tencache_fx.units import PAGE_BYTES

STUCK_S = 60.0
"""A single copy that takes longer than this counts as stuck."""

_TOUCH_THREADS = 8


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

    @abstractmethod
    def record_compute(self) -> Event:
        """Return an event behind everything queued on the caller's compute stream so far."""

    def copy(self, lane: Lane, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        """Queue `dst[:] = src` (equal-sized bytes) on `lane` once all of `after` happened; return the copy's event.

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

    @abstractmethod
    def wait_host(self, events: Iterable[Event]) -> None:
        """Block the host until `events` happened, well or not: enough for memory that is about to be overwritten."""

    @abstractmethod
    def watch(self) -> Watch:
        """Start measuring a stall of the caller's compute stream."""

    @abstractmethod
    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> bool:
        """Make page-aligned host `memory` fast to copy from and to; False when the system refuses."""

    @abstractmethod
    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """Undo `pin`. Every copy that touches `memory` must be over."""

    @abstractmethod
    def close(self) -> None:
        """Wait until all lanes are idle, then stop them. Idempotent."""

    @abstractmethod
    def transfer(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each `(dst, src)` now, from inside a lane: in its thread on the CPU, under its stream on CUDA."""

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

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.lanes = {lane: ThreadPoolExecutor(1, thread_name_prefix=f"tencache-{lane}") for lane in Lane}
        past: Future[None] = Future()
        past.set_result(None)
        self._past = CpuEvent(past)

    def record_compute(self) -> Event:
        """Return an event that has happened."""
        return self._past

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        """Queue the copies on the lane's thread."""
        waiting = deque(pairs)

        def job() -> None:
            self.wait_host(after)
            some = list(waiting)
            waiting.clear()
            self.transfer(some)
            some.clear()  # before the event happens: whoever waits for it may count on being the last to hold them

        return self.submit(lane, job)

    def record(self, lane: Lane) -> Event:
        """Queue a job that does nothing."""
        return self.submit(lane, lambda: None)

    def submit(self, lane: Lane, job: Callable[[], None]) -> CpuEvent:
        """Queue any job on the lane's thread."""
        return CpuEvent(self.lanes[lane].submit(job))

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """Return an empty context: each thread computes for itself."""
        return contextlib.nullcontext()

    def wait_compute(self, event: Event) -> None:
        """Block the calling thread."""
        event.synchronize()

    def wait_host(self, events: Iterable[Event]) -> None:
        """Block the calling thread, whatever became of the jobs."""
        for event in events:
            assert isinstance(event, CpuEvent)
            event.wait_host()

    def watch(self) -> Watch:
        """Start a clock."""
        return CpuWatch()

    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> bool:
        """Accept: there is no device to pin for."""
        return True

    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """Do nothing."""

    def close(self) -> None:
        """Finish all queued copies and join the threads."""
        for executor in self.lanes.values():
            executor.shutdown(wait=True)

    def transfer(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy in the calling thread."""
        for dst, src in pairs:
            dst.copy_(src)


class CudaWatch:
    """A stall of a CUDA stream, between two timing events that go back to `spare` once both were read."""

    __slots__ = ("_compute", "_elapsed_ns", "_events", "_spare", "_stopped")

    def __init__(
        self, compute: Callable[[], torch.cuda.Stream], spare: deque[tuple[torch.cuda.Event, torch.cuda.Event]]
    ) -> None:
        self._compute = compute
        self._spare = spare
        self._stopped = False
        self._elapsed_ns: int | None = None
        try:
            self._events = spare.pop()
        except IndexError:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._events[0].record(compute())

    def stop(self) -> None:
        """Record the second event on the caller's current stream."""
        self._events[1].record(self._compute())
        self._stopped = True

    def elapsed_ns(self) -> int | None:
        """Return the device time between both events, or None while the device has not reached them."""
        if self._elapsed_ns is None and self._stopped and self._events[1].query():
            self._elapsed_ns = int(self._events[0].elapsed_time(self._events[1]) * 1e6)
            self._spare.append(self._events)
        return self._elapsed_ns


class CudaStreams(Streams):
    """Lanes as CUDA streams; no host synchronisation except in `close`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes = {lane: torch.cuda.Stream(device=device) for lane in Lane}
        self._beside = torch.cuda.Stream(device=device, priority=-1)
        self._index = self._beside.device_index
        self._by_handle: dict[int, torch.cuda.Stream] = {}  # the caller's streams that were seen
        self._spare: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def record_compute(self) -> Event:
        """Record on the current stream."""
        return self._record(self._compute())

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        """Queue asynchronous copies on the lane's stream."""
        stream = self.lanes[lane]
        for event in after:
            assert isinstance(event, torch.cuda.Event)
            event.wait(stream)
        if torch.cuda.current_device() != self._index:
            with torch.cuda.stream(stream):
                self.transfer(pairs)
            return self._record(stream)
        compute = self._compute()  # what follows is `torch.cuda.stream`, without its ten microseconds
        try:
            torch.cuda.set_stream(stream)
            self.transfer(pairs)
        finally:
            torch.cuda.set_stream(compute)
        return self._record(stream)

    def record(self, lane: Lane) -> Event:
        """Record on the lane's stream."""
        return self._record(self.lanes[lane])

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a stream whose kernels go first: they are short, and copies wait for them."""
        return torch.cuda.stream(self._beside)

    def wait_compute(self, event: Event) -> None:
        """Let the current stream wait."""
        assert isinstance(event, torch.cuda.Event)
        event.wait(self._compute())

    def wait_host(self, events: Iterable[Event]) -> None:
        """Block the calling thread; the events sleep instead of spinning."""
        for event in events:
            event.synchronize()

    def watch(self) -> Watch:
        """Record a timing event on the current stream."""
        return CudaWatch(self._compute, self._spare)

    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> bool:
        """Touch the pages in parallel, then register them with the driver.

        0.1 to 0.3 s per GiB in all, against 0.5 for `pin_memory=True`, and exactly as many bytes as asked for.
        """
        _touch(memory)
        with torch.cuda.device(self.device):
            cudart = torch.cuda.cudart()
            status = cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if status == cudart.cudaError.success:
            return True
        # A refused call leaves its error behind for the next kernel launch to report; let a harmless launch collect it.
        try:
            torch.empty(1, dtype=torch.uint8, device=self.device).fill_(0)
        except RuntimeError as error:
            if "CUDA error" not in str(error):
                raise
        return False

    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        """Unregister from the driver."""
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    def close(self) -> None:
        """Wait for all lanes."""
        for stream in (self._beside, *self.lanes.values()):
            stream.synchronize()

    def transfer(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queue the copies on the current stream, by one call: several threads of Python take turns at every call."""
        if len(pairs) == 1:
            ((target, source),) = pairs
            target.copy_(source, non_blocking=True)
            return
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def _compute(self) -> torch.cuda.Stream:
        """Return the caller's current stream; `torch.cuda.current_stream` looks the device up anew and makes an object.

        A handle stands for one stream for good: torch never ends its own, and one of somebody else is its handle.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if (stream := self._by_handle.get(handle)) is None:
            stream = self._by_handle[handle] = torch.cuda.current_stream(self.device)
        return stream

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # workers that wait for it sleep instead of spinning
        event.record(stream)
        return event


def open_streams(device: torch.device) -> Streams:
    """Return the streams that suit `device` ("cpu" or "cuda")."""
    makers: dict[str, Callable[[], Streams]] = {"cpu": CpuStreams, "cuda": lambda: CudaStreams(device)}
    return makers[device.type]()


def _touch(memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
    """Write one byte of every page: page faults are what makes registering slow, and threads share them."""
    part = -(-memory.nbytes // _TOUCH_THREADS // PAGE_BYTES) * PAGE_BYTES

    def fill(start: int) -> None:
        memory[start : start + part : PAGE_BYTES] = 0

    with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="tencache-touch") as threads:
        list(threads.map(fill, range(0, memory.nbytes, part)))
