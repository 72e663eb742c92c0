"""One region from its first compilation on: from call to call its plan is checked, timed, and made again."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tencache_fx import compat
from tencache_fx.errors import BudgetError, StoreError, TencacheError, UsageError
from tencache_fx.hardware.device_memory import peak_held_bytes
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import evict_residents, follow
from tencache_fx.model_state.step_hooks import check_updates_in_backward
from tencache_fx.planning.external import update_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.tuning import SPLITS
from tencache_fx.records import RegionRecord
from tencache_fx.region.accumulation import AccumulationMonitor
from tencache_fx.region.boundary_memory import BoundaryMemory
from tencache_fx.region.budget_check import BudgetCheck
from tencache_fx.region.changed_budgets import ChangedBudgets
from tencache_fx.region.checkpointed_calls import CheckpointedCalls
from tencache_fx.region.compilation import compile_region
from tencache_fx.region.compiled_region import CompiledRegion, Monitor, Request
from tencache_fx.region.current_options import CurrentOptions
from tencache_fx.region.donated_inputs import DonatedInputs
from tencache_fx.region.dynamic_shapes import Footprint, NamedSizes, SizeFormulas
from tencache_fx.region.host_clock import HostClock
from tencache_fx.region.recalibrator import Recalibrator
from tencache_fx.region.scope import Scope
from tencache_fx.region.source import RegionSource
from tencache_fx.region.step_monitor import StepMonitor
from tencache_fx.region.timers import CallTimes
from tencache_fx.reporting.dump import write_measured
from tencache_fx.runtime.engine_registry import leave_for_updates

log = logging.getLogger("tencache_fx")


class Region:
    """A region that runs: `current` is how it does so now, `monitors` are why that may change.

    `offloaded` are the offloaded parameters among the `inputs`, by position: in each call the same positions, though
    another module has others there. A region that is compiled as another one `runs` is planned for the same sizes.
    """

    def __init__(
        self,
        source: RegionSource,
        inputs: Sequence[Any],
        offloaded: Mapping[int, OffloadedParameter],
        runs: "Region | None" = None,
    ) -> None:
        self.index, self.device = source.index, source.device
        self.boundary_memory = BoundaryMemory(source.index, source.device, source.options.device_budget)
        self.donated_inputs = DonatedInputs(inputs, source.last_read)
        self._options = CurrentOptions(source)
        self.step = StepMonitor(source, self._options)
        self.scope = Scope(source, inputs, self.step)
        self.accumulation = AccumulationMonitor()
        self.recalibrator = Recalibrator(source.index, enabled=source.options.calibrate)
        self.host_clock = HostClock(source.device)
        self.budgets = ChangedBudgets(self._options)
        self._source, self._offloaded = source, offloaded
        self._check = BudgetCheck(source, self._options)
        self._calls, self._checkpointed = CallTimes(), CheckpointedCalls()
        self._planned_budget: int | None = None
        if runs is None:
            self.current = self._or_alone(lambda: self._compile(inputs, offloaded, None))
        else:
            sizes = runs._sizes_of(inputs)
            self.current = self._or_alone(lambda: self._compile_between_steps(offloaded, sizes))

    @property
    def record(self) -> RegionRecord | None:
        """The region's plan, for reports; None if it runs without one."""
        return self.current.record

    @property
    def in_steps(self) -> bool:
        """Whether a schedule of the step decides what its swap points do."""
        return self.current.swap_region is not None

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The monitors that may have the region planned again, the most urgent first; one is heard in a call.

        A plan with less room between the graphs is no rival of one with more: times are compared last.
        """
        if self.scope.by_step:
            return self.scope, self.step
        beside = self.boundary_memory, self.accumulation, self.budgets, self.recalibrator, self.host_clock
        return self.scope, self.donated_inputs, *beside

    def run(self, args: Sequence[Any], offloaded: Mapping[int, OffloadedParameter]) -> Any:
        """Run the region; first plan it again if its inputs, or external memory, are larger than its plan allows.

        Once it has been timed at the sizes it is planned for, it is planned again if that pays.
        Raises `BudgetError`, before anything runs, if there is no plan for these inputs.
        """
        self._calls.note()
        if offloaded and torch.is_grad_enabled():
            check_updates_in_backward(offloaded.values())
        self._offloaded, placed = offloaded, self.current
        placed.placement.apply(offloaded)
        if self.current.footprint is not None:
            self._review(args)
        current = self._checkpointed.choose(self.current)
        self.step.enter(current, args)
        if self.scope.by_step and self.step.device_budget != self._planned_budget:
            self._leave_for_updates(self.step.device_budget, None)
        if current is not placed:
            current.placement.apply(offloaded)
        names = current.placement.names
        staying = [each for index, each in offloaded.items() if names[index] in current.placement.staying]
        written = [each.device_version for each in staying]
        results = current.run(*args)
        for each, before in zip(staying, written, strict=True):
            if each.device_version != before:  # by the region
                each.write_back()
        if offloaded and torch.is_grad_enabled():
            follow(self.device, results, {names[index]: each for index, each in offloaded.items()})
        return results

    def run_fakes(self, args: Sequence[Any]) -> Any:
        """Run the graphs on fakes: nothing moves, nothing takes memory or time, and sizes may be symbols.

        Raises `UsageError` where Inductor's code would read them.
        """
        if not self._source.takes_fakes:
            raise UsageError(
                f"region {self.index} is called on fake tensors, and the code that Inductor has generated for it would "
                'read memory that they do not have; compile it with options={"compiler": "eager"} for that.'
            )
        self.recalibrator.stop(self.current)  # it would take this for a wrong forecast
        return self.current.run(*args)

    def measured(self) -> dict[str, int | None]:
        """Return the median time from call to call, user code included, and on CUDA the peak since its last reset.

        With it come the median times of the plan's graphs, and of the host's work on them, once they are known.
        """
        times, host_ns = self.recalibrator.times, None if self.scope.by_step else self.host_clock.host_ns
        phases = {} if times is None else {"forward_ns": times.forward_ns, "backward_ns": times.backward_ns}
        host = {} if host_ns is None else {"host_ns": host_ns}
        return {**self._calls.measured(), **phases, **host, "device_peak_bytes": peak_held_bytes(self.device)}

    def dump_measured(self) -> None:
        """Write what was measured beside the region's record, if it is dumped."""
        if self._source.options.dump_dir is not None and self.record is not None:
            write_measured(self._source.options.dump_dir, self.index, self.measured())

    def _review(self, args: Sequence[Any]) -> None:
        """Plan the region again if a monitor says so, and then if its plan does not fit.

        No monitor is asked in a backward: what is computed again there has to save what it saved before.
        """
        # Under other hooks than those of a checkpoint a backward runs, and nothing again.
        fixed = compat.in_backward() or (self._checkpointed.under_way and not self.scope.ran_backward)
        for monitor in () if fixed else self.monitors:
            before = self.current
            try:
                verdict = monitor.review(self.current, self._formulas.read(args))
                if isinstance(verdict, CompiledRegion):
                    self.current = verdict
                    continue
                self._plan_again(args, verdict)
                if monitor is self.step:
                    self._follow_step(args)
            except (TencacheError, *compat.COMPILER_ERRORS) as error:  # no reason to stop what runs
                expected = monitor.optional and isinstance(error, (BudgetError, StoreError))
                # By its words alone: who keeps what was logged would keep the error's frames, and the model with them.
                log.log(
                    logging.INFO if expected else logging.WARNING,
                    "region %d stays as it was: %s: %s",
                    self.index,
                    type(error).__name__,
                    str(error),
                )
                self.current = monitor.on_refusal(before)
            break
        self.step.enter(self.current, args)
        if not fixed and self.scope.leaves_step():
            self._leave_step(args)
        elif not self.in_steps:
            self._fit(args, fixed=fixed)

    def _fit(self, args: Sequence[Any], *, fixed: bool) -> None:
        """Plan the region again if its plan does not fit at these sizes, beside the external memory there is.

        Where its plan is `fixed`, by what ran before, only sizes are a reason.
        """
        if not fixed and not self.budgets.fits(self.current):
            self._plan_again(args, "its plan is over the budget of host memory or disk that was configured")
        sizes, external_bytes = self._formulas.read(args), None if fixed else self.scope.last_external_bytes
        if self._check.passes(self._footprint, sizes, external_bytes):
            return
        if external_bytes is not None:
            if self.scope.is_excused:
                return
            self.scope.collect_garbage()
            if self._check.passes(self._footprint, sizes, self.scope.last_external_bytes):
                return
        reason = "its plan, or what is held beside it, is over the budget"
        try:
            self._plan_again(args, reason)
        except BudgetError:
            if external_bytes is None:
                raise
            self.scope.forget_turn_before()
            try:
                self._plan_again(args, reason)
            except BudgetError as error:
                if not self.scope.excuses():
                    raise
                log.warning(
                    "%s\n  It runs this time, because the memory held beside it may be free in the next step. "
                    "It is refused if that is not so for several steps.",
                    str(error),
                )

    def _leave_step(self, args: Sequence[Any]) -> None:
        """Plan the region by itself; if it has no plan that way either, go on: the step is refused if that recurs."""
        before = self.current
        self.scope.collect_garbage()
        try:
            self._plan_again(args, "it does not fit while storages are away only between its graphs")
        except BudgetError as error:
            log.info("region %d stays with its step: %s", self.index, str(error))
            self.current = self.scope.on_refusal(before)
            self.step.note_stuck()
            self.step.enter(self.current, args)

    @property
    def _footprint(self) -> Footprint:
        """What the region needs at any sizes, where it has a plan."""
        assert self.current.footprint is not None
        return self.current.footprint

    @property
    def _formulas(self) -> SizeFormulas:
        """The sizes of the region as it is compiled now: compiling it again may find symbols constant."""
        return self._footprint.formulas

    def _follow_step(self, args: Sequence[Any]) -> None:
        """Plan the region again if what its step recomputes was chosen again, for what came of compiling it."""
        for _ in range(SPLITS):
            verdict = self.step.review(self.current, self._formulas.read(args))
            if isinstance(verdict, CompiledRegion):
                self.current = verdict
                break
            self._plan_again(args, verdict)

    def _plan_again(self, args: Sequence[Any], reason: str) -> None:
        """Compile again for these sizes, and for the largest planned so far if there is a plan for both."""
        formulas = self._formulas
        sizes = formulas.read(args)
        at = f" at {formulas.name(sizes)}" if sizes else ""
        log.info("region %d: %s%s; planning again", self.index, reason, at)
        largest = tuple(map(max, sizes, formulas.planned))
        for planned in dict.fromkeys((largest, sizes)):
            try:
                named = formulas.named(sizes), formulas.named(planned)
                self.current = self._compile_between_steps(self._offloaded, named)
                return
            except BudgetError as error:
                if planned == sizes:
                    raise BudgetError(f"region {self.index}{at}: {error}") from error

    def _sizes_of(self, args: Sequence[Any]) -> tuple[NamedSizes, NamedSizes] | None:
        """Return the sizes of these inputs, and those that the region is planned for; None if it does not know."""
        if self.current.footprint is None:
            return None
        formulas = self._formulas
        return formulas.named(formulas.read(args)), formulas.named(formulas.planned)

    def _compile_between_steps(
        self, offloaded: Mapping[int, OffloadedParameter], sizes: tuple[NamedSizes, NamedSizes] | None
    ) -> CompiledRegion:
        """Compile again as the region runs; whoever calls it sees nothing of that."""
        with compat.compile_lock(), self._source.as_captured():
            return self._compile(self._source.fakes(), offloaded, sizes)  # the first batch is not kept alive for this

    def _or_alone(self, compile_it: Callable[[], CompiledRegion]) -> CompiledRegion:
        """Compile the region; by itself, if it was only guessed to be a part, and has no plan as one."""
        try:
            return compile_it()
        except BudgetError:
            if not self.scope.plan_alone():
                raise
            return compile_it()

    def _compile(
        self,
        inputs: Sequence[Any],
        offloaded: Mapping[int, OffloadedParameter],
        sizes: tuple[NamedSizes, NamedSizes] | None,
    ) -> CompiledRegion:
        by_step, source = self.scope.by_step, self._options.source
        request = Request(
            offloaded=offloaded,
            sizes=sizes,
            donated=self.donated_inputs.positions,
            boundary_bytes=self.boundary_memory.wanted_bytes,
            external_bytes=None if by_step else self.scope.external_bytes,
            compares=self.recalibrator.compares and not by_step,
            may_learn=self.recalibrator.may_learn and not by_step,
            accumulation=self.accumulation.expected,
            adds=self.accumulation.adds and not by_step,
            by_step=by_step,
            recomputed=self.step.recomputed if by_step else None,
        )
        try:
            compiled = compile_region(source, inputs, request, self.monitors)
        except BudgetError:  # beside parameters that stay by the plans of steps
            if not evict_residents(self.device):
                raise
            compiled = compile_region(source, inputs, request, self.monitors)
        for monitor in self.monitors:
            monitor.on_compiled(request, compiled)
        if by_step:
            self._leave_for_updates(self.step.device_budget, None)
        else:
            own = None if compiled.record is None else compiled.record.problem
            self._leave_for_updates(self._source.options.device_budget, own)
        return compiled

    def _leave_for_updates(self, budget: int | None, problem: Problem | None) -> None:
        """Let optimizers know what plans within `budget` leave free, by the `problem` of a plan of this region alone.

        A step leaves what the region with the least budget does: so it counts as long as that lives, whatever else ran.
        """
        self._planned_budget = budget
        leave_for_updates(self, self.device, None if budget is None else update_bytes(budget, problem))
