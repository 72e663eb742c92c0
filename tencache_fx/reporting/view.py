"""What there is to look at in a run: each plan with its timeline, and what was measured of it. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tencache_fx.planning.problem import Problem
from tencache_fx.records import RegionRecord, StepRecord, StepRun
from tencache_fx.reporting.figure import Measured
from tencache_fx.reporting.step_tables import name_step, show_step
from tencache_fx.reporting.tables import show_summary
from tencache_fx.reporting.timeline import Bar, Lane, Timeline, region_timeline, step_timeline


@dataclass(frozen=True, kw_only=True)
class View:
    """One plan: its name, and what is shown of it. `captured` has the recipes of what is recomputed."""

    name: str
    timeline: Timeline
    captured: Problem
    budget_bytes: int | None
    measured: Measured
    text: str
    runs: tuple[StepRun, ...] = ()


def views_of(
    regions: Sequence[RegionRecord], steps: Mapping[int, StepRecord], measured: Mapping[int, Mapping[str, Any]]
) -> list[View]:
    """Return the views of a run: its steps, and then each region by itself."""
    by_number = {record.region: record for record in regions}
    in_steps = {run.region for record in steps.values() for run in record.runs}
    views = [
        View(
            name=f"step {number}: {_count(record)} on {record.device}",
            timeline=step_timeline(record, by_number),
            captured=record.problem,
            budget_bytes=record.device_budget,
            measured=_measured_step(record, measured),
            text=f"{name_step(record)}\n\n{show_step(record)}",
            runs=record.runs,
        )
        for number, record in steps.items()
    ]
    for record in regions:
        beside = " (where its step has no plan)" if record.region in in_steps else ""
        views.append(
            View(
                name=f"region {record.region}: {record.name} on {record.device}{beside}",
                timeline=region_timeline(record),
                captured=record.captured,
                budget_bytes=record.problem.budgets.device_bytes,
                measured=_measured_region(measured.get(record.region, {})),
                text=show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes),
            )
        )
    return views


def _count(record: StepRecord) -> str:
    calls = sum(not run.backward for run in record.runs)
    return f"{calls} calls of {len({run.region for run in record.runs})} regions"


def _measured_region(row: Mapping[str, Any]) -> Measured:
    """Return what a dump has of a region: the median time from one call to the next, and the device's peak."""
    call_ns = row.get("call_to_call_ns")
    note = f"median of {row.get('calls_seen')} calls, with all that runs between them"
    bars = (Bar(lane=Lane.GRAPH, name="call to call", start_ns=0, end_ns=call_ns, note=note),) if call_ns else ()
    return Measured(bars=bars, peak_bytes=row.get("device_peak_bytes"))


def _measured_step(record: StepRecord, measured: Mapping[int, Mapping[str, Any]]) -> Measured:
    """Return what is known of a step: a region that has one call in it is called once a step."""
    calls: dict[int, int] = {}
    for run in record.runs:
        calls[run.region] = calls.get(run.region, 0) + (not run.backward)
    once = [measured[index] for index, count in sorted(calls.items()) if count == 1 and index in measured]
    peaks = [peak for index in calls if (peak := measured.get(index, {}).get("device_peak_bytes"))]
    bars = _measured_region(once[0]).bars if once else ()
    return Measured(bars=bars, peak_bytes=max(peaks, default=None))
