"""A decoder whose blocks are compiled one by one: what a step planned as a whole costs in time and memory.

    python examples/bench/blocks.py --layers 8 --hidden 4096 --batch 4 --seq 4096 --ways plain step@16.8GiB

With `--model mixture` it is a mixture of experts that is compiled as a whole, and whose graph breaks in each layer.
A way is `plain` (torch.compile's own backend), `checkpoint` (that, each block checkpointed), `step@BUDGET` or
`region@BUDGET` (backend="tencache" with that scope). A budget such as peak/1.5 is a part of the first way's peak. A
step is a forward and a backward, without an optimizer. Prints a JSON line a way: the median time, its ratio to the
first way's, and the peak of the first step and of the later ones. A device slows down as it gets warm: with `--pair`
the first way is measured again after each other one, and a ratio is to the mean of those before and after.
"""

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from cases import tokens
from measure import asked_bytes, capped
from models import Decoder, Mixture

import tencache_fx


def measure(way: str, arguments: argparse.Namespace, plain_bytes: int) -> dict[str, Any]:
    """Train some steps in one way; times are in ns, peaks in bytes, `plain_bytes` being that of the first way.

    A way with a budget has no more than `arguments.cap` budgets for torch's allocator.
    """
    kind, _, asked = way.partition("@")
    budget = int(plain_bytes / float(asked.removeprefix("peak/"))) if asked.startswith("peak/") else asked
    with capped(torch.device(arguments.device), asked_bytes(budget), arguments.cap):
        return _train(way, kind, budget, arguments)


def _train(way: str, kind: str, budget: int | str, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    with torch.device(device):
        kind_of_model = Mixture if arguments.model == "mixture" else Decoder
        model = kind_of_model(layers=arguments.layers, hidden=arguments.hidden, vocabulary=32000).to(arguments.dtype)
        batch = tokens(arguments.batch, arguments.seq, 32000)
    model.checkpointed = kind == "checkpoint"
    for block in (model,) if arguments.model == "mixture" else model.blocks:
        if kind in ("plain", "checkpoint"):
            block.compile()
        else:
            block.compile(backend="tencache", options={"device_budget": budget, "scope": kind})
    times_ns, peaks, losses = [], [], []
    for _ in range(arguments.warm_up + arguments.steps):
        _reset_peak(device)
        begun_ns = _now_ns(device)
        model.zero_grad(set_to_none=True)
        loss = model(*batch)
        loss.backward()
        losses.append(float(loss.detach()))
        times_ns.append(_now_ns(device) - begun_ns)
        peaks.append(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
    stats = tencache_fx.stats()
    return {
        "way": way,
        "median_ns": int(statistics.median(times_ns[arguments.warm_up :])),
        "first_step_ns": times_ns[0],
        "first_peak_bytes": peaks[0],
        "second_peak_bytes": peaks[1],
        "peak_bytes": max(peaks[2:]),
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else 0,
        "losses": [losses[0], losses[-1]],
        "stats": {
            name: stats[name]
            for name in ("d2h_bytes", "h2d_bytes", "stall_in_ns", "stall_out_ns", "hit_rate")
            if name in stats
        },
    }


def _now_ns(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter_ns()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("decoder", "mixture"), default="decoder")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=["plain", "step@16.8GiB"])
    parser.add_argument("--cap", type=float, metavar="BUDGETS", help="what torch may reserve on a GPU in ours")
    parser.add_argument("--pair", action="store_true", help="measure the first way again after each other one")
    arguments = parser.parse_args()
    first = measure(arguments.ways[0], arguments, 0)
    _print_way(first, first["median_ns"], arguments)
    before_ns = first["median_ns"]
    for way in arguments.ways[1:]:
        found = measure(way, arguments, first["peak_bytes"])
        after_ns = before_ns
        if arguments.pair:
            _tidy(arguments)
            after_ns = measure(arguments.ways[0], arguments, 0)["median_ns"]
        _print_way(found, (before_ns + after_ns) // 2, arguments)
        before_ns = after_ns


def _print_way(found: dict[str, Any], first_ns: int, arguments: argparse.Namespace) -> None:
    print(json.dumps({**found, "first_way_ns": first_ns, "ratio": round(found["median_ns"] / first_ns, 3)}), flush=True)
    _tidy(arguments)


def _tidy(arguments: argparse.Namespace) -> None:
    torch.compiler.reset()
    tencache_fx.close()
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
