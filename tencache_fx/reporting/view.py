"""What there is to look at in a run: each plan with its timeline, and what was measured of it. No torch here."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from tencache_fx.errors import BudgetError
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.step import align
from tencache_fx.records import RegionRecord, StepRecord, StepRun
from tencache_fx.reporting.figure import CALL, Measured
from tencache_fx.reporting.step_tables import name_step, show_step
from tencache_fx.reporting.tables import show_summary
from tencache_fx.reporting.timeline import Bar, Lane, Timeline, region_timeline, step_timeline


@dataclass(frozen=True, kw_only=True)
class View:
    """One plan: its name, and what is shown of it. `captured` has the recipes of what is recomputed.

    `others` are the same at other device budgets.
    """

    name: str
    timeline: Timeline
    captured: Problem
    budget_bytes: int | None
    measured: Measured
    text: str
    runs: tuple[StepRun, ...] = ()
    others: tuple["View", ...] = ()


def views_of(
    regions: Sequence[RegionRecord],
    steps: Mapping[int, StepRecord],
    measured: Mapping[int, Mapping[str, Any]],
    budgets: int = 0,
) -> list[View]:
    """Return the views of a run: its steps, and then each region by itself; `measured` has figures of regions.

    What is planned as a whole, steps or else regions, is also planned at so many other device `budgets`.
    """
    by_number = {record.region: record for record in regions}
    in_steps = {run.region for record in steps.values() for run in record.runs}
    views = []
    for number, step in steps.items():
        name = f"step {number}: {_count(step)} on {step.device}"
        view = step_view(name, step, by_number, _measured_step(step, measured))
        others = [step_view(name, other, by_number, Measured()) for other in _other_steps(step, budgets)]
        views.append(replace(view, others=tuple(others)))
    for region in regions:
        beside = " (where its step has no plan)" if region.region in in_steps else ""
        name = f"region {region.region}: {region.name} on {region.device}{beside}"
        view = region_view(name, region, _measured_region(measured.get(region.region, {})))
        count = 0 if beside else budgets
        views.append(
            replace(view, others=tuple(region_view(name, r, Measured()) for r in _other_regions(region, count)))
        )
    return views


def step_view(name: str, record: StepRecord, regions: Mapping[int, RegionRecord], measured: Measured) -> View:
    """Return the view of a step; `regions` has the records of those that are known."""
    return View(
        name=name,
        timeline=step_timeline(record, regions),
        captured=record.problem,
        budget_bytes=record.device_budget,
        measured=measured,
        text=f"{name_step(record)}\n\n{show_step(record)}",
        runs=record.runs,
    )


def region_view(name: str, record: RegionRecord, measured: Measured) -> View:
    """Return the view of a region that is planned by itself."""
    return View(
        name=name,
        timeline=region_timeline(record),
        captured=record.captured,
        budget_bytes=record.problem.budgets.device_bytes,
        measured=measured,
        text=show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes),
    )


def _other_steps(record: StepRecord, count: int) -> Iterator[StepRecord]:
    """Yield the step planned at other budgets; what is kept free for memory that grows stays the same."""
    limit, planned = record.device_budget, record.problem.budgets.device_bytes
    reserved_bytes = 0 if limit is None or planned is None else limit - planned
    for problem, plan in _planned_anew(record.problem, record.plan.policy, count):
        nbytes = (problem.budgets.device_bytes or 0) + reserved_bytes
        other = replace(record, problem=problem, plan=plan, device_budget=nbytes)
        yield replace(other, plan=align(other.joined, plan))


def _other_regions(record: RegionRecord, count: int) -> Iterator[RegionRecord]:
    for problem, plan in _planned_anew(record.captured, record.plan.policy, count):
        yield replace(record, problem=problem, plan=plan, code_peak_bytes=None)


def _planned_anew(captured: Problem, policy: str, count: int) -> Iterator[tuple[Problem, Plan]]:
    """Yield the plans for `count` budgets, from the least that fits to the most that is of use, where there is one."""
    if not count:
        return
    from tencache_fx.planning.pareto import spread_budgets  # here: the planner is for this only
    from tencache_fx.planning.search import plan_region

    budgets = spread_budgets(captured, (policy,), count)
    for device_bytes in tqdm(budgets, unit="budget", leave=False, disable=None):
        with contextlib.suppress(BudgetError):
            yield plan_region(captured.within(device_bytes=device_bytes), policy)


def _count(record: StepRecord) -> str:
    calls = sum(not run.backward for run in record.runs)
    return f"{calls} calls of {len({run.region for run in record.runs})} regions"


def _measured_region(row: Mapping[str, Any]) -> Measured:
    """Return what a dump has of a region: the median times of its graphs, or else only that from call to call."""
    call_ns, forward_ns, backward_ns = (row.get(name) for name in ("call_to_call_ns", "forward_ns", "backward_ns"))
    spans: list[tuple[str, int, int, str]] = []
    if forward_ns is not None and backward_ns is not None:
        spans = [
            ("forward", 0, forward_ns, "median of the first calls"),
            ("backward", forward_ns, forward_ns + backward_ns, "median of the first calls; begins when that is over"),
        ]
    elif call_ns is not None:
        spans = [(CALL, 0, call_ns, f"median of {row.get('calls_seen')}, with all that runs between them")]
    bars = [
        Bar(lane=Lane.GRAPH, name=name, start_ns=start_ns, end_ns=end_ns, note=note)
        for name, start_ns, end_ns, note in spans
        if end_ns > start_ns
    ]
    return Measured(bars=tuple(bars), call_ns=call_ns, peak_bytes=row.get("device_peak_bytes"))


def _measured_step(record: StepRecord, measured: Mapping[int, Mapping[str, Any]]) -> Measured:
    """Return what is known of a step: a region that has one call in it is called once a step."""
    calls: dict[int, int] = {}
    for run in record.runs:
        calls[run.region] = calls.get(run.region, 0) + (not run.backward)
    once = [measured[index] for index, count in sorted(calls.items()) if count == 1 and index in measured]
    peaks = [peak for index in calls if (peak := measured.get(index, {}).get("device_peak_bytes"))]
    call_ns = once[0].get("call_to_call_ns") if once else None
    seen = _measured_region({"call_to_call_ns": call_ns, "calls_seen": once[0].get("calls_seen")} if once else {})
    return replace(seen, peak_bytes=max(peaks, default=None))
