"""Writes a plan into a region's graphs, lowers them, and checks both: the graphs, and the code generated for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.errors import BudgetError
from tencache_fx.hardware.device_memory import avoid_fragmentation
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
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.recalibration import Scales
from tencache_fx.planning.swap_region import SwapRegion
from tencache_fx.planning.verify import verify_plan
from tencache_fx.records import Listing, RegionRecord
from tencache_fx.region.candidate import Candidate
from tencache_fx.region.compiled_region import (
    Compiled,
    CompiledRegion,
    Monitor,
    Phase,
    Placement,
    Request,
    WrittenPlan,
)
from tencache_fx.region.dynamic_shapes import Footprint, at_hints
from tencache_fx.region.source import RegionSource
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.region.timers import PhaseClock
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import open_engine, swap_points


class Lowering(Protocol):
    """Makes functions of a region's planned graphs."""

    def write(self, candidate: Candidate) -> None:
        """Write the candidate's plan into its graphs, if that is wanted."""

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Return the function that runs for one graph; torch may ask for the backward's after the compilation."""


class PlannedLowering:
    """Carries plans out, for one attempt to compile a region; its `monitors` watch what runs."""

    def __init__(self, source: RegionSource, request: Request, monitors: Sequence[Monitor]) -> None:
        self._source, self._request, self._monitors = source, request, monitors
        self._candidate: Candidate | None = None
        self._written = WrittenPlan()
        self._swap_region: SwapRegion | None = None
        self._listings: tuple[Listing, ...] = ()
        self._code: list[tuple[Interface, str]] = []

    def write(self, candidate: Candidate) -> None:
        """Write the plan into the graphs; a region that fits is left as it was. Raises `BudgetError` without a plan."""
        if isinstance(candidate.plan, BudgetError):
            raise candidate.plan
        known, problem, plan = candidate.analysis, candidate.problem, candidate.plan
        capture, request, device = known.capture, self._request, self._source.device
        by_step = request.by_step and capture.backward is not None
        if by_step:
            problem = problem.within(device_bytes=None)
        verify_plan(problem, plan)
        planned = bool(plan.transfers or plan.recomputed or plan.resident)
        if planned:
            avoid_fragmentation(device)
        recorder = None
        if by_step or plan.transfers or plan.resident:
            engine = reserve(self._source, plan)
            engine.reserve_gradients([s.nbytes for s in plan.transfers if s.kind is TransferKind.STORE])
            points = swap_points(engine) if by_step else None
            index = engine.id if points is None else points.id
            in_registers = insert_transfers(capture, known.storages, plan, known.registers, engine=index)
            verify_graphs(*at_hints(candidate.formulas, problem, plan), capture, in_registers, known.in_place)
            if points is not None:
                recorder = recorder_of(points)
                self._swap_region = SwapRegion(
                    problem=problem,
                    transfers=plan.transfers,
                    points=find_points(capture),
                    original=candidate.original,
                    recomputed=frozenset(plan.recomputed),
                    name=self._source.name,
                )
        drop_pause(capture)
        self._listings = tuple(list_graph(graph, phase) for graph, phase in capture.phases)
        timed = request.compares or (request.may_learn and candidate.correction.forecast == Scales())
        # Offloaded parameters come when their optimizer is done with them: that is not the graphs' time.
        timed = timed and planned and not request.offloaded
        donated = _offloaded_inputs(problem, plan, capture)
        clock = PhaseClock(device) if timed else None
        self._written = WrittenPlan(donated=donated, clock=clock, recorder=recorder)
        self._candidate = candidate

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Lower one graph with `compile_graph`; graphs of ours are pinned in order first, and checked afterwards."""
        interface = None
        if (candidate := self._candidate) is not None and candidate.formulas is not None:
            interface = read_interface(gm.graph, self._source.device, candidate.formulas.by_name(), candidate.scratch)
        if any(node.target in RUNTIME_OPS for node in gm.graph.nodes):
            planned = planned_calls(gm.graph)
            run = compile_graph(gm, example_inputs, planned=PinOrder())
            verify_code(planned, compat.source_code(run))
        else:
            run = compile_graph(gm, example_inputs, planned=None)
        if interface is not None and (code := compat.source_code(run)) is not None:
            self._code.append((interface, code))
        for monitor in self._monitors:
            run = monitor.instrument(phase, run, self._written)
        return run

    def finish(self, run: Compiled, placement: Placement) -> CompiledRegion:
        """Return the value that is left of the compilation; `placement` has the parameters' names.

        Torch keeps its callbacks, and what they lower with: the graphs are not kept alive by this.
        """
        candidate, self._candidate = self._candidate, None
        code, self._code = self._code, []
        if candidate is None:
            return CompiledRegion(run=run, placement=placement)
        plan = candidate.plan
        assert isinstance(plan, Plan)
        record = record_of(self._source, candidate, plan, self._listings)
        if code and self._source.options.device_budget is not None:
            record = dataclasses.replace(record, code_peak_bytes=candidate.code_peak_bytes(code))
        swap_region = self._swap_region
        if swap_region is not None and record.code_peak_bytes is not None:
            code_bytes = record.code_peak_bytes - candidate.external_bytes
            unforeseen_bytes = max(0, code_bytes - plan.forecast.peak_bytes)
            swap_region = dataclasses.replace(swap_region, margin_bytes=unforeseen_bytes)
        trains = candidate.analysis.capture.backward is not None
        compiled = CompiledRegion(
            run=run,
            placement=dataclasses.replace(
                placement,
                resident=frozenset(plan.resident),
                staying=candidate.staying,
                updated_here=frozenset(plan.updated_here) if trains else None,
                by_step=swap_region is not None,
            ),
            record=record,
            footprint=_footprint(candidate, plan),
            correction=candidate.correction,
            correction_key=candidate.correction_key,
            clock=self._written.clock,
            swap_region=swap_region,
        )
        forecast = candidate.correction.forecast
        return compiled if forecast == Scales() else compiled.corrected(forecast)


def reserve(source: RegionSource, plan: Plan) -> Engine:
    """Return the device's engine, holding the buffers and the disk space that `plan` needs."""
    options = source.options
    engine = open_engine(
        source.device,
        host_budget_bytes=options.host_budget,
        spill_dirs=options.spill_dir,
        spill_budget_bytes=options.spill_budget,
        checksum=options.checksum,
    )
    engine.reserve(pool=plan.pool, staging=plan.staging, disk_bytes=plan.forecast.disk_bytes)
    return engine


def record_of(
    source: RegionSource, candidate: Candidate, plan: Plan, listings: tuple[Listing, ...] = ()
) -> RegionRecord:
    """Return the record of a plan, for reports and dumps."""
    return RegionRecord(
        region=source.index,
        name=source.name,
        torch_version=torch.__version__,
        device=str(source.device),
        options=tuple((name, str(getattr(source.options, name))) for name in source.options.__slots__),
        captured=candidate.original,
        problem=candidate.problem,
        plan=plan,
        listings=listings,
    )


def _footprint(candidate: Candidate, plan: Plan) -> Footprint | None:
    """Return the memory that the plan needs at any sizes, if there is a device budget."""
    if candidate.formulas is None:
        return None
    return Footprint(
        candidate.formulas,
        candidate.problem,
        plan,
        held_bytes=candidate.held_bytes + candidate.resident_bytes + candidate.state_bytes,
        input_bytes=candidate.input_bytes + candidate.resident_bytes,
    )


def _offloaded_inputs(problem: Problem, plan: Plan, capture: RegionGraphs) -> frozenset[int]:
    """Return the positions of the donated inputs that are offloaded."""
    donated = {storage.name for storage in problem.storages if storage.caller_frees_at}
    offloaded = donated & {transfer.name for transfer in plan.transfers}
    return frozenset(index for index, node in enumerate(placeholders(capture.forward)) if node.name in offloaded)
