"""The first half of the `joint` policy: what to recompute instead of saving, so that the rest travels for free.

Recomputing and copying compete for the same bytes. A copy that hides behind compute is free, but the links carry only
so much; what they cannot carry is cheaper to compute again while that takes less time per byte than the link would.
So the saved values are lined up by what their recipe costs per byte, and the question becomes how far down that line to
go. A second question is what to keep all the same, so that recomputing stays local: the same line is also gone down
without the values between segments, for segments of several sizes (`segments.py`; a convolutional net at less than half
its memory has no other way). Each answer is planned by `teraio` and replayed by the simulator, which sees what no
formula does (overlap, fences, bytes that are in the way while something is made again), the most promising first; one
that cannot beat the best so far by a simple bound is passed over. Where the best takes longer than any plan has to
(`bounds.py`), single decisions are then turned over, which ResNet-50 needs near its floor. `examples/bench/ablate.py`
takes away one part of this at a time.

The portfolio of rungs is ShadowSpill's idea (its recomputation selection), the price per byte Capuchin's (ASPLOS '20);
here rungs are single tensors, and offload is planned anew on each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tencache_fx.errors import BudgetError
from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import first_homes, has_moves, keep_resident, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes, make_plan
from tencache_fx.planning.problem import Problem, Recipe
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.segments import kept_between_segments

_STEPS_REPLAYED = 100_000  # what a search may cost: 5 to 10 s on one core

_LEAST_PLANS, _MOST_PLANS = 12, 36

_LOOKS = 4  # a plan costs about as much as so many looks at what recomputing makes of a problem

_RUNGS = 10  # first look at this many places along the line,

_SEGMENT_RUNGS = 5  # and at this many for each size of segments,

_HALVINGS = 6  # from half of all that is saved to a 64th


def choose_recomputed(problem: Problem) -> tuple[str, ...]:
    """Return the names of the storages to recompute; none if the region fits, or nothing saves time.

    A bounded number of plans: 100 000 steps in all, but at least 12 plans and at most 36.
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
    needed_ns: int


class _Search:
    """The best choice so far, and what it may still cost to find a better one."""

    def __init__(self, problem: Problem, limit: int) -> None:
        self.problem, self.limit = problem, limit
        self.line = [recipe.name for recipe in _by_price(problem)]
        plans = min(_MOST_PLANS, max(_LEAST_PLANS, _STEPS_REPLAYED // len(problem.ops)))
        self.left = plans * _LOOKS
        self.bounds: dict[frozenset[str], _Score] = {}
        self.seen: dict[frozenset[str], _Score] = {}
        self.best: frozenset[str] = frozenset()
        self.best_score = _Score(int(live_bytes(problem).max()) - limit, 0)

    def bound(self, names: frozenset[str]) -> _Score:
        """Return what `names` cannot beat: by how much the floor is over, else a time.

        What is over the budget at the peak goes out before it and comes back after it.
        """
        if names not in self.bounds:
            problem = recompute(self.problem, names)
            least_ns = sum(op.duration_ns for op in problem.ops)
            over_bytes = max(0, floor_bytes(problem) - self.limit)
            if over_bytes == 0:
                away_bytes = max(0, int(live_bytes(problem).max()) - self.limit)
                rates = problem.links.d2h_bytes_per_s, problem.links.h2d_bytes_per_s
                least_ns = max(least_ns, sum(away_bytes * 1_000_000_000 // max(1, rate) for rate in rates))
            self.bounds[names] = _Score(over_bytes, least_ns)
        return self.bounds[names]

    def score(self, names: frozenset[str]) -> _Score:
        """Return how `names` does, planned and replayed; only its bound, if that is no better than the best."""
        bound = self.bound(names)
        if bound.over_bytes or bound >= self.best_score:
            return bound
        if names not in self.seen:
            self.left -= _LOOKS
            problem = recompute(self.problem, names)
            try:
                self.seen[names] = _Score(0, step_ns(problem, _plan(problem).forecast))
            except BudgetError:  # host memory or disk is short: more trips than they hold
                over_bytes = int(live_bytes(problem).max()) - self.limit
                self.seen[names] = _Score(over_bytes, bound.needed_ns)
        return self.seen[names]

    def consider(self, names: frozenset[str]) -> bool:
        """Take `names` if it beats what was best; return whether it did."""
        score = self.score(names)
        better = score < self.best_score
        if better:
            self.best, self.best_score = names, score
        return better

    def climb(self) -> None:
        """Find how far down which line to go: at evenly spaced rungs first, then around the best."""
        rungs: dict[frozenset[str], tuple[Sequence[str], int, int]] = {}
        for line, places in self._lines():
            stride = max(1, len(line) // places)
            for rung in sorted({*range(0, len(line), stride), len(line)}):
                rungs.setdefault(frozenset(line[:rung]), (line, rung, stride))
        enough = self.left // 2
        for names in sorted(rungs, key=self.bound):
            if self.left <= enough:
                break
            self.consider(names)
        self.consider(frozenset())  # never slower than `teraio`
        self.close_in(*rungs[self.best], least_left=enough // 2)

    def close_in(self, line: Sequence[str], best: int, stride: int, least_left: int) -> None:
        """Look at the rungs of `line` around the best one, closer and closer."""
        while stride > 1 and self.left > least_left:
            stride = (stride + 1) // 2
            for rung in (max(0, best - stride), min(len(line), best + stride)):
                if self.consider(frozenset(line[:rung])):
                    best = rung

    def _lines(self) -> Iterator[tuple[Sequence[str], int]]:
        """Yield the line, and what is left of it between segments of several sizes; with each the places to look at."""
        yield self.line, _RUNGS
        nbytes = {storage.name: storage.nbytes for storage in self.problem.storages}
        all_bytes = sum(nbytes[name] for name in self.line)
        for halving in range(1, _HALVINGS + 1):
            kept = kept_between_segments(self.problem, all_bytes >> halving)
            yield [name for name in self.line if name not in kept], _SEGMENT_RUNGS

    def may_gain(self) -> bool:
        """Say whether the best choice does not fit yet, or takes a hundredth longer than any plan has to."""
        least_ns = joint_lower_bound_ns(self.problem)
        return self.best_score > _Score(0, least_ns + least_ns // 100)

    def turn_over(self) -> None:
        """Turn over stretches of the line, long ones first, then single decisions, while that makes it faster."""
        width = max(1, len(self.line) // 4)
        while width:
            improved = False
            for turned in self._stretches(width):
                if self.left <= 0:
                    return
                self.left -= 1
                improved |= self.consider(self.best ^ turned)
            if width > 1 or not improved:
                width //= 2

    def _stretches(self, width: int) -> Iterator[frozenset[str]]:
        """Yield the line in pieces of `width`."""
        for start in range(0, len(self.line), width):
            yield frozenset(self.line[start : start + width])


def _plan(problem: Problem) -> Plan:
    """Return a plan to compare choices by: parameters travel, where they can, one copy time ahead."""
    return make_plan(problem, "teraio", leads=(1.0,), resident_shares=(0.0,), state_shares=())


def _by_price(problem: Problem) -> Sequence[Recipe]:
    """Return the recipes by time per byte, cheapest first; of equals the one made last, with least time to leave."""
    storages = {storage.name: storage for storage in problem.storages}

    def price(recipe: Recipe) -> tuple[int, int, str]:
        cost_ns = sum(problem.ops[step].duration_ns for step in recipe.steps)
        storage = storages[recipe.name]
        return cost_ns * 10_000 // max(1, storage.nbytes), -storage.birth, recipe.name

    return sorted((r for r in problem.recipes if storages[r.name].nbytes >= problem.min_spill_bytes), key=price)


# Of the room above the floor, what the state of some parameters may take; recomputing leaves it that.
_STATE_ROOMS = (0.4, 0.85)

_TURNS = 3  # searches beside the parameters that stay in the fastest plan so far


def choose_for_region(captured: Problem) -> tuple[str, ...]:
    """Return what to recompute: what `choose_recomputed` finds, for as much room as is best left to other things.

    With parameters whose home is elsewhere, the device's memory is for activations, for weights, or for what updates
    need: room for these can be worth more recomputing. Searches beside weights that all travel, beside several rooms
    for state, and beside weights that all stay. What best stays depends on what is recomputed, and the other way round,
    so from there on they are chosen in turns: beside those that stay in the fastest plan it is searched again, a few
    times at most, until nothing new stays or comes of it.
    """
    limit = captured.budgets.device_bytes
    if limit is None or not captured.recipes or not has_moves(captured):
        return choose_recomputed(captured)
    starts = [captured]
    room_bytes = limit - floor_bytes(captured)
    if room_bytes > 0 and any(storage.state_bytes for storage in captured.storages):
        starts += [captured.with_less(int(room_bytes * share)) for share in _STATE_ROOMS]
    if every := first_homes(captured, 1.0):
        starts.append(keep_resident(captured, every))
    searched = {(frozenset[str](), frozenset[str]()), (frozenset(every), frozenset[str]())}
    tried = {names: _trial(captured, names) for names in dict.fromkeys(map(choose_recomputed, starts))}
    for _ in range(_TURNS):
        best = tried[_fastest(tried)]
        staying = frozenset(best.resident), frozenset(best.updated_here)
        if staying in searched:
            break
        searched.add(staying)
        names = choose_recomputed(keep_resident(captured, *staying))
        if names in tried:
            break
        tried[names] = _trial(captured, names)
    return _fastest(tried)


class _Trial(NamedTuple):
    """How long a step takes in a plan, and the parameters that stay on the device in it."""

    needed_ns: float
    resident: tuple[str, ...]
    updated_here: tuple[str, ...]


def _fastest(tried: Mapping[tuple[str, ...], _Trial]) -> tuple[str, ...]:
    return min(tried, key=lambda names: tried[names].needed_ns)


def _trial(captured: Problem, names: tuple[str, ...]) -> _Trial:
    """Plan `captured` with `names` recomputed; without a plan it takes for ever."""
    problem = recompute(captured, names) if names else captured
    try:
        plan = make_plan(problem, "joint")
    except BudgetError:
        return _Trial(float("inf"), (), ())
    needed_ns = step_ns(keep_resident(problem, plan.resident, plan.updated_here), plan.forecast)
    return _Trial(needed_ns, plan.resident, plan.updated_here)


def plan_region(captured: Problem, policy: str) -> tuple[Problem, Plan]:
    """Return the faster of two: `policy`'s plan for `captured`, and, under `joint`, for it with more recomputed.

    The problem returned is the one the plan is for. Recomputing is modelled by `recompute`; the backend splits the
    graph anew, and what torch makes of that may differ by some operations. Raises `OptionError` for an unknown policy,
    and `BudgetError` if neither fits.
    """
    names = choose_for_region(captured) if policy == "joint" else ()
    drafts = [(captured, ()), (recompute(captured, names), names)] if names else [(captured, ())]
    planned: list[tuple[Problem, Plan]] = []
    refusals: list[tuple[int, BudgetError]] = []
    for problem, again in drafts:
        try:
            plan = replace(make_plan(problem, policy), recomputed=again)
            planned.append((keep_resident(problem, plan.resident, plan.updated_here), plan))
        except BudgetError as refusal:
            refusals.append((floor_bytes(problem), refusal))
    if not planned:
        raise min(refusals, key=lambda pair: pair[0])[1]
    return min(planned, key=lambda pair: step_ns(pair[0], pair[1].forecast))


def policy_floor_bytes(captured: Problem, policy: str) -> int:
    """Return a device budget that `policy` can plan `captured` in, host memory and disk aside.

    The least there is for policies that do not recompute. For `joint` the lower of two: with nothing and with
    everything recomputed that may be; in between there may be less.
    """
    if policy == "none":
        return int(live_bytes(captured).max(initial=captured.outside_bytes))
    floor = floor_bytes(captured)
    if policy != "joint":
        return floor
    large = {storage.name for storage in captured.storages if storage.nbytes >= captured.min_spill_bytes}
    everything = [recipe.name for recipe in captured.recipes if recipe.name in large]
    return min(floor, floor_bytes(recompute(captured, everything)))
