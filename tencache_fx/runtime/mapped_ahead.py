"""Buffers that are mapped and pinned before anybody wants them, while the caller has other work, such as compiling."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from tencache_fx.runtime.buffers import Buffer, Use, map_buffer
from tencache_fx.runtime.streams import Streams
from tencache_fx.units import PAGE_BYTES, round_up

_THREADS = 2  # that touch pages: compilers want the others


class MappedAhead:
    """Such buffers of a pool, by use and size class; they count as none of its own until it takes them. Thread-safe."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._lock = threading.Lock()
        self._coming: defaultdict[tuple[Use, int], deque[Future[Buffer]]] = defaultdict(deque)
        self._closed = False
        self.nbytes = 0

    def begin(self, sizes: Iterable[int], use: Use, most_bytes: int) -> None:
        """Begin to map a buffer of each size that has none yet, as far as all take `most_bytes` at most.

        Those that nobody wants any more are given up.
        """
        wanted = Counter(round_up(max(1, size), PAGE_BYTES) for size in sizes)
        with self._lock:
            for (each, size), coming in self._coming.items():
                while each is use and len(coming) > wanted[size]:
                    self._drop(size, coming.pop())
            missing = wanted - Counter(
                {size: len(coming) for (each, size), coming in self._coming.items() if each is use}
            )
            if not missing or self._closed:
                return
            worker = ThreadPoolExecutor(1, thread_name_prefix="tencache-map")
            for size in missing.elements():
                if self.nbytes + size <= most_bytes:
                    self.nbytes += size
                    self._coming[use, size].append(
                        worker.submit(map_buffer, size, use, self._streams, warn=False, threads=_THREADS)
                    )
            worker.shutdown(wait=False)

    def take(self, size: int, use: Use) -> Buffer | None:
        """Return a pinned buffer of a size class, once it is mapped; None if none of that size has been begun."""
        with self._lock:
            if not (coming := self._coming[use, size]):
                return None
            failed = coming[0].cancel() or coming[0].exception() is not None  # not begun: the caller is as fast
            self.nbytes -= size
            future = coming.popleft()
            return None if failed or not future.result().pinned else future.result()

    def trim(self, most_bytes: int) -> None:
        """Give up what exceeds `most_bytes`, those begun last first."""
        with self._lock:
            for (_, size), coming in reversed(self._coming.items()):
                while coming and self.nbytes > most_bytes:
                    self._drop(size, coming.pop())

    def close(self) -> None:
        """Give up all; waits for what is being mapped."""
        with self._lock:
            self._closed = True
        self.trim(0)

    def _drop(self, size: int, future: "Future[Buffer]") -> None:
        self.nbytes -= size
        if not future.cancel() and future.exception() is None and (buffer := future.result()).pinned:
            self._streams.unpin(buffer.raw)
