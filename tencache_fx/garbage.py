"""When Python looks for garbage in cycles."""

import contextlib
import gc
from collections.abc import Iterator

_SELDOM = 1_000_000  # objects made and not freed: some hundreds of megabytes


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Have garbage in cycles looked for seldom, for work that makes many objects and keeps most of them.

    Importing, tracing and compiling do. Python looks through all that is there each time that a quarter has been added;
    that takes a tenth of the time of such work, and a fifth in a process that holds a large graph. A caller who has
    switched the collector off, or has it run more seldom, keeps that. The setting is the process's: use this in one
    thread at a time.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _SELDOM:
        gc.set_threshold(_SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class CollectorPause:
    """Has no garbage in cycles looked for between `begin` and `end`; of several at once the last `end` counts."""

    def __init__(self) -> None:
        self._was_on = False
        self._begun = 0

    def begin(self) -> None:
        """Look for none, in whatever thread."""
        self._was_on |= gc.isenabled()
        self._begun += 1
        gc.disable()

    def end(self) -> None:
        """Look for it again, if it was looked for before."""
        self._begun -= 1
        if self._begun <= 0:
            self._resume()

    def end_in_child(self) -> None:
        """Look for it again, in a process that has no other thread."""
        self._resume()

    def _resume(self) -> None:
        self._begun = 0
        if self._was_on:
            self._was_on = False
            gc.enable()
