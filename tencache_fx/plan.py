"""The planner's values: what is known (`Problem`), what is decided (`Plan`), and their arithmetic. No torch here.

A region is one line of *steps*: the forward graph's ops, then the backward graph's. Step `k` owns the device bytes of
every storage with `birth <= k < death`. All intervals are half-open. Runtime ops sit in the *gap* before a step, and in
one gap they run in this order, which every checker relies on:

    step k | offload (offload == k), release (gone == k+1), prefetch (fetch == k+1), wait (back == k+1) | step k+1
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, NewType

import numpy as np

from tencache_fx.values import MOST, Positive

Step = NewType("Step", int)


STATE_BYTES = 12
"""Of an optimizer, for each element of a parameter: an fp32 master weight and two moments."""


class Tier(StrEnum):
    """Where bytes live, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Kind(StrEnum):
    """What a storage is to the training step.

    FETCHED is a parameter's bytes on the device, for as long as one graph reads them: their home is elsewhere. SUNK is
    a gradient on its way to such a home.
    """

    PARAMETER = "parameter"
    INPUT = "input"
    ACTIVATION = "activation"
    OUTPUT = "output"
    GRADIENT = "gradient"
    FETCHED = "fetched parameter"
    SUNK = "gradient on its way home"


class Way(StrEnum):
    """Which copies a trip makes: out and in again; in only, of a parameter from home; out only, of a gradient."""

    ROUND = "round"
    IN = "in"
    OUT = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One step: its node's name, how long it runs, and bytes it needs only while it runs."""

    name: str
    duration_ns: int
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Device memory shared by one tensor and its views: the unit that is planned.

    `uses` are the steps that touch it, the producing step included, in rising order. `birth` is the producing step
    (0 for what exists before the region), `death` the first step at which the bytes are free again (the number of
    steps for what outlives the region). `ready` is the first step after which it may be copied out, if that is later
    than its birth: an op with several outputs is followed by the steps that name them. `formula` is the size in
    symbols where shapes are dynamic. `held_until` is the first step at which the region's caller no longer holds it as
    well, 0 for what it does not: only the trip that crosses that step frees anything. `home` is the parameter that a
    FETCHED or SUNK one belongs to; its life here is the shortest there can be, as if copies took no time: the plan's
    trips add to it. `state_bytes` of a SUNK one are those of the optimizer's state, which an update reads and writes.
    """

    name: str
    nbytes: int
    kind: Kind
    birth: Step
    death: Step
    uses: tuple[Step, ...]
    spillable: bool
    ready: Step = Step(0)
    held_until: Step = Step(0)
    formula: str = ""
    home: str = ""
    state_bytes: int = 0

    def check(self) -> None:
        """Raise `ValueError` for a life that cannot be."""
        life = [self.birth, *self.uses, self.death]
        if life != sorted(life) or len(set(self.uses)) < len(self.uses):
            raise ValueError(f"{self.name} lives for [{self.birth}, {self.death}), and its uses are not in there.")
        if self.kind in (Kind.FETCHED, Kind.SUNK) and not (self.home and self.uses):
            raise ValueError(f"{self.name} is a {self.kind}, and has no home, or no uses.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured rates in bytes per second; `duplex` ones hold while both directions are busy. 0 means no such link.

    `host_bytes_per_s` is what updates and copies together make the host's memory read and write; 0 if not known.
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

    @property
    def has_disk(self) -> bool:
        """Say whether anything can be written to a disk, and read from it."""
        return min(self.disk_write_bytes_per_s, self.disk_read_bytes_per_s) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Most bytes of each tier; `device_bytes` None means no limit, 0 disk bytes means no disk.

    `host_bytes` are for trips: `host_taken_bytes` more are held, or kept free, for parameters, gradients, optimizer
    state and other regions.
    """

    device_bytes: int | None
    host_bytes: int
    disk_bytes: int = 0
    host_taken_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the backward can make a saved storage again: by running these forward steps, in order, once more.

    What the steps read and do not make themselves is a parameter, an input, or saved.
    """

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a policy may look at.

    `boundary` is the first backward step (`len(ops)` in inference): a storage that crosses it leaves from the forward
    graph and comes back in the backward graph. `outside_bytes` are held on the device by others for the whole region,
    `between_bytes` more of them from the end of the forward graph to the begin of the backward graph.
    Storages below `min_spill_bytes` are not worth an op. `recipes` are what could be recomputed instead of saved, and
    `recompute_ns` is the time of the steps that do so already. `fences` are the steps whose place among the runtime
    ops is sure in the code that will run: a compiler that fuses may move the other steps between two fences. Without
    any, every step is one.
    """

    ops: tuple[Op, ...]
    boundary: Step
    storages: tuple[Storage, ...]
    links: Links
    budgets: Budgets
    outside_bytes: int = 0
    between_bytes: int = 0
    min_spill_bytes: int = 0
    fences: tuple[Step, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    recompute_ns: int = 0

    def check(self) -> None:
        """Raise `ValueError` for a step that there is not, for two things of one name, and for sums out of range."""
        count = len(self.ops)
        lives = ((s.name, (s.death, s.ready, s.held_until, *(use + 1 for use in s.uses))) for s in self.storages)
        again = ((f"the recipe of {r.name}", (*(step + 1 for step in r.steps),)) for r in self.recipes)
        fences = "a fence", tuple(fence + 1 for fence in self.fences)
        for name, ends in (("the boundary", (self.boundary,)), fences, *lives, *again):
            if max(ends, default=0) > count:
                raise ValueError(f"{name} ends with step {max(ends)}, of {count}.")
        names = {s.name for s in self.storages}
        if len(names) < len(self.storages) or not {r.name for r in self.recipes} <= names:
            raise ValueError("two storages have one name, or a recipe is for none of them.")
        if any(list(steps) != sorted(set(steps)) for steps in (self.fences, *(r.steps for r in self.recipes))):
            raise ValueError("fences, or the steps of a recipe, are out of order.")
        held = (*(s.nbytes + s.state_bytes for s in self.storages), *(op.scratch_bytes for op in self.ops))
        for unit, amounts in (
            ("bytes", (*held, self.outside_bytes, self.between_bytes)),
            ("ns", (*(op.duration_ns for op in self.ops), self.recompute_ns)),
        ):
            if sum(amounts) > MOST:
                raise ValueError(f"all its {unit} come to {sum(amounts)}, more than {MOST}.")
        if self.budgets.disk_bytes and not self.links.has_disk:
            raise ValueError("there is a budget for a disk, and no rate of one.")

    @property
    def capacity_bytes(self) -> int | None:
        """Device bytes this region may use, or None for no limit."""
        if self.budgets.device_bytes is None:
            return None
        return self.budgets.device_bytes - self.outside_bytes

    @property
    def boundary_bytes(self) -> int:
        """What others hold between the graphs beyond what comes with the first backward step, which counts for it.

        They may hold that before, such as the result's gradient; but not parameters on their way, which come besides.
        """
        if not self.between_bytes or self.boundary >= len(self.ops):
            return 0
        coming = (s for s in self.storages if s.birth == self.boundary and s.kind is not Kind.FETCHED)
        brought = sum(storage.nbytes for storage in coming)
        return max(0, self.between_bytes - brought - self.ops[self.boundary].scratch_bytes)

    def within(self, **budgets: Any) -> "Problem":
        """Return the same problem under other budgets: fields of `Budgets`."""
        return replace(self, budgets=replace(self.budgets, **budgets))

    def with_less(self, nbytes: int) -> "Problem":
        """Return the same problem with `nbytes` less of a limited device."""
        limit = self.budgets.device_bytes
        return self if limit is None else self.within(device_bytes=limit - nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """A storage's trip: no device bytes during `[gone, fetch)`, no readers during `[gone, back)`.

    A trip in only adds device bytes during `[fetch, gone)` instead, before the storage's birth at `back` (`offload` and
    `gone` are that, too); one out only adds them during `[fetch, gone)`, from its death at `fetch` and `back` on.
    """

    name: str
    nbytes: int
    tier: Tier
    offload: Step  # issue the copy out after this step
    gone: Step  # the copy has landed: the device bytes are free from here
    fetch: Step  # allocate, and issue the copy in, before this step
    back: Step  # first reader: wait here
    way: Way = Way.ROUND


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
    spills: tuple[Spill, ...]
    pool: tuple[PoolClass, ...]
    staging: tuple[PoolClass, ...]
    forecast: Forecast
    recomputed: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    updated_here: tuple[str, ...] = ()


def inactive_intervals(storage: Storage) -> tuple[tuple[Step, Step], ...]:
    """Return `(last use, next use)` pairs with at least one whole step between them, from which it may leave.

    Until `held_until` the caller uses it.
    """
    pairs: Iterable[tuple[Step, Step]] = pairwise(storage.uses)
    if until := storage.held_until:
        pairs = ((Step(max(u, until - 1)), v) for u, v in pairs if u < until <= v)
    ready = storage.ready
    return tuple([(u, v) for u, v in pairs if v - u > 1 and u >= ready])


def live_bytes(problem: Problem, spills: Iterable[Spill] = ()) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the device bytes in use at each step under `spills`, held-outside bytes included.

    One difference array and one running sum: O(steps + storages + spills).
    """
    delta = [0] * (len(problem.ops) + 1)  # single elements of an array are slow
    for storage in problem.storages:
        delta[storage.birth] += storage.nbytes
        delta[storage.death] -= storage.nbytes
    for spill in spills:
        delta[spill.gone] -= spill.nbytes
        delta[spill.fetch] += spill.nbytes
    scratch = np.array([op.scratch_bytes for op in problem.ops], dtype=np.int64)
    if more_bytes := problem.boundary_bytes:
        scratch[problem.boundary] += more_bytes
    return np.cumsum(delta[:-1], dtype=np.int64) + scratch + problem.outside_bytes


def is_candidate(problem: Problem, storage: Storage) -> bool:
    """Say whether a policy may spill `storage` at all: allowed, worth an op, and with links to travel on."""
    linked = problem.links.d2h_bytes_per_s > 0 and problem.links.h2d_bytes_per_s > 0
    return linked and storage.spillable and storage.nbytes >= max(1, problem.min_spill_bytes)


def earliest_offload(problem: Problem, storage: Storage, last_use: Step) -> Step:
    """Return the first step after which `storage` may be copied out for the trip that follows `last_use`.

    Graphs are functional, so the copy may start before the last read; but an offload sits in its trip's own graph.
    """
    ready = max(storage.birth, storage.ready)
    return max(ready, problem.boundary) if last_use >= problem.boundary else ready


def fence_in(problem: Problem, spill: Spill) -> Spill | None:
    """Return `spill` with bytes that count as gone only from a fence on, and as taken from behind a fence on.

    None if the storage is then never away. Without fences, `spill` as it is.
    """
    if not problem.fences:
        return spill
    gone, fetch = _fenced(problem, spill.offload, spill.gone, spill.fetch, spill.back)
    return dataclasses.replace(spill, gone=gone, fetch=fetch) if gone < fetch else None


def _fenced(problem: Problem, offload: Step, gone: Step, fetch: Step, back: Step) -> tuple[Step, Step]:
    """Return what fences leave of `[gone, fetch)`; who leaves from one graph for the other is away between them."""
    fences, boundary = problem.fences, problem.boundary
    after, before = bisect_left(fences, gone), bisect_left(fences, fetch) - 1
    gone = fences[after] if after < len(fences) else Step(len(problem.ops))
    fetch = Step(fences[before] + 1) if before >= 0 else Step(0)
    return (min(gone, boundary), max(fetch, boundary)) if offload < boundary <= back else (gone, fetch)


def bare_spills(problem: Problem) -> tuple[Spill, ...]:
    """Return, for every candidate, its longest trip with no slack at all: the least any plan of ours can hold.

    Each storage travels at most once, over the inactive interval that contains the most time.
    """
    ends_ns = list(accumulate(op.duration_ns for op in problem.ops))
    spills = []
    for s in (s for s in problem.storages if is_candidate(problem, s)):
        trips = []  # as numbers, with the time that each is away: only the longest is to be an object
        for u, v in inactive_intervals(s):
            gone, fetch = _fenced(problem, u, Step(u + 1), v, v) if problem.fences else (Step(u + 1), v)
            if gone < fetch:
                trips.append((ends_ns[fetch - 1] - ends_ns[gone - 1], gone, fetch, u, v))
        if trips:
            _, a, b, u, v = max(trips)
            spills.append(Spill(name=s.name, nbytes=s.nbytes, tier=Tier.HOST, offload=u, gone=a, fetch=b, back=v))
    return tuple(spills)


def held_at(problem: Problem, spills: Iterable[Spill], step: Step) -> tuple[Storage, ...]:
    """Return the storages with device bytes at `step`, largest first."""
    spills = tuple(spills)
    away = {spill.name for spill in spills if spill.gone <= step < spill.fetch}
    early = {spill.name for spill in spills if spill.fetch <= step < spill.gone}
    held = [s for s in problem.storages if s.name in early or (s.birth <= step < s.death and s.name not in away)]
    return tuple(sorted(held, key=lambda s: (-s.nbytes, s.name)))


def round_up(nbytes: int, unit: int) -> int:
    """Return the least multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit
