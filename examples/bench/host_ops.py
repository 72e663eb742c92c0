"""How long the host takes for each runtime op of compiled code, beside the kernels that it issues.

    python examples/bench/host_ops.py --device cuda
    python examples/bench/host_ops.py --device cpu --rounds 50

A round calls each op `--count` times. Prints a JSON line for each server of the ops, an engine and swap points: by op,
the least mean of a round in microseconds, of the thread's own time and of time that passes. Where the second is longer,
the thread has waited: for another thread of Python, or in the driver. On a CPU the copies run in threads of their own,
and handing them over is a part of each op.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import tencache_fx.backend  # registers the ops' kernels
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.planning.plan import PoolClass
from tencache_fx.runtime.engine_registry import open_engine, swap_points

_OPS = torch.ops.tencache


class Clock:
    """The least times of each op over all rounds."""

    def __init__(self) -> None:
        self.least_us: dict[str, tuple[float, float]] = {}

    def calls(self, name: str, op: Callable[..., Tensor], arguments: Iterable[tuple[Any, ...]]) -> list[Tensor]:
        """Call an op with each of the arguments; return the results."""
        given = list(arguments)
        own_ns, begin_ns = time.thread_time_ns(), time.perf_counter_ns()
        results = [op(*each) for each in given]
        own_ns, passed_ns = time.thread_time_ns() - own_ns, time.perf_counter_ns() - begin_ns
        own_us, passed_us = own_ns / len(given) / 1e3, passed_ns / len(given) / 1e3
        before = self.least_us.get(name, (own_us, passed_us))
        self.least_us[name] = min(own_us, before[0]), min(passed_us, before[1])
        return results


def run_round(
    clock: Clock, server: int, parameters: list[Tensor], staying: list[Tensor], tensors: list[Tensor]
) -> None:
    """Load all parameters, but for those `staying`, swap all tensors out and in, and store each as a gradient."""
    labels = [f"value_{index}" for index in range(len(tensors))]
    clock.calls("sync_param", _OPS.sync_param, ((p, server, label) for p, label in zip(staying, labels, strict=True)))
    like = [(list(each.size()), list(each.stride()), each.dtype, each.device, server) for each in tensors]
    tickets = clock.calls(
        "fetch_param", _OPS.fetch_param, ((p, server, label) for p, label in zip(parameters, labels, strict=True))
    )
    clock.calls("wait for a parameter", _OPS.wait, ((t, *each) for t, each in zip(tickets, like, strict=True)))
    del tickets
    swapped = list(zip(tensors, labels, strict=True))
    handles = clock.calls("offload", _OPS.offload, ((value, server, "host", label) for value, label in swapped))
    clock.calls("release", _OPS.release, ((h, value, server) for h, value in zip(handles, tensors, strict=True)))
    tickets = clock.calls("prefetch", _OPS.prefetch, ((handle, server) for handle in handles))
    clock.calls("wait", _OPS.wait, ((t, *each) for t, each in zip(tickets, like, strict=True)))
    del handles, tickets
    handles = clock.calls("offload_grad", _OPS.offload_grad, ((value, server, label, "") for value, label in swapped))
    clock.calls(
        "release of a gradient", _OPS.release, ((h, value, server) for h, value in zip(handles, tensors, strict=True))
    )
    clock.calls("take_grad", _OPS.take_grad, ((h, *each) for h, each in zip(handles, like, strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument(
        "--rows", type=int, default=256, help="of each parameter and tensor, which have as many columns"
    )
    arguments = parser.parse_args()
    device, count, rows = resolve_device(torch.device(arguments.device)), arguments.count, arguments.rows
    torch.set_num_threads(1)
    tencache_fx.configure(host_budget=8 * count * rows * rows * 4)
    model = nn.ModuleList(nn.Linear(rows, rows, bias=False) for _ in range(2 * count))
    both = list(tencache_fx.offload(model, device).parameters())
    parameters, staying = both[:count], both[count:]
    for parameter in staying:
        if (offloaded := find_offloaded(parameter)) is not None:
            offloaded.pin()
    tensors = [torch.zeros(rows, rows, device=device) for _ in range(count)]
    engine = open_engine(device, host_budget_bytes=0)
    engine.reserve(pool=[PoolClass(nbytes=rows * rows * 4, count=count)], staging=[], disk_bytes=0)
    engine.reserve_gradients([rows * rows * 4] * count)
    points = swap_points(engine)
    for name, server in (("engine", engine.id), ("swap points", points.id)):
        clock = Clock()
        for _ in range(arguments.rounds):
            if server == points.id:
                points.begin(0, 0, backward=False)
            run_round(clock, server, parameters, staying, tensors)
            if server == points.id:
                points.end()
        found = {op: [round(us, 1) for us in least] for op, least in clock.least_us.items()}
        print(json.dumps({"server": name, "device": str(device), "torch": torch.__version__, "us": found}), flush=True)


if __name__ == "__main__":
    main()
