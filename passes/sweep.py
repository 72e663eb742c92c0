"""One region planned at several device budgets by several policies: what device memory buys."""

from collections.abc import Iterable, Sequence

from tencache_fx.bounds import joint_lower_bound_ns
from tencache_fx.errors import BudgetError
from tencache_fx.frontier import Frontier, Outcome, Point
from tencache_fx.passes.region import plan_region, policy_floor_bytes
from tencache_fx.plan import Problem, Tier, live_bytes


def spread_budgets(captured: Problem, policies: Sequence[str], count: int) -> tuple[int, ...]:
    """Return `count` device budgets, evenly from the lowest floor of `policies` to the peak without a plan."""
    peak = int(live_bytes(captured).max(initial=captured.outside_bytes))
    floor = min(policy_floor_bytes(captured, policy) for policy in policies)
    steps = max(1, count - 1)
    return tuple(sorted({floor + (peak - floor) * step // steps for step in range(steps + 1)}))


def find_frontier(captured: Problem, policies: Sequence[str], budgets: Iterable[int]) -> Frontier:
    """Return the frontier of a region as captured; each point takes one plan of each policy.

    Raises `OptionError` for an unknown policy.
    """
    points = []
    for device_bytes in budgets:
        problem = captured.within(device_bytes=device_bytes)
        points.append(
            Point(
                device_bytes=device_bytes,
                best_possible_ns=joint_lower_bound_ns(problem),
                outcomes=tuple(_outcome(problem, policy) for policy in policies),
            )
        )
    return Frontier(
        policies=tuple(policies),
        floors_bytes=tuple(policy_floor_bytes(captured, policy) for policy in policies),
        peak_bytes=int(live_bytes(captured).max(initial=captured.outside_bytes)),
        ideal_ns=sum(op.duration_ns for op in captured.ops) - captured.recompute_ns,
        points=tuple(points),
    )


def _outcome(problem: Problem, policy: str) -> Outcome | None:
    try:
        _, plan = plan_region(problem, policy)
    except BudgetError:
        return None
    forecast = plan.forecast
    return Outcome(
        makespan_ns=forecast.makespan_ns,
        recompute_ns=forecast.recompute_ns,
        stall_ns=forecast.stall_out_ns + forecast.stall_in_ns,
        link_bytes=forecast.d2h_bytes,
        disk_bytes=sum(spill.nbytes for spill in plan.spills if spill.tier is Tier.NVME),
    )
