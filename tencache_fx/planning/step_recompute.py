"""Chooses what the regions of a step recompute instead of saving, in which of their calls.

The saved values of all regions make one list, by what their recipe costs per byte. The search goes down that list,
first in even strides, then closer around the best: each choice is modelled (`recompute.py`), joined to the problem of
the whole step, planned by `teraio` and replayed by the simulator. About 20 choices, and fewer plans: what cannot beat
the best so far is not planned.

Of a region with many calls, one value more frees its bytes in every call, which can be more than is needed. So the last
value taken from the list, or the next one, is recomputed in the first calls only: what these save is held longest.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes, lower_bound_ns
from tencache_fx.planning.pool_sizing import pool_classes, total_bytes
from tencache_fx.planning.problem import Budgets, Links, Problem, Tier
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_search import RecomputeSearch, recomputed_for
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.step import Visit, join, with_regions
from tencache_fx.planning.step_room import CALLS_TO_COME, unplanned_peak_bytes
from tencache_fx.planning.swap_region import SwapRegion, frugal_transfers
from tencache_fx.planning.tuning import TUNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """The storages that the calls of one region recompute: `always` in all, `first` too in the first `first_calls`."""

    always: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    first_calls: int = 0

    def names(self, call: int, *, checkpointed: bool) -> frozenset[str]:
        """Return the storages that the `call`-th call of a step recomputes, counted from 0.

        Checkpointed calls run again in another order, and have to save the same: all recompute what the first does.
        """
        is_first = (0 if checkpointed else call) < self.first_calls
        return frozenset(self.always + self.first if is_first else self.always)

    def names_of(self, visit: Visit) -> frozenset[str]:
        """Return the storages that the call of this run recomputes."""
        return self.names(visit.call, checkpointed=visit.checkpointed)

    @property
    def extent(self) -> tuple[int, int]:
        """How much is recomputed: of two choices for a region, both from the cheapest on, one holds the other."""
        return len(self.always), self.first_calls


Choice = Mapping[int, Recomputed]
"""What is recomputed, by region."""

_TUNING = replace(TUNING, leads=(TUNING.compared_lead,), resident_shares=(0.0,), state_shares=())
_STRIDES = 8
_GAIN_PERCENT = 1  # as much faster another choice has to be, for the regions to be compiled again


def choose_for_step(
    visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]] = ()
) -> Choice | None:
    """Return what each region is best to recompute; None if the choice that the visits ran with is as good."""
    return _Search(visits, links, budgets, shared).run()


class _Search:
    """The search for one step. A score is how many bytes the floor is over the budget, and how long the step takes."""

    def __init__(
        self, visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]]
    ) -> None:
        self._visits, self._links, self._budgets, self._shared = visits, links, budgets, shared
        # Calls of one region may have other sizes: what their storages cost is seen at the largest.
        self._regions = {visit.index: visit.region for visit in sorted(visits, key=lambda visit: visit.region.nbytes)}
        self._own = {(visit.index, visit.call): visit.region for visit in visits}
        self._calls = {(visit.index, visit.call): visit for visit in visits}
        returning = {visit.index for visit in visits if visit.backward}
        self._line = _price_list({index: region for index, region in self._regions.items() if index in returning})
        self._models: dict[tuple[int, frozenset[str]], SwapRegion] = {}  # by the identity of what calls have run
        self._scores: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self) -> Choice | None:
        if not self._line:
            return None
        best = self._refine(self._descend())
        choice, score = self._choice(*best), self._score_of(*best)
        present_names = {place: region.recomputed for place, region in self._own.items()}
        if self._names(choice) == present_names:
            return None
        if self._is_mixed():  # for lack of room, before anything was chosen
            return choice
        present = self._score(present_names)
        if score[0] > present[0]:
            return None
        if score[0] == present[0] and score[1] * 100 > present[1] * (100 - _GAIN_PERCENT):
            return None
        return choice

    def _is_mixed(self) -> bool:
        """Return whether calls of one region have recomputed different storages."""
        ran = {(visit.index, visit.region.recomputed) for visit in self._visits}
        return len(ran) > len(self._regions)

    def _descend(self) -> int:
        """Return how many values of the list are best recomputed, in all calls of their regions."""
        count = len(self._line)
        stride = max(1, count // _STRIDES)
        best: int = min({*range(0, count, stride), count}, key=lambda each: (self._score_of(each, 0), each))
        while stride > 1:
            stride = (stride + 1) // 2
            nearby = {max(0, best - stride), best, min(count, best + stride)}
            best = min(nearby, key=lambda each: (self._score_of(each, 0), each))
        return best

    def _refine(self, best: int) -> tuple[int, int]:
        """Return how many values are recomputed in all calls, and in how many calls the one behind them is.

        Unless that is faster by as much as compiling its region twice asks for, all calls do the same.
        """
        found = [(best, 0)]
        for count in (best - 1, best):
            if not 0 <= count < len(self._line):
                continue
            index = self._line[count][0]
            low, high = 1, sum(each == index for each, _ in self._calls) - 1
            while low <= high:  # more calls hold less, and compute more
                middle = (low + high) // 2
                found.append((count, middle))
                if self._score_of(count, middle + 1) < self._score_of(count, middle):
                    low = middle + 1
                else:
                    high = middle - 1
        even, best_of_all = self._score_of(best, 0), min(found, key=lambda each: (self._score_of(*each), each))
        score = self._score_of(*best_of_all)
        gains = score[0] < even[0] or score[1] * 100 <= even[1] * (100 - _GAIN_PERCENT)
        return best_of_all if gains else (best, 0)

    def _choice(self, count: int, first_calls: int) -> Choice:
        always, behind = self._line[:count], self._line[count : count + 1] if first_calls else []
        return {
            index: Recomputed(
                always=tuple(sorted(name for region, name in always if region == index)),
                first=tuple(name for region, name in behind if region == index),
                first_calls=first_calls if behind and behind[0][0] == index else 0,
            )
            for index in self._regions
        }

    def _names(self, choice: Choice) -> dict[tuple[int, int], frozenset[str]]:
        """Return what each call recomputes by a choice."""
        return {place: choice[visit.index].names_of(visit) for place, visit in self._calls.items()}

    def _score_of(self, count: int, first_calls: int) -> tuple[int, int]:
        if (count, first_calls) not in self._scores:
            names = self._names(self._choice(count, first_calls))
            self._scores[count, first_calls] = self._score(names, min(self._scores.values(), default=None))
        return self._scores[count, first_calls]

    def _score(
        self, names: Mapping[tuple[int, int], frozenset[str]], least: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Return the score of what each call recomputes; a bound is the time where no plan beats the `least`."""
        models = {place: self._model(place, each) for place, each in names.items()}
        visits = with_regions(self._visits, models)
        problem = join(visits, self._links, self._budgets, self._shared).problem
        if least is not None and (bound := (0, lower_bound_ns(problem))) > least:
            return bound
        try:
            plan_ns = make_plan(problem, "teraio", tuning=_TUNING).forecast.makespan_ns
        except BudgetError:
            return max(1, floor_bytes(problem) - (self._budgets.device_bytes or 0)), 0
        return self._unplanned_excess_bytes(visits), plan_ns

    def _unplanned_excess_bytes(self, visits: Sequence[Visit]) -> int:
        """Return by how much runs go over the budget before they have a plan, as they do in their first step."""
        limit, host_bytes = self._budgets.device_bytes, self._budgets.host_bytes
        if limit is None or self._budgets.disk_bytes:
            return 0
        if sum(visit.region.swapped_bytes for visit in visits if not visit.backward) <= host_bytes // 2:
            return 0  # buffers are never twice as large as storages
        return max(0, unplanned_peak_bytes(visits, host_bytes) - limit)

    def _model(self, place: tuple[int, int], names: frozenset[str]) -> SwapRegion:
        own = self._own[place]
        if (id(own), names) not in self._models:
            self._models[id(own), names] = _model(own, names)
        return self._models[id(own), names]


def recomputed_to_fit(captured: Problem) -> frozenset[str]:
    """Return what a region is to recompute as long as nothing is known of the others: nothing, if it fits like that.

    Else as little as makes it fit with all else away that can be; if nothing does, what takes it closest. Where neither
    host memory nor disk has room for that, the device needs room for it, and for what is away already and to come.
    """
    limit, budgets = captured.budgets.device_bytes, captured.budgets
    if limit is None:
        return frozenset()

    def needed_bytes(problem: Problem) -> int:
        transfers = frugal_transfers(problem)
        peak_bytes = int(live_bytes(problem, transfers).max(initial=0))
        away_bytes = total_bytes(pool_classes(transfers, Tier.HOST))
        if away_bytes <= budgets.host_bytes + budgets.disk_bytes:
            return peak_bytes
        return peak_bytes + CALLS_TO_COME * (budgets.host_taken_bytes + away_bytes)

    return frozenset(recomputed_for(captured, limit, needed_bytes))


def least_peak_bytes(region: SwapRegion, *, backward: bool) -> int:
    """Return the most that one of its graphs needs with all away that can be, and all recomputed that may be."""
    everything = _model(region, frozenset(recipe.name for recipe in region.original.recipes))
    return min(region.peak_bytes(backward=backward), everything.peak_bytes(backward=backward))


def recomputed_peak_bytes(region: SwapRegion) -> int:
    """Return the most that its graphs need with all away that can be, if all is recomputed that may be."""
    everything = _model(region, frozenset(recipe.name for recipe in region.original.recipes))
    return max(everything.peak_bytes(backward=backward) for backward in (False, True))


def unforeseen_bytes(visits: Sequence[Visit], choice: Choice, index: int, compiled: SwapRegion, limit: int) -> int:
    """Return how much more than their model the runs of a region hold that do not fit, as it was `compiled`.

    0 or less if they fit, if the model of the choice did not fit either, or if none of the runs has its sizes.
    """
    models: dict[tuple[int, frozenset[str]], SwapRegion] = {}
    modelled: dict[tuple[int, int], SwapRegion] = {}
    known: dict[tuple[int, int], SwapRegion] = {}
    for visit in visits:
        place, names, own = (visit.index, visit.call), choice[visit.index].names_of(visit), visit.region
        if (id(own), names) not in models:
            models[id(own), names] = _model(own, names)
        known[place] = modelled[place] = models[id(own), names]
        if visit.index == index and (names, own.nbytes) == (compiled.recomputed, compiled.nbytes):
            known[place] = compiled
    runs = zip(with_regions(visits, known), with_regions(visits, modelled), strict=True)
    over = [(run, model) for run, model in runs if run.region is compiled and run.peak_bytes > limit]
    return max((run.peak_bytes - model.peak_bytes for run, model in over), default=0)


def _price_list(regions: Mapping[int, SwapRegion]) -> list[tuple[int, str]]:
    """Return region and name of every storage that can be recomputed, by time per byte, cheapest first."""
    priced = []
    for index, region in regions.items():
        problem = region.original
        nbytes = {storage.name: storage.nbytes for storage in problem.storages}
        for place, recipe in enumerate(RecomputeSearch.order(problem)):
            cost_ns = sum(problem.ops[step].duration_ns for step in recipe.steps)
            priced.append((cost_ns / max(1, nbytes[recipe.name]), place, index, recipe.name))
    return [(index, name) for _, _, index, name in sorted(priced)]


def _model(region: SwapRegion, names: frozenset[str]) -> SwapRegion:
    """Return the region as it would be if these storages were recomputed."""
    if names == region.recomputed:
        return region
    problem = recompute(region.original, names)
    return replace(region, problem=problem, transfers=frugal_transfers(problem), recomputed=names)
