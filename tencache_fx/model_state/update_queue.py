"""Updates of offloaded parameters, by a few threads: the most urgent first, of those that can begin.

An optimizer's updates are wanted in the order in which the next forward reads, and their gradients land in the other
order. So the next one is chosen when a thread is free, and not when the work is handed in.

One thread updates on the host. The other, where it was given device memory to work in (`open_room`), streams its
updates through the device, piece by piece: host memory, the links and the device are then all busy. Both take their
work from the same queue, so each does as much of it as it is fast. What has its state on disk waits for that in a queue
of its own.
"""

import contextlib
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tencache_fx.errors import TencacheError
from tencache_fx.model_state.copy_state import LateWork
from tencache_fx.model_state.stored_form import BLOCK, Part
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.units import round_up

_T = TypeVar("_T")
_NO_PARTS: Mapping[Tensor, Part] = MappingProxyType({})

_POLL_S = 0.0005  # CUDA events do not notify
_DEPTH = 3  # pieces under way on the device: one coming in, one worked on, one going out
_LEAST_COUNT = 1 << 16  # elements of a piece below which copies take longer to begin than to run
_ALIGN = 128  # elements
_ALIGN_BYTES = 128
_MOST_LAYOUTS = 64  # of pieces, of which views are kept


class Submit(Protocol):
    """Submits an update, see `Updates.submit`."""

    def __call__(
        self, update: "Update", urgency: int, can_begin: Callable[[], bool], *, on_disk: bool = False
    ) -> "Future[None]":
        """Have it done once it can begin."""


class Update(Protocol):
    """One parameter's update, which may run in either place, with the same result; or one with its state on disk."""

    def on_host(self) -> None:
        """Carry it out."""

    def on_device(self, room: "Room") -> "Begun":
        """Issue it."""

    def on_disk(self) -> "Begun":
        """Begin it with state that is on disk."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An update under way: `finish` blocks until it is done, and ends it."""

    is_done: Callable[[], bool]
    finish: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Task:
    urgency: tuple[int, int]
    update: Update
    can_begin: Callable[[], bool]
    future: "Future[None]"

    def __lt__(self, other: "_Task") -> bool:
        return self.urgency < other.urgency

    def run(self, work: Callable[[], _T]) -> _T:
        """Do some of the task's work; if that fails, the task has."""
        try:
            return work()
        except BaseException as error:  # raised here for the thread, and by whoever waits for the task
            self.future.set_exception(error)
            raise


class _Slot:
    """Memory for one piece, and what there is to wait for before it is overwritten."""

    def __init__(self, memory: Tensor, after: tuple[Event, ...]) -> None:
        self.memory, self.after = memory, after
        self._views: dict[tuple[tuple[int, torch.dtype], ...], list[Tensor]] = {}

    def like(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors like the arrays, one behind the other in the memory.

        Most pieces are of the same sizes, and to make views takes the host some time.
        """
        key = tuple((array.nbytes, array.dtype) for array in arrays)
        if key not in self._views:
            if len(self._views) >= _MOST_LAYOUTS:
                self._views.clear()
            starts = itertools.accumulate((round_up(nbytes, _ALIGN_BYTES) for nbytes, _ in key), initial=0)
            self._views[key] = [
                self.memory[start : start + nbytes].view(dtype)
                for start, (nbytes, dtype) in zip(starts, key, strict=False)
            ]
        return self._views[key]


class Room:
    """Device memory that updates pass through, a few pieces at a time. For one thread.

    `between` is called before each piece: what is done by then need not wait for the rest to be issued.
    """

    def __init__(self, streams: Streams, nbytes: int) -> None:
        self.between: Callable[[], None] = lambda: None
        self._streams = streams
        memory = [torch.empty(nbytes // _DEPTH, dtype=torch.uint8, device=streams.device) for _ in range(_DEPTH)]
        allocated = (streams.record_compute(),)  # kernels may still run that had it before
        self._slots = deque(_Slot(each, allocated) for each in memory)
        self._last_copied: tuple[Tensor, Tensor] | None = None  # what was copied in, and its copy

    def copy_in(self, small: Tensor) -> Tensor:
        """Return a copy on the device of a few numbers that nobody changes, for the `work` that is streamed next.

        Most updates of a step have the same numbers as the one before.
        """
        if self._streams.device.type != "cuda":
            return small
        if self._last_copied is None or self._last_copied[0] is not small:
            with self._streams.beside():
                self._last_copied = small, small.pin_memory().to(self._streams.device, non_blocking=True)
        return self._last_copied[1]

    def stream(
        self,
        count: int,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        work: Callable[[Sequence[Tensor]], None],
        after: Sequence[Event] = (),
        parts: Mapping[Tensor, Part] = _NO_PARTS,
    ) -> Event:
        """Copy `sources`, 1-D of `count` elements, in piece by piece; let `work` change them; copy `targets` out.

        Those that have an item for several elements are in `parts`.

        `targets` are the last of the sources, or the same with others before them, for which `work` gets memory. They
        are written behind `after`. Returns the event of the last copy. The host waits until a piece can begin: a copy
        engine goes on with the queue it is at, and would let everybody else's copies wait for a long one.
        """
        streams, arrays = self._streams, [*sources, *(t for t in targets if all(t is not s for s in sources))]
        kinds = [parts.get(array, Part("", array.dtype)) for array in arrays]
        unit = BLOCK if any(kind.per > 1 for kind in kinds) else _ALIGN  # compiled code takes whole blocks
        gaps_bytes = _ALIGN_BYTES * sum(kind.per > 1 for kind in kinds)  # behind parts that are not as long as a unit
        slot_bytes = self._slots[0].memory.numel() - gaps_bytes
        most = slot_bytes // sum(kind.nbytes(unit) for kind in kinds) * unit
        places = [next(place for place, array in enumerate(arrays) if array is target) for target in targets]
        last: Event = streams.record_compute()
        with streams.beside(), self._joined_on_failure():
            for start in range(0, count, most):
                slot = self._slots[0]
                self._slots.rotate(-1)
                streams.wait_host(slot.after)
                self.between()
                some = slice(start, min(start + most, count))
                whole = some.stop - start == count
                cuts = arrays if whole else [kind.of(array, some) for array, kind in zip(arrays, kinds, strict=True)]
                pieces = slot.like(cuts)
                coming = list(zip(pieces, cuts[: len(sources)], strict=False))
                streams.wait_compute(streams.copy_all(Lane.UPDATE_IN, coming, slot.after))
                work(pieces)
                done = (streams.record_compute(), *after)
                going = [(cuts[place], pieces[place]) for place in places]
                last = streams.copy_all(Lane.UPDATE_OUT, going, done)
                slot.after = (last,)
        return last

    @contextlib.contextmanager
    def _joined_on_failure(self) -> Iterator[None]:
        """Wait for all copies if something fails: whoever handles that may free or write what they touch."""
        try:
            yield
        except BaseException:
            self._streams.wait_host([event for slot in self._slots for event in slot.after])
            raise


class _Queue:
    """Tasks that wait for their gradients, and then for their turn."""

    def __init__(self) -> None:
        self._waiting: deque[_Task] = deque()
        self._ready: list[_Task] = []
        self._cond = threading.Condition()

    def put(self, tasks: deque[_Task]) -> int:
        """Take over the tasks that are there now, at once: a signal's handler may wait for one; return how many."""
        with self._cond:
            count = len(tasks)
            self._waiting.extend(map(deque.popleft, itertools.repeat(tasks, count)))
            self._cond.notify_all()
            return count

    def has_ready(self) -> bool:
        with self._cond:
            self._sort_in()
            return bool(self._ready)

    def take(self, *, wait: bool = True) -> _Task | None:
        """Return the task to do next; None when there is none left, or without `wait` when none can begin now."""
        with self._cond:
            while True:
                self._sort_in()
                if self._ready:
                    return heapq.heappop(self._ready)
                if not wait or not self._waiting:
                    return None
                self._cond.wait(_POLL_S)

    def _sort_in(self) -> None:
        """Let those that can begin now wait by urgency. Lock held."""
        while self._waiting and _can_begin(self._waiting[0]):
            heapq.heappush(self._ready, self._waiting.popleft())


class _Ahead:
    """A thread that issues one task while the one before is under way: between two, nothing stands still."""

    def __init__(self, queue: _Queue, issue: Callable[[Update], Begun], name: str) -> None:
        self._queue, self._issue = queue, issue
        self._under_way: deque[tuple[_Task, Begun]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._noted = 0  # calls of `_do_one` to come
        self._lock = threading.Lock()

    def note(self, count: int) -> None:
        """Note that there are so many tasks more; others may do them first."""
        with self._lock:
            self._noted += count
        self._thread.submit(_repeat, self._do_one, count)

    def end_done(self) -> None:
        """End those tasks that are done; for the thread itself, while it issues another."""
        while self._under_way and self._under_way[0][1].is_done():
            with contextlib.suppress(Exception):  # whoever waits for the task gets it
                _end(*self._under_way.popleft())

    def wait(self) -> None:
        """Block until all tasks noted so far are done, and the thread has let go of them."""
        self._thread.submit(_nothing).result()

    def stop(self) -> None:
        """Finish, and join the thread."""
        self._thread.shutdown(wait=True)

    def _do_one(self) -> None:
        with self._lock:
            self._noted -= 1
        try:
            task = self._queue.take(wait=not self._under_way)
            if task is None:
                self._finish(0)
                task = self._queue.take()
            if task is not None:
                self._under_way.append((task, task.run(partial(self._issue, task.update))))
        finally:  # nobody else would, if no call is to follow
            self._finish(1 if self._noted and self._queue.has_ready() else 0)

    def _finish(self, rest: int) -> None:
        """Wait for what is under way, but for the last `rest` tasks; for all of these, even if one has failed."""
        ending = [self._under_way.popleft() for _ in range(len(self._under_way) - rest)]
        with contextlib.ExitStack() as steps:
            for task, begun in reversed(ending):  # the last one first: it ends them in their order
                steps.callback(_end, task, begun)


class Updates:
    """The threads and their tasks. Thread-safe."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._count = itertools.count()
        self._shared, self._disk = _Queue(), _Queue()
        self._on_host = ThreadPoolExecutor(1, thread_name_prefix="tencache-update")
        self._on_device: _Ahead | None = None
        self._on_disk = _Ahead(self._disk, lambda update: update.on_disk(), "tencache-update-begin")

    @property
    def streams_through_device(self) -> bool:
        """Return whether some of the updates run on the device."""
        return self._on_device is not None

    def open_room(self, nbytes: int) -> None:
        """Let updates run on the device, too, in `nbytes` of its memory, held until the engine is closed.

        Does nothing the second time, or where that is too little to be worth it.
        """
        if self._on_device is None and nbytes // _DEPTH >= 20 * _LEAST_COUNT:
            room = Room(self._streams, nbytes)
            self._on_device = _Ahead(self._shared, lambda update: update.on_device(room), "tencache-update-device")
            room.between = self._on_device.end_done

    @contextlib.contextmanager
    def together(self) -> "Iterator[Submit]":
        """Return what submits updates, all of them at the end of the context, however it ends.

        The threads that do them take turns with the caller's from then on, and are told once. Whoever waits for one of
        them before has those done that were submitted so far: a signal's handler, say, in the caller's thread.
        """
        shared: deque[_Task] = deque()
        disk: deque[_Task] = deque()
        hand_in = partial(self._put, shared, disk)

        def submit(
            update: Update, urgency: int, can_begin: Callable[[], bool], *, on_disk: bool = False
        ) -> "Future[None]":
            task = _Task((urgency, next(self._count)), update, can_begin, LateWork(hand_in))
            (disk if on_disk else shared).append(task)
            return task.future

        try:
            yield submit
        finally:
            hand_in()

    def submit(
        self, update: Update, urgency: int, can_begin: Callable[[], bool], *, on_disk: bool = False
    ) -> "Future[None]":
        """Have `update` done once it can begin, before all that is less urgent (a higher number) and can begin, too.

        None is asked whether it can begin before those that were submitted earlier can: gradients land one by one.
        """
        with self.together() as submit:
            return submit(update, urgency, can_begin, on_disk=on_disk)

    def _put(self, shared: deque[_Task], disk: deque[_Task]) -> None:
        if count := self._disk.put(disk):
            self._on_disk.note(count)
        if count := self._shared.put(shared):
            self._on_host.submit(_repeat, self._one_on_host, count)
            if self._on_device is not None:
                self._on_device.note(count)

    def wait(self) -> None:
        """Block until all updates submitted so far are done, and no thread holds what they are of."""
        threads = [self._on_disk] if self._on_device is None else [self._on_disk, self._on_device]
        for each in threads:
            each.wait()
        self._on_host.submit(_nothing).result()

    def stop(self) -> None:
        """Finish all work, and join the threads."""
        self._on_host.shutdown(wait=True)
        self._on_disk.stop()
        if self._on_device is not None:
            self._on_device.stop()
            self._on_device = None  # and with it the device memory

    def _one_on_host(self) -> None:
        """Do one task, if the other thread has left one: this is called once for each task."""
        if (task := self._shared.take()) is not None:
            task.run(task.update.on_host)
            task.future.set_result(None)


def _repeat(work: Callable[[], object], count: int) -> None:
    """Do some work so many times, even if it fails: whoever waits for a task gets its error."""
    for _ in range(count):
        with contextlib.suppress(BaseException):
            work()


def _nothing() -> None:
    """Do nothing: once this has run, its thread has done all that it was given before."""


def _end(task: _Task, begun: Begun) -> None:
    task.run(begun.finish)
    task.future.set_result(None)


def _can_begin(task: _Task) -> bool:
    """Return whether a task can begin; one whose question fails does, to fail by itself."""
    try:
        return task.can_begin()
    except (RuntimeError, TencacheError):
        return True
