"""Plans a region: one candidate for each way to split its joint graph into forward and backward."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from tencache_fx.errors import BudgetError
from tencache_fx.hardware.collective_rates import group_facts
from tencache_fx.model_state.disk_state import line_bytes
from tencache_fx.model_state.shard import UNKNOWN
from tencache_fx.passes.code_interface import Interface
from tencache_fx.passes.code_memory import UnreadableCodeError, code_bytes, code_peak_bytes
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.lifetimes import StorageNodes
from tencache_fx.passes.parameter_markers import write_markers
from tencache_fx.passes.pause import is_barrier, write_pause
from tencache_fx.passes.recipes import recomputed_nodes, with_recipes
from tencache_fx.passes.symbols import unbacked_sizes
from tencache_fx.planning.external import external_bytes, input_bytes, least_spill_bytes
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Budgets, Kind, Problem, Step, Storage, host_shares
from tencache_fx.planning.recalibration import StoredCorrection
from tencache_fx.planning.recompute_search import recomputed_for
from tencache_fx.planning.step_recompute import recomputed_to_fit
from tencache_fx.planning.swap_region import Points, SwapRegion, plan_swap_points
from tencache_fx.planning.tuning import SPLITS, TUNING
from tencache_fx.region.analysis import RegionAnalysis, analyze
from tencache_fx.region.collective_links import state_collectives
from tencache_fx.region.dynamic_shapes import NamedSizes, SizeFormulas
from tencache_fx.region.earlier_runs import EarlierRuns
from tencache_fx.region.environment import Environment
from tencache_fx.region.kept_plans import kept_choice, kept_plan
from tencache_fx.region.parameter_facts import ParameterFacts
from tencache_fx.region.reservations import Reservation, StatedProblem
from tencache_fx.region.source import RegionSource
from tencache_fx.tensors import upper_bound

log = logging.getLogger("tencache_fx")

ForwardBackward = tuple[fx.GraphModule, fx.GraphModule]
"""A region's forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A region split in one way, and the plan for it, or why there is none.

    `original` is the problem of the region as torch's partitioner splits it, before more was recomputed; `captured` the
    one of this split, before it was decided which offloaded parameters stay on the device; `staying` are those that
    have to. `held_bytes` are those on the device when it was compiled, without offloaded parameters but with those that
    have to stay; `input_bytes` are the region's own among them. Durations are scaled by the `correction` that earlier
    runs have learned, which is kept under `correction_key`.
    """

    analysis: RegionAnalysis
    original: Problem
    captured: Problem
    problem: Problem
    plan: Plan | BudgetError
    formulas: SizeFormulas | None
    held_bytes: int
    input_bytes: int
    correction: StoredCorrection
    correction_key: dict[str, str]
    staying: frozenset[str]

    @property
    def resident_bytes(self) -> int:
        """The bytes of the parameters that were chosen to stay on the device."""
        return input_bytes(self.problem.storages) - input_bytes(self.captured.storages)

    @property
    def beside_bytes(self) -> int:
        """The bytes beside the region of the state of parameters that are updated on the device, and of sums there."""
        return self.problem.external_bytes - self.captured.external_bytes

    @property
    def external_bytes(self) -> int:
        """The bytes on the device beside the region: those of others, and the state and the sums to be there."""
        return external_bytes(self.held_bytes, self.input_bytes) + self.beside_bytes

    @property
    def scratch(self) -> Mapping[str, int]:
        """The bytes that kernels were seen to allocate for themselves, at the sizes planned for, by their nodes."""
        pairs = zip(self.analysis.ops, self.problem.ops, strict=True)
        grown = {op.name: (op.scratch_bytes, planned.scratch_bytes) for op, planned in pairs if op.scratch_bytes}
        seen = self.analysis.scratch
        return {name: seen[name] * planned // now for name, (now, planned) in grown.items() if name in seen}

    def code_peak_bytes(self, code: Sequence[tuple[Interface, str]]) -> int | None:
        """Return the most bytes on the device while the generated `code` runs; None, with a warning, if unreadable."""
        try:
            return self.external_bytes + code_peak_bytes(code, self.analysis.capture.num_outputs)
        except UnreadableCodeError as error:
            log.warning("the generated code cannot be read, so its peak is a forecast: %s.", str(error))
            return None

    def swap_region(self, plan: Plan, points: Points, code: Sequence[tuple[Interface, str]]) -> SwapRegion:
        """Return the region for the plan of a step; `code` is what was generated for its graphs, if that can be read.

        Where the code holds more than the graphs show, in the order in which they run it, the region does.
        """
        region = SwapRegion(
            problem=self.problem.within(device_bytes=None),
            transfers=plan.transfers,
            points=points,
            original=self.original,
            recomputed=frozenset(plan.recomputed),
        )
        try:
            held = code_bytes(code, self.analysis.capture.num_outputs) if code else []
        except UnreadableCodeError:  # `code_peak_bytes` has warned
            held = []
        return region.holding(held, self.analysis.unseen_bytes(self.problem.ops)) if held else region

    @property
    def missing_bytes(self) -> int:
        """How much less device memory would have to be needed for there to be a plan; 0 where there is one.

        By how much the floor is above the budget; or if host memory or disk is too small, the bytes to offload.
        """
        limit = self.problem.budgets.device_bytes
        if limit is None or not isinstance(self.plan, BudgetError):
            return 0
        return self.needed_bytes(self.problem) - limit

    def needed_bytes(self, problem: Problem) -> int:
        """Return what another problem needs of what this one lacks, device memory with or without transfers."""
        is_floor_over = floor_bytes(self.problem) > (self.problem.budgets.device_bytes or 0)
        return floor_bytes(problem) if is_floor_over else int(live_bytes(problem).max(initial=0))

    def rank(self) -> tuple[int, int]:
        """Return how good it is, lower is better: whether it fits, then how fast it is, or what it would need."""
        if isinstance(self.plan, BudgetError):
            return 1, floor_bytes(self.problem)
        return 0, step_ns(self.problem, self.plan.forecast)


Names = tuple[str, ...]

SplitAgain = Callable[[frozenset[str], Names], tuple[ForwardBackward, Candidate | None]]
"""Splits a region with these nodes recomputed, which are the storages of these names."""


class RegionPlanner:
    """Plans a region for one attempt to compile it.

    `sizes` are those at hand and those to plan for, if these differ. `unforeseen_bytes` are kept free: code generated
    earlier held so much more than the graphs show. The bytes that an earlier compilation of the same region had to keep
    free in the end are kept free from the start. `offloaded` are the offloaded parameters, by their names in the plan.
    An update follows `accumulation` backwards (None: as many as in earlier runs), or, with `updates_in_backward`, each
    parameter is updated as soon as its gradient is there. With `adds`, host memory has gradients beside those that they
    are added to. What is to be `recomputed` is given where regions are planned together.
    """

    def __init__(
        self,
        source: RegionSource,
        sizes: tuple[NamedSizes, NamedSizes] | None,
        unforeseen_bytes: int,
        offloaded: Mapping[str, ParameterFacts],
        environment: Environment,
        *,
        accumulation: int | None = None,
        updates_in_backward: bool = False,
        adds: bool = False,
        by_step: bool = False,
        recomputed: frozenset[str] | None = None,
    ) -> None:
        options, self._inputs = source.options, source.fakes()
        self._options, self._device, self._sizes = options, source.device, sizes
        self.earlier = EarlierRuns.read(source, offloaded, sizes and sizes[1])
        self.unforeseen_bytes = unforeseen_bytes + self.earlier.margin_bytes
        self._offloaded, self._environment = offloaded, environment
        self.accumulation = self.earlier.accumulation if accumulation is None else accumulation
        self.updates_in_backward, self._adds, self.by_step = updates_in_backward, adds, by_step
        self._recomputed = recomputed

    def plan(
        self, capture: RegionGraphs, first: Candidate | None = None, recomputed: Names = (), earlier: Names = ()
    ) -> Candidate | None:
        """Return the plan for these graphs, and what it is made from; `first` is the one without what is `recomputed`.

        None, unmeasured, if some of its sizes are known only when it runs, and there is no device budget, or nothing
        bounds them: it then runs without a plan, and with a budget a warning says so. Nodes `earlier` gather sooner.
        """
        options = self._options
        if not capture.offloaded and (sizes := unbacked_sizes(capture)):
            if options.device_budget is None:
                return None
            if (size := next((each for each in sizes if upper_bound(each) is None), None)) is not None:
                log.warning(
                    "a region runs without a plan, whatever it holds: its size %s is known only when it runs, and "
                    "nothing bounds it; torch._check(size <= most) does, and then it is planned for the most.",
                    size,
                )
                return None
        shards = {name: _group_of(each, capture) for name, each in self._offloaded.items()}
        state_bytes = {name: (each.state_bytes, each.host_state_bytes) for name, each in self._offloaded.items()}
        tiers = {name: each.tier for name, each in self._offloaded.items()}
        staying = write_markers(capture, capture.offloaded, state_bytes, shards, tiers)
        staying_bytes = sum(self._offloaded[name].nbytes for name in staying)
        training = capture.backward is not None
        by_step = self.by_step and training
        # How much is to be free beside other regions, the step's problem says.
        wanted = {} if by_step else self._environment.wanted(training=training)
        if Reservation.BOUNDARY in wanted or by_step:
            write_pause(capture)
        held_now_bytes = self._held_beside(training=training) + staying_bytes
        measure = self._environment.measures
        known = analyze(capture, options, self._environment.roofline, measure=measure, by_step=by_step)
        correction = self.earlier.correction
        known = dataclasses.replace(known, ops=correction.planning.scale(known.ops, capture.boundary))
        stated = self._state_problem(known, held_now_bytes, () if first is None else first.analysis.storages)
        if first is None:
            may_recompute = options.recompute == "auto"
            bare = with_recipes(stated.problem, capture, known.storages, earlier) if may_recompute else stated.problem
        else:
            extra_ns = max(0, known.duration_ns - first.analysis.duration_ns)
            bare = dataclasses.replace(stated.problem, recompute_ns=extra_ns)
        stated = dataclasses.replace(stated, problem=bare)
        reserved, captured, plan = stated.plan(wanted, _planner_of(shards.values(), options.policy, by_step=by_step))
        problem = captured
        if isinstance(plan, Plan):
            problem = keep_resident(captured, **plan.pinned)
            plan = dataclasses.replace(plan, recomputed=recomputed, resident=(*sorted(staying), *plan.resident))
        return Candidate(
            analysis=known,
            original=captured if first is None else first.original,
            captured=captured,
            problem=problem,
            plan=plan,
            formulas=stated.formulas,
            held_bytes=stated.held_with(reserved),
            input_bytes=stated.input_bytes,
            correction=correction,
            correction_key=self.earlier.correction_key,
            staying=staying,
        )

    def _held_beside(self, *, training: bool) -> int:
        """Return the bytes on the device without offloaded parameters, and without their state if that is planned."""
        bytes_here = 0
        for each in self._offloaded.values():
            if training or not each.updated_on_device:
                bytes_here += each.nbytes if each.on_device else 0
                bytes_here += each.device_state_bytes
        return max(0, self._environment.held_bytes - bytes_here)

    @property
    def models(self) -> tuple[str, ...]:
        """The models spread over ranks that the parameters are of (`RankGroup.model`)."""
        return tuple(sorted({each.shard.group.model for each in self._offloaded.values() if each.shard is not None}))

    @property
    def device_budget(self) -> int | None:
        """The device budget in bytes; None without one."""
        return self._options.device_budget

    def recompute_more(self, first: Candidate, split: SplitAgain) -> tuple[ForwardBackward | None, Candidate]:
        """Return the best of `first` and of candidates that recompute more, with the graphs of one of those.

        This is the outermost level of the search (`planning/search.py`). Torch may save other values than the policy
        took it to: the bytes that do not fit then are taken off the budget of the next search. If none of `SPLITS`
        searches leads to a plan, what needs the least memory by its model is tried.
        """
        recipes = first.captured.recipes

        def split_with(names: Names) -> tuple[ForwardBackward, Candidate]:
            graphs, candidate = split(recomputed_nodes(first.analysis.capture, recipes, names), names)
            assert candidate is not None
            return graphs, candidate

        if self.by_step:
            recomputed = recomputed_to_fit(first.captured) if self._recomputed is None else self._recomputed
            names = tuple(sorted(recomputed & {recipe.name for recipe in recipes}))
            return split_with(names) if names else (None, first)
        graphs, best, problem = None, first, first.captured
        for _ in range(SPLITS):
            if not (names := kept_choice(problem)):
                break
            more_graphs, more = split_with(names)
            if more.rank() < best.rank():
                graphs, best = more_graphs, more
            if more.missing_bytes == 0:
                break
            problem = problem.with_less(more.missing_bytes)
        if best.missing_bytes and (names := recomputed_for(first.captured, 0, best.needed_bytes)):
            more_graphs, more = split_with(names)
            if more.rank() < best.rank():
                graphs, best = more_graphs, more
        return graphs, best

    def facts(self, bound_bytes: int) -> tuple[object, ...]:
        """Return plain values: all that decides the region's plan beside itself, its options and what it is asked for.

        Not the times of ops: a plan for other times is as right. More than `bound_bytes`, and what offloaded parameters
        take, is of no use to it on the host or on disk.
        """
        environment, used = self._environment, self._environment.usage
        most_bytes = bound_bytes + sum(8 * each.nbytes + 2 * each.state_bytes for each in self._offloaded.values())
        return (
            environment.roofline,
            environment.links,
            (environment.held_bytes, environment.external_bytes),
            sorted(environment.reservations.items()),
            environment.measures,
            min(self._options.host_budget - used.host_acquired_bytes, most_bytes),
            min(self._options.spill_budget - used.disk_acquired_bytes, most_bytes),
            [
                (name, each.nbytes, each.tier, each.on_device)
                + (each.updated_on_device, each.state_bytes, each.host_state_bytes, each.device_state_bytes)
                for name, each in sorted(self._offloaded.items())
            ],
            self.unforeseen_bytes,
            self.earlier.correction.planning,
            (self.accumulation, self._adds),
            self.updates_in_backward,
            group_facts(),
        )

    def budgets(self, storages: Iterable[Storage]) -> Budgets:
        """Return the memory that there is for a region with these storages, beside what is used already."""
        options, used = self._options, self._environment.usage  # other regions keep it while this one runs
        sunk = [storage for storage in storages if storage.kind is Kind.STORED]
        # Gradients and state that its first step will make: that host memory is not free for transfers.
        more_bytes = max(0, (1 + self._adds) * sum(each.nbytes for each in sunk) - used.gradient_acquired_bytes)
        state_bytes = sum(each.host_state_bytes for each in sunk)
        if options.spill_budget:
            state_bytes = min(state_bytes, line_bytes(options.host_budget))
        more_bytes += max(0, state_bytes - used.state_acquired_bytes) if sunk else 0
        return Budgets(
            device_bytes=options.device_budget,
            **host_shares(options.host_budget, used.host_acquired_bytes + more_bytes),
            disk_bytes=max(0, options.spill_budget - used.disk_acquired_bytes),
        )

    def _state_problem(
        self, known: RegionAnalysis, held_bytes: int, originally: Sequence[StorageNodes]
    ) -> StatedProblem:
        """Return everything the planner may know: steps with their cost, storages, links, budgets.

        The storages that were `originally` there, before more was recomputed, have formulas as well.
        """
        options, capture, fuses = self._options, known.capture, self._options.compiler == "inductor"
        problem = Problem(
            ops=known.ops,
            boundary=capture.boundary,
            storages=tuple(item.storage for item in known.storages),
            links=self._environment.links,
            budgets=self.budgets(item.storage for item in known.storages),
            barriers=tuple(Step(k) for k, node in enumerate(capture.nodes) if fuses and is_barrier(node)),
            min_spill_bytes=least_spill_bytes(options.device_budget),
            accumulation=self.accumulation,
            updates_in_backward=self.updates_in_backward,
            sums_stay=not (self.by_step or any(_group_of(each, capture) for each in self._offloaded.values())),
            collectives=state_collectives(known, of_gpu=self._environment.roofline.of_gpu),
        )
        formulas, entering_bytes, of_step = None, 0, self._environment.external_bytes
        if options.device_budget is not None:  # measured at the sizes that torch traced with
            now, planned = self._sizes or (None, None)
            formulas = SizeFormulas(self._inputs, (*known.storages, *originally), self._device, planned)
            held_now = problem if now is None else formulas.resize(problem, formulas.hints, formulas.unnamed(now))
            entering_bytes = input_bytes(held_now.storages)
            problem = formulas.resize(problem, formulas.hints, formulas.planned)
        return StatedProblem(
            problem=problem,
            formulas=formulas,
            held_bytes=held_bytes + (0 if of_step is None else of_step + entering_bytes),
            waiting_bytes=self._environment.reservations.get(Reservation.WAITING, 0),
            input_bytes=entering_bytes,
            unforeseen_bytes=self.unforeseen_bytes,
            fused=fuses,
        )


def _group_of(offloaded: ParameterFacts, capture: RegionGraphs) -> str:
    """Return the process group over which a parameter is spread; some, if it is not known, where the graph scatters."""
    if offloaded.shard is not None:
        return offloaded.shard.group.name
    return UNKNOWN if capture.scatters else ""


def _planner_of(shards: Collection[str], policy: str, *, by_step: bool) -> Callable[[Problem], Plan]:
    """Return the planner of a region whose parameters are spread over the groups `shards`.

    Where nobody knows over which, all gradients are offloaded: one that stays would not show that it is a part.
    """
    if by_step:
        return partial(plan_swap_points, policy=policy)
    make = partial(kept_plan, policy=policy)
    return partial(make, tuning=dataclasses.replace(TUNING, state_shares=())) if UNKNOWN in shards else make
