"""Streams and system calls that are late, dirty or broken, to provoke what a fast machine hides.

Poison is 0xFF in every byte, which is NaN in every float dtype: whoever reads memory too early or too late sees it.
"""

import errno
import random
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.runtime.cuda_streams import CudaStreams
from tencache_fx.runtime.file_io import FileIO
from tencache_fx.runtime.streams import CpuStreams, Event, Lane
from tencache_fx.tensors import raw_bytes

POISON = 0xFF
_DIRT_BYTES = 1 << 20


class FaultyCpuStreams(CpuStreams):
    """Each copy starts up to `delay_s` late; freed memory is poisoned; copies numbered in `failing` raise `OSError`."""

    def __init__(
        self, *, delay_s: float = 0.0, poison: bool = True, failing: Sequence[int] = (), seed: int = 0
    ) -> None:
        super().__init__()
        self._delay_s = delay_s
        self._poison = poison
        self._failing = frozenset(failing)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.copies = 0
        self.gate: threading.Event | None = None  # when set, no copy starts before it is

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        with self._lock:  # numbered in the order in which copies are queued: lanes run them in any
            number = self.copies
            self.copies += 1
        if number not in self._failing:
            return super().copy_all(lane, pairs, after)

        def job() -> None:
            self.wait_host(after)
            self._wait_late()
            raise OSError(errno.EIO, "injected copy failure")

        return self.submit(lane, job)

    def transfer(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._wait_late()
        super().transfer(lane, pairs)

    def _wait_late(self) -> None:
        with self._lock:
            delay_s = self._random.uniform(0, self._delay_s)
        if self.gate is not None:
            assert self.gate.wait(30)
        if delay_s:
            time.sleep(delay_s)

    def after_release(self, src: Tensor) -> None:
        if self._poison:
            raw_bytes(src).fill_(POISON)

    def after_return(self, memory: Tensor, after: tuple[Event, ...]) -> tuple[Event, ...]:
        if not self._poison:
            return after

        def job() -> None:
            self.wait_host(after)
            memory.fill_(POISON)

        return (self.submit(Lane.IN, job),)


class FaultyCudaStreams(CudaStreams):
    """Each copy starts `delay_cycles` of the device's clock late; freed memory is poisoned."""

    def __init__(self, device: torch.device, *, delay_cycles: int = 0, poison: bool = True) -> None:
        super().__init__(device)
        self._delay_cycles = delay_cycles
        self._poison = poison
        # Made once, as tests look at the peak of what is allocated.
        self._dirt = torch.full((_DIRT_BYTES,), POISON, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)

    def transfer(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self._delay_cycles:
            with torch.cuda.stream(self.lanes[lane]):
                torch.cuda._sleep(self._delay_cycles)
        super().transfer(lane, pairs)

    def after_release(self, src: Tensor) -> None:
        if self._poison:
            raw_bytes(src).fill_(POISON)

    def after_return(self, memory: Tensor, after: tuple[Event, ...]) -> tuple[Event, ...]:
        if not self._poison:
            return after
        parts = memory.split(_DIRT_BYTES)
        return (self.copy_all(Lane.IN, [(part, self._dirt[: part.numel()]) for part in parts], after),)


class FaultyIO(FileIO):
    """Fails, shortens or delays system calls, as told or at random."""

    def __init__(self, *, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.write_errors: list[int] = []  # errno of each coming write, 0 for none
        self.read_errors: list[int] = []
        self.short = False
        self.delay_s = 0.0
        self.write_gate: threading.Event | None = None
        self.read_gate: threading.Event | None = None
        self.writing = threading.Event()
        self.reading = threading.Event()
        self.room_bytes: int | None = None
        self.full = False

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self.writing.set()
        self._suffer(self.write_errors, self.write_gate)
        return super().pwrite(fd, self._shorten(view), offset)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        self.reading.set()
        self._suffer(self.read_errors, self.read_gate)
        return super().pread(fd, self._shorten(view), offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "injected full disk")
        super().allocate(fd, offset, nbytes)

    def free_bytes(self, fd: int) -> int:
        return super().free_bytes(fd) if self.room_bytes is None else self.room_bytes

    def _suffer(self, errors: list[int], gate: threading.Event | None) -> None:
        if gate is not None:
            assert gate.wait(30)
        if self.delay_s:
            time.sleep(self.delay_s)
        with self.lock:
            number = errors.pop(0) if errors else 0
        if number:
            raise OSError(number, "injected disk failure")

    def _shorten(self, view: memoryview) -> memoryview:
        pages = view.nbytes // 4096
        if not self.short or pages < 2:
            return view
        with self.lock:
            return view[: 4096 * self.random.randint(1, pages)]
