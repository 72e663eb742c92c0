"""Interrupts at chosen lines, as Ctrl-C comes at any."""

import linecache
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupts:
    """Counts the lines that this thread runs in files of some names, and raises `KeyboardInterrupt` at some of them.

    Lines with a `with` do not count. Python's own interrupts never come between the end of its body and its exit, and
    a trace function is called there. Nor do those with a `try`, where nothing is called.
    """

    def __init__(self, files: Collection[str]) -> None:
        self._files = frozenset(files)
        self._at: frozenset[int] = frozenset()
        self.lines = 0
        self.where: list[str] = []

    def run(self, work: Callable[[], object], *at: int) -> bool:
        """Call `work`, interrupted at the lines of these numbers; return whether an interrupt ended it."""
        self._at, self.lines, self.where = frozenset(at), 0, []
        before = sys.gettrace(), sys.getprofile()
        sys.settrace(self._called)
        sys.setprofile(self._profiled)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(before[1])  # first, for it sets the other
            sys.settrace(before[0])
        return False

    def _is_counted(self, frame: FrameType) -> bool:
        return Path(frame.f_code.co_filename).name in self._files

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._passed if self._is_counted(frame) else None

    def _passed(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip() if event == "line" else "with "
        if not line.startswith(("with ", "try:")):
            self.lines += 1
            if self.lines - 1 in self._at:
                self.where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return self._passed

    def _profiled(self, frame: FrameType, event: str, _: Any) -> None:
        """Go on to trace after an interrupt: Python removes a trace function that raises."""
        if sys.gettrace() is not None:
            return
        within: FrameType | None = frame
        while within is not None:
            if self._is_counted(within):
                within.f_trace = self._passed
            within = within.f_back
        sys.settrace(self._called)
