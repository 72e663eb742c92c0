"""Budget against step time: the values of `tencache plan --sweep`. No torch here."""

from dataclasses import dataclass


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
