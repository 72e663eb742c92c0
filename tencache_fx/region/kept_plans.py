"""Plans and choices that are kept on disk, so that a second start of the same program does not search again.

Equal problems have equal plans, and so a plan is kept under a digest of its problem and of the planner's own source. A
plan that was read is checked as one that was just made (`planning/verify.py`), and made again if it breaks a rule.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tencache_fx import planning
from tencache_fx.errors import InvariantError
from tencache_fx.hardware.cache import cached, digest_sources
from tencache_fx.planning.parameter_schedule import keep_resident
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Budgets, Links, Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import choose_for_region, make_plan, plan_region
from tencache_fx.planning.step import Visit
from tencache_fx.planning.step_recompute import Recomputed, choose_for_step
from tencache_fx.planning.tuning import TUNING, Tuning
from tencache_fx.planning.verify import verify_plan

log = logging.getLogger("tencache_fx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The storages to recompute, by name."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """What is recomputed, by region; None if what the regions recompute already is as good."""

    regions: tuple[tuple[int, Recomputed], ...] | None


def kept_plan(problem: Problem, policy: str, *, tuning: Tuning = TUNING) -> Plan:
    """Return what `make_plan` does: read, if it was made before. Its `BudgetError` is not kept."""

    def holds(plan: Plan) -> bool:
        return _holds(plan, keep_resident(problem, **plan.pinned))

    key = _key("plan", policy, tuning, _lasting(problem))
    return cached(key, Plan, lambda: make_plan(problem, policy, tuning=tuning), accept=holds)


def kept_region_plan(captured: Problem, policy: str) -> tuple[Problem, Plan]:
    """Return what `plan_region` does: read, if it was made before. Its `BudgetError` is not kept."""

    def problem_for(plan: Plan) -> Problem:
        return keep_resident(recompute(captured, plan.recomputed), **plan.pinned)

    def holds(plan: Plan) -> bool:
        names = {recipe.name for recipe in captured.recipes}
        return names.issuperset(plan.recomputed) and _holds(plan, problem_for(plan))

    key = _key("regionplan", policy, TUNING, _lasting(captured))
    plan = cached(key, Plan, lambda: plan_region(captured, policy)[1], accept=holds)
    return problem_for(plan), plan


def _holds(plan: Plan, problem: Problem) -> bool:
    try:
        verify_plan(problem, plan)
    except InvariantError as error:
        log.warning("a plan that was kept is not for this problem, and is made again: %s", str(error))
        return False
    return True


def kept_choice(problem: Problem) -> tuple[str, ...]:
    """Return the storages that the `joint` policy recomputes; the search takes seconds, its results are kept."""
    return cached(_key("choice", _lasting(problem)), Choice, lambda: Choice(names=choose_for_region(problem))).names


def kept_step_choice(
    visits: Sequence[Visit], links: Links, budgets: Budgets, shared: Collection[tuple[int, str]]
) -> dict[int, Recomputed] | None:
    """Return what `choose_for_step` does: read, if it was chosen before."""

    def choose() -> StepChoice:
        found = choose_for_step(visits, links, budgets, shared)
        return StepChoice(regions=None if found is None else tuple(sorted(found.items())))

    regions = {id(visit.region): visit.region for visit in visits}  # calls share them
    places = {each: place for place, each in enumerate(regions)}
    order = [(visit, places[id(visit.region)]) for visit in visits]
    stated = [
        (_lasting(each.problem), each.transfers, _lasting(each.original), sorted(each.recomputed), each.margins)
        for each in regions.values()
    ]
    lasting = _capped(budgets, sum(_bytes(visit.region.problem) + _bytes(visit.region.original) for visit in visits))
    key = _key("stepchoice", order, stated, links, lasting, sorted(shared))
    chosen = cached(key, StepChoice, choose).regions
    return None if chosen is None else dict(chosen)


def is_as_free(problem: Problem, budgets: Budgets) -> bool:
    """Return whether `problem` has the same plans within `budgets`, of another time, as within its own."""
    return _lasting(problem) == _lasting(dataclasses.replace(problem, budgets=budgets))


def _lasting(problem: Problem) -> Problem:
    """Return the problem without the free memory and disk, which change by the minute, where they are no limit."""
    return dataclasses.replace(problem, budgets=_capped(problem.budgets, _bytes(problem)))


def _capped(budgets: Budgets, storages_bytes: int) -> Budgets:
    most_bytes = 2 * storages_bytes  # buffers are larger than storages, but none is twice as large
    return dataclasses.replace(
        budgets,
        host_bytes=min(budgets.host_bytes, most_bytes),
        disk_bytes=min(budgets.disk_bytes, most_bytes),
        host_taken_bytes=0,
        host_lacking_bytes=0,
    )


def _bytes(problem: Problem) -> int:
    return sum(storage.nbytes for storage in problem.storages)


def _key(what: str, *facts: object) -> dict[str, str]:
    """Return the key of what follows from `facts`, plain values all of them, and from the planner's source."""
    planner = digest_sources(Path(planning.__file__).parent)
    return {"what": what, "of": hashlib.sha256(repr(facts).encode()).hexdigest(), "planner": planner}
