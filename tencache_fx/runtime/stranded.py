"""Storages that stay on the device because host memory has no room for them."""

import logging
import weakref
from contextlib import AbstractContextManager

from tencache_fx.errors import BudgetError
from tencache_fx.runtime.swap import State, Swap
from tencache_fx.units import PAGE_BYTES, round_up

log = logging.getLogger("tencache_fx")


class Stranded:
    """The storages of one device that were to leave, and found no room.

    Guarded by the `lock` of its `SwapPoints`, which those who ask need not hold: other threads offload meanwhile.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._swaps: weakref.WeakSet[Swap] = weakref.WeakSet()
        self._told = False

    def add(self, swap: Swap, error: BudgetError, *, counts: bool) -> None:
        """Note a storage that stays.

        It does not count where there is a disk: buffers on their way there may be free in a moment. Then the device may
        go over its budget, which is worth a warning.
        """
        if counts:
            self._swaps.add(swap)
        if not self._told:
            self._told = True
            level = logging.INFO if counts else logging.WARNING
            log.log(level, "%s stays on the device, as others may: %s", swap.name.label, str(error))

    def discard(self, swap: Swap) -> None:
        """Note that a storage leaves after all."""
        self._swaps.discard(swap)

    def of(self, call: tuple[int, int]) -> frozenset[str]:
        """Return the labels of those of one call, up to where its backward reads them."""
        return frozenset(swap.name.label for swap in self._here() if swap.name[:2] == call)

    def bytes_beside(self, call: tuple[int, int]) -> int:
        """Return the bytes of those of all other calls."""
        return sum(swap.counted_bytes for swap in self._here() if swap.name[:2] != call)

    def host_bytes(self) -> int:
        """Return the host memory that they would take, all of them."""
        return sum(round_up(swap.nbytes, PAGE_BYTES) for swap in self._here())

    def _here(self) -> list[Swap]:
        with self._lock:
            here = (swap for swap in self._swaps if swap.state is State.HERE and not swap.shared)
            return [swap for swap in here if swap.handle is None]
