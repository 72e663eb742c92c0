"""Analyses a captured region before it is planned: lifetimes of its storages, costs of its ops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tencache_fx.hardware.op_timing import kept_costs, time_calls
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.options import Options
from tencache_fx.passes.addmm_fusion import sink_products
from tencache_fx.passes.buffer_reuse import InPlace, hold_fused_operands, reuse_in_place
from tencache_fx.passes.costs import estimate_ops, estimated_scratch, find_calls, measured_scratch
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.inplace_inputs import find_mutations
from tencache_fx.passes.lifetimes import StorageNodes, measure_lifetimes
from tencache_fx.planning.problem import Op


@dataclass(frozen=True, kw_only=True)
class RegionAnalysis:
    """A captured region's storages with their lifetimes, the values that stay in registers, and the costs of its ops.

    `scratch` are the bytes that kernels were seen to allocate for themselves, by the names of their nodes, `estimated`
    what the others are taken to.
    """

    capture: RegionGraphs
    storages: tuple[StorageNodes, ...]
    registers: frozenset[fx.Node]
    in_place: InPlace
    ops: tuple[Op, ...]
    scratch: Mapping[str, int]
    estimated: Mapping[str, int]

    @property
    def duration_ns(self) -> int:
        """How long the ops take, one after the other."""
        return sum(op.duration_ns for op in self.ops)

    def unseen_bytes(self, planned: Sequence[Op]) -> list[int]:
        """Return what is `estimated` of each step, at the sizes for which `planned` are the ops."""
        pairs = zip(self.ops, planned, strict=True)
        return [self.estimated.get(op.name, 0) * now.scratch_bytes // max(1, op.scratch_bytes) for op, now in pairs]


def analyze(
    capture: RegionGraphs, options: Options, roofline: Roofline, *, measure: bool = True, by_step: bool = False
) -> RegionAnalysis:
    """Return the facts about a captured region; its graphs are normalised first, nothing in them is decided.

    Without `measure` no op is timed: what earlier runs have timed is known, the rest is estimated. A region planned
    `by_step` has others between its graphs.
    """
    fuses = options.compiler == "inductor"
    if fuses:
        sink_products(capture)
    repair_view_fakes(capture)
    model = InductorModel.of(capture, on_gpu=roofline.of_gpu) if fuses else None
    mutations = find_mutations(capture) if fuses else {}
    storages = measure_lifetimes(capture, model, mutations)
    in_place: InPlace = {node: node.all_input_nodes[0] for node in mutations}
    if model is not None:
        storages, taken = reuse_in_place(capture, model, storages, by_step=by_step)
        in_place = {**in_place, **taken}
        storages = hold_fused_operands(model, storages)
    heavy = find_calls(capture, roofline, model) if options.calibrate else {}
    if measure:
        measured = time_calls(heavy, capture.device, budget_bytes=options.device_budget)
    else:
        measured = kept_costs(heavy, capture.device)
    scratch = measured_scratch(capture, model, measured)
    estimated = estimated_scratch(capture, roofline, model, scratch.keys())
    return RegionAnalysis(
        capture=capture,
        storages=tuple(storages),
        registers=frozenset(() if model is None else model.registers),
        in_place=in_place,
        ops=estimate_ops(capture, roofline, model, measured, scratch | estimated),
        scratch=scratch,
        estimated=estimated,
    )
