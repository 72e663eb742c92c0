"""Soft reservations: made from the first to the last as the floor leaves room, dropped from the last to the first."""

from problems import links, make_region, make_storage

from tencache_fx.errors import BudgetError
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Budgets, Problem
from tencache_fx.planning.search import make_plan
from tencache_fx.region.reservations import Reservation, StatedProblem

WANTED = {
    Reservation.DRIFT: 40,
    Reservation.BOUNDARY: 300,
    Reservation.STATE: 200,
    Reservation.WAITING: 100,
}


def stated(device_bytes: int | None) -> StatedProblem:
    """Return a region that needs 600 bytes throughout; 150 more are held, 100 of them by waiting forwards."""
    held = make_storage("held", 600, (0, 3))
    budgets = Budgets(device_bytes=device_bytes, host_bytes=0)
    problem = make_region((1, 1, 1, 1), 2, held, links=links(), budgets=budgets)
    return StatedProblem(
        problem=problem,
        formulas=None,
        held_bytes=150,
        waiting_bytes=100,
        input_bytes=0,
        unforeseen_bytes=0,
        fused=False,
    )


def test_all_is_reserved_where_there_is_room() -> None:
    reserved, problem, plan = stated(2000).plan(WANTED, lambda problem: make_plan(problem, policy="joint"))
    assert reserved == WANTED
    assert list(reserved) == list(Reservation)
    assert (problem.external_bytes, problem.boundary_bytes) == (350, 300)
    assert problem.budgets.device_bytes == 2000, "nothing is transferred, so others may hold more without a new plan"
    assert isinstance(plan, Plan)


def test_the_important_ones_come_first_and_the_boundary_has_what_is_left() -> None:
    reserved, problem, _ = stated(1000).plan(WANTED, lambda problem: make_plan(problem, policy="joint"))
    assert reserved[Reservation.STATE] == 200
    assert reserved[Reservation.BOUNDARY] == problem.boundary_bytes == 1000 - 600 - 350
    reserved, problem, _ = stated(800).plan(WANTED, lambda problem: make_plan(problem, policy="joint"))
    assert Reservation.STATE not in reserved
    assert problem.external_bytes == 150
    assert problem.boundary_bytes == 50
    reserved, problem, _ = stated(700).plan(WANTED, lambda problem: make_plan(problem, policy="joint"))
    assert Reservation.WAITING not in reserved
    assert problem.external_bytes == 50, "waiting forwards will not hold so much the next time"


def test_without_a_plan_they_are_dropped_from_the_end() -> None:
    tried = []

    def refuse(problem: Problem) -> Plan:
        tried.append((problem.external_bytes, problem.boundary_bytes))
        raise BudgetError("no plan")

    reserved, problem, refusal = stated(1200).plan(WANTED, refuse)
    assert tried == [(350, 250), (350, 250), (350, 125), (350, 62), (350, 0), (150, 0), (50, 0)]
    assert not reserved
    assert problem.external_bytes == 50
    assert isinstance(refusal, BudgetError)


def test_without_a_budget_nothing_is_kept_free() -> None:
    _, problem, plan = stated(None).plan({Reservation.WAITING: 100}, lambda problem: make_plan(problem, policy="joint"))
    assert problem.external_bytes == 0
    assert isinstance(plan, Plan)
