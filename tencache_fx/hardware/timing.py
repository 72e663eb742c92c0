"""How long a piece of work takes on a device: the clocks that every measurement of this machine uses."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable

import torch

_BATCHES = 5  # the answer is the median of so many means
_MOST_RUNS = 200
_HIDDEN_CYCLES = 200_000  # some 0.1 ms of a device: while it spins, launches pile up behind it


def run_ns(device: torch.device, run: Callable[[], object], *, limit_ns: int) -> int:
    """Return how long one `run` takes on `device`: the median over batches, within about `limit_ns` in all.

    Two runs go first: they load code, and say how many more there is time for. On CUDA this is the device's own time
    with its gaps between kernels, on the caller's current stream; the work that was queued there goes first.
    """
    seconds = cuda_seconds if device.type == "cuda" else cpu_seconds
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        run()
        once_ns = seconds(run, times=1) * 1e9
        runs = max(1, min(_MOST_RUNS, int(limit_ns / max(once_ns, 1))))
        if runs < _BATCHES:
            return max(1, int(min(once_ns, seconds(run, times=1) * 1e9)))
        means = [seconds(run, times=runs // _BATCHES) for _ in range(_BATCHES)]
    return max(1, int(statistics.median(means) * 1e9))


def cuda_seconds(run: Callable[[], object], *, times: int) -> float:
    """Return the mean seconds that `times` runs take on the current device, from the first kernel to the last.

    The device spins first, so that what is measured is its own pace, not how fast this thread can issue the work.
    """
    start, stop = timing_events()
    torch.cuda._sleep(_HIDDEN_CYCLES)
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / times


def cpu_seconds(run: Callable[[], object], *, times: int) -> float:
    """Return the seconds that one `run` takes on the CPU, the median of `times`."""
    stamps_ns = [time.perf_counter_ns()]
    for _ in range(times):
        run()
        stamps_ns.append(time.perf_counter_ns())
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(stamps_ns)) / 1e9


def timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Return two events for the beginning and the end of a measurement."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return start, stop


def per_second(amount: int, seconds: float) -> int:
    """Return `amount` per second; at least 1, for a clock too coarse to see the work."""
    return max(1, int(amount / max(seconds, 1e-9)))
