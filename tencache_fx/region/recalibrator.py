"""Compares the first steps of a plan with its forecast: the region is planned again where another plan would pay."""

import dataclasses
import logging
from dataclasses import dataclass

from tencache_fx.hardware.cache import cached
from tencache_fx.kept_code import Phase
from tencache_fx.planning.recalibration import PhaseTimes, Scales, StoredCorrection, reconsider
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan
from tencache_fx.region.dynamic_shapes import Sizes
from tencache_fx.units import format_ns

log = logging.getLogger("tencache_fx")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousPlan:
    """A region under its plan before, how long that took, and the scales that explain it."""

    compiled: CompiledRegion
    measured: PhaseTimes
    scales: Scales


class Recalibrator:
    """The monitor of one region's time.

    Where the forecast was wrong and no other plan pays, only the forecast is corrected. A new plan is timed in its
    turn; if it is slower, or fails to compile, the one before goes on. The next process starts from what was learned.
    `times` are those of the plan that runs, once it has been timed.
    """

    optional = True

    def __init__(self, index: int, *, enabled: bool) -> None:
        self.may_learn = enabled
        self.times: PhaseTimes | None = None
        self._index = index
        self._proposed: PreviousPlan | None = None  # the plan that runs, while the region is planned again
        self._previous: PreviousPlan | None = None  # the plan before this one, until this one is timed

    @property
    def compares(self) -> bool:
        """Whether the next plan is to be timed, so that the faster one stays."""
        return self._proposed is not None

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, timed if this plan is to be."""
        return run if written.clock is None else written.clock.timed(phase, run)

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return the plan to go on with, or how far its forecast is off; times at other sizes would tell nothing.

        Raises `BudgetError` if, close to the floor, there is no other plan.
        """
        if current.footprint is None or current.clock is None:
            return current
        if sizes != current.footprint.formulas.planned:
            self.stop(current)
        if (measured := current.clock.times()) is None:
            return current
        current.clock.stop()
        self.may_learn, self.times = False, measured
        previous, self._previous = self._previous, None
        return self._assess(current, measured) if previous is None else self._faster(current, measured, previous)

    def stop(self, current: CompiledRegion) -> None:
        """Time the region no more: a call is of other sizes, or of fake tensors."""
        self._previous = None
        if current.clock is not None:
            current.clock.stop()

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Have the new plan compared with the one before, if it was planned for its time, and moves anything."""
        self._previous = self._proposed if compiled.clock is not None else None
        self._proposed = self.times = None

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Return the plan that runs, with the right forecast."""
        proposed, self._proposed = self._proposed, None
        return current if proposed is None else self._go_back(proposed)

    def _assess(self, current: CompiledRegion, measured: PhaseTimes) -> CompiledRegion | str:
        """Keep what the first steps teach; planning again may pay by now."""
        assert current.record is not None
        record = current.record
        found = reconsider(record.captured, record.problem, record.plan, measured)
        if found is None:
            return current
        known = current.correction
        if found.pays or found.scales.are_bounds:
            learned = StoredCorrection(planning=found.scales.after(known.planning))
        else:  # the next process plans as this one has, and finds what was compiled for that
            learned = StoredCorrection(planning=known.planning, forecast=found.scales)
        cached(current.correction_key, StoredCorrection, lambda: learned, renew=True)
        reason = f"it takes {found.scales.forward:.2f} (forward) and {found.scales.backward:.2f} times its forecast"
        if found.pays:
            self._proposed = PreviousPlan(compiled=current, measured=measured, scales=found.scales)
            return reason
        log.info("region %d: %s; no other plan is faster", self._index, reason)
        return current.corrected(found.scales)

    def _faster(self, current: CompiledRegion, measured: PhaseTimes, previous: PreviousPlan) -> CompiledRegion:
        """Return the faster of two plans: the one that runs, and is `measured` now, or the one before."""
        was_ns, now_ns = previous.measured.total_ns, measured.total_ns
        log.info(
            "region %d took %s, and takes %s with its new plan.", self._index, format_ns(was_ns), format_ns(now_ns)
        )
        return self._go_back(previous) if now_ns > was_ns else current

    def _go_back(self, previous: PreviousPlan) -> CompiledRegion:
        """Return the plan before, with the right forecast: also for the next process."""
        compiled, self.times = previous.compiled, previous.measured
        kept = dataclasses.replace(compiled.correction, forecast=previous.scales)
        cached(compiled.correction_key, StoredCorrection, lambda: kept, renew=True)
        return compiled.corrected(previous.scales)
