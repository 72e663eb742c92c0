"""What is going on in this process: its regions, their reports, the runtime's counters."""

from tencache_fx.dump import RegionRecord
from tencache_fx.errors import OptionError
from tencache_fx.passes.alternatives import find_reasons
from tencache_fx.register import REGIONS
from tencache_fx.runtime.registry import engines
from tencache_fx.tables import show_measured, show_pool, show_reasons, show_summary


def regions() -> tuple[RegionRecord, ...]:
    """Return what was decided for each live region, oldest first."""
    return tuple(region.record for region in REGIONS.live() if region.record is not None)


def report() -> str:
    """Return, for every live region, what was planned, the pinned buffers it needs, and what was measured so far."""
    parts = []
    for region in REGIONS.live():
        if region.record is not None:
            record = region.record
            parts.append(f"region {record.region} {record.name} on {record.device}")
            parts.append(show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes))
            if record.plan.spills:
                parts.append(show_pool(record.plan))
            parts.append(show_measured(region.measured()))
    return "\n\n".join(parts) if parts else "No region has been compiled."


def explain(region: int = -1, *, most: int = 12) -> str:
    """Return why the plan of a live region is what it is, for its `most` largest tensors.

    `region` counts the live regions, oldest first; the newest by default. For each tensor every other choice is planned
    or replayed, and each resource is priced: see `tencache_fx.reasons.Reasons`. Takes seconds, for large regions a
    minute. Raises `OptionError` if there is no such region.
    """
    known = regions()
    if not -len(known) <= region < len(known):
        raise OptionError(f"there is no region {region}: {len(known)} are live; run a compiled model first.")
    record = known[region]
    return (
        f"region {record.region} {record.name}\n{show_reasons(find_reasons(record.captured, record.plan, most=most))}"
    )


def stats() -> dict[str, int | float]:
    """Return the runtime's counters since the last call, and its gauges, as one flat dict; call it once a step.

    See `tencache_fx.runtime.stats.Stats.take` for the names. With engines on several devices the figures are added up,
    but for `hit_rate`, of which the lowest counts. Empty while nothing has been offloaded.
    """
    total: dict[str, int | float] = {}
    for engine in engines():
        for name, value in engine.stats.take().items():
            known = total.get(name)
            total[name] = value if known is None else min(known, value) if name == "hit_rate" else known + value
    return total


def close() -> None:
    """Give back all pinned memory, threads and files. Models compiled so far must be compiled again before they run."""
    for engine in engines():
        engine.close()
