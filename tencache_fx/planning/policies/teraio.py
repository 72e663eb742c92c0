"""TERAIO's plan (arXiv 2506.06472, algorithm 1) on G10's bandwidth calendars (MICRO '23), for storages of one region.

Each inactive interval of a storage is a candidate. Its benefit is the over-capacity *area* it removes: over the steps
between the earliest end of its copy out and the latest safe start of its copy in, time x the bytes above the budget
that it takes away. Its cost is the link time of its copies. The best is committed, links and memory are charged, and so
on. Differences: only those are scored that can be the best by a bound (`prospects.py`), host memory comes before NVMe
(without direct storage access a transfer to NVMe takes the same link too), and a region that no free transfer can fit
is fitted by the transfers with the least exposed time, where the paper leaves it to the runtime to stall.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from tencache_fx.planning.policies.prospects import Calendar, Prospects, Sums
from tencache_fx.planning.problem import Problem, Tier
from tencache_fx.planning.schedule import CopyTimes, barriers_of, copy_times, crosses, time_swaps
from tencache_fx.planning.tier_capacity import TierCapacity
from tencache_fx.planning.tuning import TUNING

_Floats = np.ndarray[Any, np.dtype[np.float64]]

_SUMMED_UP_STEPS = 4_000  # for each choice in between: to sum up takes as long as to score some transfers closely


def choose_teraio(
    problem: Problem, *, headroom: float = 0.0, lead: float = TUNING.swap_lead, latest_first: bool = False
) -> tuple[Transfer, ...]:
    """Return the transfers of the greedy plan, none if the region fits.

    Swaps are chosen as if the share `headroom` of the budget was not there, which leaves their copies room to overlap;
    copies in start up to `lead` transfer times before the latest safe start. Of transfers that are equally good the one
    that may leave first is chosen, or with `latest_first` the one that may leave last.

    Fits the device whenever `minimal_swaps` does. O(N log K + r w + K) for each choice among N intervals, of which r
    are scored closely (a few as a rule), with K steps and intervals of w steps.
    """
    limit = problem.budgets.device_bytes
    if limit is None or live_bytes(problem).max(initial=0) <= limit:
        return ()
    candidates = _minimal_transfers(problem)
    chosen_for = max(limit - int(limit * headroom), int(least_bytes(problem).max()))
    greedy = _Greedy(problem, min(limit, chosen_for))
    greedy.take_free(candidates, latest_first=latest_first)
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
        self.sums = Sums(self.over, self.durations)
        self.out, self.write, self.read, self.into = (Calendar(self.durations) for _ in range(4))
        self.capacity = TierCapacity(problem)
        self.chosen: dict[str, Transfer] = {}

    def take_free(self, candidates: Sequence[Transfer], *, latest_first: bool = False) -> None:
        """Take, by score, transfers that stall nothing, until the region fits or none is left that helps.

        One is taken whose score is nearly as good as what any other's may be.
        """
        prospects = Prospects(self.problem, candidates, latest_first=latest_first)
        while self.over[self.fullest] > 0:
            prospects.renew(self.out, self.into, self.sums)
            found: tuple[float, int, _Offer] | None = None
            for place, most_score in prospects.best_first():
                if found is not None and -found[0] >= most_score * TUNING.enough_of_best_score:
                    break
                offer = self._offer(candidates[place])
                prospects.lower(place, 0.0 if offer is None else offer.score)
                if offer is not None:
                    looked = (-offer.score, prospects.rank_of(place), offer)
                    found = looked if found is None else min(found, looked, key=lambda each: each[:2])
            if found is None:
                break
            self._commit(found[2])
            prospects.drop(found[2].transfer.name)

    def _offer(self, transfer: Transfer) -> _Offer | None:
        for tier in (Tier.HOST, Tier.NVME):
            placed = transfer if transfer.tier is tier else replace(transfer, tier=tier)
            if self.capacity.fits(placed):
                return self._score(placed)
        return None

    def _times(self, transfer: Transfer) -> CopyTimes:
        size = transfer.nbytes, transfer.tier
        if size not in self.times:
            self.times[size] = copy_times(self.problem.links, *size)
        return self.times[size]

    def _score(self, transfer: Transfer) -> _Offer | None:
        """Return what `transfer` gives, None if it gives nothing or cannot be done without a stall."""
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
        if len(self.chosen) % (1 + self.over.size // _SUMMED_UP_STEPS) == 0:
            self.sums = Sums(self.over, self.durations)
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

    def cheapest(self, step: int, over_bytes: int, out: Calendar, into: Calendar) -> Iterator[Transfer]:
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
