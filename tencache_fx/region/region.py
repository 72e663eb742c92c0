"""What a compiled region does from call to call: see that its plan holds, time it, and have it planned anew."""

import dataclasses
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.errors import BudgetError, StoreError, TencacheError, UsageError
from tencache_fx.hardware.cache import cached
from tencache_fx.hardware.device_memory import held_bytes, most_bytes, peak_held_bytes
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_homes, follow
from tencache_fx.model_state.step_hooks import check_updates_in_backward
from tencache_fx.options import Options
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.recalibration import PhaseTimes, PreviousPlan, Scales, StoredCorrection, correct, reconsider
from tencache_fx.records import RegionRecord
from tencache_fx.region.ambient_state import unchanged
from tencache_fx.region.boundary_memory import BoundaryMemory, compilations
from tencache_fx.region.donated_inputs import DonatedInputs
from tencache_fx.region.dynamic_shapes import Footprint, SizeFormulas, Sizes
from tencache_fx.region.graph_copy import keep_numbers
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.timers import CallTimes, PhaseClock
from tencache_fx.reporting.dump import write_measured
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import open_engine
from tencache_fx.tensors import are_faked
from tencache_fx.units import format_ns

log = logging.getLogger("tencache_fx")

Compiled = Callable[..., Any]

_SET_BY_COMPILING = (
    "_compiled",
    "_learned",
    "_footprint",
    "record",
    "_captured",
    "_clock",
    "_home_names",
    "_resident",
    "_staying",
    "_updated_here",
)


class LiveRegion(ABC):
    """One captured region from its first compilation on; `compile` sets the plan and what runs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[object],
        options: Options,
        device: torch.device,
        index: int,
        homes: Mapping[int, OffloadedParameter],
        *,
        takes_fakes: bool,
    ) -> None:
        self.index = index
        self.options = options
        self.device = device
        self.between = BoundaryMemory(index, device, options.device_budget)
        self.given_up = DonatedInputs(inputs)
        self.record: RegionRecord | None = None
        self._source = gm
        self._takes_fakes = takes_fakes
        self._context = torch._guards.TracingContext.try_get()
        self._compiled: Compiled | None = None
        self._calls = CallTimes()
        self._learned: tuple[dict[str, str], StoredCorrection] = (
            {},
            StoredCorrection(),
        )  # where it is kept, and what it is
        self._rival: PreviousPlan | None = None  # the plan before this one, until this one is timed
        self._footprint: Footprint | None = None
        self._collected_at = -1  # so many compilations ago was garbage collected, for it to fit
        self._captured: Problem | None = None
        self._clock: PhaseClock | None = None
        self._may_learn = options.calibrate
        self._homes = homes  # of parameters, by their position among the inputs; another module may have others
        self._home_names: Mapping[int, str] = {}  # as the plan has them
        self._resident: frozenset[str] = frozenset()  # those of them that stay on the device
        self._staying: frozenset[str] = frozenset()  # those that have to, and are read where they are
        self._updated_here: frozenset[str] | None = None  # those whose state is there, too; None: others decide that

    @abstractmethod
    def compile(self, inputs: Sequence[Any], sizes: tuple[Sizes, Sizes] | None = None) -> None:
        """Plan and compile for `sizes`: those at hand, and those to plan for."""

    def __call__(self, *args: Any) -> Any:
        """Run the region; first plan it anew if its inputs, or what others hold, are larger than its plan allows.

        Once it has been timed at the sizes it is planned for, it is planned anew if that pays.
        Raises `BudgetError`, before anything runs, if there is no plan for these inputs, and `UsageError` for fake
        tensors where Inductor's code would read them.
        """
        if are_faked(args):
            return self._run_fakes(args)
        self._calls.note()
        homes = find_homes(args, self.device)
        if homes and torch.is_grad_enabled():
            check_updates_in_backward(homes.values())
        if homes.keys() != self._homes.keys():
            self._plan_anew(args, homes)
        self._homes, planned = homes, self.record
        self._arrange()
        if self._footprint is not None:
            formulas = self._footprint.formulas
            sizes = formulas.read(args)
            if compat.in_backward():  # what is computed again there has to save what it has saved before
                pass
            elif self.between.wants_more:  # first: a plan with less room there is no rival of one with more
                why = "others hold too much between its forward and its backward"
                self._plan_for_others(formulas, sizes, why)
            elif self.given_up.wants_fewer:
                self._plan_for_others(formulas, sizes, "its caller keeps inputs that were to leave")
            elif sizes != formulas.planned:
                self._clock = self._rival = None  # it would take other sizes for a wrong forecast
            elif self._clock is not None and (measured := self._clock.times()) is not None:
                self._learn(formulas, sizes, measured)
            if not self._fits(self._footprint, sizes):
                self._rival = None
                self._plan_again(formulas, sizes, "its plan, or what is held beside it, is over the budget")
        if self.record is not planned:
            self._arrange()
        assert self._compiled is not None
        staying = [home for index, home in homes.items() if self._home_names[index] in self._staying]
        written = [home.written_here for home in staying]
        results = self._compiled(*args)
        for home, before in zip(staying, written, strict=True):
            if home.written_here != before:  # by the region
                home.take()
        if homes and torch.is_grad_enabled():
            follow(self.device, results, {self._home_names[index]: home for index, home in homes.items()})
        return results

    def _run_fakes(self, args: Sequence[Any]) -> Any:
        """Run the graphs on fakes: nothing moves, nothing takes memory or time, and sizes may be symbols."""
        if not self._takes_fakes:
            raise UsageError(
                f"region {self.index} is called on fake tensors, and the code that Inductor has generated for it would "
                'read memory that they do not have; compile it with options={"compiler": "eager"} for that.'
            )
        self._clock = self._rival = None  # it would take this for a wrong forecast
        assert self._compiled is not None
        return self._compiled(*args)

    def _fits(self, footprint: Footprint, sizes: Sizes) -> bool:
        """Say whether the plan holds at these sizes and beside what others hold now; see that its buffers are there."""
        need, budget_bytes = footprint.at(sizes), self.options.device_budget
        assert budget_bytes is not None
        own_bytes = need.peak_bytes - footprint.held_bytes - (need.input_bytes - footprint.input_bytes)
        peak_bytes = own_bytes + held_bytes(self.device)
        if peak_bytes > budget_bytes and self._collected_at != (compiled := compilations()):
            self._collected_at = compiled
            gc.collect()  # what torch's compiler leaves behind holds on to the inputs it compiled for
            peak_bytes = own_bytes + held_bytes(self.device)
        if (over_bytes := peak_bytes - budget_bytes) > 0:
            waiting, most = REGIONS.waiting(self.device), most_bytes(self.device)
            excused = over_bytes <= sum(each.pending_bytes for each in waiting)
            if not excused or (most is not None and peak_bytes > most):
                return False
            for each in waiting:
                each.press(peak_bytes)
            log.info(
                "region %d goes %d bytes over the budget this once: others kept more for their backward than will do.",
                self.index,
                over_bytes,
            )
        if not footprint.is_reserved(sizes):
            try:
                self._reserve(footprint.plan_for(sizes))
            except (BudgetError, StoreError):
                return False
            footprint.note_reserved(sizes)
        return True

    def _plan_again(self, formulas: SizeFormulas, sizes: Sizes, why: str) -> None:
        """Compile anew for these sizes, and for the largest planned so far if there is a plan for both."""
        at = f" at {formulas.name(sizes)}" if sizes else ""
        log.info("region %d: %s%s; planning again", self.index, why, at)
        largest = tuple(map(max, sizes, formulas.planned))
        for planned in dict.fromkeys((largest, sizes)):
            try:
                self._compile_anew((sizes, planned))
                return
            except BudgetError as error:
                if planned == sizes:
                    raise BudgetError(f"region {self.index}{at}: {error}") from error

    def _compile_anew(self, sizes: tuple[Sizes, Sizes] | None) -> None:
        """Compile as `compile` does, between two steps; whoever calls the region sees nothing of that."""
        with torch._guards.tracing(self._context), unchanged(self.device):
            self.compile(self._fakes(), sizes)  # the first batch itself is not kept alive for this

    def _plan_for_others(self, formulas: SizeFormulas, sizes: Sizes, why: str) -> None:
        """Have it planned anew, for what others hold; what fails there is no reason to stop what runs."""
        self._rival, inputs = None, self.given_up.positions
        self.given_up.settle()
        try:
            self._plan_again(formulas, sizes, why)
        except (TencacheError, *compat.COMPILER_ERRORS) as error:
            self._stays(logging.WARNING, error)
            if self.given_up.positions != inputs:
                self.given_up.insist(inputs)  # with these away there may still be more room
            elif self.between.wants_more:
                self.between.give_up()

    def _arrange(self) -> None:
        """Have those parameters on the device that the plan counts on there, and no others of them.

        A region without a backward leaves those alone whose optimizer's state is there: they are held beside it.
        """
        for index, home in self._homes.items():
            name, here = self._home_names[index], self._updated_here
            if here is not None and name in here:
                home.updated_here = True
            elif here is not None:
                home.update_elsewhere()
            if name not in self._resident and not home.updated_here:
                home.leave()
        for index, home in self._homes.items():
            name = self._home_names[index]
            if name in self._resident:
                home.stay()
            if name in self._staying:  # nothing in the graph sees to it
                home.bring()

    def _plan_anew(self, args: Sequence[Any], homes: Mapping[int, OffloadedParameter]) -> None:
        """Compile anew, because other parameters than before have a home elsewhere; or all stays as it was."""
        log.info("region %d: %d of its parameters have a home; planning again", self.index, len(homes))
        formulas = None if self._footprint is None else self._footprint.formulas
        before, self._homes = self._homes, homes
        try:
            self._compile_anew(None if formulas is None else (formulas.read(args), formulas.planned))
        except BaseException:
            self._homes = before
            raise

    def _learn(self, formulas: SizeFormulas, sizes: Sizes, measured: PhaseTimes) -> None:
        """Compile once more, if the first steps took so much longer or shorter than forecast that another plan pays.

        Where none does, only the forecast is corrected. The new plan is timed in its turn; if it is slower, or fails to
        compile, the one before goes on. The next process starts from what was learned.
        """
        self._clock, self._may_learn = None, False
        assert self.record is not None
        try:
            if self._rival is not None:
                self._settle(self._rival, measured)
                return
            found = reconsider(self.record.captured, self.record.problem, self.record.plan, measured)
            if found is None:
                return
            key, earlier = self._learned
            learned = StoredCorrection(planning=found.scales.after(earlier.planning))
            cached(key, StoredCorrection, lambda: learned, renew=True)
            why = f"it takes {found.scales.forward:.2f} (forward) and {found.scales.backward:.2f} times its forecast"
            if found.pays:
                self._rival = PreviousPlan(state=self._state(), measured=measured, scales=found.scales)
                self._plan_again(formulas, sizes, why)
            else:
                log.info("region %d: %s; no other plan is faster", self.index, why)
                self._correct(found.scales)
        except (TencacheError, *compat.COMPILER_ERRORS) as error:  # a bug there is no reason to stop what runs
            level = logging.INFO if isinstance(error, (BudgetError, StoreError)) else logging.WARNING
            self._stays(level, error)
            if self._rival is not None:
                self._go_back(self._rival)

    def _settle(self, rival: PreviousPlan, measured: PhaseTimes) -> None:
        """Let the faster of two plans stay: the one that runs, and is `measured` now, or the one before."""
        self._rival = None
        was_ns, now_ns = rival.measured.total_ns, measured.total_ns
        log.info("region %d took %s, and takes %s with its new plan.", self.index, format_ns(was_ns), format_ns(now_ns))
        if now_ns > was_ns:
            self._go_back(rival)

    def _go_back(self, rival: PreviousPlan) -> None:
        """Run the plan before again; also in the next process, with the right forecast."""
        self._rival = None
        self._restore(rival.state)
        key, earlier = self._learned
        cached(key, StoredCorrection, lambda: dataclasses.replace(earlier, forecast=rival.scales), renew=True)
        self._correct(rival.scales)

    def _correct(self, scales: Scales) -> None:
        """Forecast the plan that runs with its durations scaled."""
        assert self.record is not None
        parts = correct(self.record.captured, self.record.problem, self.record.plan, scales)
        self.record = dataclasses.replace(self.record, **parts)

    def _stays(self, level: int, error: BaseException) -> None:
        """Log it, by words alone: who keeps what was logged would keep the error's frames, and the model with them."""
        log.log(level, "region %d stays as it was: %s: %s", self.index, type(error).__name__, str(error))

    def _state(self) -> tuple[Any, ...]:
        """Return all that a compilation sets."""
        return tuple(getattr(self, name) for name in _SET_BY_COMPILING)

    def _restore(self, state: tuple[Any, ...]) -> None:
        """Take a state back."""
        for name, value in zip(_SET_BY_COMPILING, state, strict=True):
            setattr(self, name, value)

    def _fakes(self) -> list[Any]:
        """Return the inputs' fakes, with the sizes torch traced the region with."""
        fakes = [node.meta["example_value"] for node in self._source.graph.find_nodes(op="placeholder")]
        return keep_numbers(fakes, self._context)

    def _reserve(self, plan: Plan) -> Engine:
        """Return the device's engine, holding the buffers and the disk that `plan` needs."""
        engine = open_engine(
            self.device,
            host_budget_bytes=self.options.host_budget,
            spill_dirs=self.options.spill_dir,
            spill_budget_bytes=self.options.spill_budget,
            checksum=self.options.checksum,
        )
        engine.reserve(pool=plan.pool, staging=plan.staging, disk_bytes=plan.forecast.disk_bytes)
        return engine

    def measured(self) -> dict[str, int | None]:
        """Return the median time from call to call, user code included, and on CUDA the peak since its last reset."""
        return {**self._calls.measured(), "device_peak_bytes": peak_held_bytes(self.device)}

    def dump_measured(self) -> None:
        """Write what was measured beside the region's record, if it is dumped."""
        if self.options.dump_dir is not None and self.record is not None:
            write_measured(self.options.dump_dir, self.index, self.measured())
