"""One region compiled: captured, planned, rewritten, lowered and checked."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.errors import BudgetError
from tencache_fx.hardware.device_memory import avoid_fragmentation, open_workspaces
from tencache_fx.model_state import parameter_ops as _parameter_kernels  # noqa: F401  (registers the ops' kernels)
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import open_update_room
from tencache_fx.ops import RUNTIME_OPS
from tencache_fx.options import Options
from tencache_fx.passes.barriers import PinOrder
from tencache_fx.passes.code_interface import Interface, read_interface
from tencache_fx.passes.graph_listing import list_graph
from tencache_fx.passes.graphs import RegionGraphs, placeholders
from tencache_fx.passes.pause import drop_pause
from tencache_fx.passes.transfers import insert_transfers
from tencache_fx.passes.verify_code import planned_calls, verify_code
from tencache_fx.passes.verify_graph import verify_graphs
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.recalibration import Scales
from tencache_fx.planning.verify import verify_plan
from tencache_fx.records import Listing, RegionRecord
from tencache_fx.region.ambient_state import remember
from tencache_fx.region.candidate import ATTEMPTS, Candidate, ForwardBackward, RegionPlanner
from tencache_fx.region.dynamic_shapes import Footprint, Sizes, at_hints
from tencache_fx.region.environment import Environment
from tencache_fx.region.graph_copy import copy_joint, copy_module
from tencache_fx.region.joint_split import split_joint
from tencache_fx.region.region import LiveRegion
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.timers import PhaseClock
from tencache_fx.reporting.dump import write_region
from tencache_fx.reporting.tables import show_summary
from tencache_fx.runtime import op_kernels as _kernels  # noqa: F401  (registers the ops' kernels)

log = logging.getLogger("tencache_fx")

Compiled = Callable[..., Any]

Phase = Literal["forward", "backward", "inference"]


class Region(LiveRegion):
    """One captured region: what it was compiled from, its plan, and the compiled function (it is callable)."""

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[object],
        options: Options,
        device: torch.device,
        settings: Mapping[str, Any],
        homes: Mapping[int, OffloadedParameter],
    ) -> None:
        takes_fakes = options.compiler == "eager" or compat.runs_on_fakes(settings)
        super().__init__(gm, inputs, options, device, REGIONS.next_index(), homes, takes_fakes=takes_fakes)
        self._settings = settings
        self._name = str(torch._guards.CompileContext.current_compile_id() or "")
        self._draft: Candidate | None = None  # while it is compiled
        self._code: list[tuple[Interface, str | None]] = []
        self._leaving: frozenset[int] = frozenset()  # inputs, by position

    def compile(self, inputs: Sequence[Any], sizes: tuple[Sizes, Sizes] | None = None) -> None:
        """Capture, plan, rewrite and lower the region; if that fails, the region stays as it was.

        `sizes` are those at hand, and those to plan for. Code that turns out to hold more than the budget is generated
        anew, for a plan that keeps so much free. The source is copied, because the compilers below take ownership of
        what they are given.
        """
        REGIONS.compilations += 1
        open_workspaces(self.device)
        if any(home.parameter.requires_grad for home in self._homes.values()):
            open_update_room(self.device, self.options.device_budget)
        before, set_back = self._state(), remember(self.device)
        self._home_names = _told_apart(self._homes)
        unforeseen_bytes = 0
        try:
            for _ in range(ATTEMPTS):
                set_back()  # what tracing it has changed, if it was traced before
                self._drafts = RegionPlanner(
                    self.options,
                    self._settings,
                    self.device,
                    self._fakes(),
                    sizes,
                    unforeseen_bytes,
                    {self._home_names[index]: home for index, home in self._homes.items()},
                    Environment.find(self.device, self.options, self.between.wanted_bytes),
                )
                self._code, self._leaving = [], frozenset()
                compiled = self._lower_source(copy_module(self._source), inputs)
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
            self._restore(before)
            set_back()
            raise
        finally:
            self._draft, self._code = None, []  # graphs are not kept alive
        self._compiled = compiled
        if (record := self.record) is not None:
            self.between.note_plan(record.problem.between_bytes)
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

    def partition(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> ForwardBackward:
        """Split the joint graph as AOTAutograd would, then write this region's plan into the halves.

        Where the `joint` policy finds it worth recomputing more, a copy of the joint graph is split once more that way.
        """
        untouched = copy_joint(joint) if self.options.may_recompute else None
        halves, draft = self._split(joint, joint_inputs, frozenset(), kwargs)
        self._captured = None if draft is None else draft.captured
        if untouched is not None and draft is not None:
            source, first = untouched, draft

            def again(nodes: frozenset[str], names: tuple[str, ...]) -> tuple[ForwardBackward, Candidate | None]:
                copied = copy_joint(source)
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
    ) -> tuple[ForwardBackward, Candidate | None]:
        """Return forward and backward, the nodes `again` recomputed, and the plan for them."""
        forward, backward = split_joint(joint, joint_inputs, recompute=self.options.recompute, again=again, **kwargs)
        capture = RegionGraphs(
            forward=forward.graph,
            backward=backward.graph,
            num_outputs=kwargs["num_fwd_outputs"],
            static_inputs=frozenset(kwargs.get("static_lifetime_input_indices") or ()),
            device=self.device,
            homes=self._home_names,
            given_up=self.given_up.positions,
        )
        return (forward, backward), self._drafts.draft(capture, **more)

    def _carry_out(self, draft: Candidate) -> None:
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
        self._leaving = _given_up(problem, plan, capture)
        if plan.spills or plan.resident:
            engine = self._reserve(plan)
            engine.reserve_gradients([s.nbytes for s in plan.spills if s.kind is TransferKind.OUT])
            in_registers = insert_transfers(capture, known.storages, plan, known.registers, engine=engine.id)
            verify_graphs(*at_hints(draft.formulas, problem, plan), capture, in_registers, known.in_place)
        drop_pause(capture)
        self._resident, self._staying = frozenset(plan.resident), draft.staying
        self._updated_here = frozenset(plan.updated_here) if capture.backward is not None else None
        self._keep(draft, plan, tuple(list_graph(graph, phase) for graph, phase in capture.phases))
        if draft.learned.forecast != Scales():
            self._correct(draft.learned.forecast)

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Lower one graph with `compile_graph`; graphs of ours are pinned in order first, and checked afterwards."""
        if phase == "inference":
            self._plan_inference(gm)
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
        compiled = self.between.watched(phase, self.given_up.watched(phase, compiled, self._leaving))
        return compiled if self._clock is None else self._clock.timed(phase, compiled)

    def _plan_inference(self, gm: fx.GraphModule) -> None:
        """Write this region's plan into its only graph: of one that has no backward."""
        capture = RegionGraphs(
            forward=gm.graph,
            backward=None,
            num_outputs=1 << 30,
            static_inputs=frozenset(),
            device=self.device,
            homes=self._home_names,
        )
        if (draft := self._drafts.draft(capture)) is not None:
            self._captured = draft.captured
            self._carry_out(draft)
        gm.recompile()

    def _keep(self, draft: Candidate, plan: Plan, listings: tuple[Listing, ...]) -> None:
        """Record what was decided, for reports and dumps, and how much more others may hold before it must change."""
        problem = draft.problem
        if draft.formulas is not None:
            self._footprint = Footprint(
                draft.formulas,
                problem,
                plan,
                held_bytes=draft.held_bytes + draft.resident_bytes + draft.state_bytes,
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


def _given_up(problem: Problem, plan: Plan, capture: RegionGraphs) -> frozenset[int]:
    """Return the positions of the inputs that leave."""
    lent = {storage.name for storage in problem.storages if storage.held_until}
    leaving = lent & {spill.name for spill in plan.spills}
    return frozenset(index for index, node in enumerate(placeholders(capture.forward)) if node.name in leaving)


def _told_apart(homes: Mapping[int, OffloadedParameter]) -> dict[int, str]:
    """Return the names of homes, with their positions where two models have the same names."""
    counts = Counter(home.name for home in homes.values())
    return {i: home.name if counts[home.name] == 1 else f"{home.name}#{i}" for i, home in homes.items()}
