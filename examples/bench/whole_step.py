"""A whole training step, optimizer included: AdamW with fp32 master weights on the device against ours at home.

    python examples/bench/whole_step.py --layers 12 --hidden 4096 --batch 8 --seq 2048 --ways device home@14GiB

A way is `device`: torch.compile and the whole state on the device (fp32 masters in `torch.optim.AdamW(fused=True)`);
or `home@BUDGET`: backend="tencache" with that device budget, and `tencache_fx.optim.AdamW`. Prints JSON lines.
"""

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from cases import tokens
from measure import FAILURES, one_line
from models import Decoder
from torch import nn

import tencache_fx


class OnDevice:
    """AdamW on fp32 copies of a model's weights, rounded into the model after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-4, fused=self.weights[0].is_cuda)

    def step(self) -> None:
        """Update, one parameter's gradient in fp32 at a time being too slow, all at once."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)

    def zero_grad(self) -> None:
        """Do nothing: the step has dropped the gradients."""


def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians over `arguments.steps` steps, in ns, and the peak, in bytes."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=32000).bfloat16()
        batch = tokens(arguments.batch, arguments.seq, 32000)
    kind, _, budget = way.partition("@")
    if kind == "device":
        run, optimizer = torch.compile(model), OnDevice(model)
    else:
        run = torch.compile(model, backend="tencache", options={"device_budget": budget})
        optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[float] = []

    def train() -> tuple[int, int]:
        begin_ns = _now_ns(device)
        loss = run(*batch)
        loss.backward()
        between_ns = _now_ns(device)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        return between_ns - begin_ns, _now_ns(device) - between_ns

    for _ in range(arguments.warm_up):
        train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pairs = [train() for _ in range(arguments.steps)]
    count = sum(parameter.numel() for parameter in model.parameters())
    update_ns = int(statistics.median(pair[1] for pair in pairs))
    return {
        "way": way,
        "parameters": count,
        "step_ns": int(statistics.median(map(sum, pairs))),
        "forward_backward_ns": int(statistics.median(pair[0] for pair in pairs)),
        "update_ns": update_ns,
        "parameters_per_s": count * 1_000_000_000 // update_ns,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "losses": [losses[0], losses[-1]],
    }


def _now_ns(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter_ns()


def main() -> None:
    """Measure each way in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 2), ("hidden", 256), ("batch", 2), ("seq", 128), ("steps", 7), ("warm-up", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=["device", "home@none"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    for way in arguments.ways:
        about = {"torch": torch.__version__, "device": arguments.device, **vars(arguments)}
        about.pop("ways")
        try:
            print(json.dumps(about | measure(way, arguments)), flush=True)
        except FAILURES as error:
            print(json.dumps(about | {"way": way, "error": one_line(error)}), flush=True)
        torch.compiler.reset()
        tencache_fx.close()
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
