"""Run a case of `cases.py` in the ways of `ways.py`, side by side, and print a JSON line for each and a table.

    python examples/bench/run.py --case A                                  # the case's own ways
    python examples/bench/run.py --case A --ways plain tencache:teraio@13.8 checkpoint --steps 7 --json out.jsonl
    python examples/bench/run.py --case deep --in-process --must           # fail if anything is not as it must be
    python examples/bench/run.py --case A --from out.jsonl --markdown docs/benchmarks.md  # runs nothing

How a way is written, budgets above all, is said at the top of `ways.py`. Each way runs in a process of its own; with
--in-process all of them run in this one, which saves starting torch, but then one that crashes ends the run. Ours run
under a hard cap: torch's allocator refuses to reserve more than a tenth above the budget, which is for the gaps between
tensors, so a way that needs more fails (`--cap 1.1`).
"""

import argparse
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CASES
from measure import Request, Workload, measure, one_line
from verdicts import faults, report, write_between_markers
from ways import Line, Way, WayError, budget_bytes, needs_plain, parse_ways

import tencache_fx

FEWEST_STEPS = 5


def measure_apart(request: Request, *, timeout_s: float) -> dict[str, Any]:
    """Measure in a process of its own; one that crashes or takes longer than `timeout_s` is an error, too."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        script = Path(__file__).with_name("measure.py")
        command = [sys.executable, str(script), json.dumps(dataclasses.asdict(request)), str(result)]
        with log.open("wb") as file:
            # A session of its own: compilers start workers, and all must go when the time is up.
            child = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                code = child.wait(timeout_s)
                error = f"exit status {code}: {_last_line(log)}"
            except subprocess.TimeoutExpired:
                error = f"TimeoutError: not done within {timeout_s:g} s; the last it said: {_last_line(log)}"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        if result.exists():
            line: dict[str, Any] = json.loads(result.read_text())
            return line
    return _failed(request, error)


def measure_here(request: Request, *, timeout_s: float, workload: Workload) -> dict[str, Any]:
    """Measure in this process; past `timeout_s` the process says where it hangs, and ends."""
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        return measure(workload, request)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _failed(request: Request, error: str) -> dict[str, Any]:
    about = {"torch": torch.__version__, "device": request.device, "steps": request.steps}
    return {"case": request.case, "way": request.way, "budget_bytes": request.budget_bytes, **about, "error": error}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "nothing"


def run(ways: Sequence[Way], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every way, in order, and print each line as it comes; return the lines."""
    measure_one: Callable[[Request], dict[str, Any]] = partial(measure_apart, timeout_s=arguments.timeout)
    if arguments.in_process:
        workload = Workload(CASES[arguments.case], torch.device(arguments.device))
        measure_one = partial(measure_here, timeout_s=arguments.timeout, workload=workload)
    lines: list[dict[str, Any]] = []
    for way in ways:
        request = Request(
            case=arguments.case,
            way=way.name,
            budget_bytes=None,
            device=arguments.device,
            steps=arguments.steps,
            compiler=arguments.compiler,
            cap=arguments.cap,
            pair=arguments.pair,
            dump_dir=arguments.dump,
        )
        try:
            line = measure_one(dataclasses.replace(request, budget_bytes=budget_bytes(way, lines)))
        except WayError as error:
            line = _failed(request, one_line(error))
        plain = next((each for each in [*lines, line] if each["way"] == "plain" and "error" not in each), None)
        plain_ns = line.get("plain_ns", plain and plain["step_ns"])
        if plain_ns is not None and "error" not in line:
            line["ratio"] = round(line["step_ns"] / plain_ns, 4)
        lines.append(line)
        print(json.dumps(line), flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return lines


def read_lines(paths: Sequence[Path], case: str) -> list[Line]:
    """Return what earlier runs of `case` wrote; of a way measured several times, the last."""
    texts = [text for path in paths for text in path.read_text().splitlines()]
    lines = [line for line in map(json.loads, texts) if line["case"] == case]
    return list({line["way"]: line for line in lines}.values())


def main() -> int:
    """Run, show, and with --must return 1 if anything is not as it must be."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the traces that tell a CPU's peak need no announcement
    parser = _parser()
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    if arguments.steps < FEWEST_STEPS:
        parser.error(f"--steps {arguments.steps} is too few for a median; give {FEWEST_STEPS} or more.")
    try:
        ways = parse_ways(arguments.ways or case.ways)
    except WayError as error:
        parser.error(str(error))
    if any(needs_plain(way) for way in ways):
        ways = parse_ways(["plain", *(way.name for way in ways)])
    lines: Sequence[Line] = read_lines(arguments.sources, arguments.case) if arguments.sources else run(ways, arguments)
    if not lines:
        parser.error(f"the files hold no line of case {arguments.case}.")
    text = report(case, lines)
    found = list(faults(case, lines))
    print("\n" + "\n".join([text, "", *(f"- {fault}" for fault in found)]), flush=True)
    if arguments.markdown:
        write_between_markers(arguments.markdown, arguments.case, text)
    tencache_fx.close()
    return 1 if arguments.must and found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="default: the case's own; see ways.py")
    parser.add_argument("--steps", type=int, default=7, help="timed steps, 5 or more (default: 7)")
    parser.add_argument("--in-process", action="store_true", help="run all ways in this process")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each way (default: 300)")
    parser.add_argument("--cap", type=float, default=1.1, help="budgets that torch may reserve (default: 1.1)")
    parser.add_argument("--no-cap", dest="cap", action="store_const", const=None, help="see how far a way goes over it")
    parser.add_argument("--pair", action="store_true", help="time plain again after each way, for the ratio to it")
    parser.add_argument("--must", action="store_true", help="exit with 1 if anything is not as it must be")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each line to this file, too")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", metavar="FILE", help="show these lines, run none"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between this file's markers")
    parser.add_argument("--dump", metavar="DIR", help="keep each region's problem and plan in DIR/CASE/WAY")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    return parser


if __name__ == "__main__":
    sys.exit(main())
