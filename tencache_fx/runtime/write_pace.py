"""Keeps what is written to disks within an endurance budget: so many bytes a day, of what SSDs are rated for.

A twenty-fourth of a day's bytes may be written at once; the rest comes evenly over the day. So in any 24 hours it is no
more than the budget (a token bucket, as in networks: RFC 2697).
"""

import threading
from collections.abc import Callable

from tencache_fx.errors import OptionError
from tencache_fx.planning.problem import AT_ONCE, steady_bytes_per_s
from tencache_fx.units import format_bytes

_POLL_S = 0.2  # how long a writer goes on waiting when the program ends


class WritePace:
    """Admits writes of at most `most_bytes` each. Thread-safe. `now_ns` is a clock that never goes back."""

    def __init__(self, most_bytes: int, now_ns: Callable[[], int]) -> None:
        self._most_bytes = most_bytes
        self._now_ns = now_ns
        self._cond = threading.Condition()
        self._bytes_per_day: int | None = None
        self._left_bytes = 0.0
        self._mark_ns = 0  # up to here the bytes that are left are counted
        self._ended = False
        self._waiting = 0

    @property
    def bytes_per_day(self) -> int | None:
        """Return the budget; None without one."""
        return self._bytes_per_day

    def limit(self, bytes_per_day: int | None) -> None:
        """Set the budget, or none; writes that wait go by it, too.

        Raises `OptionError` for one of which the part that may be written at once is less than one write.
        """
        if bytes_per_day is not None and bytes_per_day // AT_ONCE < self._most_bytes:
            raise OptionError(
                f"spill_write_budget is {format_bytes(bytes_per_day)}, and a twenty-fourth of it must be a block of "
                f"{format_bytes(self._most_bytes)} at least; give {format_bytes(self._most_bytes * AT_ONCE)} or more, "
                "or leave spill_dir out."
            )
        with self._cond:
            if bytes_per_day == self._bytes_per_day:
                return
            self._refill()
            first = self._bytes_per_day is None
            self._bytes_per_day = bytes_per_day
            if bytes_per_day is not None:
                most = bytes_per_day / AT_ONCE
                self._left_bytes = most if first else min(self._left_bytes, most)
                self._mark_ns = self._now_ns()
            self._cond.notify_all()

    def admit(self, nbytes: int) -> None:
        """Block until so many bytes may be written."""
        with self._cond:
            self._waiting += 1
            while not self._ended and threading.main_thread().is_alive():
                self._refill()
                if self._bytes_per_day is None or self._left_bytes >= nbytes:
                    break
                self._sleep((nbytes - self._left_bytes) / steady_bytes_per_s(self._bytes_per_day))
            self._waiting -= 1
            self._left_bytes -= nbytes

    @property
    def holds_up(self) -> bool:
        """Return whether writes wait for it now."""
        return self._waiting > 0

    def end(self) -> None:
        """Admit all from now on: who closes the store waits for writes that are under way."""
        with self._cond:
            self._ended = True
            self._cond.notify_all()

    def _sleep(self, missing_s: float) -> None:
        """Wait until there may be enough, or the budget is another one. Lock held."""
        self._cond.wait(min(_POLL_S, missing_s))

    def _refill(self) -> None:
        """Count what may be written by now. Lock held."""
        if self._bytes_per_day is not None:
            now_ns = self._now_ns()
            more = (now_ns - self._mark_ns) / 1e9 * steady_bytes_per_s(self._bytes_per_day)
            self._left_bytes = min(self._left_bytes + more, self._bytes_per_day / AT_ONCE)
            self._mark_ns = now_ns
