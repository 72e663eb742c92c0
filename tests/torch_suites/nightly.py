"""Run torch's own suites through tencache: see README.md beside this file.

    PYTHONPATH=.:tests:tests/support python tests/torch_suites/nightly.py --shard 3/8 --limit 2h

Each case runs in a process that is replaced when it dies, hangs, or has run many: what torch's compiler keeps adds up.
The last line counts by suite; the exit status is 1 if anything is wrong with us, 2 if the time was up before the end.
"""

import argparse
import gc
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

from case_server import CaseDiedError, CaseServer, seconds
from verdict import OURS, Verdict

CASE_LIMIT_S = 600.0
MOST_BY_ONE_PROCESS = 150
SUITES = ("op_db", "module_db", "hop_db", "custom_op_db")


def serve(connection: Connection) -> None:
    """Send the names of all cases; then, for each name received, its verdict."""
    for variable in [name for name in os.environ if name.startswith("TENCACHE_")]:
        del os.environ[variable]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        import torch
        from cases import all_cases
        from trial import judge

        torch.set_num_threads(1)  # with more, some operations add up in any order
        cases = {case.name: case for case in all_cases()}
        gc.collect()
        gc.freeze()  # all of torch need not be looked through after each case
        connection.send(list(cases))
        while (name := connection.recv()) is not None:
            connection.send(judge(cases[name]))


class Server(CaseServer):
    """A process that runs cases, and has the names of all of them."""

    def __init__(self) -> None:
        super().__init__(serve, MOST_BY_ONE_PROCESS)
        self.names: list[str] = self.greeting

    def judge(self, name: str, limit_s: float) -> Verdict:
        """Return the verdict on a case; a process that dies or takes more than `limit_s` is an error of ours."""
        try:
            verdict: Verdict = self.ask(name, limit_s)
        except CaseDiedError as error:
            return Verdict(name, "error", detail=str(error))
        return verdict


def summary(verdicts: Iterable[Verdict]) -> str:
    """Return the last line: counts by suite."""
    by_suite: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_suite[verdict.name.split(":")[0]].append(verdict)
    return "; ".join(f"{suite} {_counts(by_suite[suite])}" for suite in SUITES if by_suite[suite])


def _counts(verdicts: Sequence[Verdict]) -> str:
    kinds = Counter(verdict.kind for verdict in verdicts)
    ran = [verdict for verdict in verdicts if verdict.ran]
    still = sum(not verdict.moved for verdict in ran if verdict.kind == "same")
    found = [
        f"{len(ran)} run",
        f"{kinds['mismatch']} mismatches",
        f"{kinds['error'] + kinds['no transfers'] + kinds['mended']} errors of ours",
        f"{still} without transfers",
        f"{sum(verdict.raised for verdict in ran)} above the floor",
    ]
    rest: Mapping[str, str] = {
        "unmoved": "known to leave nothing to move",
        "expected": "known to fail",
        "skipped": "skipped",
        "unstable": "where torch's own runs differ",
        "torch": "that torch's own backend refuses",
    }
    return ", ".join(found + [f"{kinds[kind]} {text}" for kind, text in rest.items() if kinds[kind]])


def choose(names: Sequence[str], shard: str, only: str) -> list[str]:
    """Return the part `shard`, such as "3/8", of the names that `only` is found in."""
    part, parts = map(int, shard.split("/"))
    if not 1 <= part <= parts:
        raise SystemExit(f"--shard {shard} is no part: give 1/{parts} to {parts}/{parts}.")
    return [name for name in names if re.search(only, name)][part - 1 :: parts]


def run(names: Sequence[str], server: Server, limit_s: float) -> Iterator[Verdict]:
    """Yield the verdict on each name, as long as there is time."""
    begun = time.monotonic()
    for name in names:
        if time.monotonic() - begun > limit_s:
            return
        yield server.judge(name, CASE_LIMIT_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description="Run torch's own suites through tencache.")
    parser.add_argument("--shard", default="1/1", help='a part of the cases, such as "3/8"')
    parser.add_argument("--limit", type=seconds, default=seconds("24h"), help="begin no case later than this: 90s, 2h")
    parser.add_argument("--only", default="", help="a regular expression that is found in a case's name")
    parser.add_argument("--names", nargs="*", help="these cases")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    given = parser.parse_args(arguments)
    server = Server()
    verdicts: list[Verdict] = []
    try:
        if given.names and (unknown := set(given.names) - set(server.names)):
            raise SystemExit(f"there is no case {', '.join(sorted(unknown))} in this torch.")
        chosen = given.names or choose(server.names, given.shard, given.only)
        if given.list:
            print("\n".join(chosen))
            return 0
        begun = time.monotonic()
        for verdict in run(chosen, server, given.limit):
            verdicts.append(verdict)
            place = f"{len(verdicts)}/{len(chosen)} {time.monotonic() - begun:.0f} s"
            print(f"{place} {verdict}", flush=True)
    finally:
        server.stop()
    if len(verdicts) < len(chosen):
        print(f"The time was up: {len(chosen) - len(verdicts)} cases were not run.")
    for verdict in verdicts:
        if verdict.kind in OURS:
            print(f"WRONG {verdict}")
    print(summary(verdicts), flush=True)
    if any(verdict.kind in OURS for verdict in verdicts):
        return 1
    return 2 if len(verdicts) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
