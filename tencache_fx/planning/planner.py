"""Problem in, Plan out: run a policy, size its buffers, replay it, and say what to expect, or what does not fit."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.liveness import fence_in, held_at, live_bytes, minimal_swaps
from tencache_fx.planning.parameter_schedule import (
    first_homes,
    has_moves,
    keep_resident,
    settle_moves,
    step_ns,
    time_moves,
)
from tencache_fx.planning.plan import Forecast, Plan, Transfer, TransferKind
from tencache_fx.planning.policies.ten_cache import choose_10cache
from tencache_fx.planning.policies.teraio import choose_teraio
from tencache_fx.planning.pool_sizing import pool_classes, staging_classes, total_bytes
from tencache_fx.planning.problem import Kind, Problem, Step, Tier
from tencache_fx.planning.simulator import simulate
from tencache_fx.units import at_least, format_bytes, round_up

Policy = Callable[[Problem], tuple[Transfer, ...]]

_HEADROOMS = (0.0, 0.05, 0.12)
_LEADS = (0.0, 1.0, 3.0, 8.0)  # copy times by which parameters may arrive early
_RESIDENT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_STATE_SHARES = tuple(eighth / 8 for eighth in range(8, 0, -1))
_ENOUGH = 3  # of these shares, from the largest on that there is room for
_FINER_SHARES = (1 / 16, 1 / 32)  # more than the largest of them that has a plan, one after the other

_ROUNDS = 6  # times a policy is asked, each time with less of what its plan overran


def choose_none(problem: Problem) -> tuple[Transfer, ...]:
    """Return no trips at all."""
    return ()


# By name, the ways a policy tries; the one that the simulator finds fastest is taken.
POLICIES: Mapping[str, tuple[Policy, ...]] = MappingProxyType(
    {
        "none": (choose_none,),
        "10cache": (choose_10cache,),
        "teraio": (choose_teraio,),
        "joint": (*(partial(choose_teraio, headroom=headroom) for headroom in _HEADROOMS), choose_10cache),
    }
)


def make_plan(
    problem: Problem,
    policy: str,
    *,
    leads: Sequence[float] = _LEADS,
    resident_shares: Sequence[float] = _RESIDENT_SHARES,
    state_shares: Sequence[float] = _STATE_SHARES,
) -> Plan:
    """Return `policy`'s plan for `problem`; without trips if the region fits as it is.

    Where parameters have a home elsewhere, the fastest of several: their copies in begin earlier or later, by `leads`,
    and, for the best of these, shares of them stay on the device, by themselves or with their gradients and state; the
    latter beside as many that stay by themselves as are best without state, and beside none. Of those within half a
    percent of the fastest, the one that copies least: that leaves host memory to others. Its parameters come as early
    as costs no more than that. It is for `keep_resident(problem, plan.resident, plan.updated_here)`.

    Raises `OptionError` for an unknown policy, and `BudgetError`, before anything has run, when the region's floor is
    over the device budget, or the trips need more host memory or disk than there is.
    """
    if policy not in POLICIES:
        near = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"policy is {policy!r}, which is unknown.{hint} Choose one of {', '.join(POLICIES)}.")
    if not has_moves(problem):
        return _plan_trips(problem, policy)
    staying, plan = _choose_way(problem, policy, leads, resident_shares, state_shares)
    return replace(plan, forecast=replace(plan.forecast, floor_bytes=floor_bytes(staying)))


def _choose_way(
    problem: Problem,
    policy: str,
    leads: Sequence[float],
    resident_shares: Sequence[float],
    state_shares: Sequence[float],
) -> tuple[Problem, Plan]:
    """Return the best of `policy`'s plans, and the problem that it is for."""
    for way in dict.fromkeys(("teraio" if policy == "joint" else policy, policy)):
        first, *more = resident_shares
        found, refusals = _try_moves(problem, way, [_Way(first, 0.0, lead) for lead in leads])
        candidates = [_best(found)] if found else []
        lead = candidates[0].lead if found else leads[0]
        others, refused = _try_moves(problem, way, [_Way(share, 0.0, lead) for share in more])
        if not (found := {**found, **others}):
            continue
        # Weights that stay may be in the way of state. Without a budget nobody has said how much there is for it.
        least = dict.fromkeys((_best(found).resident, 0.0))
        with_state = state_shares if problem.budgets.device_bytes is not None else ()
        for resident in least:
            ways = [_Way(max(share, resident), share, lead) for share in with_state]
            found |= _try_moves(problem, way, [each for each in ways if each not in found], enough=_ENOUGH)[0]
        for finer in _FINER_SHARES if with_state else ():
            share = max(each.updated_here for each in found) + finer
            ways = [_Way(max(share, resident), share, lead) for resident in least if share <= 1]
            found |= _try_moves(problem, way, ways)[0]
        candidates.append(_best(found))
        break
    else:
        raise (*refusals, *refused)[0]  # of those with the least on the device
    planned, _ = (found, ()) if way == policy else _try_moves(problem, policy, list(dict.fromkeys(candidates)))
    return _with_time_to_spare(problem, policy, _best(planned), planned, leads)


class _Way(NamedTuple):
    """The shares of parameters that stay on the device, and that are updated there; by how much others come early."""

    resident: float
    updated_here: float
    lead: float


def _try_moves(
    problem: Problem, policy: str, ways: Sequence[_Way], enough: int = 1 << 30
) -> tuple[dict[_Way, tuple[Problem, Plan]], list[BudgetError]]:
    """Return `policy`'s plans for the first ways for which there are some, or why there are none."""
    plans: dict[_Way, tuple[Problem, Plan]] = {}
    refusals: list[BudgetError] = []
    for way in ways:
        here = first_homes(problem, way.updated_here, Kind.SUNK)
        resident = tuple(dict.fromkeys((*here, *first_homes(problem, way.resident))))
        staying = keep_resident(problem, resident, here)
        try:
            plan = _plan_moves(staying, policy, way.lead) if has_moves(staying) else _plan_trips(staying, policy)
            plans[way] = staying, replace(plan, resident=resident, updated_here=here)
        except BudgetError as error:
            refusals.append(error)
        if len(plans) == enough:
            break
    return plans, refusals


def _with_time_to_spare(
    problem: Problem, policy: str, best: _Way, plans: Mapping[_Way, tuple[Problem, Plan]], leads: Sequence[float]
) -> tuple[Problem, Plan]:
    """Return the plan of `best` with the largest of `leads` that costs no more than half a percent.

    Others use the links in bursts, as updates that stream through the device: what begins with no time to spare is
    then late. Half a percent is of the fastest step, and of the time on the device and the bytes copied of `best`.
    """
    if not any(spill.kind is TransferKind.IN for spill in plans[best][1].spills):
        return plans[best]
    costs = _costs(*plans[best])._replace(step_ns=min(_costs(*each).step_ns for each in plans.values()))
    enough = [_enough(cost) for cost in costs]
    for lead in sorted((lead for lead in leads if lead > best.lead), reverse=True):
        for early in _try_moves(problem, policy, [best._replace(lead=lead)])[0].values():
            if all(cost <= most for cost, most in zip(_costs(*early), enough, strict=True)):
                return early
    return plans[best]


class _Costs(NamedTuple):
    """How long a step takes, and the device alone with its copies; the bytes of these."""

    step_ns: int
    makespan_ns: int
    copied_bytes: int


def _costs(problem: Problem, plan: Plan) -> _Costs:
    forecast = plan.forecast
    return _Costs(step_ns(problem, forecast), forecast.makespan_ns, forecast.d2h_bytes + forecast.h2d_bytes)


def _enough(least: int) -> int:
    """Return the cost that is as good as the least."""
    return least * 1005 // 1000


def _best(plans: Mapping[_Way, tuple[Problem, Plan]]) -> _Way:
    """Return the way that copies least, of those within half a percent of the fastest."""
    costs = {way: _costs(*plan) for way, plan in plans.items()}
    enough_ns = _enough(min(each.step_ns for each in costs.values()))
    fast = [way for way, each in costs.items() if each.step_ns <= enough_ns]
    return min(fast, key=lambda way: (costs[way].copied_bytes, costs[way].makespan_ns))


def _plan_moves(problem: Problem, policy: str, lead: float) -> Plan:
    """Return `policy`'s plan beside the trips of parameters and gradients, timed by `lead`; its floor is left open."""
    moves = time_moves(problem, lead)
    trips = _plan_trips(settle_moves(problem, moves), policy)
    plan = build_plan(problem, policy, [*trips.spills, *moves], floor=0)
    _check_tiers(problem, plan)
    return plan


def _plan_trips(problem: Problem, policy: str) -> Plan:
    """Return `policy`'s plan for a problem in which all else is settled."""
    limit = problem.budgets.device_bytes
    if limit is None or live_bytes(problem).max(initial=problem.outside_bytes) <= limit:
        return build_plan(problem, policy, (), _settled_floor_bytes(problem))
    if policy == "none":
        _refuse_device(problem, (), note='policy="none" never spills')
    floor = _settled_floor_bytes(problem)
    if floor > limit:
        _refuse_device(problem, minimal_swaps(problem), note="with everything spilled that may be")
    plans = [_settle_tiers(problem, _ask(problem, policy, way, floor), floor) for way in POLICIES[policy]]
    plan = min(plans, key=lambda plan: (_over_tiers(problem, plan), plan.forecast.makespan_ns, plan.forecast.d2h_bytes))
    _check_tiers(problem, plan)
    return plan


def _ask(problem: Problem, policy: str, way: Policy, floor: int) -> Plan:
    """Ask one way of a policy for its trips, and again with less of what they overran with buffers and fences counted.

    What still overruns the device after some rounds goes with the bare trips, which need no more than `floor`.
    """
    limit, host_bytes = problem.budgets.device_bytes, problem.budgets.host_bytes
    assert limit is not None
    asked = problem
    for _ in range(_ROUNDS):
        spills = minimal_swaps(asked) if floor > (asked.budgets.device_bytes or 0) else way(asked)
        fenced = [s for s in (fence_in(problem, spill) for spill in spills) if s is not None]
        plan = build_plan(problem, policy, fenced, floor)
        over_device = max(0, plan.forecast.peak_bytes - limit)
        over_host = max(0, plan.forecast.host_bytes - host_bytes) if problem.budgets.disk_bytes else 0
        if not over_device and not over_host:
            return plan
        less = replace(
            asked.budgets,
            device_bytes=(asked.budgets.device_bytes or 0) - over_device,
            host_bytes=max(0, asked.budgets.host_bytes - over_host),
        )
        asked = replace(asked, budgets=less)
    return build_plan(problem, policy, minimal_swaps(problem), floor) if over_device else plan


def _settle_tiers(problem: Problem, plan: Plan, floor: int) -> Plan:
    """Return `plan` with its trips shared out between host memory and disk anew, if host memory is short.

    One staging buffer for the largest trip is set aside first; then the shortest trips stay in host memory, as long as
    their buffers fit, and the rest goes to disk. Slower than what a policy would choose, but it fits if anything does.
    O(n^2 log n) in trips.
    """
    host_bytes = problem.budgets.host_bytes
    if not plan.spills or plan.forecast.host_bytes <= host_bytes or problem.budgets.disk_bytes == 0:
        return plan
    room_bytes = host_bytes - round_up(max(spill.nbytes for spill in plan.spills), 4096)
    settled: list[Transfer] = []
    for spill in sorted(plan.spills, key=lambda s: (s.needed_at - s.copy_out_after, s.nbytes, s.name)):
        stays = replace(spill, tier=Tier.HOST)
        fits = total_bytes(pool_classes([*settled, stays], Tier.HOST)) <= room_bytes
        settled.append(stays if fits else replace(spill, tier=Tier.NVME))
    return build_plan(problem, plan.policy, settled, floor)


def floor_bytes(problem: Problem) -> int:
    """Return the least device memory that a plan of ours can run in, held-outside bytes included.

    It is the peak with every candidate on its longest trip without slack. A storage with several inactive intervals is
    away during one of them only, so the step-by-step bound, which lets it be away during all, can be lower: this one
    can be reached.
    """
    if has_moves(problem):
        problem = settle_moves(problem, time_moves(problem.within(device_bytes=0), 0.0))
    return _settled_floor_bytes(problem)


def _settled_floor_bytes(problem: Problem) -> int:
    """Return the floor of a problem in which parameters and gradients, if any have a home elsewhere, are settled."""
    return int(live_bytes(problem, minimal_swaps(problem)).max(initial=problem.outside_bytes))


def build_plan(problem: Problem, policy: str, spills: Sequence[Transfer], floor: int | None = None) -> Plan:
    """Return the plan that these trips make: their buffers, and what the simulator forecasts of them.

    `floor` is `floor_bytes(problem)`, if the caller knows it: it takes as long to find as all the rest.
    """
    ordered = tuple(sorted(spills, key=lambda s: (s.copy_out_after, s.freed_at, s.needed_at, s.name)))
    pool = pool_classes(ordered, Tier.HOST)
    staging = staging_classes(ordered, problem.budgets.host_bytes - total_bytes(pool))
    replay = simulate(problem, ordered, staging)
    live = live_bytes(problem, ordered)
    forecast = Forecast(
        peak_bytes=int(live.max(initial=problem.outside_bytes)),
        peak_step=Step(int(live.argmax()) if live.size else 0),
        floor_bytes=floor_bytes(problem) if floor is None else floor,
        host_bytes=total_bytes(pool) + total_bytes(staging),
        disk_bytes=total_bytes(pool_classes(ordered, Tier.NVME)),
        ideal_ns=replay.ideal_ns - problem.recompute_ns,
        recompute_ns=problem.recompute_ns,
        makespan_ns=replay.makespan_ns,
        lower_bound_ns=lower_bound_ns(problem),
        stall_out_ns=replay.stall_out_ns,
        stall_in_ns=replay.stall_in_ns,
        d2h_bytes=replay.d2h_bytes,
        h2d_bytes=replay.h2d_bytes,
        disk_write_bytes=replay.disk_write_bytes,
        disk_read_bytes=replay.disk_read_bytes,
    )
    return Plan(policy=policy, spills=ordered, pool=pool, staging=staging, forecast=forecast)


def lower_bound_ns(problem: Problem) -> int:
    """Return a time that no plan of trips within the budget can beat.

    The bytes that are over the budget at step k were copied out before it and come back after it: k starts no sooner
    than the link can carry them out, and the region ends no sooner after k than the link can carry them in.
    """
    durations = np.array([op.duration_ns for op in problem.ops], dtype=np.float64)
    ideal = float(durations.sum())
    limit, links = problem.budgets.device_bytes, problem.links
    if limit is None or not durations.size or min(links.d2h_bytes_per_s, links.h2d_bytes_per_s) == 0:
        return int(ideal)
    over = np.maximum(0, live_bytes(problem) - limit)
    before = np.cumsum(durations) - durations
    after = ideal - before - durations
    out_ns, in_ns = over / links.d2h_bytes_per_s * 1e9, over / links.h2d_bytes_per_s * 1e9
    return int((np.maximum(before, out_ns) + durations + np.maximum(after, in_ns)).max())


def _refuse_device(problem: Problem, spills: Sequence[Transfer], note: str) -> None:
    """Raise the `BudgetError` that says which step needs how much, what it holds, and what would do."""
    limit = problem.budgets.device_bytes
    assert limit is not None
    live = live_bytes(problem, spills)
    step = Step(int(live.argmax()))
    op, needed = problem.ops[step], int(live[step])
    needs, budget = _told_apart(needed, limit)
    held = held_at(problem, spills, step)
    parts = [f"{s.name} {format_bytes(s.nbytes)} ({s.kind})" for s in held[:5]]
    if len(held) > 5:
        parts.append(f"{len(held) - 5} more {format_bytes(sum(s.nbytes for s in held[5:]))}")
    if op.scratch_bytes:
        parts.append(f"the op's own scratch {format_bytes(op.scratch_bytes)}")
    if step == problem.boundary and problem.boundary_bytes:
        parts.append(f"others between forward and backward {format_bytes(problem.boundary_bytes)}")
    if problem.outside_bytes:
        parts.append(f"outside this region's graphs {format_bytes(problem.outside_bytes)}")
    floor = floor_bytes(problem)
    other = "choose another policy, " if floor <= limit else ""
    raise BudgetError(
        f"step {step} ({op.name}) needs {needs} on the device, {note}; the budget is {budget}.\n"
        f"  Held there: {', '.join(parts)}.\n"
        f"  The floor of this region is {format_bytes(floor)}.\n"
        f"  Set device_budget to {at_least(needed)} or more, {other}or shrink the batch."
    )


def _over_tiers(problem: Problem, plan: Plan) -> int:
    """Return by how many bytes the buffers and extents of `plan` miss their budgets."""
    budgets, forecast = problem.budgets, plan.forecast
    return max(0, forecast.host_bytes - budgets.host_bytes) + max(0, forecast.disk_bytes - budgets.disk_bytes)


def _check_tiers(problem: Problem, plan: Plan) -> None:
    """Raise `BudgetError` if the buffers or extents of `plan` do not fit."""
    budgets, forecast = problem.budgets, plan.forecast
    if forecast.host_bytes > budgets.host_bytes:
        taken = budgets.host_taken_bytes
        needs, budget = _told_apart(forecast.host_bytes + taken, budgets.host_bytes + taken)
        hint = "" if budgets.disk_bytes else "set spill_dir, "
        others = f", with {format_bytes(taken)} for what is or will be there besides" if taken else ""
        raise BudgetError(
            f"the trips that fit the region into its device budget need {needs} of pinned host memory{others}; "
            f"host_budget is {budget}, and the disk may hold {format_bytes(budgets.disk_bytes)}.\n"
            f"  Set host_budget to {at_least(forecast.host_bytes + taken)} or more, {hint}"
            "raise device_budget, or shrink the batch."
        )
    if forecast.disk_bytes > budgets.disk_bytes:
        needs, budget = _told_apart(forecast.disk_bytes, budgets.disk_bytes)
        raise BudgetError(
            f"the trips to NVMe need {needs} of disk; the budget is {budget}.\n"
            f"  Set spill_budget to {at_least(forecast.disk_bytes)} or more, raise host_budget, or shrink the batch."
        )


def _told_apart(one: int, other: int) -> tuple[str, str]:
    """Return both sizes as text; as exact bytes where the rounded ones would look the same."""
    texts = format_bytes(one), format_bytes(other)
    return texts if texts[0] != texts[1] else (f"{one:,} bytes", f"{other:,} bytes")
