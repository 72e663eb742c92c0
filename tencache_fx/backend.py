"""`torch.compile(model, backend="tencache")`: the pipeline, top to bottom.

tencache()        torch.compile hands over one captured region
Region            compiles it, and again if more device memory is held beside it than the plan was made for
Region.partition  joint graph -> forward and backward -> plan (-> more recomputed: once more) -> rewritten graphs
Region.lower      one graph -> Inductor (or eager), its order pinned and checked
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.cache import cached
from tencache_fx.capture import Capture, main_device
from tencache_fx.drafts import ATTEMPTS, Draft, Drafts, Halves
from tencache_fx.dump import Listing, RegionRecord, write_measured, write_region
from tencache_fx.errors import BudgetError, StoreError, TencacheError
from tencache_fx.feedback import Learned, PhaseTimes, Rival, Scales, correct, reconsider
from tencache_fx.memory import (
    avoid_fragmentation,
    held_bytes,
    open_workspaces,
    peak_held_bytes,
)
from tencache_fx.ops import RUNTIME_OPS
from tencache_fx.options import Options
from tencache_fx.passes.code_interface import Interface, read_interface
from tencache_fx.passes.listing import list_graph
from tencache_fx.passes.order import PinOrder
from tencache_fx.passes.transfers import insert_transfers
from tencache_fx.passes.verify_code import planned_calls, verify_code
from tencache_fx.passes.verify_graph import verify_graphs
from tencache_fx.passes.verify_plan import verify_plan
from tencache_fx.phases import CallTimes, PhaseClock
from tencache_fx.plan import Plan, Problem, Way
from tencache_fx.register import REGIONS
from tencache_fx.runtime import kernels as _kernels  # noqa: F401  (registers the ops' kernels)
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.homes import Home
from tencache_fx.runtime.registry import find_homes, open_engine, usage
from tencache_fx.sizes import Footprint, SizeFormulas, Sizes, at_hints
from tencache_fx.tables import format_ns, show_summary

log = logging.getLogger("tencache_fx")

Compiled = Callable[..., Any]
Phase = Literal["forward", "backward", "inference"]


def tencache(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one region of a model so that it runs within its memory budgets: a `torch.compile` backend.

    Raises `OptionError` for options it cannot use, `BudgetError` if no plan fits, both before anything runs.
    """
    device = main_device((*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)))
    own = usage(device)
    resolved = Options.resolve(options, device=device, own_host_bytes=own.host_bytes, own_disk_bytes=own.disk_bytes)
    settings = compat.inductor_settings(mode, dict(resolved.inductor))
    region = Region(gm, resolved, device, settings, find_homes(example_inputs, device))
    region.compile(example_inputs)
    if region.record is not None and region.record.plan.spills and (lost := compat.overruled(settings)):
        log.warning("region %d has a plan, and so it runs without %s.", region.index, ", ".join(lost))
    REGIONS.add(region)
    return region


class Region:
    """One captured region: what it was compiled from, its plan, and the compiled function (it is callable)."""

    def __init__(
        self,
        gm: fx.GraphModule,
        options: Options,
        device: torch.device,
        settings: Mapping[str, Any],
        homes: Mapping[int, Home],
    ) -> None:
        self.index = REGIONS.next_index()
        self.options = options
        self.device = device
        self.record: RegionRecord | None = None
        self._source = gm
        self._settings = settings
        self._name = str(torch._guards.CompileContext.current_compile_id() or "")
        self._context = torch._guards.TracingContext.try_get()
        self._compiled: Compiled | None = None
        self._calls = CallTimes()
        self._draft: Draft | None = None  # while it is compiled
        self._learned: tuple[dict[str, str], Learned] = {}, Learned()  # where it is kept, and what it is
        self._rival: Rival | None = None  # the plan before this one, until this one is timed
        self._footprint: Footprint | None = None
        self._captured: Problem | None = None
        self._clock: PhaseClock | None = None
        self._may_learn = options.calibrate
        self._code: list[tuple[Interface, str | None]] = []
        self._homes = homes  # of parameters, by their position among the inputs
        self._staying: tuple[Home, ...] = ()  # those that are read where they are

    def __call__(self, *args: Any) -> Any:
        """Run the region; first plan it anew if its inputs, or what others hold, are larger than its plan allows.

        Once it has been timed at the sizes it is planned for, it is planned anew if that pays.
        Raises `BudgetError`, before anything runs, if there is no plan for these inputs.
        """
        self._calls.note()
        if (homes := find_homes(args, self.device)).keys() != self._homes.keys():
            self._homes = homes
            self._plan_anew(args)
        self._arrange()
        if self._footprint is not None:
            formulas = self._footprint.formulas
            sizes = formulas.read(args)
            if sizes != formulas.planned:
                self._clock = self._rival = None  # it would take other sizes for a wrong forecast
            elif self._clock is not None and (measured := self._clock.times()) is not None:
                self._learn(formulas, sizes, measured)
            if not self._fits(self._footprint, sizes):
                self._rival = None
                self._plan_again(formulas, sizes, "its plan, or what is held beside it, is over the budget")
        assert self._compiled is not None
        return self._compiled(*args)

    def _fits(self, footprint: Footprint, sizes: Sizes) -> bool:
        """Say whether the plan holds at these sizes and beside what others hold now; see that its buffers are there."""
        need = footprint.at(sizes)
        more_beside = held_bytes(self.device) - footprint.held_bytes - (need.input_bytes - footprint.input_bytes)
        assert self.options.device_budget is not None
        if need.peak_bytes + more_beside > self.options.device_budget:
            return False
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
                with torch._guards.tracing(self._context):
                    # The first batch itself is not kept alive for this.
                    self.compile(self._fakes(), (sizes, planned))
                return
            except BudgetError as error:
                if planned == sizes:
                    raise BudgetError(f"region {self.index}{at}: {error}") from error

    def _arrange(self) -> None:
        """Have the parameters on the device that the plan counts on there."""
        if self._homes and self.record is not None:
            homes = open_engine(self.device, host_budget_bytes=self.options.host_budget).homes
            homes.arrange(self.index, self._homes.values(), self.record.plan.resident)
            for home in self._staying:
                home.bring()

    def _plan_anew(self, args: Sequence[Any]) -> None:
        """Compile anew, because other parameters than before have a home elsewhere."""
        log.info("region %d: %d of its parameters have a home; planning again", self.index, len(self._homes))
        formulas = None if self._footprint is None else self._footprint.formulas
        with torch._guards.tracing(self._context):
            self.compile(self._fakes(), None if formulas is None else (formulas.read(args), formulas.planned))

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
            learned = Learned(planning=found.scales.after(earlier.planning))
            cached(key, Learned, lambda: learned, renew=True)
            why = f"it takes {found.scales.forward:.2f} (forward) and {found.scales.backward:.2f} times its forecast"
            if found.pays:
                self._rival = Rival(state=self._state(), measured=measured, scales=found.scales)
                self._plan_again(formulas, sizes, why)
            else:
                log.info("region %d: %s; no other plan is faster", self.index, why)
                self._correct(found.scales)
        except (TencacheError, *compat.COMPILER_ERRORS) as error:  # a bug there is no reason to stop what runs
            level = logging.INFO if isinstance(error, (BudgetError, StoreError)) else logging.WARNING
            log.log(level, "region %d stays as it was: %s: %s", self.index, type(error).__name__, error)
            if self._rival is not None:
                self._go_back(self._rival)

    def _settle(self, rival: Rival, measured: PhaseTimes) -> None:
        """Let the faster of two plans stay: the one that runs, and is `measured` now, or the one before."""
        self._rival = None
        was_ns, now_ns = rival.measured.total_ns, measured.total_ns
        log.info("region %d took %s, and takes %s with its new plan.", self.index, format_ns(was_ns), format_ns(now_ns))
        if now_ns > was_ns:
            self._go_back(rival)

    def _go_back(self, rival: Rival) -> None:
        """Run the plan before again; also in the next process, with the right forecast."""
        self._rival = None
        self._compiled, self._learned, self._footprint, self.record, self._captured, self._clock = rival.state
        key, earlier = self._learned
        cached(key, Learned, lambda: dataclasses.replace(earlier, forecast=rival.scales), renew=True)
        self._correct(rival.scales)

    def _correct(self, scales: Scales) -> None:
        """Forecast the plan that runs with its durations scaled."""
        assert self.record is not None
        parts = correct(self.record.captured, self.record.problem, self.record.plan, scales)
        self.record = dataclasses.replace(self.record, **parts)

    def _state(self) -> tuple[Any, ...]:
        """Return all that a compilation sets."""
        return self._compiled, self._learned, self._footprint, self.record, self._captured, self._clock

    def _fakes(self) -> list[Any]:
        """Return the inputs' fakes, with the sizes torch traced the region with."""
        return [node.meta["example_value"] for node in self._source.graph.find_nodes(op="placeholder")]

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

    def compile(self, inputs: Sequence[Any], sizes: tuple[Sizes, Sizes] | None = None) -> None:
        """Capture, plan, rewrite and lower the region; if that fails, the region stays as it was.

        `sizes` are those at hand, and those to plan for. Code that turns out to hold more than the budget is generated
        anew, for a plan that keeps so much free. The source is copied, because the compilers below take ownership of
        what they are given.
        """
        open_workspaces(self.device)
        before = self._state()
        unforeseen_bytes = 0
        try:
            for _ in range(ATTEMPTS):
                self._drafts = Drafts(
                    self.options,
                    self._settings,
                    self.device,
                    self._fakes(),
                    sizes,
                    unforeseen_bytes,
                    tuple(self._homes.values()),
                )
                self._code = []
                compiled = self._lower_source(compat.copy_module(self._source), inputs)
                over_bytes = self._weigh()
                if over_bytes <= 0:
                    self._drafts.keep_margin()
                    break
                assert self.record is not None
                assert self.record.code_peak_bytes is not None
                unforeseen_bytes += self.record.code_peak_bytes - self.record.plan.forecast.peak_bytes
                log.info("region %d: its code would hold %d bytes too many; planning again", self.index, over_bytes)
            else:
                log.warning(
                    f"region {self.index} runs, but its generated code holds {over_bytes} bytes more than the device "
                    f"budget of {self.options.device_budget} bytes, after {ATTEMPTS} plans; set device_budget to more, "
                    "or shrink the batch."
                )
        except BaseException:
            self._compiled, self._learned, self._footprint, self.record, self._captured, self._clock = before
            raise
        finally:
            self._draft, self._code = None, []  # graphs are not kept alive
        self._compiled = compiled
        if self._homes:
            open_engine(self.device, host_budget_bytes=self.options.host_budget).homes.disarrange()
        if (record := self.record) is not None:
            summary = show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes)
            log.info(f"region {self.index} on {self.device}:\n{summary}")
            if self.options.dump_dir is not None:
                write_region(self.options.dump_dir, record)

    def _weigh(self) -> int:
        """Return by how much the generated code goes over the device budget; 0 where there is none of either."""
        code = [(interface, source) for interface, source in self._code if source is not None]
        if not code or (budget := self.options.device_budget) is None or self.record is None or self._draft is None:
            return 0
        held = self._draft.weigh(code)
        self.record = dataclasses.replace(self.record, code_peak_bytes=held)
        return 0 if held is None else held - budget

    def _lower_source(self, source: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        if self.options.compiler == "eager":
            return compat.compile_eager(source, inputs, partition=self.partition, lower=self.lower)
        return compat.compile_inductor(
            source,
            inputs,
            patches=self._settings,
            partition=self.partition,
            lower=self.lower,
            lazy_backward=self.options.device_budget is None,
        )

    def partition(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Halves:
        """Split the joint graph as AOTAutograd would, then write this region's plan into the halves.

        Where the `joint` policy finds it worth recomputing more, a copy of the joint graph is split once more that way.
        """
        untouched = compat.copy_joint(joint) if self.options.may_recompute else None
        halves, draft = self._split(joint, joint_inputs, frozenset(), kwargs)
        self._captured = None if draft is None else draft.captured
        if untouched is not None and draft is not None:
            source, first = untouched, draft

            def again(nodes: frozenset[str], names: tuple[str, ...]) -> tuple[Halves, Draft | None]:
                copied = compat.copy_joint(source)
                return self._split(copied, joint_inputs, nodes, kwargs, beside=first, recomputed=names)

            better, draft = self._drafts.recompute_more(first, again)
            halves = better or halves
        if draft is not None:
            self._carry_out(draft)
        for half in halves:
            half.recompile()
        return halves

    def _split(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[Any],
        again: frozenset[str],
        kwargs: Mapping[str, Any],
        **more: Any,
    ) -> tuple[Halves, Draft | None]:
        """Return forward and backward, the nodes `again` recomputed, and the plan for them."""
        forward, backward = compat.split_joint(
            joint, joint_inputs, recompute=self.options.recompute, again=again, **kwargs
        )
        capture = Capture(
            forward=forward.graph,
            backward=backward.graph,
            num_outputs=kwargs["num_fwd_outputs"],
            static_inputs=frozenset(kwargs.get("static_lifetime_input_indices") or ()),
            device=self.device,
            homes=self._home_names(),
        )
        return (forward, backward), self._drafts.draft(capture, **more)

    def _carry_out(self, draft: Draft) -> None:
        """Write the plan into the graphs; a region that fits is left as it was. Raises `BudgetError` without a plan."""
        if isinstance(draft.plan, BudgetError):
            raise draft.plan
        known, problem, plan = draft.study, draft.problem, draft.plan
        capture, self._draft, self._learned = known.capture, draft, (draft.learned_key, draft.learned)
        verify_plan(problem, plan)
        planned = bool(plan.spills or plan.recomputed or plan.resident)
        # With a home elsewhere, parameters come when their optimizer is done with them: that is not the graphs' time.
        may_learn = self._rival is not None or (self._may_learn and draft.learned.forecast == Scales())
        may_learn = may_learn and not self._homes
        self._clock = PhaseClock(self.device) if planned and may_learn else None
        self._rival = self._rival if planned else None
        if planned:
            avoid_fragmentation(self.device)
        if plan.spills or plan.resident:
            engine = self._reserve(plan)
            engine.reserve_gradients([s.nbytes for s in plan.spills if s.way is Way.OUT])
            in_registers = insert_transfers(capture, known.storages, plan, known.registers, engine=engine.id)
            verify_graphs(*at_hints(draft.formulas, problem, plan), capture, in_registers, known.in_place)
        self._staying = tuple(home for home in self._homes.values() if home.name in draft.staying)
        self._keep(draft, plan, tuple(list_graph(graph, phase) for graph, phase in capture.phases))
        if draft.learned.forecast != Scales():
            self._correct(draft.learned.forecast)

    def _home_names(self) -> dict[int, str]:
        return {index: home.name for index, home in self._homes.items()}

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Lower one graph with `compile_graph`; graphs of ours are pinned in order first, and checked afterwards."""
        if phase == "inference":
            capture = Capture(
                forward=gm.graph,
                backward=None,
                num_outputs=1 << 30,
                static_inputs=frozenset(),
                device=self.device,
                homes=self._home_names(),
            )
            if (draft := self._drafts.draft(capture)) is not None:
                self._captured = draft.captured
                self._carry_out(draft)
            gm.recompile()
        interface = None
        if (draft := self._draft) is not None and draft.formulas is not None:
            interface = read_interface(gm.graph, self.device, draft.formulas.by_name(), draft.scratch)
        if any(node.target in RUNTIME_OPS for node in gm.graph.nodes):
            planned = planned_calls(gm.graph)
            compiled = compile_graph(gm, example_inputs, planned=PinOrder())
            verify_code(planned, compat.source_code(compiled))
        else:
            compiled = compile_graph(gm, example_inputs, planned=None)
        if interface is not None:
            self._code.append((interface, compat.source_code(compiled)))
        return compiled if self._clock is None else self._clock.timed(phase, compiled)

    def _keep(self, draft: Draft, plan: Plan, listings: tuple[Listing, ...]) -> None:
        """Record what was decided, for reports and dumps, and how much more others may hold before it must change."""
        problem = draft.problem
        if draft.formulas is not None:
            self._footprint = Footprint(
                draft.formulas,
                problem,
                plan,
                held_bytes=draft.held_bytes + draft.resident_bytes,
                input_bytes=draft.input_bytes + draft.resident_bytes,
            )
        captured = self._captured or problem
        self.record = RegionRecord(
            region=self.index,
            name=self._name,
            torch_version=torch.__version__,
            device=str(self.device),
            options=tuple((name, str(getattr(self.options, name))) for name in self.options.__slots__),
            captured=captured,
            problem=problem,
            plan=plan,
            listings=listings,
        )
