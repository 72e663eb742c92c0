"""A line chart as SVG text, alone or in a page of HTML: nothing to install, nothing fetched when it is looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from pathlib import Path

from tencache_fx.errors import OptionError
from tencache_fx.planning.pareto import Frontier

_WIDTH, _HEIGHT = 860, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 55  # margins around the plot
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart: its name, its points `(x, y)` by rising x, and whether it is drawn dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def write_chart(path: Path, svg: str) -> None:
    """Write a chart to `path`; raises `OptionError` unless that ends in .svg or .html, or if it cannot be written."""
    page = f'<!DOCTYPE html>\n<html><head><meta charset="utf-8"><title>{escape(path.stem)}</title></head>\n'
    forms = {".svg": svg, ".html": f"{page}<body>\n{svg}</body></html>\n"}
    if path.suffix not in forms:
        raise OptionError(f"{path} cannot be drawn: charts are written as .svg or .html; name a file that ends so.")
    try:
        path.write_text(forms[path.suffix])
    except OSError as error:
        raise OptionError(f"{path} cannot be written to: {error.strerror}; name another file.") from error


def draw_frontier(frontier: Frontier) -> str:
    """Return the frontier as a chart in SVG: device budget against step time, a line for each policy."""
    ideal_ns = max(1, frontier.ideal_ns)
    lines = [
        Line(
            name="best possible",
            points=tuple((point.device_bytes / 1e9, point.best_possible_ns / ideal_ns) for point in frontier.points),
            dashed=True,
        )
    ]
    for index, policy in enumerate(frontier.policies):
        pairs = ((point.device_bytes, point.outcomes[index]) for point in frontier.points)
        reached = tuple((nbytes / 1e9, found.makespan_ns / ideal_ns) for nbytes, found in pairs if found is not None)
        lines.append(Line(name=policy, points=reached))
    return line_chart("What device memory buys", "device budget, GB", "step time, of the time without limits", lines)


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Return the chart as SVG: each line with its dots (titled with their figures), ticks, labels and a legend."""
    xs = [x for line in lines for x, _ in line.points] or [0.0, 1.0]
    ys = [y for line in lines for _, y in line.points] or [0.0, 1.0]
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        f' font-size="13">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 24, title, 'font-size="16" text-anchor="middle"'),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_label, 'text-anchor="middle"'),
        _text(18, _HEIGHT / 2, y_label, f'text-anchor="middle" transform="rotate(-90 18 {_HEIGHT / 2:.0f})"'),
    ]
    for value in across.ticks():
        parts.append(_stroke(across.at(value), _TOP, across.at(value), _HEIGHT - _BOTTOM))
        parts.append(_text(across.at(value), _HEIGHT - _BOTTOM + 18, f"{value:g}", 'text-anchor="middle"'))
    for value in up.ticks():
        parts.append(_stroke(_LEFT, up.at(value), _WIDTH - _RIGHT, up.at(value)))
        parts.append(_text(_LEFT - 8, up.at(value) + 4, f"{value:g}", 'text-anchor="end"'))
    for index, line in enumerate(lines):
        parts.extend(_draw(line, _COLORS[index % len(_COLORS)], across, up, _TOP + 10 + 22 * index))
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """Maps values onto pixels, a little beyond the lowest and the highest."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        pad = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
        self.low, self.high, self.start, self.end = low - pad, high + pad, start, end

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values, about six of them."""
        raw = (self.high - self.low) / 6
        unit = 10.0 ** floor(log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
        first = -floor(-self.low / step)
        return [round(index * step, 12) for index in range(first, floor(self.high / step) + 1)]


def _draw(line: Line, color: str, across: _Axis, up: _Axis, legend_y: float) -> list[str]:
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    dots = [(across.at(x), up.at(y), f"{line.name}: {x:.4g}, {y:.4g}") for x, y in line.points]
    track = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots)
    x = _WIDTH - _RIGHT + 14
    return [
        f'<polyline points="{track}" fill="none" stroke="{color}" stroke-width="2"{dash}/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{escape(figures)}</title></circle>'
            for x, y, figures in dots
        ),
        f'<line x1="{x}" y1="{legend_y}" x2="{x + 24}" y2="{legend_y}" stroke="{color}" stroke-width="2"{dash}/>',
        _text(x + 30, legend_y + 4, line.name, ""),
    ]


def _stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
