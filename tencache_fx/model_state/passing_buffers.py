"""Pinned buffers that parameters on disk pass through: a few, each as large as the largest of these parameters.

A buffer is taken to read a value, or to write the next one. Who gives it back leaves the events of the copies that
touch it in `after`; the next one to take it waits for them on the host, for a disk writes to memory at once.

Whoever has one waits for no other, but for the two threads that issue an update while the one before is under way:
these may have one each and want another. So with three buffers, one always comes back.
"""

import threading
from collections import deque

from tencache_fx.errors import BudgetError
from tencache_fx.planning.problem import PASSING_BUFFERS
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import Streams
from tencache_fx.units import PAGE_BYTES, round_up

_LEAST = 3


def passing_bytes(largest_bytes: int) -> int:
    """Return the host memory that the buffers take for values of at most so many bytes."""
    return PASSING_BUFFERS * round_up(largest_bytes, PAGE_BYTES)


class PassingBuffers:
    """The buffers of one engine, acquired from its pool while any parameter is on disk. Thread-safe."""

    def __init__(self, pool: Pool, streams: Streams) -> None:
        self._pool, self._streams = pool, streams
        self._buffers: deque[Buffer] = deque()  # those that nobody has
        self._nbytes = 0  # of each
        self._count = 0  # of this size, had by somebody or not
        self._users = 0
        self._cond = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Return the size of the largest value that fits a buffer, 0 without any."""
        return self._nbytes

    def missing_sizes(self, nbytes: int) -> list[int]:
        """Return the sizes of the buffers that `join` will acquire for values of `nbytes`."""
        return [nbytes] * (PASSING_BUFFERS if nbytes > self._nbytes else PASSING_BUFFERS - self._count)

    def join(self, nbytes: int) -> None:
        """Have buffers of at least `nbytes` as long as `leave` is not called; raises `BudgetError` without room."""
        with self._cond:
            self._users += 1
            try:
                self._acquire_all(nbytes)
            except BudgetError:
                self._leave()
                raise

    def leave(self) -> None:
        """End what `join` began; the last one gives all buffers back."""
        with self._cond:
            self._leave()

    def take(self) -> Buffer:
        """Return a buffer that nothing touches; blocks the host until there is one.

        Raises `BudgetError` where failed writes keep so many that those left could wait for one another, and host
        memory has no room for others.
        """
        with self._cond:
            while not self._buffers:
                if self._count < PASSING_BUFFERS and self._acquire_one(raises=self._count < _LEAST):
                    break
                self._cond.wait()
            buffer = self._buffers.popleft()
        self._streams.wait_host(buffer.after)
        buffer.after = ()
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back, behind its `after`."""
        with self._cond:
            if buffer.requested_bytes < self._nbytes or not self._users:  # larger ones have taken its place
                self._pool.release(buffer)
                return
            buffer.after = self._streams.after_return(buffer.memory, buffer.after)
            self._buffers.append(buffer)
            self._cond.notify()

    def keep(self, buffer: Buffer) -> None:
        """Note that a buffer is no longer one of these: who has it releases it to the pool some day."""
        with self._cond:
            if buffer.requested_bytes >= self._nbytes:
                self._count -= 1
            self._cond.notify()

    def _acquire_all(self, nbytes: int) -> None:
        if nbytes > self._nbytes:
            self._release_all()
            self._nbytes = nbytes
        while self._count < PASSING_BUFFERS:
            self._acquire_one(raises=True)

    def _acquire_one(self, *, raises: bool) -> bool:
        try:
            self._buffers.append(self._pool.acquire(self._nbytes, Use.PARAMETER))
        except BudgetError:
            if raises:
                raise
            return False
        self._count += 1
        self._cond.notify()
        return True

    def _leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._release_all()
            self._nbytes = 0

    def _release_all(self) -> None:
        while self._buffers:
            self._pool.release(self._buffers.popleft())
        self._count = 0
