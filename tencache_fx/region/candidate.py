"""What one compilation of a region has to get by with, and what is planned for each way to split it."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import fx

from tencache_fx.errors import BudgetError
from tencache_fx.hardware import rates
from tencache_fx.hardware.cache import cached, kept
from tencache_fx.hardware.device_memory import input_bytes, outside_bytes
from tencache_fx.model_state.disk_state import line_bytes
from tencache_fx.options import Options
from tencache_fx.passes.code_interface import Interface
from tencache_fx.passes.code_memory import UnreadableCodeError, code_peak_bytes
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.lifetimes import StorageNodes
from tencache_fx.passes.parameter_markers import write_moves
from tencache_fx.passes.pause import is_fence, write_pause
from tencache_fx.passes.recipes import find_recipes, recomputed_nodes
from tencache_fx.passes.symbols import unbacked_sizes
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident, step_ns
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes, make_plan
from tencache_fx.planning.problem import Budgets, Kind, Problem, Step
from tencache_fx.planning.recalibration import StoredCorrection
from tencache_fx.planning.search import choose_for_region
from tencache_fx.region.analysis import RegionAnalysis, study
from tencache_fx.region.dynamic_shapes import SizeFormulas, Sizes
from tencache_fx.region.environment import Environment
from tencache_fx.serialization import to_json
from tencache_fx.tensors import upper_bound

log = logging.getLogger("tencache_fx")

ATTEMPTS = 3  # how often the `joint` policy is asked, and code generated, before the best there was is taken

ForwardBackward = tuple[fx.GraphModule, fx.GraphModule]
"""A region's forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A region split in one way, and the plan for it, or why there is none.

    `captured` is the problem before it was decided which parameters with a home stay on the device; `staying` are those
    that have to. `held_bytes` are those on the device when it was compiled, but for parameters with a home and with
    those that have to stay, `input_bytes` the region's own among them. Durations are scaled as earlier runs have
    `learned`, which is kept under `learned_key`.
    """

    study: RegionAnalysis
    captured: Problem
    problem: Problem
    plan: Plan | BudgetError
    formulas: SizeFormulas | None
    held_bytes: int
    input_bytes: int
    learned: StoredCorrection
    learned_key: dict[str, str]
    staying: frozenset[str]

    @property
    def resident_bytes(self) -> int:
        """The bytes of the parameters that were chosen to stay on the device."""
        return input_bytes(self.problem.storages) - input_bytes(self.captured.storages)

    @property
    def state_bytes(self) -> int:
        """The bytes of the state of parameters that are updated on the device."""
        return self.problem.outside_bytes - self.captured.outside_bytes

    @property
    def outside_bytes(self) -> int:
        """The bytes on the device beside the region: those of others, and the state that is to be there."""
        return outside_bytes(self.held_bytes, self.input_bytes) + self.state_bytes

    @property
    def scratch(self) -> Mapping[str, int]:
        """The bytes that kernels were seen to allocate for themselves, at the sizes planned for, by their nodes."""
        pairs = zip(self.study.ops, self.problem.ops, strict=True)
        grown = {op.name: (op.scratch_bytes, planned.scratch_bytes) for op, planned in pairs if op.scratch_bytes}
        seen = self.study.scratch
        return {name: seen[name] * planned // now for name, (now, planned) in grown.items() if name in seen}

    def weigh(self, code: Sequence[tuple[Interface, str]]) -> int | None:
        """Return the most bytes on the device while the generated `code` runs; None, with a warning, if unreadable."""
        try:
            return self.outside_bytes + code_peak_bytes(code, self.study.capture.num_outputs)
        except UnreadableCodeError as error:
            log.warning("what generated code holds is only a forecast: %s.", str(error))
            return None

    @property
    def missing_bytes(self) -> int:
        """How much less device memory would have to be needed for there to be a plan; 0 where there is one.

        By how much the floor is above the budget, or where that is low enough and host memory or disk is not, how much
        was to travel.
        """
        limit = self.problem.budgets.device_bytes
        if limit is None or not isinstance(self.plan, BudgetError):
            return 0
        over_bytes = floor_bytes(self.problem) - limit
        return over_bytes if over_bytes > 0 else int(live_bytes(self.problem).max()) - limit

    def rank(self) -> tuple[int, int]:
        """Return how good it is, lower is better: whether it fits, then how fast it is, or what it would need."""
        if isinstance(self.plan, BudgetError):
            return 1, floor_bytes(self.problem)
        return 0, step_ns(self.problem, self.plan.forecast)


Names = tuple[str, ...]

SplitAgain = Callable[[frozenset[str], Names], tuple[ForwardBackward, Candidate | None]]
"""Splits a region with these nodes recomputed, which are the storages of these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """How much more a region's generated code held than its graphs show."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The storages to recompute, by name."""

    names: tuple[str, ...]


class ParameterFacts(Protocol):
    """What planning needs to know of a parameter with a home: its bytes, and what there is on the device, too."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the parameter."""

    @property
    def on_device(self) -> bool:
        """Say whether the parameter's bytes are on the device, too."""

    @property
    def updated_here(self) -> bool:
        """Say whether its gradient and its optimizer's state are, or are to be."""

    @property
    def state_bytes(self) -> int:
        """Return what its optimizer keeps of it, or may keep."""

    @property
    def state_here_bytes(self) -> int:
        """Return the bytes of that state that are there now."""


class RegionPlanner:
    """Makes the drafts of one compilation.

    `settings` are Inductor's; `inputs` the region's, as torch traced them; `sizes` those at hand and those to plan for,
    if these differ. `unforeseen_bytes` are kept free: code generated earlier held so much more than the graphs show.
    What an earlier compilation of the same region had to keep free in the end is kept free from the start. `homes` are
    those of the region's parameters, by the names that its plan has for them, `around` what there is besides.
    """

    def __init__(
        self,
        options: Options,
        settings: Mapping[str, object],
        device: torch.device,
        inputs: Sequence[object],
        sizes: tuple[Sizes, Sizes] | None,
        unforeseen_bytes: int,
        homes: Mapping[str, ParameterFacts],
        around: Environment,
    ) -> None:
        self._options, self._device, self._inputs, self._sizes = options, device, inputs, sizes
        asked = (options.device_budget, options.policy, options.recompute, options.compiler, sorted(settings.items()))
        self._asked = {"asked": repr(asked)}  # what was learned of a plan holds for one asked for in the same way
        self._unforeseen_bytes = unforeseen_bytes
        self._margin_key: dict[str, str] = {}
        self._homes, self._around = homes, around

    def draft(self, capture: RegionGraphs, beside: Candidate | None = None, recomputed: Names = ()) -> Candidate | None:
        """Return what is known of the captured region and planned for it; `beside` is it without what is `recomputed`.

        None, unmeasured, if some of its sizes are known only when it runs, and there is no device budget, or nothing
        bounds them: it then runs without a plan, and with a budget a warning says so.
        """
        options = self._options
        if not capture.homes and (sizes := unbacked_sizes(capture)):
            if options.device_budget is None:
                return None
            if (size := next((each for each in sizes if upper_bound(each) is None), None)) is not None:
                log.warning(
                    "a region runs without a plan, whatever it holds: its size %s is known only when it runs, and "
                    "nothing bounds it; torch._check(size <= most) does, and then it is planned for the most.",
                    size,
                )
                return None
        staying = write_moves(capture, capture.homes, {name: home.state_bytes for name, home in self._homes.items()})
        staying_bytes = sum(self._homes[name].nbytes for name in staying)
        pauses = capture.backward is not None and self._around.between_bytes > 0
        if pauses:
            write_pause(capture)
        held_now_bytes = self._held_beside(training=capture.backward is not None) + staying_bytes
        known = study(capture, options, self._around.roofline, measure=self._around.measures)
        if beside is None:
            key = {**rates.device_key("scales", self._device), **self._asked, "region": known.fingerprint}
            learned = (kept(key, StoredCorrection) if options.calibrate else None) or StoredCorrection()
            if options.device_budget is not None:
                planned = str(self._sizes and self._sizes[1])
                self._margin_key = {**key, "what": "margin", "sizes": planned}
                self._unforeseen_bytes += (kept(self._margin_key, Margin) or Margin(nbytes=0)).nbytes
        else:
            key, learned = beside.learned_key, beside.learned
        known = dataclasses.replace(known, ops=learned.planning.scale(known.ops, capture.boundary))
        expected_bytes = self._around.expected_bytes if capture.backward is not None else 0
        for more_bytes in (expected_bytes, 0):  # nothing, where there is no room for that
            problem, formulas, entering_bytes = self._state_problem(known, held_now_bytes + more_bytes)
            if _over_bytes(problem) <= 0:
                break
        held_now_bytes += more_bytes
        if self._around.pending_bytes and _over_bytes(problem) > 0:  # the last time that those hold so much
            held_now_bytes = max(0, held_now_bytes - self._around.pending_bytes)
            problem, formulas, entering_bytes = self._state_problem(known, held_now_bytes)
        problem = _keep_between(problem, self._around.between_bytes) if pauses else problem
        if beside is None:
            recipes = find_recipes(capture, known.storages) if options.recompute == "auto" else ()
            problem = dataclasses.replace(problem, recipes=recipes)
        else:
            extra_ns = max(0, known.duration_ns - beside.study.duration_ns)
            problem = dataclasses.replace(problem, recompute_ns=extra_ns)
        travels = bool(capture.homes) or int(live_bytes(problem).max(initial=0)) > (options.device_budget or 0)
        make = _planner_of(capture, options.policy)
        problem, plan = _plan_for(problem, make, self._around.drift_bytes if travels else 0)
        stated = problem
        if isinstance(plan, Plan):
            stated = keep_resident(problem, plan.resident, plan.updated_here)
            plan = dataclasses.replace(plan, recomputed=recomputed, resident=(*sorted(staying), *plan.resident))
        return Candidate(
            study=known,
            problem=stated,
            captured=problem,
            plan=plan,
            formulas=formulas,
            held_bytes=held_now_bytes,
            input_bytes=entering_bytes,
            learned=learned,
            learned_key=key,
            staying=staying,
        )

    def _held_beside(self, *, training: bool) -> int:
        """Return the bytes on the device but for parameters with a home, and for their state, if it is planned here."""
        bytes_here = 0
        for home in self._homes.values():
            if training or not home.updated_here:
                bytes_here += home.nbytes if home.on_device else 0
                bytes_here += home.state_here_bytes
        return max(0, self._around.held_bytes - bytes_here)

    def choose_recomputed(self, problem: Problem) -> tuple[str, ...]:
        """Return what the `joint` policy recomputes. The search takes seconds; what it found for a problem is kept."""
        budgets, most_bytes = problem.budgets, 2 * sum(storage.nbytes for storage in problem.storages)
        capped = dataclasses.replace(  # how much memory and disk are free besides, changes from minute to minute
            budgets,
            host_bytes=min(budgets.host_bytes, most_bytes),
            disk_bytes=min(budgets.disk_bytes, most_bytes),
            host_taken_bytes=0,
        )
        digest = hashlib.sha256(to_json(dataclasses.replace(problem, budgets=capped)).encode()).hexdigest()
        key = {"what": "choice", "problem": digest}
        return cached(key, Choice, lambda: Choice(names=choose_for_region(problem))).names

    def recompute_more(self, first: Candidate, split: SplitAgain) -> tuple[ForwardBackward | None, Candidate]:
        """Return the best of `first` and of drafts that recompute more, with the halves of one of those.

        What does not fit then (torch may save other values than the policy took it to) is asked for in less memory.
        """
        halves, best, problem = None, first, first.captured
        for _ in range(ATTEMPTS):
            if not (names := self.choose_recomputed(problem)):
                break
            more_halves, more = split(recomputed_nodes(first.study.capture, first.captured.recipes, names), names)
            assert more is not None
            if more.rank() < best.rank():
                halves, best = more_halves, more
            if more.missing_bytes == 0:
                break
            problem = problem.with_less(more.missing_bytes)
        return halves, best

    def keep_margin(self) -> None:
        """Keep for the next compilation what this one had to keep free of what the graphs do not show."""
        if self._unforeseen_bytes:
            cached(self._margin_key, Margin, lambda: Margin(nbytes=self._unforeseen_bytes), renew=True)

    def _state_problem(self, known: RegionAnalysis, held_bytes: int) -> tuple[Problem, SizeFormulas | None, int]:
        """Return everything the planner may know: steps with their cost, storages, links, budgets.

        And beside it the storages' sizes as formulas, if there is a device budget, and the bytes of the inputs.
        """
        options, capture = self._options, known.capture
        fuses = options.compiler == "inductor"
        away = self._around.usage  # what other regions have away right now stays away while this one runs
        sunk = [item.storage for item in known.storages if item.storage.kind is Kind.SUNK]
        # What its first step will take is not free for trips.
        more_bytes = max(0, sum(each.nbytes for each in sunk) - away.gradient_lent_bytes)
        state_bytes = sum(each.state_bytes for each in sunk)
        if options.spill_budget:
            state_bytes = min(state_bytes, line_bytes(options.host_budget))
        more_bytes += max(0, state_bytes - away.state_lent_bytes) if sunk else 0
        problem = Problem(
            ops=known.ops,
            boundary=capture.boundary,
            storages=tuple(item.storage for item in known.storages),
            links=self._around.links,
            budgets=Budgets(
                device_bytes=options.device_budget,
                host_bytes=max(0, options.host_budget - away.host_lent_bytes - more_bytes),
                host_taken_bytes=away.host_lent_bytes + more_bytes,
                disk_bytes=max(0, options.spill_budget - away.disk_lent_bytes),
            ),
            fences=tuple(Step(k) for k, node in enumerate(capture.nodes) if fuses and is_fence(node)),
            # Smaller storages cannot matter: this many would still be under a thousandth of the budget each.
            min_spill_bytes=max(4096, (options.device_budget or 0) // 4096),
        )
        formulas, entering_bytes = None, 0
        if options.device_budget is not None:
            problem, formulas, entering_bytes = self._at_sizes(problem, known.storages, held_bytes)
        # One fused kernel's results are all allocated before it runs, small ones the plan sees later among them.
        results_bytes = int(live_bytes(problem).max(initial=0)) // 256 if fuses else 0
        outside_bytes = problem.outside_bytes + results_bytes + self._unforeseen_bytes
        return dataclasses.replace(problem, outside_bytes=outside_bytes), formulas, entering_bytes

    def _at_sizes(
        self, problem: Problem, storages: Sequence[StorageNodes], held_bytes: int
    ) -> tuple[Problem, SizeFormulas, int]:
        """Return `problem`, measured at the sizes torch traced with, for those to plan for; formulas; input bytes."""
        now, planned = self._sizes or (None, None)
        formulas = SizeFormulas(self._inputs, storages, self._device, planned)
        held_now = problem if now is None else formulas.resize(problem, formulas.hints, now)
        entering_bytes = input_bytes(held_now.storages)
        resized = formulas.resize(problem, formulas.hints, formulas.planned)
        beside_bytes = outside_bytes(held_bytes, entering_bytes)
        return dataclasses.replace(resized, outside_bytes=beside_bytes), formulas, entering_bytes


def _over_bytes(problem: Problem) -> int:
    """Return by how much the floor is above the budget; negative where it is below."""
    limit = problem.budgets.device_bytes
    return 0 if limit is None else floor_bytes(problem) - limit


def _keep_between(problem: Problem, nbytes: int) -> Problem:
    """Return the problem with so much free between its graphs, or with as much as there is room for."""
    whole = dataclasses.replace(problem, between_bytes=nbytes)
    return dataclasses.replace(problem, between_bytes=max(0, nbytes - max(0, _over_bytes(whole))))


def _planner_of(capture: RegionGraphs, policy: str) -> Callable[[Problem], Plan]:
    """Return what plans a region: where gradients are shards they all leave, and who takes a norm of one is stopped."""
    make = partial(make_plan, policy=policy)
    return partial(make, state_shares=()) if capture.scatters else make


def _plan_for(
    problem: Problem, make: Callable[[Problem], Plan], spare_bytes: int = 0
) -> tuple[Problem, Plan | BudgetError]:
    """Return what is planned, and the plan, or why there is none.

    If there is none that leaves `spare_bytes` of the budget, none are left, and then less between the graphs.
    """
    if spare_bytes:
        assert problem.budgets.device_bytes is not None
        budgets = dataclasses.replace(problem.budgets, device_bytes=problem.budgets.device_bytes - spare_bytes)
        spared = dataclasses.replace(problem, budgets=budgets)
        try:
            return spared, make(spared)
        except BudgetError:
            return _plan_for(problem, make)
    try:
        return problem, make(problem)
    except BudgetError as refusal:
        if not (nbytes := problem.between_bytes):
            return problem, refusal
    few = (problem.budgets.device_bytes or 0) // 16  # a plan can take a while
    return _plan_for(dataclasses.replace(problem, between_bytes=nbytes // 2 if nbytes > few else 0), make)
