"""Timelines in the trace format of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing open. No torch here.

Each plan is a process and each lane a thread of it; what was measured is a second process. Device memory by class, and
bytes in host memory and on disk, are counters. An arrow leads from each copy out to the copy in of the same storage, by
way of its write and its read where it goes to disk.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tencache_fx.errors import OptionError
from tencache_fx.reporting.figure import lane_name
from tencache_fx.reporting.timeline import Bar, Curve, Lane, Timeline
from tencache_fx.reporting.view import View

_FLOW = (Lane.OUT, Lane.WRITE, Lane.READ, Lane.IN)
"""The lanes that a swap passes, in their order."""


def write_trace(path: Path, views: Sequence[View]) -> int:
    """Write the trace of all views to `path` and return its bytes; raises `OptionError` if it cannot be written."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(views))})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written to: {error.strerror}; name another file.") from error
    return len(text.encode())


def trace_events(views: Sequence[View]) -> Iterator[dict[str, Any]]:
    """Yield the events of all views: slices by lane in the order of time, then arrows, then counters."""
    numbers = itertools.count(1)
    for place, view in enumerate(views):
        planned, measured = 2 * place + 1, 2 * place + 2
        timeline = view.timeline
        yield _named("process_name", planned, f"planned: {view.name}")
        yield _named("process_sort_index", planned, planned, key="sort_index")
        yield from _slices(planned, timeline.bars, measured=False)
        yield from _flows(planned, numbers, timeline.bars)
        yield from _counters(planned, timeline)
        if view.measured.bars:
            yield _named("process_name", measured, f"measured: {view.name}")
            yield _named("process_sort_index", measured, measured, key="sort_index")
            yield from _slices(measured, view.measured.bars, measured=True)


def _slices(process: int, bars: Sequence[Bar], *, measured: bool) -> Iterator[dict[str, Any]]:
    for place, lane in enumerate(Lane):
        found = sorted((bar for bar in bars if bar.lane is lane), key=lambda bar: bar.start_ns)
        if not found:
            continue
        thread = _thread(process, lane)
        yield {**_named("thread_name", process, lane_name(lane, measured=measured)), "tid": thread}
        yield {**_named("thread_sort_index", process, place, key="sort_index"), "tid": thread}
        ends = [min(bar.end_ns, after.start_ns) for bar, after in pairwise(found)]  # times are rounded
        for bar, end_ns in zip(found, [*ends, found[-1].end_ns], strict=True):
            yield {
                "ph": "X",
                "pid": process,
                "tid": thread,
                "ts": bar.start_ns / 1000,
                "dur": max(0, end_ns - bar.start_ns) / 1000,
                "name": bar.name,
                "cat": bar.sort or lane.value,
                "args": {"what": bar.note.replace("<br>", "; ")} if bar.note else {},
            }


def _flows(process: int, numbers: Iterator[int], bars: Sequence[Bar]) -> Iterator[dict[str, Any]]:
    """Yield the arrows of the swaps: a begin, a step for each lane between, and an end, each within its slice.

    Perfetto's importer drops arrows whose id is not a number.
    """
    ways: dict[str, list[Bar]] = {}
    for bar in bars:
        if bar.storage:
            ways.setdefault(bar.storage, []).append(bar)
    for storage, found in ways.items():
        way = sorted(found, key=lambda bar: _FLOW.index(bar.lane))
        if len(way) < 2 or way[0].lane is not Lane.OUT:  # a load or a store
            continue
        number = next(numbers)
        for bar, phase in zip(way, ("s", *"t" * (len(way) - 2), "f"), strict=True):
            yield {
                "ph": phase,
                "pid": process,
                "tid": _thread(process, bar.lane),
                "ts": bar.start_ns / 1000,
                "id": number,
                "name": storage,
                "cat": "swap",
                **({"bp": "e"} if phase == "f" else {}),
            }


def _thread(process: int, lane: Lane) -> int:
    """Return the number of a lane's thread, unique in the trace.

    Perfetto shows threads of one number as one. It takes thread 0, and a thread with its process's number, for the main
    thread.
    """
    return 1000 * process + list(Lane).index(lane)


def _counters(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    held = {held.value: nbytes for held, nbytes in timeline.held.items() if nbytes.any()}
    for step, start_ns in enumerate(timeline.replay.starts_ns):
        values = {name: int(nbytes[step]) for name, nbytes in held.items()}
        yield _counter(process, "device bytes", start_ns, values)
    tiers: tuple[tuple[str, Curve], ...] = (("host bytes", timeline.host), ("disk bytes", timeline.disk))
    for name, curve in tiers:
        if curve.peak_bytes:
            for at_ns, nbytes in zip(curve.times_ns, curve.nbytes, strict=True):
                yield _counter(process, name, at_ns, {"swapped": nbytes})


def _counter(process: int, name: str, at_ns: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": process, "ts": at_ns / 1000, "name": name, "args": values}


def _named(what: str, process: int, value: object, *, key: str = "name") -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": 0, "name": what, "args": {key: value}}
