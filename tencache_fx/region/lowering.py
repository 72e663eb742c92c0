"""Writes a plan into a region's graphs, lowers them, and checks both: the graphs, and the code generated for them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.errors import BudgetError, InvariantError
from tencache_fx.hardware.device_memory import avoid_fragmentation
from tencache_fx.kept_code import KeptCode, Phase
from tencache_fx.model_state.modules import engine_of
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.ops import RUNTIME_OPS
from tencache_fx.passes.barriers import PinOrder
from tencache_fx.passes.code_interface import Interface, read_interface
from tencache_fx.passes.graph_listing import list_graph
from tencache_fx.passes.graphs import RegionGraphs, placeholders
from tencache_fx.passes.pause import drop_pause
from tencache_fx.passes.swap_points import find_points
from tencache_fx.passes.transfers import insert_transfers
from tencache_fx.passes.verify_code import planned_calls, verify_code
from tencache_fx.passes.verify_graph import verify_graphs
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import Problem, Tier
from tencache_fx.planning.recalibration import Scales
from tencache_fx.planning.swap_region import Points, within_swap_points
from tencache_fx.planning.verify import verify_plan
from tencache_fx.records import Listing, RegionRecord
from tencache_fx.region.candidate import Candidate, RegionPlanner
from tencache_fx.region.collective_order import check_order
from tencache_fx.region.compiled_region import (
    Compiled,
    CompiledRegion,
    Monitor,
    Placement,
    Request,
    WrittenPlan,
    keep_boxed,
)
from tencache_fx.region.dynamic_shapes import Footprint, at_hints
from tencache_fx.region.kept_plans import is_as_free
from tencache_fx.region.kept_region import KeptRegion
from tencache_fx.region.source import RegionSource
from tencache_fx.region.step_recorder import StepRecorder, recorder_of
from tencache_fx.region.timers import PhaseClock
from tencache_fx.reporting.structured import log_artifacts
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import RankStage, find_engine, open_engine, swap_points

log = logging.getLogger("tencache_fx")


class Lowering(Protocol):
    """Makes functions of a region's planned graphs."""

    def write(self, candidate: Candidate) -> None:
        """Write the candidate's plan into its graphs, if that is wanted."""

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Return the function that runs for one graph; torch may ask for the backward's after the compilation."""


class PlannedLowering:
    """Carries plans out, for one attempt to compile a region; its `monitors` watch what runs, `names` are the offloaded
    parameters'.

    With `keeps`, code is returned as AOTAutograd's cache keeps it.
    """

    def __init__(
        self,
        source: RegionSource,
        request: Request,
        monitors: Sequence[Monitor],
        planner: RegionPlanner,
        names: Mapping[int, str],
        *,
        keeps: bool,
    ) -> None:
        self._source, self._request, self._monitors, self._names = source, request, monitors, names
        self._planner, self._earlier, self._keeps = planner, planner.earlier, keeps
        self._candidate: Candidate | None = None
        self._written = WrittenPlan()
        self._server: int | None = None
        self._points: Points = ((), ())
        self._listings: tuple[Listing, ...] = ()
        self._code: list[tuple[Interface, str]] = []
        self._kept: KeptRegion | None = None

    def write(self, candidate: Candidate) -> None:
        """Write the plan into the graphs; a region that fits is left as it was. Raises `BudgetError` without a plan."""
        if isinstance(candidate.plan, BudgetError):
            raise candidate.plan
        known, problem, plan = candidate.analysis, candidate.problem, candidate.plan
        capture, by_step = known.capture, self._request.by_step and known.capture.backward is not None
        verify_plan(within_swap_points(problem, plan) if by_step else problem, plan)
        check_order(self._source, capture.graphs, capture.offloaded.values(), self._planner.models)
        recorder = None
        if is_planned(plan):
            avoid_fragmentation(self._source.device)
        if by_step or plan.transfers or plan.resident:
            self._server, recorder = self._open_server(problem, plan, by_step=by_step)
            in_registers = insert_transfers(capture, known.storages, plan, known.registers, engine=self._server)
            verify_graphs(*at_hints(candidate.formulas, problem, plan), capture, in_registers, known.in_place)
            if by_step:
                self._points = find_points(capture)
        drop_pause(capture)
        self._listings = tuple(list_graph(graph, phase) for graph, phase in capture.phases)
        donated = _offloaded_inputs(problem, plan, capture)
        self._written = self._watched_plan(donated, recorder, is_timeable=self._is_timeable(plan))
        self._candidate = candidate
        if capture.backward is not None and self._request.offloaded:
            self._map_state_ahead(frozenset(plan.updated_here), compiles=True)

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Lower one graph with `compile_graph`; graphs of ours are pinned in order first, and checked afterwards."""
        interface = None
        if (candidate := self._candidate) is not None and (formulas := candidate.formulas) is not None:
            sizes = formulas.named(formulas.planned)
            interface = read_interface(gm.graph, self._source.device, sizes, candidate.scratch)
        planned = any(node.target in RUNTIME_OPS for node in gm.graph.nodes)
        if planned:
            calls = planned_calls(gm.graph)
            run = compile_graph(gm, example_inputs, planned=PinOrder())
            verify_code(calls, compat.source_code(run))
        else:
            run = compile_graph(gm, example_inputs, planned=None)
        if interface is not None and (code := compat.source_code(run)) is not None:
            self._code.append((interface, code))
        if not self._keeps:
            return self._watch(phase, run)
        # The forward's code has the facts of both graphs: it is written when both are there.
        kept = KeptCode(run, phase, planned=planned, facts=tuple if phase == "backward" else self._facts)
        kept.run = self._watch(phase, run)
        return kept

    def foresee(self, facts: object) -> None:
        """Begin to map the host memory that a kept region will want, while its code is loaded."""
        if not isinstance(facts, KeptRegion):
            return
        if facts.server is not None:
            fits = _as_far_as_it_fits(facts.record.problem, facts.record.plan, by_step=facts.swap_region is not None)
            open_for(self._source).reserve_ahead(fits.pool)
        if facts.placement.updated_here is not None and self._request.offloaded:
            self._map_state_ahead(facts.placement.updated_here, compiles=False)

    def take_up(self, codes: Sequence[KeptCode]) -> bool:
        """Go on with what AOTAutograd's cache had; return False if it does not do here, and is to be made anew."""
        taken = False
        try:
            taken = self._take_up(codes)
        finally:
            if not taken and (engine := find_engine(self._source.device)) is not None:
                engine.reserve_ahead(())  # nobody reserves what was foreseen
        return taken

    def _take_up(self, codes: Sequence[KeptCode]) -> bool:
        facts = [code.facts() for code in codes if code.facts is not None]
        kept = next((each for each in facts if isinstance(each, KeptRegion)), None)
        if kept is None:
            return False
        record = kept.record
        budgets = self._planner.budgets(record.captured.storages)
        budgets = replace(record.problem.budgets, host_bytes=budgets.host_bytes, disk_bytes=budgets.disk_bytes)
        if not is_as_free(record.problem, budgets):
            log.info("region %d was kept for other free memory, and is planned again", self._source.index)
            return False
        by_step, plan = kept.swap_region is not None, record.plan
        try:
            verify_plan(within_swap_points(record.problem, plan) if by_step else record.problem, plan)
        except InvariantError as error:
            log.warning("a region that was kept has no right plan, and is compiled again: %s", str(error))
            return False
        recorder = None
        if is_planned(plan):
            avoid_fragmentation(self._source.device)
        if kept.server is not None:
            self._server, recorder = self._open_server(record.problem, plan, by_step=by_step)
            if self._server != kept.server:
                return False
        self._kept = kept
        self._written = self._watched_plan(kept.donated, recorder, is_timeable=kept.is_timeable)
        for code in codes:
            code.facts = None
            code.run = self._watch(code.phase, code.code)
        return True

    def finish(self, run: Compiled, placement: Placement) -> CompiledRegion:
        """Return the value that is left of the compilation; `placement` has the parameters' names.

        Torch keeps its callbacks, and what they lower with: the graphs are not kept alive by this.
        """
        kept = self._facts()
        self._kept, self._candidate, self._code = None, None, []
        if kept is None:
            return CompiledRegion(run=run, placement=placement)
        swap_region = kept.swap_region
        log_artifacts(replace(kept.record, **about(self._source)))
        compiled = CompiledRegion(
            run=run,
            placement=replace(kept.placement, names=placement.names),
            record=replace(kept.record, **about(self._source)),
            footprint=kept.footprint,
            correction=self._earlier.correction,
            correction_key=self._earlier.correction_key,
            clock=self._written.clock,
            swap_region=None if swap_region is None else replace(swap_region, name=self._source.name),
        )
        forecast = self._earlier.correction.forecast
        return compiled if forecast == Scales() else compiled.corrected(forecast)

    def _facts(self) -> KeptRegion | None:
        """Return all that is known of the region once its graphs are lowered."""
        if self._kept is not None or (candidate := self._candidate) is None:
            return self._kept
        plan = candidate.plan
        assert isinstance(plan, Plan)
        record = record_of(self._source, candidate, plan, self._listings)
        if self._code and self._source.options.device_budget is not None:
            record = replace(record, code_peak_bytes=candidate.code_peak_bytes(self._code))
        trains, swap_region = candidate.analysis.capture.backward is not None, None
        if self._request.by_step and trains:
            swap_region = candidate.swap_region(plan, self._points, self._code)
        self._kept = KeptRegion(
            record=record,
            footprint=_footprint(candidate, plan),
            placement=Placement(
                names={},
                resident=frozenset(plan.resident),
                staying=candidate.staying,
                updated_here=frozenset(plan.updated_here) if trains else None,
                by_step=swap_region is not None,
            ),
            swap_region=swap_region,
            donated=self._written.donated,
            server=self._server,
            is_timeable=self._is_timeable(plan),
        )
        return self._kept

    def _open_server(self, problem: Problem, plan: Plan, *, by_step: bool) -> tuple[int, StepRecorder | None]:
        """Reserve what `plan` needs; return the index that graphs call, and who records steps, if any are.

        Where host memory has no room for what one call of a step has away, calls take what there is.
        """
        engine = reserve(self._source, _as_far_as_it_fits(problem, plan, by_step=by_step))
        stored = [each.nbytes for each in plan.transfers if each.kind is TransferKind.STORE]
        engine.reserve_gradients(stored, adds=self._request.adds)
        if not by_step:
            return engine.id, None
        self._map_for_calls(engine, plan)
        points = swap_points(engine)
        return points.id, recorder_of(points)

    def _map_for_calls(self, engine: Engine, plan: Plan) -> None:
        """Begin to map what the calls of a piece have away in its first step, which has no plan: all that may leave.

        One call has its buffers already.
        """
        calls = self._source.calls or 1
        if self._request.sizes is None and self._source.options.device_budget is not None:
            swaps = [each for each in plan.transfers if each.kind is TransferKind.SWAP and each.tier is Tier.HOST]
            engine.map_for_calls([each.nbytes for each in swaps] * (calls - 1))

    def _is_timeable(self, plan: Plan) -> bool:
        """Return whether the times of the graphs say something about the plan.

        Offloaded parameters come when their optimizer is done with them: that is not the graphs' time.
        """
        return is_planned(plan) and not self._request.offloaded

    def _map_state_ahead(self, updated_here: frozenset[str], *, compiles: bool) -> None:
        """Begin to map what the first step needs for the optimizer's state, while code is generated or loaded."""
        offloaded = self._request.offloaded
        on_device = {each for index, each in offloaded.items() if self._names[index] in updated_here}
        parameters_of(engine_of(self._source.device)).map_state_ahead(on_device, compiles=compiles)

    def _watched_plan(
        self, donated: frozenset[int], recorder: StepRecorder | None, *, is_timeable: bool
    ) -> WrittenPlan:
        request = self._request
        timed = request.compares or (request.may_learn and self._earlier.correction.forecast == Scales())
        clock = PhaseClock(self._source.device) if timed and is_timeable else None
        return WrittenPlan(donated=donated, clock=clock, recorder=recorder)

    def _watch(self, phase: Phase, run: Compiled) -> Compiled:
        for monitor in self._monitors:
            run = monitor.instrument(phase, run, self._written)
        if phase == "backward":
            run = keep_boxed(run, RankStage(f"the backward of region {self._source.index}")(run))
        return run


def reserve(source: RegionSource, plan: Plan) -> Engine:
    """Return the device's engine, holding the buffers and the disk space that `plan` needs."""
    engine = open_for(source)
    engine.reserve(pool=plan.pool, staging=plan.staging, disk_bytes=plan.forecast.disk_bytes)
    return engine


def open_for(source: RegionSource) -> Engine:
    """Return the device's engine, with the budgets that the region has."""
    options = source.options
    return open_engine(
        source.device,
        host_budget_bytes=options.host_budget,
        spill_dirs=options.spill_dir,
        spill_budget_bytes=options.spill_budget,
        spill_write_bytes_per_day=options.spill_write_budget,
        checksum=options.checksum,
    )


def _as_far_as_it_fits(problem: Problem, plan: Plan, *, by_step: bool) -> Plan:
    """Return the plan, without buffers for a step's transfers where host memory has no room for all of a call."""
    fits = plan.forecast.host_bytes <= problem.budgets.host_bytes
    return plan if fits or not by_step else replace(plan, pool=())


def about(source: RegionSource) -> dict[str, Any]:
    """Return what a record says of its region as such, and of this process."""
    return {
        "region": source.index,
        "name": source.name,
        "torch_version": torch.__version__,
        "device": str(source.device),
        "options": tuple((name, str(getattr(source.options, name))) for name in source.options.__slots__),
    }


def record_of(
    source: RegionSource, candidate: Candidate, plan: Plan, listings: tuple[Listing, ...] = ()
) -> RegionRecord:
    """Return the record of a plan, for reports and dumps."""
    return RegionRecord(
        captured=candidate.original, problem=candidate.problem, plan=plan, listings=listings, **about(source)
    )


def is_planned(plan: Plan) -> bool:
    """Return whether the region runs otherwise than it would without a plan."""
    return bool(plan.transfers or plan.recomputed or plan.resident)


def _footprint(candidate: Candidate, plan: Plan) -> Footprint | None:
    """Return the memory that the plan needs at any sizes, if there is a device budget."""
    if candidate.formulas is None:
        return None
    return Footprint(
        candidate.formulas,
        candidate.problem,
        plan,
        held_bytes=candidate.held_bytes + candidate.resident_bytes + candidate.beside_bytes,
        input_bytes=candidate.input_bytes + candidate.resident_bytes,
    )


def _offloaded_inputs(problem: Problem, plan: Plan, capture: RegionGraphs) -> frozenset[int]:
    """Return the positions of the donated inputs that are offloaded."""
    donated = {storage.name for storage in problem.storages if storage.caller_frees_at}
    offloaded = donated & {transfer.name for transfer in plan.transfers}
    return frozenset(index for index, node in enumerate(placeholders(capture.forward)) if node.name in offloaded)
