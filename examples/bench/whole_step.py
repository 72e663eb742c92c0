"""A whole training step, optimizer included: AdamW with fp32 master weights on the device, or with ours in host memory.

    python examples/bench/whole_step.py --layers 12 --hidden 4096 --batch 8 --seq 2048 --ways device offload-now@10GiB

A way is `device`: torch.compile and the whole state on the device (fp32 masters in `torch.optim.AdamW(fused=True)`);
`home@BUDGET`: backend="tencache" with that device budget, and `tencache_fx.optim.AdamW`; `offload@BUDGET`: weights and
gradients offloaded, too, by `tencache_fx.offload`; `offload-now@BUDGET`: and updates begin in the backward. A step is
timed from the end of the one before to its own, without waiting for the device in between: updates overlap the next
forward. Prints JSON lines.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cases import tokens
from measure import asked_bytes, capped, print_ways
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
    if arguments.host_budget or arguments.spill_dir:
        tencache_fx.configure(host_budget=arguments.host_budget or "auto", spill_dir=arguments.spill_dir or ())
    rss_before_bytes = _rss_bytes(device)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # made in fp32 first, it would take twice the memory
    with torch.device(device):
        model = Decoder(layers=arguments.layers, hidden=arguments.hidden, vocabulary=32000)
        batch = tokens(arguments.batch, arguments.seq, 32000)
    torch.set_default_dtype(torch.float32)
    kind, _, budget = way.partition("@")
    if kind == "device":
        run: Any = torch.compile(model)
        optimizer: Any = OnDevice(model)
    else:
        if kind.startswith("offload"):
            tencache_fx.offload(model, device)
        run = torch.compile(model, backend="tencache", options={"device_budget": budget})
        optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-4, step_in_backward=kind == "offload-now")
    losses: list[torch.Tensor] = []

    def train() -> None:
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for _ in range(arguments.warm_up):
        train()
    if kind.startswith("offload"):
        model.state_dict()  # waits for the last updates, so that as many begin as end in the steps to be timed
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tencache_fx.stats()
    marks_ns = [_now_ns(device)]
    for _ in range(arguments.steps):
        train()
        losses[-1].item()  # waits for the step, as a loop that prints its loss does
        marks_ns.append(time.perf_counter_ns())
    marks_ns[-1] = _now_ns(device)
    if kind.startswith("offload"):
        model.state_dict()  # waits for the last updates
        marks_ns[-1] = time.perf_counter_ns()
    stats = tencache_fx.stats()
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    rss_bytes = _rss_bytes(device)
    if arguments.trace:
        with torch.profiler.profile() as profile:
            for _ in range(3):
                train()
                losses[-1].item()
        profile.export_chrome_trace(f"{arguments.trace}/{way.replace('@', '-')}.json.gz")
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "parameters": count,
        "step_ns": (marks_ns[-1] - marks_ns[0]) // arguments.steps,
        "median_ns": int(statistics.median(b - a for a, b in pairwise(marks_ns))),
        "peak_bytes": peak_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "rss_before_bytes": rss_before_bytes,  # torch and the driver alone
        "rss_bytes": rss_bytes,
        "losses": [float(losses[0]), float(losses[-1])],
        "stats": {
            name: value // arguments.steps if name.endswith(("_ns", "2h_bytes", "2d_bytes")) else value
            for name, value in stats.items()
        },
    }


def measure_capped(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the same with no more than `arguments.cap` budgets for torch's allocator, if the way has one."""
    device, (_, _, budget) = torch.device(arguments.device), way.partition("@")
    with capped(device, asked_bytes(budget), arguments.cap):
        return measure(way, arguments)


def _now_ns(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter_ns()


def _rss_bytes(device: torch.device) -> int:
    """Return the bytes of memory this process has, with the driver's once there is a context."""
    torch.zeros(1, device=device)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def main() -> None:
    """Measure each way in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 2), ("hidden", 256), ("batch", 2), ("seq", 128), ("steps", 7), ("warm-up", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=["device", "home@none"])
    parser.add_argument("--host-budget", help="pinned host bytes, such as 8GiB")
    parser.add_argument("--spill-dir", help="directory on a fast disk")
    parser.add_argument("--cap", type=float, metavar="BUDGETS", help="what torch may reserve on a GPU in ours")
    parser.add_argument("--trace", help="directory for the traces of three steps more, which are not timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    print_ways(measure_capped, arguments)


if __name__ == "__main__":
    main()
