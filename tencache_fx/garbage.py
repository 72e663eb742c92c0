"""When Python looks for garbage in cycles."""

import contextlib
import gc
from collections.abc import Iterator

_SELDOM = 1_000_000  # objects made and not freed: some hundreds of megabytes


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Have garbage in cycles looked for seldom, for work that makes many objects and keeps most of them.

    Importing and tracing do. Python looks through all that is there each time that a quarter has been added; that takes
    a tenth of the time of such work.
    """
    before = gc.get_threshold()
    gc.set_threshold(_SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class CollectorPause:
    """Has no garbage in cycles looked for between `begin` and `end`; of several at once the first `end` counts."""

    def __init__(self) -> None:
        self._was_on = False

    def begin(self) -> None:
        """Look for none, in whatever thread."""
        self._was_on |= gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Look for it again, if it was looked for before."""
        if self._was_on:
            self._was_on = False
            gc.enable()
