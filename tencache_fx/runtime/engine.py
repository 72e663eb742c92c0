"""Carries out transfers: what the four graph ops do, on one device of this process.

    offload   acquire a buffer; copy out behind what compute queued so far; for disk, a worker writes it then
    release   compute waits for the copy out
    prefetch  allocate on compute; copy in, behind the allocation and the copy out; from disk, a worker reads first
    wait      compute waits for the copy in

Lanes wait only for copies issued earlier, so they never deadlock. `transfer_lifecycle.py` says who releases what.
Offloaded parameters and their gradients have ops of their own, in `model_state`, which attaches itself to the engine.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tencache_fx.errors import InvariantError, OptionError, TencacheError, UsageError
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.pool_sizing import size_classes
from tencache_fx.planning.problem import Step, Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.cuda_streams import open_streams
from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.stats import Stats
from tencache_fx.runtime.store import Store
from tencache_fx.runtime.streams import Streams
from tencache_fx.runtime.swap_buffers import SwapBuffers, ToCome
from tencache_fx.runtime.transfer_lifecycle import TransferLifecycle
from tencache_fx.runtime.transfers import Layout, Stage, new_token
from tencache_fx.units import PAGE_BYTES, round_up

_NO_RANGE = contextlib.nullcontext()


class Attachment(ToCome, Protocol):
    """A part of the program that uses an engine's pool and streams, and is closed with it."""

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of the parameters that are on disk."""

    def state_to_come(self) -> int:
        """Return the bytes of host memory that optimizers may yet acquire for state that they have not made."""

    def stop(self, *, at_exit: bool) -> None:
        """Finish all work and join the threads, while pool, lanes and store still run.

        Offloaded values are loaded to the device, but for `at_exit`.
        """

    def forget(self) -> None:
        """Drop all references to buffers: every copy is over, and their memory is about to be unmapped."""


class Engine:
    """Owns pool, streams, store and the transfers under way. Thread-safe; autograd calls it from its own threads.

    `stats.take()` adds these gauges to the counters: `host_acquired_bytes` (in use), `host_high_water_bytes` (its
    maximum), `host_pool_bytes`, `host_waste_bytes` (allocated, but not asked for at the high water), `disk_bytes`
    (allocated), `disk_acquired_bytes`, `disk_written_bytes` (since the store was opened; of each directory, too:
    `disk_written_bytes:/scratch`), `parameter_disk_bytes` (of offloaded parameters on disk, in weight files or in the
    store), `transfers` (under way).
    """

    id: int = -1
    """Index in the registry, a literal in graphs; -1 outside it."""
    serves_all = True
    """Whether its budgets are meant for the whole process; else they are those that regions have asked for so far."""
    gradient_set_bytes = 0
    """The bytes of the largest set of gradients in host memory that one backward makes."""
    closed = False
    """Whether `close` was called: no property, for each op asks."""
    attachment: Attachment | None = None
    """The offloaded parameters of this device, if there are any."""

    def __init__(
        self,
        device: torch.device,
        *,
        host_budget_bytes: int,
        spill_dirs: Sequence[Path] = (),
        spill_budget_bytes: int = 0,
        checksum: bool = False,
        streams: Streams | None = None,
    ) -> None:
        self.device = resolve_device(device)
        self.streams = open_streams(self.device) if streams is None else streams
        self.pool = Pool(self.streams, host_budget_bytes)
        self.stats = Stats(self._gauges)
        self.object_buffers = ObjectBuffers(self.pool, self.streams)
        self.transfers = TransferLifecycle(self.pool, self.object_buffers, self.streams, self.stats)
        self._swap_buffers = SwapBuffers(self.pool, self.transfers, self.streams, self.stats, lambda: self.attachment)
        self._lock = self.transfers.lock
        self._table = self.transfers.table
        self._pid = os.getpid()
        if spill_dirs:
            self.attach_store(Store(spill_dirs, spill_budget_bytes, checksum=checksum))

    @property
    def store(self) -> Store | None:
        """Return the spill store, if there is one."""
        return self.transfers.store

    @property
    def inherited(self) -> bool:
        """Return whether this is a forked child's copy of its parent's engine, without threads and buffers."""
        return os.getpid() != self._pid

    @property
    def parameter_disk_bytes(self) -> int:
        """Return the bytes of the offloaded parameters that are on disk."""
        return 0 if self.attachment is None else self.attachment.disk_bytes

    def attach_store(self, store: Store) -> None:
        """Take over `store`, which `close` will close; raises `OptionError` when there is one already."""
        if self.store is not None:
            names = ", ".join(str(path) for path in self.store.directories)
            raise OptionError(f"the engine of {self.device} spills to {names} already.")
        self.transfers.store = store

    def resize_host_budget(self, budget_bytes: int) -> None:
        """Set the most bytes of host memory; raises `OptionError`, and changes nothing, when more is in use."""
        self.enter()
        self.pool.resize_budget(budget_bytes)

    def reserve(self, *, pool: Sequence[PoolClass], staging: Sequence[PoolClass], disk_bytes: int) -> None:
        """Hold at least these buffers and this much disk, once work that releases buffers is done.

        What is held already counts.
        Raises `BudgetError`, `StoreError` or `OptionError` when that cannot be.
        """
        self.object_buffers.wait()
        self.enter()
        self.transfers.reserve(pool, Use.SWAP)
        self.transfers.reserve(staging, Use.STAGING)
        self.reserve_ahead(())
        if disk_bytes:
            self.transfers.need_store().reserve(disk_bytes)

    def map_ahead(self, sizes: Iterable[int], use: Use, *, compiles: bool = True) -> None:
        """Begin to map buffers of these sizes for later calls of `acquire`, in room that is not promised to others.

        Only the last call for a `use` counts. If nothing `compiles` meanwhile, it takes more of the CPU.
        """
        self.pool.ahead.begin(sizes, use, compiles=compiles)

    def reserve_ahead(self, pool: Sequence[PoolClass]) -> None:
        """Begin to map what `reserve` will map of these buffers, in room that is not promised to others.

        Only the last call counts, up to `reserve`.
        """
        self.pool.ahead.begin(self.pool.missing_sizes(pool, Use.SWAP), Use.SWAP, compiles=False)

    def map_for_calls(self, sizes: Iterable[int]) -> None:
        """Begin to map buffers of these sizes beside all others, for the first calls of a region in a step.

        `end_map_for_calls` unmaps those that nobody has taken by then.
        """
        self.pool.ahead.begin_more(sizes, Use.SWAP)

    def end_map_for_calls(self) -> None:
        """Unmap what is left of the buffers for first calls: a step is over, and those that it took are free."""
        self.pool.ahead.end_more(Use.SWAP)

    def forget_reserved(self) -> None:
        """Hold no buffers for plans any more: of what was compiled nothing is left."""
        self.enter()
        self.gradient_set_bytes = 0
        self.pool.forget_reserved((Use.SWAP, Use.STAGING, Use.GRADIENT))

    def reserve_gradients(self, sizes: Sequence[int], *, adds: bool = False) -> None:
        """Set room aside for the gradients of a backward, of these sizes in bytes; raises `BudgetError` without room.

        With `adds` there is room for as many that they are added to.
        """
        self.enter()
        self.gradient_set_bytes = max(self.gradient_set_bytes, sum(round_up(nbytes, PAGE_BYTES) for nbytes in sizes))
        all_sizes = [*sizes, *sizes] if adds else sizes
        self.pool.promise(size_classes([(Step(0), Step(1), nbytes) for nbytes in all_sizes]), Use.GRADIENT)

    def swap_room_bytes(self) -> int:
        """Return how many bytes of tensors that are not planned host memory has room for."""
        self.enter()
        return self._swap_buffers.room_bytes()

    def offload(
        self, src: Tensor, tier: Tier, label: str = "", *, or_disk: bool = False, planned: bool = False
    ) -> Tensor:
        """Issue the copy of `src` to `tier`; return the handle. `src` must not change until `release`.

        It goes to disk, if it may (`or_disk`), where host memory has neither a buffer reserved for it nor room. What is
        not `planned` leaves room for all that the backward will acquire there, unless the disk has none.
        Blocks the host only while all staging buffers are busy. Raises `BudgetError` when no buffer can come.
        """
        self.enter()
        label = label or "a tensor"
        if src.device != self.device or tier is Tier.DEVICE:
            raise InvariantError(f"cannot offload {label} from {src.device} to {tier} on {self.device}.")
        layout = Layout.of(src, label)
        transfer, transfers = None, self.transfers
        with named_range("offload", label):
            buffer, extent = self._swap_buffers.acquire(layout.nbytes, tier, label, or_disk=or_disk, planned=planned)
            try:
                with self._lock:
                    self.check_open()
                    transfer = transfers.begin(src, layout, label, tier, buffer, extent)
                    if extent is not None:
                        transfers.start_write(transfer, buffer, extent)
                    handle = self._table.add(transfer)
            except BaseException:
                if transfer is not None:
                    transfers.abandon(transfer)
                else:
                    self.pool.release(buffer)
                    if extent is not None:
                        transfers.need_store().free(extent)
                raise
        self.stats.add_copy("offloads", "d2h_bytes", layout.nbytes)
        return handle

    def release(self, handle: Tensor, src: Tensor, *, donated: bool = False) -> Tensor:
        """Let compute wait for the copy out of `src`; its memory is free then, or its caller's if it was `donated`."""
        self.enter()
        streams, watch = self.streams, None
        with self._lock:
            transfer = self._table.find(handle, "release")
        with named_range("release", transfer.label):
            copied_out = transfer.copied_out
            if copied_out.query():
                streams.check(copied_out)
            else:
                watch = streams.watch()
                streams.wait_compute(copied_out)
                watch.stop()
            transfer.src = None
            if not donated:
                streams.after_release(src)
        if watch is not None:
            self.stats.add_stall(watch, "stall_out_ns")
        return new_token()

    def prefetch(self, handle: Tensor) -> Tensor:
        """Allocate the tensor and issue its copy in; return the ticket, which owns the transfer from now on.

        Raises `UsageError` the second time, and for a copy of the handle.
        """
        self.enter()
        with self._lock:
            self.check_open()
            transfer = self._table.find(handle, "prefetch")
            if transfer.stage is not Stage.OFFLOADED:
                raise UsageError(transfer.refusal())
            with named_range("prefetch", transfer.label):
                dst = transfer.layout.empty()
                allocated = self.streams.record_compute()
                self.transfers.start_copy_in(transfer, dst, allocated)
                transfer.stage = Stage.PREFETCHING
                ticket = self._table.ticket(transfer)
        self.stats.add_copy("prefetches", "h2d_bytes", transfer.layout.nbytes)
        return ticket

    def destination(self, ticket: Tensor) -> Tensor | None:
        """Return the tensor that a prefetch has allocated and that nobody has waited for; None after that."""
        with self._lock:
            return self._table.find(ticket, "look into").dst

    def references(self, handle: Tensor) -> int:
        """Return how many tensors of the source of a copy out are there for its sake."""
        with self._lock:
            self.check_open()
            transfer = self._table.find(handle, "look into")
            if transfer.src is None:
                return 0
            return 2 if self.streams.keeps_tensors and not transfer.copied_out.query() else 1

    def wait(self, ticket: Tensor) -> Tensor:
        """Let compute wait for the copy in; return the tensor. Blocks the host while the disk is still read.

        Raises `StoreError` when the value is lost, `UsageError` the second time.
        """
        self.enter()
        with self._lock:
            transfer = self._table.find(ticket, "wait for")
            ready = self.transfers.arrived(transfer)
            issued = transfer.hand_out() if transfer.read is None else None
        try:
            with named_range("wait", transfer.label):
                reading = None
                if issued is None:
                    reading = None if ready else self.streams.watch()
                    self.transfers.finish_read(transfer)
                    with self._lock:
                        issued = transfer.hand_out()
                dst, copied_in = issued
                if ready:
                    self.streams.check(copied_in)
                    self.stats.add_ready(transfer.layout.nbytes)
                    return dst
                # Begun as late as it can be: on an idle device the host's time between the two marks counts as stall.
                watch = reading or self.streams.watch()
                self.streams.wait_compute(copied_in)
                watch.stop()
        except BaseException:
            if issued is not None:  # compute does not wait for the copy, and would have its memory for something else
                self.transfers.free_behind(issued[1], issued[0])
            raise
        self.stats.add_stall(watch, "stall_in_ns", wanted_bytes=transfer.layout.nbytes)
        return dst

    def close(self, *, at_exit: bool = False) -> None:
        """Finish the copies under way, join all threads, give all memory, files and disk back. Idempotent.

        Later use raises `TencacheError`; tensors returned by `wait` stay valid. Offloaded parameters are loaded to the
        device, but for `at_exit`. Does nothing in a forked child.
        """
        if self.inherited:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
        with contextlib.ExitStack() as steps:  # runs last first, and every step even if one raises
            if self.store is not None:
                steps.callback(self.store.close)
            steps.callback(self.pool.close)
            steps.callback(self.transfers.forget)
            steps.callback(self.object_buffers.forget)
            if self.attachment is not None:
                steps.callback(self.attachment.forget)
            steps.callback(self.streams.close)
            steps.callback(self.transfers.stop)
            steps.callback(self.pool.stop)
            if self.attachment is not None:
                steps.callback(self.attachment.stop, at_exit=at_exit)
            if self.store is not None:
                steps.callback(self.store.write_pace.end)

    def enter(self) -> None:
        """Begin a call: release what dead objects owned. Raises `TencacheError` for a closed engine."""
        self.check_open()
        self.transfers.drain()
        self.object_buffers.drain()

    def check_open(self) -> None:
        """Raise `TencacheError` for a closed engine, `UsageError` for one that a forked process has inherited."""
        if not self.closed and os.getpid() == self._pid:
            return
        if self.closed:
            raise TencacheError(f"the engine of {self.device} is closed; compile the model again to open a new one.")
        raise UsageError(
            f"process {os.getpid()} was forked from process {self._pid}, which compiled this region, and has "
            "none of its copy threads and pinned memory; start the process by spawn and compile in it what it runs."
        )

    def _gauges(self) -> dict[str, int]:
        if not self.closed and not self.inherited:
            self.transfers.drain()
            self.object_buffers.drain()
        pool, store = self.pool, self.store
        uses = () if store is None else store.uses()
        return {
            "host_acquired_bytes": pool.acquired_bytes,
            "host_high_water_bytes": pool.high_water_bytes,
            "host_pool_bytes": pool.allocated_bytes + pool.ahead.nbytes,
            "host_waste_bytes": max(0, pool.allocated_bytes - pool.high_water_requested_bytes),
            "disk_bytes": 0 if store is None else store.file_bytes,
            "disk_acquired_bytes": 0 if store is None else store.acquired_bytes,
            "disk_written_bytes": sum(use.written_bytes for use in uses),
            **{f"disk_written_bytes:{use.directory}": use.written_bytes for use in uses},
            "parameter_disk_bytes": self.parameter_disk_bytes,
            "transfers": len(self._table),
        }


def named_range(deed: str, label: str) -> contextlib.AbstractContextManager[object]:
    """Return a context: a named range for a profiler that is on, else nothing."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"tencache::{deed} {label}".rstrip())
    return _NO_RANGE
