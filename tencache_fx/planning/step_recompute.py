"""Chooses what the regions of a step recompute instead of saving: the same storages in all calls of a region.

The saved values of all regions make one list, by what their recipe costs per byte. The search goes down that list,
first in even strides, then closer around the best: each choice is modelled (`recompute.py`), joined to the problem of
the whole step, planned by `teraio` and replayed by the simulator. About 20 choices, and fewer plans: what cannot beat
the best so far is not planned.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes, lower_bound_ns
from tencache_fx.planning.problem import Budgets, Links, Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_search import RecomputeSearch
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.step import Visit, join, with_regions
from tencache_fx.planning.swap_region import SwapRegion, frugal_transfers
from tencache_fx.planning.tuning import TUNING

Choice = Mapping[int, frozenset[str]]
"""The storages to recompute, by region."""

_TUNING = replace(TUNING, leads=(TUNING.compared_lead,), resident_shares=(0.0,), state_shares=())
_STRIDES = 8
_GAIN_PERCENT = 1  # as much faster another choice has to be, for the regions to be compiled again


def choose_for_step(
    visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]] = ()
) -> Choice | None:
    """Return what each region is best to recompute; None if the choice that the visits ran with is as good."""
    regions = {visit.index: visit.region for visit in visits}
    calls = {(visit.index, visit.call) for visit in visits if visit.backward}
    if not any(region.original.recipes for region in regions.values()):
        return None
    line = _price_list({index: region for index, region in regions.items() if any(i == index for i, _ in calls)})
    now = {index: region.recomputed for index, region in regions.items()}
    scores: dict[int, tuple[int, int]] = {}

    def score(choice: Choice, least: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return by how many bytes the floor is over the budget, and how long the step takes.

        Where no plan beats the `least` score so far, a bound stands for the time.
        """
        models = {index: _model(region, choice[index]) for index, region in regions.items()}
        problem = join(with_regions(visits, models), links, budgets, shared).problem
        if least is not None and (bound := (0, lower_bound_ns(problem))) > least:
            return bound
        try:
            return 0, make_plan(problem, "teraio", tuning=_TUNING).forecast.makespan_ns
        except BudgetError:
            return max(1, floor_bytes(problem) - (budgets.device_bytes or 0)), 0

    def rung(count: int) -> tuple[int, int]:
        if count not in scores:
            scores[count] = score(_first(line, count, regions), min(scores.values(), default=None))
        return scores[count]

    stride = max(1, len(line) // _STRIDES)
    best = min({*range(0, len(line), stride), len(line)}, key=lambda count: (rung(count), count))
    while stride > 1:
        stride = (stride + 1) // 2
        nearby = {max(0, best - stride), best, min(len(line), best + stride)}
        best = min(nearby, key=lambda count: (rung(count), count))
    choice, over = _first(line, best, regions), rung(best)
    if choice == now:
        return None
    present = score(now)
    if over[0] > present[0]:
        return None
    if over[0] == present[0] and over[1] * 100 > present[1] * (100 - _GAIN_PERCENT):
        return None
    return choice


def recomputed_to_fit(captured: Problem) -> frozenset[str]:
    """Return what a region is to recompute as long as nothing is known of the others: nothing, if it fits like that.

    Else as many eighths of its recipes, from the cheapest, as make it fit with all else away that can be; if none do,
    those that take it closest.
    """
    limit = captured.budgets.device_bytes
    names = [recipe.name for recipe in RecomputeSearch.order(captured)]

    def over_bytes(count: int) -> int:
        problem = recompute(captured, names[:count])
        return max(0, int(live_bytes(problem, frugal_transfers(problem)).max(initial=0)) - (limit or 0))

    if limit is None or not names or not over_bytes(0):
        return frozenset()
    counts = sorted({0, *(len(names) * part // _STRIDES for part in range(1, _STRIDES + 1))})
    return frozenset(names[: min(counts, key=lambda count: (over_bytes(count), count))])


def least_peak_bytes(region: SwapRegion, *, backward: bool) -> int:
    """Return the most that one of its graphs needs with all away that can be, and all recomputed that may be."""
    everything = _model(region, frozenset(recipe.name for recipe in region.original.recipes))
    return min(region.peak_bytes(backward=backward), everything.peak_bytes(backward=backward))


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


def _first(line: Sequence[tuple[int, str]], count: int, regions: Collection[int]) -> Choice:
    chosen = line[:count]
    return {index: frozenset(name for region, name in chosen if region == index) for index in regions}


def _model(region: SwapRegion, names: frozenset[str]) -> SwapRegion:
    """Return the region as it would be if these storages were recomputed."""
    if names == region.recomputed:
        return region
    problem = recompute(region.original, names)
    return replace(region, problem=problem, transfers=frugal_transfers(problem), recomputed=names)
