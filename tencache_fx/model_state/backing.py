"""What keeps the bytes of an offloaded parameter: a pinned buffer, or a disk (`disk_backing.py`).

A backing holds one value, which is copied to the device and replaced as a whole. Who replaces it writes to the memory
of a `HostWrite`, and commits that: of a backing in host memory it is the value itself, of one on disk a buffer whose
bytes become the value when it is committed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.runtime.transfers import Layout


class HostWrite:
    """Host memory of a whole value, `memory` [bytes], to be written to behind the events `after`.

    A context: at its end, what was not committed is dropped, where the backing can; copies that touch the memory have
    to be over then, but for those that the backing has issued.
    """

    def __init__(self, layout: Layout, memory: Tensor, after: Sequence[Event], streams: Streams) -> None:
        self.memory = memory
        self.after = tuple(after)
        self._layout, self._streams = layout, streams

    @property
    def elements(self) -> Tensor:
        """Return the memory as elements, [n], in the order of the parameter's memory.

        A write to it does not raise the backing's `version`.
        """
        return self.memory.view(self._layout.dtype)

    @property
    def shaped(self) -> Tensor:
        """Return the memory in the parameter's size and strides."""
        return self.elements.as_strided(self._layout.size, self._layout.stride)

    def wait_readers(self) -> None:
        """Block the host until the memory may be written to."""
        self._streams.wait_host(self.after)

    def commit(self) -> None:
        """Make what was written the value. May block the host; raises `BudgetError` where it cannot be kept."""

    def close(self) -> None:
        """End the write. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Backing(ABC):
    """The bytes of one parameter. Thread-safe, but for two writes at once."""

    tier: Tier
    layout: Layout

    @property
    def version(self) -> int:
        """Return a number that grows when somebody writes to the tensor that `value` has returned."""
        return 0

    @abstractmethod
    def copy_in(self, dst: Tensor, after: Sequence[Event]) -> Event:
        """Issue the copy of the value to `dst`, device bytes that are there behind `after`.

        From disk, it blocks the host until the value is read; raises `StoreError` if that fails.
        """

    @abstractmethod
    def begin_write(self, *, read: bool) -> HostWrite:
        """Return memory for the next value, which is this one now if it is to be `read`. May block the host."""

    @abstractmethod
    def value(self) -> Tensor:
        """Return the value as a tensor of the CPU: of a backing in host memory one that shares its bytes."""

    @abstractmethod
    def is_unused(self) -> bool:
        """Return whether nothing reads or writes the bytes any more."""

    @abstractmethod
    def free(self) -> None:
        """Give the bytes back; nobody uses the backing any more."""


class HostBacking(Backing):
    """A pinned buffer of the host budget."""

    tier = Tier.HOST

    def __init__(self, layout: Layout, buffer: Buffer, pool: Pool, streams: Streams) -> None:
        self.layout = layout
        self._buffer, self._pool, self._streams = buffer, pool, streams
        with torch.inference_mode(False):  # it counts its versions
            empty = torch.empty(0, dtype=layout.dtype, device="cpu")
            self._value = empty.set_(buffer.memory.untyped_storage(), 0, layout.size, layout.stride)
        self.last_read: Event | None = None  # of the last copy that reads it

    @property
    def version(self) -> int:
        """Return how often the shared tensor was written to: one of a `state_dict`, say."""
        return self._value._version

    def copy_in(self, dst: Tensor, after: Sequence[Event]) -> Event:
        """Issue the copy."""
        self.last_read = self._streams.copy(Lane.IN, dst, self._value, after)
        return self.last_read

    def begin_write(self, *, read: bool) -> HostWrite:
        """Return the value's own memory, which nobody may write to before the last copy that reads it."""
        after = () if self.last_read is None else (self.last_read,)
        return HostWrite(self.layout, self._buffer.first(self.layout.nbytes), after, self._streams)

    def value(self) -> Tensor:
        """Return a tensor that shares the bytes."""
        return self._value

    def is_unused(self) -> bool:
        """Return whether no copy reads it."""
        return self.last_read is None or self.last_read.query()

    def free(self) -> None:
        """Unmap the buffer: its memory goes with the last tensor that shares it."""
        self._pool.discard(self._buffer)
