"""The regions of a model whose graph breaks, planned beside what the calls of all others leave on the device.

A region may run several times in a step, with other parameters each: that of a layer, where the loop over layers breaks
the graph. It is captured once. What its calls leave for their backwards adds up.
"""

from collections.abc import Sequence
from dataclasses import replace

from tencache_fx.errors import BudgetError
from tencache_fx.fitting.estimate import RegionPlan
from tencache_fx.options import Options
from tencache_fx.planning.external import is_input, least_spill_bytes
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import Kind, Problem
from tencache_fx.region.kept_plans import kept_region_plan
from tencache_fx.region.reservations import bytes_over_budget

_TRIES = 4
_SHARES = (0.75, 0.5, 0.25, 0.0)


def plan_several(regions: Sequence[RegionPlan], options: Options) -> list[RegionPlan]:
    """Return the regions, in the order of their first calls, with plans for the budgets of `options`.

    Each keeps on the device what it has room for. Where the last ones then have none, all keep a share of that, the
    largest of a few that does.
    """
    planned = _planned_in_order(regions, [None] * len(regions), options)
    if options.device_budget is None or not any(region.refusal for region in planned):
        return planned
    most_bytes = [_left_bytes(_planned_among(region, 0, 0, None, options)) for region in regions]
    for share in _SHARES:
        planned = _planned_in_order(regions, [int(share * each) for each in most_bytes], options)
        if not any(region.refusal for region in planned):
            break
    return planned


def _planned_in_order(regions: Sequence[RegionPlan], kept: Sequence[int | None], options: Options) -> list[RegionPlan]:
    """Return the regions planned so that a call keeps about these bytes for its backward, None for all it can."""
    held_bytes, planned = 0, list[RegionPlan]()
    for region, kept_bytes in zip(regions, kept, strict=True):
        planned.append(_planned_beside(region, held_bytes, kept_bytes, options))
        held_bytes += region.calls * _left_bytes(planned[-1])
    return planned


def _planned_beside(region: RegionPlan, held_bytes: int, kept_bytes: int | None, options: Options) -> RegionPlan:
    """Return a region planned for its last call, which runs beside all that its others have left.

    None of them leaves more than is counted there: the more that is, the less a plan leaves, and a few tries find about
    as much as that.
    """
    found = _planned_among(region, held_bytes, kept_bytes or 0, kept_bytes, options)
    if region.calls == 1 or found.refusal or _left_bytes(found) <= (kept_bytes or 0):
        return found
    best, least_bytes, most_bytes = None, 0, _left_bytes(found)
    counted_bytes = most_bytes
    for _ in range(_TRIES):
        found = _planned_among(region, held_bytes, counted_bytes, kept_bytes, options)
        rest_bytes = counted_bytes - _left_bytes(found)
        if rest_bytes < 0:
            least_bytes = counted_bytes
        else:
            most_bytes = counted_bytes
            best = best if found.refusal else found
        if best is found and rest_bytes <= counted_bytes // 8:
            break
        counted_bytes = (least_bytes + most_bytes) // 2
    refusal = found.refusal or f"the device has no room for what {region.calls} calls leave there."
    return best or replace(found, planned=None, refusal=refusal)


def _planned_among(
    region: RegionPlan, held_bytes: int, counted_bytes: int, kept_bytes: int | None, options: Options
) -> RegionPlan:
    """Return a region planned for its last call, where each of its others counts as so many bytes on the device.

    With `kept_bytes` it leaves about those.
    """
    limit = options.device_budget
    captured = replace(region.captured, min_spill_bytes=least_spill_bytes(limit)).within(device_bytes=limit)
    beside_bytes = held_bytes + (region.calls - 1) * counted_bytes
    stated = replace(captured, external_bytes=captured.external_bytes + beside_bytes, sums_stay=False)
    if limit is not None and kept_bytes is not None:
        room_bytes = limit - max(0, bytes_over_budget(replace(stated, boundary_bytes=limit)))
        boundary_bytes = min(room_bytes, limit - stated.external_bytes - kept_bytes)
        stated = replace(stated, boundary_bytes=max(0, boundary_bytes))
    try:
        planned = kept_region_plan(stated, options.policy)
    except BudgetError as refusal:
        return replace(region, captured=replace(stated, boundary_bytes=0), planned=None, refusal=str(refusal))
    return replace(region, captured=replace(stated, boundary_bytes=0), planned=planned, refusal="")


def _left_bytes(region: RegionPlan) -> int:
    return 0 if region.planned is None else left_bytes(*region.planned)


def left_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes that a region holds on the device between forward and backward, without its inputs."""
    boundary = problem.boundary
    swaps = (spill for spill in plan.transfers if spill.kind is TransferKind.SWAP)
    away = {spill.name for spill in swaps if spill.freed_at <= boundary <= spill.prefetch_at}
    last = min(boundary + 1, len(problem.ops))
    left = [s for s in problem.storages if s.birth < boundary and s.death >= last and not is_input(s)]
    resident = [s for s in problem.storages if s.parameter in plan.resident and s.kind is Kind.PARAMETER]
    return sum(s.nbytes for s in (*left, *resident) if s.name not in away)
