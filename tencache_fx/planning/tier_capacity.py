"""What a policy has promised of host memory and disk so far, so that a plan's buffers and extents fit their budgets."""

from bisect import bisect_left
from dataclasses import replace
from typing import Any

import numpy as np

from tencache_fx.planning.liveness import by_windows, is_candidate
from tencache_fx.planning.plan import PoolClass, Transfer
from tencache_fx.planning.pool_sizing import size_classes
from tencache_fx.planning.problem import Problem, Step, Tier
from tencache_fx.units import PAGE_BYTES, round_up

_MOST_STAGING = 4


class TierCapacity:
    """Places transfers, host first, then NVMe; NVMe never costs a link less than host memory does.

    Buffers and extents are counted by class and gap like `size_classes` will, with classes fixed beforehand from all
    candidates. Where they may not all fit in host memory and there is a disk, up to an eighth of host memory is set
    aside as staging buffers before anything else takes it, and a transfer too large for them can still make them
    larger: what stages lets more transfers go to the disk. One `place` costs O(gaps of the transfer).
    """

    def __init__(self, problem: Problem) -> None:
        sizes = _sizes(problem)
        classes = _classes(problem)
        self._tops = sorted(pool.nbytes for pool in classes)
        self._gaps = len(problem.ops)
        self._in_use: dict[tuple[Tier, int], np.ndarray[Any, np.dtype[np.int32]]] = {}
        self._most: dict[tuple[Tier, int], int] = {}
        host_bytes = problem.budgets.host_bytes
        self._room = {Tier.HOST: host_bytes, Tier.NVME: problem.budgets.disk_bytes if problem.links.has_disk else 0}
        everything = sum(pool.nbytes * pool.count for pool in classes)  # all in use at once
        self._roomy = everything <= host_bytes  # and nothing needs to be counted
        self.staging_bytes = 0  # of one buffer
        self.staging_count = 0
        if self._room[Tier.NVME] and everything > host_bytes:
            pages = sorted(round_up(nbytes, PAGE_BYTES) for nbytes in sizes)
            share = max(pages[0], host_bytes // 8)
            largest = max(nbytes for nbytes in pages if nbytes <= share)
            if largest <= host_bytes:
                self.staging_bytes = largest
                self.staging_count = max(1, min(_MOST_STAGING, share // largest))
                self._room[Tier.HOST] -= self.staging_bytes * self.staging_count

    def place(self, transfer: Transfer) -> Transfer | None:
        """Return `transfer` with the tier it goes to, which is now charged; None if neither has room."""
        for tier in (Tier.HOST, Tier.NVME):
            placed = transfer if transfer.tier is tier else replace(transfer, tier=tier)
            if self.fits(placed):
                self.charge(placed)
                return placed
        return None

    def fits(self, transfer: Transfer) -> bool:
        """Whether `transfer`'s own tier has room for it."""
        if self._roomy and transfer.tier is Tier.HOST:
            return True
        staged = self.staging_count > 0 and self._more_staging_bytes(transfer) <= self._room[Tier.HOST]
        return (staged or transfer.tier is Tier.HOST) and self._growth_bytes(transfer) <= self._room[transfer.tier]

    def charge(self, transfer: Transfer) -> None:
        """Take the room that `transfer` needs in its tier."""
        if self._roomy:
            return
        key = self._key(transfer)
        self._room[transfer.tier] -= self._growth_bytes(transfer)
        in_use = self._in_use.setdefault(key, np.zeros(self._gaps, dtype=np.int32))
        in_use[transfer.copy_out_after : transfer.needed_at] += 1
        self._most[key] = max(self._most.get(key, 0), int(in_use[transfer.copy_out_after : transfer.needed_at].max()))
        if transfer.tier is Tier.NVME:
            self._room[Tier.HOST] -= self._more_staging_bytes(transfer)
            self.staging_bytes = max(self.staging_bytes, round_up(transfer.nbytes, PAGE_BYTES))

    def _more_staging_bytes(self, transfer: Transfer) -> int:
        return self.staging_count * max(0, round_up(transfer.nbytes, PAGE_BYTES) - self.staging_bytes)

    def _growth_bytes(self, transfer: Transfer) -> int:
        key = self._key(transfer)
        if key not in self._in_use:
            return self._tops[key[1]]
        wanted = int(self._in_use[key][transfer.copy_out_after : transfer.needed_at].max()) + 1
        return self._tops[key[1]] * max(0, wanted - self._most[key])

    def _key(self, transfer: Transfer) -> tuple[Tier, int]:
        return transfer.tier, bisect_left(self._tops, round_up(transfer.nbytes, PAGE_BYTES))


def _sizes(problem: Problem) -> list[int]:
    """Return the bytes of all candidates."""
    kept = by_windows(problem)
    known: list[int] | None = kept.get("sizes")
    if known is None:  # every variant of a policy counts anew
        known = kept["sizes"] = [storage.nbytes for storage in problem.storages if is_candidate(problem, storage)]
    return known


def _classes(problem: Problem) -> tuple[PoolClass, ...]:
    """Return the buffers for all candidates at once."""
    kept = by_windows(problem)
    known: tuple[PoolClass, ...] | None = kept.get("classes")
    if known is None:
        spans = [(Step(0), Step(1), nbytes) for nbytes in _sizes(problem)]
        known = kept["classes"] = size_classes(spans)
    return known
