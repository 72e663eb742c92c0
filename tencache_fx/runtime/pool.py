"""Pinned host buffers, by size class: no allocation while training, and never a byte above the host budget.

10Cache (arXiv 2511.14124) keeps a pool of pinned buffers in size classes; here the classes and counts come from the
plan, which knows the largest number that is ever acquired at once. Two *uses* never share a buffer, so that transfers
to disk, which can fall behind, cannot starve those to host memory, whose number the plan fixed:

    Use.SWAP       holds a value while it is offloaded to host memory
    Use.STAGING    holds a value only while it is copied to or from disk; `acquire` may have to wait for one
    Use.ROUND      holds a piece of the tensors that an optimizer updates on the host, during its step
    Use.PARAMETER  holds an offloaded parameter
    Use.GRADIENT   holds a gradient, from backward until nobody has it any more
    Use.STATE      holds the optimizer's state of a parameter

A buffer that is released while copies still touch it carries their events; its next owner must wait for them.

Every buffer is a mapping of its own, so that any idle byte can make way for a size nobody planned. What was reserved is
remembered as counts by class: idle buffers beyond those counts make way first, and a class that had to make way is
mapped again when a transfer of its size comes. So what was reserved together can be acquired together again, whatever
sizes came in between.

Gradients are the exception to both: what is reserved for them is only *promised*, to be mapped when it is wanted, and
with budget to spare they get parts of free transfer buffers (`suballocator.py`). Their owners may keep them, so a
buffer is opened for that only while all that was reserved could be mapped beside the open ones: transfers never wait.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tencache_fx.errors import BudgetError, OptionError, TencacheError
from tencache_fx.planning.plan import PoolClass
from tencache_fx.runtime.buffers import Buffer, Use, map_buffer, warn_if_unpinned
from tencache_fx.runtime.free_buffers import FreeBuffers
from tencache_fx.runtime.mapped_ahead import MappedAhead
from tencache_fx.runtime.reserved_buffers import Classes, ReservedBuffers, counted
from tencache_fx.runtime.streams import STUCK_S, Event, Streams
from tencache_fx.runtime.suballocator import Suballocator
from tencache_fx.runtime.waiters import Waiters
from tencache_fx.stages import STAGES
from tencache_fx.units import PAGE_BYTES, at_least, round_up

_ROOMY = 2  # a buffer this many times too large serves only when the budget leaves no better one


class Pool:
    """Owns the buffers. Thread-safe; the lock is held while one is mapped, which a planned run does only at first."""

    def __init__(self, streams: Streams, budget_bytes: int, *, patience_s: float = STUCK_S) -> None:
        self._streams, self._patience_s, self._budget_bytes = streams, patience_s, budget_bytes
        self._lock = threading.RLock()  # taken by itself: an interrupt in `Condition.__enter__` would leave it taken
        self._waiters = Waiters(self._lock)
        self._free = FreeBuffers()
        self._buffers: dict[Buffer, None] = {}
        self._counts: Classes = Counter()
        self._reserved = ReservedBuffers()
        self._suballocator = Suballocator()
        self._to_come: Callable[[], int] = int
        self._returns = 0
        self._warned = self._closed = False
        self.ahead = MappedAhead(streams, self._lock, lambda: self.room_bytes)
        self._acquired_by_use = dict.fromkeys(Use, 0)
        self.allocated_bytes = self.acquired_bytes = self.requested_bytes = 0
        self.high_water_bytes = self.high_water_requested_bytes = 0

    @property
    def budget_bytes(self) -> int:
        """Return the most bytes that buffers may take together."""
        return self._budget_bytes

    def acquired_for(self, use: Use) -> int:
        """Return the bytes of the buffers acquired for `use`."""
        return self._acquired_by_use[use]

    def held_for(self, use: Use) -> int:
        """Return the bytes of all buffers for `use`: acquired, free, or promised."""
        with self._lock:
            held = (self._counts | self._reserved.planned).items()
            return sum(size * count for (each, size), count in held if each is use)

    @property
    def room_bytes(self) -> int:
        """Return the bytes of the budget that are neither taken nor promised."""
        with self._lock:
            return self._budget_bytes - self.allocated_bytes - self._owed_bytes(Counter())

    def keep_free(self, to_come: Callable[[], int]) -> None:
        """Keep `to_come()` bytes, which nobody reserves but which will come, out of what gradients may share.

        It is called with the pool's lock held.
        """
        self._to_come = to_come

    def raise_budget(self, budget_bytes: int) -> None:
        """Raise the budget to this at least; a waiting `acquire` gets a buffer that it has room for."""
        with self._lock:
            self._budget_bytes = max(self._budget_bytes, budget_bytes)
            self._waiters.wake()

    def resize_budget(self, budget_bytes: int) -> None:
        """Set the budget. If need be idle buffers are unmapped, and mapped again when they are wanted.

        Waits for copies under way. Raises `OptionError`, and changes nothing, when the buffers in use do not fit.
        """
        with self._lock:
            if not self._make_way(int, Counter(), budget_bytes):
                used_bytes = self.allocated_bytes - self._free.idle_bytes
                raise OptionError(
                    f"host_budget {budget_bytes} bytes is below the {used_bytes} bytes of host memory in use; drop "
                    "what uses it (models with offloaded parameters, their optimizers, losses that wait for their "
                    "backward), or call tencache_fx.close() first."
                )
            self._budget_bytes = budget_bytes
            self.ahead.trim(budget_bytes - self.allocated_bytes)
            self._waiters.wake()

    def make_room(self, sizes: Iterable[int], use: Use) -> None:
        """See that new buffers of these sizes fit, all of them; nothing is reserved. Raises `BudgetError` if not."""
        nbytes = sum(round_up(max(1, size), PAGE_BYTES) for size in sizes)
        with self._lock:
            if not self._make_way(lambda: nbytes, Counter(), self._budget_bytes):
                used_bytes = self.allocated_bytes - self._free.idle_bytes
                raise BudgetError(
                    f"{use} need {nbytes} bytes of pinned memory; the host budget of {self._budget_bytes} bytes has "
                    f"{self._budget_bytes - used_bytes} left; raise host_budget to {at_least(used_bytes + nbytes)} or "
                    "more."
                )

    def missing_sizes(self, classes: Iterable[PoolClass], use: Use) -> list[int]:
        """Return the sizes of the buffers that `reserve` would map now."""
        with self._lock:
            return [size for _, size in self._missing(counted(classes, use)).elements()]

    def reserve(self, classes: Iterable[PoolClass], use: Use) -> None:
        """Map at least `count` buffers of each class, acquired ones included; evict idle ones of other classes.

        They may be evicted later for a size nobody planned, and are mapped again when they are wanted. Waits for copies
        under way if their buffers must make way. Raises `BudgetError` when the host budget does not allow it.
        """
        with self._lock:
            for _, size in self._set_aside(classes, use).elements():
                self._map(size, use)

    def promise(self, classes: Iterable[PoolClass], use: Use) -> None:
        """As `reserve`, but map buffers only when they are wanted."""
        with self._lock:
            self._set_aside(classes, use)

    def forget_reserved(self, uses: Collection[Use]) -> None:
        """Reserve nothing for these uses any more, and unmap all of their free buffers, once no copy touches them."""
        with self._lock:
            self._reserved.forget(uses)
            self.ahead.trim(0)
            for buffer in self._free.take_all(uses):
                self._streams.wait_host(buffer.after)
                self._unmap(buffer)

    def acquire(self, nbytes: int, use: Use) -> Buffer:
        """Return a buffer of at least `nbytes`; its owner orders itself behind `buffer.after`.

        The smallest class that fits wins, and in it a buffer whose copies are over. A dry pool grows by one buffer
        within the budget; staging does not while a reserved buffer that fits will be released, since the plan counts
        on their number. Else the caller waits; raises `BudgetError` when none can come, or none came for a minute.
        """
        returns, waiting_since = -1, 0.0
        with self._lock:
            while not self._closed:
                if buffer := self._obtain(nbytes, use):
                    return self._acquired(buffer, nbytes)
                if returns != self._returns:
                    returns, waiting_since = self._returns, time.monotonic()
                if not any(self._moving()) or time.monotonic() - waiting_since > self._patience_s:
                    least_bytes = self.allocated_bytes + round_up(max(1, nbytes), PAGE_BYTES)
                    raise BudgetError(
                        f"no pinned buffer of {nbytes} bytes is free for {use}, and the host budget of "
                        f"{self._budget_bytes} bytes has {self._budget_bytes - self.allocated_bytes} left "
                        f"({self.acquired_bytes} in use); raise host_budget to {at_least(least_bytes)} or more."
                    )
                self._waiters.wait()
        raise TencacheError("the engine was closed while a copy waited for a pinned buffer.")

    def acquire_reserved(self, nbytes: int, use: Use) -> Buffer | None:
        """Return a buffer as `acquire` does; None where that would take memory that is not reserved."""
        with self._lock:
            buffer = None if self._closed else self._obtain(nbytes, use, grow=False)
            return None if buffer is None else self._acquired(buffer, nbytes)

    def retain(self, buffer: Buffer) -> None:
        """Add a holder: the buffer is free once every holder has released it."""
        with self._lock:
            assert buffer.holders > 0, "only an acquired buffer can be retained"
            buffer.holders += 1

    def release(self, buffer: Buffer, *after: Event) -> None:
        """Release the buffer; its next owner waits for `after` (of all holders)."""
        with self._lock:
            assert buffer.holders > 0, "a buffer was released twice"
            buffer.holders -= 1
            buffer.after += after
            if buffer.holders:
                return
            self.acquired_bytes -= buffer.nbytes
            self._acquired_by_use[buffer.use] -= buffer.nbytes
            self.requested_bytes -= buffer.requested_bytes
            buffer.stuck = False
            self._returns += 1
            if not self._closed:
                buffer.after = self._streams.after_return(buffer.memory, buffer.after)
                free = buffer if buffer.block is None else self._suballocator.free(buffer)
                if free is not None:
                    self._free.put(free)
            self._waiters.wake()

    def discard(self, buffer: Buffer) -> None:
        """Release a buffer for good: its memory goes with the last tensor that shares it."""
        with self._lock:
            if self._closed:
                return
            assert buffer.block is None, "a part is released to its block"
            buffer.holders = 0
            self.acquired_bytes -= buffer.nbytes
            self._acquired_by_use[buffer.use] -= buffer.nbytes
            self.requested_bytes -= buffer.requested_bytes
            self._returns += 1
            self._unmap(buffer)
            self._waiters.wake()

    def mark_stuck(self, buffer: Buffer) -> None:
        """Note that a staging buffer will not be released by itself: nobody should wait for it."""
        with self._lock:
            buffer.stuck = True
            self._waiters.wake()

    def stop(self) -> None:
        """Refuse `acquire` from now on; one that waits for a buffer raises `TencacheError`."""
        with self._lock:
            self._closed = True
            self._waiters.wake()

    def close(self) -> None:
        """Unmap all memory. Every copy must be over; buffers still in use become invalid."""
        self.stop()
        self.ahead.close()
        with self._lock:
            for buffer in list(self._buffers):
                self._unmap(buffer)
            self._free.clear()
            self._suballocator = Suballocator()

    def _set_aside(self, classes: Iterable[PoolClass], use: Use) -> Classes:
        """Make room for the buffers of `classes` that are missing, and remember them all; return the missing ones."""
        wanted = counted(classes, use)
        aside_bytes = self._owed_bytes(self._suballocator.opened) - self._owed_bytes(Counter())  # for open buffers

        def needed_bytes() -> int:
            missing_bytes = sum(size * count for (_, size), count in self._missing(wanted).items())
            return missing_bytes and aside_bytes + missing_bytes

        if not self._make_way(needed_bytes, wanted, self._budget_bytes):
            missing = self._missing(wanted)
            (_, size), count = max(missing.items(), key=lambda item: item[0][1] * item[1])
            more = f" (and {len(missing) - 1} more sizes)" if len(missing) > 1 else ""
            raise BudgetError(
                f"{count} more pinned buffers of {size} bytes{more} for {use} do not fit the host "
                f"budget: {self.allocated_bytes} of {self._budget_bytes} bytes are in use; raise host_budget to "
                f"{at_least(needed_bytes() + self.allocated_bytes - self._free.idle_beside(wanted))} or more."
            )
        for _, size in wanted:
            self._free.know(use, size)
        self._reserved.planned |= wanted
        return self._missing(wanted)

    def _missing(self, wanted: Classes) -> Classes:
        """Return the buffers that are neither mapped nor acquired as a part of another."""
        pieces = Counter((b.use, self._class_of(b.nbytes, b.use) or b.nbytes) for b in self._suballocator.parts())
        return wanted - self._counts - pieces

    def _obtain(self, nbytes: int, use: Use, *, grow: bool = True) -> Buffer | None:
        """Return a fitting free buffer, else a new one, else any that is free, else a new one in place of idle ones.

        A reserved class that lacks buffers gets the missing one first, or what was reserved might not fit together. A
        transfer gets a new one before a much larger one. A gradient without a fitting buffer gets a part of another
        rather than a new one. Without `grow`, only buffers that are reserved are new.
        """
        size = round_up(nbytes or 1, PAGE_BYTES)
        roomy = size * _ROOMY if use is Use.SWAP or use is Use.GRADIENT else self._budget_bytes
        short = self._short_class(size, use)
        if buffer := self._free.take(nbytes, use, short or roomy):
            return buffer
        if use is Use.GRADIENT and (buffer := self._suballocate(size)):
            return buffer
        if short and self._make_room(short, Counter()):
            self._map(short, use)
            return self._free.take(nbytes, use, short)
        if short and (buffer := self._free.take(nbytes, use, roomy)):
            return buffer
        if use is Use.STAGING and any(
            self._reserved.planned[use, b.nbytes] and b.nbytes >= nbytes for b in self._moving() if b.use is use
        ):
            return None
        if not grow:
            return None
        if self.allocated_bytes + size > self._budget_bytes:
            exact = use is Use.SWAP and self._make_room(size, Counter())  # memory is scarce: a larger one wastes it
            buffer = None if exact else self._free.take(nbytes, use, self._budget_bytes)
            if buffer or not (exact or self._make_room(size, Counter())):
                return buffer
        self._map(size, use)
        return self._free.take(nbytes, use, size)

    def _short_class(self, size: int, use: Use) -> int | None:
        """Return the reserved class of a request, if some of its buffers are promised, made way, or are open now."""
        key = use, self._class_of(size, use) or 0
        here = self._counts.get(key, 0) - self._suballocator.opened.get(key, 0)
        return key[1] if here < self._reserved.planned.get(key, 0) else None

    def _class_of(self, size: int, use: Use) -> int | None:
        """Return the reserved class that a request of `size` belongs to."""
        return self._reserved.first_of(use, self._free.sizes(use, size, size * _ROOMY))

    def _suballocate(self, size: int) -> Buffer | None:
        """Return a part of a transfer buffer: of an open one, else of an idle one, else of one that will be idle."""
        if part := self._suballocator.place(size):
            return part
        if (block := self._free.find_largest(Use.SWAP, size, self._may_open)) is None:
            return None
        self._free.remove(block)
        return self._suballocator.open(block, size)

    def _may_open(self, size: int) -> bool:
        """Return whether all that was reserved could still be mapped if a transfer buffer were never released."""
        opened = {**(now := self._suballocator.opened), (Use.SWAP, size): now[Use.SWAP, size] + 1}
        left_bytes = self._budget_bytes - self.allocated_bytes - self._owed_bytes(opened)
        return left_bytes >= 0 and left_bytes >= self._to_come()

    def _owed_bytes(self, opened: Mapping[tuple[Use, int], int]) -> int:
        return self._reserved.owed_bytes(self._counts, opened)

    def _acquired(self, buffer: Buffer, nbytes: int) -> Buffer:
        buffer.holders, buffer.requested_bytes, buffer.times_acquired = 1, nbytes, buffer.times_acquired + 1
        if buffer.block is None:
            key = buffer.use, buffer.nbytes
            acquired = self._counts[key] - self._suballocator.opened.get(key, 0) - len(self._free.of(*key))
            self._reserved.most[key] = max(acquired, self._reserved.most.get(key, 0))
        self.acquired_bytes += buffer.nbytes
        self._acquired_by_use[buffer.use] += buffer.nbytes
        self.requested_bytes += nbytes
        if self.acquired_bytes > self.high_water_bytes:
            self.high_water_bytes = self.acquired_bytes
            self.high_water_requested_bytes = self.requested_bytes
        return buffer

    def _moving(self) -> Iterator[Buffer]:
        """Yield the buffers that will come free without the caller's doing."""
        for buffer in self._buffers:
            if (buffer.use is Use.STAGING and not buffer.stuck) if buffer.holders else not buffer.idle:
                yield buffer

    def _make_way(self, needed_bytes: Callable[[], int], keep: Classes, budget_bytes: int) -> bool:
        """Make room within such a budget, once copies under way are over if need be; return whether there is."""
        until = time.monotonic() + self._patience_s
        while not (fits := self._make_room(needed_bytes(), keep, budget_bytes)):
            if time.monotonic() >= until or self._free.all_idle:
                break
            self._waiters.wait()
        return fits

    def _make_room(self, nbytes: int, keep: Classes, budget_bytes: int | None = None) -> bool:
        """Evict what it takes to map `nbytes` more within the budget; return whether they fit now."""
        budget_bytes = self._budget_bytes if budget_bytes is None else budget_bytes
        if nbytes <= budget_bytes:
            self._evict(self.allocated_bytes + nbytes - budget_bytes, keep)
        return self.allocated_bytes + nbytes <= budget_bytes

    def _evict(self, excess_bytes: int, keep: Classes) -> None:
        """Unmap idle buffers beyond `keep`, unreserved ones first, until `excess_bytes` are gone; none if too few."""
        for buffer in self._free.find_idle(excess_bytes, self._counts, (keep | self._reserved.planned, keep)):
            self._free.remove(buffer)
            self._unmap(buffer)

    def _map(self, size: int, use: Use) -> None:
        """Add a free buffer of `size`; the caller has made room for it."""
        with STAGES.stage("pinning"):
            if (buffer := self.ahead.take(size, use)) is None:
                self.ahead.trim(self._budget_bytes - self.allocated_bytes - size)
                buffer = map_buffer(size, use, self._streams)
        self._warned = self._warned or warn_if_unpinned(buffer)
        self._buffers[buffer] = None
        self.allocated_bytes += size
        self._free.know(use, size)
        self._free.put(buffer)
        self._counts[use, size] += 1

    def _unmap(self, buffer: Buffer) -> None:
        """Unregister; the mapping itself goes when the last view of it does."""
        if buffer.pinned:
            self._streams.unpin(buffer.raw)
        self.allocated_bytes -= buffer.nbytes
        self._counts[buffer.use, buffer.nbytes] -= 1
        del self._buffers[buffer]
