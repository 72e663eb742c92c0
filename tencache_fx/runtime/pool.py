"""Pinned host buffers, lent by size class: no allocation while training, and never a byte above the host budget.

10Cache (arXiv 2511.14124) keeps a pool of pinned buffers in size classes; here the classes and counts come from the
plan, which knows the largest number that is ever lent at once. Two *uses* never share a buffer, so that trips to disk,
which can fall behind, cannot starve trips to host memory, whose number the plan fixed:

    Use.TRIP      holds a value while it is away in host memory
    Use.STAGING   holds a value only on its way to or from disk; whoever asks may have to wait for one
    Use.ROUND     holds a piece of what an optimizer works on, during its step
    Use.HOME      holds a parameter
    Use.GRADIENT  holds a gradient, from backward until nobody has it any more
    Use.STATE     holds what an optimizer keeps of a parameter

A buffer that is given back while copies still touch it carries their events; whoever takes it next must wait for them.

Every buffer is a mapping of its own, so that any idle byte can make way for a size nobody planned. What was reserved is
remembered as counts by class: idle buffers beyond those counts make way first, and a class that had to make way is
mapped again when a trip of its size comes. So what was reserved together can be lent together again, whatever sizes
came in between.
"""

import bisect
import itertools
import mmap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from tencache_fx.errors import BudgetError, OptionError, TencacheError
from tencache_fx.plan import PoolClass, round_up
from tencache_fx.runtime.streams import STUCK_S, Event, Streams

PAGE_BYTES = 4096
_ROOMY = 2  # a buffer this many times too large serves only when the budget leaves no better one
_POLL_S = 0.02  # CUDA events do not notify; a waiter looks again this often


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
    it, and the next taker waits for it.
    """

    memory: torch.Tensor
    view: memoryview
    raw: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
    use: Use
    pinned: bool
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


class Pool:
    """Lends buffers. Thread-safe; the lock is held while a buffer is mapped, which a planned run does only at first."""

    def __init__(self, streams: Streams, budget_bytes: int, *, patience_s: float = STUCK_S) -> None:
        self._streams = streams
        self._patience_s = patience_s
        self._budget_bytes = budget_bytes
        self._cond = threading.Condition()
        self._free: dict[tuple[Use, int], list[Buffer]] = {}
        self._sizes: dict[Use, list[int]] = {use: [] for use in Use}
        self._buffers: dict[Buffer, None] = {}
        self._counts: Counter[tuple[Use, int]] = Counter()
        self._planned: Counter[tuple[Use, int]] = Counter()
        self._returns = 0
        self._warned = False
        self._closed = False
        self.allocated_bytes = 0
        self.lent_bytes = 0
        self.requested_bytes = 0
        self.high_water_bytes = 0
        self.high_water_requested_bytes = 0

    @property
    def budget_bytes(self) -> int:
        """Return the most bytes that buffers may take together."""
        return self._budget_bytes

    def lent_for(self, use: Use) -> int:
        """Return the bytes of the buffers lent for `use`."""
        with self._cond:
            return sum(buffer.nbytes for buffer in self._buffers if buffer.use is use and buffer.holds)

    def allocated_for(self, use: Use) -> int:
        """Return the bytes of all buffers for `use`, lent or free."""
        with self._cond:
            return sum(buffer.nbytes for buffer in self._buffers if buffer.use is use)

    def resize_budget(self, budget_bytes: int) -> None:
        """Set the budget; gives idle buffers back to the system if need be.

        Raises `OptionError` when buffers in use do not fit the new one.
        """
        with self._cond:
            self._evict(self.allocated_bytes - budget_bytes, keep=Counter())
            if self.allocated_bytes > budget_bytes:
                raise OptionError(
                    f"host_budget {budget_bytes} bytes is below the {self.allocated_bytes} bytes of host memory in "
                    "use; set it before the first step, or call tencache_fx.close() first."
                )
            self._budget_bytes = budget_bytes

    def reserve(self, classes: Iterable[PoolClass], use: Use) -> None:
        """Hold at least `count` buffers of each class, lent ones included; idle buffers of other classes make way.

        They may be evicted later for a size nobody planned, and then come back when they are wanted. Waits for copies
        under way if their buffers must make way. Raises `BudgetError` when the host budget does not allow it.
        """
        wanted: Counter[tuple[Use, int]] = Counter()
        for each in classes:
            wanted[use, round_up(max(1, each.nbytes), PAGE_BYTES)] += each.count
        until = time.monotonic() + self._patience_s
        with self._cond:
            missing = wanted - self._counts
            while not self._make_room(sum(size * count for (_, size), count in missing.items()), keep=wanted):
                if time.monotonic() >= until or all(b.idle for free in self._free.values() for b in free):
                    (_, size), count = max(missing.items(), key=lambda item: item[0][1] * item[1])
                    more = f" (and {len(missing) - 1} more sizes)" if len(missing) > 1 else ""
                    raise BudgetError(
                        f"{count} more pinned buffers of {size} bytes{more} for {use} do not fit the host "
                        f"budget: {self.allocated_bytes} of {self._budget_bytes} bytes are taken; raise host_budget."
                    )
                self._cond.wait(_POLL_S)
                missing = wanted - self._counts
            for (_, size), count in missing.items():
                for _ in range(count):
                    self._map(size, use)
            self._planned |= wanted

    def lend(self, nbytes: int, use: Use) -> Buffer:
        """Return a buffer of at least `nbytes`; the taker orders itself behind `buffer.after`.

        The smallest class that fits wins, and in it a buffer whose copies are over. A dry pool grows by one buffer
        within the budget; staging does not while a reserved buffer that fits is on its way back, since the plan counts
        on their number. Else the caller waits for one.
        Raises `BudgetError` when none can come, or none came for a minute.
        """
        waiting_since = time.monotonic()
        returns = -1
        with self._cond:
            while not self._closed:
                if buffer := self._obtain(nbytes, use):
                    return self._lent(buffer, nbytes)
                if returns != self._returns:
                    returns, waiting_since = self._returns, time.monotonic()
                if not any(self._moving()) or time.monotonic() - waiting_since > self._patience_s:
                    raise BudgetError(
                        f"no pinned buffer of {nbytes} bytes is free for {use}, and the host budget of "
                        f"{self._budget_bytes} bytes has {self._budget_bytes - self.allocated_bytes} left "
                        f"({self.lent_bytes} lent); raise host_budget."
                    )
                self._cond.wait(_POLL_S)
        raise TencacheError("the engine was closed while a copy waited for a pinned buffer.")

    def hold(self, buffer: Buffer) -> None:
        """Add a holder: the buffer is free once every holder gave it back."""
        with self._cond:
            assert buffer.holds > 0, "only a lent buffer can be held once more"
            buffer.holds += 1

    def give_back(self, buffer: Buffer, *after: Event) -> None:
        """Return the buffer; its next taker waits for `after` (of all holders)."""
        with self._cond:
            assert buffer.holds > 0, "a buffer was given back twice"
            buffer.holds -= 1
            buffer.after += after
            if buffer.holds:
                return
            self.lent_bytes -= buffer.nbytes
            self.requested_bytes -= buffer.requested_bytes
            buffer.parked = False
            self._returns += 1
            if not self._closed:
                buffer.after = self._streams.after_return(buffer.memory, buffer.after)
                self._free[buffer.use, buffer.nbytes].append(buffer)
            self._cond.notify_all()

    def discard(self, buffer: Buffer) -> None:
        """Return a buffer that nobody shall get again: its memory goes with the last tensor that shares it."""
        with self._cond:
            if self._closed:
                return
            buffer.holds = 0
            self.lent_bytes -= buffer.nbytes
            self.requested_bytes -= buffer.requested_bytes
            self._returns += 1
            self._unmap(buffer)
            self._cond.notify_all()

    def park(self, buffer: Buffer) -> None:
        """Say that a staging buffer will not come back by itself: nobody should wait for it."""
        with self._cond:
            buffer.parked = True
            self._cond.notify_all()

    def stop(self) -> None:
        """Lend no more; whoever waits for a buffer gets `TencacheError`."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()

    def close(self) -> None:
        """Give all memory back to the system. Every copy must be over; buffers still lent become invalid."""
        self.stop()
        with self._cond:
            for buffer in list(self._buffers):
                self._unmap(buffer)
            self._free.clear()

    def _obtain(self, nbytes: int, use: Use) -> Buffer | None:
        """Return a fitting free buffer, else a new one, else any that is free, else a new one in place of idle ones.

        A reserved class that lacks buffers gets the one that is missing first: with a larger one instead, what was
        reserved together might not fit together.
        """
        size = round_up(max(1, nbytes), PAGE_BYTES)
        if short := self._short_class(size, use):
            if buffer := self._find(nbytes, use, short):
                return buffer
            if self._make_room(short, keep=Counter()):
                self._map(short, use)
                return self._find(nbytes, use, short)
        if buffer := self._find(nbytes, use, size * _ROOMY if use is Use.TRIP else self._budget_bytes):
            return buffer
        if use is Use.STAGING and any(
            self._planned[use, b.nbytes] and b.nbytes >= nbytes for b in self._moving() if b.use is use
        ):
            return None
        if self.allocated_bytes + size > self._budget_bytes:
            if buffer := self._find(nbytes, use, self._budget_bytes):
                return buffer
            if not self._make_room(size, keep=Counter()):
                return None
        self._map(size, use)
        return self._find(nbytes, use, size)

    def _short_class(self, size: int, use: Use) -> int | None:
        """Return the reserved class that a request of `size` belongs to, if some of its buffers made way for others."""
        sizes = self._sizes[use]
        near = sizes[bisect.bisect_left(sizes, size) : bisect.bisect_right(sizes, size * _ROOMY)]
        planned = next((each for each in near if self._planned[use, each]), None)
        return planned if planned is not None and self._counts[use, planned] < self._planned[use, planned] else None

    def _find(self, nbytes: int, use: Use, most_bytes: int) -> Buffer | None:
        sizes = self._sizes[use]
        fitting = sizes[bisect.bisect_left(sizes, nbytes) : bisect.bisect_right(sizes, most_bytes)]
        for free in (self._free[use, size] for size in fitting):
            for i, buffer in enumerate(free):
                if buffer.idle:
                    buffer.after = ()
                    return free.pop(i)
            if free:  # an idle one of the next class may be wanted for what that was reserved for
                return free.pop(0)
        return None

    def _lent(self, buffer: Buffer, nbytes: int) -> Buffer:
        buffer.holds = 1
        buffer.requested_bytes = nbytes
        self.lent_bytes += buffer.nbytes
        self.requested_bytes += nbytes
        if self.lent_bytes > self.high_water_bytes:
            self.high_water_bytes = self.lent_bytes
            self.high_water_requested_bytes = self.requested_bytes
        return buffer

    def _moving(self) -> Iterator[Buffer]:
        """Yield the buffers that will come free without the caller's doing."""
        for buffer in self._buffers:
            if buffer.holds:
                if buffer.use is Use.STAGING and not buffer.parked:
                    yield buffer
            elif not buffer.idle:
                yield buffer

    def _make_room(self, nbytes: int, keep: "Counter[tuple[Use, int]]") -> bool:
        """Evict what it takes to map `nbytes` more within the budget; say whether they fit now."""
        if nbytes <= self._budget_bytes:
            self._evict(self.allocated_bytes + nbytes - self._budget_bytes, keep)
        return self.allocated_bytes + nbytes <= self._budget_bytes

    def _evict(self, excess_bytes: int, keep: "Counter[tuple[Use, int]]") -> None:
        """Unmap idle buffers beyond the counts in `keep` until `excess_bytes` are gone; none if they are not enough.

        Those that nobody reserved go first.
        """
        if excess_bytes <= 0:
            return
        idle = dict.fromkeys((*self._idle_beyond(keep | self._planned), *self._idle_beyond(keep)))
        if sum(buffer.nbytes for buffer in idle) < excess_bytes:
            return
        for buffer in idle:
            if excess_bytes <= 0:
                break
            excess_bytes -= buffer.nbytes
            self._free[buffer.use, buffer.nbytes].remove(buffer)
            self._unmap(buffer)

    def _idle_beyond(self, keep: "Counter[tuple[Use, int]]") -> Iterator[Buffer]:
        for key, free in self._free.items():
            spare = max(0, self._counts[key] - keep[key])
            yield from itertools.islice((buffer for buffer in free if buffer.idle), spare)

    def _map(self, size: int, use: Use) -> None:
        """Add a free buffer of `size`; the caller has made room for it."""
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_DONTFORK)  # else every fork (a data loader's worker) copies all pinned pages at once
        raw = np.frombuffer(mapping, dtype=np.uint8)
        pinned = self._streams.pin(raw)
        if not pinned and not self._warned:
            self._warned = True
            warnings.warn(
                f"the driver refused to pin {size} bytes of host memory; copies will be about 5x slower. "
                "Raise the limit on locked memory (ulimit -l unlimited) or set a smaller host_budget.",
                stacklevel=2,
            )
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        buffer = Buffer(memory=memory, view=memoryview(mapping), raw=raw, use=use, pinned=pinned)
        self._buffers[buffer] = None
        self.allocated_bytes += size
        if (use, size) not in self._free:
            self._free[use, size] = []
            bisect.insort(self._sizes[use], size)
        self._free[use, size].append(buffer)
        self._counts[use, size] += 1

    def _unmap(self, buffer: Buffer) -> None:
        """Unregister; the mapping itself goes when the last view of it does."""
        if buffer.pinned:
            self._streams.unpin(buffer.raw)
        self.allocated_bytes -= buffer.nbytes
        self._counts[buffer.use, buffer.nbytes] -= 1
        del self._buffers[buffer]
