"""Times copies between a device and host memory, alone or beside what else goes on."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tencache_fx.hardware.timing import cpu_seconds, per_second, timing_events

LINK_BYTES = 64 << 20
"""Of a copy that shows a link's rate."""
_KERNELS_SIDE = 4096  # of the matrices that are multiplied beside copies

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source."""
Meanwhile = Callable[[Callable[[], bool]], None]
"""What runs beside copies, until they are done."""


def kernels(device: torch.device) -> Meanwhile:
    """Return what keeps a GPU busy until copies are done: products of matrices, and sums that only move memory."""
    own = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are
    shape = (_KERNELS_SIDE, _KERNELS_SIDE)
    left, right = (torch.rand(shape, device=device, dtype=torch.float16, generator=own) for _ in range(2))
    product = torch.empty_like(left)

    def run(done: Callable[[], bool]) -> None:
        while not done():
            torch.mm(left, right, out=product)
            torch.add(left, right, out=product)
            torch.cuda.current_stream(device).synchronize()  # none is issued that runs on when the copies are done

    run(iter((False, True)).__next__)  # the first product is slow to begin
    return run


def copy_rates(
    device: torch.device,
    ways: Sequence[str],
    *,
    nbytes: int = LINK_BYTES,
    pinned: bool = True,
    meanwhile: Meanwhile | None = None,
) -> list[int]:
    """Return the bytes per second of copies "out" of `device` and "in" to it, all `ways` at once.

    On a GPU `meanwhile(done)` runs beside them, until `done()`.
    """
    pairs = copy_pairs(device, ways, nbytes, pinned=pinned)
    if device.type == "cuda":
        return cuda_copy_rates(device, pairs, meanwhile=meanwhile)
    return _thread_copy_rates(pairs)


def copy_pairs(device: torch.device, ways: Sequence[str], nbytes: int, *, pinned: bool) -> list[CopyPair]:
    """Return `nbytes` on `device` and in host memory for each of the `ways`, "out" and "in"."""
    pairs = []
    for way in ways:
        host = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned and device.type == "cuda")
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        pairs.append((host, own) if way == "out" else (own, host))
    return pairs


def cuda_copy_rates(
    device: torch.device,
    pairs: Sequence[CopyPair],
    *,
    times: int = 8,
    meanwhile: Meanwhile | None = None,
) -> list[int]:
    """Return the rate of each pair's copies, all pairs at once, each on its own stream.

    `meanwhile(done)` runs beside them, until `done()`: then those of one way have ended.
    """
    lanes = []
    torch.cuda.synchronize(device)
    for destination, source in pairs:
        stream = torch.cuda.Stream(device)
        start, stop = timing_events()
        with torch.cuda.stream(stream):
            start.record(stream)
            for _ in range(times):
                destination.copy_(source, non_blocking=True)
            stop.record(stream)
        lanes.append((start, stop))
    try:
        if meanwhile is not None:
            meanwhile(lambda: any(stop.query() for _, stop in lanes))
    finally:  # the pairs' memory is written until then
        torch.cuda.synchronize(device)
    nbytes = times * pairs[0][0].nbytes
    return [per_second(nbytes, start.elapsed_time(stop) / 1e3) for start, stop in lanes]


def _thread_copy_rates(pairs: Sequence[CopyPair], *, times: int = 4) -> list[int]:
    """Return the rate of each pair's copies, all pairs at once, each in its own thread (a CPU has no streams)."""
    together = threading.Barrier(len(pairs))

    def copy(pair: CopyPair) -> int:
        destination, source = pair
        together.wait(timeout=60)
        destination.copy_(source)
        return per_second(source.nbytes, cpu_seconds(lambda: destination.copy_(source), times=times))

    with ThreadPoolExecutor(len(pairs)) as threads:
        return list(threads.map(copy, pairs))
