"""Buffers that are mapped and pinned before anybody wants them, while the caller has other work, such as compiling."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from tencache_fx.runtime.buffers import Buffer, Use, map_buffer
from tencache_fx.runtime.streams import Streams
from tencache_fx.runtime.worker import Worker
from tencache_fx.units import PAGE_BYTES, round_up

# Each maps buffers by itself: threads that share one wait for Python's lock, all of them, at each buffer.
_THREADS = 2  # compilers want the others
_MORE_THREADS = 4  # where none are expected


class _Class(NamedTuple):
    """Buffers of one size for one use: those of `begin_more`, or those of `begin`."""

    use: Use
    size: int
    more: bool


class MappedAhead:
    """Such buffers of a pool, by use and size class; they count as none of its own until it takes them. Thread-safe.

    `lock` is the pool's, so that `room` stays as it is while buffers are begun. It is one that its thread may take
    again: a signal's handler may use the pool while its thread waits here.
    """

    def __init__(self, streams: Streams, lock: AbstractContextManager[Any], room: Callable[[], int]) -> None:
        self._streams, self._lock, self._room = streams, lock, room
        self._closed = False
        self._coming: dict[_Class, deque[Future[Buffer]]] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of all that are mapped or being mapped."""
        return sum(key.size * len(coming) for key, coming in self._coming.copy().items())

    @property
    def mapped_bytes(self) -> int:
        """Return about how many bytes are in memory by now: half of those that are being mapped."""
        with self._lock:
            futures = [(key.size, each) for key, coming in self._coming.items() for each in coming]
            return sum(size if each.done() else size // 2 for size, each in futures if each.done() or each.running())

    def begin(self, sizes: Iterable[int], use: Use, *, compiles: bool = True) -> None:
        """Begin to map a buffer of each size that has none yet, as far as the pool has room for all.

        Those of earlier calls that nobody wants any more are unmapped. If nothing `compiles` meanwhile, more threads
        do it.
        """
        wanted = _counted(sizes)
        with self._lock:
            for key, coming in self._coming.copy().items():
                while key.use is use and not key.more and len(coming) > wanted[key.size]:
                    self._unmap(coming)
            mine = {key.size: len(each) for key, each in self._coming.items() if key.use is use and not key.more}
            self._begin(wanted - Counter(mine), use, more=False, most_threads=_THREADS if compiles else _MORE_THREADS)

    def begin_more(self, sizes: Iterable[int], use: Use) -> None:
        """Begin to map a buffer of each size beside all others, as far as the pool has room, up to `end_more`."""
        with self._lock:
            self._begin(_counted(sizes), use, more=True, most_threads=_THREADS)

    def end_more(self, use: Use) -> None:
        """Unmap what `begin_more` has mapped and nobody has taken."""
        with self._lock:
            for key, coming in self._coming.copy().items():
                while key.use is use and key.more and coming:
                    self._unmap(coming)

    def take(self, size: int, use: Use) -> Buffer | None:
        """Return a buffer of a size class, once it is mapped; None if none of that size has been begun.

        The driver may have refused to pin it, as it would again.
        """
        with self._lock:
            for more in (False, True):
                if coming := self._coming.get(_Class(use, size, more)):
                    return _remove(coming, coming[0])  # one that is not begun the caller maps as fast
            return None

    def trim(self, most_bytes: int) -> None:
        """Unmap what exceeds `most_bytes`, those begun last first; waits for one that is being mapped."""
        with self._lock:
            for coming in reversed(self._coming.copy().values()):
                while coming and self.nbytes > most_bytes:
                    self._unmap(coming)

    def close(self) -> None:
        """Unmap all; waits for what is being mapped."""
        with self._lock:
            self._closed = True
            self.trim(0)

    def _begin(self, missing: Mapping[int, int], use: Use, *, more: bool, most_threads: int) -> None:
        count = sum(missing.values())
        if not count or self._closed:
            return
        threads = min(most_threads, count)
        worker = Worker("tencache-map", threads)  # its threads end with it, once all are mapped
        left_bytes = self._room() - self.nbytes
        for size in Counter(missing).elements():
            if size <= left_bytes:
                left_bytes -= size
                self._coming.setdefault(_Class(use, size, more), deque()).append(
                    worker.begin(partial(map_buffer, size, use, self._streams, threads=most_threads))
                )

    def _unmap(self, coming: "deque[Future[Buffer]]") -> None:
        buffer = _remove(coming, coming[-1])
        if buffer is not None and buffer.pinned:
            self._streams.unpin(buffer.raw)


def _counted(sizes: Iterable[int]) -> Counter[int]:
    return Counter(round_up(max(1, size), PAGE_BYTES) for size in sizes)


def _remove(coming: "deque[Future[Buffer]]", future: "Future[Buffer]") -> Buffer | None:
    """Remove a buffer, once it is mapped, and return it; None if it has not been begun, or could not be mapped.

    An interrupt of the wait leaves it there. A signal's handler may have removed it meanwhile: None then, too.
    """
    is_begun = not future.cancel()
    failed = is_begun and future.exception() is not None
    if future not in coming:
        return None
    coming.remove(future)
    return future.result() if is_begun and not failed else None
