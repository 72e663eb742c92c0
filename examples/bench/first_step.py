"""The first step from nothing: how long until a model that was never compiled has trained once?

    python examples/bench/first_step.py --layers 32 --hidden 128 --ways plain once@peak/1.5
    python examples/bench/first_step.py --device cuda --layers 32 --hidden 2048 --batch 8 --seq 2048 --dtype bfloat16

A way is `plain` (torch.compile's own backend), or `inline@BUDGET` or `once@BUDGET`: backend="tencache" with that value
of `repeated_layers`. A budget such as peak/1.5 is a part of the peak of `plain`, which is then to come first. Each way
has a process of its own, with folders of its own for the caches of torch, Triton and tencache, all empty. A step is a
forward and a backward. Prints a JSON line a way: the time from the call of torch.compile to the end of the first step,
how much of that the processor was busy, its ratio to that of `plain`, what compiling took by stages, and the median of
later steps.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cases import tokens
from models import Decoder
from torch import Tensor

import tencache_fx

FOLDERS = {"XDG_CACHE_HOME": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
VOCABULARY = 1024


def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train from nothing in one way; times are in ns, the peak of `plain` in bytes."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY)
        model = model.to(getattr(torch, arguments.dtype))
        batch = tokens(arguments.batch, arguments.seq, VOCABULARY)
    kind, _, budget = way.partition("@")
    begun_ns, busy_ns = time.perf_counter_ns(), processor_ns()
    if kind == "plain":
        run = torch.compile(model)
    else:
        run = torch.compile(model, backend="tencache", options={"device_budget": budget, "repeated_layers": kind})

    def step() -> Tensor:
        loss: Tensor = run(*batch)
        loss.backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    loss = step()
    line: dict[str, Any] = {
        "first_step_ns": time.perf_counter_ns() - begun_ns,
        "processor_ns": processor_ns() - busy_ns,
        "loss": float(loss),
        "regions": len(tencache_fx.regions()),
        "compiling": tencache_fx.report().splitlines()[-2:] if kind != "plain" else [],
    }
    if kind == "plain":
        line["peak_bytes"] = peak_bytes(step, (*model.parameters(), *batch), device)
    for _ in range(arguments.warm_up):
        step()
    times_ns = []
    for _ in range(arguments.steps):
        begun_ns = time.perf_counter_ns()
        step()
        times_ns.append(time.perf_counter_ns() - begun_ns)
    return line | {"step_ns": int(statistics.median(times_ns))}


def peak_bytes(step: Any, resident: tuple[Tensor, ...], device: torch.device) -> int:
    """Return the most bytes that the device holds during a step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    return sum(each.nbytes for each in resident) + tencache_fx.peak_bytes(step, device, warm_up=step)


def processor_ns() -> int:
    """Return the processor time of this process and of those that it has waited for, such as C++ compilers."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return int(sum(each.ru_utime + each.ru_stime for each in used) * 1e9)


def measure_from_nothing(way: str) -> dict[str, Any]:
    """Return what `measure` finds in a process of its own, whose caches are empty."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        environment = {name: str(Path(folder, place)) for name, place in FOLDERS.items()}
        command = [sys.executable, __file__, *sys.argv[1:], "--within", way, str(found)]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        line: dict[str, Any] = json.loads(found.read_text())
        return line


def main() -> None:
    """Measure each way, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["plain", "inline@peak/1.5", "once@peak/1.5"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, default in {"layers": 32, "hidden": 128, "batch": 4, "seq": 256, "warm-up": 8, "steps": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--within", nargs=2, help=argparse.SUPPRESS)  # a way, and the file for what is found
    arguments = parser.parse_args()
    if arguments.within:
        way, file = arguments.within
        Path(file).write_text(json.dumps(measure(way, arguments)))
        tencache_fx.close()
        return
    about = {"torch": torch.__version__, **vars(arguments)}
    del about["ways"], about["within"]
    plain: dict[str, Any] = {}
    for way in arguments.ways:
        kind, _, budget = way.partition("@")
        if budget.startswith("peak/"):
            if not plain:
                parser.error(f"{way} is a part of the peak of plain; name plain before it.")
            budget = str(int(plain["peak_bytes"] / float(budget.removeprefix("peak/"))))
        line = measure_from_nothing(f"{kind}@{budget}" if budget else kind)
        plain = line if kind == "plain" else plain
        ratio = round(line["first_step_ns"] / plain["first_step_ns"], 3) if plain else None
        print(json.dumps(about | {"way": way, "budget": budget or None, "ratio": ratio} | line), flush=True)


if __name__ == "__main__":
    main()
