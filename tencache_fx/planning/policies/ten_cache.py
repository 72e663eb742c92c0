"""10Cache's placement and sliding window (arXiv 2511.14124), carried over from parameters to activations.

    10Cache                                           here
    tensors in forward order; the first g have their  candidates in order of first touch; the most that leave the
    home on the GPU, the next in host memory, the     region within its budget are kept, the next go to host
    rest on NVMe                                      memory until its budget is full, the rest to NVMe
    a tensor leaves the window when its module is     a copy out starts at production; the oldest one in the window
    done, and its slot is free                        leaves when the next op does not fit
    the freed slot goes to the next table entry       in order of return, each is fetched as soon as it fits until
    that is not in the window                         it is read; none overtakes another

Activations must be written out where parameters were only dropped, so what leaves is copied once.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from tencache_fx.planning.liveness import earliest_offload, live_bytes, minimal_swaps
from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Problem, Step
from tencache_fx.planning.tier_capacity import TierCapacity


def choose_10cache(problem: Problem) -> tuple[Transfer, ...]:
    """Return the transfers of the execution-order window, none if the region fits.

    Fits the device whenever `minimal_swaps` does. O((K + n) log n + n w) for K steps, n transfers of w steps.
    """
    limit = problem.budgets.device_bytes
    if limit is None or live_bytes(problem).max(initial=0) <= limit:
        return ()
    away = _place(problem, limit)
    return _slide_in(problem, _slide_out(problem, away, limit), limit)


def _place(problem: Problem, limit: int) -> list[Transfer]:
    """Return the swaps of what is placed in host memory or NVMe, in order of first touch.

    What neither has room for is kept on the device too, if the others can make up for it; if not, the transfers are
    returned as if host memory had room, and the planner tells what they would need.
    """
    storages = {storage.name: storage for storage in problem.storages}
    transfers = [
        transfer.leaving(after=earliest_offload(problem, storages[transfer.name], Step(transfer.freed_at - 1)))
        for transfer in sorted(minimal_swaps(problem), key=lambda s: (storages[s.name].uses[0], s.name))
    ]
    movable = transfers
    while int(live_bytes(problem, movable).max()) <= limit:
        capacity = TierCapacity(problem)
        tried = movable[_most_pinned(problem, movable, limit) :]
        placed = [capacity.place(transfer) for transfer in tried]
        stuck = {transfer.name for transfer, where in zip(tried, placed, strict=True) if where is None}
        if not stuck:
            return [where for where in placed if where is not None]
        movable = [transfer for transfer in movable if transfer.name not in stuck]
    return transfers


def _most_pinned(problem: Problem, transfers: Sequence[Transfer], limit: int) -> int:
    """Return how many of the first transfers can be left out. Binary search: fewer never need more memory."""
    low, high = 0, len(transfers)
    while low < high:
        middle = (low + high + 1) // 2
        if live_bytes(problem, transfers[middle:]).max() <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _slide_out(problem: Problem, transfers: Sequence[Transfer], limit: int) -> list[Transfer]:
    """Return `transfers` with `freed_at` put off until the window is full; the first touched leaves first.

    A swap between the graphs is freed at the boundary at the latest. A swap that no op asked for is dropped.
    """
    memory = live_bytes(problem)
    arrivals: dict[int, list[tuple[int, Transfer]]] = {}
    for age, transfer in enumerate(transfers):
        arrivals.setdefault(transfer.freed_at, []).append((age, transfer))
    window: list[tuple[int, Transfer]] = []  # heap by age
    gone = []

    def leave(transfer: Transfer, step: Step) -> None:
        memory[step : transfer.needed_at] -= transfer.nbytes
        gone.append(transfer.leaving(freed_at=step))

    for k in range(len(problem.ops)):
        for entry in arrivals.get(k, ()):
            heappush(window, entry)
        if k == problem.boundary:
            leaving = [transfer for _, transfer in sorted(window) if transfer.freed_at <= k < transfer.needed_at]
            window = [entry for entry in window if entry[1].freed_at > k]
            for transfer in leaving:
                if (memory[k : transfer.needed_at] > limit).any():
                    leave(transfer, Step(k))
        while memory[k] > limit:
            _, transfer = heappop(window)
            if k < transfer.needed_at:
                leave(transfer, Step(k))
    return gone


def _slide_in(problem: Problem, transfers: Sequence[Transfer], limit: int) -> tuple[Transfer, ...]:
    """Return `transfers`, each fetched in order of return at the first step from which it fits until it is read."""
    memory = live_bytes(problem, transfers)
    fetched, before = [], Step(0)
    for transfer in sorted(transfers, key=lambda s: (s.needed_at, s.name)):
        first = max(transfer.freed_at, before)
        if transfer.freed_at <= problem.boundary <= transfer.needed_at:
            first = max(first, problem.boundary)
        first = min(first, transfer.needed_at)
        full = np.flatnonzero(memory[first : transfer.needed_at] + transfer.nbytes > limit)
        fetch = Step(first + int(full[-1]) + 1) if full.size else first
        memory[fetch : transfer.needed_at] += transfer.nbytes
        before = max(before, fetch)
        fetched.append(transfer.prefetched(fetch))
    return tuple(fetched)
