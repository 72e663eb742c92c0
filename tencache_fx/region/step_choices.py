"""What the calls of regions recompute in their steps, as it was decided for the device's programs one after another.

A choice is made from models. Torch may save other values than the model took it to, and may place what runs again
elsewhere: so each region is looked at once it is compiled for its choice. If it does not fit, what the model of it
lacked is taken off the budget of the next search, as it is where a region is planned by itself.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tencache_fx.planning.problem import Budgets, Links
from tencache_fx.planning.step import Visit
from tencache_fx.planning.step_recompute import Recomputed, unforeseen_bytes
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.planning.tuning import SPLITS
from tencache_fx.region.kept_plans import kept_step_choice

log = logging.getLogger("tencache_fx")


@dataclass(slots=True, eq=False)
class _Search:
    """The last search: what it was given, what had been decided `before`, and how often it was made.

    Its `budgets` have less of the device each time; `limit` is what there is.
    """

    visits: Sequence[Visit]
    links: Links
    budgets: Budgets
    shared: Collection[tuple[int, str]]
    before: Mapping[int, Recomputed]
    limit: int | None
    times: int = 0


_GROWTH = 3, 2  # activations that are larger by this ratio: of longer texts others are worth recomputing


class StepChoices:
    """The choices of one device: `decided` has what the calls of each region are to recompute, by region."""

    def __init__(self) -> None:
        self.decided: dict[int, Recomputed] = {}
        self._chosen_bytes: dict[int, int] = {}  # the activations of each region's largest call when that was decided
        self._search: _Search | None = None

    def choose(
        self, visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]]
    ) -> None:
        """Choose what the regions of these runs recompute, if one is not decided, or has grown by half since it was.

        The others recompute no less than they did: other programs count on it.
        """
        nbytes: dict[int, int] = {}
        for visit in visits:
            nbytes[visit.index] = max(nbytes.get(visit.index, 0), visit.region.activation_bytes)
        if not any(self._is_open(index, each) for index, each in nbytes.items()):
            return
        self._chosen_bytes |= {index: max(each, self._chosen_bytes.get(index, 0)) for index, each in nbytes.items()}
        self._search = _Search(visits, links, budgets, shared, dict(self.decided), budgets.device_bytes)
        self._decide()

    def choose_again(
        self, visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]]
    ) -> bool:
        """Choose anew for runs that have no plan within lower budgets; return whether they recompute more then."""
        before = dict(self.decided)
        self._search = _Search(visits, links, budgets, shared, before, budgets.device_bytes)
        self._decide()
        return self.decided != before

    def reopen(self, index: int, region: SwapRegion) -> bool:
        """Have it chosen again behind this step if a call is larger than what was chosen for; return whether it is."""
        if index not in self.decided or region.activation_bytes <= self._chosen_bytes[index]:
            return False
        if {recipe.name for recipe in region.original.recipes} <= {*self.decided[index].always}:
            return False  # there is nothing left
        self._chosen_bytes[index] = 0
        return True

    def check(self, index: int, compiled: SwapRegion) -> None:
        """Choose again if a region that was compiled for its choice needs more than there is room for.

        In the end all regions do as they did when their runs were measured.
        """
        search = self._search
        if search is None or search.limit is None or search.budgets.device_bytes is None:
            return
        more_bytes = unforeseen_bytes(search.visits, self.decided, index, compiled, search.limit)
        if more_bytes <= 0:
            return
        log.info("region %d does not fit: it takes %d bytes more to recompute what its steps do", index, more_bytes)
        least_bytes = min(search.budgets.device_bytes, search.limit - more_bytes)
        search.budgets = replace(search.budgets, device_bytes=least_bytes)
        self._decide()

    def forget(self, regions: Collection[int]) -> None:
        """Forget these regions."""
        for index in regions:
            self.decided.pop(index, None)
            self._chosen_bytes.pop(index, None)
        if self._search is not None and any(visit.index in regions for visit in self._search.visits):
            self._search = None

    def _is_open(self, index: int, nbytes: int) -> bool:
        """Return whether it is to be chosen what a region recomputes whose largest call has so large activations."""
        most, least = _GROWTH
        return index not in self.decided or nbytes * least >= max(1, self._chosen_bytes[index]) * most

    def _decide(self) -> None:
        search = self._search
        assert search is not None
        search.times += 1
        choice = None
        if search.times <= SPLITS:
            choice = kept_step_choice(search.visits, search.links, search.budgets, search.shared)
        ran: dict[int, frozenset[str]] = {}
        for visit in search.visits:
            ran[visit.index] = ran.get(visit.index, frozenset()) | visit.region.recomputed
        for index, names in ran.items():
            before = search.before.get(index)
            if choice is None:
                self.decided[index] = before or Recomputed(always=tuple(sorted(names)))
            else:
                self.decided[index] = choice[index] if before is None else _no_less(choice[index], before)


def _no_less(choice: Recomputed, before: Recomputed) -> Recomputed:
    """Return the larger of two choices, with what it lacks of the other: other sizes may have other ones cheapest."""
    less, more = sorted((choice, before), key=lambda each: each.extent)
    always, first_calls, rest = {*more.always, *less.always}, more.first_calls, {*less.first} - {*more.always}
    if rest <= {*more.first}:
        first_calls = max(first_calls, less.first_calls if rest else 0)
    else:
        always |= rest
    return replace(more, always=tuple(sorted(always)), first_calls=first_calls)
