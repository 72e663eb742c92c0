"""The level of the search that chooses what to recompute instead of saving, so that the rest is swapped for free.

Recomputing and copying compete for the same bytes. A copy that hides behind compute is free, but the links carry only
so much; what they cannot carry is cheaper to compute again while that takes less time per byte than the link would.
So the saved values form a price list, by what their recipe costs per byte, and the question becomes how far down that
list to go. A second question is what to save all the same, so that recomputing stays local: the list is also gone down
without the values between segments, for segments of several sizes (`segments.py`; a convolutional net at less than half
its memory has no other way). Each answer is planned by `teraio` and replayed by the simulator, which sees what no
formula does (overlap, scheduling barriers, bytes that are in the way while something is made again), the likely best
first; one that cannot beat the best so far by a simple bound is passed over. Where the best takes longer than any plan
has to (`bounds.py`), single decisions are then turned over, which ResNet-50 needs near its floor.

The portfolio of rungs is ShadowSpill's idea (its recomputation selection), the price per byte Capuchin's (ASPLOS '20);
here rungs are single tensors, and transfers are planned anew on each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import least_step_ns
from tencache_fx.planning.problem import Problem, Recipe
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_bound import RecomputeBound
from tencache_fx.planning.segments import kept_between_segments

_PARTS = 8  # of the recipes, from the cheapest: as finely as `recomputed_for` looks


@dataclass(frozen=True, order=True, slots=True)
class Score:
    """How good a choice is, lower is better: first it has to fit."""

    over_bytes: int
    needed_ns: int


class RecomputeSearch:
    """The best choice so far beside all else that `base` decides, and what it may still cost to find a better one."""

    def __init__(self, evaluator: Evaluator, base: Candidate) -> None:
        self.evaluator, self.base = evaluator, base
        self.problem = evaluator.problem_for(base)
        self.limit = self.problem.budgets.device_bytes or 0
        self.line = [recipe.name for recipe in self.order(self.problem)]
        self.quick_bound = RecomputeBound(self.problem)
        tuning = evaluator.tuning
        plans = tuning.steps_planned // max(1, len(self.problem.ops))
        plans = min(tuning.most_plans, max(tuning.least_plans, plans))
        self._end = evaluator.spent_looks + plans * tuning.looks_per_plan
        self.bounds: dict[frozenset[str], Score] = {}
        self._least_ns: dict[frozenset[str], int] = {}
        self.best: frozenset[str] = frozenset()
        self.best_score = Score(int(live_bytes(self.problem).max(initial=0)) - self.limit, 0)

    @property
    def left(self) -> int:
        """The looks that this search may still spend."""
        return self._end - self.evaluator.spent_looks

    def run(self) -> tuple[str, ...]:
        """Return the names of the storages to recompute, sorted; none if the region fits, or nothing saves time."""
        if self.problem.budgets.device_bytes is None or not self.problem.recipes or self.best_score.over_bytes <= 0:
            return ()
        self.climb()
        if self.left > 0 and self.may_gain():
            self.turn_over()
        return tuple(sorted(self.best))

    def bound(self, names: frozenset[str]) -> Score:
        """Return what `names` cannot beat: by how much the floor is over, else a time."""
        if names not in self.bounds:
            candidate = self.base.recomputing(names)
            over_bytes = max(0, self.evaluator.floor_bytes(candidate) - self.limit)
            busy_ns = self.evaluator.limits(candidate).busy_ns
            self.bounds[names] = Score(over_bytes, busy_ns if over_bytes else self.least_ns(names))
        return self.bounds[names]

    def least_ns(self, names: frozenset[str]) -> int:
        """Return a time that `names` cannot beat if they fit."""
        if names not in self._least_ns:
            self._least_ns[names] = least_step_ns(self.evaluator.problem_for(self.base.recomputing(names)))
        return self._least_ns[names]

    def score(self, names: frozenset[str]) -> Score:
        """Return how `names` does, planned and replayed; only its bound, if that is no better than the best."""
        bound = self.bound(names)
        if bound.over_bytes or bound >= self.best_score:
            return bound
        candidate = self.base.recomputing(names)
        if (costs := self.evaluator.evaluate(candidate).costs) is not None:
            return Score(0, costs.step_ns)
        # Host memory or disk is short: more transfers than they hold.
        return Score(self.evaluator.limits(candidate).peak_bytes - self.limit, bound.needed_ns)

    def consider(self, names: frozenset[str]) -> bool:
        """Take `names` if it beats what was best; return whether it did."""
        if names not in self.bounds:  # the quickest first
            if Score(0, self.quick_bound.least_ns(names)) >= self.best_score:
                return False
            if Score(0, self.least_ns(names)) >= self.best_score:
                return False  # whatever its floor is, which takes longer to find
        score = self.score(names)
        better = score < self.best_score
        if better:
            self.best, self.best_score = names, score
        return better

    def climb(self) -> None:
        """Find how far down which list to go: at evenly spaced rungs first, by likely time, then around the best."""
        rungs: dict[frozenset[str], tuple[Sequence[str], int, int]] = {}
        for line, places in self.lines():
            stride = max(1, len(line) // places)
            for rung in sorted({*range(0, len(line), stride), len(line)}):
                rungs.setdefault(frozenset(line[:rung]), (line, rung, stride))
        enough = self.left // 2
        for names in self.spread_out(sorted(rungs, key=self.likely_ns)):
            if self.left <= enough:
                break
            if self.is_worth_a_look(names):
                self.consider(names)
        self.consider(frozenset())  # never slower than `teraio`
        self.close_in(*rungs[self.best], least_left=enough // 2)

    def spread_out(self, choices: Sequence[frozenset[str]]) -> list[frozenset[str]]:
        """Return `choices` in their order, but those that recompute about as much as one before behind all others."""
        apart = len(self.line) // self.evaluator.tuning.rungs
        first: list[frozenset[str]] = []
        for names in choices:
            if all(abs(len(names) - len(other)) >= apart for other in first):
                first.append(names)
        return [*first, *(names for names in choices if names not in first)]

    def close_in(self, line: Sequence[str], best: int, stride: int, least_left: int) -> None:
        """Look at the rungs of `line` around the best one, closer and closer."""
        while stride > 1 and self.left > least_left:
            stride = (stride + 1) // 2
            for rung in (max(0, best - stride), min(len(line), best + stride)):
                names = frozenset(line[:rung])
                if self.is_worth_a_look(names) and self.consider(names):
                    best = rung

    def lines(self) -> Iterator[tuple[Sequence[str], int]]:
        """Yield the price list, and what is left of it between segments of several sizes, and the places to look at."""
        tuning = self.evaluator.tuning
        yield self.line, tuning.rungs
        nbytes = {storage.name: storage.nbytes for storage in self.problem.storages}
        all_bytes = sum(nbytes[name] for name in self.line)
        for halving in range(1, tuning.segment_halvings + 1):
            kept = kept_between_segments(self.problem, all_bytes >> halving)
            yield [name for name in self.line if name not in kept], tuning.segment_rungs

    def may_gain(self) -> bool:
        """Whether the best choice does not fit yet, or takes a hundredth longer than any plan has to."""
        if self.best_score.over_bytes > 0:
            return True
        enough_ns = self.best_score.needed_ns * 100 // (100 + self.evaluator.tuning.gap_percent)
        return max(self.quick_bound.least_of_all_ns(), joint_lower_bound_ns(self.problem)) < enough_ns

    def turn_over(self) -> None:
        """Turn over stretches of the list, long ones first, then single decisions, while that makes it faster."""
        width = max(1, len(self.line) // self.evaluator.tuning.first_stretches)
        while width:
            improved = False
            for start in range(0, len(self.line), width):
                if self.left <= 0:
                    return
                names = self.best ^ frozenset(self.line[start : start + width])
                if self.is_worth_a_look(names):
                    self.evaluator.spent_looks += 1
                    if self.best_score.over_bytes > 0 or self.least_ns(names) < self.worth_ns():
                        improved |= self.consider(names)
            if width > 1 or not improved:
                width //= 2

    def likely_ns(self, names: frozenset[str]) -> tuple[int, int]:
        """Return about how long a step takes with `names` recomputed, and a time that it takes in any case."""
        share = self.evaluator.tuning.likely_link_share
        return self.quick_bound.likely_ns(names, share), self.quick_bound.least_ns(names)

    def is_worth_a_look(self, names: frozenset[str]) -> bool:
        """Whether `names` can be enough better than the best, for all that the quick bound tells."""
        return self.best_score.over_bytes > 0 or self.quick_bound.least_ns(names) < self.worth_ns()

    def worth_ns(self) -> int:
        """Return the time that is enough better than the best for another choice to be looked at."""
        return self.best_score.needed_ns * (1000 - self.evaluator.tuning.gain_per_mille) // 1000

    @staticmethod
    def order(problem: Problem) -> Sequence[Recipe]:
        """Return the recipes by time per byte, cheapest first; of equals first the one made last: it can hide least."""
        storages = {storage.name: storage for storage in problem.storages}

        def price(recipe: Recipe) -> tuple[int, int, str]:
            cost_ns = sum(problem.ops[step].duration_ns for step in recipe.steps)
            storage = storages[recipe.name]
            return cost_ns * 10_000 // max(1, storage.nbytes), -storage.birth, recipe.name

        return sorted((r for r in problem.recipes if storages[r.name].nbytes >= problem.min_spill_bytes), key=price)


def recomputed_for(captured: Problem, limit_bytes: int, needed_bytes: Callable[[Problem], int]) -> tuple[str, ...]:
    """Return as few eighths of the recipes, from the cheapest, as need no more than `limit_bytes`; none if that does.

    `needed_bytes` says how much a problem needs that recomputes them. If all need more, those that need the least.
    """
    names = tuple(recipe.name for recipe in RecomputeSearch.order(captured))

    def over_bytes(count: int) -> int:
        return max(0, needed_bytes(recompute(captured, names[:count])) - limit_bytes)

    if not names or not over_bytes(0):
        return ()
    counts = sorted({len(names) * part // _PARTS for part in range(_PARTS + 1)})
    return names[: min(counts, key=lambda count: (over_bytes(count), count))]
