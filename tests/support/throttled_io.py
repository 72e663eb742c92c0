"""Directories that are as slow as they are told to be."""

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tencache_fx.runtime.file_io import FileIO


class ThrottledIO(FileIO):
    """Each directory, by its name, serves one request after the other, `rates` bytes per second, both ways.

    With `sleeps` a request moves its bytes and returns when it would by the real clock: a directory that finds nothing
    to do loses time. Without, it moves none, and the clock is the time at which the last one ended.
    """

    def __init__(self, rates: Mapping[str, int], *, sleeps: bool = False) -> None:
        self.rates = dict(rates)
        self.sleeps = sleeps
        self.written: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self._done_ns = dict.fromkeys(rates, 0)
        self._clock_ns = 0
        self._lock = threading.Lock()

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        end_ns = self._serve(fd, view.nbytes, self.written)
        return self._wait(super().pwrite(fd, view, offset), end_ns) if self.sleeps else view.nbytes

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        end_ns = self._serve(fd, view.nbytes, self.read)
        return self._wait(super().pread(fd, view, offset), end_ns) if self.sleeps else view.nbytes

    def now_ns(self) -> int:
        return super().now_ns() if self.sleeps else self._clock_ns

    def _serve(self, fd: int, nbytes: int, moved: Counter[str]) -> int:
        """Count a request; return when it ends."""
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name
        with self._lock:
            moved[name] += nbytes
            end_ns = max(self._done_ns[name], self.now_ns()) + nbytes * 1_000_000_000 // self.rates[name]
            self._done_ns[name] = self._clock_ns = end_ns
        return end_ns

    def _wait(self, moved: int, end_ns: int) -> int:
        time.sleep(max(0, end_ns - self.now_ns()) / 1e9)
        return moved
