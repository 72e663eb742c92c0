"""Whole-matrix optimizers with their state in host memory, beside torch's own with all on the device.

    python examples/bench/muon.py --layers 20 --hidden 2048 --batch 8 --seq 2048 --budget 12GiB
    python examples/bench/muon.py --device cpu --layers 2 --hidden 128 --batch 2 --seq 64 --budget 64MiB

The blocks' matrices are trained by Muon or Adafactor, all else by AdamW; weights are bf16. A way is `resident` (torch's
optimizers, on bf16 weights, plain torch.compile), `masters` (torch's optimizer alone, on fp32 weights and gradients
that stay on the device) or `offloaded`. Prints a JSON line a way: the time of a step and, of it, of the whole-matrix
optimizer's `step()`, and the device's peak. Of `offloaded` also the bytes that this copies out and in, how long these
alone would take at the links' measured rates, the bound, which is that or the resident `step()` if this takes longer,
and the share of the bound that was reached.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from cases import tokens
from models import Decoder
from torch import nn

import tencache_fx
from tencache_fx.hardware.rates import links
from tencache_fx.optim import AdamW, StreamedOptimizer
from tencache_fx.runtime.engine_registry import engines

VOCABULARY = 32000


def synchronized_ns(device: torch.device) -> int:
    """Return the time once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def copied_bytes() -> tuple[int, int]:
    """Return the bytes that were copied out and in since the last call."""
    counts = [engine.stats.take() for engine in engines()]
    return sum(int(each["d2h_bytes"]) for each in counts), sum(int(each["h2d_bytes"]) for each in counts)


def measure_masters(cls: type[torch.optim.Optimizer], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the time of the optimizer's steps alone, on fp32 copies of the blocks' matrices."""
    device = torch.device(arguments.device)
    with torch.device("meta"):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY)
    shapes = [p.shape for p in model.blocks.parameters() if p.dim() == 2]
    matrices = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in matrices:
        p.grad = torch.randn_like(p)
    optimizer, update_ns = cls(matrices), []
    for _ in range(arguments.warm_up + arguments.steps):
        begun_ns = synchronized_ns(device)
        optimizer.step()
        update_ns.append(synchronized_ns(device) - begun_ns)
    return {"update_ns": int(statistics.median(update_ns[arguments.warm_up :]))}


def measure(way: str, cls: type[torch.optim.Optimizer], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps in one way."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=VOCABULARY).bfloat16()
        batch = tokens(arguments.batch, arguments.seq, VOCABULARY)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    matrix: torch.optim.Optimizer
    rest: torch.optim.Optimizer
    run: nn.Module
    if way == "resident":
        run = torch.compile(model)
        matrix, rest = cls(matrices), torch.optim.AdamW(others, fused=device.type == "cuda")
    else:
        tencache_fx.offload(model, device)
        run = torch.compile(model, backend="tencache", options={"device_budget": arguments.budget})
        matrix, rest = StreamedOptimizer(matrices, cls), AdamW(others)
    losses, step_ns, update_ns, moved = [], [], [], (0, 0)
    for step in range(arguments.warm_up + arguments.steps):
        if step == arguments.warm_up and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begun_ns = synchronized_ns(device)
        loss = run(*batch)
        loss.backward()
        copied_bytes()
        backward_ns = synchronized_ns(device)
        matrix.step()
        updated_ns, moved = synchronized_ns(device), copied_bytes()
        rest.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step >= arguments.warm_up:
            step_ns.append(synchronized_ns(device) - begun_ns)
            update_ns.append(updated_ns - backward_ns)
    line: dict[str, Any] = {
        "losses": [losses[0], losses[-1]],
        "matrix_bytes": sum(p.nbytes for p in matrices),
        "step_ns": int(statistics.median(step_ns)),
        "update_ns": int(statistics.median(update_ns)),
    }
    if device.type == "cuda":
        line["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        line["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    if way == "offloaded":
        rates = links(device, (), calibrate=True)
        out_ns = moved[0] * 1_000_000_000 // rates.d2h_duplex_bytes_per_s
        in_ns = moved[1] * 1_000_000_000 // rates.h2d_duplex_bytes_per_s
        line |= {"out_bytes": moved[0], "in_bytes": moved[1], "copies_ns": max(out_ns, in_ns)}
    return line


def main() -> None:
    """Measure each way, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = ("resident", "masters", "offloaded")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--optimizer", choices=("Muon", "Adafactor"), default="Muon")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", default="12GiB")
    sizes = {"layers": 20, "hidden": 2048, "batch": 8, "seq": 2048, "warm-up": 5, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    resident_ns = 0
    for way in arguments.ways:
        cls = getattr(torch.optim, arguments.optimizer)
        line = measure_masters(cls, arguments) if way == "masters" else measure(way, cls, arguments)
        if way == "resident":
            resident_ns = line["update_ns"]
        elif way == "offloaded":
            bound_ns = max(line["copies_ns"], resident_ns)
            line |= {"bound_ns": bound_ns, "share": round(bound_ns / line["update_ns"], 3)}
        about = {"torch": torch.__version__, **vars(arguments), "way": way}
        del about["ways"]
        print(json.dumps(about | line), flush=True)
        torch.compiler.reset()
        tencache_fx.close()


if __name__ == "__main__":
    main()
