"""Threads that wait for others to give something back."""

import threading

_POLL_S = 0.02  # CUDA events do not notify; a waiter looks again this often


class Waiters:
    """Those that wait, with the lock held, which they let others have meanwhile."""

    def __init__(self, lock: "threading.RLock") -> None:
        self._cond = threading.Condition(lock)
        self._count = 0

    def wait(self) -> None:
        """Block until `wake` is called, for a short time at most."""
        self._count += 1
        try:
            self._cond.wait(_POLL_S)
        finally:
            self._count -= 1

    def wake(self) -> None:
        """Let all go on; a condition would go through several calls to find that there are none."""
        if self._count:
            self._cond.notify_all()
