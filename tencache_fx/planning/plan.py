"""A plan: transfers, the buffers they need, the forecast, and the order of runtime ops. No torch here."""

from dataclasses import dataclass, replace
from enum import StrEnum

from tencache_fx.planning.problem import Step, Tier
from tencache_fx.renames import Renamed


class TransferKind(StrEnum):
    """Which copies a transfer makes: out and in again; in only, of a parameter; out only, of a gradient."""

    SWAP = "swap"
    LOAD = "load a parameter"
    STORE = "store a gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOut:
    """A copy from the device: issued after the step `after`; its bytes on the device are free from `freed_at` on."""

    after: Step
    freed_at: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyIn:
    """A copy to the device: its bytes are allocated and it is issued before `prefetch_at`; `needed_at` waits for it."""

    prefetch_at: Step
    needed_at: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The copies of a storage to `tier` and back.

    A swap makes both: it holds no device bytes during `[freed_at, prefetch_at)`, and has no readers during
    `[freed_at, needed_at)`. A load of a parameter has no copy `out`: it adds device bytes during
    `[prefetch_at, needed_at)`, before the storage's birth. A store of a gradient has no copy `back`: it adds device
    bytes from the storage's death to `freed_at`.
    """

    name: str
    nbytes: int
    tier: Tier
    out: CopyOut | None = None
    back: CopyIn | None = None

    offload = Renamed("copy_out_after")
    gone = Renamed("freed_at")
    fetch = Renamed("prefetch_at")
    way = Renamed("kind")

    def check(self) -> None:
        """Raise `ValueError` for a transfer without any copy."""
        if self.out is None and self.back is None:
            raise ValueError(f"the transfer of {self.name} copies neither out nor back.")

    @property
    def kind(self) -> TransferKind:
        """Which copies it makes."""
        if self.out is None:
            return TransferKind.LOAD
        return TransferKind.STORE if self.back is None else TransferKind.SWAP

    @property
    def copy_out_after(self) -> Step:
        """The step after which the copy out is issued; there has to be one."""
        assert self.out is not None
        return self.out.after

    @property
    def freed_at(self) -> Step:
        """The first step at which its bytes on the device are free; there has to be a copy out."""
        assert self.out is not None
        return self.out.freed_at

    @property
    def prefetch_at(self) -> Step:
        """The step before which the copy in is issued; there has to be one."""
        assert self.back is not None
        return self.back.prefetch_at

    @property
    def needed_at(self) -> Step:
        """The step that waits for the copy in; there has to be one."""
        assert self.back is not None
        return self.back.needed_at

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of its copies, in order."""
        out = () if self.out is None else (self.out.after, self.out.freed_at)
        return out if self.back is None else (*out, self.back.prefetch_at, self.back.needed_at)

    def leaving(self, *, after: Step | None = None, freed_at: Step | None = None) -> "Transfer":
        """Return the same transfer with its copy out at other steps."""
        after = self.copy_out_after if after is None else after
        out = CopyOut(after=after, freed_at=self.freed_at if freed_at is None else freed_at)
        return Transfer(name=self.name, nbytes=self.nbytes, tier=self.tier, out=out, back=self.back)

    def prefetched(self, at: Step) -> "Transfer":
        """Return the same transfer with its copy in issued before step `at`."""
        back = CopyIn(prefetch_at=at, needed_at=self.needed_at)
        return Transfer(name=self.name, nbytes=self.nbytes, tier=self.tier, out=self.out, back=back)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolClass:
    """`count` pinned buffers of `nbytes` each."""

    nbytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the simulator says of a plan; `peak_bytes` includes external bytes, those that others hold.

    `ideal_ns` is the time of a device without limits: neither stalls for copies nor what is recomputed to save memory.
    Collectives are under way for `collective_ns`, and compute waits for them for `stall_collective_ns` of that. The
    backward begins at `forward_ns`.
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
    collective_ns: int = 0
    stall_collective_ns: int = 0
    forward_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """How long the device computes, what is recomputed to save memory apart."""
        return self.makespan_ns - self.recompute_ns - self.stall_out_ns - self.stall_in_ns - self.stall_collective_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided: the transfers, the buffers they need, and what to expect.

    `pool` serves host transfers, as many buffers as are in use at once; `staging` serves transfers to and from NVMe.
    `recomputed` names what the backward makes again: the plan is then for the problem in which it does. `resident` are
    the offloaded parameters pinned on the device. Of those in `updated_here`, gradients and optimizer state are there
    as well; of those in `summed_here` only gradients, up to an update in host memory.
    """

    policy: str
    transfers: tuple[Transfer, ...]
    pool: tuple[PoolClass, ...]
    staging: tuple[PoolClass, ...]
    forecast: Forecast
    recomputed: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    updated_here: tuple[str, ...] = ()
    summed_here: tuple[str, ...] = ()

    @property
    def pinned(self) -> dict[str, tuple[str, ...]]:
        """The fields that say which parameters are on the device, and what of them: for `keep_resident`."""
        return {name: getattr(self, name) for name in ("resident", "updated_here", "summed_here")}

    def with_decisions_of(self, other: "Plan") -> "Plan":
        """Return this plan for what `other` recomputes and pins: that is what it was made for."""
        return replace(self, recomputed=other.recomputed, **other.pinned)  # type: ignore[arg-type]

    spills = Renamed("transfers")
