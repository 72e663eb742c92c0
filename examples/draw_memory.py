"""Draw device memory over one training step of the small GPT: plain `torch.compile` beside tencache, and the budget.

    python examples/draw_memory.py                # writes docs/images/memory.svg from a run on this machine's CPU

The model, the text and the budget (60 % of what plain training holds) are those of `train_gpt.py`. PyTorch's profiler
records each allocation and each free of one step. "Device memory" on a CPU is what the step holds: parameters, inputs,
activations and gradients, as in `train_gpt.py`. Each curve is drawn over its own step, from 0 to 100 % of its time: the
picture is about memory, and the times of a machine under a profiler mean little.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from train_gpt import GPT, batches, choose_compiler, compile_plain, compile_tencache, make_parser, read_sources

import tencache_fx
from tencache_fx.units import format_bytes

Curve = list[tuple[float, int]]
"""Points (share of the step's time, bytes held from then on), by rising time."""

START = "draw_memory.start"
WARM_UP_STEPS = 8  # the first steps may plan a region anew
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 62, 20, 48, 50
PLAIN, OURS, LIMIT = "#e8833a", "#2f6fde", "#c22f2f"


def trace_step(compile_model: Callable[..., nn.Module], args: argparse.Namespace) -> Curve:
    """Train a fresh model for some steps and return the memory of the last one."""
    torch._dynamo.reset()
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.hidden, args.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    compiled = compile_model(model, args)
    pieces = batches(read_sources()[0], args)

    def step() -> None:
        compiled(next(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()  # what the profiler sees freed, it must have seen allocated
        with record_function(START):
            pass
        step()
    return read_curve(profiled, held_bytes=sum(parameter.nbytes for parameter in model.parameters()))


def read_curve(profiled: profile, *, held_bytes: int) -> Curve:
    """Add up the allocations and frees that the profiler recorded, from the mark `START` on."""
    events = profiled.profiler.kineto_results.events()
    (start_ns,) = (event.start_ns() for event in events if event.name() == START)
    changes = sorted(
        (event.start_ns() - start_ns, event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type().name == "CPU" and event.start_ns() >= start_ns
    )
    held = itertools.accumulate((nbytes for _, nbytes in changes), initial=held_bytes)
    return list(zip((0.0, *(at_ns / changes[-1][0] for at_ns, _ in changes)), held, strict=True))


# ---------------------------------------------------------------- the drawing


def peak(curve: Curve) -> int:
    return max(held for _, held in curve)


def draw(plain: Curve, ours: Curve, budget_bytes: int) -> str:
    """Return the chart as SVG."""
    top_bytes = peak(plain) * 1.08

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(nbytes: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / top_bytes

    def line(curve: Curve, color: str) -> str:
        points = outline(curve)
        path = f"M{x(0):.1f} {y(points[0][1]):.1f}" + "".join(
            f"H{x(share):.1f}V{y(held):.1f}" for share, held in points
        )
        return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"/>'

    def label(at_x: float, at_y: float, text: str, style: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" {style}>{text}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="18" fill="#222" role="img">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>',
    ]
    for megabytes in range(0, int(top_bytes / 1e6), grid(top_bytes / 1e6)):
        level = y(megabytes * 1e6)
        parts.append(f'<line x1="{LEFT}" y1="{level:.1f}" x2="{WIDTH - RIGHT}" y2="{level:.1f}" stroke="#e4e4e4"/>')
        parts.append(label(LEFT - 8, level + 6, str(megabytes), 'text-anchor="end"'))
    for percent in range(0, 101, 20):
        anchor = "end" if percent == 100 else "middle"
        parts.append(label(x(percent / 100), HEIGHT - BOTTOM + 22, f"{percent} %", f'text-anchor="{anchor}"'))
    limit = y(budget_bytes)
    parts += [
        label(LEFT - 54, 26, "device memory, MB"),
        label(WIDTH - RIGHT, HEIGHT - 6, "time, of each one's own step", 'text-anchor="end"'),
        line(plain, PLAIN),
        line(ours, OURS),
        f'<line x1="{LEFT}" y1="{limit:.1f}" x2="{WIDTH - RIGHT}" y2="{limit:.1f}" stroke="{LIMIT}"'
        ' stroke-width="1.5" stroke-dasharray="7 5"/>',
        label(WIDTH - RIGHT, limit - 8, f"budget {format_bytes(budget_bytes)}", f'text-anchor="end" fill="{LIMIT}"'),
        label(270, 26, f"torch.compile, peak {format_bytes(peak(plain))}", f'fill="{PLAIN}" font-weight="bold"'),
        label(565, 26, f"tencache, peak {format_bytes(peak(ours))}", f'fill="{OURS}" font-weight="bold"'),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def outline(curve: Curve, columns: int = 780) -> Curve:
    """Return the lowest and the highest point of each column of pixels, in their order: the outline is the same."""
    kept: Curve = []
    for _, points in itertools.groupby(curve, key=lambda point: int(point[0] * columns)):
        column = list(points)
        lowest, highest = min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])
        kept.extend(sorted({column[0], lowest, highest, column[-1]}))
    return kept


def grid(end: float) -> int:
    """Return a round distance between grid lines, of which there are six at most."""
    return next(unit * share for unit in (1, 10, 100, 1000) for share in (1, 2, 5) if end / (unit * share) <= 6)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--output", default="docs/images/memory.svg", help="the SVG file to write")
    args = parser.parse_args()
    args.device = torch.device("cpu")  # the profiler's memory events of a CPU are complete
    args.compiler = choose_compiler(args)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    plain = trace_step(compile_plain, args)
    if args.budget == "auto":
        args.budget = peak(plain) * 60 // 100
    if args.host_budget == "auto":
        args.host_budget = (peak(plain) - args.budget) * 75 // 100
    with tempfile.TemporaryDirectory(prefix="tencache-") as args.spill_dir:
        ours = trace_step(compile_tencache, args)
        tencache_fx.close()
    Path(args.output).write_text(draw(plain, ours, int(args.budget)))
    print(f"{args.output}: peak {format_bytes(peak(plain))} plain, {format_bytes(peak(ours))} with tencache.")


if __name__ == "__main__":
    main()
