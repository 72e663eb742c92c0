"""A whole region planned as the backend would: what to recompute first, then the trips. On values only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tencache_fx.errors import BudgetError
from tencache_fx.passes.moves import first_homes, has_moves, keep_resident, step_ns
from tencache_fx.passes.planner import floor_bytes, make_plan
from tencache_fx.passes.policy_joint import choose_recomputed
from tencache_fx.plan import Plan, Problem, live_bytes
from tencache_fx.recompute import recompute

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
