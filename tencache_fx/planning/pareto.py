"""One region planned at several device budgets by several policies: what device memory buys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tencache_fx.errors import BudgetError
from tencache_fx.planning.bounds import joint_lower_bound_ns
from tencache_fx.planning.collectives import ideal_ns
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Problem, Tier
from tencache_fx.planning.search import plan_region, policy_floor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the simulator says of a policy's plan: its time, and of that what is recomputed and what is waited for.

    `link_bytes` are copied out and in again, `disk_bytes` of them by way of the disk.
    """

    makespan_ns: int
    recompute_ns: int
    stall_ns: int
    link_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One budget: a time that no plan beats there, and each policy's outcome, None where it does not fit.

    `outcomes` are in the order of the frontier's `policies`.
    """

    device_bytes: int
    best_possible_ns: int
    outcomes: tuple[Outcome | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What each budget buys. `floors_bytes` are budgets in which each policy is sure to fit the device, `peak_bytes` is
    what the region holds without any plan, `ideal_ns` its time then.
    """

    policies: tuple[str, ...]
    floors_bytes: tuple[int, ...]
    peak_bytes: int
    ideal_ns: int
    points: tuple[Point, ...]


def spread_budgets(captured: Problem, policies: Sequence[str], count: int) -> tuple[int, ...]:
    """Return `count` device budgets, evenly from the lowest floor of `policies` to the peak without a plan."""
    peak = int(live_bytes(captured).max(initial=captured.external_bytes))
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
        peak_bytes=int(live_bytes(captured).max(initial=captured.external_bytes)),
        ideal_ns=ideal_ns(captured) - captured.recompute_ns,
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
        disk_bytes=sum(transfer.nbytes for transfer in plan.transfers if transfer.tier is Tier.NVME),
    )
