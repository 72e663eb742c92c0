"""Records of compilations, kept in a directory for people and for `tencache dump`. No torch here.

    DIR/region-000/record.json      the region's problem, plan and graphs
                   forward.txt ...  each graph as text
                   measured.jsonl   what was measured later, one JSON object a line

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
from tencache_fx.records import RegionRecord
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
    try:
        paths = sorted(dump_dir.glob("region-*/record.json"))
    except OSError as error:
        raise OptionError(
            f"{shown_path(dump_dir)} cannot be read: {error.strerror}; name another directory."
        ) from error
    if not paths:
        raise OptionError(f"{dump_dir} holds no region; give the dump_dir of a run that compiled a model.")
    return tuple(_reading("RegionRecord", path, partial(from_json, RegionRecord)) for path in paths)


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


def read_problem(path: Path) -> Problem:
    """Return the problem in a file: a `Problem`'s JSON, or what was captured for a region's record.

    Raises `OptionError` when it cannot be read.
    """

    def read(text: str) -> Problem:
        raw = parse_json(text)
        is_record = isinstance(raw, dict) and "problem" in raw
        return from_raw(RegionRecord, raw).captured if is_record else from_raw(Problem, raw)

    return _reading("Problem", path, read)


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
