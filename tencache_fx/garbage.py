"""Python's collector of garbage: when it looks for some, and which objects it knows."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from itertools import chain, compress, islice, repeat, starmap, tee
from typing import TypeVar

T = TypeVar("T")

_SELDOM = 1_000_000  # objects made and not freed: some hundreds of megabytes


class _Threshold:
    """How many are within `seldom_collected`, and what the collector's threshold was before. One instance exists."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may compile
        self._within = 0
        self._before = gc.get_threshold()

    def begin(self) -> None:
        """Raise the threshold, if it is not raised yet."""
        with self._lock:
            if not self._within:
                self._before = gc.get_threshold()
                if 0 < self._before[0] < _SELDOM:
                    gc.set_threshold(_SELDOM, *self._before[1:])
            self._within += 1

    def end(self) -> None:
        """Set it back behind the last one."""
        with self._lock:
            self._within -= 1
            if not self._within:
                gc.set_threshold(*self._before)

    def reset_in_child(self) -> None:
        """Have a free lock in a forked process, which lacks the thread that may hold it."""
        self._lock = threading.RLock()


_SELDOM_COLLECTED = _Threshold()
os.register_at_fork(after_in_child=_SELDOM_COLLECTED.reset_in_child)


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Have garbage in cycles looked for seldom, for work that makes many objects and keeps most of them.

    Importing, tracing and compiling do. Python looks through all that is there each time that a quarter has been added;
    that takes a tenth of the time of such work, and a fifth in a process that holds a large graph. A caller who has
    switched the collector off, or has it run more seldom, keeps that. The setting is the process's: of several threads
    that are in here the last one to leave sets it back.
    """
    _SELDOM_COLLECTED.begin()
    try:
        yield
    finally:
        _SELDOM_COLLECTED.end()


def living(kind: type[T]) -> list[T]:
    """Return all instances of `kind` and of what inherits from it, of some of which `__init__` has not run.

    Nothing is called of other objects, whatever they are. Python's list of all objects also has tuples that other
    threads are just making of an iterator, and Python refuses to give a tuple its length while somebody else refers to
    it: that thread would get a `SystemError`. So no other thread may run until that list is gone. None does, since all
    is done within one call of C code, in which no bytecode runs. `kind` is an ordinary class: its metaclass has no
    `__subclasscheck__`. Takes about 0.1 s in a process of a million objects.
    """
    pause = CollectorPause()
    pause.begin()  # before Python 3.12 that call might collect garbage, and objects have bytecode run as they end
    try:
        # The iterators that `tee` returns keep the last 57 objects. They are made behind the list: in it, they would
        # keep themselves, and all of it. `None` follows 64 times, so that in the end they keep nothing else.
        lists = map(chain, starmap(gc.get_objects, [()]), [repeat(None, 64)])
        twice = chain.from_iterable(map(tee, lists))
        objects, again = (chain.from_iterable(islice(twice, 1)) for _ in range(2))
        return list(compress(objects, map(issubclass, map(type, again), repeat(kind))))
    finally:
        pause.end()


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
