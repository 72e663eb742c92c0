"""How fast offloaded training is beside training with all on the device, by the tokens of an optimizer step.

    python examples/bench/token_sweep.py --layers 22 --hidden 2048 --batch 8 --seq 2048 --accumulate 1 2 4 8

A step is so many forwards and backwards of one micro-batch, then an update by AdamW on fp32 masters. A way is `device`
(torch.compile and torch's fused AdamW, all on the device) or `offload@BUDGET` (weights, gradients and state offloaded).
Updates overlap the next forward, so a step is timed from the end of the one before to its own. Prints a JSON line for
each way and number of tokens: the median step, its share of the speed of `device`, which is to come first, and the
bound of the plan, with the resource that sets it. `--plot FILE.svg` draws these lines, by matplotlib; `--lines FILE`
keeps them, and draws those that were kept there before, too.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cases import tokens
from models import Decoder
from torch import Tensor, nn
from whole_step import OnDevice

import tencache_fx
from tencache_fx.planning.loads import bound_of, loads_of

VOCABULARY = 32000


def measure(way: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train in one way; yield what was found for each number of micro-batches a step. Times are in ns."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # made in fp32 first, it would take twice the memory
    with torch.device(device):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY)
        batch = tokens(arguments.batch, arguments.seq, VOCABULARY)
    torch.set_default_dtype(torch.float32)
    kind, _, budget = way.partition("@")
    run: nn.Module
    optimizer: Any
    if kind == "device":
        run, optimizer = torch.compile(model), OnDevice(model)
    else:
        tencache_fx.offload(model, device)
        run = torch.compile(model, backend="tencache", options={"device_budget": budget})
        optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-4)

    def step(accumulate: int) -> Tensor:
        loss = torch.zeros((), device=device)
        for _ in range(accumulate):
            part = run(*batch) / accumulate
            part.backward()
            loss += part.detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    begun_ns = time.perf_counter_ns()
    for accumulate in arguments.accumulate:
        for _ in range(arguments.warm_up):
            loss = step(accumulate).item()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        marks_ns = [time.perf_counter_ns()]
        warm_up_ns = marks_ns[0] - begun_ns
        for _ in range(arguments.steps):
            loss = step(accumulate).item()  # waits for the step, as a loop that prints its loss does
            marks_ns.append(time.perf_counter_ns())
        begun_ns = marks_ns[-1]
        steps_ns = [after - before for before, after in pairwise(marks_ns)]
        yield {
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": accumulate * batch[0].numel(),
            "step_ns": int(statistics.median(steps_ns)),
            "steps_ns": steps_ns,
            "warm_up_ns": warm_up_ns,
            "loss": loss,
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "reserved_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
            **(bound(accumulate) if kind != "device" else {}),
        }


def bound(accumulate: int) -> dict[str, Any]:
    """Return the time that no step of the plan is shorter than, and the resource that is busy so long."""
    record = tencache_fx.regions()[-1]
    found = bound_of(loads_of(dataclasses.replace(record.problem, accumulation=accumulate), record.plan))
    assert found is not None
    return {"bound_ns": found.busy_ns, "bound": found.name, "planned_for": record.problem.accumulation}


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens a second over the tokens of a step: each way of each model, and the bound of the offloaded ones."""
    from matplotlib import pyplot  # only those who draw need it

    figure, axes = pyplot.subplots(figsize=(8.6, 4.6))
    for index, parameters in enumerate(sorted({line["parameters"] for line in lines})):
        ours = [line for line in lines if line["parameters"] == parameters]
        for way in dict.fromkeys(line["way"] for line in ours):
            points = sorted((line for line in ours if line["way"] == way), key=lambda line: line["tokens"])
            at = [line["tokens"] for line in points]
            color = f"C{2 * index + (way != 'device')}"
            label = f"{parameters / 1e9:.2f}e9, {'all on the device' if way == 'device' else way.replace('@', ', ')}"
            axes.plot(at, [line["tokens"] * 1e9 / line["step_ns"] for line in points], "o-", color=color, label=label)
            if way != "device":
                bounds = [line["tokens"] * 1e9 / line["bound_ns"] for line in points]
                axes.plot(at, bounds, "--", color=color, label=f"{parameters / 1e9:.2f}e9, bound of its plan")
    axes.set(xlabel="tokens a step", ylabel="tokens/s", ylim=(0, None))
    axes.set_xscale("log", base=2)
    counts = sorted({line["tokens"] for line in lines})
    axes.set_xticks(counts, labels=[f"{count:,}" for count in counts])
    axes.grid(color="#e4e4e4")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    """Measure each way, print a line for each number of tokens, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 2, "hidden": 256, "batch": 2, "seq": 128, "warm-up": 4, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 2, 4, 8], help="micro-batches a step, in turn")
    parser.add_argument("--ways", nargs="+", default=["device", "offload@12GiB"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="add the lines to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the SVG file to write")
    arguments = parser.parse_args()
    about = {name: getattr(arguments, name) for name in ("layers", "hidden", "batch", "seq", "device")}
    kept = arguments.lines is not None and arguments.lines.exists()
    lines = [json.loads(line) for line in arguments.lines.read_text().splitlines()] if kept else []
    resident_ns: dict[int, int] = {}
    for way in arguments.ways:
        for found in measure(way, arguments):
            if way == "device":
                resident_ns[found["tokens"]] = found["step_ns"]
            whole_ns = resident_ns.get(found["tokens"])
            share = {"of_device": round(whole_ns / found["step_ns"], 3)} if whole_ns else {}
            lines.append({"torch": torch.__version__, **about, "way": way, **found, **share})
            print(json.dumps(lines[-1]), flush=True)
            if arguments.lines is not None:
                with arguments.lines.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
        torch.compiler.reset()
        tencache_fx.close()
    if arguments.plot is not None:
        draw(lines, arguments.plot)


if __name__ == "__main__":
    main()
