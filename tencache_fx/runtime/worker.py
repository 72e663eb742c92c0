"""A thread that does what it is given, one thing after another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from tencache_fx.errors import InvariantError

_Work = SimpleQueue[Callable[[], object] | None]


class Worker:
    """Such a thread; it ends with `stop`, or with this object. Thread-safe.

    A signal's handler may submit work and wait for it, or raise, while its own thread is within `start` or `submit`.
    The latter is one call of a reentrant queue. `ThreadPoolExecutor.submit` holds a lock.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[str, tuple[threading.Thread, _Work]] = {}  # one thread, once it has started, and its work
        self._starting = threading.RLock()
        self._stopped = False

    def __del__(self) -> None:
        """Let the thread end once it has done its work."""
        for _, work in self._running.values():
            work.put(None)

    def start(self) -> None:
        """Start the thread, unless it runs: before the first `submit`. Raises `InvariantError` after `stop`."""
        with self._starting:
            if self._stopped:
                raise InvariantError(f"{self._name} was given work after its end.")
            if self._running:
                return
            work: _Work = SimpleQueue()
            # A daemon: Python would join others at exit before it lets anybody stop them.
            thread = threading.Thread(target=_run, args=(work,), name=self._name, daemon=True)
            try:
                thread.start()
                # Noted last: a handler that waits meanwhile, or an interrupt, is not to find one that never starts. And
                # by one call that no handler comes between: one of them may have started another thread.
                self._running.setdefault("it", (thread, work))
            finally:
                if thread not in self._running.get("it", ()):
                    work.put(None)  # interrupted, or a handler has started another one

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work` done; it must not raise."""
        self._running["it"][1].put(work)

    def wait(self) -> None:
        """Block until all work submitted so far is done, and the thread has let go of it."""
        if self._running and not self._stopped:
            done: Future[None] = Future()
            self.submit(lambda: done.set_result(None))
            done.result()

    def stop(self) -> None:
        """Finish all work, and join the thread."""
        with self._starting:
            self._stopped = True
            running = tuple(self._running.values())
        for thread, work in running:
            work.put(None)
            thread.join()


def _run(work: _Work) -> None:
    while (each := work.get()) is not None:
        each()
        del each  # whoever waits is to find that nobody holds what it is of
