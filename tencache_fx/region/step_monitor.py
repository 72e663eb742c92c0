"""Tells the recorder of steps when a region's graphs run: the monitor of a region that is planned with others."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tencache_fx import compat
from tencache_fx.kept_code import Phase
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan, keep_boxed
from tencache_fx.region.current_options import CurrentOptions
from tencache_fx.region.dynamic_shapes import Sizes
from tencache_fx.region.external_memory import ExternalMemory
from tencache_fx.region.source import RegionSource
from tencache_fx.region.step_recorder import StepRecorder, recorder_of
from tencache_fx.runtime.engine_registry import open_swap_points

_SIZES = 64  # remembered


class StepMonitor:
    """The monitor of one region; it has the region planned again for what the step is to recompute.

    What it was compiled for is `_kept`, by what that recomputes: other calls of the step may recompute less.
    """

    optional = True

    def __init__(self, source: RegionSource, current_options: CurrentOptions) -> None:
        self._source, self._current_options = source, current_options
        self._current: CompiledRegion | None = None
        self._kept: dict[frozenset[str], CompiledRegion] = {}
        self._sizes: Sizes | None = None
        self._resized: dict[tuple[frozenset[str], Sizes], SwapRegion] = {}
        self._recorder: StepRecorder | None = None
        self._refused = False

    @property
    def recomputed(self) -> frozenset[str] | None:
        """The storages that the next call of the region is to recompute; None if that is not decided yet."""
        if self._recorder is None or self._refused:
            return None
        return self._recorder.recomputed_next(
            self._source.index,
            None if self._current is None or self._current.swap_region is None else self._region(),
            self._current_options.of_step,
            checkpointed=compat.saves_by_hooks(),
        )

    @property
    def is_alone(self) -> bool:
        """Whether the last steps have run no other region, and moved or recomputed something."""
        return self._recorder is not None and self._recorder.is_alone(self._source.index)

    @property
    def is_too_large(self) -> bool:
        """Whether a call that has no plan yet would be over the budget, as far as is known before it runs."""
        if self._recorder is None:
            return False
        return self._recorder.is_over(self._source.index, self._region(), self._current_options.of_step)

    @property
    def device_budget(self) -> int | None:
        """The device budget in bytes that counts now."""
        return self._current_options.of_step.device_budget

    @property
    def external(self) -> ExternalMemory | None:
        """The external memory of the regions of the step; None where an allocator counts that, or no step was seen."""
        if self._recorder is None:
            mine = (points for points in open_swap_points() if points.engine.device == self._source.device)
            if (found := next(map(recorder_of, mine), None)) is not None:
                self._attach(found)
        return self._recorder.external if self._recorder is not None and self._recorder.external.counts else None

    def note_stuck(self) -> None:
        """Note that the region has no plan by itself: from now on its step is refused if it does not fit."""
        if self._recorder is not None and (limit := self.device_budget) is not None:
            self._recorder.misfits.note_stuck(self._source.index, limit)

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, the region's forward or backward, told of; boxed if `run` is."""
        if written.recorder is None or phase == "inference":
            return run
        recorder = written.recorder
        recorder.has_new_code = True
        self._attach(recorder)

        def told_run(*args: Any) -> Any:
            call = None
            try:
                if phase == "backward":
                    recorder.begin_backward(self._source.index, args)
                else:
                    options = self._current_options.of_step
                    call = recorder.begin_forward(self._source.index, self._region(), options, args)
                results = run(*args)
            except BaseException:
                recorder.fail()
                raise
            recorder.end(call, (results,))
            return results

        return keep_boxed(run, told_run)

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return the region to go on with, or a reason to plan it again if other storages are to be recomputed."""
        if self._recorder is not None:
            self._recorder.settle(self._current_options.of_step if current.swap_region is not None else None)
        recomputed = self.recomputed
        if current.swap_region is None or recomputed is None or recomputed == current.swap_region.recomputed:
            return current
        return self._kept.get(recomputed, "the step is faster if it recomputes other storages")

    def enter(self, current: CompiledRegion, args: Sequence[Any]) -> None:
        """Note how the region runs in the call that begins; nobody is told of one that is planned by itself."""
        if current.swap_region is not None:
            self._current = current
            self._sizes = None if current.footprint is None else current.footprint.formulas.read(args)

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Keep what was compiled, and what was compiled before for other calls of the same steps."""
        wanted = () if self._recorder is None else self._recorder.recomputed_ever(self._source.index)
        before = {names: each for names, each in self._kept.items() if names in wanted}
        self._current, self._kept, self._resized = compiled, before, {}
        if compiled.swap_region is not None:
            self._kept[compiled.swap_region.recomputed] = compiled
            if self._recorder is not None:
                self._recorder.check_choice(self._source.index, compiled.swap_region)

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Go on as it was compiled first."""
        self._refused = True
        return current

    def _attach(self, recorder: StepRecorder) -> None:
        """Have a recorder know of the region, until nothing is left of it."""
        if recorder is not self._recorder:
            self._recorder = recorder
            recorder.watch(self, self._source.index)

    def _region(self) -> SwapRegion:
        """Return the region at the sizes of the call that begins."""
        assert self._current is not None
        assert self._current.swap_region is not None
        region, footprint = self._current.swap_region, self._current.footprint
        if footprint is None or self._sizes is None or self._sizes == footprint.formulas.planned:
            return region
        key = region.recomputed, self._sizes
        if key not in self._resized:
            if len(self._resized) >= _SIZES:
                self._resized.clear()
            formulas = footprint.formulas
            resize = partial(formulas.resize, before=formulas.planned, after=self._sizes)
            self._resized[key] = region.resized(resize)
        return self._resized[key]
