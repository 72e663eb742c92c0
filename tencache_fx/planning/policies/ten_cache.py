"""10Cache's placement and sliding window (arXiv 2511.14124), carried over from parameters to activations.

    10Cache                                           here
    tensors in forward order; the first g have their  candidates in order of first touch; the most that leave the
    home on the GPU, the next in host memory, the     region within its budget stay home, the next go to host
    rest on NVMe                                      memory until its budget is full, the rest to NVMe
    a tensor leaves the window when its module is     a copy out starts at production; the oldest one in the window
    done, and its slot is free                        leaves when the next op does not fit
    the freed slot goes to the next table entry       in order of return, each is fetched as soon as it fits until
    that is not in the window                         it is read; none overtakes another

Activations must be written out where parameters were only dropped, so what leaves is copied once.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from tencache_fx.planning.liveness import earliest_offload, live_bytes, minimal_swaps
from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Problem, Step
from tencache_fx.planning.tier_capacity import TierCapacity


def choose_10cache(problem: Problem) -> tuple[Transfer, ...]:
    """Return the trips of the execution-order window, none if the region fits.

    Fits the device whenever `minimal_swaps` does. O((K + n) log n + n w) for K steps, n trips of w steps.
    """
    limit = problem.budgets.device_bytes
    if limit is None or live_bytes(problem).max(initial=0) <= limit:
        return ()
    away = _place(problem, limit)
    return _slide_in(problem, _slide_out(problem, away, limit), limit)


def _place(problem: Problem, limit: int) -> list[Transfer]:
    """Return the trips of what has its home in host memory or NVMe, in order of first touch.

    What neither has room for stays home too, if the others can make up for it; if not, the trips are returned as if
    host memory had room, and the planner tells what they would need.
    """
    storages = {storage.name: storage for storage in problem.storages}
    trips = [
        replace(trip, copy_out_after=earliest_offload(problem, storages[trip.name], Step(trip.freed_at - 1)))
        for trip in sorted(minimal_swaps(problem), key=lambda s: (storages[s.name].uses[0], s.name))
    ]
    movable = trips
    while int(live_bytes(problem, movable).max()) <= limit:
        ledger = TierCapacity(problem)
        tried = movable[_most_at_home(problem, movable, limit) :]
        placed = [ledger.place(trip) for trip in tried]
        stuck = {trip.name for trip, where in zip(tried, placed, strict=True) if where is None}
        if not stuck:
            return [where for where in placed if where is not None]
        movable = [trip for trip in movable if trip.name not in stuck]
    return trips


def _most_at_home(problem: Problem, trips: Sequence[Transfer], limit: int) -> int:
    """Return how many of the first trips can be left out. Binary search: fewer never need more memory."""
    low, high = 0, len(trips)
    while low < high:
        middle = (low + high + 1) // 2
        if live_bytes(problem, trips[middle:]).max() <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _slide_out(problem: Problem, trips: Sequence[Transfer], limit: int) -> list[Transfer]:
    """Return `trips` with `gone` put off until the window is full; the first touched leaves first.

    A trip between the graphs leaves at the boundary at the latest. A trip that no op pushed out stays home.
    """
    memory = live_bytes(problem)
    arrivals: dict[int, list[tuple[int, Transfer]]] = {}
    for age, trip in enumerate(trips):
        arrivals.setdefault(trip.freed_at, []).append((age, trip))
    window: list[tuple[int, Transfer]] = []  # heap by age
    gone = []

    def leave(trip: Transfer, step: Step) -> None:
        memory[step : trip.needed_at] -= trip.nbytes
        gone.append(replace(trip, freed_at=step))

    for k in range(len(problem.ops)):
        for entry in arrivals.get(k, ()):
            heappush(window, entry)
        if k == problem.boundary:
            leaving = [trip for _, trip in sorted(window) if trip.freed_at <= k < trip.needed_at]
            window = [entry for entry in window if entry[1].freed_at > k]
            for trip in leaving:
                if (memory[k : trip.needed_at] > limit).any():
                    leave(trip, Step(k))
        while memory[k] > limit:
            _, trip = heappop(window)
            if k < trip.needed_at:
                leave(trip, Step(k))
    return gone


def _slide_in(problem: Problem, trips: Sequence[Transfer], limit: int) -> tuple[Transfer, ...]:
    """Return `trips`, each fetched in order of return at the first step from which it fits until it is read."""
    memory = live_bytes(problem, trips)
    fetched, before = [], Step(0)
    for trip in sorted(trips, key=lambda s: (s.needed_at, s.name)):
        first = max(trip.freed_at, before)
        if trip.freed_at <= problem.boundary <= trip.needed_at:
            first = max(first, problem.boundary)
        first = min(first, trip.needed_at)
        full = np.flatnonzero(memory[first : trip.needed_at] + trip.nbytes > limit)
        fetch = Step(first + int(full[-1]) + 1) if full.size else first
        memory[fetch : trip.needed_at] += trip.nbytes
        before = max(before, fetch)
        fetched.append(replace(trip, prefetch_at=fetch))
    return tuple(fetched)
