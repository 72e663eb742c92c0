"""Free byte ranges of one file, coalesced."""

import bisect


class FreeList:
    """Sorted, disjoint, never adjacent ranges `[start, stop)`. Not thread-safe. O(ranges) a call."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    @property
    def free_bytes(self) -> int:
        """Return the bytes in all ranges."""
        return sum(stop - start for start, stop in self._ranges)

    def take(self, nbytes: int) -> tuple[tuple[int, int], ...]:
        """Remove `nbytes` and return them as `(start, nbytes)`: the first range that fits, else several.

        When fewer are free, all of them.

        >>> free = FreeList()
        >>> free.put(0, 10); free.put(20, 5)
        >>> free.take(4), free.take(8)
        (((0, 4),), ((4, 6), (20, 2)))
        """
        if nbytes <= 0:
            return ()
        for i, (start, stop) in enumerate(self._ranges):
            if stop - start >= nbytes:
                self._ranges[i : i + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return ((start, nbytes),)
        taken: list[tuple[int, int]] = []
        while nbytes and self._ranges:
            start, stop = self._ranges.pop(0)
            size = min(nbytes, stop - start)
            taken.append((start, size))
            nbytes -= size
            if start + size < stop:
                self._ranges.insert(0, (start + size, stop))
        return tuple(taken)

    def put(self, start: int, nbytes: int) -> None:
        """Add `[start, start + nbytes)`, which must not be free already."""
        stop = start + nbytes
        i = bisect.bisect_left(self._ranges, (start, stop))
        assert i == len(self._ranges) or stop <= self._ranges[i][0], "freed twice"
        assert i == 0 or self._ranges[i - 1][1] <= start, "freed twice"
        first, last = i, i
        if i > 0 and self._ranges[i - 1][1] == start:
            first, start = i - 1, self._ranges[i - 1][0]
        if i < len(self._ranges) and self._ranges[i][0] == stop:
            last, stop = i + 1, self._ranges[i][1]
        self._ranges[first:last] = [(start, stop)]
