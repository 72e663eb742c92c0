"""Work on what is at home, by one thread: the most urgent first, of what can begin.

An optimizer's updates are wanted in the order in which the next forward reads, and their gradients land in the other
order. So whoever is next is chosen when the thread is free, and not when the work is handed in.
"""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tencache_fx.errors import TencacheError

_POLL_S = 0.0005  # CUDA events do not notify


@dataclass(slots=True, eq=False)
class _Task:
    urgency: tuple[int, int]
    work: Callable[[], None]
    can_begin: Callable[[], bool]
    future: "Future[None]" = field(default_factory=Future)


class Updates:
    """The thread and its tasks. Thread-safe."""

    def __init__(self) -> None:
        self._tasks: list[_Task] = []
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tencache-update")

    def submit(self, work: Callable[[], None], urgency: int, can_begin: Callable[[], bool]) -> "Future[None]":
        """Have `work` done once it can begin, before all that is less urgent (a higher number) and can begin, too."""
        task = _Task((urgency, next(self._count)), work, can_begin)
        with self._lock:
            self._tasks.append(task)
        self._worker.submit(self._do_one)
        return task.future

    def stop(self) -> None:
        """Finish all work, and join the thread."""
        self._worker.shutdown(wait=True)

    def _do_one(self) -> None:
        """Do one task: there are as many calls of this as tasks."""
        while (task := self._take()) is None:
            time.sleep(_POLL_S)
        try:
            task.work()
        except BaseException as error:
            task.future.set_exception(error)
            raise
        task.future.set_result(None)

    def _take(self) -> _Task | None:
        with self._lock:
            ready = [task for task in self._tasks if _can_begin(task)]
            task = min(ready, key=lambda task: task.urgency, default=None)
            if task is not None:
                self._tasks.remove(task)
        return task


def _can_begin(task: _Task) -> bool:
    """Say whether a task can begin; one whose question fails does, to fail by itself."""
    try:
        return task.can_begin()
    except (RuntimeError, TencacheError):
        return True
