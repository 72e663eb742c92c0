"""Records of compilations, kept in a directory for people and for `tencache dump`. No torch here.

    DIR/region-000/record.json      the region's problem, plan and graphs
                   forward.txt ...  each graph as text
                   measured.jsonl   what was measured later, one JSON object a line
    DIR/step-000/record.json        the runs, problem and plan of a step that was planned as a whole
                 schedule.txt       what each runtime op of each run does

A directory belongs to one process; its records replace those of an earlier run.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tencache_fx.errors import OptionError
from tencache_fx.option_values import shown_path
from tencache_fx.planning.problem import Problem
from tencache_fx.records import RegionRecord, StepRecord
from tencache_fx.reporting.step_tables import list_step
from tencache_fx.reporting.tables import show_graph
from tencache_fx.serialization import from_json, from_raw, parse_json, to_json


def write_region(dump_dir: Path, record: RegionRecord) -> Path:
    """Write `record` into its folder below `dump_dir`, made if need be, and return the folder.

    Raises `OptionError` when it cannot be written.
    """
    folder = _folder(dump_dir, record.region)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.txt"), *folder.glob("measured.jsonl")):
            old.unlink()
        for listing in record.listings:
            (folder / f"{listing.phase}.txt").write_text(show_graph(listing) + "\n")
        (folder / "record.json").write_text(to_json(record) + "\n")
    except OSError as error:
        raise _unwritable(dump_dir, error) from error
    return folder


def write_step(dump_dir: Path, number: int, record: StepRecord) -> Path:
    """Write the record of the `number`-th step of a process below `dump_dir`, and return its folder.

    Raises `OptionError` when it cannot be written.
    """
    folder = dump_dir / f"step-{number:03d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedule.txt").write_text(list_step(record) + "\n")
        (folder / "record.json").write_text(to_json(record) + "\n")
    except OSError as error:
        raise _unwritable(dump_dir, error) from error
    return folder


def write_measured(dump_dir: Path, region: int, measured: Mapping[str, object]) -> None:
    """Append what was measured of a region: `measured` holds JSON values by name, units last ("step_ns").

    Raises `OptionError` when it cannot be written.
    """
    try:
        with (_folder(dump_dir, region) / "measured.jsonl").open("a") as file:
            file.write(json.dumps(measured) + "\n")
    except OSError as error:
        raise _unwritable(dump_dir, error) from error


def read_regions(dump_dir: Path) -> tuple[RegionRecord, ...]:
    """Return the records below `dump_dir`, by region.

    Raises `OptionError` when there are none, or one cannot be read.
    """
    paths = _record_paths(dump_dir, "region")
    if not paths:
        raise OptionError(f"{dump_dir} holds no region; give the dump_dir of a run that compiled a model.")
    return tuple(_reading("RegionRecord", path, partial(from_json, RegionRecord)) for path in paths)


def read_steps(dump_dir: Path) -> dict[int, StepRecord]:
    """Return the records of whole steps below `dump_dir`, by number; empty without any.

    Raises `OptionError` when one cannot be read.
    """
    read = partial(from_json, StepRecord)
    paths = _record_paths(dump_dir, "step")
    return {int(path.parent.name.partition("-")[2]): _reading("StepRecord", path, read) for path in paths}


def _record_paths(dump_dir: Path, kind: str) -> list[Path]:
    try:
        found = sorted(dump_dir.glob(f"{kind}-*/record.json"))
    except OSError as error:
        raise OptionError(
            f"{shown_path(dump_dir)} cannot be read: {error.strerror}; name another directory."
        ) from error
    return [path for path in found if path.parent.name.removeprefix(f"{kind}-").isdecimal()]


def read_measured(dump_dir: Path, region: int) -> tuple[dict[str, Any], ...]:
    """Return the measured figures of a region, oldest first; empty without any.

    Raises `OptionError` when it cannot be read.
    """
    path = _folder(dump_dir, region) / "measured.jsonl"
    if not path.exists():
        return ()
    rows = tuple(_reading("JSON lines", path, lambda text: [parse_json(line) for line in text.splitlines()]))
    if not all(isinstance(row, dict) for row in rows):
        raise OptionError(f"{path} cannot be read as JSON lines: a line is no JSON object; {_REMEDY}.")
    return rows


def read_planned(path: Path) -> Problem | RegionRecord | StepRecord:
    """Return what a file has: a problem, or the record of a region or of a step.

    Raises `OptionError` when it cannot be read.
    """

    def read(text: str) -> Problem | RegionRecord | StepRecord:
        raw = parse_json(text)
        if not isinstance(raw, dict) or "problem" not in raw:
            return from_raw(Problem, raw)
        return from_raw(StepRecord, raw) if "runs" in raw else from_raw(RegionRecord, raw)

    return _reading("Problem", path, read)


def read_problem(path: Path) -> Problem:
    """Return the problem in a file: a problem by itself, what was captured for a region, or a step's.

    Raises `OptionError` when it cannot be read.
    """
    return captured_of(read_planned(path))


def captured_of(found: Problem | RegionRecord | StepRecord) -> Problem:
    """Return the problem to plan again."""
    if isinstance(found, Problem):
        return found
    return found.captured if isinstance(found, RegionRecord) else found.problem


_T = TypeVar("_T")

_REMEDY = "give a file as a run wrote it, or run the model again with dump_dir"


def _reading(kind: str, path: Path, read: Callable[[str], _T]) -> _T:
    """Return what `read` makes of a file's text; raises `OptionError` where that cannot be had, or is damaged."""
    try:
        return read(path.read_text())
    except OSError as error:
        raise OptionError(f"{shown_path(path)} cannot be read: {error.strerror}; name another file.") from error
    except ValueError as error:
        raise OptionError(f"{path} cannot be read as {kind}: {str(error).rstrip('.')}; {_REMEDY}.") from error


def _folder(dump_dir: Path, region: int) -> Path:
    return dump_dir / f"region-{region:03d}"


def _unwritable(dump_dir: Path, error: OSError) -> OptionError:
    return OptionError(f"dump_dir {dump_dir} cannot be written to: {error.strerror}; name another directory.")
