"""What no plan can beat: a relaxation of keep, recompute, host and NVMe decided together. No torch, no policy's code.

Look at one step k. What lives there and is over the budget is either swapped out, or will be computed again later.
The time between the two graphs counts as such a step, without a duration.
Say m bytes are away, and the rest is recomputed:

    the m bytes were copied out before k, no faster than the link (and, what host memory cannot hold, the disk) carries
    them, and none before it was made; they are copied in after k, each before the step that reads it;
    the rest costs at least what its cheapest bytes cost to compute again, each step counted once.

The best m gives a time that every plan needs because of step k; the bound is the largest over the steps looked at, or
what the region takes with its collectives and without copies.
Copies may be split at will, collectives take no time in it, rates are the solo ones, and recomputed values ask for
nothing to be kept: all that makes the bound lower than what can be reached, never higher.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tencache_fx.planning.collectives import ideal_ns
from tencache_fx.planning.liveness import inactive_intervals, is_candidate, live_bytes
from tencache_fx.planning.problem import Problem, Storage

_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]

_STEPS = 64  # so many steps are looked at: the fullest of as many stretches
_CELLS = 256  # m is searched in so many cells, twice
_GLANCES = 9  # before, so many values of m are looked at: they tell of most steps that they do not matter


def moves_too_much(problem: Problem) -> bool:
    """Whether no plan fits without recomputing, as host memory and disk lack room for what is over the device budget.

    What is over it at one step is in buffers then, of whatever plan: parameters that are pinned only make it more.
    """
    budgets = problem.budgets
    if budgets.device_bytes is None:
        return False
    over_bytes = int(live_bytes(problem).max(initial=0)) - budgets.device_bytes
    return over_bytes > budgets.host_bytes + budgets.disk_bytes


def joint_lower_bound_ns(problem: Problem) -> int:
    """Return a time that no plan beats, whatever it keeps, moves to host memory or NVMe, or recomputes by `recipes`.

    Holds for transfers that `verify_plan` accepts on `recompute(problem, names)`, for any `names`, in the simulator.
    Where no plan fits at all it means nothing. O(recipes x forward steps + storages x cells) for each of 64 steps.
    """
    least_ns = ideal_ns(problem)
    limit = problem.budgets.device_bytes
    if limit is None or not problem.ops:
        return least_ns
    relaxed = _Relaxation(problem)
    over = live_bytes(replace(problem, boundary_bytes=0)) - limit
    bound = float(least_ns)
    over_between = _bytes_between(problem) - limit
    if over_between > 0:
        bound = max(bound, relaxed.between(over_between))
    for step in sorted(_fullest(over, problem.boundary), key=lambda step: -over[step]):
        bound = max(bound, relaxed.at(step, int(over[step]), bound))
    return int(bound)


def _bytes_between(problem: Problem) -> int:
    """Return the bytes in use between the graphs if nothing is away: apart from the first backward step's.

    Recomputing puts other steps first in the backward graph, and external memory held between the graphs counts there.
    """
    boundary = problem.boundary
    if boundary >= len(problem.ops):
        return 0
    across = sum(s.nbytes for s in problem.storages if s.birth < boundary < s.death)
    return across + problem.boundary_bytes + problem.external_bytes


def _fullest(over: "np.ndarray[Any, np.dtype[np.int64]]", boundary: int) -> Iterator[int]:
    """Yield the fullest step of each of some stretches, and the last of the forward, if they are over the budget."""
    stretches = np.array_split(np.arange(over.size), min(over.size, _STEPS))
    steps = {int(stretch[over[stretch].argmax()]) for stretch in stretches} | {max(0, min(boundary, over.size) - 1)}
    yield from (step for step in sorted(steps) if over[step] > 0)


class _Relaxation:
    """The swaps and recipes of a problem as columns; times are in ns as if nothing stalled and nothing ran again."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.durations = np.array([op.duration_ns for op in problem.ops], dtype=np.float64)
        self.ends = np.cumsum(self.durations)
        self._add_swaps()
        self._add_recipes({storage.name: storage for storage in problem.storages})

    def _add_swaps(self) -> None:
        problem, total = self.problem, float(self.ends[-1])
        rows = [
            (u, v, s.nbytes, self.ends[max(s.birth, s.ready)], total - self.ends[v - 1])
            for s in problem.storages
            if is_candidate(problem, s)
            for u, v in inactive_intervals(s)
        ]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        self.used, self.back, self.moved_bytes, self.made_ns, self.tail_ns = columns
        links, budgets = problem.links, problem.budgets
        self.out = max(links.d2h_bytes_per_s, links.d2h_duplex_bytes_per_s) / 1e9
        self.into = max(links.h2d_bytes_per_s, links.h2d_duplex_bytes_per_s) / 1e9
        self.write, self.read = links.disk_write_bytes_per_s / 1e9, links.disk_read_bytes_per_s / 1e9
        self.host = float(budgets.host_bytes)
        self.tiers = self.host + (budgets.disk_bytes if min(self.write, self.read) > 0 else 0)

    def _add_recipes(self, storages: dict[str, Storage]) -> None:
        problem, boundary = self.problem, self.problem.boundary
        kept = [storages[recipe.name] for recipe in problem.recipes]
        counts = [len(recipe.steps) for recipe in problem.recipes]
        self.runs_of = np.repeat(np.arange(len(kept)), counts)  # with `runs`: which recipe runs which step
        self.runs = np.array([step for recipe in problem.recipes for step in recipe.steps], dtype=np.int64)
        self.recipe_bytes = np.array([s.nbytes for s in kept], dtype=np.float64)
        self.last_early = np.array([max((u for u in s.uses if u < boundary), default=boundary) for s in kept])
        self.first_late = np.array([min((u for u in s.uses if u >= boundary), default=len(problem.ops)) for s in kept])

    def at(self, step: int, over_bytes: int, known_ns: float = 0.0) -> float:
        """Return what every plan needs because of `step`, in ns; 0 if no plan can make it fit.

        Where that is no more than `known_ns`, another time that is not, either: to find one takes less work.
        """
        return self._least_ns(
            over_bytes,
            away=(self.used < step) & (step < self.back),
            recomputed=(self.last_early < step) & (step < self.first_late),
            span=(step, step + 1),
            known_ns=known_ns,
        )

    def between(self, over_bytes: int) -> float:
        """Return what every plan needs because of the time between the graphs, in ns; 0 if no plan can make it fit."""
        boundary = self.problem.boundary
        return self._least_ns(
            over_bytes,
            away=(self.used < boundary) & (boundary <= self.back),
            recomputed=self.last_early < boundary,
            span=(boundary, boundary),
            known_ns=0.0,
        )

    def _least_ns(
        self, over_bytes: int, away: _Mask, recomputed: _Mask, span: tuple[int, int], known_ns: float
    ) -> float:
        """Return the least time in which `over_bytes` are not there while the steps of `span` run."""
        freed, cost_ns = self._prices(recomputed)
        low = max(0.0, over_bytes - float(freed[-1]))
        high = min(float(over_bytes), float(self.moved_bytes[away].sum()), self.tiers)
        if low > high:
            return 0.0

        def times(moved: _Floats) -> tuple[_Floats, _Floats, _Floats]:
            recomputed_ns = np.interp(over_bytes - moved, freed, cost_ns)
            gone_ns = self._carried(moved, self.made_ns[away], self.moved_bytes[away], self.out, self.write)
            back_ns = self._carried(moved, self.tail_ns[away], self.moved_bytes[away], self.into, self.read)
            return recomputed_ns, gone_ns, back_ns

        glance = float(self._makespan(span, *times(np.linspace(low, high, _GLANCES))).min())
        if glance <= known_ns:  # what is returned otherwise is no more than any of these
            return glance
        moved = np.linspace(low, high, _CELLS + 1)
        for last in (False, True):
            recomputed_ns, gone_ns, back_ns = times(moved)
            # In a cell, at least its lower end is moved, and at least what its upper end leaves is recomputed.
            cells = self._makespan(span, recomputed_ns[1:], gone_ns[:-1], back_ns[:-1])
            if last:
                break
            reached = self._makespan(span, recomputed_ns, gone_ns, back_ns).min()
            near = np.flatnonzero(cells <= reached)
            moved = np.linspace(moved[near[0]], moved[near[-1] + 1], _CELLS + 1)
        return float(cells.min())

    def _makespan(self, span: tuple[int, int], recomputed_ns: _Floats, gone_ns: _Floats, back_ns: _Floats) -> _Floats:
        """Return the least time of a region in which copies take that long before and after the steps of `span`."""
        first, last = span
        before, here = float(self.durations[:first].sum()), float(self.durations[first:last].sum())
        after = float(self.durations[last:].sum())
        gone_by, rest = np.maximum(before, gone_ns), np.maximum(after, back_ns)
        if last <= self.problem.boundary:  # the steps that run again do so later
            rest = np.maximum(rest, after + recomputed_ns)
        least: _Floats = here + np.maximum(before + after + recomputed_ns, gone_by + rest)
        return least

    def _carried(self, moved: _Floats, away_ns: _Floats, nbytes: _Floats, link: float, disk: float) -> _Floats:
        """Return how long before (or after) a step the copies of `moved` bytes begin (or end) at least, in ns.

        Bytes beyond those that were made by some time begin after it, and the link takes its time for them.
        """
        order = np.argsort(away_ns)
        sooner = np.cumsum(nbytes[order]) - nbytes[order]
        beyond = moved[:, None] - sooner[None, :]
        least: _Floats = np.where(beyond > 0, away_ns[order] + beyond / max(link, 1e-9), 0.0).max(axis=1, initial=0.0)
        on_disk = np.maximum(0.0, moved - self.host)
        if on_disk.any():
            least = np.maximum(least, on_disk / disk)
        return least

    def _prices(self, mask: _Mask) -> tuple[_Floats, _Floats]:
        """Return a curve: bytes freed by recomputing, and the least time it takes, cheapest bytes first.

        A step that several recipes need is shared out among them by bytes, so that no choice is charged for more than
        it runs (the fractional knapsack of these prices is then below every choice of recipes).
        """
        count, among = len(mask), mask[self.runs_of]
        runs_of, runs, nbytes = self.runs_of[among], self.runs[among], self.recipe_bytes[mask]
        shared = np.maximum(1.0, np.bincount(runs, self.recipe_bytes[runs_of], self.durations.size))
        price = np.bincount(runs_of, (self.durations / shared)[runs], count)[mask]  # ns per byte
        order = np.argsort(price)
        freed = np.concatenate([[0.0], np.cumsum(nbytes[order])])
        return freed, np.concatenate([[0.0], np.cumsum(nbytes[order] * price[order])])
