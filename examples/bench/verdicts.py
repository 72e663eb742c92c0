"""What the measurements of a case say: the table for docs/benchmarks.md, and what is not as it must be."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cases import Case
from tabulate import tabulate
from ways import Line, parse_ways

SAME = {"loss_first": 1e-3, "loss_last": 1e-3, "gradient_norm_first": 2e-2, "gradient_norm_last": 2e-2}
"""How far, as a share, a value may be from plain's: in bf16, kernels that differ round differently."""

FORECAST_TIME = 0.10
FORECAST_PEAK = 0.10


def over_budget(line: Line) -> bool:
    """Return True if the way held more than its budget, in a timed step or before."""
    budget = line.get("budget_bytes")
    return budget is not None and max(line["peak_bytes"], line.get("warm_up_peak_bytes", 0)) > budget


def apart(value: float, other: float) -> float:
    """Return how far `value` is from `other`, as a share of `other`; negative below it.

    >>> apart(97.0, 100.0)
    -0.03
    """
    return (value - other) / abs(other) if other else value


def faults(case: Case, lines: Sequence[Line]) -> Iterator[str]:
    """Yield, in one sentence each, what is not as it must be: `lines` are those of one run of `case`."""
    measured = {line["way"]: line for line in lines if "error" not in line}
    for line in lines:
        if "error" in line:
            yield f"{line['way']} failed: {line['error']}"
        else:
            yield from _faults_of_one(line, measured.get("plain"))
    for name, most in case.must.items():
        if name not in measured:
            yield f"{name} was not measured; it must run at {most:.3f} of plain or less."
        elif measured[name].get("ratio", 0.0) > most:
            yield f"{name} ran at {measured[name]['ratio']:.3f} of plain; it must be {most:.3f} or less."
    for name in case.unbeaten:
        if name in measured:
            yield from _beaten_by(measured[name], measured.values())
        else:
            yield f"{name} was not measured; nothing may beat it within its budget."


def _faults_of_one(line: Line, plain: Line | None) -> Iterator[str]:
    name = line["way"]
    if over_budget(line):
        held = max(line["peak_bytes"], line.get("warm_up_peak_bytes", 0))
        yield f"{name} held {held:,} bytes, {held - line['budget_bytes']:,} over its budget."
    if line.get("alloc_retries"):
        yield f"{name} made the allocator give back its cache {line['alloc_retries']} times in the timed steps."
    if plain is not None and line is not plain:
        for what, limit in SAME.items():
            off = apart(line[what], plain[what])
            if not abs(off) <= limit:  # so that NaN is a fault
                yield f"{name}: its {what.replace('_', ' ')} is {off:+.2%} from plain's; {limit:.1%} is the same."
    if "forecast" in line:
        off = apart(line["forecast"]["makespan_ns"], line["step_ns"])
        if abs(off) > FORECAST_TIME:
            yield f"{name}: the predicted time is {off:+.1%} from the measured one."
        off = apart(line["forecast"]["peak_bytes"], line["peak_bytes"])
        if not 0 <= off <= FORECAST_PEAK:
            yield f"{name}: the predicted peak is {off:+.1%} from the measured one; it must be 0 to 10 % above."


def _beaten_by(ours: Line, lines: Iterable[Line]) -> Iterator[str]:
    for other in lines:
        fits = other["peak_bytes"] <= ours["budget_bytes"]
        if fits and other["step_ns"] < ours["step_ns"]:
            behind = apart(ours["step_ns"], other["step_ns"])
            yield f"{ours['way']} is {behind:.1%} slower than {other['way']}, which fits its budget, too."


# ---------------------------------------------------------------- the table


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table with a row for each way that was measured or failed; MiB for small models, else GiB."""
    large = max((line.get("peak_bytes", 0) for line in lines), default=0) >= 1 << 30
    unit, unit_bytes = ("GiB", 1 << 30) if large else ("MiB", 1 << 20)
    headers = (
        "way", "ms", "spread", "ratio to plain", f"peak {unit}", f"reserved {unit}", f"budget {unit}", "",
        "stall ms", "hit rate", "predicted ms", f"predicted {unit}",
    )  # fmt: skip
    rows = [_row(line, unit_bytes) for line in lines]
    used = [k for k in range(len(headers)) if any(row[k] not in (None, "") for row in rows)]
    cells = [[row[k] for k in used] for row in rows]
    return str(tabulate(cells, [headers[k] for k in used], tablefmt="github", missingval="", disable_numparse=True))


def _row(line: Line, unit_bytes: int) -> tuple[str | None, ...]:
    def size(nbytes: int | None) -> str | None:
        return None if nbytes is None else f"{nbytes / unit_bytes:.2f}"

    budget = line.get("budget_bytes")
    if "error" in line:
        return (line["way"], "failed", *[None] * 4, size(budget), *[None] * 5)
    forecast, per_step = line.get("forecast", {}), line.get("per_step", {})
    stall_ns = per_step.get("stall_out_ns", 0) + per_step.get("stall_in_ns", 0)
    return (
        line["way"],
        f"{line['step_ns'] / 1e6:.1f}",
        f"{line['spread_ns'] / 1e6:.1f}",
        f"{line['ratio']:.3f}" if "ratio" in line else None,
        size(line["peak_bytes"]),
        size(line.get("reserved_bytes")),
        size(budget),
        None if budget is None else "OVER" if over_budget(line) else "ok",
        f"{stall_ns / 1e6:.1f}" if per_step else None,
        f"{per_step['hit_rate']:.3f}" if "hit_rate" in per_step else None,
        f"{forecast['makespan_ns'] / 1e6:.1f}" if forecast else None,
        size(forecast.get("peak_bytes")),
    )


def report(case: Case, lines: Sequence[Line]) -> str:
    """Return the table under a sentence that says what was measured, where, and by which command."""
    first, names = lines[0], [line["way"] for line in lines]
    options = ["--case", first["case"], "--steps", str(first["steps"])]
    if names != [way.name for way in parse_ways(case.ways)]:
        options += ["--ways", *names]
    if any("plain_ns" in line for line in lines):
        options.append("--pair")
    return (
        f"{first['device']}, torch {first['torch']}: {case.title}, forward and backward, medians of {first['steps']}\n"
        f"steps (`python examples/bench/run.py {shlex.join(options)}`):\n\n{table(lines)}"
    )


def write_between_markers(path: Path, name: str, text: str) -> None:
    """Put `text` between the markers of `name` in the file `path`, instead of what stands there, else at its end."""
    start, stop = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    block = f"{start}\n{text}\n{stop}"
    before = path.read_text() if path.exists() else ""
    pattern = re.compile(f"{re.escape(start)}\n.*?{re.escape(stop)}", re.DOTALL)
    after, found = pattern.subn(lambda match: block, before)
    path.write_text(after if found else f"{before}{block}\n")
