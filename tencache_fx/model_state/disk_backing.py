"""A parameter whose bytes are on disk: in an extent of the spill store, or in the weight file that they come from.

A value passes through host memory in a buffer (`passing_buffers.py`): it is read into one, and copied to the device
from there. The next value is written to another, and from there over the extent. A value that is committed is in its
buffer until it is on disk, and who reads it meanwhile reads that. If it cannot be written, it stays in its buffer: the
value is always whole, the old one or the new one.

A weight file is never written. If its parameter is changed, the value goes to an extent from then on.
"""

import contextlib
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tencache_fx.errors import BudgetError, OptionError, StoreError, TencacheError
from tencache_fx.model_state.backing import Backing, HostWrite
from tencache_fx.model_state.host_state import mapped_memory, own_storage
from tencache_fx.model_state.passing_buffers import PassingBuffers
from tencache_fx.model_state.weight_files import WeightSlice
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.store import Extent
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.runtime.transfers import Layout
from tencache_fx.units import PAGE_BYTES, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter's bytes are to be: on disk or in host memory, its first value from `weights` if there are any.

    One that stays `in_file` is on disk there.
    """

    on_disk: bool = False
    weights: WeightSlice | None = None
    in_file: bool = False


class DiskBacking(Backing):
    """The bytes of one parameter called `name`, without a value at first if there is no `weights`, its slice of a file.

    Raises `BudgetError` or `StoreError` where host memory has no room for the buffers, or the disk for the bytes.
    """

    tier = Tier.NVME

    def __init__(
        self, engine: Engine, passing: PassingBuffers, layout: Layout, name: str, weights: WeightSlice | None
    ) -> None:
        self.layout, self.name = layout, name
        self.weights = weights  # while the value is there
        self._engine, self._passing = engine, passing
        self._extent: Extent | None = None  # where the value is, or was written to last
        self._held: Buffer | None = None  # has the value, while it is written, or because it cannot be
        self._lock = threading.Lock()  # guards these, and the bytes on disk
        self._users = 0
        self._freed = False
        passing.join(layout.nbytes)
        if weights is None:
            try:
                self._extent = self._allocate()
            except BaseException:
                passing.leave()
                raise

    @property
    def streams(self) -> Streams:
        """Return the lanes that copies to and from the device go by."""
        return self._engine.streams

    def copy_in(self, dst: Tensor, after: Sequence[Event]) -> Event:
        """Read the value, unless it is in host memory, and issue the copy in; raises `StoreError`."""
        with contextlib.ExitStack() as undo:
            self._begin_use()
            undo.callback(self._end_use)
            with self._lock:
                if self._held is not None:
                    return self._copy(self._held, dst, after)
            buffer = self._passing.take()
            undo.callback(self._passing.give, buffer)
            self._read(buffer)
            return self._copy(buffer, dst, after)

    def begin_write(self, *, read: bool) -> HostWrite:
        """Return a buffer, into which the value is read if that is wanted; raises `StoreError` if it cannot be."""
        with contextlib.ExitStack() as undo:
            self._begin_use()
            undo.callback(self._end_use)
            buffer = self._passing.take()
            undo.callback(self._passing.give, buffer)
            if read:
                self._read(buffer)
            undo.pop_all()
        return _BufferWrite(self, buffer)

    def value(self) -> Tensor:
        """Return a copy of the value, in a file without a name beside the store if there is one."""
        layout, store = self.layout, self._engine.store
        memory = mapped_memory(layout.nbytes, None if store is None else store.directories[0])
        with self.begin_write(read=True) as write:
            memory.copy_(write.memory)
        array = own_storage(memory, layout.dtype)
        return array.as_strided(layout.size, layout.stride, array.storage_offset())

    def is_unused(self) -> bool:
        """Return whether nobody reads or writes."""
        return self._users == 0

    def free(self) -> None:
        """Give the bytes on disk and the buffers back."""
        with self._lock:
            self._freed = True
            if self._held is not None:
                self._engine.pool.release(self._held)
                self._held = None
            if self._extent is not None and self._engine.store is not None:
                self._engine.store.free(self._extent)
            self._extent = self.weights = None
        self._passing.leave()

    def commit(self, buffer: Buffer) -> bool:
        """Make what is in `buffer` the value; return whether it is on disk. No other write is under way.

        Where it cannot be written it stays in the buffer, which then is one of the line no longer.
        """
        if self.weights is not None and self.weights.has(buffer.memory[: self.layout.nbytes]):
            return True
        with self._lock:
            before, self._held = self._held, buffer
        try:
            if self._extent is None:
                self._extent = self._allocate()
            self._engine.transfers.need_store().write(self._extent, self._pages(buffer))
        except (BudgetError, OptionError, StoreError) as error:
            self._passing.keep(buffer)
            self._engine.stats.add(disk_write_failures=1)
            warnings.warn(f"{error} The run goes on, with {self.name} in host memory.", stacklevel=2)
            return False
        finally:
            self.weights = None
            if before is not None:
                self._engine.pool.release(before)
        self._engine.stats.add(disk_write_bytes=self.layout.nbytes)
        return True

    def end_write(self, buffer: Buffer, after: Sequence[Event], *, kept: bool) -> None:
        """Give the buffer of a write back, behind `after`, unless it is `kept` because its value is nowhere else."""
        with self._lock:  # readers add their copies
            buffer.after = (*buffer.after, *after)
            if not kept and self._held is buffer:
                self._held = None
        if not kept:
            self._passing.give(buffer)
        self._end_use()

    def _allocate(self) -> Extent:
        return self._engine.transfers.need_store().allocate(self.layout.nbytes, self.name)

    def _pages(self, buffer: Buffer) -> memoryview:
        return buffer.view[: round_up(max(1, self.layout.nbytes), PAGE_BYTES)]

    def _copy(self, buffer: Buffer, dst: Tensor, after: Sequence[Event]) -> Event:
        copied = self._engine.streams.copy(Lane.IN, dst, buffer.first(self.layout.nbytes), after)
        buffer.after = (*(event for event in buffer.after if not event.query()), copied)
        return copied

    def _read(self, buffer: Buffer) -> None:
        """Read the value into a buffer that nothing touches."""
        nbytes = self.layout.nbytes
        with self._lock:
            if self._held is not None:
                buffer.memory[:nbytes].copy_(self._held.memory[:nbytes])
                return
            if self.weights is not None:
                self.weights.read(buffer.view[:nbytes])
            elif self._extent is not None:
                self._engine.transfers.need_store().read(self._extent, self._pages(buffer))
        self._engine.stats.add(disk_read_bytes=nbytes)

    def _begin_use(self) -> None:
        """Have the bytes stay up to `_end_use`; raises `TencacheError` if they are gone."""
        with self._lock:
            if self._freed:
                raise TencacheError(f"{self.name} is not there any more: nothing refers to its parameter.")
            self._users += 1

    def _end_use(self) -> None:
        with self._lock:
            self._users -= 1


class _BufferWrite(HostWrite):
    """A write of a value on disk."""

    def __init__(self, backing: DiskBacking, buffer: Buffer) -> None:
        super().__init__(backing.layout, buffer.memory[: backing.layout.nbytes], (), backing.streams)
        self._backing = backing
        self._buffer: Buffer | None = buffer
        self._kept = False

    def commit(self) -> None:
        """Write the value to disk."""
        assert self._buffer is not None, "the write has ended"
        self._kept = not self._backing.commit(self._buffer)

    def close(self) -> None:
        """Give the buffer back."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._backing.end_write(buffer, self.after, kept=self._kept)
