"""A timeline as a figure of Plotly's, in values: `{"data": [...], "layout": {...}}`. No torch here, and no Plotly.

From top to bottom, over one axis of time: memory of the device, lanes as planned, lanes as measured, bytes in host
memory and on disk, and how busy the links are. Where there is more than a screen shows, ops are merged: the fullest of
neighbouring ops stands for them, so that peaks stay what they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tencache_fx.reporting.timeline import Bar, Curve, Held, Lane, Timeline
from tencache_fx.units import format_bytes, format_ns

_HELD_COLORS = {
    Held.EXTERNAL: "#a3acb9",
    Held.OPTIMIZER: "#b07aa1",
    Held.PARAMETERS: "#4e79a7",
    Held.ENDS: "#76b7b2",
    Held.GRADIENTS: "#f28e2b",
    Held.ACTIVATIONS: "#59a14f",
    Held.RECOMPUTED: "#edc948",
    Held.SCRATCH: "#d9d2c5",
}
_LANE_COLORS = {
    Lane.GRAPH: "#cbd5e1",
    Lane.COMPUTE: "#4e79a7",
    Lane.COLLECTIVE: "#ff9da7",
    Lane.OUT: "#f28e2b",
    Lane.IN: "#59a14f",
    Lane.WRITE: "#b07aa1",
    Lane.READ: "#9c755f",
    Lane.UPDATE: "#76b7b2",
}
_SORT_COLORS = {"recompute": "#edc948", "stall": "#e15759"}
_BUDGET, _PLAIN, _MEASURED = "#c22f2f", "#555555", "#334155"
_LINKS = (Lane.COLLECTIVE, Lane.OUT, Lane.IN, Lane.WRITE, Lane.READ)
_LONGEST, _LONGEST_CALL = 4.0, 1.25  # of the planned time: between calls much else may run, which is not shown
_WINDOWS = 120  # in which the use of links is counted
_DOMAINS = {"y": (0.58, 1.0), "y2": (0.25, 0.55), "y3": (0.135, 0.225), "y4": (0.0, 0.105)}


CALL = "call to call"
"""The name of a measured bar that has all that runs between two calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run was seen to do: bars over the same axis, and what is known of the rest.

    `call_ns` is the median time from one call to the next, `peak_bytes` the most that the device held.
    """

    bars: tuple[Bar, ...] = ()
    call_ns: int | None = None
    peak_bytes: int | None = None


def draw(timeline: Timeline, budget_bytes: int | None, measured: Measured, columns: int) -> dict[str, Any]:
    """Return the figure of a timeline; of ops and copies at most so many `columns` are told apart."""
    planned_ns, seen_ns = timeline.replay.makespan_ns, max((bar.end_ns for bar in measured.bars), default=0)
    longest = _LONGEST_CALL if any(bar.name == CALL for bar in measured.bars) else _LONGEST
    end_ns = max(1, planned_ns, min(seen_ns, int(planned_ns * longest)))
    unit, scale = next((each for each in _TIME_UNITS if end_ns >= each[1]), _TIME_UNITS[-1])
    drawing = _Drawing(timeline, scale, end_ns, columns)
    data = [
        *drawing.memory(budget_bytes, measured.peak_bytes),
        *drawing.lanes(timeline.bars, measured=False),
        *drawing.lanes(measured.bars, measured=True),
        *drawing.tiers(),
        *drawing.link_use(),
    ]
    return {"data": data, "layout": drawing.layout(unit, measured)}


_Floats = np.ndarray[Any, np.dtype[np.float64]]
_TIME_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1))


class _Drawing:
    """The traces of one timeline."""

    def __init__(self, timeline: Timeline, scale: int, end_ns: int, columns: int) -> None:
        self.timeline, self.scale, self.end_ns, self.columns = timeline, scale, end_ns, columns

    def memory(self, budget_bytes: int | None, measured_bytes: int | None) -> Iterator[dict[str, Any]]:
        """Yield the device's memory: classes on top of one another, their sum, plain's, and the budget."""
        timeline, total = self.timeline, self.timeline.total_bytes
        kept = thin(timeline.replay.starts_ns, total.tolist(), self.columns, self.end_ns)
        x = [*self._times(timeline.replay.starts_ns[k] for k in kept), timeline.replay.makespan_ns / self.scale]
        for held, color in _HELD_COLORS.items():
            nbytes = timeline.held[held]
            if nbytes.any():
                yield {
                    **_line(held.value, x, _closed(nbytes[k] for k in kept), color, width=0),
                    "stackgroup": "held",
                    "fillcolor": color,
                    "hoverinfo": "skip",
                }
        text = [self._told(k) for k in kept]
        yield {
            **_line("all, as planned", x, _closed(total[k] for k in kept), "#222222", width=1.2),
            "text": [*text, *text[-1:]],
            "hovertemplate": "%{text}<extra></extra>",
        }
        yield from self._limits(budget_bytes, measured_bytes)

    def _limits(self, budget_bytes: int | None, measured_bytes: int | None) -> Iterator[dict[str, Any]]:
        plain, ends = self.timeline.plain, [0, self.end_ns / self.scale]
        kept = thin(plain.times_ns, plain.nbytes, self.columns, self.end_ns)
        yield {
            **_line(
                f"plain, peak {format_bytes(plain.peak_bytes)}",
                self._times(plain.times_ns[k] for k in kept),
                [plain.nbytes[k] for k in kept],
                _PLAIN,
                width=1.2,
            ),
            "line": {"shape": "hv", "width": 1.2, "color": _PLAIN, "dash": "dot"},
            "hovertemplate": "plain %{y:.4s}B<extra></extra>",
        }
        for name, nbytes, color, dash in (
            ("budget", budget_bytes, _BUDGET, "dash"),
            ("measured peak", measured_bytes, _MEASURED, "dashdot"),
        ):
            if nbytes is not None:
                yield {
                    **_line(f"{name} {format_bytes(nbytes)}", ends, [nbytes, nbytes], color, width=1.5),
                    "line": {"width": 1.5, "color": color, "dash": dash},
                    "hoverinfo": "name",
                }

    def _told(self, k: int) -> str:
        """Return what is said of the memory at a step."""
        timeline = self.timeline
        parts = [f"{held.value} {format_bytes(int(nbytes[k]))}" for held, nbytes in timeline.held.items() if nbytes[k]]
        op = timeline.problem.ops[k].name
        return f"op {k} {op}: {format_bytes(int(timeline.total_bytes[k]))}<br>{'<br>'.join(reversed(parts))}"

    def lanes(self, bars: Sequence[Bar], *, measured: bool) -> Iterator[dict[str, Any]]:
        """Yield the bars of all lanes that have any, a trace for each color."""
        groups: dict[tuple[Lane, str], list[Bar]] = {}
        for lane in Lane:
            found = sorted((bar for bar in bars if bar.lane is lane), key=lambda bar: bar.start_ns)
            for bar in merge(found, self.columns, self.end_ns):
                groups.setdefault((lane, bar.sort), []).append(bar)
        for (lane, sort), merged in groups.items():
            name = lane_name(lane, measured=measured)
            color = _SORT_COLORS.get(sort) or _LANE_COLORS[lane]
            yield {
                "type": "bar",
                "orientation": "h",
                "name": {"recompute": "recompute", "stall": "stall"}.get(sort, name),
                "yaxis": "y2",
                "y": [name] * len(merged),
                "base": self._times(bar.start_ns for bar in merged),
                "x": self._times(bar.duration_ns for bar in merged),
                "width": 0.8,
                "marker": {"color": color, "line": _outline(lane, color)},
                "hovertext": [_bar_text(bar) for bar in merged],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "showlegend": bool(sort in _SORT_COLORS),
                **(_labels(merged) if lane is Lane.GRAPH else {}),
            }

    def tiers(self) -> Iterator[dict[str, Any]]:
        """Yield the bytes in host memory and on disk."""
        for name, curve, lane in (
            ("in host memory", self.timeline.host, Lane.OUT),
            ("on disk", self.timeline.disk, Lane.WRITE),
        ):
            if curve.peak_bytes or name == "in host memory":
                yield self._tier(name, curve, _LANE_COLORS[lane])

    def _tier(self, name: str, curve: Curve, color: str) -> dict[str, Any]:
        kept = thin(curve.times_ns, curve.nbytes, self.columns, self.end_ns)
        x = [*self._times(curve.times_ns[k] for k in kept), self.end_ns / self.scale]
        return {
            **_line(name, x, _closed(curve.nbytes[k] for k in kept), color, width=1.5, axis="y3"),
            "fill": "tozeroy",
            "hovertemplate": f"{name}: %{{y:.4s}}B<extra></extra>",
        }

    def link_use(self) -> Iterator[dict[str, Any]]:
        """Yield how busy each link is, in per cent of the time of a window."""
        edges = np.linspace(0, self.timeline.replay.makespan_ns, _WINDOWS + 1)
        for lane in _LINKS:
            bars = self.timeline.lane(lane)
            if bars:
                busy = _busy(bars, edges)
                share = busy.sum() / max(1, self.timeline.replay.makespan_ns)
                y = np.round(100 * busy / np.maximum(1, np.diff(edges)), 2).tolist()
                name = f"{lane.value}, busy {share:.0%}"
                line = _line(name, self._times(edges), [*y, y[-1]], _LANE_COLORS[lane], width=1.5, axis="y4")
                yield {**line, "hovertemplate": f"{lane.value}: busy %{{y}} %<extra></extra>"}

    def layout(self, unit: str, measured: Measured) -> dict[str, Any]:
        """Return axes and marks."""
        timeline, forecast = self.timeline, self.timeline.plan.forecast
        planned, seen = ({bar.lane for bar in bars} for bars in (timeline.bars, measured.bars))
        lanes = [lane_name(lane, measured=False) for lane in Lane if lane in planned]
        lanes += [lane_name(lane, measured=True) for lane in Lane if lane in seen]
        bound = forecast.lower_bound_ns / self.scale
        axis = {"zeroline": False, "fixedrange": True, "gridcolor": "#e5e7eb", "automargin": True}
        return {
            "barmode": "overlay",
            "hovermode": "closest",
            "dragmode": "zoom",
            "template": "none",
            "xaxis": {
                "title": {"text": f"time, {unit}"},
                "range": [0, self.end_ns / self.scale],
                "anchor": "y4",
                "gridcolor": "#e5e7eb",
                "zeroline": False,
            },
            "yaxis": {**axis, "domain": _DOMAINS["y"], "title": {"text": "device"}, **_BYTES},
            "yaxis2": {
                **axis,
                "domain": _DOMAINS["y2"],
                "type": "category",
                "categoryorder": "array",
                "categoryarray": lanes[::-1],
                "range": [-0.6, len(lanes) - 0.4],
                "showgrid": False,
            },
            "yaxis3": {**axis, "domain": _DOMAINS["y3"], "title": {"text": "host, disk"}, "nticks": 4, **_BYTES},
            "yaxis4": {
                **axis,
                "domain": _DOMAINS["y4"],
                "title": {"text": "links"},
                "range": [0, 105],
                "nticks": 4,
                "ticksuffix": " %",
            },
            "shapes": [
                {"type": "line", "x0": bound, "x1": bound, "yref": "paper", "y0": 0, "y1": 0.55, "line": _BOUND_LINE}
            ],
            "annotations": [
                {
                    "x": bound,
                    "yref": "paper",
                    "y": 0.55,
                    "yanchor": "bottom",
                    "xanchor": "right",
                    "showarrow": False,
                    "text": f"lower bound {format_ns(forecast.lower_bound_ns)}",
                    "font": {"size": 11, "color": "#7c3aed"},
                }
            ],
        }

    def _times(self, times_ns: Iterable[float]) -> list[float]:
        return [float(time) / self.scale for time in times_ns]


_BYTES = {"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"}
_BOUND_LINE = {"color": "#7c3aed", "width": 1.2, "dash": "dot"}


def _line(
    name: str, x: Sequence[float], y: Sequence[float], color: str, *, width: float, axis: str = "y"
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "yaxis": axis,
        "x": x,
        "y": y,
        "line": {"shape": "hv", "width": width, "color": color},
    }


def _closed(values: Iterable[Any]) -> list[int]:
    """Return the values with the last one twice: it lasts until the end."""
    found = [int(value) for value in values]
    return [*found, *found[-1:]]


def _bar_text(bar: Bar) -> str:
    head = f"<b>{bar.name}</b> {format_ns(bar.duration_ns)}, from {format_ns(bar.start_ns)}"
    return f"{head}<br>{bar.note}" if bar.note else head


def _outline(lane: Lane, color: str) -> Mapping[str, Any]:
    """Return what makes short copies visible; ops and waits would hide one another with it."""
    if lane is Lane.GRAPH:
        return {"width": 0.6, "color": "white"}
    return {"width": 0 if lane is Lane.COMPUTE else 0.6, "color": color}


def _labels(bars: Sequence[Bar]) -> Mapping[str, Any]:
    return {
        "text": [bar.name for bar in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
    }


def lane_name(lane: Lane, *, measured: bool) -> str:
    """Return how a lane is labelled; whole graphs, or calls, are what is measured most often."""
    if not measured:
        return lane.value
    return "measured" if lane is Lane.GRAPH else f"measured {lane.value}"


def thin(times_ns: Sequence[int], values: Sequence[int], columns: int, end_ns: int) -> list[int]:
    """Return which points to draw: all, or of each column of pixels the highest, the lowest, the first and the last.

    >>> thin([0, 1, 2, 3, 900, 1000], [5, 9, 1, 4, 2, 7], columns=2, end_ns=1001)
    [0, 1, 2, 3, 4, 5]
    >>> thin([0, 1, 2, 3, 4, 900], [5, 6, 1, 9, 4, 7], columns=1, end_ns=1001)
    [0, 2, 3, 5]
    """
    if len(times_ns) <= 4 * columns:
        return list(range(len(times_ns)))
    found: set[int] = set()
    places = np.asarray(times_ns, dtype=np.int64) * columns // max(1, end_ns)
    for part in np.split(np.arange(len(times_ns)), np.flatnonzero(np.diff(places)) + 1):
        column = np.asarray(values)[part]
        found |= {int(part[0]), int(part[column.argmax()]), int(part[column.argmin()]), int(part[-1])}
    return sorted(found)


def merge(bars: Sequence[Bar], columns: int, end_ns: int) -> list[Bar]:
    """Return the bars of a lane to draw, which come by their start: those that share a column of pixels are merged.

    There is then one for each sort, as long as they are together, side by side.
    """
    if len(bars) <= columns:
        return list(bars)
    width_ns = max(1, end_ns // columns)
    groups: list[list[Bar]] = []
    for bar in bars:
        if groups and bar.end_ns - groups[-1][0].start_ns <= width_ns:
            groups[-1].append(bar)
        else:
            groups.append([bar])
    return [bar for group in groups for bar in (_merged(group) if len(group) > 1 else group)]


def _merged(group: Sequence[Bar]) -> Iterator[Bar]:
    sorts: dict[str, list[Bar]] = {}
    for bar in group:
        sorts.setdefault(bar.sort, []).append(bar)
    start_ns = group[0].start_ns
    for bars in sorts.values():
        longest, end_ns = max(bars, key=lambda bar: bar.duration_ns), start_ns + sum(bar.duration_ns for bar in bars)
        name = bars[0].name if len(bars) == 1 else f"{len(bars)}: {bars[0].name} to {bars[-1].name}"
        note = f"the longest: {longest.name}, {format_ns(longest.duration_ns)}<br>{longest.note}"
        yield replace(bars[0], name=name, start_ns=start_ns, end_ns=end_ns, note=note)
        start_ns = end_ns


def _busy(bars: Iterable[Bar], edges: _Floats) -> _Floats:
    """Return the time that bars, which do not overlap, have in each window."""
    ends = np.array([(bar.start_ns, bar.end_ns) for bar in bars], dtype=np.float64).ravel()
    done = np.concatenate([[0.0], np.cumsum(np.diff(ends) * (np.arange(ends.size - 1) % 2 == 0))])
    busy: _Floats = np.diff(np.interp(edges, ends, done))
    return busy
