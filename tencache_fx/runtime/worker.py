"""Threads that do what they are given: the only way in which work is handed to others."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from tencache_fx.errors import InvariantError

_T = TypeVar("_T")
_Work = SimpleQueue[Callable[[], object] | None]


class _Job(Generic[_T]):
    """A call whose result, or error, its future has."""

    __slots__ = ("_call", "future")

    def __init__(self, call: Callable[[], _T]) -> None:
        self.future: Future[_T] = Future()
        self._call = [call]

    def __call__(self) -> None:
        """Carry it out, unless it was cancelled; raises what the future has."""
        if not self.future.set_running_or_notify_cancel():
            self._call.clear()
            return
        try:
            result = self._call.pop()()  # whoever waits is to find that nobody holds what it is of
        except BaseException as error:
            self.future.set_exception(error)
            del self  # which the error's traceback has, and whose future has the error
            raise
        else:
            self.future.set_result(result)


class Worker:
    """Some threads, one by default, that take their work from one queue; they end with `stop`, or with this object.

    Thread-safe. A signal's handler may submit work and wait for it, or raise, while its own thread is within `start` or
    `submit`. The latter is one call of a reentrant queue. `ThreadPoolExecutor.submit` holds a lock; and a thread of one
    that is interrupted as it starts is never told to end, so that the process waits for it at its exit.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._count = name, count
        self._running: dict[str, tuple[list[threading.Thread], _Work]] = {}  # threads, once all have started, and work
        self._starting = threading.RLock()
        self._stopped = False

    def __del__(self) -> None:
        """Let the threads end once they have done their work."""
        for _, work in self._running.values():
            work.put(None)

    def start(self) -> None:
        """Start the threads, unless they run: before the first `submit`. Raises `InvariantError` after `stop`."""
        if self._running and not self._stopped:
            return
        with self._starting:
            if self._stopped:
                raise InvariantError(f"{self._name} was given work after its end.")
            if self._running:
                return
            work: _Work = SimpleQueue()
            # Daemons: Python would join others at exit before it lets anybody stop them.
            threads = [
                threading.Thread(target=_run, args=(work,), name=f"{self._name}_{index}", daemon=True)
                for index in range(self._count)
            ]
            try:
                for thread in threads:
                    thread.start()
                # Noted last: a handler that waits meanwhile, or an interrupt, is not to find one that never starts. And
                # by one call that no handler comes between: one of them may have started others.
                self._running.setdefault("they", (threads, work))
            finally:
                if threads not in self._running.get("they", ()):
                    work.put(None)  # interrupted, or a handler has started others

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work` done; nobody hears of what it raises."""
        self._running["they"][1].put(work)

    def begin(self, call: Callable[..., _T], *args: object) -> "Future[_T]":
        """Have a call done, by threads that are started if need be; return its future, which may be cancelled.

        Raises `InvariantError` after `stop`.
        """
        self.start()
        job = _Job(partial(call, *args))
        self.submit(job)
        if self._stopped and job.future.cancel():  # another thread has stopped this one meanwhile
            raise InvariantError(f"{self._name} was given work after its end.")
        return job.future

    def wait(self) -> None:
        """Block until all work submitted so far is done, and the thread, one alone, has let go of it."""
        if self._running and not self._stopped:
            turn = _Job(bool)
            self.submit(turn)
            try:
                if self._stopped:  # another thread has stopped this one meanwhile: its turn may never come
                    turn.future.cancel()
                turn.future.result()
            except CancelledError:
                self._join()

    def stop(self, *, cancel: bool = False) -> None:
        """Finish all work, or `cancel` what has not begun, and join the threads."""
        with self._starting:
            self._stopped = True
            running = tuple(self._running.values())
        for _, work in running:
            if cancel:
                _cancel(work)
            work.put(None)
        self._join()

    def _join(self) -> None:
        for threads, _ in tuple(self._running.values()):
            for thread in threads:
                thread.join()


def _cancel(work: _Work) -> None:
    while True:
        try:
            each = work.get_nowait()
        except Empty:
            return
        if isinstance(each, _Job):
            each.future.cancel()
            each()  # does nothing, and tells those that wait for several


def _run(work: _Work) -> None:
    while (each := work.get()) is not None:
        with contextlib.suppress(BaseException):  # who wants to hear of it has a future
            each()
        del each  # whoever waits is to find that nobody holds what it is of
    work.put(None)  # for the next thread
