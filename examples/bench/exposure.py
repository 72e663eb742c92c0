"""How much of a step a GPU spends on collectives and on copies while no other kernel runs, from a profiler's trace."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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
    """Run some steps under torch's profiler, and return `shares_of` what it has seen; all ranks do so at once."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kinds = spans_of(profiler.events())
    if not dist.is_initialized():
        return shares_of(kinds)
    taken: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(taken, [end - begin for begin, end in kinds["collectives"]])
    return shares_of(kinds, [min(times) for times in zip(*taken, strict=True)])


def spans_of(events: Iterable[Any]) -> dict[str, Spans]:
    """Return when a GPU ran kernels, collectives, and copies between it and the host, in the order in which they began.

    The events are a profiler's. Its ranges, such as that of an optimizer's step, are no work of the device, though they
    have times there.
    """
    kinds: dict[str, list[tuple[float, float]]] = {"kernels": [], "collectives": [], "copies": []}
    for event in events:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:  # pybind's values are no singletons
            continue
        name = event.name.lower()
        kind = "collectives" if "nccl" in name else "copies" if name.startswith("memcpy") else "kernels"
        kinds[kind].append((event.time_range.start, event.time_range.end))
    return {kind: sorted(spans) for kind, spans in kinds.items()}


def shares_of(kinds: Mapping[str, Spans], least: Sequence[float] | None = None) -> dict[str, float]:
    """Return the shares of the time in which only collectives, or only copies between host and device, run.

    A collective runs until all ranks have come to it. It takes as long as on the rank that came last, the `least` time
    of all ranks; what it runs before that is a wait for the others. A wait counts where nothing but copies runs, copies
    where nothing else does. `idle` is the share in which the device does nothing. Raises `RuntimeError` without work.
    """
    every = np.array([span for spans in kinds.values() for span in spans])
    if not len(every):
        raise RuntimeError("torch's profiler has seen no kernels: CUPTI cannot be used here; leave out --trace.")
    whole = float(every[:, 1].max() - every[:, 0].min())
    busy = covered([tuple(span) for span in every.tolist()])
    kernels, collectives = kinds["kernels"], kinds["collectives"]
    times = least or [end - begin for begin, end in collectives]
    moving = [(end - time, end) for (_, end), time in zip(collectives, times, strict=True)]
    return {
        "kernels": covered(kernels) / whole,
        "exposed_collectives": exposed(moving, kernels) / whole,
        "waits_for_ranks": exposed(collectives, [*kernels, *moving]) / whole,
        "exposed_copies": exposed(kinds["copies"], [*kernels, *collectives]) / whole,
        "idle": 1 - busy / whole,
    }
