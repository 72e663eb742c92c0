"""Updates of offloaded parameters, by a few threads: the most urgent first, of those that can begin.

An optimizer's updates are wanted in the order in which the next forward reads, and their gradients land in the other
order. So the next one is chosen when a thread is free, and not when the work is handed in.

One thread updates on the host. The other, where it was given device memory to work in (`open_room`), streams its
updates through the device, piece by piece: host memory, the links and the device are then all busy. Both take their
work from the same queue, so each does as much of it as it is fast. A large update is in parts, of which each thread
takes the next one: the next forward may begin with the parameter whose gradient came last, an embedding's, and waits
for that. What has its state on disk waits for that in a queue of its own.
"""

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from tencache_fx.errors import TencacheError
from tencache_fx.model_state.copy_state import LateWork
from tencache_fx.model_state.update_protocol import Submit, Update
from tencache_fx.model_state.update_room import Begun, Room
from tencache_fx.runtime.streams import Streams
from tencache_fx.runtime.worker import Worker

_POLL_S = 0.0005  # CUDA events do not notify


@dataclass(slots=True, eq=False)
class _Task:
    """An update: the parts that nobody has taken yet are `left`, and those that have not ended `under_way`."""

    urgency: tuple[int, int]
    update: Update
    can_begin: Callable[[], bool]
    future: "Future[None]"
    left: int
    under_way: int = 0
    error: BaseException | None = None

    def __lt__(self, other: "_Task") -> bool:
        return self.urgency < other.urgency

    @property
    def has_more(self) -> bool:
        """Whether there is a part to be taken."""
        return self.left > 0 and self.error is None

    def take(self) -> "_Part":
        """Take the next part, the first ones first."""
        self.left, self.under_way = self.left - 1, self.under_way + 1
        return _Part(self, self.update.parts - self.left - 1)

    def finish(self) -> None:
        """End the update; whoever waits for it gets its error."""
        try:
            self.update.end(self.error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        if self.error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self.error)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    task: _Task
    index: int


class _Queue:
    """Tasks that wait for their gradients, and then for their turn."""

    def __init__(self) -> None:
        self._waiting: deque[_Task] = deque()
        self._ready: list[_Task] = []
        self._lock = threading.Lock()  # of the threads that do the tasks

    def put(self, tasks: deque[_Task]) -> None:
        """Take the tasks over."""
        _move(tasks, self._waiting)

    def has_ready(self) -> bool:
        with self._lock:
            self._sort_in()
            return bool(self._ready)

    def take(self, *, wait: bool = True) -> _Part | None:
        """Return what to do next; None when there is nothing left, or without `wait` when nothing can begin now."""
        while True:
            with self._lock:
                self._sort_in()
                if self._ready:
                    part = self._ready[0].take()
                    self._drop_taken()  # whoever waits for it is to find that nobody holds what it is of
                    return part
                if not wait or not self._waiting:
                    return None
            time.sleep(_POLL_S)

    def end(self, part: _Part, error: BaseException | None = None) -> None:
        """Note that a part has ended, and how.

        A task ends with its last part, or, if one has failed, once no part is under way.
        """
        task = part.task
        with self._lock:
            task.under_way -= 1
            task.error = task.error or error
            is_over = not task.under_way and not task.has_more
        if is_over:
            task.finish()

    @contextlib.contextmanager
    def ending(self, part: _Part) -> Iterator[None]:
        """End a part behind what is done in the context, well or not."""
        try:
            yield
        except BaseException as error:  # raised here for the thread, and by whoever waits for the task
            self.end(part, error)
            raise
        self.end(part)

    def _sort_in(self) -> None:
        """Let those that can begin now wait by urgency. Lock held."""
        while self._waiting and _can_begin(self._waiting[0]):
            heapq.heappush(self._ready, self._waiting.popleft())
        self._drop_taken()

    def _drop_taken(self) -> None:
        """Let go of those at the top that have nothing left to be taken. Lock held."""
        while self._ready and not self._ready[0].has_more:
            heapq.heappop(self._ready)


def _move(tasks: deque[_Task], target: deque[_Task]) -> None:
    """Move tasks, in one call and without a lock: a signal's handler in this thread may wait for them."""
    with contextlib.suppress(IndexError):
        target.extend(iter(tasks.popleft, None))


class _Batch:
    """Tasks that are submitted together: those that are in no queue yet, and how many parts they have."""

    def __init__(self) -> None:
        self.shared: deque[_Task] = deque()
        self.disk: deque[_Task] = deque()
        self._shared_counts: deque[int] = deque()  # added up without a lock: whoever waits may add a task, too
        self._disk_counts: deque[int] = deque()
        self.is_submitted = False

    @property
    def shared_count(self) -> int:
        """Return how many parts of updates came that are not on disk."""
        return sum(self._shared_counts.copy())

    @property
    def disk_count(self) -> int:
        """Return how many updates came whose state is on disk."""
        return sum(self._disk_counts.copy())

    def add(self, late: deque[_Task], *, on_disk: bool) -> None:
        """Take over a task, if it is still `late`; it is counted before anybody can take it."""
        self.is_submitted = False
        count = sum(task.left for task in late.copy())
        if on_disk:
            self._disk_counts.append(int(bool(count)))
        else:
            self._shared_counts.append(count)
        _move(late, self.disk if on_disk else self.shared)


class _Ahead:
    """A thread that issues one part while the one before is under way: between two, nothing stands still."""

    def __init__(self, queue: _Queue, issue: Callable[[_Part], Begun], name: str) -> None:
        self._queue, self._issue = queue, issue
        self._under_way: deque[tuple[_Part, Begun]] = deque()
        self._thread = Worker(name)
        self.start = self._thread.start
        self._to_come: deque[None] = deque()  # calls of `_do_one`: counted without a lock, as in `_Queue.put`

    def note(self, count: int) -> None:
        """Note that there are so many parts more; others may do them first."""
        self._to_come.extend(itertools.repeat(None, count))
        self._thread.submit(partial(_repeat, self._do_one, count))

    def end_done(self) -> None:
        """End those parts that are done; for the thread itself, while it issues another."""
        while self._under_way and self._under_way[0][1].is_done():
            self._end(*self._under_way.popleft())

    def wait(self) -> None:
        """Block until all parts noted so far are done, and the thread has let go of them."""
        self._thread.wait()

    def stop(self) -> None:
        """Finish, and join the thread."""
        self._thread.stop()

    def _do_one(self) -> None:
        self._to_come.popleft()
        try:
            part = self._queue.take(wait=not self._under_way)
            if part is None:
                self._finish(0)
                part = self._queue.take()
            if part is not None:
                self._begin(part)
        finally:  # nobody else would, if no call is to follow
            self._finish(1 if self._to_come and self._queue.has_ready() else 0)

    def _begin(self, part: _Part) -> None:
        try:
            begun = self._issue(part)
        except BaseException as error:
            self._queue.end(part, error)
            raise
        self._under_way.append((part, begun))

    def _finish(self, rest: int) -> None:
        """Wait for what is under way, but for the last `rest` parts."""
        while len(self._under_way) > rest:
            self._end(*self._under_way.popleft())

    def _end(self, part: _Part, begun: Begun) -> None:
        """Wait for a part, and end it, even if it has failed."""
        with contextlib.suppress(BaseException), self._queue.ending(part):
            begun.finish()


class Updates:
    """The threads and their tasks. Thread-safe."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._count = itertools.count()
        self._shared, self._disk = _Queue(), _Queue()
        self._on_host = Worker("tencache-update")
        self._on_device: _Ahead | None = None
        self._stopped = False
        self.part_elements: int | None = None  # how long a part is; None if all updates run on the host
        self._on_disk = _Ahead(self._disk, lambda part: part.task.update.on_disk(), "tencache-update-begin")

    @property
    def streams_through_device(self) -> bool:
        """Return whether some of the updates run on the device."""
        return self._on_device is not None

    def open_room(self, nbytes: int) -> None:
        """Let updates run on the device, too, in `nbytes` of its memory, held until the engine is closed.

        Does nothing the second time, or where that is too little to be worth it.
        """
        if self._on_device is None and Room.is_worth(nbytes):
            room = Room(self._streams, nbytes)
            issue = partial(_issue, room)
            self._on_device = _Ahead(self._shared, issue, "tencache-update-device")
            room.between = self._on_device.end_done
            self.part_elements = room.part_elements

    @contextlib.contextmanager
    def together(self) -> Iterator[Submit]:
        """Return what submits updates, all of them at the end of the context, however it ends.

        The threads that do them take turns with the caller's from then on, and are told once. Whoever waits for one of
        them before has those done that were submitted so far: a signal's handler, say, in the caller's thread.
        """
        batch = _Batch()
        hand_in = partial(self._hand_in, batch)
        self._on_host.start()
        if self._on_device is not None:
            self._on_device.start()

        def submit(
            update: Update,
            urgency: int,
            can_begin: Callable[[], bool],
            *,
            on_disk: bool = False,
            note: Callable[[Future[None]], object] | None = None,
        ) -> "Future[None]":
            if on_disk:
                self._on_disk.start()
            late: deque[_Task] = deque()
            work = LateWork(partial(self._hand_in, batch, late, on_disk=on_disk))
            late.append(_Task((urgency, next(self._count)), update, can_begin, work, update.parts))
            if note is not None:
                note(work)
            batch.add(late, on_disk=on_disk)
            return work

        try:
            yield submit
        finally:
            hand_in()
            batch.is_submitted = True

    def submit(self, update: Update, urgency: int, can_begin: Callable[[], bool], **how: Any) -> "Future[None]":
        """Have `update` done once it can begin, before all that is less urgent (a higher number) and can begin, too.

        None is asked whether it can begin before those that were submitted earlier can: gradients land one by one.
        """
        with self.together() as submit:
            return submit(update, urgency, can_begin, **how)

    def _hand_in(self, batch: _Batch, late: deque[_Task] | None = None, *, on_disk: bool = False) -> None:
        """Put a batch's tasks, and one that is `late` for it, into the queues, and tell the threads.

        A signal's handler may do so in the midst of it: threads that are told too often find nothing to do.
        """
        if late:  # whoever was to add it was interrupted
            batch.add(late, on_disk=on_disk)
        if batch.is_submitted:
            return
        if batch.disk_count:
            self._disk.put(batch.disk)
            self._on_disk.note(batch.disk_count)
        if batch.shared_count:
            self._shared.put(batch.shared)
            self._on_host.submit(partial(_repeat, self._one_on_host, batch.shared_count))
            if (ahead := self._on_device) is not None:
                ahead.note(batch.shared_count)
        if self._stopped:
            self._do_rest()

    def wait(self) -> None:
        """Block until all updates submitted so far are done, and no thread holds what they are of."""
        threads = [self._on_disk] if self._on_device is None else [self._on_disk, self._on_device]
        for each in threads:
            each.wait()
        self._on_host.wait()

    def stop(self) -> None:
        """Finish all work, and join the threads."""
        self._stopped = True
        self._on_host.stop()
        self._on_disk.stop()
        if self._on_device is not None:
            self._on_device.stop()
            self._on_device = None  # and with it the device memory
        self._do_rest()

    def _do_rest(self) -> None:
        """Do in this thread what came as the others ended: another thread may be in the midst of a step."""
        while (part := self._shared.take()) is not None:
            with contextlib.suppress(BaseException), self._shared.ending(part):  # whoever waits for it gets its error
                part.task.update.on_host(part.index)
        while (part := self._disk.take()) is not None:
            with contextlib.suppress(BaseException), self._disk.ending(part):
                part.task.update.on_disk().finish()

    def _one_on_host(self) -> None:
        """Do one part, if the other thread has left one: this is called once for each part."""
        if (part := self._shared.take()) is None:
            return
        with self._shared.ending(part):
            part.task.update.on_host(part.index)


def _repeat(work: Callable[[], object], count: int) -> None:
    """Do some work so many times, even if it fails: whoever waits for a task gets its error."""
    for _ in range(count):
        with contextlib.suppress(BaseException):
            work()


def _issue(room: Room, part: _Part) -> Begun:
    return part.task.update.on_device(part.index, room)


def _can_begin(task: _Task) -> bool:
    """Return whether a task can begin; one whose question fails does, to fail by itself."""
    try:
        return task.can_begin()
    except (RuntimeError, TencacheError):
        return True
