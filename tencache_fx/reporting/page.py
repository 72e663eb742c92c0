"""A run as one HTML file that needs no network: its plans drawn by Plotly, which is in the file. No torch here.

The library and the figures are packed (gzip, base64) and unpacked by the browser, one figure when it is looked at.
"""

import base64
import gzip
import importlib.resources
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tencache_fx.errors import OptionError
from tencache_fx.planning.plan import Forecast
from tencache_fx.reporting.decisions import Decision, dearest_decisions
from tencache_fx.reporting.figure import draw
from tencache_fx.reporting.view import View
from tencache_fx.units import format_bytes, format_ns

MOST_BYTES = 5_000_000
"""A page is no larger: with many or large plans less of each is told apart."""

_ROOM_BYTES = 100_000  # for names, titles and tags

_COLUMNS = (800, 600, 400, 200, 100)


def write_page(path: Path, views: Sequence[View], title: str) -> int:
    """Write the page of a run to `path` and return its bytes.

    Raises `OptionError` without Plotly, without any plan, or if the file cannot be written.
    """
    if not views:
        raise OptionError("there is no plan to show; run a compiled model first.")
    text = build_page(views, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written to: {error.strerror}; name another file.") from error
    return len(text.encode())


def build_page(views: Sequence[View], title: str) -> str:
    """Return the page; the view with the longest step is shown first, of steps planned as a whole if there are any.

    Raises `OptionError` without Plotly.
    """
    library = _pack(_plotly())
    template = (importlib.resources.files("tencache_fx.reporting") / "page.html").read_text(encoding="utf-8")
    steps = [place for place, view in enumerate(views) if view.name.startswith("step ")] or range(len(views))
    chosen = max(steps, key=lambda place: (views[place].timeline.replay.makespan_ns, place))
    frames = [[_Frame(frame) for frame in _by_budget(view)] for view in views]
    kept = list(range(len(views)))
    for columns in _COLUMNS:
        packed = [_pack(_shown(view, each, columns)) for view, each in zip(views, frames, strict=True)]
        kept = _fitting(packed, chosen, MOST_BYTES - len(library) - len(template) - _ROOM_BYTES)
        if len(kept) == len(views):
            break
    scripts = [_script(f"view-{place}", packed[old]) for place, old in enumerate(kept)]
    names = json.dumps([views[old].name for old in kept]).replace("<", "\\u003c")
    left_out = len(views) - len(kept)
    parts = {
        "TITLE": escape(title),
        "LEFT": f"{left_out} more plans did not find room; tencache dump tells of them." if left_out else "",
        "NAMES": names,
        "CHOSEN": str(kept.index(chosen)),
        "PACKED": "\n".join([_script("plotly", library), *scripts]),
    }
    for mark, text in parts.items():
        template = template.replace(f"@{mark}@", text)
    return template


def _fitting(packed: Sequence[str], chosen: int, room_bytes: int) -> list[int]:
    """Return the places of what fits, in order: the chosen one first of all, then the smallest."""
    kept, left_bytes = {chosen}, room_bytes - len(packed[chosen])
    for place in sorted(range(len(packed)), key=lambda place: len(packed[place])):
        if place != chosen and len(packed[place]) <= left_bytes:
            kept.add(place)
            left_bytes -= len(packed[place])
    return sorted(kept)


def _by_budget(view: View) -> list[View]:
    """Return a view at all its device budgets, the least first; no limit comes last."""
    return sorted((view, *view.others), key=lambda each: (each.budget_bytes is None, each.budget_bytes))


class _Frame:
    """A view at one device budget, with all that does not depend on how much of it is told apart."""

    def __init__(self, view: View) -> None:
        self.view, self.facts, self.decisions = view, facts_of(view), decision_rows(view)

    def shown(self, columns: int) -> dict[str, Any]:
        """Return its data."""
        view = self.view
        return {
            "budget": "no limit" if view.budget_bytes is None else format_bytes(view.budget_bytes),
            "facts": self.facts,
            "figure": draw(view.timeline, view.budget_bytes, view.measured, columns),
            "decisions": self.decisions,
            "text": view.text,
        }


def _shown(view: View, frames: Sequence[_Frame], columns: int) -> str:
    """Return the data of a view as JSON; the budget of the run is the one chosen at first."""
    chosen = next(place for place, frame in enumerate(frames) if frame.view is view)
    return json.dumps({"chosen": chosen, "frames": [frame.shown(columns) for frame in frames]})


def facts_of(view: View) -> list[tuple[str, str]]:
    """Return the figures at the top of the page: pairs of a name and a value."""
    forecast, timeline = view.timeline.plan.forecast, view.timeline
    budget = "no limit" if view.budget_bytes is None else format_bytes(view.budget_bytes)
    over = forecast.makespan_ns / max(1, forecast.ideal_ns)
    rows = [
        ("device peak", f"{format_bytes(forecast.peak_bytes)} of {budget}"),
        ("plain peak", format_bytes(timeline.plain.peak_bytes)),
        ("step", f"{format_ns(forecast.makespan_ns)}, {over:.3f} of no limits"),
        ("lower bound", format_ns(forecast.lower_bound_ns)),
        ("stalls", f"{format_ns(forecast.stall_out_ns)} out, {format_ns(forecast.stall_in_ns)} in"),
        ("recomputed", format_ns(sum(bar.duration_ns for bar in timeline.bars if bar.sort == "recompute"))),
        *_collectives(forecast),
        ("link traffic", f"{format_bytes(forecast.d2h_bytes)} out, {format_bytes(forecast.h2d_bytes)} in"),
        ("host buffers, disk", f"{format_bytes(forecast.host_bytes)}, {format_bytes(forecast.disk_bytes)}"),
    ]
    if view.measured.call_ns is not None:
        rows.append(("measured, call to call", format_ns(view.measured.call_ns)))
    graphs = [bar for bar in view.measured.bars if bar.name in ("forward", "backward")]
    if graphs:
        rows.append(("measured, " + " and ".join(bar.name for bar in graphs), format_ns(graphs[-1].end_ns)))
    if view.measured.peak_bytes is not None:
        rows.append(("measured peak", format_bytes(view.measured.peak_bytes)))
    return rows


def _collectives(forecast: Forecast) -> list[tuple[str, str]]:
    if not forecast.collective_ns:
        return []
    exposed = format_ns(forecast.stall_collective_ns)
    return [("collectives", f"{format_ns(forecast.collective_ns)}, {exposed} of it exposed")]


def decision_rows(view: View) -> list[list[str]]:
    """Return the table of the most expensive decisions, its head first."""
    head = ["tensor", "decision", "bytes", "price", "price per GB", "waited", "copies", "what it is, and why"]
    return [head, *(_decision_cells(each) for each in dearest_decisions(view.timeline, view.captured, view.runs))]


def _decision_cells(decision: Decision) -> list[str]:
    per_gb = decision.price_per_gb_ns
    return [
        decision.name,
        decision.deed,
        format_bytes(decision.nbytes) if decision.nbytes else "",
        format_ns(decision.price_ns),
        "" if per_gb is None else format_ns(per_gb),
        format_ns(decision.stall_ns),
        format_ns(decision.copying_ns),
        decision.note.replace("<br>", "; "),
    ]


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise OptionError(
            "pages are drawn with plotly, which is not installed: pip install 'tencache_fx[view]'."
        ) from error
    return str(get_plotlyjs())


def _pack(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _script(name: str, packed: str) -> str:
    return f'<script type="text/plain" id="{name}">{packed}</script>'
