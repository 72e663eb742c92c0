"""Whether the collectives of a region overlap with kernels, or run one by one, which takes less memory.

Each rank decides that for itself. The first one of a region may also begin gathers before sums: all ranks, and all
later compilations for other sizes, then keep to that order, overlapping or not, and hold a gathered weight longer.
"""

from tencache_fx.errors import BudgetError
from tencache_fx.planning.collectives import ideal_ns, one_by_one
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.region.candidate import Candidate, RegionPlanner

_GAIN = 30  # a region is planned once more for what may take one part in so many less time
_ROOM = 2  # times the floor of a region: others of its step, or larger inputs, are to be on the device as well


def may_gain_in_turn(planner: RegionPlanner, overlapping: Candidate) -> bool:
    """Return whether a region with overlapping collectives is worth planning with collectives one by one.

    It is if it has no plan, or if its copies cost more than overlapping can gain: were collectives to run one by one,
    and nothing but compute besides, it would take a thirtieth less time. One that is planned with its step has to leave
    room for others.
    """
    limit, plan, problem = planner.device_budget, overlapping.plan, overlapping.problem
    if limit is None:
        return False
    if isinstance(plan, BudgetError):
        return True
    if planner.by_step:
        return _ROOM * floor_bytes(problem) > limit
    least_ns = ideal_ns(one_by_one(problem)) - problem.recompute_ns
    return least_ns * _GAIN < plan.forecast.makespan_ns * (_GAIN - 1)


def leaves_room(planner: RegionPlanner, overlapping: Candidate) -> bool:
    """Return whether gathers may begin before sums: ranks with less memory, and larger inputs, have to, too.

    Parameters that the plan chose to keep on the device, their gradients and state do not count: other
    plans give their room back. What has to stay does count, and so does memory that others hold.
    """
    limit = planner.device_budget
    return limit is None or _ROOM * floor_bytes(overlapping.captured) <= limit


def better(planner: RegionPlanner, overlapping: Candidate, in_turn: Candidate) -> Candidate:
    """Return the candidate that is forecast to be faster, `overlapping` if neither is.

    A region that is planned with its step is to leave room: there the one that needs less memory is better.
    """
    return min(overlapping, in_turn, key=_need if planner.by_step else Candidate.rank)


def _need(candidate: Candidate) -> tuple[bool, int]:
    return isinstance(candidate.plan, BudgetError), floor_bytes(candidate.problem)
