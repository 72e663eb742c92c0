"""Who owns what while transfers are under way, and who releases it.

A buffer has one holder for the transfer and one more for a write under way. It is free when both have released it,
behind the events of the copies that touched it. The last of the write, the read and the transfer to end frees the
extent. Tensors that a copy may still touch when their transfer is dropped are kept until its event has happened.

Writers and readers are separate threads, and neither waits for a staging buffer while it has one; so each gets one in
the end, unless writes failed: then their buffers are marked stuck, and the pool does not wait for those.
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial

from torch import Tensor

from tencache_fx.errors import BudgetError, InvariantError, OptionError, StoreError, TencacheError
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.stats import Stats
from tencache_fx.runtime.store import WORKERS, Extent, Store
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.runtime.transfers import ActiveTransfer, Layout, Stage, TransferTable
from tencache_fx.runtime.worker import Worker
from tencache_fx.units import format_bytes


class TransferLifecycle:
    """The transfers of one engine. `lock` guards each of them; methods that need it held say so."""

    def __init__(self, pool: Pool, buffers: ObjectBuffers, streams: Streams, stats: Stats) -> None:
        self.lock = threading.RLock()
        self.table = TransferTable()
        self.store: Store | None = None
        self._pool, self._buffers = pool, buffers
        self._streams = streams
        self._stats = stats
        self._pending_frees: list[tuple[Event, Tensor]] = []
        self._failures: deque[str] = deque()
        self.least_host_bytes: Callable[[int], int] = int
        """Returns what a backward needs of host memory, beside offloaded tensors, one of which has so many bytes."""
        self.unplanned: str | None = None  # why the last step to be planned has no plan, if it has none
        self._planned_bytes = dict.fromkeys(Use, 0)  # the largest buffer that a plan asked for
        self._write_failure: str | None = None  # of the last write that ended, if it failed
        self._warned = False
        self._writers = Worker("tencache-writer", WORKERS)
        self._readers = Worker("tencache-reader", WORKERS)
        self._fetchers = Worker("tencache-fetcher", WORKERS)

    def need_store(self) -> Store:
        """Return the store; raises `OptionError` when there is none."""
        if self.store is None:
            raise OptionError("a tensor was sent to disk, but there is no spill_dir; name one.")
        return self.store

    def begin(
        self, src: Tensor, layout: Layout, label: str, tier: Tier, buffer: Buffer, extent: Extent | None = None
    ) -> ActiveTransfer:
        """Issue the copy of `src` to its buffer; return the transfer, which owns that, and the extent. Lock held."""
        streams, source = self._streams, src.detach()
        copied_out = streams.copy(
            Lane.OUT, buffer.first(layout.nbytes), source, (streams.record_compute(), *buffer.after)
        )
        buffer.after = (copied_out,)
        key, tier = self.table.next_key(), tier if extent is None else Tier.NVME
        return ActiveTransfer(key, label, tier, layout, copied_out, source, buffer, Stage.OFFLOADED, extent)

    def abandon(self, transfer: ActiveTransfer) -> None:
        """End a transfer that has failed as it began, unless it has a handle, whose end does that. Lock not held."""
        with self.lock:
            if not transfer.owners:
                self._drop(transfer)

    def start_write(self, transfer: ActiveTransfer, buffer: Buffer, extent: Extent) -> None:
        """Let a worker write the buffer once its copy out has landed. Lock held."""
        self._pool.retain(buffer)
        try:
            transfer.writing = True
            transfer.written = self._writers.begin(self._write, transfer, buffer, extent)
        except BaseException:
            transfer.writing = False
            self._pool.release(buffer)
            raise

    def start_copy_in(self, transfer: ActiveTransfer, dst: Tensor, allocated: Event) -> None:
        """Issue the copy in from where the value is: the buffer, even while it is written, or the disk. Lock held."""
        if (buffer := transfer.buffer) is not None:
            after = (allocated, transfer.copied_out)
            transfer.copied_in = self._streams.copy(Lane.IN, dst, buffer.first(transfer.layout.nbytes), after)
            buffer.after = (transfer.copied_in,)  # it is behind the copy out, too
            self._end_use(transfer, buffer)
        else:
            assert transfer.extent is not None
            self._issue_later(self._readers, transfer, partial(self._read, transfer, transfer.extent, dst, allocated))
        transfer.dst = dst

    def start_copy_in_later(self, transfer: ActiveTransfer, dst: Tensor, issue: Callable[[], Event]) -> None:
        """Let a thread `issue` the copy to `dst` and return its event; it may block first. Lock held."""
        self._issue_later(self._fetchers, transfer, issue)
        transfer.dst = dst

    def arrived(self, transfer: ActiveTransfer) -> bool:
        """Return whether the copy in is over, well or not: then nobody needs to wait for it. Lock held."""
        return (
            (transfer.read is None or transfer.read.done())
            and transfer.copied_in is not None
            and transfer.copied_in.query()
        )

    def reserve(self, classes: Sequence[PoolClass], use: Use) -> None:
        """Hold at least these buffers; raises `BudgetError` when the host budget does not allow it."""
        self._pool.reserve(classes, use)
        self._planned_bytes[use] = max((each.nbytes for each in classes), default=0) or self._planned_bytes[use]

    def planned_bytes(self, use: Use) -> int:
        """Return the size of the largest buffer for `use` that the last plan with any asked for."""
        return self._planned_bytes[use]

    def acquire(self, nbytes: int, use: Use, label: str) -> Buffer:
        """Acquire a buffer, as `ObjectBuffers.acquire_or_wait` does; the errors say for what, and why there is none.

        Raises `BudgetError`, or `StoreError` where failed writes keep the staging buffers.
        """
        try:
            return self._buffers.acquire_or_wait(nbytes, use)
        except BudgetError as error:
            failure, planned_bytes = self._write_failure, self._planned_bytes[use]
            least_bytes = self.least_host_bytes(nbytes if use is Use.STAGING else 0)
            if use is Use.STAGING and failure is not None:
                raise StoreError(f"{failure}\n  {label} found no free staging buffer: {error}") from error
            pace = None if self.store is None else self.store.write_pace
            if use is Use.STAGING and pace is not None and pace.holds_up and pace.bytes_per_day is not None:
                cause = (
                    f"Writes wait for spill_write_budget, {format_bytes(pace.bytes_per_day)} a day; raise it, or raise "
                    "host_budget so that less is written."
                )
            elif least_bytes > self._pool.budget_bytes:
                cause = (
                    f"Parameters, gradients, optimizer state and a staging buffer take {least_bytes} bytes in host "
                    f"memory at once; host_budget is {self._pool.budget_bytes}. Raise it to that at least."
                )
            elif self.unplanned is not None:
                cause = f"The step has no plan: {self.unplanned}"
            elif nbytes > planned_bytes:
                cause = (
                    f"The largest that plans hold is {planned_bytes} bytes: a shape has grown, or what runs has no "
                    "plan that fits; compile for the largest shape first, or raise host_budget."
                )
            else:
                cause = f"{len(self.table)} transfers are under way, of another region or of forwards before this one."
            raise BudgetError(f"{label} ({nbytes} bytes) cannot be offloaded: {error}\n  {cause}") from error

    def finish_read(self, transfer: ActiveTransfer) -> None:
        """Block until the copy in was issued; raises what stopped it. Lock not held."""
        if transfer.read is None:
            return
        try:
            error = transfer.read.exception()
        except CancelledError:
            raise TencacheError(f"the engine was closed while {transfer.label} was being prefetched.") from None
        if error is None:
            return
        with self.lock:
            transfer.stage, transfer.dst = Stage.ENDED, None
        # A new exception, because its traceback will hold the caller's ticket, and the slot holds the old one.
        if isinstance(error, TencacheError):
            raise type(error)(*error.args) from error
        raise InvariantError(f"{transfer.label} could not be prefetched: {error!r}.") from error

    def drain(self) -> None:
        """Release what dead handles and tickets owned; warn, once, if a write failed meanwhile. Lock not held."""
        if not (self.table.dead or self._pending_frees or self._failures):
            return
        with self.lock:
            while dead := self.table.pop_dead():
                transfer, owner = dead
                if transfer.stage is (Stage.OFFLOADED if owner == "handle" else Stage.PREFETCHING):
                    self._drop(transfer)
            if self._pending_frees:
                self._pending_frees = [(event, tensor) for event, tensor in self._pending_frees if not event.query()]
        while self._failures:
            message = self._failures.popleft()
            if not self._warned:
                self._warned = True
                warnings.warn(message, stacklevel=4)

    def free_behind(self, event: Event, tensor: Tensor) -> None:
        """Have a tensor's memory free no earlier than the copy to or from it is over. Lock not held."""
        with self.lock:
            self._pending_frees.append((event, tensor))

    def stop(self) -> None:
        """Join the workers; what they have not begun is cancelled. The lanes must still run. Lock not held."""
        self._writers.stop(cancel=True)
        self._readers.stop(cancel=True)
        self._fetchers.stop(cancel=True)

    def forget(self) -> None:
        """Forget every transfer. All copies must be over."""
        with self.lock:
            self.table.clear()
            self._pending_frees.clear()

    def _write(self, transfer: ActiveTransfer, buffer: Buffer, extent: Extent) -> None:
        """Write a buffer once its copy out has landed. If that fails the buffer keeps the value."""
        with self.lock:
            if not transfer.writing:  # an interrupt came as this was handed in: the buffer and the extent are others'
                return
        failure = f"the copy of {transfer.label} to host memory failed, so it was not written to disk."
        done = False
        try:
            transfer.copied_out.synchronize()
            self.need_store().write(extent, buffer.view)
            done = True
            self._stats.add(disk_write_bytes=extent.nbytes)
        except StoreError as error:
            failure = str(error)
        finally:
            self._write_failure = None if done else failure
            if not done:
                self._failures.append(f"{failure} The run goes on, slower: such values stay in host memory.")
                self._stats.add(disk_write_failures=1)
            with self.lock:
                transfer.writing = False
                if transfer.stage is Stage.OFFLOADED and done:
                    transfer.buffer = None
                    self._pool.release(buffer)
                else:
                    self._free_extent(transfer)
                if transfer.stage is Stage.OFFLOADED and not done:
                    self._pool.mark_stuck(buffer)
                self._pool.release(buffer)

    def _issue_later(self, threads: Worker, transfer: ActiveTransfer, issue: Callable[[], Event]) -> None:
        transfer.read = threads.begin(self._issue, transfer, issue)
        transfer.reading = True

    def _issue(self, transfer: ActiveTransfer, issue: Callable[[], Event]) -> None:
        """Issue the copy in; nothing is read any more from here on."""
        copied_in = None
        try:
            copied_in = issue()
        finally:
            with self.lock:
                transfer.reading = False
                transfer.copied_in = copied_in
                self._free_extent(transfer)
                if transfer.stage is Stage.DROPPED:
                    self._free_later(transfer)

    def _read(self, transfer: ActiveTransfer, extent: Extent, dst: Tensor, allocated: Event) -> Event:
        """Read an extent into a staging buffer and issue the copy in; return its event."""
        buffer = self.acquire(extent.nbytes, Use.STAGING, transfer.label)
        try:
            self._streams.wait_host(buffer.after)
            buffer.after = ()
            self.need_store().read(extent, buffer.view)
            self._stats.add(disk_read_bytes=extent.nbytes)
            copied_in = self._streams.copy(Lane.IN, dst, buffer.first(extent.nbytes), (allocated,))
            buffer.after = (copied_in,)
            return copied_in
        finally:
            self._pool.release(buffer)

    def _end_use(self, transfer: ActiveTransfer, buffer: Buffer) -> None:
        """Release the transfer's buffer; a write that has not begun is not needed any more."""
        transfer.buffer = None
        if transfer.writing and transfer.written is not None and transfer.written.cancel():
            transfer.writing = False
            self._pool.release(buffer)
        if transfer.extent is not None and not transfer.writing:
            self._free_extent(transfer)
        self._pool.release(buffer)

    def _free_extent(self, transfer: ActiveTransfer) -> None:
        if transfer.extent is not None:
            self.need_store().free(transfer.extent)
            transfer.extent = None

    def _drop(self, transfer: ActiveTransfer) -> None:
        """End a transfer whose owner died. A read or write that runs sees `DROPPED` when it ends."""
        stage, transfer.stage, transfer.payload = transfer.stage, Stage.DROPPED, None
        self._stats.add(dropped=1)
        if transfer.src is not None:
            self._pending_frees.append((transfer.copied_out, transfer.src))
            transfer.src = None
        if stage is Stage.OFFLOADED and transfer.buffer is not None:
            self._end_use(transfer, transfer.buffer)
        elif transfer.reading and transfer.read is not None and transfer.read.cancel():
            transfer.reading = False
        if not transfer.reading:
            self._free_later(transfer)
            if not transfer.writing:
                self._free_extent(transfer)

    def _free_later(self, transfer: ActiveTransfer) -> None:
        if transfer.dst is not None and transfer.copied_in is not None:
            self._pending_frees.append((transfer.copied_in, transfer.dst))
        transfer.dst = None
