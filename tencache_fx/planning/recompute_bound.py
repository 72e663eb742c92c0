"""What recomputing cannot do better than, from what is recomputed alone: no new line of steps is laid out for it.

A choice of what to recompute takes away from the device at most what the chosen storages hold between their last use in
the forward and their first one in the backward. It adds at least their own steps to the backward, and copies of the
offloaded parameters that these read, where the backward has no copy yet. What has to be recomputed or kept for these
steps in turn, and what they hold while they run, comes on top.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tencache_fx.planning.collectives import ideal_ns, steps_under_way
from tencache_fx.planning.link_bound import StepBound
from tencache_fx.planning.liveness import Profile, inactive_intervals, is_candidate, live_bytes
from tencache_fx.planning.problem import Kind, Problem, Storage

_Mask = np.ndarray[Any, np.dtype[np.bool_]]


class RecomputeBound:
    """A bound on the step of every choice for one problem, in which it is decided what is pinned."""

    def __init__(self, problem: Problem) -> None:
        self._steps = StepBound(problem)
        self._durations = self._steps.links.durations
        self._ideal_ns = float(ideal_ns(problem))
        self._over = live_bytes(problem) - (problem.budgets.device_bytes or 0)
        storages = {storage.name: storage for storage in problem.storages}
        gaps = [(*_gap(problem, storages[r.name]), storages[r.name].nbytes) for r in problem.recipes]
        self._gaps = np.array(gaps, dtype=np.int64).reshape(-1, 3).T
        self._number = {recipe.name: number for number, recipe in enumerate(problem.recipes)}
        self._runs = _Lists([recipe.steps for recipe in problem.recipes], len(problem.ops))
        parameters, fetched_for = _fetched_for(problem)
        self._fetched_bytes = np.array([nbytes for _, nbytes in parameters], dtype=np.int64)
        self._fetched_for = _Lists(fetched_for, len(parameters))
        self._known: dict[tuple[frozenset[str], float], int] = {}

    def least_ns(self, names: Collection[str]) -> int:
        """Return a time of a whole step that no plan beats with `names` recomputed. O(steps + recipes), once."""
        return self._step_ns(frozenset(names), 1.0)

    def likely_ns(self, names: Collection[str], link_share: float) -> int:
        """Return about how long a step takes with `names` recomputed, by plans that use so much of the links' rates."""
        return self._step_ns(frozenset(names), link_share)

    def _step_ns(self, names: frozenset[str], link_share: float) -> int:
        if (names, link_share) not in self._known:
            chosen = np.zeros(len(self._number), dtype=np.bool_)
            chosen[[self._number[name] for name in names]] = True
            self._known[names, link_share] = self._steps.least_ns(
                self._over_without(chosen),
                self._ideal_ns,
                fetched_bytes=int(self._fetched_bytes[self._fetched_for.union(chosen)].sum()),
                added_ns=float(self._durations[self._runs.union(chosen)].sum()),
                link_share=link_share,
            )
        return self._known[names, link_share]

    def least_of_all_ns(self) -> int:
        """Return a time of a whole step that no plan beats, whatever is recomputed."""
        everything = np.ones(len(self._number), dtype=np.bool_)
        return self._steps.least_ns(self._over_without(everything), self._ideal_ns)

    def _over_without(self, chosen: _Mask) -> Profile:
        """Return the bytes over the budget at each step with the `chosen` recipes' storages recomputed."""
        start, stop, nbytes = self._gaps[:, chosen]
        delta = np.zeros(self._over.size + 1, dtype=np.int64)
        np.subtract.at(delta, start, nbytes)
        np.add.at(delta, stop, nbytes)
        over: Profile = self._over + np.cumsum(delta[:-1])
        return over


class _Lists:
    """Lists of numbers below `count`, one for each recipe."""

    def __init__(self, lists: Sequence[Sequence[int]], count: int) -> None:
        self._sizes = [len(each) for each in lists]
        self._numbers = np.array(list(chain.from_iterable(lists)), dtype=np.int64)
        self._count = count

    def union(self, chosen: _Mask) -> _Mask:
        """Return which numbers are in any of the lists of the `chosen` recipes."""
        found = np.zeros(self._count, dtype=np.bool_)
        found[self._numbers[np.repeat(chosen, self._sizes)]] = True
        return found


def least_floor_bytes(problem: Problem) -> int:
    """Return a device budget that no plan needs less than, whatever is recomputed.

    Every storage counts as away wherever it may be, and everything that can be recomputed as not there between the
    forward and its first use in the backward. O(steps + uses).
    """
    able = {recipe.name for recipe in problem.recipes}
    delta = [0] * (len(problem.ops) + 1)
    for storage in problem.storages:
        away = {(u + 1, int(v)) for u, v in inactive_intervals(storage)} if is_candidate(problem, storage) else set()
        if storage.name in able:
            away.add(_gap(problem, storage))
        for start, stop in away:
            delta[start] -= storage.nbytes
            delta[stop] += storage.nbytes
    return int((live_bytes(problem) + np.cumsum(delta[:-1])).max(initial=problem.external_bytes))


def _gap(problem: Problem, storage: Storage) -> tuple[int, int]:
    """Return the steps in which `storage` is not on the device if it is recomputed."""
    early = max((use for use in storage.uses if use < problem.boundary), default=storage.death)
    late = problem.first_late_use(storage)
    return min(early + 1, late), late


def _fetched_for(problem: Problem) -> tuple[list[tuple[str, int]], list[list[int]]]:
    """Return parameters with their bytes, and by recipe which its steps read of those that the backward does not."""
    fetched = [storage for storage in problem.storages if storage.kind is Kind.FETCHED]
    late = {storage.parameter for storage in fetched if storage.birth >= problem.boundary}
    under_way = steps_under_way(problem)
    numbers: dict[tuple[str, int], int] = {}
    read_at: dict[int, list[int]] = {}
    for storage in fetched:
        if storage.parameter not in late:
            number = numbers.setdefault((storage.parameter, storage.nbytes), len(numbers))
            held = under_way.get(storage.name, ())
            for use in storage.uses:
                if use not in held:
                    read_at.setdefault(use, []).append(number)
    return list(numbers), [[each for step in r.steps for each in read_at.get(step, ())] for r in problem.recipes]
