"""The search for a plan: what to recompute, which parameters to pin on the device, when the others are copied.

A `Candidate` (`evaluation.py`) answers these questions; an `Evaluator` plans and simulates it, once. The search is five
nested levels, listed from the outermost. Each changes some fields of the candidate, and leaves the others as the level
around it has set them:

    level, where it is                     what it changes            when it stops
    splits, `region/candidate.py`:         `reserved_bytes`, by what  when the plan for the graphs that torch's
      `RegionPlanner.recompute_more`       does not fit               partitioner makes fits, after `SPLITS`
    turns, `choose_for_region` below       beside which parameters,   when nothing new is pinned, or nothing new is
                                           and beside which           recomputed beside it, after `Tuning.turns`
                                           `reserved_bytes`, the
                                           next level searches
    recomputation, `recompute_search.py`   `recomputed`               when its looks are spent, or its best plan is
                                                                      within a hundredth of the lower bound
    parameters, `parameter_search.py`      `lead`, `resident`,        when each of a few leads and shares was tried
                                           `updated_here`,
                                           `summed_here`
    transfers, `planner.py`:               variants of the policy,    when the plan fits with buffers and scheduling
      `plan_transfers`                     what they may use          barriers counted, after `Tuning.repairs`

All constants are in `tuning.py`. There is one clock, `Evaluator.spent_looks`, which counts work and no seconds: equal
problems have equal plans. A search of the level "recomputation" may spend 5 to 36 plans, and there are at most seven
of them (four starts, three turns); the level "parameters" is asked once for what each of them has found, and tries
about 25 plans. What a search has planned, the others know.

The level "turns" and those below it search a problem of many steps as a smaller one (`coarsening.py`).

Around all that a region is planned again when its generated code holds more than its graphs show (also at most `SPLITS`
times, `region/compilation.py`), and when it is measured to be slower than forecast (`recalibration.py`).
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.bounds import moves_too_much
from tencache_fx.planning.coarsening import coarsen_within
from tencache_fx.planning.evaluation import Candidate, Evaluator, Names
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import first_parameters, has_offloaded, keep_resident
from tencache_fx.planning.parameter_search import choose_parameters, costs_of
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import POLICIES, floor_bytes, least_step_ns
from tencache_fx.planning.problem import Kind, Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_bound import least_floor_bytes
from tencache_fx.planning.recompute_search import RecomputeSearch
from tencache_fx.planning.tuning import SPLITS, TUNING, Tuning


def make_plan(problem: Problem, policy: str, *, tuning: Tuning = TUNING) -> Plan:
    """Return `policy`'s plan for `problem` with nothing recomputed; without transfers if the region fits as it is.

    Where parameters are offloaded, it is the plan of `choose_parameters`, for
    `keep_resident(problem, **plan.pinned)`.

    Raises `OptionError` for an unknown policy, and `BudgetError`, before anything has run, when the region's floor is
    over the device budget, or the transfers need more host memory or disk than there is.
    """
    evaluator = Evaluator(problem, tuning)
    return evaluator.stated(_settle(evaluator, Candidate(policy=policy)))[1]


def plan_region(captured: Problem, policy: str) -> tuple[Problem, Plan]:
    """Return the faster of two: `policy`'s plan for `captured`, and, under `joint`, for it with more recomputed.

    The problem returned is the one the plan is for. What the backend's split makes of recomputing may differ by some
    operations. Raises `OptionError` for an unknown policy, and `BudgetError` if neither fits.
    """
    evaluator = Evaluator(captured)
    names = _choose_recomputed(evaluator) if policy == "joint" else ()
    planned: list[tuple[int, bool, Problem, Plan]] = []
    refusals: list[tuple[int, bool, BudgetError]] = []
    for recomputed in dict.fromkeys((names, ())):
        if planned and _cannot_gain(captured, planned[0][0]):
            break
        base = Candidate(policy=policy, recomputed=recomputed)
        try:
            chosen = _settle(evaluator, base)
        except BudgetError as refusal:
            refusals.append((floor_bytes(evaluator.problem_for(base)), bool(recomputed), refusal))
        else:
            planned.append((costs_of(evaluator, chosen).step_ns, bool(recomputed), *evaluator.stated(chosen)))
    if not planned:
        raise min(refusals, key=lambda each: each[:2])[2]
    return min(planned, key=lambda each: each[:2])[2:]


def _cannot_gain(captured: Problem, known_ns: int) -> bool:
    """Whether nothing that recomputes nothing is as fast as `known_ns`; to plan it, or to say why not, takes long.

    Without offloaded parameters there is more room than beside any that are pinned, and no copy of others.
    """
    if moves_too_much(captured):
        return True
    others = (each for each in captured.storages if each.kind not in (Kind.FETCHED, Kind.STORED))
    return least_step_ns(replace(captured, storages=tuple(others), recipes=(), collectives=())) > known_ns


def policy_floor_bytes(captured: Problem, policy: str) -> int:
    """Return a device budget that `policy` can plan `captured` in, host memory and disk aside.

    The least there is for policies that do not recompute. For `joint` the lower of two: with nothing and with
    everything recomputed that may be; in between there may be less.
    """
    if policy == "none":
        return int(live_bytes(captured).max(initial=captured.external_bytes))
    floor = floor_bytes(captured)
    if policy != "joint":
        return floor
    large = {storage.name for storage in captured.storages if storage.nbytes >= captured.min_spill_bytes}
    everything = [recipe.name for recipe in captured.recipes if recipe.name in large]
    return min(floor, floor_bytes(recompute(captured, everything)))


def choose_for_region(captured: Problem) -> Names:
    """Return what to recompute, sorted by name, with room left for as many parameters and as much state as is best.

    With offloaded parameters the device's memory is for activations, for parameters, or for what updates need: room for
    these can be worth more recomputing. Searches beside parameters that are all copied, beside several rooms for state,
    and beside parameters that are all pinned. What is best pinned depends on what is recomputed: they take turns.
    """
    return _choose_recomputed(Evaluator(captured))


def _choose_recomputed(evaluator: Evaluator) -> Names:
    """Return what to recompute; a large problem is searched coarsely, and again with less if that is too much.

    Of choices that do not fit, the one that misses the budget least.
    """
    captured, tuning, limit = evaluator.captured, evaluator.tuning, evaluator.captured.budgets.device_bytes
    if limit is None or not captured.recipes:
        return ()
    if len(captured.ops) <= tuning.coarse_from:
        return _search_turns(evaluator)
    coarse = coarsen_within(captured, tuning)
    problem, searched, tried = coarse.problem, tuning.coarsely(in_turns=has_offloaded(captured)), {}
    for _ in range(SPLITS):
        names = coarse.fine(_search_turns(Evaluator(problem, searched)))
        if names in tried:
            break
        tried[names] = over_bytes = floor_bytes(recompute(captured, names)) - limit
        if over_bytes <= 0:
            return names
        problem = problem.with_less(over_bytes)
    return min(tried, key=lambda names: tried[names])


class Trial(NamedTuple):
    """How long a step takes with something recomputed, and the parameters that are best pinned then."""

    step_ns: float
    resident: Names = ()
    updated_here: Names = ()
    summed_here: Names = ()


def _search_turns(evaluator: Evaluator) -> Names:
    """Return what to recompute beside the parameters that are best pinned then."""
    captured, tuning = evaluator.captured, evaluator.tuning
    limit = captured.budgets.device_bytes
    # Plans are compared with parameters copied, by the quickest good policy.
    base = Candidate(policy="teraio", lead=tuning.compared_lead)

    def search(start: Candidate) -> Names:
        return RecomputeSearch(evaluator, start).run()

    if limit is None or not has_offloaded(captured):
        return search(base)
    starts = [base]
    room_bytes = limit - floor_bytes(captured)
    if room_bytes > 0 and any(storage.state_bytes for storage in captured.storages):
        starts += [replace(base, reserved_bytes=int(room_bytes * share)) for share in tuning.state_rooms]
    every = first_parameters(captured, 1.0)
    if every and least_floor_bytes(keep_resident(captured, every)) <= limit:
        starts.append(replace(base, resident=every))

    def try_out(names: Names) -> Trial:
        """Choose the parameters to pin beside `names`; without a plan a step takes for ever."""
        try:
            chosen = choose_parameters(evaluator, base.recomputing(names), compare=True)
        except BudgetError:
            return Trial(inf)
        return Trial(costs_of(evaluator, chosen).step_ns, chosen.resident, chosen.updated_here, chosen.summed_here)

    return take_turns(starts, search, try_out, tuning.turns)


def take_turns(
    starts: Sequence[Candidate], search: Callable[[Candidate], Names], try_out: Callable[[Names], Trial], turns: int
) -> Names:
    """Return the fastest of what `search` finds from each of `starts`, and beside what is pinned in the fastest so far.

    `search` returns what to recompute beside the parameters that a candidate pins, `try_out` how fast that is, and
    which parameters are pinned then; with these the next of at most `turns` searches begins. More room for others is
    only tried where less of it has been worth it.
    """
    base, gained = starts[0], True
    tried: dict[Names, Trial] = {}
    for start in starts:
        if start.reserved_bytes and not gained:
            continue
        known_ns = min((trial.step_ns for trial in tried.values()), default=inf)
        if (names := search(start)) not in tried:
            tried[names] = try_out(names)
        gained = known_ns == inf or tried[names].step_ns < known_ns
    searched = {_pinned(start) for start in starts}
    for _ in range(turns):
        best = min(tried.values(), key=lambda trial: trial.step_ns)
        start = replace(base, resident=best.resident, updated_here=best.updated_here, summed_here=best.summed_here)
        if _pinned(start) in searched:
            break
        searched.add(_pinned(start))
        if (names := search(start)) in tried:
            break
        tried[names] = try_out(names)
    return min(tried, key=lambda names: tried[names].step_ns)


def _pinned(candidate: Candidate) -> tuple[frozenset[str], ...]:
    return tuple(map(frozenset, (candidate.resident, candidate.updated_here, candidate.summed_here)))


def _settle(evaluator: Evaluator, base: Candidate) -> Candidate:
    """Return `base` with its parameters chosen, if any are offloaded; raises `OptionError` for an unknown policy."""
    if base.policy not in POLICIES:
        near = difflib.get_close_matches(base.policy, POLICIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"policy is {base.policy!r}, which is unknown.{hint} Choose one of {', '.join(POLICIES)}.")
    if has_offloaded(evaluator.captured):
        return choose_parameters(evaluator, base)
    if (refusal := evaluator.evaluate(base).refusal) is not None:
        raise refusal
    return base
