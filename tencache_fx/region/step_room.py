"""What the runs of a step need on the device where host memory has no room for all that is to leave, and no disk does.

What finds no room stays on the device. That is no harm where the device has room for it. A run that has none is refused
before the device goes over its budget: when its graph begins, or at the first storage of it that stays.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from tencache_fx.errors import BudgetError
from tencache_fx.options import Options
from tencache_fx.planning.step import Visit
from tencache_fx.planning.step_recompute import recomputed_peak_bytes
from tencache_fx.planning.step_room import CALLS_TO_COME, needed_bytes
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.region.external_memory import ExternalMemory
from tencache_fx.region.misfits import Misfits
from tencache_fx.region.step_planner import StepPlanner
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.stranded import Stranded
from tencache_fx.runtime.swap_points import SwapPoints
from tencache_fx.units import PAGE_BYTES, at_least, format_bytes, round_up

log = logging.getLogger("tencache_fx")

_SPARE = 8  # one part in so many of the budget is for gradients, and others that a backward finds beside it


class RoomCheck:
    """Checks the runs of one device's steps."""

    def __init__(self, points: SwapPoints, planner: StepPlanner, external: ExternalMemory, misfits: Misfits) -> None:
        self._points, self._planner, self._external, self._misfits = points, planner, external, misfits
        self._collected = False  # garbage, in this round
        self._reopened: set[int] = set()  # regions that may go over the budget in this round

    def begin_round(self) -> None:
        """Note that a round begins."""
        self._collected = False
        self._reopened.clear()

    def refuse_stranded(self, visit: Visit, options: Options) -> None:
        """Raise `BudgetError` if a forward that runs has no room for what was seen to stay."""
        limit = options.device_budget
        if limit is not None and (nbytes := _needed_now(visit, self._points.stranded)) > limit:
            self._refuse_unless_larger(visit, nbytes, limit, options)

    def check(self, visit: Visit, options: Options, measure: Callable[[], int]) -> Visit:
        """Return the run that begins, with what is held as `measure` says if garbage had to be collected.

        Raises `BudgetError` if it does not fit, though all leaves that can.
        """
        limit, stranded = options.device_budget, self._points.stranded
        assert limit is not None
        if _needed_now(visit, stranded) > limit and not self._collected:
            self._collected = True
            self._external.collect_garbage()
            visit = replace(visit, held_bytes=measure())
        if (more := _needed_now(visit, stranded) - limit) > 0 and stranded.host_bytes():
            self._points.make_room(more, (visit.index, visit.call))
        if (nbytes := _needed_now(visit, stranded)) <= limit:
            return visit
        if visit.peak_bytes <= limit:
            self._refuse_unless_larger(visit, nbytes, limit, options)
            return visit
        may_fit = self._planner.may_fit(visit, options)
        leaves = visit.backward and options.scope == "auto" and self._misfits.may_leave(visit.index, limit)
        if not (may_fit or leaves):
            raise _too_large(visit, limit)
        if not may_fit:
            self._misfits.note(visit.index, limit)
        log.info(
            "region %d needs %d bytes on the device this once, over the budget of %d; it is planned again, %s",
            *(visit.index, visit.peak_bytes, limit, "with more recomputed" if may_fit else "by itself"),
        )
        return visit

    def _refuse_unless_larger(self, visit: Visit, nbytes: int, limit: int, options: Options) -> None:
        """Raise `BudgetError` for want of room, unless inputs are larger than before: then more is recomputed later."""
        if visit.index in self._reopened:
            return
        if not (options.may_recompute and self._planner.choices.reopen(visit.index, visit.region)):
            raise _lack_of_room(visit, nbytes, limit, self._points)
        self._reopened.add(visit.index)
        log.warning(
            "region %d needs %d bytes on the device this once, over the budget of %d, for inputs that are larger than "
            "before while host memory is full; it recomputes more from the next step on",
            *(visit.index, nbytes, limit),
        )


def recomputed_for_room(region: SwapRegion, options: Options, points: SwapPoints) -> frozenset[str] | None:
    """Return all that a call may recompute, if neither host memory nor the device has room for what it saves.

    For calls of a step that has no plan yet. The device is taken to have room if it could hold all that is away so far,
    and what the call saves, and as much again for calls to come.
    """
    limit, engine = options.device_budget, points.engine
    if limit is None or not options.may_recompute or engine.store is not None:
        return None
    if sum(round_up(swap.nbytes, PAGE_BYTES) for swap in region.swaps) <= engine.swap_room_bytes():
        return None
    away_bytes = engine.pool.acquired_for(Use.SWAP)
    saved_bytes = away_bytes + points.extra_bytes + region.swapped_bytes
    beside_bytes = points.gauge.held_bytes() - points.extra_bytes
    peak_bytes = max(region.peak_bytes(backward=backward) for backward in (False, True))
    if beside_bytes + peak_bytes + CALLS_TO_COME * saved_bytes <= limit:
        return None
    # To recompute it all may take more in the backward than to have it come back, as it does for what leaves.
    whole_bytes = recomputed_peak_bytes(region)
    if whole_bytes > peak_bytes and beside_bytes + whole_bytes > limit - limit // _SPARE:
        return None
    return frozenset(recipe.name for recipe in region.original.recipes)


def _needed_now(visit: Visit, stranded: Stranded) -> int:
    """Return the most that a run needs with everything away that can be, but for what was seen to find no room."""
    call = visit.index, visit.call
    return needed_bytes(visit, stranded.of(call), stranded.bytes_beside(call))


def _lack_of_room(visit: Visit, nbytes: int, limit: int, points: SwapPoints) -> BudgetError:
    """Return the error that refuses a run which needs so many bytes, of which some found no room in host memory."""
    host_bytes, over_bytes = points.engine.pool.budget_bytes, nbytes - limit
    wanted_bytes = points.stranded.host_bytes()
    follow = f"\n  Each forward like it that follows saves up to {visit.region.swapped_bytes} bytes, which come on top."
    return BudgetError(
        f"the {'backward' if visit.backward else 'forward'} of region {visit.index}, call {visit.call} of the step,"
        f" needs {format_bytes(nbytes)} on the device, {over_bytes} bytes more than device_budget, which is "
        f"{format_bytes(limit)}: {wanted_bytes} bytes of what should leave it find no room in host memory, for "
        f"host_budget is {format_bytes(host_bytes)}.\n"
        f"  Set host_budget to {at_least(host_bytes + wanted_bytes)} or more, device_budget to {at_least(nbytes)} or "
        f"more, set spill_dir, or shrink the batch.{'' if visit.backward else follow}"
    )


def _too_large(visit: Visit, limit: int) -> BudgetError:
    """Return the error that refuses a run which does not fit with everything away that can be."""
    return BudgetError(
        f"the {'backward' if visit.backward else 'forward'} of region {visit.index}, call {visit.call} of the step,"
        f" needs {format_bytes(visit.peak_bytes)} on the device, with everything offloaded that may be; the "
        f"budget is {format_bytes(limit)}.\n"
        f"  Held there when it begins: {format_bytes(visit.held_bytes)}.\n"
        f"  Set device_budget to {at_least(visit.peak_bytes)} or more, or shrink the batch."
    )
