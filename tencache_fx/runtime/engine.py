"""Carries out trips: the four graph ops' deeds, on one device of this process.

    offload   lend a buffer; copy out behind what compute queued so far; for disk, a worker writes the buffer after that
    release   compute waits for the copy out
    prefetch  allocate on compute; copy in, behind the allocation and the copy out; from disk, a worker reads first
    wait      compute waits for the copy in

Lanes wait only for copies issued earlier, so they never deadlock. `custody.py` says who gives what back.
"""

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tencache_fx.errors import InvariantError, OptionError, TencacheError, UsageError
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state.disk_state import DiskLine
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer, norm_of
from tencache_fx.model_state.parameter_store import ParameterStore
from tencache_fx.model_state.pending_backwards import PendingBackwards
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.pool_sizing import size_classes
from tencache_fx.planning.problem import Step, Tier
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.stats import Stats
from tencache_fx.runtime.store import Store
from tencache_fx.runtime.streams import Lane, Streams, open_streams
from tencache_fx.runtime.transfers import ActiveTransfer, Layout, Stage, new_token, raw_bytes
from tencache_fx.runtime.trips import TripLifecycle


class Engine:
    """Owns pool, streams, store and the trips under way. Thread-safe; autograd calls it from its own threads.

    `stats.take()` adds these gauges to the counters: `host_lent_bytes`, `host_high_water_bytes` (most lent at once),
    `host_pool_bytes`, `host_waste_bytes` (allocated, but not asked for at the high water), `disk_bytes` (allocated),
    `disk_lent_bytes`, `trips` (under way).
    """

    id: int = -1
    """Index in the registry, a literal in graphs; -1 outside it."""
    serves_all = True
    """Whether its budgets are meant for the whole process; else they are those that regions have asked for so far."""

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
        self.homes = ParameterStore(self.pool, self.streams)
        self.flights = PendingBackwards()
        self._disk_line: DiskLine | None = None
        self._custody = TripLifecycle(self.pool, self.streams, self.stats)
        self._lock = self._custody.lock
        self._slots = self._custody.slots
        self._closed = False
        self._pid = os.getpid()
        if spill_dirs:
            self.attach_store(Store(spill_dirs, spill_budget_bytes, checksum=checksum))

    @property
    def store(self) -> Store | None:
        """Return the spill store, if there is one."""
        return self._custody.store

    @property
    def disk_line(self) -> DiskLine:
        """Return what keeps optimizers' state in the store, which there has to be."""
        if self._disk_line is None:
            self._disk_line = DiskLine(self.pool, self._custody.need_store(), self.stats.add)
        return self._disk_line

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    @property
    def inherited(self) -> bool:
        """Say whether this is a forked child's copy of its parent's engine: no threads, no buffers, only the names."""
        return os.getpid() != self._pid

    def attach_store(self, store: Store) -> None:
        """Take over `store`, which `close` will close; raises `OptionError` when there is one already."""
        if self.store is not None:
            names = ", ".join(str(path) for path in self.store.directories)
            raise OptionError(f"the engine of {self.device} spills to {names} already.")
        self._custody.store = store

    def resize_host_budget(self, budget_bytes: int) -> None:
        """Set the most bytes of host memory; raises `OptionError` when more is lent, and leaves it as it was."""
        self._enter()
        self.pool.resize_budget(budget_bytes)

    def reserve(self, *, pool: Sequence[PoolClass], staging: Sequence[PoolClass], disk_bytes: int) -> None:
        """Hold at least these buffers and this much disk, once no addition is under way; what is there already counts.

        Raises `BudgetError`, `StoreError` or `OptionError` when that cannot be.
        """
        self.homes.updates.additions.wait()
        self._enter()
        self._custody.reserve(pool, Use.TRIP)
        self._custody.reserve(staging, Use.STAGING)
        if disk_bytes:
            self._custody.need_store().reserve(disk_bytes)

    def reserve_gradients(self, sizes: Sequence[int]) -> None:
        """Set room aside for each gradient of these sizes in bytes; raises `BudgetError` when that cannot be."""
        self._enter()
        self.pool.promise(size_classes([(Step(0), Step(1), nbytes) for nbytes in sizes]), Use.GRADIENT)

    def offload(self, src: Tensor, tier: Tier, label: str = "") -> Tensor:
        """Issue the copy of `src` to `tier`; return the handle. `src` must stay as it is until `release`.

        Blocks the host only while all staging buffers are busy. Raises `BudgetError` when no buffer can come.
        """
        self._enter()
        label = label or "a tensor"
        if src.device != self.device or tier is Tier.DEVICE:
            raise InvariantError(f"cannot offload {label} from {src.device} to {tier} on {self.device}.")
        layout = Layout.of(src, label)
        with _named("offload", label), contextlib.ExitStack() as undo:
            extent = None
            if tier is Tier.NVME:
                store = self._custody.need_store()
                extent = store.allocate(layout.nbytes, label)
                undo.callback(store.free, extent)
            buffer = self._lend(layout.nbytes, tier, label)
            undo.callback(self.pool.give_back, buffer)
            with self._lock:
                slot = self._leave(src, layout, label, tier, buffer)
                slot.extent = extent
                if extent is not None:
                    self._custody.start_write(slot, buffer, extent)
                undo.pop_all()
                handle = self._slots.add(slot)
        self.stats.add(offloads=1, d2h_bytes=layout.nbytes)
        return handle

    def release(self, handle: Tensor, src: Tensor, *, lent: bool = False) -> Tensor:
        """Let compute wait for the copy out of `src`, whose memory is then its owner's: who that is, `lent` says."""
        self._enter()
        with self._lock:
            slot = self._slots.find(handle, "release")
        with _named("release", slot.label):
            watch = self.streams.watch()
            self.streams.wait_compute(slot.copied_out)
            watch.stop()
            with self._lock:
                slot.src = None
            if not lent:
                self.streams.after_release(raw_bytes(src))
        self.stats.add_stall(watch, "stall_out_ns")
        return new_token()

    def prefetch(self, handle: Tensor) -> Tensor:
        """Allocate the tensor and issue its copy in; return the ticket, which owns the trip from now on.

        Raises `UsageError` the second time, and for a copy of the handle.
        """
        self._enter()
        with self._lock:
            self._check_open()
            slot = self._slots.find(handle, "prefetch")
            if slot.stage is not Stage.AWAY:
                raise UsageError(slot.refusal())
            with _named("prefetch", slot.label):
                dst = slot.layout.empty()
                allocated = self.streams.record_compute()
                self._custody.bring(slot, dst, allocated)
                slot.stage = Stage.COMING
                ticket = self._slots.ticket(slot)
        self.stats.add(prefetches=1, h2d_bytes=slot.layout.nbytes)
        return ticket

    def wait(self, ticket: Tensor) -> Tensor:
        """Let compute wait for the copy in; return the tensor. Blocks the host while the disk is still read.

        Raises `StoreError` when the value is lost, `UsageError` the second time.
        """
        self._enter()
        with self._lock:
            slot = self._slots.find(ticket, "wait for")
            ready = self._custody.arrived(slot)
        with _named("wait", slot.label):
            reading = self.streams.watch() if slot.read is not None and not ready else None
            self._custody.finish_read(slot)
            with self._lock:
                if slot.stage is not Stage.COMING:
                    raise UsageError(slot.refusal())
                dst, copied_in = slot.dst, slot.copied_in
                assert dst is not None
                assert copied_in is not None
                slot.stage, slot.dst, slot.copied_in = Stage.BACK, None, None
            if ready:
                self.streams.wait_compute(copied_in)  # raises what the copy raised
                self.stats.add_ready(slot.layout.nbytes)
                return dst
            # Begun as late as it can be: on an idle device the host's own time between the two marks counts as stall.
            watch = reading or self.streams.watch()
            self.streams.wait_compute(copied_in)
            watch.stop()
        self.stats.add_stall(watch, "stall_in_ns", wanted_bytes=slot.layout.nbytes)
        return dst

    def fetch(self, parameter: Tensor, label: str = "") -> Tensor:
        """Allocate a parameter's bytes and issue their copy in from its home; return the ticket.

        Behind an update of it that is under way. One that is on the device is copied there.
        """
        self._enter()
        label = label or "a parameter"
        with self._lock, _named("fetch", label):
            self._check_open()
            home = self.homes.find(parameter)
            layout = Layout.of(parameter, label)
            dst = layout.empty()
            allocated = self.streams.record_compute()
            slot = ActiveTransfer(self._slots.next_key(), label, Tier.HOST, layout, allocated, None, None, Stage.COMING)
            if home is not None and not home.on_device:
                self._custody.bring_home(slot, home, dst, allocated)
            else:
                if home is not None:
                    home.bring()
                slot.dst = dst.copy_(parameter.detach())
                slot.copied_in = self.streams.record_compute()
            ticket = self._slots.ticket(slot)
        self.stats.add(prefetches=1, h2d_bytes=layout.nbytes)
        return ticket

    def settle(self, parameter: Tensor) -> Tensor:
        """See that a parameter that stays on the device is there, behind its last update; return a token."""
        self._enter()
        if (home := self.homes.find(parameter)) is not None:
            watch = self.streams.watch() if home.updating else None
            home.bring()
            if watch is not None:
                watch.stop()
                self.stats.add_stall(watch, "stall_in_ns")
        return new_token()

    def renew(self, parameter: Tensor) -> Tensor:
        """Have a parameter whose update has begun renewed where it stays, behind what compute has; return a token."""
        self._enter()
        home = self.homes.find(parameter)
        if home is not None and home.early is not None:
            self.stats.add(h2d_bytes=home.end_readers(self.streams.record_compute()))
        return new_token()

    def sink(self, src: Tensor, label: str = "", home: str = "", *, shard: bool = False) -> Tensor:
        """Issue the copy of a gradient, or a rank's `shard` of it, out; return the handle, for `release` and `homed`.

        If that is all there will be of the gradient of `home`, and its optimizer updates during backward, the update
        begins. Raises `BudgetError`.
        """
        self._enter()
        label = label or "a gradient"
        layout = Layout.of(src, label)
        with _named("sink", label), contextlib.ExitStack() as undo:
            buffer = self.homes.lend(layout.nbytes, Use.GRADIENT)
            undo.callback(self.pool.give_back, buffer)
            norm = norm_of(src.detach())
            with self._lock:
                slot = self._leave(src, layout, label, Tier.HOST, buffer)
                undo.pop_all()
                slot.buffer, slot.lease = (
                    None,
                    HostGradientBuffer(self.homes, buffer, layout, slot.copied_out, norm, shard),
                )
                handle = self._slots.add(slot)
        self.stats.add(offloads=1, d2h_bytes=layout.nbytes)
        whole = self.flights.whole(home) if home else None
        if whole is not None and whole.update_now is not None:
            whole.update_now(slot.lease)
        return handle

    def homed(self, handle: Tensor) -> Tensor:
        """Return the gradient that has left by this handle, which is over; raises `UsageError` the second time."""
        self._enter()
        with self._lock:
            slot = self._slots.find(handle, "hand out")
            if slot.lease is None:
                raise UsageError(slot.refusal())
            lease, slot.lease, slot.stage = slot.lease, None, Stage.BACK
        return HostGradient(lease)

    def close(self, *, at_exit: bool = False) -> None:
        """Finish the copies under way, join all threads, give all memory, files and disk back. Idempotent.

        Later use raises `TencacheError`; tensors returned by `wait` stay valid. Parameters with a home come back to the
        device, but for `at_exit`. Does nothing in a forked child.
        """
        if self.inherited:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.ExitStack() as steps:  # runs last first, and every step even if one raises
            if self.store is not None:
                steps.callback(self.store.close)
            steps.callback(self.pool.close)
            steps.callback(self._custody.forget)
            steps.callback(self.homes.forget_all)
            steps.callback(self.streams.close)
            if not at_exit:
                steps.callback(self._bring_all)
            steps.callback(self._custody.stop)
            steps.callback(self.pool.stop)
            if self._disk_line is not None:
                steps.callback(self._disk_line.stop)
                if not at_exit:
                    steps.callback(self._disk_line.bring_back)
            steps.callback(self.homes.updates.stop)

    def _bring_all(self) -> None:
        for home in self.homes:
            try:
                home.settle()
            except InvariantError as error:
                warnings.warn(str(error), stacklevel=2)
            try:
                home.bring()
            except UsageError as error:
                warnings.warn(str(error), stacklevel=2)
            except torch.OutOfMemoryError:
                home.move_out(torch.device("cpu"))
                warnings.warn(f"{home.name} is on the CPU now: {self.device} has no room for it.", stacklevel=2)

    def _enter(self) -> None:
        self._check_open()
        self._custody.drain()
        self.homes.drain()

    def _leave(self, src: Tensor, layout: Layout, label: str, tier: Tier, buffer: Buffer) -> ActiveTransfer:
        """Issue the copy of `src` to its buffer; return the trip that begins so. Lock held."""
        self._check_open()
        source, after = raw_bytes(src), (self.streams.record_compute(), *buffer.after)
        copied_out = self.streams.copy(Lane.OUT, buffer.memory[: layout.nbytes], source, after)
        buffer.after = (copied_out,)
        return ActiveTransfer(self._slots.next_key(), label, tier, layout, copied_out, source, buffer)

    def _lend(self, nbytes: int, tier: Tier, label: str) -> Buffer:
        if tier is Tier.HOST:
            return self._custody.lend(nbytes, Use.TRIP, label)
        watch = self.streams.watch()
        buffer = self._custody.lend(nbytes, Use.STAGING, label)
        watch.stop()
        self.stats.add_stall(watch, "stall_out_ns")
        return buffer

    def _check_open(self) -> None:
        if self._closed:
            raise TencacheError(f"the engine of {self.device} is closed; compile the model again to open a new one.")
        if self.inherited:
            raise UsageError(
                f"process {os.getpid()} was forked from process {self._pid}, which compiled this region, and has "
                "none of its copy threads and pinned memory; start the process by spawn and compile in it what it runs."
            )

    def _gauges(self) -> dict[str, int]:
        if not self._closed and not self.inherited:
            self._custody.drain()
            self.homes.drain()
        pool, store = self.pool, self.store
        return {
            "host_lent_bytes": pool.lent_bytes,
            "host_high_water_bytes": pool.high_water_bytes,
            "host_pool_bytes": pool.allocated_bytes,
            "host_waste_bytes": max(0, pool.allocated_bytes - pool.high_water_requested_bytes),
            "disk_bytes": 0 if store is None else store.file_bytes,
            "disk_lent_bytes": 0 if store is None else store.lent_bytes,
            "trips": len(self._slots),
        }


def _named(deed: str, label: str) -> contextlib.AbstractContextManager[object]:
    """Return a named range for a profiler that is on, else nothing."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"tencache::{deed} {label}".rstrip())
    return contextlib.nullcontext()
