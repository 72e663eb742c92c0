"""The value that a compilation yields: going back to an earlier plan is keeping a reference to it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tencache_fx.kept_code import Phase
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.planning.recalibration import Scales, StoredCorrection, correct
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.records import RegionRecord
from tencache_fx.region.dynamic_shapes import Footprint, NamedSizes, Sizes
from tencache_fx.region.step_recorder import StepRecorder
from tencache_fx.region.timers import PhaseClock

Compiled = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request for one compilation.

    `sizes` are those at hand, and those to plan for, if these differ. `offloaded` are the offloaded parameters by their
    positions among the inputs, `donated` the positions of inputs that the caller is expected to free after the forward,
    `boundary_bytes` what is to be free between the graphs. `external_bytes` others hold beside a region that is planned
    by itself among them, where no allocator counts that. The plan is timed if another plan is to be compared with it
    (`compares`), or if its forecast was never corrected and may be (`may_learn`). `accumulation` is how many backwards
    come before an update, once that was seen; gradients that are added to earlier ones (`adds`) have room beside them
    in host memory. A region planned `by_step`, together with the others of its step, is given what is to be
    `recomputed`, once that is decided.
    """

    offloaded: Mapping[int, OffloadedParameter]
    sizes: tuple[NamedSizes, NamedSizes] | None = None
    donated: frozenset[int] = frozenset()
    boundary_bytes: int = 0
    external_bytes: int | None = None
    compares: bool = False
    may_learn: bool = False
    accumulation: int | None = None
    adds: bool = False
    by_step: bool = False
    recomputed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPlan:
    """A plan that was written into the graphs, as monitors know it.

    `donated` are the positions of donated inputs that it offloads; `clock` times its graphs, if that is wanted. A
    `recorder` of steps is told when they run, if a schedule decides what its swap points do.
    """

    donated: frozenset[int] = frozenset()
    clock: PhaseClock | None = None
    recorder: StepRecorder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a plan has the offloaded parameters, named by `names` for their positions among the inputs.

    The `resident` ones stay on the device; the `staying` ones among them have to, and are read where they are. Those
    `updated_here` have their optimizer's state there, too; None in a region without a backward, which does not decide
    that. Of a region planned `by_step` the steps decide all but which are `staying`.
    """

    names: Mapping[int, str]
    resident: frozenset[str] = frozenset()
    staying: frozenset[str] = frozenset()
    updated_here: frozenset[str] | None = None
    by_step: bool = False

    def apply(self, offloaded: Mapping[int, OffloadedParameter]) -> None:
        """Have those parameters on the device that the plan counts on there, and no others of them.

        A region without a backward does not touch those whose optimizer's state is there: they are held beside it. So
        are those that stay in steps.
        """
        for index, each in offloaded.items():
            if each.planned_by_step and (self.by_step or self.updated_here is None):
                continue
            each.planned_by_step = False
            if self.updated_here is not None and self.names[index] in self.updated_here:
                each.updated_on_device = True
            elif self.updated_here is not None:
                each.update_on_host()
            if self.names[index] not in self.resident and not each.updated_on_device:
                each.unpin()
        for index, each in offloaded.items():
            if self.names[index] in self.resident:
                each.pin()
            if self.names[index] in self.staying:  # nothing in the graph sees to it
                each.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRegion:
    """A region as it runs. Without a plan, because sizes are known only when it runs, there is no `record`.

    `footprint` tells what it needs at other sizes, if there is a device budget. `correction` is the correction of its
    durations by earlier runs, kept under `correction_key`. A region with swap points is planned with the others of
    its step, as `swap_region`.
    """

    run: Compiled
    placement: Placement
    record: RegionRecord | None = None
    footprint: Footprint | None = None
    correction: StoredCorrection = dataclasses.field(default_factory=StoredCorrection)
    correction_key: Mapping[str, str] = dataclasses.field(default_factory=dict)
    clock: PhaseClock | None = None
    swap_region: SwapRegion | None = None

    def corrected(self, scales: Scales) -> "CompiledRegion":
        """Return the same plan, forecast with its durations scaled."""
        assert self.record is not None
        parts = correct(self.record.captured, self.record.problem, self.record.plan, scales)
        return dataclasses.replace(self, record=dataclasses.replace(self.record, **parts))


class Monitor(Protocol):
    """Watches one thing that a plan counts on, from call to call."""

    @property
    def optional(self) -> bool:
        """Whether planning again for it is only for speed: if there is no such plan, nobody has to act."""

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, the region's graph of this phase, watched; boxed if `run` is."""

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return the compiled region to go on with at these sizes, or the reason to plan it again, before each run."""

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Note that the region was compiled, for whatever reason."""

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Return the compiled region to go on with after planning again failed; the same reason never comes again."""


def keep_boxed(run: Compiled, watched: Compiled) -> Compiled:
    """Return `watched`, which calls `run`, and takes its arguments as `run` does: in a list, if it is boxed."""
    watched._boxed_call = getattr(run, "_boxed_call", False)  # type: ignore[attr-defined]
    return watched
