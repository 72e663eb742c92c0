"""Acquires the buffers of offloaded tensors: host memory, or a staging buffer and room on disk.

Gradients, and state that is made during backward, take host memory that no plan of a step reserves. A tensor without a
plan leaves room for them, and for a staging buffer, without which a tensor on disk cannot come back.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tencache_fx.errors import BudgetError, StoreError
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.stats import Stats
from tencache_fx.runtime.store import Extent
from tencache_fx.runtime.streams import Streams
from tencache_fx.runtime.transfer_lifecycle import TransferLifecycle
from tencache_fx.units import PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesToCome:
    """What a backward will acquire of host memory: for gradients, and for state that may go to disk instead."""

    gradient_bytes: int = 0
    state_bytes: int = 0


class ToCome(Protocol):
    """Knows what a backward will acquire of host memory."""

    def bytes_to_come(self) -> BytesToCome:
        """Return that; it takes some microseconds for each parameter."""


class SwapBuffers:
    """Acquires buffers for one engine; `to_come` returns who knows what a backward will acquire, if there is anyone."""

    def __init__(
        self,
        pool: Pool,
        transfers: TransferLifecycle,
        streams: Streams,
        stats: Stats,
        to_come: Callable[[], ToCome | None],
    ) -> None:
        self._pool, self._transfers, self._streams, self._stats = pool, transfers, streams, stats
        self._to_come = to_come
        transfers.least_host_bytes = self.least_host_bytes

    def acquire(
        self, nbytes: int, tier: Tier, label: str, *, or_disk: bool, planned: bool
    ) -> tuple[Buffer, Extent | None]:
        """Return the buffer, and the extent on disk that it is to be written to, if it is.

        `or_disk` lets it go there for want of host memory.
        """
        if tier is Tier.NVME:
            return self._acquire_on_disk(nbytes, label)
        if or_disk and self._transfers.store is not None:
            return self._acquire_either(nbytes, label, planned=planned)
        if or_disk and not planned and not self._leaves_room(nbytes):
            raise BudgetError(
                f"{label} ({nbytes} bytes) cannot be offloaded: the host budget of {self._pool.budget_bytes} bytes has "
                f"no room for it beside the {self.least_host_bytes(0)} bytes that parameters, gradients and state "
                "take; raise host_budget, or set spill_dir."
            )
        return self._transfers.acquire(nbytes, Use.SWAP, label), None

    def room_bytes(self) -> int:
        """Return how many bytes of tensors without a plan host memory has room for, beside what a backward needs."""
        to_come = self._bytes_to_come()
        taken_bytes = self._least_host_bytes(0, to_come) + self._pool.acquired_for(Use.SWAP) + to_come.state_bytes
        return max(0, self._pool.budget_bytes - taken_bytes)

    def least_host_bytes(self, nbytes: int) -> int:
        """Return what a backward needs of host memory beside offloaded tensors, one of which has `nbytes`.

        That is what is in use for longer, the gradients to come, and a staging buffer.
        """
        return self._least_host_bytes(nbytes, self._bytes_to_come())

    def _bytes_to_come(self) -> BytesToCome:
        to_come = self._to_come()
        return BytesToCome() if to_come is None else to_come.bytes_to_come()

    def _least_host_bytes(self, nbytes: int, to_come: BytesToCome) -> int:
        pool = self._pool
        staging_bytes = round_up(max(nbytes, self._transfers.planned_bytes(Use.STAGING)), PAGE_BYTES)
        passing_bytes = pool.acquired_for(Use.SWAP) + pool.acquired_for(Use.STAGING)
        return pool.acquired_bytes - passing_bytes + to_come.gradient_bytes + staging_bytes

    def _acquire_either(self, nbytes: int, label: str, *, planned: bool) -> tuple[Buffer, Extent | None]:
        """Acquire free host memory, for what is not `planned` only if the backward has enough without it; else disk.

        Where the disk has no room either, it may take host memory that the backward will need.
        """
        if (planned or self._leaves_room(nbytes)) and (buffer := self._host_buffer(nbytes)) is not None:
            return buffer, None
        try:
            return self._acquire_on_disk(nbytes, label)
        except (BudgetError, StoreError):
            if planned or (buffer := self._host_buffer(nbytes)) is None:
                raise
            return buffer, None

    def _host_buffer(self, nbytes: int) -> Buffer | None:
        """Acquire a buffer for which no other has to make way, if there is one."""
        buffer = self._pool.acquire_reserved(nbytes, Use.SWAP)
        if buffer is None and self._pool.room_bytes >= round_up(nbytes, PAGE_BYTES):
            return self._pool.acquire(nbytes, Use.SWAP)
        return buffer

    def _acquire_on_disk(self, nbytes: int, label: str) -> tuple[Buffer, Extent]:
        store = self._transfers.need_store()
        extent = store.allocate(nbytes, label)
        with contextlib.ExitStack() as undo:
            undo.callback(store.free, extent)
            watch = self._streams.watch()
            buffer = self._transfers.acquire(nbytes, Use.STAGING, label)
            watch.stop()
            undo.pop_all()
        self._stats.add_stall(watch, "stall_out_ns")
        return buffer, extent

    def _leaves_room(self, nbytes: int) -> bool:
        """Return whether a backward has the host memory it needs with so much more in use.

        Where it has not without that either, nothing is to be left.
        """
        to_come = self._bytes_to_come()
        least_bytes = self._least_host_bytes(nbytes, to_come)
        if to_come == BytesToCome() or least_bytes > self._pool.budget_bytes:
            return True
        beside_bytes = self._pool.acquired_for(Use.SWAP) + round_up(nbytes, PAGE_BYTES) + to_come.state_bytes
        return least_bytes + beside_bytes <= self._pool.budget_bytes
