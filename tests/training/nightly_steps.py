"""Train random loops of several compiled blocks, as `test_random_steps.py` does, but as many as there is time for.

    PYTHONPATH=.:tests:tests/support python tests/training/nightly_steps.py --seeds 0-9999 --processes 8 --limit 8h

Each process is replaced when it dies, hangs, or has run many. What fails is printed at once, and at the end with the
command that runs it again. The exit status is 1 if anything fails, 2 if the time was up before the end.
"""

import argparse
import gc
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from case_server import CaseDiedError, CaseServer, seconds

LOOP_LIMIT_S = 600.0
MOST_BY_ONE_PROCESS = 100
COMMAND = "PYTHONPATH=.:tests:tests/support python tests/training/nightly_steps.py --seeds"

Answer = tuple[bool, str]
"""Whether a loop is right, and what it came to, or the traceback."""

Serve = Callable[[Connection], None]


def serve(connection: Connection) -> None:
    """Say that all is imported; then, for each seed received, send the `Answer`."""
    for variable in [name for name in os.environ if name.startswith("TENCACHE_")]:
        del os.environ[variable]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        import torch
        from outcomes import Outcomes
        from test_random_steps import check_seed

        import tencache_fx

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # all of torch need not be looked through after each loop
        connection.send(None)
        while (seed := connection.recv()) is not None:
            seen = Outcomes()
            try:
                check_seed(seed, seen)
                answer = True, str(seen)
            except Exception:
                answer = False, traceback.format_exc()
            tencache_fx.close()
            tencache_fx.configure(reset=True)
            connection.send(answer)


class Run:
    """The loops of some seeds, by several processes at once; a thread of ours waits for each process."""

    def __init__(self, seeds: Sequence[int], until: float, serve: Serve) -> None:
        self._seeds, self._until, self._serve = iter(seeds), until, serve
        self._count, self._begun = len(seeds), time.monotonic()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.failed: list[int] = []

    def work(self) -> None:
        """Have one process run what no other one does, until there is nothing left, or no time."""
        server = CaseServer(self._serve, MOST_BY_ONE_PROCESS)
        try:
            for seed in self._mine():
                try:
                    right, told = server.ask(seed, LOOP_LIMIT_S)
                except CaseDiedError as error:
                    right, told = False, str(error)
                self._note(seed, right, told)
        finally:
            server.stop()

    @property
    def unrun(self) -> int:
        """How many loops were not run."""
        return self._count - self.outcomes.total()

    def _mine(self) -> Iterator[int]:
        while time.monotonic() < self._until:
            with self._lock:
                seed = next(self._seeds, None)
            if seed is None:
                return
            yield seed

    def _note(self, seed: int, right: bool, told: str) -> None:  # noqa: FBT001
        with self._lock:
            self.outcomes[told if right else "FAILED"] += 1
            if not right:
                self.failed.append(seed)
                print(f"FAILED: {COMMAND} {seed}\n{told}", flush=True)
            elif (done := self.outcomes.total()) % 100 == 0 or done == self._count:
                print(f"{done}/{self._count} {time.monotonic() - self._begun:.0f} s", flush=True)


def seeds_of(text: str) -> list[int]:
    """Return the seeds that a text such as "7" or "1000-1999,2007" names."""
    found = []
    for part in text.split(","):
        if (ends := re.fullmatch(r"(\d+)(?:-(\d+))?", part)) is None:
            raise argparse.ArgumentTypeError(f'{text!r} names no seeds; give them as "7" or "1000-1999,2007"')
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return found


def main(arguments: Sequence[str] | None = None, serve: Serve = serve) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description="Train random loops of several compiled blocks.")
    parser.add_argument("--seeds", type=seeds_of, default="0-9999", help='"7" or "1000-1999,2007"; default: 0-9999')
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once; default: one for each core")
    parser.add_argument("--limit", type=seconds, default=seconds("24h"), help="begin no loop later than this: 90s, 2h")
    given = parser.parse_args(arguments)
    run = Run(given.seeds, time.monotonic() + given.limit, serve)
    workers = [threading.Thread(target=run.work) for _ in range(min(given.processes, len(given.seeds)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(", ".join(f"{count} {told}" for told, count in run.outcomes.most_common()))
    if run.failed:
        print(f"Again: {COMMAND} {','.join(map(str, sorted(run.failed)))}")
    if run.unrun:
        print(f"{run.unrun} of {len(given.seeds)} were not run.")
    return 1 if run.failed else 2 if run.unrun else 0


if __name__ == "__main__":
    sys.exit(main())
