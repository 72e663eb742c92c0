"""One region compiled: captured, planned, rewritten, lowered and checked. Only a `CompiledRegion` is left of it.

Files visited, in order, with what each one yields:

backend.py                     `tencache()`: torch.compile hands over one region, whose options are resolved
region/source.py               `RegionSource`: the Dynamo graph, options and device, the same in each compilation
region/region.py               `Region`: holds the current `CompiledRegion` and its monitors, asks for compilations
region/compilation.py          `compile_region()`: up to three attempts, each a `Compilation` that torch calls back
  region/environment.py           `Environment`: rates of the machine, bytes held on the device, reservations
  region/earlier_runs.py          `EarlierRuns`: what earlier processes have learned of the region
  region/kept_region.py           the key in AOTAutograd's cache; a hit goes on at `PlannedLowering.take_up`
  compat.py                       AOTAutograd traces the joint graph, and calls `Compilation.partition`
    passes/pattern_layouts.py        copies that Inductor drops behind the ops that its patterns put in
    passes/convolution_layouts.py    copies of inputs that convolutions read in another memory format
  region/rank_agreement.py        ranks agree on what runs again behind gathers, and on the order of collectives
  region/joint_split.py           the joint graph -> forward and backward graphs
    passes/gather_order.py           gathers begin early enough for that order
    passes/collective_overlap.py     collectives begin early, and are waited for late
    region/overlap_choice.py         or are they not to, as memory is short?
  region/candidate.py             `Candidate`: these graphs and their plan; the best one of several splits is taken
    passes/parameter_markers.py      markers where offloaded parameters are loaded, and their gradients stored
    region/analysis.py               `RegionAnalysis`: lifetimes of storages, costs of ops (more of passes/, hardware/)
    region/collective_links.py       collectives, with the rates of their process groups
    passes/inductor_model.py         `InductorModel`: values in registers, ops that share a kernel, bytes kernels move
    region/dynamic_shapes.py         `SizeFormulas`: sizes of storages as formulas; later the plan's `Footprint`
    region/reservations.py           `Problem`, with memory left free for others as far as there is room
    region/kept_plans.py             what was planned before is read from disk
    planning/planner.py              `Plan`
    planning/search.py               storages to recompute, for which the joint graph is split again
  region/lowering.py              `PlannedLowering`: the plan -> rewritten graphs -> code
    planning/verify.py               checks the plan
    runtime/engine_registry.py       `Engine`: reserves pinned buffers and disk space
    passes/transfers.py              the runtime's ops in the graphs
    passes/verify_graph.py           checks the graphs
    passes/barriers.py               `PinOrder`: Inductor keeps the order of the runtime's ops
    passes/fixed_layouts.py          a part of that: what leaves has the strides that the graph says
    passes/verify_code.py            checks the order in the generated code
    passes/code_memory.py            bytes that the code holds; if these are too many, there is another attempt
    kept_code.py                     `KeptCode`: the code, and a `KeptRegion` beside it, for AOTAutograd's cache
region/compiled_region.py      `CompiledRegion`: the function that runs, record, footprint, correction, placement
region/scope.py               a monitor: is the region planned by itself, or with the others of its step?
region/checkpointed_calls.py   how a region ran where checkpointed code called it: there it runs so again
region/donated_inputs.py       a monitor, asked before each call: does the caller keep inputs that were to be offloaded?
region/boundary_memory.py      a monitor: do others hold too much between the forward and the backward?
region/recalibrator.py         a monitor: do steps take longer or shorter than forecast, so that another plan pays?
region/budget_check.py         does the plan fit at the sizes of this call, beside external memory?
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from tencache_fx import compat
from tencache_fx.errors import BudgetError
from tencache_fx.garbage import seldom_collected
from tencache_fx.kept_code import Phase
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import open_update_room
from tencache_fx.model_state.step_hooks import is_updated_in_backward
from tencache_fx.passes.collective_overlap import overlap_collectives
from tencache_fx.passes.convolution_layouts import copy_for_convolutions
from tencache_fx.passes.gather_order import gather_in_order
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.pattern_layouts import settle_pattern_layouts
from tencache_fx.planning.tuning import SPLITS
from tencache_fx.records import RegionRecord
from tencache_fx.region.ambient_state import remember
from tencache_fx.region.candidate import Candidate, ForwardBackward, RegionPlanner
from tencache_fx.region.collective_order import find_order
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Monitor, Placement, Request
from tencache_fx.region.environment import Environment
from tencache_fx.region.graph_copy import copy_joint, copy_module
from tencache_fx.region.joint_split import Joint, gathering_nodes, reading_nodes, split_joint
from tencache_fx.region.kept_region import cache_key
from tencache_fx.region.lowering import Lowering, PlannedLowering
from tencache_fx.region.overlap_choice import better, leaves_room, may_gain_in_turn
from tencache_fx.region.rank_agreement import Agreed, RankAgreement, nodes_by_label
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.reporting.dump import write_region
from tencache_fx.reporting.tables import show_summary
from tencache_fx.runtime.process_groups import may_overlap

log = logging.getLogger("tencache_fx")


@seldom_collected()  # torch's lock lets one thread compile at a time
def compile_region(
    source: RegionSource, inputs: Sequence[Any], request: Request, monitors: Sequence[Monitor]
) -> CompiledRegion:
    """Capture, plan, rewrite and lower a region.

    Code that turns out to hold more than the budget is generated again, for a plan that keeps so much free. Raises
    `BudgetError` if no plan fits. Tracing may change torch's state: it is set back between attempts, and on an error.
    """
    REGIONS.compilations += 1
    REGIONS.give_back()
    if any(each.parameter.requires_grad for each in request.offloaded.values()):
        open_update_room(source.device, source.options.device_budget)
    names = _distinct_names(request.offloaded)
    set_back, unforeseen_bytes = remember(source.device), 0
    try:
        for _ in range(SPLITS):
            set_back()
            planner = RegionPlanner(
                source,
                request.sizes,
                unforeseen_bytes,
                {names[index]: each for index, each in request.offloaded.items()},
                Environment.find(source.device, source.options, request.boundary_bytes, request.external_bytes),
                accumulation=request.accumulation,
                adds=request.adds,
                updates_in_backward=any(map(is_updated_in_backward, request.offloaded.values())),
                by_step=request.by_step,
                recomputed=request.recomputed,
            )
            key = cache_key(source, request, names, planner)
            lowering = PlannedLowering(source, request, monitors, planner, names, keeps=key is not None)
            compilation = Compilation(source, planner, names, request.donated, lowering)
            compiled = lowering.finish(compilation.run(inputs, key, lowering), Placement(names=names))
            over_bytes = 0 if request.by_step else _over_bytes(source, compiled.record)
            if over_bytes <= 0:
                planner.earlier.keep_margin(planner.unforeseen_bytes)
                planner.earlier.keep_accumulation(planner.accumulation)
                break
            assert compiled.record is not None
            assert compiled.record.code_peak_bytes is not None
            unforeseen_bytes += compiled.record.code_peak_bytes - compiled.record.plan.forecast.peak_bytes
            log.info("region %d: its code would hold %d bytes too many; planning again", source.index, over_bytes)
        else:
            log.warning(
                f"region {source.index} runs, but its generated code holds {over_bytes} bytes more than the device "
                f"budget of {source.options.device_budget} bytes, after {SPLITS} plans; set device_budget to more, "
                "or shrink the batch."
            )
    except BaseException:
        set_back()
        raise
    if (record := compiled.record) is not None:
        if log.isEnabledFor(logging.INFO):
            summary = show_summary(record.problem, record.plan, record.captured, record.code_peak_bytes)
            log.info("region %d on %s:\n%s", source.index, source.device, summary)
        if source.options.dump_dir is not None:
            write_region(source.options.dump_dir, record)
    return compiled


class Compilation:
    """One attempt: the callbacks that torch is given, and what exists only until it returns.

    `names` are those of offloaded parameters by their positions among the inputs, `donated` the positions of donated
    inputs. `lowering` decides what becomes of the planned graphs.
    """

    def __init__(
        self,
        source: RegionSource,
        planner: RegionPlanner,
        names: Mapping[int, str],
        donated: frozenset[int],
        lowering: Lowering,
    ) -> None:
        self._source, self._planner, self._names = source, planner, names
        self._donated, self._lowering = donated, lowering
        self._lowers = False  # whether torch has asked for code
        self._overlaps = False  # in the graphs captured from here on, collectives are under way while kernels run
        self._early = False  # and gathers begin before sums there
        self._agreed: Agreed | None = None  # by all ranks
        self._gathers: frozenset[str] = frozenset()  # nodes that gather parameters
        self._again: frozenset[str] = (
            frozenset()
        )  # nodes that run again whatever the plan: these, and what is agreed on

    def run(self, inputs: Sequence[Any], key: str | None = None, keeper: PlannedLowering | None = None) -> Compiled:
        """Return the compiled function. The Dynamo graph is copied: the compilers below take ownership of theirs.

        With a `key`, AOTAutograd's cache is asked first; what it has is compiled again if `keeper` does not take it up.
        """
        source, gm = self._source, copy_module(self._source.graph)
        if source.options.compiler == "eager":
            return compat.compile_eager(gm, inputs, partition=self.partition, lower=self.lower)
        run, codes = compat.compile_inductor(
            gm,
            inputs,
            patches=source.settings,
            partition=self.partition,
            lower=self.lower,
            lazy_backward=source.options.device_budget is None,
            key=key,
            foresee=bool if keeper is None else keeper.foresee,
        )
        found = bool(codes) and not self._lowers  # else an entry was damaged, and its first part was read
        if keeper is not None and found and not keeper.take_up(codes):
            return self.run(inputs)
        return run

    def partition(self, joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> ForwardBackward:
        """Split the joint graph as AOTAutograd would, then write this region's plan into both graphs.

        Where the `joint` policy finds it worth recomputing more, the joint graph is split once more that way.
        """
        if self._source.options.compiler == "inductor":
            settle_pattern_layouts(joint.graph)
            copy_for_convolutions(joint.graph)
        gathers = gathering_nodes(joint.graph, self._names)
        task = Joint.prepare(joint, joint_inputs, recompute=self._source.options.recompute, **kwargs)
        labels = nodes_by_label(joint.graph) if gathers else {}
        self._agreed, self._gathers, self._again = None, gathers, gathers
        halves = self._halves(task)
        names, models = self._names.values(), self._planner.models
        agreement = RankAgreement.find(self._source, halves, gathers, names, models)
        agreed = None if agreement is None else agreement.read()
        if agreed is not None:
            halves = self._as_agreed(agreed, task, labels)
        graphs, candidate = self._best_way(task, halves)
        if agreement is not None and agreed is None and not _is_refused(candidate):
            mine = Agreed.of(graphs, gathers, labels)
            if (settled := agreement.settle(mine)) != mine:  # another rank was faster
                graphs, candidate = self._best_way(task, self._as_agreed(settled, task, labels))
        if candidate is not None:
            self._lowering.write(candidate)
        for graph in graphs:
            graph.recompile()
        return graphs

    def _as_agreed(self, agreed: Agreed, task: Joint, labels: Mapping[str, str]) -> ForwardBackward:
        """Return the halves as the ranks have agreed, as all others are from here on; `labels` name the joint's nodes.

        Where the graph has other ops, for sizes that torch takes as numbers, nothing runs again behind gathers.
        """
        again = {labels[label] for label in agreed.again} if labels.keys() >= set(agreed.again) else set()
        self._agreed, self._again = agreed, self._gathers | again
        return self._halves(task)

    def _best_way(self, task: Joint, halves: ForwardBackward) -> tuple[ForwardBackward, Candidate | None]:
        """Return the best split, with collectives that overlap if they may, and it pays."""
        self._overlaps = any(self._may_overlap(half.graph) for half in halves)
        self._early = self._overlaps and self._agreed is None and bool(self._gathers)
        graphs, candidate = self._best_split(task, halves)
        if self._early and candidate is not None and not leaves_room(self._planner, candidate):
            self._early = False
            graphs, candidate = self._best_split(task, self._halves(task))
        if self._overlaps and candidate is not None and may_gain_in_turn(self._planner, candidate):
            self._overlaps = False
            others, in_turn = self._best_split(task, self._halves(task))
            if in_turn is not None and better(self._planner, candidate, in_turn) is in_turn:
                return others, in_turn
        return graphs, candidate

    def _best_split(self, task: Joint, halves: ForwardBackward) -> tuple[ForwardBackward, Candidate | None]:
        """Return these halves of the joint graph, or others of which more is recomputed, and their plan."""
        candidate = self._plan(task, halves)
        if candidate is None or not self._source.options.may_recompute:
            return halves, candidate
        first = candidate

        def again(nodes: frozenset[str], names: tuple[str, ...]) -> tuple[ForwardBackward, Candidate | None]:
            more = self._halves(task, nodes)
            return more, self._plan(task, more, first=first, recomputed=names)

        better, candidate = self._planner.recompute_more(first, again)
        return better or halves, candidate

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Lower one graph with `compile_graph`; a region that has no backward is planned here."""
        self._lowers = True
        if phase == "inference":
            if self._source.options.compiler == "inductor":
                settle_pattern_layouts(gm.graph)
                copy_for_convolutions(gm.graph)
            self._overlaps = self._may_overlap(gm.graph)
            untouched = copy_joint(gm) if self._overlaps else None
            candidate = self._planner.plan(self._capture(gm.graph))
            if untouched is not None and candidate is not None and may_gain_in_turn(self._planner, candidate):
                self._overlaps = False
                in_turn = self._planner.plan(self._capture(untouched.graph))
                if in_turn is not None and better(self._planner, candidate, in_turn) is in_turn:
                    gm.graph, candidate = untouched.graph, in_turn
            if candidate is not None:
                self._lowering.write(candidate)
            gm.recompile()
        return self._lowering.lower(gm, example_inputs, compile_graph, phase=phase)

    def _may_overlap(self, graph: fx.Graph) -> bool:
        """Return whether there are collectives that may be under way at once."""
        groups, order = find_order((graph,))
        return bool(order) and may_overlap(groups, self._source.device)

    def _capture(self, forward: fx.Graph, backward: fx.Graph | None = None, **more: Any) -> RegionGraphs:
        """Return the graphs of the region, with what is known of their inputs; collectives overlap if they are to."""
        if self._overlaps:
            free = self._gathers if self._early else ()  # the other ranks are told of this order
            for graph in (forward, backward):
                if graph is not None:
                    overlap_collectives(graph, free)
        known = {"num_outputs": 1 << 30, "static_inputs": frozenset(), **more}
        return RegionGraphs(
            forward=forward, backward=backward, device=self._source.device, offloaded=self._names, **known
        )

    def _halves(self, joint: Joint, recomputed_nodes: frozenset[str] = frozenset()) -> ForwardBackward:
        """Split a joint graph in forward and backward; `recomputed_nodes` are computed in both."""
        kept = reading_nodes(joint.graph.graph, self._gathers, joint.num_outputs) if self._gathers else ()
        forward, backward = split_joint(joint, again=recomputed_nodes | self._again, kept=kept)
        if self._agreed is not None:
            gather_in_order(forward.graph, self._agreed.forward)
            gather_in_order(backward.graph, self._agreed.backward)
        return forward, backward

    def _plan(self, joint: Joint, halves: ForwardBackward, **more: Any) -> Candidate | None:
        """Return the plan for forward and backward, and what it is made from."""
        forward, backward = (half.graph for half in halves)
        capture = self._capture(
            forward,
            backward,
            num_outputs=joint.num_outputs,
            static_inputs=frozenset(joint.static_inputs),
            donated=self._donated,
        )
        free = self._agreed is None and not self._planner.by_step
        return self._planner.plan(capture, earlier=tuple(self._gathers) if free else (), **more)


def _is_refused(candidate: Candidate | None) -> bool:
    return candidate is not None and isinstance(candidate.plan, BudgetError)


def _over_bytes(source: RegionSource, record: RegionRecord | None) -> int:
    """Return by how much the generated code goes over the device budget; 0 where there is none of either."""
    budget_bytes = source.options.device_budget
    if budget_bytes is None or record is None or record.code_peak_bytes is None:
        return 0
    return record.code_peak_bytes - budget_bytes


def _distinct_names(offloaded: Mapping[int, OffloadedParameter]) -> dict[int, str]:
    """Return the names of offloaded parameters, with their positions where two models have the same names."""
    counts = Counter(each.name for each in offloaded.values())
    return {i: each.name if counts[each.name] == 1 else f"{each.name}#{i}" for i, each in offloaded.items()}
