"""The optimizer's state of a parameter, on disk, and the pipeline that updates it piece by piece.

    read piece k + 1  |  update piece k  |  write piece k - 1

A piece has some elements of each array, one part behind the other, in an extent of its own that is written where it
was read. If that fails, its buffer keeps it from then on: each piece is always whole, the old or the new.
"""

import contextlib
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass

import torch
from torch import Tensor

from tencache_fx.errors import BudgetError, StoreError
from tencache_fx.model_state.counted_scalars import CountedScalars
from tencache_fx.model_state.host_state import mapped_memory, own_storage
from tencache_fx.model_state.split_master import Remainder, decode_into, drop_changed
from tencache_fx.model_state.stored_form import FP32, Stored, StoredForm, by_form, parts_of, state_bytes, store_values
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.store import Extent, Store
from tencache_fx.runtime.worker import Worker
from tencache_fx.units import PAGE_BYTES, round_up

_MOST_BYTES = 24 << 20  # of a buffer
_SHARE = 8  # what of the host budget the line's buffers take at most
_DEPTH = 5  # buffers: two being read, one updated, two being written
_AHEAD = 2


def line_bytes(host_budget_bytes: int) -> int:
    """Return the host memory that the line takes of such a budget, from its first pass on."""
    return _DEPTH * _buffer_bytes(host_budget_bytes)


def _buffer_bytes(host_budget_bytes: int) -> int:
    pages = host_budget_bytes // _SHARE // _DEPTH // PAGE_BYTES
    return min(_MOST_BYTES, max(1, pages) * PAGE_BYTES)


Work = Callable[[slice, Sequence[Tensor]], None]
"""Updates the arrays of one piece, given which elements of the parameter these are."""


@dataclass(slots=True, eq=False)
class _Piece:
    part: slice
    extent: Extent
    writing: "Future[None] | None" = None
    kept: Buffer | None = None  # the value, after a write that failed

    @property
    def count(self) -> int:
        return int(self.part.stop - self.part.start)


class DiskState(Remainder):
    """The arrays of one parameter, of `forms` by name. `values` has their first values: each a tensor, or one number.

    `place` is NVME until the store is closed, then None. Raises `BudgetError` or `StoreError` when there is no room.
    """

    def __init__(
        self,
        line: "DiskLine",
        parameter: Tensor,
        forms: Mapping[str, StoredForm],
        values: Mapping[str, Tensor | Stored | float],
        label: str,
    ) -> None:
        self.layout = parameter.size(), parameter.stride()
        self.forms = dict(forms)
        self.made: frozenset[str] = frozenset()  # set by the optimizer: the arrays that its class's steps have made
        self.shown: tuple[frozenset[str], dict[str, Tensor]] | None = None  # what `shown_of` says, and of which `made`
        self.counted = CountedScalars()
        self.place: Tier | None = Tier.NVME
        self.tensors: dict[str, Tensor] = {}  # none of them is in memory
        self.nbytes = state_bytes(forms.values(), parameter.numel())
        self._line = line
        self._left: dict[str, Tensor] | None = None
        self._lost: StoreError | None = None
        self.pieces: list[_Piece] = []
        weakref.finalize(self, line.free_later, self.pieces).atexit = False
        line.drain()
        unit = max(part.per for part in parts_of(forms.values()))
        most = line.buffer_bytes // state_bytes(forms.values(), unit) * unit  # elements
        for start in range(0, parameter.numel(), most):
            part = slice(start, min(start + most, parameter.numel()))
            nbytes = state_bytes(forms.values(), part.stop - part.start)
            self.pieces.append(_Piece(part, line.store.allocate(nbytes, f"the optimizer's state of {label}")))

        def fill(part: slice, arrays: Sequence[Tensor]) -> None:
            store_values(forms, arrays, {name: _part_of(values[name], parameter, part) for name in forms})

        line.run(self, fill, reads=False)

    def read(self) -> dict[str, Tensor]:
        """Return the arrays, in the parameter's shape: decoded, where what is kept is not an element's own.

        They are in a file without a name beside the store: host memory has as much of them as it has room for. Raises
        `StoreError` when they cannot be read.
        """
        if self._lost is not None:
            raise StoreError(str(self._lost)) from self._lost
        if self._left is not None:
            return self._left
        size, stride = self.layout
        count = size.numel()
        forms = tuple(self.forms.values())
        ordinary = [form if form.is_elementwise else FP32 for form in forms]
        found = mapped_memory(state_bytes(ordinary, count), self._line.store.directories[0])
        arrays = [own_storage(part.view(torch.uint8), part.dtype) for part in _arrays(found, count, ordinary)]

        def copy(part: slice, pieces: Sequence[Tensor]) -> None:
            for array, form, parts in zip(arrays, forms, by_form(forms, pieces), strict=True):
                if form.reads_weight and self.weight is not None:
                    decode_into(array[part], [self.weight[part], *parts])
                else:
                    array[part].copy_(form.decode(parts))

        self._line.run(self, copy, writes=False)
        return {
            name: array.as_strided(size, stride, array.storage_offset())
            for name, array in zip(self.forms, arrays, strict=True)
        }

    def leave(self) -> None:
        """Leave the store, for good: `read` finds the arrays elsewhere, or raises what stopped this."""
        try:
            self._left = self.read()
        except StoreError as error:
            self._lost = error
            raise
        finally:
            self.place = None

    def _drop_changed(self, before: Tensor, now: Tensor) -> None:
        self._line.run(self, lambda part, arrays: drop_changed(arrays[:2], before[part], now[part]))

    def begin(self, work: Work) -> "Future[None]":
        """Begin to have all pieces updated by `work`, in order; see `DiskLine.begin`."""
        return self._line.begin(self, work)


def flat_as(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of `value`, [n], in the order of `parameter`'s memory."""
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


def _part_of(value: Tensor | Stored | float, parameter: Tensor, part: slice) -> Tensor | Stored | float:
    if isinstance(value, Stored):
        return value.of(part)
    return flat_as(value, parameter)[part] if isinstance(value, Tensor) else value


@dataclass(slots=True, eq=False)
class _Pass:
    """All pieces of one state, worked on in order."""

    state: DiskState
    work: Work
    reads: bool
    writes: bool
    left: int
    done: "Future[None]"


class DiskLine:
    """Reads pieces, updates them in a thread of its own, and writes them; passes may overlap."""

    def __init__(self, buffers: ObjectBuffers, pool: Pool, store: Store, count: Callable[..., None]) -> None:
        self.store = store
        self.buffer_bytes = _buffer_bytes(pool.budget_bytes)
        self._acquire, self._pool = buffers.acquire_or_wait, pool
        self._count = count  # adds to counters
        self._buffers: deque[Buffer] = deque()
        self._acquired = 0
        self._free = threading.Condition()
        self._worker = Worker("tencache-update-disk")
        self._readers = Worker("tencache-state-read", 2)
        self._writers = Worker("tencache-state-write", 2)
        self._coming: deque[tuple[_Pass, _Piece, Buffer, Future[None]]] = deque()
        self._waiting: deque[tuple[_Pass, _Piece]] = deque()
        self._states: weakref.WeakSet[DiskState] = weakref.WeakSet()
        self._gone: deque[list[_Piece]] = deque()
        self._draining = threading.Lock()

    def run(self, state: DiskState, work: Work, *, reads: bool = True, writes: bool = True) -> None:
        """Do one pass over a state's pieces; returns when `work` is done, if not yet written. Raises what failed."""
        self.begin(state, work, reads=reads, writes=writes).result()

    def begin(self, state: DiskState, work: Work, *, reads: bool = True, writes: bool = True) -> "Future[None]":
        """Begin a pass, behind those that were begun before it; those over the same state are done by now."""
        begun = _Pass(state, work, reads, writes, len(state.pieces), Future())
        if not state.pieces:
            begun.done.set_result(None)
        self.drain()
        self._states.add(state)
        self._waiting.extend([(begun, piece) for piece in state.pieces])
        self._worker.begin(self._do_all)
        return begun.done

    def free_later(self, pieces: list[_Piece]) -> None:
        """Let the next runtime call free the disk space of a state: safe to call from a finalizer."""
        self._gone.append(pieces)

    def drain(self) -> None:
        """Free the disk space and buffers of dead states, once none of their pieces is being written."""
        with self._draining:
            for _ in range(len(self._gone)):
                pieces = self._gone.popleft()
                if any(piece.writing is not None and not piece.writing.done() for piece in pieces):
                    self._gone.append(pieces)
                    continue
                for piece in pieces:
                    self.store.free(piece.extent)
                    if piece.kept is not None:
                        self._pool.release(piece.kept)

    def leave_store(self) -> None:
        """Read all states from the store, which is about to be closed, to where `read` finds them.

        Raises what the last one raised that could not be read, once all others were.
        """
        with contextlib.ExitStack() as steps:
            for state in tuple(self._states):  # reading one adds to this set
                steps.callback(state.leave)

    def stop(self) -> None:
        """Finish all work, write everything, and join the threads."""
        for threads in (self._worker, self._readers, self._writers):
            threads.stop()

    def _do_all(self) -> None:
        """Work on all pieces there are, those of others too: who gave them may have been interrupted behind that."""
        while self._waiting or self._coming:
            with contextlib.suppress(BaseException):  # the pass has it
                self._do_one()

    def _do_one(self) -> None:
        """Work on the next piece, while those behind it are read."""
        self._read_ahead_or_fail(wait=True)
        going, piece, buffer, read = self._coming.popleft()
        writing = False
        try:
            read.result()
            if going.done.done():
                return  # an earlier piece failed
            self._read_ahead_or_fail(wait=False)  # this piece may have the only buffer
            going.work(piece.part, _arrays(buffer.memory, piece.count, tuple(going.state.forms.values())))
            if going.writes:
                piece.writing = self._writers.begin(self._write, piece, buffer)
                writing = True
            going.left -= 1
            if going.left == 0:
                going.done.set_result(None)
        except BaseException as error:
            if not going.done.done():
                going.done.set_exception(error)
            raise
        finally:
            if not writing:
                self._release(buffer)

    def _read_ahead_or_fail(self, *, wait: bool) -> None:
        try:
            self._read_ahead(wait=wait)
        except BaseException as error:
            going, _ = self._waiting.popleft()
            if not going.done.done():
                going.done.set_exception(error)
            raise

    def _read_ahead(self, *, wait: bool) -> None:
        """Begin to read pieces as far as there are buffers; with `wait`, at least one. Only the worker calls it."""
        while self._waiting and len(self._coming) < _AHEAD:
            going, piece = self._waiting[0]
            if (buffer := self._take(wait=wait and not self._coming)) is None:
                return
            try:
                reading = self._readers.begin(self._read, going, piece, buffer)
            except RuntimeError:  # no thread can be started
                self._release(buffer)
                raise
            self._waiting.popleft()
            self._coming.append((going, piece, buffer, reading))

    def _read(self, going: _Pass, piece: _Piece, buffer: Buffer) -> None:
        if piece.writing is not None:
            wait_futures([piece.writing])
        if not going.reads:
            return
        if piece.kept is not None:
            buffer.memory.copy_(piece.kept.memory)
            return
        self.store.read(piece.extent, buffer.view[: round_up(piece.extent.nbytes, PAGE_BYTES)])
        self._count(disk_read_bytes=piece.extent.nbytes)

    def _write(self, piece: _Piece, buffer: Buffer) -> None:
        """Write a piece; if that fails, its buffer is where it is, and another one takes its place in the line.

        No pass of the same state is under way but the one that writes: nobody reads what was kept before.
        """
        before = piece.kept
        try:
            self.store.write(piece.extent, buffer.view[: round_up(piece.extent.nbytes, PAGE_BYTES)])
        except StoreError as error:
            piece.kept = buffer
            self._count(disk_write_failures=1)
            if before is None:
                self._note_lost()
                warnings.warn(f"{error} The run goes on, with this in host memory.", stacklevel=2)
            else:
                self._release(before)
            return
        piece.kept = None
        self._count(disk_write_bytes=piece.extent.nbytes)
        self._release(buffer)
        if before is not None:
            self._pool.release(before)

    def _note_lost(self) -> None:
        with self._free:
            self._acquired -= 1
            self._free.notify_all()

    def _take(self, *, wait: bool) -> Buffer | None:
        """Return a free buffer, or one more; without `wait`, None while all are in use.

        Where host memory has no room for another, it waits for one of them. Raises `BudgetError` if there are none.
        """
        full = False  # host memory has no room for one more
        while True:
            with self._free:
                if self._buffers:
                    return self._buffers.popleft()
                none = (
                    self._acquired == 0
                )  # all are where pieces are now that could not be written, or this is the first
                grows = none or not (full or self._acquired >= _DEPTH)
                if not grows and not wait:
                    return None
                if not grows:
                    self._free.wait()
                    continue
            try:
                buffer = self._acquire(self.buffer_bytes, Use.STATE)
            except BudgetError:
                if none:
                    raise
                full = True
                continue
            with self._free:
                self._acquired += 1
            return buffer

    def _release(self, buffer: Buffer) -> None:
        with self._free:
            self._buffers.append(buffer)
            self._free.notify_all()


def _arrays(memory: Tensor, count: int, forms: Sequence[StoredForm]) -> list[Tensor]:
    """Return the parts of `count` elements of arrays that share bytes of `memory`, the widest items first there."""
    parts, start = parts_of(forms), 0
    found: dict[int, Tensor] = {}
    for index in sorted(range(len(parts)), key=lambda index: -parts[index].dtype.itemsize):
        end = start + parts[index].nbytes(count)
        found[index], start = memory[start:end].view(parts[index].dtype), end
    return [found[index] for index in range(len(parts))]
