"""Pinned buffers that Python objects own: a gradient's, an optimizer state's, an offloaded parameter's.

Such a buffer is released when its object dies. A finalizer may run in any thread, at any time, even while a lock is
held: it only appends to a deque, which the next runtime call drains.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from tencache_fx.errors import BudgetError
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import Event, Streams


class ObjectBuffers:
    """Acquires buffers of one pool for objects; their finalizers release them. Thread-safe."""

    def __init__(self, pool: Pool, streams: Streams) -> None:
        self._pool = pool
        self._streams = streams
        self._returned: deque[Buffer] = deque()
        self._discarded: deque[tuple[Buffer, Collection[Event]]] = deque()
        self._frees: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()
        self._expected: deque[Future[Any]] = deque()
        self._expecting = threading.Lock()
        self._draining = threading.Lock()  # threads take turns; finalizers only append

    def expect(self, work: "Future[Any]") -> None:
        """Note work under way that releases buffers once it is done, well or not: `acquire` waits for it."""
        with self._expecting:
            while self._expected and self._expected[0].done():
                self._expected.popleft()
            self._expected.append(work)

    def wait(self) -> None:
        """Block until all work that was expected is done; what it released can be acquired again."""
        while self._wait_for_one():
            pass

    def acquire(self, nbytes: int, use: Use) -> Buffer:
        """Acquire a buffer. Waits for expected work before it takes unreserved memory; raises `BudgetError`."""
        self.drain()
        while (buffer := self._pool.acquire_reserved(nbytes, use)) is None and self._wait_for_one():
            self.drain()
        if buffer is not None:
            return buffer
        try:
            return self._pool.acquire(nbytes, use)
        except BudgetError:
            if not self._wait_for_copies():
                raise
        return self._pool.acquire(nbytes, use)

    def acquire_or_wait(self, nbytes: int, use: Use) -> Buffer:
        """Acquire a buffer as `Pool.acquire` does; where there is none, wait for expected work that releases some."""
        while True:
            try:
                return self._pool.acquire(nbytes, use)
            except BudgetError:
                if not self._wait_for_one():
                    raise
                self.drain()

    def acquire_settled(self, nbytes: int, use: Use) -> Buffer:
        """Acquire a buffer, as `acquire`, that no copy touches any more. Blocks the host; raises `BudgetError`."""
        buffer = self.acquire(nbytes, use)
        self._streams.wait_host(buffer.after)
        buffer.after = ()
        return buffer

    def release_later(self, buffer: Buffer) -> None:
        """Let the next runtime call release a buffer: safe to call from a finalizer."""
        self._returned.append(buffer)

    def discard_later(self, buffer: Buffer, copies: Collection[Event] = ()) -> None:
        """Let the next runtime call that finds no `copies` under way unmap a buffer: safe to call from a finalizer.

        The memory goes with the last tensor that shares it, such as one of a `state_dict`.
        """
        self._discarded.append((buffer, copies))

    def free_later(self, free: Callable[[], object], is_unused: Callable[[], bool]) -> None:
        """Let a runtime call `free()` something, once `is_unused()`: safe to call from a finalizer."""
        self._frees.append((free, is_unused))

    def drain(self) -> None:
        """Release the buffers of dead objects; free what is to be freed and no longer used."""
        if not (self._returned or self._discarded or self._frees or self._draining.locked()):
            return  # else who drains may have yet to release
        with self._draining:
            while self._returned:
                self._pool.release(self._returned.popleft())
            for _ in range(len(self._discarded)):
                buffer, copies = self._discarded.popleft()
                if all(copy.query() for copy in copies):
                    self._pool.discard(buffer)
                else:
                    self._discarded.append((buffer, copies))
            for _ in range(len(self._frees)):
                free, is_unused = self._frees.popleft()
                if is_unused():
                    free()
                else:
                    self._frees.append((free, is_unused))

    def forget(self) -> None:
        """Forget all buffers: the pool is about to be closed."""
        self._returned.clear()
        self._discarded.clear()
        self._frees.clear()

    def _wait_for_one(self) -> bool:
        """Block until the oldest expected work is done; return False if none was expected."""
        with self._expecting:
            first = self._expected[0] if self._expected else None
        if first is None:
            return False
        first.exception()
        with self._expecting:  # not before: other threads wait for it, too
            if self._expected and self._expected[0] is first:
                self._expected.popleft()
        return True

    def _wait_for_copies(self) -> bool:
        """Block until copies no longer touch the buffers to be unmapped, and do so; return False if there were none."""
        found = tuple(self._discarded)
        for _, copies in found:
            self._streams.wait_host(copies)
        self.drain()
        return bool(found)
