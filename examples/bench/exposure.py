"""How much of a step a GPU spends on collectives and on copies while no other kernel runs, from a profiler's trace."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Spans = Sequence[tuple[float, float]]


def covered(spans: Spans) -> float:
    """Return the time that is covered by one of these spans at least.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def exposed(spans: Spans, others: Spans) -> float:
    """Return the time that is covered by `spans`, and by none of the `others`.

    >>> exposed([(0, 4)], [(1, 2), (3, 6)])
    2.0
    """
    return covered([*spans, *others]) - covered(others)


def exposed_shares(step: Callable[[], object], steps: int = 2) -> dict[str, float]:
    """Run some steps under torch's profiler, and return `shares_of` what it has seen."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return shares_of(profiler.events())


def shares_of(events: Iterable[Any]) -> dict[str, float]:
    """Return the shares of the time that collectives, and copies between host and device, take by themselves.

    Copies count where neither kernels nor collectives run; `idle` is the share in which the device does nothing. The
    events are a profiler's. Its ranges, such as that of an optimizer's step, are no work of the device, though they
    have times there. Raises `RuntimeError` without any work.
    """
    kinds: dict[str, list[tuple[float, float]]] = {"kernels": [], "collectives": [], "copies": []}
    for event in events:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:  # pybind's values are no singletons
            continue
        name = event.name.lower()
        kind = "collectives" if "nccl" in name else "copies" if name.startswith("memcpy") else "kernels"
        kinds[kind].append((event.time_range.start, event.time_range.end))
    every = np.array([span for spans in kinds.values() for span in spans])
    if not len(every):
        raise RuntimeError("torch's profiler has seen no kernels: CUPTI cannot be used here; leave out --trace.")
    whole = float(every[:, 1].max() - every[:, 0].min())
    busy = covered([tuple(span) for span in every.tolist()])
    return {
        "kernels": covered(kinds["kernels"]) / whole,
        "exposed_collectives": exposed(kinds["collectives"], kinds["kernels"]) / whole,
        "exposed_copies": exposed(kinds["copies"], [*kinds["kernels"], *kinds["collectives"]]) / whole,
        "idle": 1 - busy / whole,
    }
