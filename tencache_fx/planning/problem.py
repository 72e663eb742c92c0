"""The planner's input: steps, storages, links and budgets of a region. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, NewType

from tencache_fx.renames import Renamed
from tencache_fx.serialization import MOST, Positive

Step = NewType("Step", int)

STATE_BYTES = 12
"""Of an optimizer, for each element of a parameter: an fp32 master weight and two moments."""


def host_state_bytes(count: int, *, split: bool) -> int:
    """Return what that is in host memory for so many elements.

    There a bf16 weight's master is `split`: it is what it has besides the weight, two bytes and one bit.

    >>> host_state_bytes(16, split=False), host_state_bytes(16, split=True)
    (192, 162)
    """
    return STATE_BYTES * count - (2 * count - -(-count // 8) if split else 0)


PASSING_BUFFERS = 4
"""Of host memory, through which parameters on disk pass: so many are on their way to the device at once."""


class Tier(StrEnum):
    """Where bytes live, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Kind(StrEnum):
    """What a storage is to the training step.

    FETCHED are the bytes on the device of an offloaded parameter, for as long as one graph reads them. STORED is the
    gradient of one, which is copied to host memory.
    """

    PARAMETER = "parameter"
    INPUT = "input"
    ACTIVATION = "activation"
    OUTPUT = "output"
    GRADIENT = "gradient"
    FETCHED = "fetched parameter"
    STORED = "stored gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One step: its node's name, how long it runs, and bytes it needs only while it runs."""

    name: str
    duration_ns: int
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Device memory shared by one tensor and its views: the unit that is planned.

    `uses` are the steps that touch it, the producing step included, in rising order. `birth` is the producing step (0
    for what exists before the region), `death` the first step at which the bytes are free again (the number of steps
    for what outlives the region). `ready` is the first step after which it may be copied out, if that is later than its
    birth: an op with several outputs is followed by the steps that name them. `formula` is the size in symbols where
    shapes are dynamic. `caller_frees_at` is the first step at which the region's caller no longer holds it as well, 0
    for what it does not: only the swap that crosses that step frees anything. `parameter` names the one that a FETCHED
    or STORED one belongs to; its life here is the shortest there can be, as if copies took no time: the plan's
    transfers add to it. A FETCHED one is `ready` from the op on that fetches it, where graphs read copies of parameters
    that stay: nothing fetches it later. `state_bytes` of a STORED one are those of the optimizer's state, which an
    update reads and writes; in host memory there are fewer by `state_saved_bytes`. Its caller frees it at
    `caller_frees_at`, or behind the last step, if it stays on the device: as a GRADIENT, which names its parameter if
    that is updated in host memory. `tier` is where the bytes of a FETCHED one come from: host memory or disk.
    `gathered_at` is the backward step that begins to gather anew what the forward has gathered, 0 where none does: ops
    that run again read that copy.
    """

    name: str
    nbytes: int
    kind: Kind
    birth: Step
    death: Step
    uses: tuple[Step, ...]
    spillable: bool
    ready: Step = Step(0)
    caller_frees_at: Step = Step(0)
    formula: str = ""
    parameter: str = ""
    state_bytes: int = 0
    state_saved_bytes: int = 0
    tier: Tier = Tier.HOST
    gathered_at: Step = Step(0)

    def living(
        self, birth: Step, death: Step, uses: tuple[Step, ...], ready: Step, *, spillable: bool | None = None
    ) -> "Storage":
        """Return the same storage with another life; `replace` takes three times as long."""
        return Storage(
            name=self.name,
            nbytes=self.nbytes,
            kind=self.kind,
            birth=birth,
            death=death,
            uses=uses,
            spillable=self.spillable if spillable is None else spillable,
            ready=ready,
            caller_frees_at=self.caller_frees_at,
            formula=self.formula,
            parameter=self.parameter,
            state_bytes=self.state_bytes,
            state_saved_bytes=self.state_saved_bytes,
            tier=self.tier,
            gathered_at=self.gathered_at,
        )

    @property
    def host_state_bytes(self) -> int:
        """The bytes of the optimizer's state in host memory."""
        return self.state_bytes - self.state_saved_bytes

    @property
    def state_traffic_bytes(self) -> int:
        """What an update in host memory reads and writes of the state, and reads of the weight for a split master."""
        return 2 * self.host_state_bytes + (self.nbytes if self.state_saved_bytes else 0)

    def without_state(self) -> "Storage":
        """Return the same storage for one whose state is elsewhere."""
        return replace(self, state_bytes=0, state_saved_bytes=0)

    def check(self) -> None:
        """Raise `ValueError` for a life that cannot be."""
        life = [self.birth, *self.uses, self.death]
        if life != sorted(life) or len(set(self.uses)) < len(self.uses):
            raise ValueError(f"{self.name} lives for [{self.birth}, {self.death}), and its uses are not in there.")
        if self.kind in (Kind.FETCHED, Kind.STORED) and not (self.parameter and self.uses):
            raise ValueError(f"{self.name} is a {self.kind}, and names no parameter, or has no uses.")
        if self.tier is Tier.DEVICE:
            raise ValueError(f"{self.name} comes from the device.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured rates in bytes per second; `duplex` ones hold while both directions are busy. 0 means no such link.

    `host_bytes_per_s` is what updates and copies of a step together make the host's memory read and write, and
    `host_peak_bytes_per_s` the most that these can; 0 if not known.
    """

    d2h_bytes_per_s: Positive
    h2d_bytes_per_s: Positive
    d2h_duplex_bytes_per_s: Positive
    h2d_duplex_bytes_per_s: Positive
    disk_write_bytes_per_s: int = 0
    disk_read_bytes_per_s: int = 0
    copy_latency_ns: int = 10_000
    disk_latency_ns: int = 200_000
    host_bytes_per_s: int = 0
    host_peak_bytes_per_s: int = 0

    @property
    def has_disk(self) -> bool:
        """Whether anything can be written to a disk, and read from it."""
        return min(self.disk_write_bytes_per_s, self.disk_read_bytes_per_s) > 0

    def within(self, disk_write_bytes_per_day: int | None) -> "Links":
        """Return the same links with disks that are written to no faster than an endurance budget allows all day."""
        if disk_write_bytes_per_day is None:
            return self
        most = max(1, int(steady_bytes_per_s(disk_write_bytes_per_day)))
        return replace(self, disk_write_bytes_per_s=min(self.disk_write_bytes_per_s, most))


AT_ONCE = 24
"""This part of what may be written to disks in a day may be written at once."""


def steady_bytes_per_s(bytes_per_day: int) -> float:
    """Return the rate at which disks can be written to all day, beside what is written at once."""
    return bytes_per_day * (AT_ONCE - 1) / AT_ONCE / (24 * 60 * 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Most bytes of each tier; `device_bytes` None means no limit, 0 disk bytes means no disk.

    `host_bytes` are for transfers: `host_taken_bytes` more are held, or kept free, for parameters, gradients, optimizer
    state and other regions. Where those exceed the budget, by `host_lacking_bytes`, nothing is left for transfers.
    """

    device_bytes: int | None
    host_bytes: int
    disk_bytes: int = 0
    host_taken_bytes: int = 0
    host_lacking_bytes: int = 0

    @property
    def whole_host_bytes(self) -> int:
        """Return the host budget, for transfers and all else."""
        return self.host_bytes + self.host_taken_bytes - self.host_lacking_bytes


def host_shares(budget_bytes: int, taken_bytes: int) -> dict[str, int]:
    """Return the fields of `Budgets` for a host budget of which so many bytes are taken."""
    return {
        "host_bytes": max(0, budget_bytes - taken_bytes),
        "host_taken_bytes": taken_bytes,
        "host_lacking_bytes": max(0, taken_bytes - budget_bytes),
    }


class CollectiveKind(StrEnum):
    """What a collective does, as far as it decides how long it takes."""

    ALL_GATHER = "all gather"
    REDUCE_SCATTER = "reduce scatter"
    ALL_REDUCE = "all reduce"
    OTHER = "other"

    def traffic(self, nbytes: int, ranks: int) -> int:
        """Return the bytes that each of `ranks` sends for a whole of `nbytes`, by the best algorithm.

        Of what is gathered, or reduced and scattered, a rank has one part already; to reduce for all is both.
        """
        if self is CollectiveKind.OTHER:
            return nbytes if ranks > 1 else 0
        return (2 if self is CollectiveKind.ALL_REDUCE else 1) * nbytes * (ranks - 1) // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective: step `begin` begins it, then it is under way by itself, and step `needed_at` waits for its end.

    `needed_at` is the number of steps where nobody waits within the region. `nbytes` is the whole of what `ranks` ranks
    gather, or add up. The device has one link for all of them: they run one after the other, in the order in which they
    begin. From `begin` up to `needed_at`, it included, the storages that it `reads` and `writes` stay on the device.
    """

    name: str
    kind: CollectiveKind
    nbytes: int
    ranks: Positive
    begin: Step
    needed_at: Step
    latency_ns: int
    bytes_per_s: Positive
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def duration_ns(self) -> int:
        """How long it is under way when the link is free; nothing is sent to no other rank."""
        if self.ranks == 1:
            return 0
        return self.latency_ns + self.kind.traffic(self.nbytes, self.ranks) * 1_000_000_000 // self.bytes_per_s

    def renamed(self, names: Mapping[str, str]) -> "Collective":
        """Return the same collective with other names for some storages."""
        if names.keys().isdisjoint((*self.reads, *self.writes)):
            return self
        reads, writes = (tuple(names.get(name, name) for name in used) for used in (self.reads, self.writes))
        return replace(self, reads=reads, writes=writes)

    def moved(self, begin: Step, needed_at: Step) -> "Collective":
        """Return the same collective at other steps."""
        return replace(self, begin=begin, needed_at=needed_at)

    def check(self) -> None:
        """Raise `ValueError` for one that is waited for before it has begun."""
        if self.needed_at <= self.begin:
            raise ValueError(f"{self.name} begins at step {self.begin}, and step {self.needed_at} waits for it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the backward can make a saved storage again: by running these forward steps, in order, once more.

    What the steps read and do not make themselves is a parameter, an input, saved, or gathered by the backward anew.
    """

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything a policy may look at.

    `boundary` is the first backward step (`len(ops)` in inference): a storage that crosses it is copied out in the
    forward graph and copied in in the backward graph. `external_bytes` are held on the device by others for the whole
    region, `boundary_bytes` more of them from the end of the forward graph to the begin of the backward graph. Storages
    below `min_spill_bytes` are not worth an op. `recipes` are what could be recomputed instead of saved, and
    `recompute_ns` is the time of the steps that do so already. `barriers`, scheduling barriers, are the steps whose
    place among the runtime ops is sure in the code that will run: a compiler that fuses may move the other steps
    between two barriers. Without any, every step is one. `copies_parameters` says that graphs read copies of all
    offloaded parameters: of one that stays on the device, too. A whole step runs the ops `accumulation` times before an
    update: gradients in host memory are added up there. Those of parameters that stay on the device may be added up
    there, too, where `sums_stay`: in a region that is planned alone, on one device. `collectives` are in the order in
    which they begin. With `updates_in_backward` a parameter is updated as soon as its gradient is there, and else after
    the last backward.
    """

    ops: tuple[Op, ...]
    boundary: Step
    storages: tuple[Storage, ...]
    links: Links
    budgets: Budgets
    external_bytes: int = 0
    boundary_bytes: int = 0
    min_spill_bytes: int = 0
    barriers: tuple[Step, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    recompute_ns: int = 0
    copies_parameters: bool = False
    accumulation: Positive = 1
    collectives: tuple[Collective, ...] = ()
    updates_in_backward: bool = False
    sums_stay: bool = True

    def check(self) -> None:
        """Raise `ValueError` for a step that there is not, for two things of one name, and for sums out of range."""
        count = len(self.ops)
        lives = (
            (s.name, (s.death, s.ready, s.caller_frees_at, s.gathered_at, *(use + 1 for use in s.uses)))
            for s in self.storages
        )
        again = ((f"the recipe of {r.name}", (*(step + 1 for step in r.steps),)) for r in self.recipes)
        barriers = "a scheduling barrier", tuple(barrier + 1 for barrier in self.barriers)
        waits = ((c.name, (c.needed_at,)) for c in self.collectives)
        for name, ends in (("the boundary", (self.boundary,)), barriers, *lives, *again, *waits):
            if max(ends, default=0) > count:
                raise ValueError(f"{name} ends with step {max(ends)}, of {count}.")
        names = {s.name for s in self.storages}
        if len(names) < len(self.storages) or not {r.name for r in self.recipes} <= names:
            raise ValueError("two storages have one name, or a recipe is for none of them.")
        if any(list(steps) != sorted(set(steps)) for steps in (self.barriers, *(r.steps for r in self.recipes))):
            raise ValueError("barriers, or the steps of a recipe, are out of order.")
        if any(after.begin < before.begin for before, after in pairwise(self.collectives)):
            raise ValueError("collectives are out of order: they are listed as they begin.")
        if len({each.name for each in self.collectives}) < len(self.collectives):
            raise ValueError("two collectives have one name.")
        held = (*(s.nbytes + s.state_bytes for s in self.storages), *(op.scratch_bytes for op in self.ops))
        durations_ns = *(op.duration_ns for op in self.ops), *(each.duration_ns for each in self.collectives)
        for unit, amounts in (
            ("bytes", (*held, self.external_bytes, self.boundary_bytes)),
            ("ns", (*durations_ns, self.recompute_ns)),
        ):
            if sum(amounts) > MOST:
                raise ValueError(f"all its {unit} come to {sum(amounts)}, more than {MOST}.")
        if self.budgets.disk_bytes and not self.links.has_disk:
            raise ValueError("there is a budget for a disk, and no rate of one.")
        if not self.links.disk_read_bytes_per_s and any(storage.tier is Tier.NVME for storage in self.storages):
            raise ValueError("parameters are on a disk, and there is no rate of reading one.")

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What others have derived from it, whatever its budgets, and ask for again and again."""
        return {}

    def first_late_use(self, storage: Storage) -> Step:
        """Return the first backward step that uses `storage`; the end of the region if none does."""
        return next((use for use in storage.uses if use >= self.boundary), Step(len(self.ops)))

    @property
    def boundary_excess_bytes(self) -> int:
        """What others hold between the graphs beyond what comes with the first backward step, which counts for it.

        They may hold that before, such as the result's gradient; but not parameters that are prefetched, which are
        counted besides.
        """
        if not self.boundary_bytes or self.boundary >= len(self.ops):
            return 0
        coming = (s for s in self.storages if s.birth == self.boundary and s.kind is not Kind.FETCHED)
        brought = sum(storage.nbytes for storage in coming)
        return max(0, self.boundary_bytes - brought - self.ops[self.boundary].scratch_bytes)

    def within(self, **budgets: Any) -> "Problem":
        """Return the same problem under other budgets: fields of `Budgets`."""
        other = replace(self, budgets=replace(self.budgets, **budgets))
        vars(other)["derived"] = self.derived
        return other

    def with_less(self, nbytes: int) -> "Problem":
        """Return the same problem with `nbytes` less of a limited device."""
        limit = self.budgets.device_bytes
        return self if limit is None else self.within(device_bytes=limit - nbytes)

    between_bytes = Renamed("boundary_bytes")
