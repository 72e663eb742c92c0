"""Problem in, Plan out: run a policy, size its buffers, replay it, and say what to expect, or what does not fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np

from tencache_fx.errors import BudgetError
from tencache_fx.planning.collectives import busy_ns
from tencache_fx.planning.link_bound import StepBound
from tencache_fx.planning.liveness import (
    clip_to_barriers,
    durations_ns,
    held_at,
    least_bytes,
    live_bytes,
    minimal_swaps,
)
from tencache_fx.planning.parameter_schedule import (
    has_offloaded,
    least_bytes_with_parameters,
    schedule_parameters,
    with_parameters_scheduled,
)
from tencache_fx.planning.plan import Forecast, Plan, Transfer, TransferKind
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
        "joint": (
            *(partial(choose_teraio, headroom=headroom) for headroom in TUNING.headrooms),
            partial(choose_teraio, latest_first=True),
            choose_10cache,
        ),
    }
)


class _Sized:
    """Transfers in their order, the buffers that they need, and the bytes of each tier."""

    def __init__(self, problem: Problem, transfers: Sequence[Transfer], floor_bytes: int) -> None:
        self.transfers = tuple(sorted(transfers, key=lambda s: (s.steps[0] if s.out else s.needed_at, s.steps, s.name)))
        self.floor_bytes = floor_bytes
        self.pool, self.staging = host_buffers(self.transfers, problem.budgets.host_bytes)
        self.host_bytes = total_bytes(self.pool) + total_bytes(self.staging)
        self.disk_bytes = total_bytes(pool_classes(self.transfers, Tier.NVME))
        live = live_bytes(problem, self.transfers)
        self.peak_bytes = int(live.max(initial=problem.external_bytes))
        self.peak_step = Step(int(live.argmax()) if live.size else 0)


def plan_transfers(problem: Problem, policy: str, lead: float, known: Plan | None = None) -> Plan:
    """Return `policy`'s plan for a problem in which it is decided what is recomputed and what is pinned on the device.

    Parameters are prefetched up to `lead` copy times before the latest safe start. Where there are any to transfer,
    `floor_bytes` of the forecast is left at 0. `known`, if there is one, is what "teraio" plans for the same problem
    and lead: the first variant of "joint" does not have to be asked for that again. Raises `BudgetError`, before
    anything has run, when the region's floor is over the device budget, or the transfers need more host memory or disk
    than there is.
    """
    assert known is None or policy == "joint"
    if not has_offloaded(problem):
        swaps = _choose_swaps(problem, policy, known)
        return _replayed(problem, policy, swaps, swaps.floor_bytes)
    parameter_transfers = schedule_parameters(problem, lead)
    swaps = _choose_swaps(with_parameters_scheduled(problem, parameter_transfers), policy, known)
    plan = build_plan(problem, policy, [*swaps.transfers, *parameter_transfers], floor=0)
    check_tiers(problem, plan.forecast)
    return plan


def _choose_swaps(problem: Problem, policy: str, known: Plan | None) -> _Sized:
    """Return `policy`'s swaps for a problem whose loads and stores are scheduled; they fit all budgets.

    Those of a `known` plan are what the first variant chooses.
    """
    limit = problem.budgets.device_bytes
    floor = _scheduled_floor_bytes(problem)
    if limit is None or live_bytes(problem).max(initial=problem.external_bytes) <= limit:
        return _Sized(problem, (), floor)
    if policy == "none":
        _refuse_device(problem, (), note='policy="none" never spills')
    if floor > limit:
        _refuse_device(problem, minimal_swaps(problem), note="with everything spilled that may be")
    swaps = _fastest_swaps(problem, policy, POLICIES[policy], floor, known)
    check_tiers(problem, swaps)
    return swaps


def fastest_variant(problem: Problem, policy: str, variants: Sequence[Policy], floor: int) -> Plan:
    """Return the fastest of the plans that `variants` make; if none fits host memory and disk, the one closest to it.

    `floor` is `floor_bytes(problem)`.
    """
    return _replayed(problem, policy, _fastest_swaps(problem, policy, variants, floor), floor)


def _fastest_swaps(
    problem: Problem, policy: str, variants: Sequence[Policy], floor: int, known: Plan | None = None
) -> _Sized:
    found = []
    if known is not None:
        swaps = [transfer for transfer in known.transfers if transfer.kind is TransferKind.SWAP]
        found, variants = [_Sized(problem, swaps, floor)], variants[1:]
    found += [_share_out(problem, _repair(problem, variant, floor)) for variant in variants]
    if len(found) == 1:  # a replay takes as long as the choice
        return found[0]

    def cost(swaps: _Sized) -> tuple[int, int, int]:
        forecast = _replayed(problem, policy, swaps, floor).forecast
        return over_tiers(problem, swaps), forecast.makespan_ns, forecast.d2h_bytes

    return min(found, key=cost)


def _repair(problem: Problem, variant: Policy, floor: int) -> _Sized:
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
        swaps = _Sized(problem, clipped, floor)
        over_device = max(0, swaps.peak_bytes - limit)
        over_host = max(0, swaps.host_bytes - host_bytes) if problem.budgets.disk_bytes else 0
        if not over_device and not over_host:
            return swaps
        asked = asked.within(
            device_bytes=(asked.budgets.device_bytes or 0) - over_device,
            host_bytes=max(0, asked.budgets.host_bytes - over_host),
        )
    return _Sized(problem, minimal_swaps(problem), floor) if over_device else swaps


def _share_out(problem: Problem, swaps: _Sized) -> _Sized:
    """Return `swaps` shared out between host memory and disk anew, if host memory is short.

    One staging buffer for the largest is set aside first; then the shortest go to host memory, as long as their buffers
    fit, and the rest to disk. Slower than what a policy would choose, but it fits if anything does.
    O(n^2 log n) in transfers.
    """
    host_bytes = problem.budgets.host_bytes
    if not swaps.transfers or swaps.host_bytes <= host_bytes or problem.budgets.disk_bytes == 0:
        return swaps
    room_bytes = host_bytes - round_up(max(transfer.nbytes for transfer in swaps.transfers), PAGE_BYTES)
    placed: list[Transfer] = []
    for transfer in sorted(swaps.transfers, key=lambda s: (s.needed_at - s.copy_out_after, s.nbytes, s.name)):
        on_host = replace(transfer, tier=Tier.HOST)
        fits = total_bytes(pool_classes([*placed, on_host], Tier.HOST)) <= room_bytes
        placed.append(on_host if fits else replace(transfer, tier=Tier.NVME))
    return _Sized(problem, placed, swaps.floor_bytes)


def floor_bytes(problem: Problem) -> int:
    """Return the least device memory that a plan of ours can run in, external bytes included.

    It is the peak with every candidate on its longest transfer without slack. A storage with several inactive intervals
    is away during one of them only, so the step-by-step bound, which lets it be away during all, can be lower: this one
    can be reached.
    """
    held = least_bytes_with_parameters(problem) if has_offloaded(problem) else least_bytes(problem)
    return int(held.max(initial=problem.external_bytes))


def _scheduled_floor_bytes(problem: Problem) -> int:
    """Return the floor of a problem whose loads and stores, if there are any, are scheduled."""
    return int(least_bytes(problem).max(initial=problem.external_bytes))


def build_plan(problem: Problem, policy: str, transfers: Sequence[Transfer], floor: int | None = None) -> Plan:
    """Return the plan that these transfers make: their buffers, and what the simulator forecasts of them.

    `floor` is `floor_bytes(problem)`, if the caller knows it.
    """
    floor = floor_bytes(problem) if floor is None else floor
    return _replayed(problem, policy, _Sized(problem, transfers, floor), floor)


def _replayed(problem: Problem, policy: str, sized: _Sized, floor: int) -> Plan:
    replay = simulate(problem, sized.transfers, sized.staging)
    forecast = Forecast(
        peak_bytes=sized.peak_bytes,
        peak_step=sized.peak_step,
        floor_bytes=floor,
        host_bytes=sized.host_bytes,
        disk_bytes=sized.disk_bytes,
        ideal_ns=replay.ideal_ns - problem.recompute_ns,
        recompute_ns=problem.recompute_ns,
        makespan_ns=replay.makespan_ns,
        forward_ns=replay.start_ns(problem.boundary),
        lower_bound_ns=lower_bound_ns(problem),
        stall_out_ns=replay.stall_out_ns,
        stall_in_ns=replay.stall_in_ns,
        stall_collective_ns=replay.stall_collective_ns,
        collective_ns=busy_ns(problem),
        d2h_bytes=replay.d2h_bytes,
        h2d_bytes=replay.h2d_bytes,
        disk_write_bytes=replay.disk_write_bytes,
        disk_read_bytes=replay.disk_read_bytes,
    )
    return Plan(policy=policy, transfers=sized.transfers, pool=sized.pool, staging=sized.staging, forecast=forecast)


def lower_bound_ns(problem: Problem) -> int:
    """Return a time that no plan of transfers within the budget can beat.

    The bytes that are over the budget at step k were copied out before it and are copied in after it: k starts no
    sooner than the link can carry them out, and the region ends no sooner after k than the link can carry them in. What
    collectives take behind k may have passed while k waited.
    """
    paced = durations_ns(problem)
    durations = np.array([op.duration_ns for op in problem.ops], dtype=np.float64)
    ideal = float(paced.sum())
    limit, links = problem.budgets.device_bytes, problem.links
    if limit is None or not durations.size or min(links.d2h_bytes_per_s, links.h2d_bytes_per_s) == 0:
        return int(ideal)
    over = np.maximum(0, live_bytes(problem) - limit)
    before = np.cumsum(paced) - durations
    after = durations.sum() - np.cumsum(durations)
    out_ns, in_ns = over / links.d2h_bytes_per_s * 1e9, over / links.h2d_bytes_per_s * 1e9
    return int(max(ideal, (np.maximum(before, out_ns) + durations + np.maximum(after, in_ns)).max()))


def least_step_ns(problem: Problem) -> int:
    """Return a time of a whole step that no plan of transfers within the budget can beat.

    The bytes that are over the budget are copied out and in, as every offloaded parameter and gradient is.
    """
    live, limit = live_bytes(problem), problem.budgets.device_bytes
    over = live - (int(live.max(initial=0)) if limit is None else limit)
    return StepBound(problem).least_ns(over, lower_bound_ns(problem))


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
    whole_step = problem.copies_parameters  # whose ops have all that no plan moves for their scratch
    if op.scratch_bytes:
        what = "what no plan moves, of this region and outside of regions," if whole_step else "the op's own scratch"
        parts.append(f"{what} {format_bytes(op.scratch_bytes)}")
    if step == problem.boundary and problem.boundary_excess_bytes:
        parts.append(f"others between forward and backward {format_bytes(problem.boundary_excess_bytes)}")
    if problem.external_bytes:
        parts.append(f"outside this region's graphs {format_bytes(problem.external_bytes)}")
    floor = floor_bytes(problem)
    other = "choose another policy, " if floor <= limit else ""
    raise BudgetError(
        f"step {step} ({op.name}) needs {needs} on the device, {note}; the budget is {budget}.\n"
        f"  Held there: {', '.join(parts)}.\n"
        f"  The floor of this {'step' if whole_step else 'region'} is {format_bytes(floor)}.\n"
        f"  Set device_budget to {at_least(needed)} or more, {other}or shrink the batch."
    )


def over_tiers(problem: Problem, sizes: Forecast | _Sized) -> int:
    """Return by how many bytes buffers and extents of these sizes miss their budgets."""
    budgets = problem.budgets
    return max(0, sizes.host_bytes - budgets.host_bytes) + max(0, sizes.disk_bytes - budgets.disk_bytes)


def check_tiers(problem: Problem, sizes: Forecast | _Sized) -> None:
    """Raise `BudgetError` if buffers or extents of these sizes do not fit."""
    budgets = problem.budgets
    if sizes.host_bytes > budgets.host_bytes:
        taken = budgets.host_taken_bytes
        needs, budget = _told_apart(sizes.host_bytes + taken, budgets.whole_host_bytes)
        hint = "" if budgets.disk_bytes else "set spill_dir, "
        others = f", with {format_bytes(taken)} for what is or will be there besides" if taken else ""
        raise BudgetError(
            f"the transfers that fit the region into its device budget need {needs} of pinned host memory{others}; "
            f"host_budget is {budget}, and the disk may hold {format_bytes(budgets.disk_bytes)}.\n"
            f"  Set host_budget to {at_least(sizes.host_bytes + taken)} or more, {hint}"
            "raise device_budget, or shrink the batch."
        )
    if sizes.disk_bytes > budgets.disk_bytes:
        needs, budget = _told_apart(sizes.disk_bytes, budgets.disk_bytes)
        raise BudgetError(
            f"the transfers to NVMe need {needs} of disk; the budget is {budget}.\n"
            f"  Set spill_budget to {at_least(sizes.disk_bytes)} or more, raise host_budget, or shrink the batch."
        )


def _told_apart(one: int, other: int) -> tuple[str, str]:
    """Return both sizes as text; as exact bytes where the rounded ones would look the same."""
    texts = format_bytes(one), format_bytes(other)
    return texts if texts[0] != texts[1] else (f"{one:,} bytes", f"{other:,} bytes")
