"""Runs cases in a process that is replaced when it dies, hangs, or has run many. No torch here: the process has it."""

import argparse
import contextlib
import multiprocessing
import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

START_LIMIT_S = 600.0
STOP_LIMIT_S = 20.0


class CaseDiedError(Exception):
    """The process did not answer: it died, or the time was up."""


class CaseServer:
    """A process that runs `serve`, started anew when it has to be.

    `serve` sends something once it is ready, then answers what it receives, until that is None.
    """

    def __init__(self, serve: Callable[[Connection], None], most_by_one_process: int) -> None:
        self._serve, self._most = serve, most_by_one_process
        self._process: multiprocessing.process.BaseProcess | None = None
        self._ours: Connection | None = None
        self._served = 0
        self.greeting = self._start()

    def ask(self, case: object, limit_s: float) -> Any:
        """Return the answer to a case; raises `CaseDiedError` if the process dies, or takes more than `limit_s`."""
        if self._process is None or self._served >= self._most:
            self.stop()
            self._start()
        assert self._ours is not None
        assert self._process is not None
        self._served += 1
        self._ours.send(case)
        try:
            if self._ours.poll(limit_s):
                return self._ours.recv()
            detail = f"not done after {limit_s:.0f} s"
        except EOFError:
            self._process.join()
            detail = f"the process died: exit status {self._process.exitcode}"
        self.stop(politely=False)
        raise CaseDiedError(detail)

    def stop(self, *, politely: bool = True) -> None:
        """End the process, whatever it does."""
        if self._process is not None and self._ours is not None:
            if politely:
                with contextlib.suppress(BrokenPipeError):
                    self._ours.send(None)
                self._process.join(STOP_LIMIT_S)
            self._process.kill()
            self._process.join()
            self._ours.close()
        self._process = self._ours = None

    def _start(self) -> Any:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._served = 0
        if not self._ours.poll(START_LIMIT_S):
            raise TimeoutError(f"what the cases need was not imported within {START_LIMIT_S:.0f} s")
        try:
            return self._ours.recv()
        except EOFError:
            raise SystemExit("The cases cannot be imported, as above: pip install -e '.[test]'.") from None


def seconds(text: str) -> float:
    """Return a duration such as "90s", "30m" or "2h" in seconds."""
    found = re.fullmatch(r"(\d+)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; give one such as 90s, 30m or 2h")
    return int(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]
