"""Another process that does a part of the work: it captures the largest micro-batch, then plans settings.

Most of what `tencache fit` takes for a configuration is importing, capturing and planning, on one core. No torch here:
the other process begins before this one imports that.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tencache_fx.errors import BudgetError
from tencache_fx.fitting.captures import Capture
from tencache_fx.fitting.config_fit import capture_largest
from tencache_fx.fitting.workload import Request
from tencache_fx.garbage import seldom_collected
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem
from tencache_fx.region.kept_plans import kept_region_plan


class OtherProcess:
    """A process that does one task after the other; what it cannot do is None, and this process then says why."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def begin_capture(self, request: Request) -> None:
        """Have it capture the largest micro-batch."""
        self._send(request)

    def captured(self) -> Capture | None:
        """Wait for what it captures."""
        found: Capture | None = self._receive()
        return found

    def begin_plan(self, captured: Problem, policy: str) -> None:
        """Have it plan a problem as `plan_region` does."""
        self._send((captured, policy))

    def planned(self) -> tuple[Problem, Plan] | BudgetError | None:
        """Wait for the plan, or why there is none."""
        found: tuple[Problem, Plan] | BudgetError | None = self._receive()
        return found

    def _send(self, task: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed: nothing will be received, either
            pickle.dump(task, self._process.stdin)
            self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):  # it ended, maybe within an answer
            return None


@contextlib.contextmanager
def other_process() -> Iterator[OtherProcess | None]:
    """Yield another process, which ends with this context; None where there is only one core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        yield None
        return
    command, pipe = [sys.executable, "-c", f"from {__name__} import serve; serve()"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        try:
            yield OtherProcess(process)
        finally:
            process.kill()


def _do(task: Any) -> Any:
    if isinstance(task, Request):
        return capture_largest(task)
    try:
        return kept_region_plan(*task)
    except BudgetError as refusal:
        return refusal.with_traceback(None)


@seldom_collected()
def serve() -> None:
    """Do the tasks that come in, until no more can: what the other process runs."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # others may print
    with contextlib.suppress(EOFError):
        while True:
            pickle.dump(_do(pickle.load(sys.stdin.buffer)), answers)
            answers.flush()
