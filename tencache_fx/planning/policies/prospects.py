"""What is left of links and memory while `teraio` chooses, and what each transfer can give at most then. No torch.

A transfer's score only falls as others are chosen: they take time of the links, and the memory that is over the limit
gets less. So a bound on it stays one, and bounds on all transfers at once, as columns, take as long as a close look at
a few of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.schedule import barriers_of

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Steps = np.ndarray[Any, np.dtype[np.int64]]

_ROUNDED_UP = 1 + 1e-9  # sums are rounded
_NEAR_THE_BEST = 0.9  # of bounds: those nearer are sorted first, which is most often enough


class Calendar:
    """One link's free time in each step, in ns. Copies are served in chunks, so a query is a search in a prefix sum."""

    def __init__(self, durations_ns: _Floats) -> None:
        self.free = durations_ns.copy()
        self.before = np.concatenate([[0.0], np.cumsum(self.free)])  # free time before each step

    def earliest_end(self, start: int, need_ns: float) -> int:
        """Return the first step before which a copy started at step `start` is complete; past the end if none."""
        return int(self.before.searchsorted(self.before[start] + need_ns))

    def latest_start(self, end: int, need_ns: float) -> int:
        """Return the last step from which a copy is complete before step `end`; -1 if none."""
        return int(self.before.searchsorted(self.before[end] - need_ns, side="right")) - 1

    def charge(self, start: int, end: int, need_ns: float, *, late: bool = False) -> None:
        """Take up to `need_ns` of what is free during `[start, end)`, from its start, or from its end if `late`."""
        if late:
            start = max(start, self.latest_start(end, need_ns))
        else:
            end = min(end, self.earliest_end(start, need_ns))
        if start >= end:
            return
        span = self.free[start:end][::-1] if late else self.free[start:end]
        taken = np.minimum(span.cumsum(), need_ns)
        taken[1:] -= taken[:-1].copy()
        span -= taken  # a view: this is `self.free`
        np.maximum(span, 0.0, out=span)
        sums = self.before[start] + self.free[start:end].cumsum()
        self.before[end + 1 :] -= self.before[end] - sums[-1]
        self.before[start + 1 : end + 1] = sums

    def earliest_ends(self, starts: _Steps, need_ns: _Floats) -> _Steps:
        """Return `earliest_end` of each of some copies."""
        return self.before.searchsorted(self.before[starts] + need_ns)

    def latest_starts(self, ends: _Steps, need_ns: _Floats) -> _Steps:
        """Return `latest_start` of each of some copies."""
        return self.before.searchsorted(self.before[ends] - need_ns, side="right") - 1


class Sums:
    """Sums over the steps of what was over the limit at one time: bounds, as it only falls."""

    def __init__(self, over: _Floats, durations: _Floats) -> None:
        over = np.maximum(over, 0.0)
        self.most = float(over.max(initial=0.0))
        self.area = np.concatenate([[0.0], np.cumsum(over * durations)])
        self.time = np.concatenate([[0.0], np.cumsum(np.where(over > 0, durations, 0.0))])
        self.steps = np.concatenate([[0], np.cumsum(over > 0)])


class Prospects:
    """The transfers that may still be chosen, as columns, and a bound on the score of each, 0 for all others."""

    def __init__(self, problem: Problem, transfers: Sequence[Transfer], *, latest_first: bool) -> None:
        rows = [(s.copy_out_after + 1, s.freed_at, s.prefetch_at, s.needed_at, s.nbytes) for s in transfers]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy()
        self.start, self.freed_at, self.prefetch_at, self.needed_at, nbytes = columns
        self.nbytes: _Floats = nbytes.astype(np.float64)
        links = problem.links
        self.out_ns = links.copy_latency_ns + self.nbytes * (1e9 / links.d2h_bytes_per_s)
        self.into_ns = links.copy_latency_ns + self.nbytes * (1e9 / links.h2d_bytes_per_s)
        self.boundary, self.barriers = problem.boundary, barriers_of(problem)
        self.crosses = (self.freed_at <= problem.boundary) & (problem.boundary <= self.needed_at)
        self.most: _Floats = np.full(len(transfers), np.inf)
        sign = -1 if latest_first else 1
        order = sorted(range(len(rows)), key=lambda k: (sign * rows[k][0], transfers[k].name, rows[k][3]))
        self.ranks = np.empty(len(rows), dtype=np.int64)
        self.ranks[order] = np.arange(len(rows))
        self.places: dict[str, list[int]] = {}
        for place, transfer in enumerate(transfers):
            self.places.setdefault(transfer.name, []).append(place)

    def renew(self, out: Calendar, into: Calendar, sums: Sums) -> None:
        """Lower the bounds to what links and memory leave, with copies to host memory. O(transfers x log steps)."""
        there = np.flatnonzero(self.most)
        if not there.size:
            return
        ends = out.earliest_ends(self.start[there], self.out_ns[there])
        starts = into.latest_starts(self.needed_at[there], self.into_ns[there])
        gone = self.barriers.freed_from_each(np.maximum(self.freed_at[there], ends))
        fetch = np.minimum(self.prefetch_at[there], self.barriers.fetch_by_each(np.maximum(starts, 0)))
        able = (gone < fetch) & (~self.crosses[there] | ((gone <= self.boundary) & (self.boundary <= fetch)))
        gone = np.minimum(gone, fetch)
        nbytes = self.nbytes[there]
        area, time = sums.area[fetch] - sums.area[gone], sums.time[fetch] - sums.time[gone]
        saved = np.minimum(area, nbytes * time) + np.minimum(nbytes, sums.most)
        cost = self.out_ns[there] + self.into_ns[there]
        helps = able & (sums.steps[fetch] > sums.steps[gone])
        self.most[there] = np.where(helps, np.minimum(self.most[there], saved / cost * _ROUNDED_UP), 0.0)

    def best_first(self) -> Iterator[tuple[int, float]]:
        """Yield the places of the transfers and the bounds on their scores, the highest first."""
        left = np.flatnonzero(self.most)
        if not left.size:
            return
        bounds = self.most[left]
        near = bounds >= bounds.max() * _NEAR_THE_BEST
        for some in (near, ~near):
            places, found = left[some], bounds[some]
            for k in np.lexsort((self.ranks[places], -found)):
                yield int(places[k]), float(found[k])

    def rank_of(self, place: int) -> int:
        """Return a number by which to choose between equals: the one with the least is chosen."""
        return int(self.ranks[place])

    def lower(self, place: int, score: float) -> None:
        """Take `score` for the bound of the transfer at `place`."""
        self.most[place] = score

    def drop(self, name: str) -> None:
        """Take all transfers of one storage away."""
        self.most[self.places[name]] = 0.0
