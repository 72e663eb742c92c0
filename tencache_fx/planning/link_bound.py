"""How long a region takes at least because of what its links carry before and after each step, whatever the plan.

At step k, what is on the device fits. So before k the link out has carried what lives there and is over the budget, and
the gradients that are done by then: one of them that is still there takes room from the others. And behind k the link
in carries what is over the budget, and the offloaded parameters that are first read later: one that came early took
room. Copies may be split at will, and what is made late may leave early, so the bound is never too high.
"""

from typing import Any, NamedTuple

import numpy as np

from tencache_fx.planning.liveness import Profile
from tencache_fx.planning.parameter_schedule import adding_bytes, given_bytes, late_update_bytes, updating_bytes
from tencache_fx.planning.problem import Kind, Links, Problem

_NS_PER_S = 1_000_000_000
_Floats = np.ndarray[Any, np.dtype[np.float64]]


class LeastTimes(NamedTuple):
    """The least times of a region and of its backward, in ns."""

    region_ns: float
    backward_ns: float


class LinkBound:
    """The bound for one problem, and for what recomputing makes of it, which adds steps to its backward."""

    def __init__(self, problem: Problem) -> None:
        steps, self.boundary = len(problem.ops), problem.boundary
        self.durations: _Floats = np.array([op.duration_ns for op in problem.ops], dtype=np.float64)
        ends = np.cumsum(self.durations)
        self.before: _Floats = ends - self.durations
        self.after: _Floats = self.durations.sum() - ends
        self.is_early = np.arange(steps) < problem.boundary
        self._links = problem.links
        self._linked = min(problem.links.d2h_bytes_per_s, problem.links.h2d_bytes_per_s) > 0
        fetched, stored, storing = ([0] * (steps + 1) for _ in range(3))  # bytes from each step on
        for storage in problem.storages:
            if storage.kind is Kind.FETCHED:
                fetched[storage.birth] += storage.nbytes
            elif storage.kind is Kind.STORED:
                stored[storage.death] += storage.nbytes
                storing[storage.uses[-1] + 1] += storage.nbytes
        self.fetched_by, self.stored_by, storing_by = (
            np.cumsum(each[:steps], dtype=np.int64) for each in (fetched, stored, storing)
        )
        self.fetched_after: Profile = sum(fetched) - self.fetched_by
        self.stored_after: Profile = sum(storing) - storing_by

    def least(
        self, over: Profile, fetched_bytes: int = 0, added_ns: float = 0.0, link_share: float = 1.0
    ) -> LeastTimes:
        """Return times that no plan beats; `over` are the bytes over the budget at each step, less than 0 for room.

        Recomputing makes the backward fetch `fetched_bytes` more, and run for `added_ns` longer. With a `link_share` of
        less than 1 of the links' rates, these are times that plans come near to.
        """
        early_ns = np.where(self.is_early, added_ns, 0.0)
        backward_ns = float(self.durations[self.boundary :].sum()) + added_ns
        if not self._linked or not over.size:
            return LeastTimes(float(self.durations.sum()) + added_ns, backward_ns)
        out_by = np.maximum(0, over + self.stored_by)
        in_after = np.maximum(0, over + self.fetched_after + np.where(self.is_early, fetched_bytes, 0))
        stalled = least_link_ns(self._links, out_by, self.fetched_by) / link_share - self.before
        started = self.before + np.maximum.accumulate(np.maximum(0.0, stalled))  # a later step is late, too
        stalling = least_link_ns(self._links, self.stored_after, in_after) / link_share - self.after
        rest = self.after + np.maximum.accumulate(np.maximum(early_ns, stalling)[::-1])[::-1]
        late = slice(self.boundary, None)
        since_boundary = self.before[late] + self.durations[late] + rest[late]
        return LeastTimes(
            float((started + self.durations + rest).max()),
            max(backward_ns, float((since_boundary - self.before[late][:1]).max(initial=0.0))),
        )


def least_link_ns(links: Links, out_bytes: Profile, in_bytes: Profile) -> _Floats:
    """Return how long links need at least for so many bytes in both directions, for as long as is best at once.

    While both directions are busy each runs at its duplex rate. The time is linear in how long that is, between the
    times at which one of them has carried everything.
    """
    duplex_out, duplex_in = links.d2h_duplex_bytes_per_s / 1e9, links.h2d_duplex_bytes_per_s / 1e9
    solo_out, solo_in = links.d2h_bytes_per_s / 1e9, links.h2d_bytes_per_s / 1e9
    out_ns, in_ns = out_bytes / solo_out, in_bytes / solo_in
    least: _Floats = out_ns + in_ns
    for both_ns in (out_bytes / duplex_out, in_bytes / duplex_in):
        left_out = np.maximum(0.0, out_bytes - both_ns * duplex_out) / solo_out
        left_in = np.maximum(0.0, in_bytes - both_ns * duplex_in) / solo_in
        least = np.minimum(least, both_ns + left_out + left_in)
    return least


class StepBound:
    """The bound on a whole step, updates included, for one problem and for what recomputing makes of it."""

    def __init__(self, problem: Problem) -> None:
        self.links = LinkBound(problem)
        self._boundary, self._accumulation = problem.boundary, problem.accumulation
        self._host_bytes_per_s = problem.links.host_bytes_per_s
        self._updating_bytes, self._adding_bytes = updating_bytes(problem), adding_bytes(problem)
        self._given_bytes, self._late_bytes = given_bytes(problem), late_update_bytes(problem)

    def least_ns(
        self,
        over: Profile,
        ideal_ns: float,
        fetched_bytes: int = 0,
        added_ns: float = 0.0,
        link_share: float = 1.0,
    ) -> int:
        """Return a time of a whole step that no plan beats; arguments are those of `LinkBound.least`.

        `ideal_ns` is a time that no plan for one forward and backward beats, whatever it recomputes.
        """
        if not over.size:
            return 0
        least = self.links.least(over, fetched_bytes, added_ns, link_share)
        region_ns = max(ideal_ns, least.region_ns)
        host_ns, late_ns = 0, 0.0
        if self._updating_bytes and self._host_bytes_per_s:
            copied_bytes = self._given_bytes + fetched_bytes + 2 * max(0, int(over.max()))
            busy_bytes = self._updating_bytes + self._accumulation * copied_bytes + self._adding_bytes
            host_ns = busy_bytes * _NS_PER_S // self._host_bytes_per_s
        if self._late_bytes:  # what the backward begins without has left, and the host's memory has carried that, too
            late_bytes = self._late_bytes + max(0, int(over[: self._boundary + 1].max()))
            late_ns = late_bytes * _NS_PER_S // self._host_bytes_per_s + least.backward_ns
            late_ns += (self._accumulation - 1) * region_ns
        return max(self._accumulation * int(region_ns), host_ns, int(late_ns))
