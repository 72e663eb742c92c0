"""How many buffers of each class of a pool are reserved, and were acquired at once."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from tencache_fx.planning.plan import PoolClass
from tencache_fx.runtime.buffers import Use
from tencache_fx.units import PAGE_BYTES, round_up

Classes = Counter[tuple[Use, int]]
"""Numbers of buffers, by use and size."""


class ReservedBuffers:
    """`planned` are those that plans count on, `most` those acquired at once so far. The pool's lock guards it."""

    def __init__(self) -> None:
        self.planned: Classes = Counter()
        self.most: Classes = Counter()

    def owed_bytes(self, counts: Classes, opened: Mapping[tuple[Use, int], int]) -> int:
        """Return the bytes it takes to map all that is promised, made way, or is `opened`; `counts` are mapped.

        Where more buffers of a class than reserved were acquired at once, that number counts.
        """
        owed_bytes, planned, most = 0, self.planned, self.most
        for key in planned.keys() | opened.keys():  # in any order: it is a sum
            due, open_now, mapped = planned.get(key, 0), opened.get(key, 0), counts.get(key, 0)
            if due or open_now:
                owed_bytes += key[1] * max(0, max(due, min(most.get(key, 0), mapped)) + open_now - mapped)
        return owed_bytes

    def first_of(self, use: Use, sizes: Iterable[int]) -> int | None:
        """Return the first of these sizes of which plans count on buffers."""
        for size in sizes:
            if self.planned.get((use, size)):
                return size
        return None

    def forget(self, uses: Collection[Use]) -> None:
        """Reserve nothing for these uses any more."""
        for counts in (self.planned, self.most):
            for key in [key for key in counts if key[0] in uses]:
                del counts[key]


def counted(classes: Iterable[PoolClass], use: Use) -> Classes:
    """Return the numbers of these buffers by their class."""
    wanted: Classes = Counter()
    for each in classes:
        wanted[use, round_up(max(1, each.nbytes), PAGE_BYTES)] += each.count
    return wanted
