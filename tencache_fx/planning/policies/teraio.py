"""TERAIO's plan (arXiv 2506.06472, algorithm 1) on G10's bandwidth calendars (MICRO '23), for storages of one region.

Each inactive interval of a storage is a candidate. Its benefit is the over-capacity *area* it removes: over the steps
between the earliest end of its copy out and the latest safe start of its copy in, time x the bytes above the budget
that it takes away. Its cost is the link time of its copies. The best is committed, links and memory are charged, and so
on. Differences: scores are kept in a heap and renewed lazily (they only fall), host memory comes before NVMe (without
direct storage access a transfer to NVMe takes the same link too), and a region that no free transfer can fit is fitted
by the transfers with the least exposed time, where the paper leaves it to the runtime to stall.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np

from tencache_fx.planning.liveness import (
    Profile,
    by_windows,
    durations_ns,
    earliest_offload,
    least_bytes,
    live_bytes,
    minimal_swaps,
    swap_to_host,
    windows,
)
from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Problem, Step, Tier
from tencache_fx.planning.schedule import CopyTimes, barriers_of, copy_times, crosses, time_swaps
from tencache_fx.planning.tier_capacity import TierCapacity
from tencache_fx.planning.tuning import TUNING

_Floats = np.ndarray[Any, np.dtype[np.float64]]

_ROUNDED_UP = 1 + 1e-9  # sums are rounded
_LONG = 500  # steps: a shorter window is scored closely at once
_SUMMED_UP_EVERY = 4  # choices, and more in a long region: to sum up takes as long as to score some transfers closely
_SUMMED_UP_STEPS = 4_000  # for each choice in between


def choose_teraio(problem: Problem, *, headroom: float = 0.0, lead: float = TUNING.swap_lead) -> tuple[Transfer, ...]:
    """Return the transfers of the greedy plan, none if the region fits.

    Swaps are chosen as if the share `headroom` of the budget was not there, which leaves their copies room to overlap;
    copies in start up to `lead` transfer times before the latest safe start.

    Fits the device whenever `minimal_swaps` does. O(N r (log K + w)) for N intervals re-scored r times (5 to 20 as a
    rule), K steps, intervals of w steps; each commitment costs O(K).
    """
    limit = problem.budgets.device_bytes
    if limit is None or live_bytes(problem).max(initial=0) <= limit:
        return ()
    candidates = _minimal_transfers(problem)
    chosen_for = max(limit - int(limit * headroom), int(least_bytes(problem).max()))
    greedy = _Greedy(problem, min(limit, chosen_for))
    greedy.take_free(candidates)
    fits = greedy.take_exposed(candidates)
    for anywhere in (False, True):  # start again from the transfers that reach the floor
        if not fits:
            greedy = _Greedy(problem, limit)
            fits = greedy.take_exposed(_longest_transfers(problem), anywhere=anywhere)
    return time_swaps(problem, greedy.pruned(), greedy.capacity.staging_count, lead)


def _minimal_transfers(problem: Problem) -> tuple[Transfer, ...]:
    """Return a transfer without slack for every inactive interval of every candidate."""
    kept = by_windows(problem)
    known: tuple[Transfer, ...] | None = kept.get("minimal transfers")
    if known is None:  # asked for by every variant and repair
        known = kept["minimal transfers"] = tuple(
            swap_to_host(
                w.storage, earliest_offload(problem, w.storage, w.last_use), w.freed_at, w.prefetch_at, w.next_use
            )
            for w in windows(problem)
        )
    return known


def _longest_transfers(problem: Problem) -> list[Transfer]:
    """Return of the transfers without slack the longest of every candidate: those that reach the floor."""
    wanted = {(transfer.name, transfer.needed_at) for transfer in minimal_swaps(problem)}
    return [each for each in _minimal_transfers(problem) if (each.name, each.needed_at) in wanted]


class _Calendar:
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


class _Sums:
    """Sums over the steps of what was over the limit at one time: bounds, as it only falls."""

    def __init__(self, over: _Floats, durations: _Floats) -> None:
        over = np.maximum(over, 0.0)
        self.most = float(over.max(initial=0.0))
        self.area = np.concatenate([[0.0], np.cumsum(over * durations)])
        self.time = np.concatenate([[0.0], np.cumsum(np.where(over > 0, durations, 0.0))])

    def most_saved(self, gone: int, fetch: int, nbytes: int) -> float:
        """Return what area and bytes `nbytes` can take away, at most, during `[gone, fetch)`."""
        area = float(self.area[fetch] - self.area[gone])
        return min(area, nbytes * float(self.time[fetch] - self.time[gone])) + min(nbytes, self.most)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a transfer would give now: its score, and the window during which its bytes would be away."""

    score: float
    transfer: Transfer
    times: CopyTimes
    gone: int
    fetch: int


class _Greedy:
    """The state of one greedy run: memory over time, four calendars, tiers, and what was chosen."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit = problem, limit
        self.memory: Profile = live_bytes(problem)
        self.barriers = barriers_of(problem)
        self.over: _Floats = (self.memory - limit).astype(np.float64)
        self.fullest = int(self.over.argmax())
        self.times: dict[tuple[int, Tier], CopyTimes] = {}
        self.durations = durations_ns(problem)
        self.sums = _Sums(self.over, self.durations)
        self.out, self.write, self.read, self.into = (_Calendar(self.durations) for _ in range(4))
        self.capacity = TierCapacity(problem)
        self.chosen: dict[str, Transfer] = {}

    def take_free(self, candidates: Sequence[Transfer]) -> None:
        """Take, by score, transfers that stall nothing, until the region fits or none is left that helps."""
        heap: list[tuple[float, Step, str, Step, Transfer, _Offer | None]] = [
            (-most, transfer.copy_out_after, transfer.name, transfer.needed_at, transfer, None)
            for most, transfer in zip(self._most_scores(candidates), candidates, strict=True)
            if most > 0
        ]
        heapify(heap)
        current: set[tuple[str, Step]] = set()  # those looked at since the last choice
        while heap and self.over[self.fullest] > 0:
            transfer, offer = heap[0][-2:]
            following = min(heap[1:3], default=None)
            enough = 0.0 if following is None else -following[0] * TUNING.enough_of_best_score
            if (transfer.name, transfer.needed_at) not in current:
                offer = None if transfer.name in self.chosen else self._offer(transfer, enough)
            if offer is None:
                heappop(heap)
                continue
            if offer.score >= enough:
                current.add((transfer.name, transfer.needed_at))
            renewed = (-offer.score, *heap[0][1:-1], offer)
            if following is not None and renewed > following and offer.score < enough:
                heapreplace(heap, renewed)  # worse than when last looked at: compare again
                continue
            heappop(heap)
            self._commit(offer)
            current.clear()

    def _most_scores(self, candidates: Sequence[Transfer]) -> list[float]:
        """Return what the score of each candidate can be at most: without waiting for links, and in host memory.

        O(steps + candidates), with sums over the steps at which memory is over the limit.
        """
        freed = np.array([transfer.freed_at for transfer in candidates], dtype=np.int64)
        fetch = np.array([transfer.prefetch_at for transfer in candidates], dtype=np.int64)
        nbytes = np.array([transfer.nbytes for transfer in candidates], dtype=np.float64)
        links = self.problem.links
        cost = 2 * links.copy_latency_ns + nbytes * (1e9 / links.d2h_bytes_per_s + 1e9 / links.h2d_bytes_per_s)
        steps = np.concatenate([[0], np.cumsum(self.over > 0)])
        area, time = self.sums.area[fetch] - self.sums.area[freed], self.sums.time[fetch] - self.sums.time[freed]
        most = (np.minimum(area, nbytes * time) + np.minimum(nbytes, self.sums.most)) / cost * _ROUNDED_UP
        return [float(each) for each in np.where(steps[fetch] > steps[freed], most, 0.0)]

    def _offer(self, transfer: Transfer, enough: float = 0.0) -> _Offer | None:
        for tier in (Tier.HOST, Tier.NVME):
            placed = transfer if transfer.tier is tier else replace(transfer, tier=tier)
            if self.capacity.fits(placed):
                return self._score(placed, enough)
        return None

    def _times(self, transfer: Transfer) -> CopyTimes:
        size = transfer.nbytes, transfer.tier
        if size not in self.times:
            self.times[size] = copy_times(self.problem.links, *size)
        return self.times[size]

    def _score(self, transfer: Transfer, enough: float) -> _Offer | None:
        """Return what `transfer` gives, None if it gives nothing or cannot be done without a stall.

        What is away for long and cannot give `enough` is not looked at closely: its score is then a bound.
        """
        problem, times = self.problem, self._times(transfer)
        start, end = transfer.copy_out_after + 1, transfer.needed_at
        gone = max(transfer.freed_at, self.out.earliest_end(start, times.out))
        fetch = self.into.latest_start(end, times.into)
        if transfer.tier is Tier.NVME:  # staging is small: the copy out goes no faster than the disk writes
            gone = max(gone, self.write.earliest_end(start, times.write))
            fetch = self.read.latest_start(max(fetch, 0), times.read) if fetch > 0 else -1
        gone, fetch = self.barriers.freed_from(gone), min(transfer.prefetch_at, self.barriers.fetch_by(max(fetch, 0)))
        if gone >= fetch:
            return None
        if not gone <= problem.boundary <= fetch and crosses(problem, transfer):
            return None
        cost = times.out + times.write + times.read + times.into
        if fetch - gone > _LONG:
            most_score = self.sums.most_saved(gone, fetch, transfer.nbytes) / cost * _ROUNDED_UP
            if most_score < enough:
                return _Offer(most_score, transfer, times, gone, fetch) if most_score > 0 else None
        over, most = self.over[gone:fetch], transfer.nbytes
        if not (gone <= self.fullest < fetch and self.over[self.fullest] >= most):  # else there is no need to look
            most = min(int(over.max()), most)
        if most <= 0:
            return None
        removed = np.maximum(over, 0.0)
        area = float(np.minimum(removed, transfer.nbytes, out=removed) @ self.durations[gone:fetch])
        return _Offer((area + most) / cost, transfer, times, gone, fetch)

    def _commit(self, offer: _Offer) -> None:
        transfer, times = offer.transfer, offer.times
        self.out.charge(transfer.copy_out_after + 1, offer.gone, times.out)
        self.into.charge(offer.fetch, transfer.needed_at, times.into, late=True)
        if transfer.tier is Tier.NVME:
            self.write.charge(transfer.copy_out_after + 1, offer.gone, times.write)
            self.read.charge(offer.fetch, transfer.needed_at, times.read, late=True)
        self.over[offer.gone : offer.fetch] -= transfer.nbytes
        self.fullest = int(self.over.argmax())
        every = max(_SUMMED_UP_EVERY, self.over.size // _SUMMED_UP_STEPS)
        if len(self.chosen) % every == 0 and self.over.size > _LONG:
            self.sums = _Sums(self.over, self.durations)
        self.capacity.charge(transfer)
        self.chosen[transfer.name] = transfer

    def take_exposed(self, candidates: Sequence[Transfer], *, anywhere: bool = False) -> bool:
        """Drop all slack; then, while a step is over, take the transfer with the least exposed time per byte it frees.

        Return whether the region fits now. `anywhere` takes transfers that no tier has room for, too: the planner then
        tells what they would need. O(N + K) for each transfer taken.
        """
        self.memory = live_bytes(self.problem, self.chosen.values())
        left = _Exposed(self.problem, [s for s in candidates if s.name not in self.chosen])
        while (over_bytes := int(self.memory[step := int(self.memory.argmax())]) - self.limit) > 0:
            for transfer in left.cheapest(step, over_bytes, self.out, self.into):
                placed = self.capacity.place(transfer) or (transfer if anywhere else None)
                if placed is not None:
                    break
            else:
                return False
            left.drop(placed.name)
            times = self._times(placed)
            self.out.charge(placed.copy_out_after + 1, max(placed.freed_at, step), times.out)
            self.into.charge(step + 1, placed.needed_at, times.into, late=True)
            self.memory[placed.freed_at : placed.prefetch_at] -= placed.nbytes
            self.chosen[placed.name] = placed
        return True

    def pruned(self) -> tuple[Transfer, ...]:
        """Return what was chosen less what later choices made superfluous, looking at the latest choice first."""
        kept = []
        memory = live_bytes(self.problem, self.chosen.values())
        for transfer in reversed(self.chosen.values()):
            window = memory[transfer.freed_at : transfer.prefetch_at]
            if window.max() + transfer.nbytes <= self.limit:
                window += transfer.nbytes
            else:
                kept.append(transfer)
        return tuple(reversed(kept))


class _Exposed:
    """The transfers still to be had when no free one is left, as columns."""

    def __init__(self, problem: Problem, transfers: Sequence[Transfer]) -> None:
        self.boundary, self.transfers = problem.boundary, transfers
        steps = [(s.copy_out_after + 1, s.freed_at, s.prefetch_at, s.needed_at, s.nbytes) for s in transfers]
        columns = np.array(steps, dtype=np.int64).reshape(-1, 5).T.copy()
        self.start, self.gone, self.fetch, self.back, self.nbytes = columns
        self.crosses = (self.gone <= problem.boundary) & (problem.boundary <= self.back)
        times = {nbytes: copy_times(problem.links, nbytes, Tier.HOST) for nbytes in {s.nbytes for s in transfers}}
        self.out_ns = np.array([times[transfer.nbytes].out for transfer in transfers])
        self.into_ns = np.array([times[transfer.nbytes].into for transfer in transfers])
        self.there = np.ones(len(transfers), dtype=np.bool_)
        self.places: dict[str, list[int]] = {}
        for place, transfer in enumerate(transfers):
            self.places.setdefault(transfer.name, []).append(place)

    def cheapest(self, step: int, over_bytes: int, out: _Calendar, into: _Calendar) -> Iterator[Transfer]:
        """Remove and yield the transfers that are away at `step`, that with the least exposed time per byte first.

        Bytes count up to `over_bytes`; of equals the longest transfer is first. Nothing else may change meanwhile.
        """
        able = np.flatnonzero(self.there & (self.gone <= step) & (step < self.fetch))
        if not able.size:
            return
        crossing = self.crosses[able]
        leave_by = np.where(crossing, min(step, self.boundary), step)
        return_from = np.where(crossing, max(step + 1, self.boundary), step + 1)
        free_out = out.before[leave_by] - out.before[self.start[able]]
        free_in = into.before[self.back[able]] - into.before[return_from]
        exposed = np.maximum(0, self.out_ns[able] - free_out) + np.maximum(0, self.into_ns[able] - free_in)
        price = exposed / np.minimum(self.nbytes[able], over_bytes)
        length = out.before.size - (self.fetch[able] - self.gone[able])
        equal = np.flatnonzero(price == price.min())
        first = int(equal[length[equal].argmin()])
        yield self._taken(int(able[first]))
        for other in np.lexsort((length, price))[1:]:  # the first of which is the one above, found in less time
            yield self._taken(int(able[other]))

    def _taken(self, place: int) -> Transfer:
        self.there[place] = False
        return self.transfers[place]

    def drop(self, name: str) -> None:
        """Remove the other transfers of one storage."""
        self.there[self.places[name]] = False
