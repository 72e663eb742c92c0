"""Deals bytes to the spill directories in proportion to their rates."""

from collections.abc import Mapping

from tencache_fx.units import PAGE_BYTES


def split(nbytes: int, rates: Mapping[int, float]) -> dict[int, int]:
    """Return `nbytes`, whole pages, in shares that are whole pages and in proportion to the positive `rates`.

    >>> split(15 * PAGE_BYTES, {0: 1, 1: 2, 2: 12}) == {0: PAGE_BYTES, 1: 2 * PAGE_BYTES, 2: 12 * PAGE_BYTES}
    True
    """
    total, pages = sum(rates.values()), nbytes // PAGE_BYTES
    shares: dict[int, int] = {}
    passed, before = 0.0, 0
    for i, rate in rates.items():
        passed += rate
        until = min(pages, round(pages * passed / total))
        shares[i], before = (until - before) * PAGE_BYTES, until
    shares[i] += (pages - before) * PAGE_BYTES  # none, but for what rounding of the sums has left
    return shares


class Dealer:
    """Remembers how many bytes each directory is behind its share. Not thread-safe.

    A value is cut in pieces in proportion to what the directories are owed, the value included. Who is owed less than a
    piece that is worth a request gets nothing yet and is owed more next time: so small values go whole to the directory
    that is furthest behind, and however slow a directory is said to be, its turn comes. The sum of what is owed is
    always 0. The same values at the same rates are always dealt alike.
    """

    def __init__(self, least_bytes: int) -> None:
        """Deal pieces of at least `least_bytes`, but for values that are smaller."""
        self._least_bytes = least_bytes
        self._owed_bytes: dict[int, float] = {}

    def reset(self) -> None:
        """Forget who is behind: the directories are others now."""
        self._owed_bytes.clear()

    def deal(self, nbytes: int, rates: Mapping[int, int]) -> dict[int, int]:
        """Return the bytes for each directory that gets some: whole pages, `nbytes` (whole pages) together."""
        total = sum(rates.values())
        owed = {i: self._owed_bytes.get(i, 0.0) + nbytes * rate / total for i, rate in rates.items()}
        ranked = sorted(owed, key=lambda i: -owed[i])
        chosen = [i for i in ranked if owed[i] > 0] or ranked[:1]
        while len(chosen) > 1 and nbytes * owed[chosen[-1]] < self._least_bytes * sum(owed[i] for i in chosen):
            chosen.pop()
        weights = {i: owed[i] for i in rates if i in chosen} if len(chosen) > 1 else {chosen[0]: 1.0}
        shares = {i: share for i, share in split(nbytes, weights).items() if share}
        self._owed_bytes |= {i: owed[i] - shares.get(i, 0) for i in rates}
        return shares
