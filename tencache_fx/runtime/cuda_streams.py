"""Copy lanes as CUDA streams.

Copies are calls of CUDA's runtime on addresses. As torch's ops they would take the host several times as long: to make
views of bytes, to go through the dispatcher, and to switch the current stream there and back.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from tencache_fx.errors import InvariantError
from tencache_fx.runtime.streams import CpuStreams, Event, Lane, Streams, Watch
from tencache_fx.tensors import raw_bytes
from tencache_fx.units import PAGE_BYTES

_TOUCH_THREADS = 8
_TOUCH_BYTES = 32 << 20  # worth a thread: to start one while others compute in Python may take 10 ms

Memcpy = Callable[[int, int, int, int], None]
"""Issues the copy to an address, from another one, of so many bytes, in a stream given by its handle."""


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
        self._lasting: set[int] = set()  # the handles of those that are torch's own
        self._spare: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._memcpy = find_memcpy()

    def record_compute(self) -> Event:
        """Record on the current stream."""
        return self._record(self._compute())

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        """Queue asynchronous copies on the lane's stream."""
        stream = self.lanes[lane]
        for event in after:
            assert isinstance(event, torch.cuda.Event)
            event.wait(stream)
        self.transfer(lane, pairs)
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

    def compute_key(self) -> object:
        """Return the current stream's handle, if it is a stream of torch's: the handle of another may be used again."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle not in self._by_handle:
            self._compute()
        return handle if handle in self._lasting else None

    def wait_host(self, events: Iterable[Event]) -> None:
        """Block the calling thread; the events sleep instead of spinning."""
        for event in events:
            event.synchronize()

    def watch(self) -> Watch:
        """Record a timing event on the current stream."""
        return CudaWatch(self._compute, self._spare)

    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", threads: int | None = None) -> bool:
        """Touch the pages in parallel, then register them with the driver.

        0.1 to 0.3 s per GiB in all, against 0.5 for `pin_memory=True`, and exactly as many bytes as asked for.
        """
        _touch(memory, _TOUCH_THREADS if threads is None else threads)
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

    def transfer(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Queue the copies in the lane's stream."""
        stream = self.lanes[lane]
        if self._memcpy is None:
            with torch.cuda.stream(stream):
                for dst, src in pairs:
                    raw_bytes(dst).copy_(raw_bytes(src), non_blocking=True)
            return
        with torch.cuda.device(self._index):  # a new thread is on the first device, whatever the stream's is
            for dst, src in pairs:
                nbytes = dst.nbytes
                if nbytes != src.nbytes:
                    raise InvariantError(f"a copy of {src.nbytes} bytes to {nbytes} bytes was issued.")
                self._memcpy(dst.data_ptr(), src.data_ptr(), nbytes, stream.cuda_stream)

    def _compute(self) -> torch.cuda.Stream:
        """Return the caller's current stream; `torch.cuda.current_stream` looks the device up anew and makes an object.

        A handle stands for one stream for good: torch never ends its own, and one of somebody else is its handle.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if (stream := self._by_handle.get(handle)) is None:
            stream = self._by_handle[handle] = torch.cuda.current_stream(self.device)
            if not handle or stream.stream_id != handle:  # torch knows streams of others by their handles alone
                self._lasting.add(handle)
        return stream

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # workers that wait for it sleep instead of spinning
        event.record(stream)
        return event


def find_memcpy() -> Memcpy | None:
    """Return CUDA's own copy; None where torch was installed without the bindings to CUDA that its wheels require."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    issue, either_way, success = (
        runtime.cudaMemcpyAsync,
        runtime.cudaMemcpyKind.cudaMemcpyDefault,
        runtime.cudaError_t.cudaSuccess,
    )

    def memcpy(dst: int, src: int, nbytes: int, stream: int) -> None:
        (status,) = issue(dst, src, nbytes, either_way, stream)
        if status != success:
            raise RuntimeError(f"CUDA error: a copy of {nbytes} bytes could not be issued: {status!r}.")

    return memcpy


def open_streams(device: torch.device) -> Streams:
    """Return the streams that suit `device` ("cpu" or "cuda")."""
    makers: dict[str, Callable[[], Streams]] = {"cpu": CpuStreams, "cuda": lambda: CudaStreams(device)}
    return makers[device.type]()


def _touch(memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", most_threads: int) -> None:
    """Write one byte of every page: page faults are what makes registering slow, and threads share those of much."""
    count = max(1, min(most_threads, memory.nbytes // _TOUCH_BYTES))
    part = -(-memory.nbytes // count // PAGE_BYTES) * PAGE_BYTES

    def fill(start: int) -> None:
        memory[start : start + part : PAGE_BYTES] = 0

    if count == 1:
        fill(0)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="tencache-touch") as threads:
        list(threads.map(fill, range(0, memory.nbytes, part)))
