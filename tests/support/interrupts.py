"""Interrupts at a chosen line, as Ctrl-C comes at any."""

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any


class Interrupts:
    """Counts the lines that this thread runs in files of some names, and raises `KeyboardInterrupt` at one of them."""

    def __init__(self, files: Collection[str]) -> None:
        self._files = frozenset(files)
        self._at = -1
        self.lines = 0
        self.where = ""

    def run(self, work: Callable[[], object], at: int = -1) -> bool:
        """Call `work`, interrupted at the line of that number; return whether it was."""
        self._at, self.lines, self.where = at, 0, ""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _called(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._passed if Path(frame.f_code.co_filename).name in self._files else None

    def _passed(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._passed
