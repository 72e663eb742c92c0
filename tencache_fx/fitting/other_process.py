"""The problem of the largest micro-batch, captured by another process while this one captures the smallest.

Most of what `tencache fit` takes for a configuration is importing and capturing, on one core. No torch here: the other
process begins before this one imports that.
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tencache_fx.garbage import seldom_collected
from tencache_fx.planning.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command was asked for: the fields of a `Workload`, but for its settings, which are still texts."""

    load: dict[str, Any]
    settings: Sequence[str]
    device: str | None
    options: dict[str, str]
    profile: str | None


@contextlib.contextmanager
def largest_captured(request: Request) -> Iterator[Callable[[], Problem | None] | None]:
    """Yield what waits for the problem, and returns None if it could not be captured: this process then says why.

    Yield None where there is only one core. The other process ends with this context.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        yield None
        return
    command = [sys.executable, "-m", __name__, json.dumps(asdict(request), default=str)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield partial(_read, process)
        finally:
            process.kill()


def _read(process: "subprocess.Popen[bytes]") -> Problem | None:
    content, _ = process.communicate()
    if process.returncode:
        return None
    problem: Problem = pickle.loads(content)
    return problem


@seldom_collected()
def _main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    answer = os.dup(1)
    os.dup2(2, 1)  # others may print
    from tencache_fx.fitting.fitness import Workload, capture_largest, read_settings  # here: needs torch

    load = Workload(settings=read_settings(request.settings), **request.load)
    problem = capture_largest(load, request.device, request.options, profile=request.profile)
    with os.fdopen(answer, "wb") as file:
        pickle.dump(problem, file)


if __name__ == "__main__":
    _main()
