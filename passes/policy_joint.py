"""The first half of the `joint` policy: what to recompute instead of saving, so that the rest travels for free.

Recomputing and copying compete for the same bytes. A copy that hides behind compute is free, but the links carry only
so much; what they cannot carry is cheaper to compute again while that takes less time per byte than the link would.
So the saved values are lined up by what their recipe costs per byte, and the question becomes how far down that line to
go: each answer is planned by `teraio` and replayed by the simulator, which sees what no formula does (overlap, fences,
bytes that are in the way while something is made again). Where that takes longer than a device without limits, single
decisions are then turned over, or one exchanged for another: a layered model of 8 layers gained 0.02 of its ideal time
by it, near the floor 0.14.

The portfolio of rungs is ShadowSpill's idea (its recomputation selection), the price per byte Capuchin's (ASPLOS '20);
here rungs are single tensors, and offload is planned anew on each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tencache_fx.errors import BudgetError
from tencache_fx.passes.planner import floor_bytes, make_plan
from tencache_fx.plan import Problem, Recipe, live_bytes
from tencache_fx.recompute import recompute

_STEPS_REPLAYED = 25_000  # what a search may cost: about 5 s on one core
_LEAST_PLANS = 16  # though a plan for 10 000 steps takes a second or two
_RUNGS = 10  # first look at this many places along the line


def choose_recomputed(problem: Problem) -> tuple[str, ...]:
    """Return the names of the storages to recompute; none if the region fits, or nothing saves time.

    A bounded number of plans: 25 000 steps in all, but at least 16 plans.
    """
    limit = problem.budgets.device_bytes
    if limit is None or not problem.recipes or live_bytes(problem).max(initial=0) <= limit:
        return ()
    search = _Search(problem, limit)
    search.climb()
    if search.may_gain():
        search.turn_over()
    return tuple(sorted(search.best))


@dataclass(frozen=True, order=True, slots=True)
class _Score:
    """How good a choice is, lower is better: first it has to fit."""

    over_bytes: int
    makespan_ns: int


class _Search:
    """The best choice so far, and what it has cost to find it."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit = problem, limit
        self.line = [recipe.name for recipe in _by_price(problem)]
        self.left = max(_LEAST_PLANS, _STEPS_REPLAYED // len(problem.ops))
        self.seen: dict[frozenset[str], _Score] = {}
        self.best: frozenset[str] = frozenset()
        self.best_score = self.score(self.best)

    def score(self, names: frozenset[str]) -> _Score:
        """Return how `names` does, planned and replayed."""
        if names not in self.seen:
            self.left -= 1
            problem = recompute(self.problem, names)
            over_bytes = max(0, floor_bytes(problem) - self.limit)
            if over_bytes == 0:
                try:
                    self.seen[names] = _Score(0, make_plan(problem, "teraio").forecast.makespan_ns)
                except BudgetError:  # host memory or disk is short: more trips than they hold
                    over_bytes = int(live_bytes(problem).max()) - self.limit
            if over_bytes:
                self.seen[names] = _Score(over_bytes, sum(op.duration_ns for op in problem.ops))
        return self.seen[names]

    def consider(self, names: frozenset[str]) -> bool:
        """Take `names` if it beats what was best; return whether it did."""
        score = self.score(names)
        better = score < self.best_score
        if better:
            self.best, self.best_score = names, score
        return better

    def climb(self) -> None:
        """Find how far down the line to go: at evenly spaced rungs first, then closer and closer around the best."""
        most = len(self.line)
        stride = max(1, most // min(_RUNGS, self.left // 2))
        rungs = sorted({*range(0, most, stride), most})
        best = min(rungs, key=lambda rung: self.score(frozenset(self.line[:rung])))
        while stride > 1 and self.left > 0:
            stride = (stride + 1) // 2
            near = (max(0, best - stride), best, min(most, best + stride))
            best = min(near, key=lambda rung: self.score(frozenset(self.line[:rung])))
        self.consider(frozenset(self.line[:best]))

    def may_gain(self) -> bool:
        """Say whether the best choice does not fit yet, or takes a hundredth longer than on a device without limits."""
        ideal_ns = sum(op.duration_ns for op in self.problem.ops)
        return self.best_score > _Score(0, ideal_ns + ideal_ns // 100)

    def turn_over(self) -> None:
        """Turn over stretches of the line, long ones first, single decisions, and pairs, while that makes it faster."""
        width = max(1, len(self.line) // 4)
        while self.left > 0:
            improved = False
            for turned in self._stretches(width) if width else self._exchanges():
                if self.left <= 0:
                    return
                improved |= self.consider(self.best ^ turned)
            if width > 1 or (width == 1 and not improved):
                width //= 2
            elif improved:
                width = 1
            else:
                return

    def _stretches(self, width: int) -> Iterator[frozenset[str]]:
        """Yield the line in pieces of `width`."""
        for start in range(0, len(self.line), width):
            yield frozenset(self.line[start : start + width])

    def _exchanges(self) -> Iterator[frozenset[str]]:
        """Yield one that is recomputed with one that is not, those of nearly the same price first."""
        for apart in range(1, len(self.line)):
            for one, other in zip(self.line, self.line[apart:], strict=False):
                if (one in self.best) != (other in self.best):
                    yield frozenset((one, other))


def _by_price(problem: Problem) -> Sequence[Recipe]:
    """Return the recipes by time per byte, cheapest first; of equals the one made last, with least time to leave."""
    storages = {storage.name: storage for storage in problem.storages}

    def price(recipe: Recipe) -> tuple[int, int, str]:
        cost_ns = sum(problem.ops[step].duration_ns for step in recipe.steps)
        storage = storages[recipe.name]
        return cost_ns * 10_000 // max(1, storage.nbytes), -storage.birth, recipe.name

    return sorted((r for r in problem.recipes if storages[r.name].nbytes >= problem.min_spill_bytes), key=price)
