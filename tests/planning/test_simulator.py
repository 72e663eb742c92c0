"""The simulator against a replay that moves one byte per nanosecond, tick by tick, and against sums done by hand."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from drawn import drawn_cases
from hypothesis import given
from hypothesis import strategies as st
from problems import links, make_swap, problems_with_swaps, with_collectives

from tencache_fx.planning.plan import CopyIn, PoolClass, Transfer
from tencache_fx.planning.problem import Budgets, Collective, Kind, Links, Op, Problem, Step, Storage, Tier
from tencache_fx.planning.simulator import simulate

Case = tuple[Problem, tuple[Transfer, ...]]


def ticking_replay(problem: Problem, transfers: tuple[Transfer, ...], staging: int) -> tuple[list[int], dict[str, int]]:
    """Return when each step starts, and the time waited in each sort of runtime op: one loop turn is one ns.

    The links move one byte per ns, the disk one in two.
    """
    latency, disk_latency = problem.links.copy_latency_ns, problem.links.disk_latency_ns
    todo: list[tuple[str, Transfer | Collective | int]] = []  # the whole program, ops and steps in order
    for step in range(len(problem.ops) + 1):
        todo += [("begin", c) for c in problem.collectives if c.begin == step - 1]
        todo += [
            ("offload", s)
            for s in sorted(transfers, key=lambda s: (s.freed_at, s.name))
            if s.copy_out_after == step - 1
        ]
        todo += [("release", s) for s in sorted(transfers, key=lambda s: s.name) if s.freed_at == step]
        todo += [
            ("prefetch", s) for s in sorted(transfers, key=lambda s: (s.needed_at, s.name)) if s.prefetch_at == step
        ]
        todo += [("wait", s) for s in sorted(transfers, key=lambda s: s.name) if s.needed_at == step]
        todo += [("await", c) for c in problem.collectives if c.needed_at == step]
        todo += [("step", step)] if step < len(problem.ops) else []
    queues: dict[str, list[Any]] = {"out": [], "write": [], "read": [], "in": [], "collective": []}
    serving: dict[str, tuple[Any, int]] = {}  # what, until when
    done: set[tuple[str, str]] = set()
    starts: list[int] = []
    busy_until = now = 0
    waited = dict.fromkeys(("offload", "release", "wait", "await"), 0)
    while todo or now < busy_until:
        for server in queues:
            if server in serving and serving[server][1] == now:
                transfer = serving.pop(server)[0]
                done.add((server, transfer.name))
                if server == "collective":
                    continue
                if server == "out" and transfer.tier is Tier.NVME:
                    queues["write"].append(transfer)
                elif server == "read":
                    queues["in"].append(transfer)
                elif transfer.tier is Tier.NVME:
                    staging += 1

        def start_idle(now: int = now) -> None:
            nonlocal staging
            for server, queue in queues.items():
                if server in serving or not queue:
                    continue
                if server == "read":
                    if ("write", queue[0].name) not in done or staging == 0:
                        continue
                    staging -= 1
                transfer = queue.pop(0)
                if server == "collective":
                    if transfer.duration_ns:
                        serving[server] = transfer, now + transfer.duration_ns
                    else:
                        done.add((server, transfer.name))
                        start_idle()
                    continue
                on_disk = server in ("write", "read")
                took = 2 * transfer.nbytes + disk_latency if on_disk else transfer.nbytes + latency
                serving[server] = transfer, now + took

        start_idle()
        while todo and now >= busy_until:
            verb, what = todo[0]
            if isinstance(what, int):
                starts.append(now)
                busy_until = now + problem.ops[what].duration_ns
            elif verb == "offload":
                if what.tier is Tier.NVME and staging == 0:
                    waited[verb] += 1
                    break
                staging -= what.tier is Tier.NVME
                queues["out"].append(what)
            elif verb == "begin":
                queues["collective"].append(what)
            elif verb in _AWAITED and (_AWAITED[verb], what.name) not in done:
                waited[verb] += 1
                break
            elif verb == "prefetch":
                queues["read" if what.tier is Tier.NVME else "in"].append(what)
            todo.pop(0)
            busy_until = max(busy_until, now)
            start_idle()
        now += 1
        assert now < 10**5, "the replay does not end"
    return [*starts, busy_until], waited


_AWAITED = {"release": "out", "wait": "in", "await": "collective"}


@drawn_cases(500)
@given(case=problems_with_swaps(), staging=st.integers(1, 3), latency=st.integers(0, 3), data=st.data())
def test_agrees_with_the_ticking_replay(case: Case, staging: int, latency: int, data: st.DataObject) -> None:
    problem, transfers = case
    problem = replace(problem, links=links(copy_latency_ns=latency, disk_latency_ns=2 * latency))
    problem = data.draw(with_collectives(problem))
    starts, waited = ticking_replay(problem, transfers, staging)
    replay = simulate(problem, transfers, (PoolClass(nbytes=4096, count=staging),))
    assert [*replay.starts_ns, replay.makespan_ns] == starts
    assert (replay.stall_out_ns, replay.stall_in_ns) == (waited["offload"] + waited["release"], waited["wait"])
    assert replay.stall_collective_ns == waited["await"]
    assert replay.makespan_ns == sum(op.duration_ns for op in problem.ops) + sum(waited.values())
    assert replay.ideal_ns == ticking_replay(problem, (), staging)[0][-1]


@drawn_cases(100)
@given(case=problems_with_swaps())
def test_each_swap_is_told_in_order(case: Case) -> None:
    problem, transfers = case
    replay = simulate(problem, transfers, (PoolClass(nbytes=4096, count=2),))
    assert [swap.name for swap in replay.transfers] == [transfer.name for transfer in transfers]
    assert sum(swap.stall_out_ns for swap in replay.transfers) == replay.stall_out_ns
    assert sum(swap.stall_in_ns for swap in replay.transfers) == replay.stall_in_ns
    for transfer, swap in zip(transfers, replay.transfers, strict=True):
        assert swap.out_start_ns + transfer.nbytes == swap.out_end_ns <= swap.write_start_ns <= swap.written_ns
        assert swap.written_ns <= swap.read_start_ns <= swap.read_end_ns <= swap.in_start_ns
        assert swap.in_start_ns + transfer.nbytes == swap.in_end_ns <= replay.starts_ns[transfer.needed_at]
        assert swap.out_end_ns <= replay.starts_ns[transfer.freed_at]


@drawn_cases(100)
@given(case=problems_with_swaps())
def test_a_second_training_step_repeats_the_first(case: Case) -> None:
    """Two steps in a row take twice as long: why one replay is the steady state."""
    problem, transfers = case
    count = len(problem.ops)

    def later(transfer: Transfer) -> Transfer:
        offload, gone, fetch, back = (
            Step(k + count)
            for k in (transfer.copy_out_after, transfer.freed_at, transfer.prefetch_at, transfer.needed_at)
        )
        again = transfer.leaving(after=offload, freed_at=gone)
        return replace(again, name=f"again_{transfer.name}", back=CopyIn(prefetch_at=fetch, needed_at=back))

    twice = replace(problem, ops=problem.ops * 2)
    staging = (PoolClass(nbytes=4096, count=1),)
    once = simulate(problem, transfers, staging)
    both = simulate(twice, (*transfers, *map(later, transfers)), staging)
    assert both.makespan_ns == 2 * once.makespan_ns
    assert both.starts_ns[count:] == tuple(once.makespan_ns + start for start in once.starts_ns)


@dataclass
class Small:
    """Ten steps of 100 ns, and swaps of x (0..4 -> 8) and y over them."""

    rates: Links

    def problem(self, **sizes: int) -> Problem:
        return Problem(
            ops=tuple(Op(name=f"op_{k}", duration_ns=100) for k in range(10)),
            boundary=Step(5),
            storages=tuple(
                Storage(
                    name=name,
                    nbytes=nbytes,
                    kind=Kind.ACTIVATION,
                    birth=Step(0),
                    death=Step(10),
                    uses=(Step(0), Step(9)),
                    spillable=True,
                )
                for name, nbytes in sizes.items()
            ),
            links=self.rates,
            budgets=Budgets(device_bytes=None, host_bytes=10**6, disk_bytes=10**6),
        )


def swap(name: str, nbytes: int, offload: int, gone: int, fetch: int, back: int, tier: Tier = Tier.HOST) -> Transfer:
    steps = {
        "copy_out_after": Step(offload),
        "freed_at": Step(gone),
        "prefetch_at": Step(fetch),
        "needed_at": Step(back),
    }
    return make_swap(name=name, nbytes=nbytes, tier=tier, **steps)


def test_hidden_copies_cost_nothing() -> None:
    replay = simulate(Small(links()).problem(x=100), (swap("x", 100, 0, 2, 7, 9),))
    assert (replay.makespan_ns, replay.stall_out_ns, replay.stall_in_ns) == (1000, 0, 0)
    assert replay.starts_ns == tuple(range(0, 1000, 100))
    assert (replay.d2h_bytes, replay.h2d_bytes, replay.disk_write_bytes) == (100, 100, 0)


def test_late_copies_are_stalls_where_compute_waits() -> None:
    """150 bytes issued at 100 are out at 250, not at 200; fetched at 850 they are back at 1000, not at 950."""
    replay = simulate(Small(links()).problem(x=150), (swap("x", 150, 0, 2, 8, 9),))
    assert (replay.stall_out_ns, replay.stall_in_ns) == (50, 50)
    assert (replay.transfers[0].out_end_ns, replay.transfers[0].in_end_ns) == (250, 1000)
    assert replay.makespan_ns == 1100


def test_both_directions_at_once_run_at_duplex_rates() -> None:
    """In: 200 bytes from 200. Out: 200 bytes from 300. Alone for 100 ns, together at half the rate until 500."""
    rates = links(d2h_duplex_bytes_per_s=5 * 10**8, h2d_duplex_bytes_per_s=5 * 10**8)
    transfers = (swap("x", 200, 0, 2, 3, 9), swap("y", 200, 3, 9, 9, 9))
    replay = simulate(Small(rates).problem(x=200, y=200), transfers)
    x, y = replay.transfers
    assert (x.out_start_ns, x.out_end_ns, x.stall_out_ns) == (100, 300, 100)
    assert (x.in_start_ns, y.out_start_ns) == (400, 500)
    assert (x.in_end_ns, y.out_end_ns) == (700, 800)


def test_an_offload_waits_for_a_staging_buffer() -> None:
    """One buffer: x is out at 200 and written at 400; y, offloaded at 200, starts only then."""
    transfers = (swap("x", 100, 0, 4, 8, 9, Tier.NVME), swap("y", 100, 1, 6, 9, 9, Tier.NVME))
    problem = Small(links()).problem(x=100, y=100)
    one = simulate(problem, transfers, (PoolClass(nbytes=4096, count=1),))
    assert one.transfers[0].written_ns == 400
    assert (one.transfers[1].out_start_ns, one.transfers[1].stall_out_ns) == (400, 200)
    two = simulate(problem, transfers, (PoolClass(nbytes=4096, count=2),))
    assert (two.transfers[1].out_start_ns, two.transfers[1].stall_out_ns) == (200, 0)


def test_a_read_waits_for_its_own_write() -> None:
    rates = links(disk_write_bytes_per_s=10**8)
    replay = simulate(
        Small(rates).problem(x=100), (swap("x", 100, 0, 2, 3, 9, Tier.NVME),), (PoolClass(nbytes=4096, count=4),)
    )
    (x,) = replay.transfers
    assert (x.out_end_ns, x.written_ns, x.read_start_ns, x.in_start_ns, x.in_end_ns) == (200, 1200, 1200, 1400, 1500)
    assert (x.write_start_ns, x.read_end_ns) == (200, 1400)
    assert replay.stall_in_ns == 600


@pytest.mark.parametrize(
    ("rates", "staging"), [(links(disk_write_bytes_per_s=0), 4096), (links(), 64), (links(), None)]
)
def test_what_cannot_be_offloaded_is_refused(rates: Links, staging: int | None) -> None:
    pools = () if staging is None else (PoolClass(nbytes=staging, count=1),)
    with pytest.raises(ValueError, match="storage x"):
        simulate(Small(rates).problem(x=100), (swap("x", 100, 0, 2, 8, 9, Tier.NVME),), pools)
