"""Who holds what while trips are under way, and who gives it back.

A buffer has one hold for the trip and one more for a write under way; it is free when both are given back, behind the
events of the copies that touched it. Room on disk is given back by whoever ends last: the write, the read or the trip.
Tensors that a copy may still touch when their trip is dropped stay in limbo until its event has happened.

Writers and readers are separate threads, and neither waits for a staging buffer while it holds one; so whoever waits
for one gets it, unless writes failed: then their buffers are parked, and the pool knows not to wait for those.
"""

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from tencache_fx.errors import BudgetError, InvariantError, OptionError, StoreError, TencacheError
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.stats import Stats
from tencache_fx.runtime.store import WORKERS, Extent, Store
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.runtime.transfers import ActiveTransfer, Layout, Stage, TransferTable, raw_bytes


class TripLifecycle:
    """Keeps the trips of one engine. `lock` guards every slot; methods that need it held say so."""

    def __init__(self, pool: Pool, streams: Streams, stats: Stats) -> None:
        self.lock = threading.RLock()
        self.slots = TransferTable()
        self.store: Store | None = None
        self._pool = pool
        self._streams = streams
        self._stats = stats
        self._limbo: list[tuple[Event, Tensor]] = []
        self._failures: deque[str] = deque()
        self._planned_bytes = dict.fromkeys(Use, 0)  # the largest buffer that a plan asked for
        self._write_failure: str | None = None  # of the last write that ended, if it failed
        self._warned = False
        self._writers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tencache-writer")
        self._readers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tencache-reader")
        self._fetchers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tencache-fetcher")

    def need_store(self) -> Store:
        """Return the store; raises `OptionError` when there is none."""
        if self.store is None:
            raise OptionError("a tensor was sent to disk, but there is no spill_dir; name one.")
        return self.store

    def begin(self, src: Tensor, layout: Layout, label: str, tier: Tier, buffer: Buffer) -> ActiveTransfer:
        """Issue the copy of `src` to its buffer; return the trip that begins so. Lock held."""
        source, after = raw_bytes(src), (self._streams.record_compute(), *buffer.after)
        copied_out = self._streams.copy(Lane.OUT, buffer.memory[: layout.nbytes], source, after)
        buffer.after = (copied_out,)
        return ActiveTransfer(self.slots.next_key(), label, tier, layout, copied_out, source, buffer)

    def start_write(self, slot: ActiveTransfer, buffer: Buffer, extent: Extent) -> None:
        """Let a worker write the buffer once its copy out has landed. Lock held."""
        with contextlib.ExitStack() as undo:
            self._pool.hold(buffer)
            undo.callback(self._pool.give_back, buffer)
            slot.written = self._writers.submit(self._write, slot, buffer, extent)
            slot.writing = True
            undo.pop_all()

    def bring(self, slot: ActiveTransfer, dst: Tensor, allocated: Event) -> None:
        """Issue the copy in from where the value is: the buffer, even while it is written, or the disk. Lock held."""
        if (buffer := slot.buffer) is not None:
            after = (allocated, slot.copied_out)
            slot.copied_in = self._streams.copy(Lane.IN, raw_bytes(dst), buffer.memory[: slot.layout.nbytes], after)
            buffer.after = (slot.copied_out, slot.copied_in)
            self._leave_buffer(slot, buffer)
        else:
            assert slot.extent is not None
            self._issue_later(self._readers, slot, partial(self._read, slot, slot.extent, dst, allocated))
        slot.dst = dst

    def bring_later(self, slot: ActiveTransfer, dst: Tensor, issue: Callable[[], Event]) -> None:
        """Have a thread `issue` the copy to `dst`, which may block first; it returns the copy's event. Lock held."""
        self._issue_later(self._fetchers, slot, issue)
        slot.dst = dst

    def arrived(self, slot: ActiveTransfer) -> bool:
        """Say whether the value is on the device already, well or not: then nobody needs to wait for it. Lock held."""
        return (slot.read is None or slot.read.done()) and slot.copied_in is not None and slot.copied_in.query()

    def reserve(self, classes: Sequence[PoolClass], use: Use) -> None:
        """Hold at least these buffers; raises `BudgetError` when the host budget does not allow it."""
        self._pool.reserve(classes, use)
        self._planned_bytes[use] = max((each.nbytes for each in classes), default=0) or self._planned_bytes[use]

    def lend(self, nbytes: int, use: Use, label: str) -> Buffer:
        """Lend a buffer, as `Pool.lend`; the errors say for what, and why there is none.

        Raises `BudgetError`, or `StoreError` where failed writes keep the staging buffers.
        """
        try:
            return self._pool.lend(nbytes, use)
        except BudgetError as error:
            failure, planned_bytes = self._write_failure, self._planned_bytes[use]
            if use is Use.STAGING and failure is not None:
                raise StoreError(f"{failure}\n  {label} found no free staging buffer: {error}") from error
            if nbytes > planned_bytes:
                cause = (
                    f"The plan's largest is {planned_bytes} bytes: a shape has grown; compile for the largest first."
                )
            else:
                cause = f"{len(self.slots)} trips are under way, of another region or of forwards before this one."
            raise BudgetError(f"{label} ({nbytes} bytes) cannot travel: {error}\n  {cause}") from error

    def finish_read(self, slot: ActiveTransfer) -> None:
        """Block until the copy in was issued; raises what stopped it. Lock not held."""
        if slot.read is None:
            return
        try:
            error = slot.read.exception()
        except CancelledError:
            raise TencacheError(f"the engine was closed while {slot.label} was on its way back.") from None
        if error is None:
            return
        with self.lock:
            slot.stage, slot.dst = Stage.BACK, None
        # A new exception, because its traceback will hold the caller's ticket, and the slot holds the old one.
        if isinstance(error, TencacheError):
            raise type(error)(*error.args) from error
        raise InvariantError(f"{slot.label} could not be brought back: {error!r}.") from error

    def drain(self) -> None:
        """Give back what dead handles and tickets owned; warn, once, if a write failed meanwhile. Lock not held."""
        if not (self.slots.any_dead or self._limbo or self._failures):
            return
        with self.lock:
            while dead := self.slots.pop_dead():
                slot, owner = dead
                if slot.stage is (Stage.AWAY if owner == "handle" else Stage.COMING):
                    self._drop(slot)
            self._limbo = [(event, tensor) for event, tensor in self._limbo if not event.query()]
        while self._failures:
            message = self._failures.popleft()
            if not self._warned:
                self._warned = True
                warnings.warn(message, stacklevel=4)

    def stop(self) -> None:
        """Join the workers; what they have not begun is cancelled. The lanes must still run. Lock not held."""
        self._writers.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._fetchers.shutdown(wait=True, cancel_futures=True)

    def forget(self) -> None:
        """Let go of every trip. All copies must be over."""
        with self.lock:
            self.slots.clear()
            self._limbo.clear()

    def _write(self, slot: ActiveTransfer, buffer: Buffer, extent: Extent) -> None:
        """Write a buffer once its copy out has landed. If that fails the value stays where it is."""
        failure = f"the copy of {slot.label} to host memory failed, so it was not written to disk."
        done = False
        try:
            slot.copied_out.synchronize()
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
                slot.writing = False
                if slot.stage is Stage.AWAY and done:
                    slot.buffer = None
                    self._pool.give_back(buffer)
                else:
                    self._free_extent(slot)
                if slot.stage is Stage.AWAY and not done:
                    self._pool.park(buffer)
                self._pool.give_back(buffer)

    def _issue_later(self, threads: ThreadPoolExecutor, slot: ActiveTransfer, issue: Callable[[], Event]) -> None:
        slot.read = threads.submit(self._issue, slot, issue)
        slot.reading = True

    def _issue(self, slot: ActiveTransfer, issue: Callable[[], Event]) -> None:
        """Issue the copy in; nothing is read any more from here on."""
        copied_in = None
        try:
            copied_in = issue()
        finally:
            with self.lock:
                slot.reading = False
                slot.copied_in = copied_in
                self._free_extent(slot)
                if slot.stage is Stage.DROPPED:
                    self._abandon(slot)

    def _read(self, slot: ActiveTransfer, extent: Extent, dst: Tensor, allocated: Event) -> Event:
        """Read an extent into a staging buffer and issue the copy in; return its event."""
        buffer = self.lend(extent.nbytes, Use.STAGING, slot.label)
        try:
            self._streams.settle(buffer.after)
            buffer.after = ()
            self.need_store().read(extent, buffer.view)
            self._stats.add(disk_read_bytes=extent.nbytes)
            copied_in = self._streams.copy(Lane.IN, raw_bytes(dst), buffer.memory[: extent.nbytes], (allocated,))
            buffer.after = (copied_in,)
            return copied_in
        finally:
            self._pool.give_back(buffer)

    def _leave_buffer(self, slot: ActiveTransfer, buffer: Buffer) -> None:
        """End the trip's hold; a write that has not begun is not needed any more."""
        slot.buffer = None
        if slot.writing and slot.written is not None and slot.written.cancel():
            slot.writing = False
            self._pool.give_back(buffer)
        if not slot.writing:
            self._free_extent(slot)
        self._pool.give_back(buffer)

    def _free_extent(self, slot: ActiveTransfer) -> None:
        if slot.extent is not None:
            self.need_store().free(slot.extent)
            slot.extent = None

    def _drop(self, slot: ActiveTransfer) -> None:
        """End a trip whose owner died. A read or write that runs sees `DROPPED` when it ends."""
        stage, slot.stage, slot.payload = slot.stage, Stage.DROPPED, None
        self._stats.add(dropped=1)
        if slot.src is not None:
            self._limbo.append((slot.copied_out, slot.src))
            slot.src = None
        if stage is Stage.AWAY and slot.buffer is not None:
            self._leave_buffer(slot, slot.buffer)
        elif slot.reading and slot.read is not None and slot.read.cancel():
            slot.reading = False
        if not slot.reading:
            self._abandon(slot)
            if not slot.writing:
                self._free_extent(slot)

    def _abandon(self, slot: ActiveTransfer) -> None:
        if slot.dst is not None and slot.copied_in is not None:
            self._limbo.append((slot.copied_in, slot.dst))
        slot.dst = None
