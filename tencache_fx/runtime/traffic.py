"""What moves one way between host memory and one spill directory: its threads, its bytes, its rate."""

import threading
from collections.abc import Callable

from tencache_fx.hardware.rates import FIXED_DISK
from tencache_fx.runtime.worker import Worker

_WINDOW_NS = 1_000_000_000
_WINDOW_BYTES = 1 << 30
_MEASURED_NS = 250_000_000
_MEASURED_BYTES = 64 << 20
_GUESSED_BYTES = 1 << 16


class Traffic:
    """Requests of one directory, one way. Thread-safe.

    Its rate is bytes over the time in which any request was under way, over the last second of such time, or the last
    GiB if that is shorter. It begins as it is expected to be: as it was measured, which counts for a quarter of a
    second or 64 MiB, whichever is less, or as it is guessed, which counts for 64 KiB. So a rate that was measured too
    high is corrected by the first values, and one that was measured too low by the first pieces that are dealt there.
    Requests of less than `least_bytes` do not count, because they show a latency.
    """

    def __init__(self, name: str, workers: int, least_bytes: int, now_ns: Callable[[], int]) -> None:
        self.threads = Worker(f"tencache-{name}", workers)
        self.moved_bytes = 0
        self._least_bytes = least_bytes
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._observed = False
        self._bytes = self._busy_ns = 0.0  # both fade in step: their quotient is the rate
        self._active = 0
        self._mark_ns = 0  # up to here the time is counted
        self.expect(FIXED_DISK.write_bytes_per_s, guessed=True)

    @property
    def bytes_per_s(self) -> int:
        """Return the rate that is expected now, at least 1."""
        with self._lock:
            return max(1, int(self._bytes * 1e9 / self._busy_ns))

    def expect(self, bytes_per_s: int, *, guessed: bool = False) -> None:
        """Expect this rate, unless it is known by now what requests take."""
        counts_bytes = _GUESSED_BYTES if guessed else _MEASURED_BYTES
        with self._lock:
            if not self._observed:
                self._busy_ns = min(_MEASURED_NS, counts_bytes * 1e9 / bytes_per_s)
                self._bytes = bytes_per_s * self._busy_ns / 1e9

    def move(self, call: Callable[[], int], nbytes: int) -> int:
        """Return how many of `nbytes` the request `call` moved; raises what it raises."""
        counts = nbytes >= self._least_bytes
        if counts:
            with self._lock:
                if not self._active:
                    self._mark_ns = self._now_ns()
                self._active += 1
        moved = 0
        try:
            moved = call()
        finally:
            with self._lock:
                self.moved_bytes += moved
                if counts:
                    self._observe(moved)
        return moved

    def _observe(self, moved: int) -> None:
        now_ns = self._now_ns()
        self._busy_ns += now_ns - self._mark_ns
        self._bytes += moved  # none, if it failed: time that is spent in vain is spent
        self._mark_ns, self._observed = now_ns, True
        self._active -= 1
        fade = min(1.0, _WINDOW_NS / max(1.0, self._busy_ns), _WINDOW_BYTES / max(1.0, self._bytes))
        self._busy_ns *= fade
        self._bytes *= fade
