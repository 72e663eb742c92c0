"""Replay a plan event by event and say how long a training step takes. No torch here, and no code of the policies.

The machine: compute runs the steps in order; one FIFO server each for copies out (d2h), copies in (h2d), disk writes,
disk reads and collectives, which slow nothing else down. While both copy directions are busy each runs at its duplex
rate (a fluid model: rates change at once when the other side starts or stops); latency is charged as bytes at the solo
rate. Runtime ops act where `plan.py` puts them; several of one kind in one gap go in order of need: offloads by
`freed_at`, prefetches by `needed_at`, ties by name.

A swap to NVMe takes a staging buffer: on the way out from `offload` until it is written (compute waits when none is
free), on the way in from the start of the read until the copy in has landed. Reads are first in line for a freed
buffer: they were asked for before the offload that waits. A read waits for its own write.

A load from NVMe, of a parameter on disk, takes one of a few buffers that serve only such loads, from the start of the
read until the copy in has landed. It is read as swaps are, and in one queue with these.

Every transfer ends inside the region, so all servers are idle when a step ends and a second step would repeat the first
exactly: one replay is the steady state (`tests/test_simulate.py` replays two in a row to show it).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter
from typing import Literal

from tencache_fx.planning.collectives import CollectiveLink, CollectiveTimes, ideal_ns
from tencache_fx.planning.plan import PoolClass, Transfer
from tencache_fx.planning.problem import PASSING_BUFFERS, Collective, Problem, Step, Tier

Verb = Literal["offload", "release", "prefetch", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One runtime op of a plan: what is done, for which transfer, in the gap before `step`."""

    step: Step
    verb: Verb
    transfer: Transfer


def program(transfers: Iterable[Transfer]) -> tuple[Event, ...]:
    """Return every runtime op in the order in which they run.

    Inside one gap the most urgent goes first: offloads by `freed_at`, prefetches by `needed_at`, ties by name.
    """
    return tuple(
        Event(step=step, verb=_VERBS[verb], transfer=transfer) for step, verb, _, _, transfer in _in_order(transfers)
    )


_VERBS: tuple[Verb, ...] = ("offload", "release", "prefetch", "wait")


def _in_order(transfers: Iterable[Transfer]) -> list[tuple[Step, int, Step, str, Transfer]]:
    """Return step, number of the verb, urgency, name and transfer of each runtime op, sorted by these."""
    events = []
    for s in transfers:
        out, back, name = s.out, s.back, s.name
        if out is not None:
            events.append((Step(out.after + 1), 0, out.freed_at, name, s))
            events.append((out.freed_at, 1, out.freed_at, name, s))
        if back is not None:
            events.append((back.prefetch_at, 2, back.needed_at, name, s))
            events.append((back.needed_at, 3, back.needed_at, name, s))
    return sorted(events, key=_WITHOUT_TRANSFER)


_WITHOUT_TRANSFER = itemgetter(0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """When one transfer's copies ran, in ns from the start of the region, and how long compute stood still for it.

    A transfer to host memory has no disk part: its times of writing equal `out_end_ns`, those of reading `in_start_ns`.
    What a load or a store does not do has the time 0.
    """

    name: str
    tier: Tier
    out_start_ns: int
    out_end_ns: int
    write_start_ns: int
    written_ns: int
    read_start_ns: int
    read_end_ns: int
    in_start_ns: int
    in_end_ns: int
    stall_out_ns: int  # at the offload (no staging buffer) and at the release
    stall_in_ns: int  # at the wait


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `simulate` saw. The times of single steps and transfers are worked out if they are asked for.

    They follow from `runs`, one of each transfer, from `ends_ns`, of which number `k` is when step `k` would start if
    none waited, and from `begun`: some steps, and when these started. Those behind each follow without a wait.
    """

    makespan_ns: int
    ideal_ns: int
    stall_out_ns: int
    stall_in_ns: int
    stall_collective_ns: int
    d2h_bytes: int
    h2d_bytes: int
    disk_write_bytes: int
    disk_read_bytes: int
    ends_ns: Sequence[int]
    begun: Sequence[tuple[int, float]]
    runs: Sequence["_Run"]
    collectives: Sequence[CollectiveTimes]

    @cached_property
    def starts_ns(self) -> tuple[int, ...]:
        """When each step started."""
        starts: list[float] = []
        last = len(self.ends_ns) - 1, 0.0
        for (step, now), (until, _) in pairwise((*self.begun, last)):
            starts.extend(now + end - self.ends_ns[step] for end in self.ends_ns[step:until])
        return tuple(map(round, starts))

    def start_ns(self, step: int) -> int:
        """Return when one step started, or when the last one ended."""
        before = max((at, now) for at, now in self.begun if at <= step)
        return round(before[1] + self.ends_ns[step] - self.ends_ns[before[0]])

    @cached_property
    def transfers(self) -> tuple[TransferTimes, ...]:
        """The times of each transfer, in the order given."""
        return tuple(run.times() for run in self.runs)


def simulate(problem: Problem, transfers: Sequence[Transfer], staging: Sequence[PoolClass] = ()) -> Replay:
    """Return the replay of `transfers` on `problem`'s steps and links.

    O(steps + n log n) for n transfers: compute runs from one runtime op to the next, each copy starts and ends once.
    Raises `ValueError` when a transfer needs a link whose rate is 0, or is larger than every staging buffer.
    """
    ends = list(accumulate((op.duration_ns for op in problem.ops), initial=0))
    on_disk = [transfer for transfer in transfers if transfer.tier is Tier.NVME]
    machine, link = _Machine(problem, staging, uses_disk=bool(on_disk)), CollectiveLink(problem.collectives)
    runs = {
        transfer.name: _Run(
            transfer=transfer, pool=machine.pool_for(transfer), written=inf if transfer.out is not None else 0.0
        )
        for transfer in transfers
    }
    now = stall_out = stall_in = 0.0
    step = 0
    begun: list[tuple[int, float]] = []
    for at, number, name in _with_collectives(_in_order(transfers), problem.collectives):
        if at > step:
            begun.append((step, now))
            now += ends[at] - ends[step]
            step = at
        if number in (_BEGIN, _AWAIT):
            now = link.begin(name, now) if number == _BEGIN else link.wait(name, now)
            continue
        run = runs[name]
        machine.advance(now)
        waited = machine.act(number, run)
        if not waited:
            continue
        now += waited
        if number == 3:
            run.stall_in += waited
            stall_in += waited
        else:
            run.stall_out += waited
            stall_out += waited
    begun.append((step, now))
    return Replay(
        makespan_ns=round(now + ends[-1] - ends[step]),
        ideal_ns=ideal_ns(problem),
        stall_out_ns=round(stall_out),
        stall_in_ns=round(stall_in),
        stall_collective_ns=round(link.stall),
        d2h_bytes=sum(transfer.nbytes for transfer in transfers if transfer.back is None or transfer.out is not None),
        h2d_bytes=sum(transfer.nbytes for transfer in transfers if transfer.back is not None),
        disk_write_bytes=sum(transfer.nbytes for transfer in on_disk if transfer.out is not None),
        disk_read_bytes=sum(transfer.nbytes for transfer in on_disk),
        ends_ns=ends,
        begun=begun,
        runs=tuple(runs[transfer.name] for transfer in transfers),
        collectives=link.times(),
    )


_BEGIN, _AWAIT = -1, 4  # of collectives: behind the step before, and in the step itself, behind its runtime ops


def _with_collectives(
    events: Sequence[tuple[Step, int, Step, str, Transfer]], collectives: Sequence[Collective]
) -> Iterable[tuple[Step, int, str]]:
    """Return step, number of the verb and name of each runtime op, and of what begins and awaits collectives."""
    if not collectives:
        return [(at, number, name) for at, number, _, name, _ in events]
    keyed = [((at, number, place), name) for place, (at, number, _, name, _) in enumerate(events)]
    for place, each in enumerate(collectives):
        keyed.append(((Step(each.begin + 1), _BEGIN, place), each.name))
        keyed.append(((each.needed_at, _AWAIT, place), each.name))
    return [(at, number, name) for (at, number, _), name in sorted(keyed)]


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """One transfer in progress; times are `inf` until they are known."""

    transfer: Transfer
    pool: int  # the class of buffers that it takes one of on its way from or to disk, -1 for none
    out_start: float = inf
    out_end: float = inf
    write_start: float = inf
    written: float = inf
    read_start: float = inf
    read_end: float = inf
    in_start: float = inf
    in_end: float = inf
    stall_out: float = 0.0
    stall_in: float = 0.0

    def times(self) -> TransferTimes:
        on_disk = self.transfer.tier is Tier.NVME
        return TransferTimes(
            name=self.transfer.name,
            tier=self.transfer.tier,
            out_start_ns=_rounded(self.out_start),
            out_end_ns=_rounded(self.out_end),
            write_start_ns=_rounded(self.write_start if on_disk else self.out_end),
            written_ns=_rounded(self.written if on_disk else self.out_end),
            read_start_ns=_rounded(self.read_start if on_disk else self.in_start),
            read_end_ns=_rounded(self.read_end if on_disk else self.in_start),
            in_start_ns=_rounded(self.in_start),
            in_end_ns=_rounded(self.in_end),
            stall_out_ns=round(self.stall_out),
            stall_in_ns=round(self.stall_in),
        )


def _rounded(time: float) -> int:
    return 0 if time == inf else round(time)


class _Server:
    """A FIFO server: its queue, the transfer it serves, and the bytes left of that."""

    def __init__(self, bytes_per_s: int, duplex_bytes_per_s: int, latency_ns: int) -> None:
        self.solo = bytes_per_s / 1e9  # bytes per ns from here on
        self.duplex = duplex_bytes_per_s / 1e9
        self.rate = self.solo
        self.latency_bytes = latency_ns * self.solo
        self.queue: deque[_Run] = deque()
        self.serves: _Run | None = None
        self.left = 0.0

    def start(self) -> _Run:
        run = self.queue.popleft()
        if self.solo <= 0:
            raise ValueError(
                f"storage {run.transfer.name} is transferred to {run.transfer.tier} over a link whose rate is 0."
            )
        self.serves, self.left = run, run.transfer.nbytes + self.latency_bytes
        return run

    def left_ns(self) -> float:
        return inf if self.serves is None else self.left / self.rate


class _Machine:
    """The four servers and the staging buffers, at one point in time (`now`, in ns)."""

    def __init__(self, problem: Problem, staging: Sequence[PoolClass], *, uses_disk: bool) -> None:
        links = problem.links
        self.now = 0.0
        self.out = _Server(links.d2h_bytes_per_s, links.d2h_duplex_bytes_per_s, links.copy_latency_ns)
        self.into = _Server(links.h2d_bytes_per_s, links.h2d_duplex_bytes_per_s, links.copy_latency_ns)
        disk_rates = links.disk_write_bytes_per_s, links.disk_read_bytes_per_s
        self.write, self.read = (_Server(rate, rate, links.disk_latency_ns) for rate in disk_rates)
        self.servers = (self.out, self.into, self.write, self.read) if uses_disk else (self.out, self.into)
        self.staging = sorted(staging, key=lambda pool: pool.nbytes)
        self.free = [*(pool.count for pool in self.staging), PASSING_BUFFERS]

    def pool_for(self, transfer: Transfer) -> int:
        """Return the smallest staging class that holds `transfer`, or -1 if it needs none; the last is for loads."""
        if transfer.tier is not Tier.NVME:
            return -1
        if transfer.out is None:
            return len(self.staging)
        for index, pool in enumerate(self.staging):
            if pool.nbytes >= transfer.nbytes and pool.count > 0:
                return index
        raise ValueError(f"storage {transfer.name} has {transfer.nbytes} bytes, more than every staging buffer.")

    def act(self, number: int, run: _Run) -> float:
        """Carry out one runtime op, by the number of its verb; return how long compute waited for it."""
        before = self.now
        match _VERBS[number]:
            case "offload":
                if run.pool >= 0:
                    self.until(lambda: self.free[run.pool] > 0)
                    self.free[run.pool] -= 1
                self.out.queue.append(run)
            case "prefetch":
                (self.into if run.pool < 0 else self.read).queue.append(run)
            case "release":
                if run.out_end < inf:
                    return 0.0
                self.until(lambda: run.out_end < inf)
            case "wait":
                if run.in_end < inf:
                    return 0.0
                self.until(lambda: run.in_end < inf)
        self._start()
        return self.now - before

    def until(self, done: Callable[[], bool]) -> None:
        """Let the servers work until `done()`."""
        while not done():
            soonest = self._soonest_ns()
            assert soonest < inf, "nothing is under way that could end this wait"
            self._pass(soonest)

    def advance(self, until_ns: float) -> None:
        """Let the servers work until `until_ns`."""
        while (soonest := self._soonest_ns()) <= until_ns - self.now:
            self._pass(soonest)
        if (passed := until_ns - self.now) <= 0:
            return
        for server in self.servers:
            if server.serves is not None:
                left = server.left - passed * server.rate
                server.left = left if left > 0.0 else 0.0
        self.now = until_ns

    def _soonest_ns(self) -> float:
        soonest = inf
        for server in self.servers:
            if server.serves is not None and (left_ns := server.left / server.rate) < soonest:
                soonest = left_ns
        return soonest

    def _pass(self, dt: float) -> None:
        """Move time on by `dt`, when the next copy ends, and start what that makes possible."""
        ended = [server for server in self.servers if server.left_ns() <= dt]
        self.now += dt
        for server in self.servers:
            server.left -= dt * server.rate
        for server in ended:
            run = server.serves
            assert run is not None
            server.serves = None
            self._end(server, run)
        self._start()

    def _end(self, server: _Server, run: _Run) -> None:
        if server is self.out:
            run.out_end = self.now
            if run.pool >= 0:
                self.write.queue.append(run)
        elif server is self.write:
            run.written = self.now
            self.free[run.pool] += 1
        elif server is self.read:
            run.read_end = self.now
            self.into.queue.append(run)
        else:
            run.in_end = self.now
            if run.pool >= 0:
                self.free[run.pool] += 1

    def _start(self) -> None:
        """Start every idle server whose head of queue can go, and set the rates that hold from now on."""
        if self.read.queue and self.read.serves is None:
            head = self.read.queue[0]
            if head.written < inf and self.free[head.pool] > 0:
                self.free[head.pool] -= 1
                self.read.start().read_start = self.now
        if self.write.queue and self.write.serves is None:
            self.write.start().write_start = self.now
        if self.out.queue and self.out.serves is None:
            self.out.start().out_start = self.now
        if self.into.queue and self.into.serves is None:
            self.into.start().in_start = self.now
        both = self.out.serves is not None and self.into.serves is not None
        for server in (self.out, self.into):
            server.rate = server.duplex if both else server.solo
