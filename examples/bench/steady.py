"""A long run on one GPU: does anything grow, do copies overlap compute, what does compiling cost?

    python examples/bench/steady.py --steps 200

Case A of `cases.py` with a budget; prints JSON lines: compile times of plain and tencache (caches off), growth of
device memory, host memory, pinned pool and file descriptors between step 20 and the last, and, from a profiler trace of
one step, how much of the copying ran while kernels did.
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import torch
from cases import CASES
from measure import Workload
from torch.profiler import ProfilerActivity, profile

import tencache_fx


def busy_us(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of `(start, stop)` spans, in order."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def overlap_us(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Return the time during which both unions are busy."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in left for c, d in right)


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", default="16.8GiB")
    parser.add_argument("--compile-times", action="store_true", help="compile plain and ours twice each, caches off")
    arguments = parser.parse_args()
    workload = Workload(CASES["A"], torch.device("cuda"))
    plain = partial(torch.compile, workload.model)
    ours = partial(plain, backend="tencache", options={"device_budget": arguments.budget})
    torch._inductor.config.force_disable_caches = True
    rounds = [
        ("warm-up", plain),
        ("plain", plain),
        ("tencache", ours),
        ("plain again", plain),
        ("tencache again", ours),
    ]
    for name, compile_model in rounds if arguments.compile_times else rounds[-1:]:
        torch.compiler.reset()
        step = partial(workload.step, compile_model())
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        print(json.dumps({"way": name, "first_step_s": round(time.perf_counter() - start, 2)}), flush=True)
    torch.cuda.reset_peak_memory_stats()
    marks = {}
    for k in range(arguments.steps):
        loss = step()
        if k in (20, arguments.steps - 1):
            torch.cuda.synchronize()
            marks[k] = {
                "loss": float(loss),
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "resident": resident_bytes(),
                "fds": len(os.listdir("/proc/self/fd")),
                "pool": tencache_fx.stats()["host_pool_bytes"],
                "peak": torch.cuda.max_memory_allocated(),
            }
    first, last = marks.values()
    print(json.dumps({"growth": {name: last[name] - first[name] for name in first}, "at_end": last}), flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"copy": [], "compute": []}
    for event in trace.events():
        if event.device_type.name == "CUDA":
            pinned = "Pinned" in event.name or "HtoD" in event.name or "DtoH" in event.name
            spans["copy" if pinned else "compute"].append((event.time_range.start, event.time_range.end))
    copying, computing = busy_us(spans["copy"]), busy_us(spans["compute"])
    copy_us = sum(stop - start for start, stop in copying)
    hidden = overlap_us(copying, computing)
    print(json.dumps({"copy_ms": copy_us / 1e3, "hidden_ms": hidden / 1e3, "overlap": round(hidden / copy_us, 4)}))


if __name__ == "__main__":
    main()
