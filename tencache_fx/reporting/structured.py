"""A region's plan and its rewritten graphs as artifacts of torch's structured log, which tlparse shows.

Nothing is made unless that log is on: `TORCH_TRACE=DIR` turns it on.
"""

from functools import partial

from torch._logging._internal import trace_structured

from tencache_fx.records import RegionRecord
from tencache_fx.reporting.tables import show_graph, show_summary, show_tensors


def log_artifacts(record: RegionRecord) -> None:
    """Write what was decided for a region, and its graphs, to torch's structured log, if there is one."""
    _log(f"tencache_region_{record.region}_plan", partial(_plan_text, record))
    for listing in record.listings:
        _log(f"tencache_region_{record.region}_{listing.phase}", partial(show_graph, listing))


def _plan_text(record: RegionRecord) -> str:
    summary = show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes)
    return f"{record.name} on {record.device}\n\n{summary}\n\n{show_tensors(record.problem, record.plan)}"


def _log(name: str, text: "partial[str]") -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
