"""When each chosen swap is copied out and in: the timing half of the `teraio` policy (with G10's eager prefetch pass).

A policy chooses *minimal* swaps, which hold no device bytes from the first scheduling barrier after the last use to the
last one before the next one (`plan.clip_to_barriers`). They fit, but would stall; here each end is given slack wherever
memory allows it, barriers are kept, and memory stays within the budget at every step.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from tencache_fx.planning.collectives import paced_ns
from tencache_fx.planning.liveness import Profile, by_windows, live_bytes
from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Links, Problem, Step, Tier


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """How long a transfer's four parts take, in ns."""

    out: float
    write: float
    read: float
    into: float


def copy_times(links: Links, nbytes: int, tier: Tier) -> CopyTimes:
    """Return the planned times of a transfer of `nbytes` to `tier`; host transfers write and read nothing."""
    latency = float(links.copy_latency_ns)
    out = latency + nbytes / links.d2h_bytes_per_s * 1e9
    into = latency + nbytes / links.h2d_bytes_per_s * 1e9
    if tier is not Tier.NVME:
        return CopyTimes(out, 0.0, 0.0, into)
    write = inf  # parameters may be read from a disk to which nothing is written
    if links.disk_write_bytes_per_s:
        write = links.disk_latency_ns + nbytes / links.disk_write_bytes_per_s * 1e9
    read = links.disk_latency_ns + nbytes / links.disk_read_bytes_per_s * 1e9
    return CopyTimes(out, write, read, into)


class Barriers:
    """The steps from which bytes may count as freed, and be prefetched: all of them, without scheduling barriers.

    Asked for one step after the other, so the answers for all steps, up to one behind the end, are kept as lists.
    """

    def __init__(self, problem: Problem) -> None:
        steps = len(problem.ops)
        barriers = problem.barriers or tuple(map(Step, range(steps)))
        freed = sorted({*barriers, problem.boundary, Step(steps)})
        behind = {Step(0), problem.boundary, *(Step(barrier + 1) for barrier in problem.barriers)}
        fetch = sorted(behind) if problem.barriers else freed
        self._each_freed_from, freed_by = _nearest(freed, steps + 2)
        fetch_from, self._each_fetch_by = _nearest(fetch, steps + 2)
        self._freed_from: list[Step] = self._each_freed_from.tolist()
        self._freed_by: list[Step] = freed_by.tolist()
        self._fetch_from: list[Step] = fetch_from.tolist()
        self._fetch_by: list[Step] = self._each_fetch_by.tolist()

    def freed_from(self, step: int) -> Step:
        """Return the first step at or after `step` from which bytes may count as freed."""
        return self._freed_from[step]

    def freed_from_each(self, steps: Profile) -> Profile:
        """Return `freed_from` of each of these steps."""
        return self._each_freed_from[steps]

    def freed_by(self, step: int) -> Step:
        """Return the last step at or before `step` from which bytes may count as freed, the first if there is none."""
        return self._freed_by[step]

    def fetch_by(self, step: int) -> Step:
        """Return the last step at or before `step` from which bytes may be fetched."""
        return self._fetch_by[step]

    def fetch_by_each(self, steps: Profile) -> Profile:
        """Return `fetch_by` of each of these steps."""
        return self._each_fetch_by[steps]

    def fetch_from(self, step: int) -> Step:
        """Return the first step at or after `step` from which bytes may be fetched."""
        return self._fetch_from[step]


def barriers_of(problem: Problem) -> Barriers:
    """Return the problem's barriers, which are worked out once."""
    kept = by_windows(problem)
    known: Barriers | None = kept.get("barriers")
    if known is None:
        known = kept["barriers"] = Barriers(problem)
    return known


def _nearest(steps: Sequence[Step], count: int) -> tuple[Profile, Profile]:
    """Return for each of `count` steps which of `steps` is the next one, and the one before; else the last, the first.

    >>> _nearest([2, 3], 5)
    (array([2, 2, 2, 3, 3]), array([2, 2, 2, 3, 3]))
    """
    given, asked = np.array(steps, dtype=np.int64), np.arange(count)
    following = given[np.minimum(given.searchsorted(asked), given.size - 1)]
    before = given[np.maximum(given.searchsorted(asked, side="right") - 1, 0)]
    return following, before


def crosses(problem: Problem, transfer: Transfer) -> bool:
    """Whether a transfer is copied out in the forward graph and in in the backward graph."""
    return transfer.freed_at <= problem.boundary <= transfer.needed_at


def time_swaps(problem: Problem, tight: Sequence[Transfer], staging_count: int, lead: float) -> tuple[Transfer, ...]:
    """Return the swaps of `tight` with slack, but for those that turn out not to be needed.

    Copies back start up to `lead` transfer times before the latest safe start.

    Needs a device budget that `tight` fits. O(steps + n x transfer length) for n transfers.
    """
    limit = problem.budgets.device_bytes
    assert limit is not None
    memory = live_bytes(problem)
    departures = _Departures(problem, memory, limit, staging_count)
    transfers = departures.run(tight)
    return time_returns(problem, departures.barriers, transfers, memory, limit, departures.starts_ns, lead)


class _Departures:
    """One walk over the steps that copies out in order of offload and frees bytes once copies land.

    A release that would stall waits for the last barrier up to which the ops before the next one still fit; there the
    copy that lands first is waited for, and the clock moves on by that. `memory` is kept up to date: swaps count as
    freed until their minimal `prefetch_at`.
    """

    def __init__(self, problem: Problem, memory: Profile, limit: int, staging_count: int) -> None:
        self.problem, self.memory, self.limit = problem, memory, limit
        self.barriers = barriers_of(problem)
        self.clock = self.link_free = self.disk_free = 0.0
        self.unissued: deque[Transfer] = deque()  # to NVMe, for want of a staging buffer
        self.flying: deque[tuple[float, Transfer]] = deque()  # (when the copy lands, transfer), in that order
        self.landed: list[tuple[Step, str, Transfer]] = []  # heap by earliest release; last use still to come
        self.buffers = [0.0] * max(1, staging_count)  # heap: when each staging buffer is free
        self.released: list[Transfer] = []
        self.starts_ns: list[float] = []

    def run(self, tight: Sequence[Transfer]) -> list[Transfer]:
        """Return the transfers that are needed, with their copies out set."""
        arrivals: dict[int, list[Transfer]] = {}
        for transfer in sorted(tight, key=lambda s: (s.copy_out_after, s.freed_at, s.name)):
            arrivals.setdefault(transfer.copy_out_after + 1, []).append(transfer)
        untils = self._untils()
        for k, duration_ns in enumerate(paced_ns(self.problem)):
            if k in arrivals or self.unissued:
                self._arrive(Step(k), arrivals.get(k, ()))
            if k in untils:
                self._release_landed(Step(k))
                if k == self.problem.boundary:
                    self._end_forward(Step(k))
                if (until := untils[k]) is not None:
                    self._fit(Step(k), until)
            self.starts_ns.append(self.clock)
            self.clock += duration_ns
        return self.released

    def _untils(self) -> dict[int, Step | None]:
        """Return for each step from which bytes may be freed the next one, if something has to be freed up to that.

        Memory only falls.
        """
        steps = len(self.problem.ops)
        found: dict[int, Step | None] = {}
        step = self.barriers.freed_from(0)
        while step < steps:
            until = self.barriers.freed_from(step + 1)
            found[step] = until if self.memory[step:until].max() > self.limit else None
            step = until
        return found

    def _arrive(self, step: Step, arrivals: Sequence[Transfer]) -> None:
        """Issue the copies out that begin before `step`, and those that a staging buffer is free for by now."""
        for transfer in arrivals:
            if transfer.tier is Tier.NVME:
                self.unissued.append(transfer)
            else:
                self._issue(transfer)
        while self.unissued and self.buffers[0] <= self.clock:
            self._issue(self.unissued.popleft().leaving(after=Step(step - 1)))

    def _fit(self, step: Step, until: Step) -> None:
        """Wait at `step` for what has to be freed for the steps up to `until` to fit."""
        while self.memory[step:until].max() > self.limit:
            fullest = Step(step + int(self.memory[step:until].argmax()))
            self._wait_for(step, self._next_to_land(step, fullest))

    def _issue(self, transfer: Transfer) -> None:
        times = copy_times(self.problem.links, transfer.nbytes, transfer.tier)
        if transfer.tier is Tier.NVME:
            self.clock = max(self.clock, heappop(self.buffers))
        lands = max(self.clock, self.link_free) + times.out
        self.link_free = lands
        if transfer.tier is Tier.NVME:
            self.disk_free = max(lands, self.disk_free) + times.write
            heappush(self.buffers, self.disk_free)
        self.flying.append((lands, transfer))

    def _release_landed(self, step: Step) -> None:
        while self.flying and self.flying[0][0] <= self.clock:
            _, transfer = self.flying.popleft()
            heappush(self.landed, (transfer.freed_at, transfer.name, transfer))
        while self.landed and self.landed[0][0] <= step:
            self._release(step, heappop(self.landed)[2])

    def _release(self, step: Step, transfer: Transfer) -> None:
        if step < transfer.prefetch_at:  # else it is about to be read again, and was never in the way
            self.memory[step : transfer.prefetch_at] -= transfer.nbytes
            self.released.append(transfer.leaving(freed_at=step))

    def _next_to_land(self, step: Step, fullest: Step) -> Transfer:
        waiting = (*(transfer for _, transfer in self.flying), *self.unissued)
        return next(transfer for transfer in waiting if transfer.freed_at <= step and fullest < transfer.prefetch_at)

    def _wait_for(self, step: Step, transfer: Transfer) -> None:
        if transfer in self.unissued:
            self.unissued.remove(transfer)
            transfer = transfer.leaving(after=Step(step - 1))
            self._issue(transfer)
        lands = next(lands for lands, other in self.flying if other == transfer)
        self.flying.remove((lands, transfer))
        self.clock = max(self.clock, lands)
        self._release(step, transfer)

    def _end_forward(self, step: Step) -> None:
        """At the boundary a swap between the graphs frees now or never: now, if the backward needs its bytes."""
        for transfer in (*(transfer for _, transfer in self.flying), *self.unissued):
            if transfer.freed_at > step:
                continue  # it is copied out in the backward graph
            if (self.memory[step : transfer.prefetch_at] > self.limit).any():
                self._wait_for(step, transfer)
            elif transfer in self.unissued:
                self.unissued.remove(transfer)
            else:
                self.flying = deque(pair for pair in self.flying if pair[1] != transfer)


def time_returns(
    problem: Problem,
    barriers: Barriers,
    transfers: Sequence[Transfer],
    memory: Profile,
    limit: int,
    starts_ns: Sequence[float],
    lead: float,
) -> tuple[Transfer, ...]:
    """Set each `prefetch_at`: latest safe start by packing the links backwards, then earlier while memory allows.

    First all latest safe ones, in order of return, so that no early bird takes the bytes a late one needs to be in
    time; then each is pulled forward by up to `lead` transfer times, never past the one before it in the queue.
    """
    order = sorted(transfers, key=lambda s: (s.needed_at, s.name))
    sizes = [(transfer.nbytes, transfer.tier) for transfer in order]
    by_size = {size: copy_times(problem.links, *size) for size in set(sizes)}
    latest_ns: list[float] = []
    link = disk = float("inf")
    for transfer, size in zip(reversed(order), reversed(sizes), strict=True):
        times = by_size[size]
        link = min(starts_ns[transfer.needed_at], link) - times.into
        issue = link
        if transfer.tier is Tier.NVME:
            disk = issue = min(link, disk) - times.read
        latest_ns.append(issue)
    latest_ns.reverse()
    fetches: list[Step] = []
    for transfer, issue in zip(order, latest_ns, strict=True):
        fetches.append(_fetch_at(problem, barriers, transfer, issue, transfer.prefetch_at, memory, limit, starts_ns))
        memory[fetches[-1] : transfer.prefetch_at] += transfer.nbytes
    timed, before = [], Step(0)
    for transfer, size, issue, fetch in zip(order, sizes, latest_ns, fetches, strict=True):
        early = fetch
        if before < fetch:
            eager_ns = issue - lead * (by_size[size].read + by_size[size].into)
            eager = _fetch_at(problem, barriers, transfer, eager_ns, fetch, memory, limit, starts_ns)
            before = early = min(fetch, max(before, eager))
            memory[early:fetch] += transfer.nbytes
        timed.append(transfer.prefetched(early))
    return tuple(timed)


def _earliest_prefetch(problem: Problem, transfer: Transfer) -> Step:
    """Return the first step at which the copy in may be issued: in the graph that reads it, and once the bytes left."""
    start = Step(0) if transfer.needed_at < problem.boundary else problem.boundary
    if transfer.out is None:
        return start
    return max(transfer.freed_at, start) if crosses(problem, transfer) else transfer.freed_at


def _fetch_at(
    problem: Problem,
    barriers: Barriers,
    transfer: Transfer,
    issue_ns: float,
    until: Step,
    memory: Profile,
    limit: int,
    starts_ns: Sequence[float],
) -> Step:
    """Return the last step that starts by `issue_ns`, or the first after it from which the bytes fit up to `until`."""
    earliest = _earliest_prefetch(problem, transfer)
    by_then = bisect_right(starts_ns, issue_ns + 0.5)  # both may be sums of the same times
    first = max(barriers.fetch_from(earliest), barriers.fetch_by(max(0, by_then - 1)))
    if first >= until:
        return until
    room_bytes, window = limit - transfer.nbytes, memory[first:until]
    if window.max() <= room_bytes:
        return first
    return min(until, barriers.fetch_from(first + int(np.flatnonzero(window > room_bytes)[-1]) + 1))
