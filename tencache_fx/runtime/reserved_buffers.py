"""How many buffers of each class of a pool are reserved, and were acquired at once."""

from collections import Counter
from collections.abc import Collection

from tencache_fx.runtime.buffers import Use

Classes = Counter[tuple[Use, int]]
"""Numbers of buffers, by use and size."""


class ReservedBuffers:
    """`planned` are those that plans count on, `most` those acquired at once so far. The pool's lock guards it."""

    def __init__(self) -> None:
        self.planned: Classes = Counter()
        self.most: Classes = Counter()

    def owed_bytes(self, counts: Classes, opened: Classes) -> int:
        """Return the bytes it takes to map all that is promised, made way, or is `opened`; `counts` are mapped.

        Where more buffers of a class than reserved were acquired at once, that number counts.
        """
        owed_bytes = 0
        for key in self.planned.keys() | opened.keys():  # in any order: it is a sum
            if not self.planned[key] and not opened[key]:
                continue
            due = max(self.planned[key], min(self.most[key], counts[key]))
            owed_bytes += key[1] * max(0, due + opened[key] - counts[key])
        return owed_bytes

    def forget(self, uses: Collection[Use]) -> None:
        """Reserve nothing for these uses any more."""
        for counts in (self.planned, self.most):
            for key in [key for key in counts if key[0] in uses]:
                del counts[key]
