"""The free buffers of a pool, by use and size class."""

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator

from tencache_fx.runtime.buffers import Buffer, Use


class FreeBuffers:
    """Knows the size classes of each use, and which buffers of each are free. Not thread-safe: the pool's lock guards
    it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Use, int], list[Buffer]] = {}
        self._sizes: dict[Use, list[int]] = {use: [] for use in Use}

    @property
    def all_idle(self) -> bool:
        """Return whether no copy touches any of them."""
        return all(buffer.idle for free in self._free.values() for buffer in free)

    @property
    def idle_bytes(self) -> int:
        """Return the bytes of those that no copy touches."""
        return sum(buffer.nbytes for free in self._free.values() for buffer in free if buffer.idle)

    def idle_beside(self, classes: Container[tuple[Use, int]]) -> int:
        """Return the bytes of those that no copy touches, and that are of none of these classes."""
        idle = (b for key, free in self._free.items() if key not in classes for b in free if b.idle)
        return sum(buffer.nbytes for buffer in idle)

    def know(self, use: Use, size: int) -> None:
        """Add a class for buffers of `size`."""
        if (use, size) not in self._free:
            self._free[use, size] = []
            bisect.insort(self._sizes[use], size)

    def sizes(self, use: Use, least: int, most: int | None = None) -> list[int]:
        """Return the classes of at least `least` bytes and at most `most`, the smallest first."""
        sizes = self._sizes[use]
        stop = len(sizes) if most is None else bisect.bisect_right(sizes, most)
        return sizes[bisect.bisect_left(sizes, least) : stop]

    def of(self, use: Use, size: int) -> list[Buffer]:
        """Return the free buffers of a class."""
        return self._free[use, size]

    def put(self, buffer: Buffer) -> None:
        """Add a buffer, whose class is known."""
        self._free[buffer.use, buffer.nbytes].append(buffer)

    def remove(self, buffer: Buffer) -> None:
        """Take a buffer off."""
        self._free[buffer.use, buffer.nbytes].remove(buffer)

    def take(self, nbytes: int, use: Use, most_bytes: int) -> Buffer | None:
        """Take off and return a buffer of `nbytes` to `most_bytes`: of the smallest class that has one, an idle one
        first.
        """
        sizes = self._sizes[use]
        for at in range(bisect.bisect_left(sizes, nbytes), len(sizes)):
            if (size := sizes[at]) > most_bytes:
                return None
            free = self._free[use, size]
            for i, buffer in enumerate(free):
                if buffer.idle:
                    buffer.after = ()
                    return free.pop(i)
            if free:  # an idle one of the next class may be wanted for what that was reserved for
                return free.pop(0)
        return None

    def find_largest(self, use: Use, least: int, may_take: Callable[[int], bool]) -> Buffer | None:
        """Return a buffer of the largest class whose size `may_take` allows; of a smaller one if that is idle."""
        found = None
        for size in reversed(self.sizes(use, least)):
            free = self._free[use, size]
            if free and may_take(size):
                idle = next((buffer for buffer in free if buffer.idle), None)
                if idle is not None:
                    return idle
                found = found or free[0]
        return found

    def take_all(self, uses: Collection[Use]) -> list[Buffer]:
        """Take off and return all buffers for these uses."""
        lists = [free for (use, _), free in self._free.items() if use in uses]
        return [free.pop() for free in lists for _ in range(len(free))]

    def find_idle(
        self, nbytes: int, counts: "Counter[tuple[Use, int]]", keeps: "Iterable[Counter[tuple[Use, int]]]"
    ) -> list[Buffer]:
        """Return idle buffers of at least `nbytes` together, and none if there are not so many.

        There are `counts` buffers of each class, acquired ones included. First come those beyond the counts in the
        first of `keeps`, then those beyond the second.
        """
        if nbytes <= 0:
            return []
        idle = list(dict.fromkeys(buffer for keep in keeps for buffer in self._idle_beyond(counts, keep)))
        ends = itertools.accumulate((buffer.nbytes for buffer in idle), initial=0)
        enough = next((number for number, end in enumerate(ends) if end >= nbytes), 0)
        return idle[:enough]

    def _idle_beyond(self, counts: "Counter[tuple[Use, int]]", keep: "Counter[tuple[Use, int]]") -> Iterator[Buffer]:
        for key, free in self._free.items():
            spare = max(0, counts[key] - keep[key])
            yield from itertools.islice((buffer for buffer in free if buffer.idle), spare)

    def clear(self) -> None:
        """Forget all buffers."""
        self._free.clear()
        self._sizes = {use: [] for use in Use}
