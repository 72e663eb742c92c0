"""Page-aligned host memory that copies to and from the device go through: one mapping, or a piece of one."""

import contextlib
import ctypes
import mmap
import os
import warnings
import weakref
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from tencache_fx.runtime.streams import Event, Streams

_HUGE_PAGE_BYTES = 2 << 20


class Use(StrEnum):
    """What a buffer is for."""

    SWAP = "offloaded tensors"
    STAGING = "staging"
    ROUND = "optimizer steps"
    PARAMETER = "offloaded parameters"
    GRADIENT = "gradients in host memory"
    STATE = "optimizer state"


@dataclass(slots=True, eq=False)
class Buffer:
    """Page-aligned host memory, acquired or free. `after` are the copies that may still touch it: who issues one sets
    it, and the next owner waits for it. `block` is the buffer that it is a part of, if it is one.
    """

    memory: torch.Tensor
    view: memoryview
    raw: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    use: Use
    pinned: bool
    block: "Buffer | None" = None
    after: tuple[Event, ...] = ()
    requested_bytes: int = 0
    holders: int = 0
    stuck: bool = False
    times_acquired: int = 0
    nbytes: int = field(init=False)
    """The size class."""

    def __post_init__(self) -> None:
        """Ask for the size once: the pool does so several times for each buffer that it hands out."""
        self.nbytes = self.view.nbytes

    def first(self, nbytes: int) -> torch.Tensor:
        """Return the memory of its first bytes."""
        return self.memory if nbytes == self.nbytes else self.memory[:nbytes]

    @property
    def is_zero(self) -> bool:
        """Return whether its memory was new, and so zero, when its holder got it; only for STATE is that known."""
        return self.use is Use.STATE and self.times_acquired == 1

    @property
    def idle(self) -> bool:
        """Return whether nobody has it and no copy touches it."""
        if self.holders:
            return False
        for event in self.after:  # noqa: SIM110 - no generator: this is asked of each buffer that is handed out
            if not event.query():
                return False
        return True

    def piece(self, start: int, nbytes: int, use: Use) -> "Buffer":
        """Return a part of the buffer as one by itself, whose memory has a storage of its own, too."""
        part = slice(start, start + nbytes)
        return Buffer(
            memory=torch.frombuffer(self.view[part], dtype=torch.uint8),
            view=self.view[part],
            raw=self.raw[part],
            use=use,
            pinned=self.pinned,
            block=self,
        )


class Mappings:
    """The mappings there are, for as long as anything has a view of them. One instance exists."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def add(self, mapping: mmap.mmap) -> None:
        """Have forked processes leave `mapping` alone."""
        mapping.madvise(mmap.MADV_DONTFORK)  # else every fork (a data loader's worker) copies all pinned pages at once
        self._live.add(mapping)

    def keep_in_child(self) -> None:
        """Have a forked child never unmap any of its parent's, where something else may be by then.

        Neither when it collects what was garbage already, nor by the interpreter's own end: each gets one reference
        that nobody drops.
        """
        for mapping in self._live:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


_MAPPINGS = Mappings()
os.register_at_fork(after_in_child=_MAPPINGS.keep_in_child)


def new_mapping(nbytes: int) -> mmap.mmap:
    """Return new memory: in huge pages as far as the kernel has some, of which there are 512 times fewer to pin."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # of a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def map_buffer(nbytes: int, use: Use, streams: Streams, *, threads: int | None = None) -> Buffer:
    """Return new memory, a mapping of its own, pinned, by `threads` at most, if these are given.

    One that the driver refuses to pin is not; see `warn_if_unpinned`.
    """
    mapping = new_mapping(nbytes)
    _MAPPINGS.add(mapping)
    raw = np.frombuffer(mapping, dtype=np.uint8)
    pinned = streams.pin(raw, threads)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return Buffer(memory=memory, view=memoryview(mapping), raw=raw, use=use, pinned=pinned)


def warn_if_unpinned(buffer: Buffer) -> bool:
    """Return whether the driver has refused to pin a buffer, and warn of one."""
    if not buffer.pinned:
        warnings.warn(
            f"the driver refused to pin {buffer.nbytes} bytes of host memory; copies will be about 5x slower. "
            "Raise the limit on locked memory (ulimit -l unlimited) or set a smaller host_budget.",
            stacklevel=2,
        )
    return not buffer.pinned
