"""Plans the steps of one device: what each region recomputes, and for each order of runs a schedule."""

import contextlib
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tencache_fx.errors import BudgetError, OptionError, StoreError
from tencache_fx.hardware.device_memory import held_bytes
from tencache_fx.model_state.step_hooks import is_updated_in_backward
from tencache_fx.options import Options
from tencache_fx.planning.external import drift_bytes
from tencache_fx.planning.parameter_schedule import keep_resident
from tencache_fx.planning.plan import Plan, PoolClass
from tencache_fx.planning.problem import Budgets
from tencache_fx.planning.step import FRUGAL, StepProblem, StepSchedule, Visit, align, join, to_schedule
from tencache_fx.planning.step_recompute import least_peak_bytes
from tencache_fx.planning.tuning import TUNING
from tencache_fx.planning.verify import verify_plan
from tencache_fx.records import StepRecord
from tencache_fx.region.backward_counter import BackwardCounter
from tencache_fx.region.environment import links_of
from tencache_fx.region.kept_plans import kept_plan
from tencache_fx.region.optimizer_forecast import expected_state_bytes
from tencache_fx.region.step_choices import StepChoices
from tencache_fx.region.step_records import record_step
from tencache_fx.region.step_residency import Order, Place, ReadParameters, Run, StepResidency
from tencache_fx.reporting.dump import write_step
from tencache_fx.reporting.step_tables import show_figures
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine_registry import usage
from tencache_fx.runtime.swap_points import SwapPoints
from tencache_fx.units import PAGE_BYTES, round_up

log = logging.getLogger("tencache_fx")

_ROOM = 64  # with so much of the budget more room than its plan was made for, a program is planned again
_COPYING = replace(TUNING, resident_shares=(0.0,), state_shares=())  # nothing more stays than was decided
_PLANS = 4  # times that a program is planned at most


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The plan of a program, `None` where none fits, with what it was made for and the schedule that carries it out.

    `options` have the budgets it was made for, `beside_bytes` are those of parameters that stay, and that the program
    does not read. A `refusal` says why the program may not run at all.
    """

    options: Options
    beside_bytes: int
    read: ReadParameters
    visits: tuple[Visit, ...]
    joined: StepProblem
    plan: Plan | None
    schedule: StepSchedule
    refusal: str | None = None

    @property
    def limit(self) -> int | None:
        """The device budget."""
        return self.options.device_budget

    @property
    def made_for(self) -> tuple[int | None, ...]:
        """The budgets, and how many rounds come before an update."""
        return (*_budgets_in(self.options), self.joined.problem.accumulation)


@dataclass(eq=False)
class Program:
    """An order of runs, as it was last measured, and its plan; `successor` is the program that followed it last.

    `rounds` counts how often it has run from one update of its parameters to the next.

    `first` are the options of its first forward, `options` those with the least budget. It is dumped under its
    `number`.
    """

    order: Order
    visits: tuple[Visit, ...]
    planned: StepPlan | None = None
    plans: int = 0
    successor: "Program | None" = None
    first: Options | None = None
    options: Options | None = None
    number: int | None = None
    rounds: BackwardCounter = field(default_factory=BackwardCounter)

    @property
    def accumulation(self) -> int:
        """How many rounds come before an update, as far as was seen."""
        return self.rounds.per_update or 1

    @property
    def has_plan(self) -> bool:
        """Whether it has been planned, and fits."""
        return self.planned is not None and self.planned.plan is not None

    @cached_property
    def sizes(self) -> Mapping[Run, int]:
        """The bytes of all storages of each of its runs."""
        return {place.run: place.nbytes for place in self.order}

    @cached_property
    def places(self) -> Mapping[Run, int]:
        """The place of each of its runs among them."""
        return {place.run: at for at, place in enumerate(self.order)}

    @property
    def schedule(self) -> StepSchedule:
        """The schedule to follow: the frugal one where there is no plan."""
        return FRUGAL if self.planned is None else self.planned.schedule

    @property
    def moves(self) -> bool:
        """Whether something leaves the device, or is recomputed that torch's partitioner would save."""
        plan = None if self.planned is None else self.planned.plan
        return plan is None or bool(plan.transfers) or any(visit.region.recomputed for visit in self.visits)

    def excess_bytes(self, visit: Visit, place: int, limit: int | None, beside_bytes: int) -> int:
        """Return by how much the plan would go over the budget with what is held beside it in its `place`-th run.

        `beside_bytes` of that are parameters that stay, and that the program does not read.
        """
        if limit is None or self.planned is None or self.planned.plan is None:
            return 0
        grown_bytes = visit.held_bytes - self.planned.visits[place].held_bytes
        return grown_bytes + self.planned.plan.forecast.peak_bytes + beside_bytes - limit


class StepPlanner:
    """Plans programs; `choices` has what the calls of each region are to recompute."""

    def __init__(self, points: SwapPoints) -> None:
        self.choices = StepChoices()
        self._points = points
        self._residency = StepResidency(points)
        self._warned = False
        self._numbers = itertools.count()

    def consider(self, program: Program, options: Options) -> None:
        """Plan a program that has been measured, if it is new, or if that was for other memory than is there now."""
        device, limit = self._points.engine.device, options.device_budget
        program.rounds.look()
        other = program.planned is not None and program.planned.made_for != (
            *_budgets_in(options),
            program.accumulation,
        )
        if not other and (program.plans >= _PLANS or not self._is_outdated(program, limit)):
            return
        self._warned &= program.planned is None or _budgets_in(program.planned.options) == _budgets_in(options)
        links = links_of(device, options)
        read = self._residency.read_by(program.visits)
        beside_bytes = self._residency.bytes_beside(read)
        tries = self._budgets_to_try(program, options, beside_bytes)
        if options.may_recompute:
            self.choices.choose(program.visits, links, tries[0], frozenset(self._points.shared))
        program.rounds.watch(read.first_trained)
        joined = join(program.visits, links, tries[-1], frozenset(self._points.shared), read.names)
        early = read.first_trained is not None and is_updated_in_backward(read.first_trained)
        often = replace(joined.problem, accumulation=program.accumulation, updates_in_backward=early, sums_stay=False)
        joined = replace(joined, problem=often)
        plan, schedule, refusal, transfers = None, FRUGAL, None, self._points.engine.transfers
        try:
            joined, plan = self._plan_within(tries, program, joined, read, options)
            self._reserve(program, plan)
        except (BudgetError, StoreError) as error:
            plan, transfers.unplanned = None, str(error)
            again = other and options.may_recompute and program.has_plan
            shared = frozenset(self._points.shared)
            if again and self.choices.choose_again(program.visits, links, tries[-1], shared):
                log.info("%s recomputes more from now on: %s", _name(program), str(error))
            elif _has_lost_room(program, joined, options):
                refusal = f"{_name(program)} has no plan within the budgets that were configured: {error}"
            self._tell(program, error)
        else:
            transfers.unplanned = None
            if not self._residency.agrees(read, plan):
                self._residency.decide(program.order, limit, read, plan)
            schedule = to_schedule(joined, plan)
        self._points.engine.end_map_for_calls()
        program.planned = StepPlan(
            options=options,
            beside_bytes=beside_bytes,
            read=read,
            visits=program.visits,
            joined=joined,
            plan=plan,
            schedule=schedule,
            refusal=refusal,
        )
        program.plans = 1 if other else program.plans + 1
        self._report(program, options)

    def renew(self, program: Program, options: Options) -> None:
        """Plan a program that is to run again, if that is for other budgets; raises `BudgetError` if it may not run."""
        self.consider(program, options)
        if program.planned is not None and program.planned.refusal is not None:
            raise BudgetError(program.planned.refusal)

    def forget(self, regions: Collection[int]) -> None:
        """Forget these regions, and have the parameters leave that stay by the plans of their steps."""
        self.choices.forget(regions)
        self._residency.forget(regions)

    def bytes_beside(self, program: Program) -> int:
        """Return the bytes of parameters that stay on the device, and that a program with a plan does not read."""
        return 0 if program.planned is None else self._residency.bytes_beside(program.planned.read)

    def _plan_within(
        self, tries: Sequence[Budgets], program: Program, joined: StepProblem, read: ReadParameters, options: Options
    ) -> tuple[StepProblem, Plan]:
        """Return what `_plan` does for the first of these budgets that have a plan.

        `joined` has the last of them, for which `BudgetError` is raised if there is none.
        """
        for budgets in tries[:-1]:
            with contextlib.suppress(BudgetError):
                stated = replace(joined, problem=replace(joined.problem, budgets=budgets))
                return self._plan(program, stated, read, options)
        return self._plan(program, joined, read, options)

    def _plan(
        self, program: Program, joined: StepProblem, read: ReadParameters, options: Options
    ) -> tuple[StepProblem, Plan]:
        """Return the plan, beside the parameters that stay by other programs, and the problem that it is for.

        Where there is none like that, the plan may have others stay. Raises `BudgetError` if there is none either.
        """
        decided, policy = self._residency.decided(program.order, options.device_budget, read), options.policy
        plan: Plan | None = None
        if decided is not None:
            problem = keep_resident(joined.problem, *decided)
            with contextlib.suppress(BudgetError):
                plan = kept_plan(problem, policy, tuning=_COPYING)
                plan = replace(plan, resident=decided[0], updated_here=decided[1])
        if plan is None:
            plan = kept_plan(joined.problem, policy)
        joined = replace(joined, problem=keep_resident(joined.problem, **plan.pinned))
        plan = align(joined, plan)
        verify_plan(joined.problem, plan)
        return joined, plan

    def _is_outdated(self, program: Program, limit: int | None) -> bool:
        """Return whether a program has no plan yet, or one for other residents, or for clearly more or less memory."""
        if (planned := program.planned) is None:
            return True
        if limit is None:
            return False
        if planned.plan is not None and not self._residency.agrees(planned.read, planned.plan):
            return True
        more_bytes = self.bytes_beside(program) - planned.beside_bytes
        changes = [
            new.held_bytes - old.held_bytes + more_bytes
            for new, old in zip(program.visits, planned.visits, strict=True)
        ]
        gaps = [new.gap_bytes - old.gap_bytes for new, old in zip(program.visits, planned.visits, strict=True)]
        room_bytes = -min(*changes, *gaps)  # the first gaps are upper bounds, later ones may be exact
        if planned.plan is None:
            return max(changes) < 0 or room_bytes > limit // _ROOM
        over = planned.plan.forecast.peak_bytes + planned.beside_bytes + max(changes) > limit
        return over or (bool(planned.plan.transfers) and room_bytes > limit // _ROOM)

    def _report(self, program: Program, options: Options) -> None:
        """Log the plan of a program, and write it where it is to be dumped."""
        if (record := record_of(program, str(self._points.engine.device))) is None:
            return
        if log.isEnabledFor(logging.INFO):
            log.info("%s:\n%s", _name(program), show_figures(record))
        if options.dump_dir is not None:
            program.number = next(self._numbers) if program.number is None else program.number
            try:
                write_step(options.dump_dir, program.number, record)
            except OptionError as error:  # training goes on
                log.warning("%s", str(error))

    def may_fit(self, visit: Visit, options: Options) -> bool:
        """Return whether a run may yet fit, for its region may recompute other storages than it does."""
        if visit.index in self.choices.decided or not options.may_recompute or options.device_budget is None:
            return False
        least_bytes = least_peak_bytes(visit.region, backward=visit.backward)
        return visit.held_bytes + least_bytes <= options.device_budget

    def _reserve(self, program: Program, plan: Plan) -> None:
        """Hold the plan's buffers, and one for any storage to go through to disk: orders change."""
        staging = plan.staging
        if self._points.engine.store is not None:
            staging = (*staging, PoolClass(nbytes=round_up(_largest(program), PAGE_BYTES), count=1))
        self._points.engine.reserve(pool=plan.pool, staging=staging, disk_bytes=plan.forecast.disk_bytes)

    def _budgets_to_try(self, program: Program, options: Options, beside_bytes: int) -> tuple[Budgets, ...]:
        """Return the budgets to look for a plan within, one behind the other.

        The first leave free what external memory may grow by, and host memory for what offloaded parameters will take.
        The step would fit without either: where there is a disk, what finds no room in host memory goes there.
        """
        limit, to_come_bytes = options.device_budget, self._host_bytes_to_come(program)
        to_come = (to_come_bytes, 0) if to_come_bytes and self._points.engine.store is not None else (to_come_bytes,)
        drifts = (drift_bytes(limit), 0) if limit is not None else (0,)
        return tuple(
            self._budgets(program, options, beside_bytes + drift, taken) for drift in drifts for taken in to_come
        )

    def _budgets(self, program: Program, options: Options, beside_bytes: int, to_come_bytes: int) -> Budgets:
        device, limit = self._points.engine.device, options.device_budget
        used, reserved_bytes = usage(device), beside_bytes
        staging_bytes = round_up(_largest(program), PAGE_BYTES) if self._points.engine.store is not None else 0
        if limit is not None and held_bytes(device):  # a CPU's allocator does not count
            reserved_bytes += expected_state_bytes(device)
        taken_bytes = used.host_acquired_bytes + to_come_bytes
        return Budgets(
            device_bytes=None if limit is None else limit - reserved_bytes,
            host_bytes=max(0, options.host_budget - taken_bytes - staging_bytes),
            host_taken_bytes=taken_bytes,
            disk_bytes=max(0, options.spill_budget - used.disk_acquired_bytes),
        )

    def _host_bytes_to_come(self, program: Program) -> int:
        """Return the host memory that offloaded parameters will take for their gradients and their optimizer's state.

        State goes to disk where there is one; in less host memory than gradients need beside a staging buffer, none is
        kept for them.
        """
        engine = self._points.engine
        if (attachment := engine.attachment) is None:
            return 0
        nbytes = attachment.bytes_to_come().gradient_bytes
        if program.accumulation > 1 and not engine.pool.acquired_for(Use.GRADIENT):
            nbytes += engine.gradient_set_bytes  # beside the sums of later backwards
        if engine.store is None:
            return nbytes + attachment.state_to_come()
        taken_bytes = engine.pool.acquired_bytes + round_up(_largest(program), PAGE_BYTES)
        return nbytes if taken_bytes + nbytes <= engine.pool.budget_bytes else 0

    def _tell(self, program: Program, error: Exception) -> None:
        """Say that there is no plan: loudly, once, if regions will not recompute more either."""
        decided = self.choices.decided
        hopeful = any(
            visit.index in decided and decided[visit.index].names_of(visit) != visit.region.recomputed
            for visit in program.visits
        )
        level = logging.INFO if hopeful or self._warned else logging.WARNING
        self._warned |= not hopeful
        log.log(level, "%s: everything is offloaded that may be, for there is no plan: %s", _name(program), str(error))


def forget_programs(programs: dict[Order, Program], regions: Collection[int]) -> list[Program]:
    """Take the programs of these regions from among all, and return them."""
    ended = [program for order, program in programs.items() if any(place.region in regions for place in order)]
    for program in ended:
        del programs[program.order]
    for program in (each for each in programs.values() if each.successor in ended):
        program.successor = None
    return ended


def record_of(program: Program, device: str) -> StepRecord | None:
    """Return the record of a program's plan, for reports."""
    planned = program.planned
    if planned is None or planned.plan is None:
        return None
    return record_step(planned.visits, planned.joined, planned.plan, device=device, device_budget=planned.limit)


def place_of(visit: Visit) -> Place:
    """Return what tells a run from another in its place."""
    return Place(visit.index, visit.call, visit.backward, visit.region.swapped_bytes, visit.region.nbytes)


def _has_lost_room(program: Program, joined: StepProblem, options: Options) -> bool:
    """Return whether a program had a plan, or was refused, before budgets were lowered, and finds no room without one.

    A new program runs anyhow: what it measures may lead to a plan.
    """
    if (before := program.planned) is None:
        return False
    known = before.options
    lower = options.host_budget < known.host_budget or options.spill_budget < known.spill_budget
    if before.refusal is None and (before.plan is None or not lower):
        return False
    budgets = joined.problem.budgets
    away_bytes = sum(visit.region.swapped_bytes for visit in program.visits if not visit.backward)
    return away_bytes > budgets.host_bytes + budgets.disk_bytes


def _budgets_in(options: Options) -> tuple[int | None, ...]:
    return options.device_budget, options.host_budget, options.spill_budget


def _largest(program: Program) -> int:
    return max((swap.nbytes for visit in program.visits for swap in visit.region.swaps), default=0)


def _name(program: Program) -> str:
    regions = len({visit.index for visit in program.visits})
    return f"a step of {len(program.visits)} runs of {regions} regions"
