"""How long compiling takes, stage by stage; on a terminal, a line says meanwhile which stage runs.

A stage that begins within another one interrupts it: each second counts for one stage only. Threads count their own.
"""

import contextlib
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TextIO, TypeVar

from tencache_fx.units import format_ns

_P = ParamSpec("_P")
_T = TypeVar("_T")

CALIBRATION = "calibration"
"""The stage that has progress bars of its own."""

_DELAY_S = 1.0  # what is shorter shows no line
_PERIOD_S = 0.5


class Stages:
    """Adds up the times of stages."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._lock = threading.Lock()
        self._spent: Counter[str] = Counter()

    def spent_ns(self) -> dict[str, int]:
        """Return the nanoseconds of each stage that has ended so far, in all threads."""
        with self._lock:
            return dict(self._spent)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside, but for stages within it, for the stage `name`."""
        frames = self._frames()
        before_ns, start_ns = sum(self._mine().values()), time.perf_counter_ns()
        frames.append(name)
        try:
            yield
        finally:
            frames.pop()
            within_ns = sum(self._mine().values()) - before_ns
            own_ns = time.perf_counter_ns() - start_ns - within_ns
            self._mine()[name] += own_ns
            with self._lock:
                self._spent[name] += own_ns

    def timed(self, name: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return `function` as a stage."""

        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.stage(name):
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def compilation(self, what: str) -> Iterator[Counter[str]]:
        """Yield the nanoseconds of the stages inside, in this thread, which are there at the end.

        Where stderr is a terminal, a line there says of `what` which stage runs.
        """
        spent: Counter[str] = Counter()
        before, frames = Counter(self._mine()), self._frames()
        with (
            self.stage("other work"),
            show_line(lambda: ": ".join((what, *frames[-1:])), lambda: CALIBRATION in frames),
        ):
            yield spent
        spent.update(self._mine() - before)

    def _mine(self) -> Counter[str]:
        return self._own.__dict__.setdefault("spent", Counter())  # type: ignore[no-any-return]

    def _frames(self) -> list[str]:
        return self._own.__dict__.setdefault("frames", [])  # type: ignore[no-any-return]


STAGES = Stages()


def show_times(spent_ns: Mapping[str, int]) -> str:
    """Return the times of stages as text, the longest first."""
    parts = sorted(((ns, name) for name, ns in spent_ns.items() if ns), reverse=True)
    return f"{format_ns(sum(spent_ns.values()))} ({', '.join(f'{name} {format_ns(ns)}' for ns, name in parts)})"


@contextlib.contextmanager
def show_line(text: Callable[[], str], hidden: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Show a line, and the seconds so far, on stderr, if that is a terminal; not while it is `hidden` by another."""
    if not _is_terminal(sys.stderr):
        yield
        return
    line = _Line(sys.stderr, text, hidden)
    try:
        yield
    finally:
        line.close()


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


class _Line:
    def __init__(self, stream: TextIO, text: Callable[[], str], hidden: Callable[[], bool]) -> None:
        self._stream, self._text, self._hidden = stream, text, hidden
        self._width, self._start, self._done = 0, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tencache-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._show("")

    def _run(self) -> None:
        wait_s = _DELAY_S
        while not self._done.wait(wait_s):
            wait_s = _PERIOD_S
            self._show("" if self._hidden() else f"tencache: {self._text()}, {time.monotonic() - self._start:.0f} s")

    def _show(self, text: str) -> None:
        """Put `text` in the place of the last one."""
        if text or self._width:
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                self._stream.write(f"\r{text.ljust(self._width)}" + ("" if text else "\r"))
                self._stream.flush()
        self._width = len(text)
