"""Looks into this process: its options, its regions, their reports, the runtime's counters."""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tencache_fx import compat
from tencache_fx.errors import OptionError
from tencache_fx.model_state.modules import options_of_process
from tencache_fx.native_code import stop_builds
from tencache_fx.options import SETTINGS
from tencache_fx.planning.explain import find_reasons
from tencache_fx.records import RegionRecord, StepRecord
from tencache_fx.region.cache_uses import count_uses, show_uses
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.reporting.page import write_page
from tencache_fx.reporting.step_tables import name_step, show_step, tell_storage
from tencache_fx.reporting.tables import (
    show_directories,
    show_measured,
    show_pool,
    show_reached,
    show_reasons,
    show_summary,
    show_writes,
)
from tencache_fx.reporting.view import views_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import close_engines, engines, open_engine, open_swap_points
from tencache_fx.runtime.stats import Counts, no_counts
from tencache_fx.stages import STAGES, show_times
from tencache_fx.units import format_bytes


def configure(*, reset: bool = False, **options: object) -> Mapping[str, object]:
    """Set process-wide defaults for later compilations and return all that are set; `reset` forgets earlier ones.

    `host_budget`, `spill_dir`, `spill_budget` and `spill_write_budget` count at once for what is open already, up or
    down: after a `BudgetError`, raise the budget and try again. Values in other directories are read there. The next
    step is planned for them; a budget that was given to `torch.compile` is the most that its region takes.

    `device_budget` counts from the next step on for regions that are planned together (`scope="step"`), unless it was
    given to `torch.compile`; nothing is compiled again for it.

    Raises `OptionError`, and changes nothing, when a name or a value is wrong, or a budget is below what is in use.
    Whether other sizes fit the machine is checked when a model is compiled, because only then the device is known.
    """
    before = SETTINGS.given
    given = SETTINGS.configure(reset=reset, **options)
    with contextlib.ExitStack() as undo:
        undo.callback(SETTINGS.configure, reset=True, **before)
        for engine in engines():
            _carry_over(engine, options, undo)
        undo.pop_all()
    return given


def _carry_over(engine: Engine, options: Mapping[str, object], undo: contextlib.ExitStack) -> None:
    """Have an open engine as it was configured by `options`; `undo` takes that back."""
    undo.callback(setattr, engine, "serves_all", engine.serves_all)
    engine.serves_all = False  # a region that needs all of it asks again
    if "host_budget" in options:
        chosen = options_of_process(engine.device, spill_dir=None, spill_budget="auto")
        undo.callback(engine.resize_host_budget, engine.pool.budget_bytes)
        engine.resize_host_budget(chosen.host_budget)
        engine.serves_all = True
    store, moves = engine.store, options.get("spill_dir") not in (None, "none", (), [])
    if moves or (store is not None and "spill_budget" in options):
        kept = {} if moves or store is None else {"spill_dir": store.directories}
        chosen = options_of_process(engine.device, **kept)
        if store is not None:
            undo.callback(store.resize_budget, store.budget_bytes)
            undo.callback(store.spill_to, store.directories)
        open_engine(
            engine.device,
            host_budget_bytes=engine.pool.budget_bytes,
            spill_dirs=chosen.spill_dir,
            spill_budget_bytes=chosen.spill_budget,
            spill_write_bytes_per_day=chosen.spill_write_budget,
            checksum=chosen.checksum,
        )
        if store is not None and "spill_budget" in options:
            store.resize_budget(chosen.spill_budget)
    if store is not None and "spill_write_budget" in options:
        chosen = options_of_process(engine.device, spill_dir=store.directories)
        undo.callback(store.write_pace.limit, store.write_pace.bytes_per_day)
        store.write_pace.limit(chosen.spill_write_budget)


def regions() -> tuple[RegionRecord, ...]:
    """Return the record of each live region's plan, oldest first."""
    return tuple(region.record for region in REGIONS.live() if region.record is not None)


def steps() -> tuple[StepRecord, ...]:
    """Return the plan of each step that was planned as a whole (`scope="step"`), the one that ran last at the end."""
    return tuple(record for points in open_swap_points() for record in recorder_of(points).records())


def report(*, html: str | os.PathLike[str] | None = None) -> str:
    """Return, for every live region, its plan, the pinned buffers it needs, and what was measured so far.

    Each plan says which resource bounds the step, and how busy the others are; for a model that is one region, also how
    much of that bound was reached.

    The plans of whole steps follow, where regions are planned together, what parameters are on disk, and the spill
    directories: what was written to each, and the share that it gets. At the end, what compiling took, by stages, and
    how much of what is kept on disk was there.
    With `html` the plans are also drawn, as a page that is written there; it needs plotly (`tencache_fx[view]`).
    Raises `OptionError` if there is nothing to draw, or the page cannot be written.
    """
    if html is not None:
        figures = {region.record.region: region.measured() for region in REGIONS.live() if region.record is not None}
        views = views_of(regions(), dict(enumerate(steps())), figures)
        write_page(Path(html), views, f"tencache: {Path(html).stem}")
    parts = []
    planned = [region for region in REGIONS.live() if region.record is not None]
    for region in planned:
        if (record := region.record) is not None:
            parts.append(f"region {record.region} {record.name} on {record.device}")
            if region.in_steps:
                parts.append("It is planned with the step that it is in; this is what it does where there is no plan:")
            parts.append(show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes))
            if record.plan.transfers:
                parts.append(show_pool(record.plan))
            measured = region.measured()
            parts.append(show_measured(measured))
            if len(planned) == 1 and (call_to_call_ns := measured["call_to_call_ns"]) is not None:
                parts.append(show_reached(record.problem, record.plan, call_to_call_ns, measured.get("host_ns")))
    parts.extend(f"{name_step(step)}\n\n{show_step(step)}" for step in steps())
    if not parts:
        return "No region has been compiled."
    disk_bytes = {engine.device: engine.parameter_disk_bytes for engine in engines()}
    parts.extend(f"parameters of {device} on disk: {format_bytes(n)}" for device, n in disk_bytes.items() if n)
    for store in (engine.store for engine in engines() if engine.store is not None):
        parts.append(show_directories(store.uses()))
        parts.append(show_writes(store.written_bytes, store.open_ns, store.write_pace.bytes_per_day))
    spent_ns = Counter(STAGES.spent_ns()) + Counter({"Dynamo": compat.dynamo_ns()})
    ends = f"compiling, so far: {show_times(spent_ns)}\nread from caches: {show_uses(count_uses())}"
    return "\n\n".join((*parts, ends))


def explain(region: int | None = None, *, step: int | None = None, tensor: str | None = None, most: int = 12) -> str:
    """Return why a plan is what it is, for its `most` largest tensors, or for one `tensor`, such as "mm_5".

    `region` counts the live regions, oldest first; `step` the plans of whole steps, the one that ran last at the end.
    Without either it is the last step, or if there is none the newest region. A tensor of a step is named with the
    region and the call that it is of, such as "3.0:mm_5". For each tensor every other choice is planned or replayed,
    and each resource is priced: see `tencache_fx.planning.explain.Reasons`. Takes seconds, for large regions a minute.
    Raises `OptionError` if there is no such region, step or tensor.
    """
    if region is not None and step is not None:
        raise OptionError("give a region or a step, not both.")
    planned = steps() if region is None else ()
    if region is None and (planned or step is not None):
        record = _pick("step", -1 if step is None else step, planned)
        told = [tell_storage(record, tensor)] if tensor is not None and tensor in record.joined.keys else []
        reasons = find_reasons(record.problem, record.plan, most=most, tensor=tensor)
        return "\n".join([name_step(record), *told, show_reasons(reasons)])
    found = _pick("region", -1 if region is None else region, regions())
    reasons = find_reasons(found.captured, found.plan, most=most, tensor=tensor)
    return f"region {found.region} {found.name}\n{show_reasons(reasons)}"


_Record = TypeVar("_Record")


def _pick(kind: str, index: int, found: Sequence[_Record]) -> _Record:
    if not -len(found) <= index < len(found):
        raise OptionError(f"there is no {kind} {index}: {len(found)} are live; run a compiled model first.")
    return found[index]


def stats() -> Counts:
    """Return the runtime's counters since the last call, and its gauges, as one flat dict; call it once a step.

    See `tencache_fx.runtime.stats.Stats.take` for the names. With engines on several devices the figures are added up,
    but for `hit_rate`, of which the lowest counts. Zeros while nothing has been offloaded, and a `hit_rate` of 1.
    """
    REGIONS.give_back()
    total = no_counts()
    for engine in engines():
        for name, value in engine.stats.take().items():
            known = total.get(name)
            total[name] = value if known is None else min(known, value) if name == "hit_rate" else known + value
    return total


def close() -> None:
    """Give back all pinned memory, threads and files; end compilers that run.

    Models compiled so far must be compiled again before they run.
    """
    close_engines()
    stop_builds()
