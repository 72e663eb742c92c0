"""Device memory that a plan leaves free as far as there is room: soft reservations, in one order.

The region would fit without them; each only saves planning it again, or others from going over the budget.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from tencache_fx.errors import BudgetError
from tencache_fx.planning.external import external_bytes
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.region.dynamic_shapes import SizeFormulas


class Reservation(StrEnum):
    """The purposes that memory is left for, the most important first.

    WAITING: forwards hold it for their backward, and will hold less the next time. STATE: optimizers have yet to make
    it. BOUNDARY: others hold it between this region's graphs; to leave half of it is better than nothing. DRIFT: others
    hold a little more from call to call, such as generated tokens; it counts where something is transferred.
    """

    WAITING = "waiting forwards"
    STATE = "optimizer state"
    BOUNDARY = "boundary"
    DRIFT = "drift"


Reserved = Mapping[Reservation, int]
"""Bytes of each reservation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedProblem:
    """A region's `problem` beside nothing else; reservations turn it into what is planned.

    `formulas` are the storages' sizes, if there is a device budget. `held_bytes` are held on the device now,
    `waiting_bytes` of them by waiting forwards, `input_bytes` by the region's own inputs. `unforeseen_bytes` are those
    of the code that the graphs do not show. Code that is `fused` allocates all results of a kernel before it runs.
    """

    problem: Problem
    formulas: SizeFormulas | None
    held_bytes: int
    waiting_bytes: int
    input_bytes: int
    unforeseen_bytes: int
    fused: bool

    def held_with(self, reserved: Reserved) -> int:
        """Return the bytes to take for held on the device: without WAITING they are free again, with STATE more."""
        free_bytes = self.waiting_bytes - reserved.get(Reservation.WAITING, 0)
        return max(0, self.held_bytes - free_bytes) + reserved.get(Reservation.STATE, 0)

    def leaving(self, reserved: Reserved) -> Problem:
        """Return the problem beside what is held, with `reserved` left free."""
        problem, budgets = self.problem, self.problem.budgets
        if budgets.device_bytes is not None:
            beside_bytes = external_bytes(self.held_with(reserved), self.input_bytes)
            problem = replace(problem, external_bytes=beside_bytes)
        # Small results the plan sees later are among them.
        results_bytes = int(live_bytes(problem).max(initial=0)) // 256 if self.fused else 0
        problem = replace(
            problem,
            external_bytes=problem.external_bytes + results_bytes + self.unforeseen_bytes,
            boundary_bytes=reserved.get(Reservation.BOUNDARY, 0),
        )
        if budgets.device_bytes is None or not (drift_bytes := reserved.get(Reservation.DRIFT, 0)):
            return problem
        offloads = any(storage.parameter for storage in problem.storages)
        if not offloads and int(live_bytes(problem).max(initial=0)) <= budgets.device_bytes:
            return problem
        return replace(problem, budgets=replace(budgets, device_bytes=budgets.device_bytes - drift_bytes))

    def plan(
        self, wanted: Reserved, make_plan: Callable[[Problem], Plan]
    ) -> tuple[Reserved, Problem, Plan | BudgetError]:
        """Return the reservations made of `wanted`, the problem with them, and the plan, or why there is none.

        A reservation is made if the floor leaves room for it beside those before it, of the boundary as much as there
        is room for. As long as there is no plan then, they are dropped from the end, that of the boundary by halves.
        """
        reserved: dict[Reservation, int] = {}
        for name in sorted(wanted, key=list(Reservation).index):
            over_bytes = max(0, bytes_over_budget(self.leaving({**reserved, name: wanted[name]})))
            if over_bytes == 0 or (name is Reservation.BOUNDARY and over_bytes < wanted[name]):
                reserved[name] = wanted[name] - over_bytes
        while True:
            problem = self.leaving(reserved)
            try:
                return reserved, problem, make_plan(problem)
            except BudgetError as refusal:
                if not reserved:
                    return reserved, problem, refusal
            name, nbytes = reserved.popitem()
            few_bytes = (problem.budgets.device_bytes or 0) // 16  # a plan can take a while
            if name is Reservation.BOUNDARY and nbytes > few_bytes:
                reserved[name] = nbytes // 2


def bytes_over_budget(problem: Problem) -> int:
    """Return by how much the floor is above the device budget; negative where it is below."""
    limit = problem.budgets.device_bytes
    return 0 if limit is None else floor_bytes(problem) - limit
