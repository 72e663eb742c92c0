"""Pinned buffers that Python objects own: a gradient's, an optimizer state's, an offloaded parameter's.

Such a buffer is given back when its object dies. A finalizer may run in any thread, at any time, even while a lock is
held: it only appends to a deque, which the next runtime call drains.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import Streams


def _at_once() -> bool:
    return True


class ObjectBuffers:
    """Lends buffers of one pool to objects, and takes them back from finalizers. Thread-safe."""

    def __init__(self, pool: Pool, streams: Streams) -> None:
        self._pool = pool
        self._streams = streams
        self._returned: deque[Buffer] = deque()
        self._discarded: deque[tuple[Buffer, Callable[[], bool]]] = deque()
        self._expected: deque[Future[Any]] = deque()
        self._expecting = threading.Lock()
        self._draining = threading.Lock()  # threads take turns; finalizers only append

    def expect(self, work: "Future[Any]") -> None:
        """Note work under way that gives buffers back once it is done, well or not: `lend` waits for it."""
        with self._expecting:
            while self._expected and self._expected[0].done():
                self._expected.popleft()
            self._expected.append(work)

    def wait(self) -> None:
        """Block until all work that was expected is done; what it gave back can be lent again."""
        while self._wait_for_one():
            pass

    def lend(self, nbytes: int, use: Use) -> Buffer:
        """Lend a buffer. Waits for expected work rather than take memory that is not reserved; raises `BudgetError`."""
        self.drain()
        while (buffer := self._pool.lend_at_hand(nbytes, use)) is None and self._wait_for_one():
            self.drain()
        return self._pool.lend(nbytes, use) if buffer is None else buffer

    def lend_settled(self, nbytes: int, use: Use) -> Buffer:
        """Lend a buffer, as `lend`, that no copy touches any more. Blocks the host; raises `BudgetError`."""
        buffer = self.lend(nbytes, use)
        self._streams.settle(buffer.after)
        buffer.after = ()
        return buffer

    def give_back_later(self, buffer: Buffer) -> None:
        """Have the next runtime call give a buffer back to the pool: safe to call from a finalizer."""
        self._returned.append(buffer)

    def discard_later(self, buffer: Buffer, copies_are_over: Callable[[], bool] = _at_once) -> None:
        """Have a runtime call give a buffer's memory back to the system, once `copies_are_over()`.

        Safe to call from a finalizer. The memory goes with the last tensor that shares it, such as one of a
        `state_dict`.
        """
        self._discarded.append((buffer, copies_are_over))

    def drain(self) -> None:
        """Give back the buffers of dead objects; those to discard once no copy touches them."""
        with self._draining:
            while self._returned:
                self._pool.give_back(self._returned.popleft())
            for _ in range(len(self._discarded)):
                buffer, copies_are_over = self._discarded.popleft()
                if copies_are_over():
                    self._pool.discard(buffer)
                else:
                    self._discarded.append((buffer, copies_are_over))

    def forget(self) -> None:
        """Forget all buffers: the pool is about to be closed."""
        self._returned.clear()
        self._discarded.clear()

    def _wait_for_one(self) -> bool:
        """Block until the oldest expected work is done; return False if none was expected."""
        with self._expecting:
            first = self._expected.popleft() if self._expected else None
        if first is not None:
            first.exception()
        return first is not None
