"""Measure one way to run one case, in this process; as a script, what a request on the command line asks for."""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from torch import Tensor
from ways import Forward, Setting, Way, open_way, parse_ways

import tencache_fx
from tencache_fx.option_values import read_size

WARM_UP = 22
"""Steps of ours before those that count: it may plan again, for what is held between steps or what they take, twice."""
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, tencache_fx.TencacheError)
"""What a compiler or a step raises; torch's own errors and running out of memory are RuntimeErrors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured, and how; all of it JSON.

    `cap`: the allocator itself refuses more than so many budgets; `pair`: plain is timed again right after.
    """

    case: str
    way: str
    budget_bytes: int | None
    device: str
    steps: int
    compiler: str
    cap: float | None
    pair: bool
    dump_dir: str | None


class Workload:
    """A case's model and batch on a device; every way of a process runs this same one."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        self.device = device
        with torch.device(device):
            self.model = case.model().to(case.dtype)
            self.batch = tuple(x.to(case.dtype) if x.is_floating_point() else x for x in case.batch())
        if self.batch[0].dim() == 4:  # images: convolutions are fastest in the order these come in
            for parameter in self.model.parameters():
                if parameter.dim() == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    @property
    def resident_bytes(self) -> int:
        """What is on the device between two steps."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers(), *self.batch))

    @property
    def state_bytes(self) -> int:
        """What no way of these can avoid at the end of backward: that, and the gradients."""
        return self.resident_bytes + sum(parameter.nbytes for parameter in self.model.parameters())

    def step(self, forward: Forward) -> Tensor:
        """Run forward and backward and drop the gradients; return the loss."""
        loss = forward(*self.batch)
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def checked_step(self, forward: Forward) -> tuple[float, float]:
        """Do the same; return the loss and the norm of all gradients, which shows a corrupted activation."""
        loss = forward(*self.batch)
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach()), float(norms.norm())

    def reset(self) -> None:
        """Forget what the way before has compiled and held."""
        self.model.zero_grad(set_to_none=True)
        torch.compiler.reset()
        tencache_fx.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def measure(workload: Workload, request: Request) -> dict[str, Any]:
    """Return what was measured: sizes in bytes, durations in ns; or, under "error", in one line, why nothing was."""
    (way,) = parse_ways([request.way])
    device = workload.device
    line: dict[str, Any] = {
        "case": request.case,
        "way": way.name,
        "policy": way.setting if way.kind == "tencache" else None,
        "budget_bytes": request.budget_bytes,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "compiler": request.compiler,
        "steps": request.steps,
        "cap": request.cap if request.budget_bytes is not None and device.type == "cuda" else None,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }
    dump_dir = Path(request.dump_dir, request.case, re.sub(r"[^\w.-]+", "_", way.name)) if request.dump_dir else None
    setting = Setting(compiler=request.compiler, device=device, budget_bytes=request.budget_bytes, dump_dir=dump_dir)
    workload.reset()
    try:
        with (
            capped(device, request.budget_bytes, request.cap),
            open_way(way, workload.model, setting) as forward,
        ):
            line |= _measure_steps(workload, forward, way, request.steps)
    except FAILURES as error:
        return line | {"error": one_line(error)}
    if request.pair and way.kind != "plain":
        line["plain_ns"] = _time_plain(workload, setting, request.steps)
    return line


@contextlib.contextmanager
def capped(device: torch.device, budget_bytes: int | None, cap: float | None) -> Iterator[None]:
    """Within this context torch's allocator refuses to reserve more than `cap` budgets; a CPU's knows no limit.

    A budget is for tensors, and between them the allocator leaves gaps.
    """
    if device.type != "cuda" or budget_bytes is None or cap is None:
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (cap * budget_bytes + 1) / total_bytes), torch.cuda.current_device()
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


def _measure_steps(workload: Workload, forward: Forward, way: Way, steps: int) -> dict[str, Any]:
    """Warm up, time `steps` steps, and look at loss and gradients of the first and of the last."""
    device, ours = workload.device, way.kind == "tencache"
    known = {record.region for record in tencache_fx.regions()}
    start_ns = time.perf_counter_ns()
    first = workload.checked_step(forward)
    _synchronize(device)
    first_step_ns = time.perf_counter_ns() - start_ns
    for _ in range(WARM_UP if ours else 1):
        workload.step(forward)
    _synchronize(device)
    on_cuda = device.type == "cuda"
    warm_peak_bytes = torch.cuda.max_memory_allocated(device) if on_cuda else 0
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"] if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    tencache_fx.stats()
    times_ns = [_time(partial(workload.step, forward), device) for _ in range(steps)]
    counted = tencache_fx.stats()
    line: dict[str, Any] = {
        "step_ns": int(statistics.median(times_ns)),
        "spread_ns": max(times_ns) - min(times_ns),
        "first_step_ns": first_step_ns,
        "state_bytes": workload.state_bytes,
        "loss_first": first[0],
        "gradient_norm_first": first[1],
    }
    if on_cuda:
        line["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        line["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        line["warm_up_peak_bytes"] = warm_peak_bytes
        line["alloc_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"] - retries
    else:
        step = partial(workload.step, forward)
        line["peak_bytes"] = workload.resident_bytes + tencache_fx.peak_bytes(step, device, warm_up=step)
    line["loss_last"], line["gradient_norm_last"] = workload.checked_step(forward)
    if ours:
        line["forecast"] = _forecast(known)
        line["per_step"] = _per_step(counted, steps)
    return line


def _time_plain(workload: Workload, setting: Setting, steps: int) -> int:
    """Return plain's median step, warmed up as ours are: as a GPU gets hot it gets slower, whoever runs on it."""
    (plain,) = parse_ways(["plain"])
    workload.reset()
    with open_way(plain, workload.model, setting) as forward:
        for _ in range(WARM_UP + 1):
            workload.step(forward)
        return int(statistics.median(_time(partial(workload.step, forward), workload.device) for _ in range(steps)))


def _time(step: Callable[[], Tensor], device: torch.device) -> int:
    _synchronize(device)
    start_ns = time.perf_counter_ns()
    step()
    _synchronize(device)
    return time.perf_counter_ns() - start_ns


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forecast(known: set[int]) -> dict[str, int]:
    """Return what was predicted for the regions that are not `known`: durations added up, sizes the largest."""
    plans = [record.plan for record in tencache_fx.regions() if record.region not in known]
    found = [dataclasses.asdict(plan.forecast) for plan in plans]
    largest = {"peak_bytes", "floor_bytes", "host_bytes", "disk_bytes"}
    names = [name for name in (found[0] if found else ()) if name.endswith(("_ns", "_bytes"))]
    total = {name: (max if name in largest else sum)(each[name] for each in found) for name in names}
    return total | {"transfers": sum(len(plan.transfers) for plan in plans)}


def _per_step(counted: dict[str, int | float], steps: int) -> dict[str, int | float]:
    """Return the runtime's counters as averages over a step, and its gauges as they are."""
    gauges = ("hit_rate", "host_pool_bytes", "host_high_water_bytes", "host_waste_bytes", "disk_bytes")
    names = ("stall_out_ns", "stall_in_ns", "d2h_bytes", "h2d_bytes", "disk_write_bytes", "disk_read_bytes")
    return {name: int(counted.get(name, 0)) // steps for name in names} | {
        name: counted[name] for name in gauges if name in counted
    }


def one_line(error: BaseException) -> str:
    """Return what went wrong in one line; of an error that torch has wrapped, the inner one."""
    inner = getattr(error, "inner_exception", None) or error
    (text, *_) = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {text}"[:400]


def asked_bytes(budget: int | str) -> int | None:
    """Return the bytes of a budget in a way's name; None for a share or for no budget."""
    size = read_size("device_budget", budget or "none")
    return None if size is None else size.nbytes


def print_ways(measure: Callable[[str, argparse.Namespace], dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Measure each of `arguments.ways` from a clean start, and print a JSON line for it: what was asked, and found."""
    for way in arguments.ways:
        about = {"torch": torch.__version__, **vars(arguments), "way": way}
        about.pop("ways")
        try:
            print(json.dumps(about | measure(way, arguments)), flush=True)
        except FAILURES as error:
            print(json.dumps(about | {"error": one_line(error)}), flush=True)
        torch.compiler.reset()
        tencache_fx.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """Measure what the first argument asks for, a `Request` as JSON, and write the line to the file named second."""
    request = Request(**json.loads(sys.argv[1]))
    line = measure(Workload(CASES[request.case], torch.device(request.device)), request)
    Path(sys.argv[2]).write_text(json.dumps(line))
    tencache_fx.close()


if __name__ == "__main__":
    main()
