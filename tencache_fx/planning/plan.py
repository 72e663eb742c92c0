"""A plan: transfers, the buffers they need, the forecast, and the order of runtime ops. No torch here."""

from dataclasses import dataclass
from enum import StrEnum

from tencache_fx.planning.problem import Step, Tier


class TransferKind(StrEnum):
    """Which copies a trip makes: out and in again; in only, of a parameter from home; out only, of a gradient."""

    ROUND = "round"
    IN = "in"
    OUT = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A storage's trip: no device bytes during `[gone, fetch)`, no readers during `[gone, back)`.

    A trip in only adds device bytes during `[fetch, gone)` instead, before the storage's birth at `back` (`offload` and
    `gone` are that, too); one out only adds them during `[fetch, gone)`, from its death at `fetch` and `back` on.
    """

    name: str
    nbytes: int
    tier: Tier
    copy_out_after: Step  # issue the copy out after this step
    freed_at: Step  # the copy has landed: the device bytes are free from here
    prefetch_at: Step  # allocate, and issue the copy in, before this step
    needed_at: Step  # first reader: wait here
    kind: TransferKind = TransferKind.ROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClass:
    """`count` pinned buffers of `nbytes` each."""

    nbytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the simulator says of a plan; `peak_bytes` includes the bytes held outside the region.

    `ideal_ns` is the time of a device without limits: neither stalls nor what is recomputed to save memory.
    """

    peak_bytes: int
    peak_step: Step
    floor_bytes: int
    host_bytes: int
    disk_bytes: int
    ideal_ns: int
    makespan_ns: int
    lower_bound_ns: int
    stall_out_ns: int
    stall_in_ns: int
    d2h_bytes: int
    h2d_bytes: int
    disk_write_bytes: int
    disk_read_bytes: int
    recompute_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided: the trips, the buffers they need, and what to expect.

    `pool` serves host trips, exactly as many buffers as are lent at once; `staging` serves trips to and from NVMe.
    `recomputed` names what the backward makes again: the plan is then for the problem in which it does. `resident` are
    the parameters with a home elsewhere that stay on the device; of those in `updated_here`, gradients and optimizer
    state are there as well.
    """

    policy: str
    spills: tuple[Transfer, ...]
    pool: tuple[PoolClass, ...]
    staging: tuple[PoolClass, ...]
    forecast: Forecast
    recomputed: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    updated_here: tuple[str, ...] = ()
