"""Page-aligned host memory that copies to and from the device go through: one mapping, or a piece of one."""

import mmap
import warnings
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from tencache_fx.runtime.streams import Event, Streams

PAGE_BYTES = 4096


class Use(StrEnum):
    """What a buffer is for."""

    TRIP = "host trips"
    STAGING = "staging"
    ROUND = "optimizer steps"
    HOME = "parameters at home"
    GRADIENT = "gradients at home"
    STATE = "optimizer state"


@dataclass(slots=True, eq=False)
class Buffer:
    """Page-aligned host memory, lent or free. `after` are the copies that may still touch it: whoever issues one sets
    it, and the next taker waits for it. `host` is the buffer that it is a piece of, if it is one.
    """

    memory: torch.Tensor
    view: memoryview
    raw: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    use: Use
    pinned: bool
    host: "Buffer | None" = None
    after: tuple[Event, ...] = ()
    requested_bytes: int = 0
    holds: int = 0
    parked: bool = False

    @property
    def nbytes(self) -> int:
        """Return the size class."""
        return self.view.nbytes

    @property
    def idle(self) -> bool:
        """Say whether nobody has it and no copy touches it."""
        return self.holds == 0 and all(event.query() for event in self.after)

    def piece(self, start: int, nbytes: int, use: Use) -> "Buffer":
        """Return a part of the buffer as one by itself, whose memory has a storage of its own, too."""
        part = slice(start, start + nbytes)
        return Buffer(
            memory=torch.frombuffer(self.view[part], dtype=torch.uint8),
            view=self.view[part],
            raw=self.raw[part],
            use=use,
            pinned=self.pinned,
            host=self,
        )


def map_buffer(nbytes: int, use: Use, streams: Streams, *, warn: bool) -> Buffer:
    """Return new memory, a mapping of its own, pinned; one that the driver refuses to pin is not, which may `warn`."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)  # else every fork (a data loader's worker) copies all pinned pages at once
    raw = np.frombuffer(mapping, dtype=np.uint8)
    pinned = streams.pin(raw)
    if not pinned and warn:
        warnings.warn(
            f"the driver refused to pin {nbytes} bytes of host memory; copies will be about 5x slower. "
            "Raise the limit on locked memory (ulimit -l unlimited) or set a smaller host_budget.",
            stacklevel=2,
        )
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    return Buffer(memory=memory, view=memoryview(mapping), raw=raw, use=use, pinned=pinned)
