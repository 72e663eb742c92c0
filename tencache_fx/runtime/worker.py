"""A thread that does what it is given, one thing after another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from tencache_fx.errors import InvariantError


class Worker:
    """Such a thread. Thread-safe.

    A signal's handler may submit work and wait for it while its own thread is within `submit`, which is one call of a
    reentrant queue. `ThreadPoolExecutor.submit` holds a lock.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._stopped = False

    def start(self) -> None:
        """Start the thread, unless it runs: before the first `submit`. Raises `InvariantError` after `stop`."""
        with self._starting:
            if self._stopped:
                raise InvariantError(f"{self._name} was given work after its end.")
            if self._thread is None:
                # A daemon: Python would join others at exit before it lets anybody stop them.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work` done; it must not raise."""
        self._work.put(work)

    def wait(self) -> None:
        """Block until all work submitted so far is done, and the thread has let go of it."""
        if self._thread is not None:
            done: Future[None] = Future()
            self._work.put(lambda: done.set_result(None))
            done.result()

    def stop(self) -> None:
        """Finish all work, and join the thread."""
        with self._starting:
            thread, self._thread, self._stopped = self._thread, None, True
        if thread is not None:
            self._work.put(None)
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # whoever waits is to find that nobody holds what it is of
