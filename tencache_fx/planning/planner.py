"""Problem in, Plan out: run a policy, size its buffers, replay it, and say what to expect, or what does not fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import clip_to_barriers, held_at, live_bytes, minimal_swaps
from tencache_fx.planning.parameter_schedule import has_offloaded, schedule_parameters, with_parameters_scheduled
from tencache_fx.planning.plan import Forecast, Plan, Transfer
from tencache_fx.planning.policies.ten_cache import choose_10cache
from tencache_fx.planning.policies.teraio import choose_teraio
from tencache_fx.planning.pool_sizing import host_buffers, pool_classes, total_bytes
from tencache_fx.planning.problem import Problem, Step, Tier
from tencache_fx.planning.simulator import simulate
from tencache_fx.planning.tuning import TUNING
from tencache_fx.units import PAGE_BYTES, at_least, format_bytes, round_up

Policy = Callable[[Problem], tuple[Transfer, ...]]


# By name, the variants of a policy; the one that the simulator finds fastest is taken.
POLICIES: Mapping[str, tuple[Policy, ...]] = MappingProxyType(
    {
        "none": (),
        "10cache": (choose_10cache,),
        "teraio": (choose_teraio,),
        "joint": (*(partial(choose_teraio, headroom=headroom) for headroom in TUNING.headrooms), choose_10cache),
    }
)


def plan_transfers(problem: Problem, policy: str, lead: float) -> Plan:
    """Return `policy`'s plan for a problem in which it is decided what is recomputed and what is pinned on the device.

    Parameters are prefetched up to `lead` copy times before the latest safe start. Where there are any to transfer,
    `floor_bytes` of the forecast is left at 0. Raises `BudgetError`, before anything has run, when the region's floor
    is over the device budget, or the transfers need more host memory or disk than there is.
    """
    return _plan_with_parameters(problem, policy, lead) if has_offloaded(problem) else _plan_swaps(problem, policy)


def _plan_with_parameters(problem: Problem, policy: str, lead: float) -> Plan:
    """Return `policy`'s plan beside the loads and stores, prefetched with `lead`; its floor is left open."""
    parameter_transfers = schedule_parameters(problem, lead)
    swaps = _plan_swaps(with_parameters_scheduled(problem, parameter_transfers), policy)
    plan = build_plan(problem, policy, [*swaps.transfers, *parameter_transfers], floor=0)
    check_tiers(problem, plan)
    return plan


def _plan_swaps(problem: Problem, policy: str) -> Plan:
    """Return `policy`'s plan for a problem whose loads and stores are scheduled."""
    limit = problem.budgets.device_bytes
    if limit is None or live_bytes(problem).max(initial=problem.external_bytes) <= limit:
        return build_plan(problem, policy, (), _scheduled_floor_bytes(problem))
    if policy == "none":
        _refuse_device(problem, (), note='policy="none" never spills')
    floor = _scheduled_floor_bytes(problem)
    if floor > limit:
        _refuse_device(problem, minimal_swaps(problem), note="with everything spilled that may be")
    plan = fastest_variant(problem, policy, POLICIES[policy], floor)
    check_tiers(problem, plan)
    return plan


def fastest_variant(problem: Problem, policy: str, variants: Sequence[Policy], floor: int) -> Plan:
    """Return the fastest of the plans that `variants` make; if none fits host memory and disk, the one closest to it.

    `floor` is `floor_bytes(problem)`.
    """
    plans = [_share_out(problem, _repair(problem, policy, variant, floor), floor) for variant in variants]
    return min(plans, key=lambda plan: (over_tiers(problem, plan), plan.forecast.makespan_ns, plan.forecast.d2h_bytes))


def _repair(problem: Problem, policy: str, variant: Policy, floor: int) -> Plan:
    """Ask a variant of a policy for its swaps, and again with less of what they overran, buffers and barriers counted.

    Swaps that still overrun the device after some rounds are replaced by minimal swaps, which need no more than
    `floor`.
    """
    limit, host_bytes = problem.budgets.device_bytes, problem.budgets.host_bytes
    assert limit is not None
    asked = problem
    for _ in range(TUNING.repairs):
        transfers = minimal_swaps(asked) if floor > (asked.budgets.device_bytes or 0) else variant(asked)
        clipped = [s for s in (clip_to_barriers(problem, transfer) for transfer in transfers) if s is not None]
        plan = build_plan(problem, policy, clipped, floor)
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


def _share_out(problem: Problem, plan: Plan, floor: int) -> Plan:
    """Return `plan` with its swaps shared out between host memory and disk anew, if host memory is short.

    One staging buffer for the largest is set aside first; then the shortest go to host memory, as long as their buffers
    fit, and the rest to disk. Slower than what a policy would choose, but it fits if anything does.
    O(n^2 log n) in transfers.
    """
    host_bytes = problem.budgets.host_bytes
    if not plan.transfers or plan.forecast.host_bytes <= host_bytes or problem.budgets.disk_bytes == 0:
        return plan
    room_bytes = host_bytes - round_up(max(transfer.nbytes for transfer in plan.transfers), PAGE_BYTES)
    placed: list[Transfer] = []
    for transfer in sorted(plan.transfers, key=lambda s: (s.needed_at - s.copy_out_after, s.nbytes, s.name)):
        on_host = replace(transfer, tier=Tier.HOST)
        fits = total_bytes(pool_classes([*placed, on_host], Tier.HOST)) <= room_bytes
        placed.append(on_host if fits else replace(transfer, tier=Tier.NVME))
    return build_plan(problem, plan.policy, placed, floor)


def floor_bytes(problem: Problem) -> int:
    """Return the least device memory that a plan of ours can run in, external bytes included.

    It is the peak with every candidate on its longest transfer without slack. A storage with several inactive intervals
    is away during one of them only, so the step-by-step bound, which lets it be away during all, can be lower: this one
    can be reached.
    """
    if has_offloaded(problem):
        problem = with_parameters_scheduled(problem, schedule_parameters(problem.within(device_bytes=0), 0.0))
    return _scheduled_floor_bytes(problem)


def _scheduled_floor_bytes(problem: Problem) -> int:
    """Return the floor of a problem whose loads and stores, if there are any, are scheduled."""
    return int(live_bytes(problem, minimal_swaps(problem)).max(initial=problem.external_bytes))


def build_plan(problem: Problem, policy: str, transfers: Sequence[Transfer], floor: int | None = None) -> Plan:
    """Return the plan that these transfers make: their buffers, and what the simulator forecasts of them.

    `floor` is `floor_bytes(problem)`, if the caller knows it: it takes as long to find as all the rest.
    """
    ordered = tuple(sorted(transfers, key=lambda s: (s.steps[0] if s.out else s.needed_at, s.steps, s.name)))
    pool, staging = host_buffers(ordered, problem.budgets.host_bytes)
    replay = simulate(problem, ordered, staging)
    live = live_bytes(problem, ordered)
    forecast = Forecast(
        peak_bytes=int(live.max(initial=problem.external_bytes)),
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
    return Plan(policy=policy, transfers=ordered, pool=pool, staging=staging, forecast=forecast)


def lower_bound_ns(problem: Problem) -> int:
    """Return a time that no plan of transfers within the budget can beat.

    The bytes that are over the budget at step k were copied out before it and are copied in after it: k starts no
    sooner than the link can carry them out, and the region ends no sooner after k than the link can carry them in.
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


def _refuse_device(problem: Problem, transfers: Sequence[Transfer], note: str) -> None:
    """Raise the `BudgetError` that says which step needs how much, what it holds, and what would do."""
    limit = problem.budgets.device_bytes
    assert limit is not None
    live = live_bytes(problem, transfers)
    step = Step(int(live.argmax()))
    op, needed = problem.ops[step], int(live[step])
    needs, budget = _told_apart(needed, limit)
    held = held_at(problem, transfers, step)
    parts = [f"{s.name} {format_bytes(s.nbytes)} ({s.kind})" for s in held[:5]]
    if len(held) > 5:
        parts.append(f"{len(held) - 5} more {format_bytes(sum(s.nbytes for s in held[5:]))}")
    if op.scratch_bytes:
        parts.append(f"the op's own scratch {format_bytes(op.scratch_bytes)}")
    if step == problem.boundary and problem.boundary_excess_bytes:
        parts.append(f"others between forward and backward {format_bytes(problem.boundary_excess_bytes)}")
    if problem.external_bytes:
        parts.append(f"outside this region's graphs {format_bytes(problem.external_bytes)}")
    floor = floor_bytes(problem)
    other = "choose another policy, " if floor <= limit else ""
    raise BudgetError(
        f"step {step} ({op.name}) needs {needs} on the device, {note}; the budget is {budget}.\n"
        f"  Held there: {', '.join(parts)}.\n"
        f"  The floor of this region is {format_bytes(floor)}.\n"
        f"  Set device_budget to {at_least(needed)} or more, {other}or shrink the batch."
    )


def over_tiers(problem: Problem, plan: Plan) -> int:
    """Return by how many bytes the buffers and extents of `plan` miss their budgets."""
    budgets, forecast = problem.budgets, plan.forecast
    return max(0, forecast.host_bytes - budgets.host_bytes) + max(0, forecast.disk_bytes - budgets.disk_bytes)


def check_tiers(problem: Problem, plan: Plan) -> None:
    """Raise `BudgetError` if the buffers or extents of `plan` do not fit."""
    budgets, forecast = problem.budgets, plan.forecast
    if forecast.host_bytes > budgets.host_bytes:
        taken = budgets.host_taken_bytes
        needs, budget = _told_apart(forecast.host_bytes + taken, budgets.host_bytes + taken)
        hint = "" if budgets.disk_bytes else "set spill_dir, "
        others = f", with {format_bytes(taken)} for what is or will be there besides" if taken else ""
        raise BudgetError(
            f"the transfers that fit the region into its device budget need {needs} of pinned host memory{others}; "
            f"host_budget is {budget}, and the disk may hold {format_bytes(budgets.disk_bytes)}.\n"
            f"  Set host_budget to {at_least(forecast.host_bytes + taken)} or more, {hint}"
            "raise device_budget, or shrink the batch."
        )
    if forecast.disk_bytes > budgets.disk_bytes:
        needs, budget = _told_apart(forecast.disk_bytes, budgets.disk_bytes)
        raise BudgetError(
            f"the transfers to NVMe need {needs} of disk; the budget is {budget}.\n"
            f"  Set spill_budget to {at_least(forecast.disk_bytes)} or more, raise host_budget, or shrink the batch."
        )


def _told_apart(one: int, other: int) -> tuple[str, str]:
    """Return both sizes as text; as exact bytes where the rounded ones would look the same."""
    texts = format_bytes(one), format_bytes(other)
    return texts if texts[0] != texts[1] else (f"{one:,} bytes", f"{other:,} bytes")
