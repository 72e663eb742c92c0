"""Transfers through the engine, with late copies, poisoned memory and a bad disk: values stay right, nothing leaks."""

import errno
import random
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import eventually, settled
from faulty_streams import FaultyCpuStreams, FaultyIO
from forked import exit_code, forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tencache_fx
from tencache_fx.errors import BudgetError, InvariantError, OptionError, StoreError, TencacheError, UsageError
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event

EngineMaker = Callable[..., Engine]
TIERS = [Tier.HOST, Tier.NVME]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
quick = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a dense tensor of any dtype, dimension order and storage offset."""
    shape = draw(st.lists(st.integers(0, 12), min_size=0, max_size=3))
    dtype, offset = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9))
    count = torch.Size(shape).numel()
    values = torch.randint(0, 2 if dtype == torch.bool else 100, (offset + count,)).to(dtype)
    return values[offset:].view(shape).permute(draw(st.permutations(range(len(shape)))))


def depart(engine: Engine, src: torch.Tensor, tier: Tier, label: str = "x") -> torch.Tensor:
    handle = engine.offload(src, tier, label)
    engine.release(handle, src)
    return handle


def fetch(engine: Engine, handle: torch.Tensor) -> torch.Tensor:
    return engine.wait(engine.prefetch(handle))


def empty(engine: Engine) -> bool:
    """As `settled`, without its garbage collection, which would take most of the time of many short runs."""
    gauges = engine.stats.take()
    return not (gauges["host_acquired_bytes"] or gauges["disk_acquired_bytes"] or gauges["transfers"])


def idle(engine: Engine) -> bool:
    return all(buffer.idle for buffer in engine.pool._buffers)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@quick
@given(data=st.data(), seed=st.integers(0, 99))
def test_any_tensor_comes_back_in_any_order(new_engine: EngineMaker, data: st.DataObject, seed: int) -> None:
    """Offloads, releases, prefetches, waits and deaths interleaved at random, each transfer in its own order."""
    io = FaultyIO(seed=seed)
    io.short, io.delay_s = True, 0.0003
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.0006, seed=seed), io=io, block_bytes=4096)
    engine.reserve(pool=[], staging=[PoolClass(nbytes=1 << 15, count=2)], disk_bytes=0)
    transfers: list[list[torch.Tensor]] = []
    keys: list[torch.Tensor] = []
    stages: list[int] = []
    for _ in range(data.draw(st.integers(1, 40))):
        choices = [None, *(i for i, stage in enumerate(stages) if stage < 4)]
        i = data.draw(st.sampled_from(choices))
        if i is None:
            src = data.draw(tensors())
            transfers.append([src, src.clone()])
            keys.append(engine.offload(src, data.draw(st.sampled_from(TIERS)), f"t{len(keys)}"))
            stages.append(1)
        elif stages[i] == 1 and data.draw(st.integers(0, 3)):
            engine.release(keys[i], transfers[i][0])
            stages[i] = 2
        elif data.draw(st.integers(0, 9)) == 0:
            keys[i] = torch.empty(0)  # the handle or ticket dies
            stages[i] = 4
        elif stages[i] < 3:  # released or not
            keys[i] = engine.prefetch(keys[i])
            stages[i] = 3
        else:
            assert same(engine.wait(keys[i]), transfers[i][1])
            stages[i] = 4
    keys.clear()
    assert eventually(lambda: empty(engine))
    engine.close()


@pytest.mark.parametrize("poison", [False, True])
def test_copies_over_one_buffer_keep_their_order(new_engine: EngineMaker, poison: bool) -> None:  # noqa: FBT001
    """One buffer for all: each copy in follows its own copy out, and the next copy out follows that."""
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.004, poison=poison), host_budget_bytes=4096)
    for i in range(0, 40, 2):
        first = engine.prefetch(engine.offload(torch.full((1000,), float(i)), Tier.HOST))
        second = engine.prefetch(engine.offload(torch.full((1000,), float(i + 1)), Tier.HOST))
        assert torch.equal(engine.wait(first), torch.full((1000,), float(i)))
        assert torch.equal(engine.wait(second), torch.full((1000,), float(i + 1)))


@pytest.mark.parametrize("tier", TIERS)
def test_many_steps_use_the_reserved_memory_only(new_engine: EngineMaker, tier: Tier) -> None:
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.001))
    classes = [PoolClass(nbytes=40_000, count=4)]
    engine.reserve(pool=classes, staging=[PoolClass(nbytes=40_000, count=2)], disk_bytes=4 * 40_960)
    held = engine.stats.take()
    for step in range(6):
        sources = [torch.full((10_000,), float(step * 10 + i)) for i in range(4)]
        handles = [depart(engine, src, tier) for src in sources]
        assert all(bool(src.isnan().all()) for src in sources), "poison must be on, or this test proves little"
        for i in reversed(range(4)):
            assert torch.equal(fetch(engine, handles[i]), torch.full((10_000,), float(step * 10 + i)))
    del handles
    stats = engine.stats.take()
    assert stats["host_pool_bytes"] == held["host_pool_bytes"]
    assert stats["disk_bytes"] == held["disk_bytes"]
    assert stats["offloads"] == stats["prefetches"] == 24
    assert stats["d2h_bytes"] == stats["h2d_bytes"] == 24 * 40_000
    assert stats["dropped"] == 0


def test_figures_have_their_names_before_there_is_an_engine(new_engine: EngineMaker) -> None:
    tencache_fx.close()
    before = tencache_fx.stats()
    assert set(before.values()) == {0, 1.0}
    assert before["hit_rate"] == 1.0
    now = new_engine().stats.take()
    assert before.keys() == {name for name in now if not name.startswith("disk_written_bytes:")}


def test_counts(new_engine: EngineMaker) -> None:
    engine = new_engine()
    src = torch.zeros(5000, dtype=torch.uint8)
    handle = depart(engine, src, Tier.HOST)
    during = engine.stats.take()
    assert during["host_acquired_bytes"] == during["host_pool_bytes"] == during["host_high_water_bytes"] == 8192
    assert during["host_waste_bytes"] == 8192 - 5000
    assert during["transfers"] == 1
    engine.wait(engine.prefetch(handle))
    after = engine.stats.take()
    assert after["hit_rate"] in (0.0, 1.0)
    assert after["stall_ns"] == after["stall_in_ns"] + after["stall_out_ns"]
    assert after["host_acquired_bytes"] == 0
    assert (after["offloads"], after["prefetches"]) == (0, 1), "counters start again at each take"


def test_an_early_copy_is_a_hit(new_engine: EngineMaker) -> None:
    """However long the host takes: compute did not stand still for it."""
    streams = FaultyCpuStreams()
    wait_compute = streams.wait_compute

    def slow_host(event: Event) -> None:
        time.sleep(0.001)
        wait_compute(event)

    engine = new_engine(streams=streams)
    for tier in TIERS:
        handle = depart(engine, torch.zeros(10), tier)
        assert tier is Tier.HOST or eventually(lambda: engine.pool.acquired_bytes == 0)
        ticket = engine.prefetch(handle)
        assert eventually(partial(engine.transfers.arrived, engine.transfers.table.find(ticket, "look into")))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "wait_compute", slow_host)
            engine.wait(ticket)
    stats = engine.stats.take()
    assert stats["hit_rate"] == 1.0
    assert stats["stall_in_ns"] == 0


def test_a_late_copy_is_a_miss(new_engine: EngineMaker) -> None:
    streams = FaultyCpuStreams()
    engine = new_engine(streams=streams)
    handle = depart(engine, torch.zeros(10), Tier.HOST)
    streams.gate = threading.Event()
    ticket = engine.prefetch(handle)
    threading.Timer(0.05, streams.gate.set).start()
    engine.wait(ticket)
    stats = engine.stats.take()
    assert stats["hit_rate"] == 0.0
    assert stats["stall_in_ns"] > 30_000_000


@pytest.mark.parametrize("tier", TIERS)
def test_dropped_handles_and_tickets_give_everything_back(new_engine: EngineMaker, tier: Tier) -> None:
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.005))
    for _ in range(3):
        handles = [engine.offload(torch.randn(3000), tier) for _ in range(4)]
        tickets = [engine.prefetch(handle) for handle in handles[:2]]
        del handles, tickets
    assert eventually(lambda: settled(engine))
    assert engine.pool.allocated_bytes <= 4 * 3 * 12_288


def test_a_dropped_ticket_frees_room_only_after_its_read(new_engine: EngineMaker) -> None:
    io = FaultyIO()
    engine = new_engine(io=io)
    handle = depart(engine, torch.zeros(10), Tier.NVME)
    assert eventually(lambda: engine.pool.acquired_bytes == 0), "written"
    io.read_gate = threading.Event()
    ticket = engine.prefetch(handle)
    assert io.reading.wait(10)
    del handle, ticket
    gauges = engine.stats.take()
    assert gauges["dropped"] == 1
    assert gauges["disk_acquired_bytes"] == gauges["host_acquired_bytes"] == 4096
    io.read_gate.set()
    assert eventually(lambda: settled(engine))


def test_counted_once_when_a_handle_dies_after_prefetch(new_engine: EngineMaker) -> None:
    engine = new_engine()
    src = torch.arange(100)
    handle = depart(engine, src, Tier.HOST)
    ticket = engine.prefetch(handle)
    del handle
    engine.stats.take()
    assert torch.equal(engine.wait(ticket), torch.arange(100))
    del ticket
    assert engine.stats.take()["dropped"] == 0


def test_a_value_is_served_while_its_write_is_under_way(new_engine: EngineMaker) -> None:
    io = FaultyIO()
    io.write_gate = threading.Event()
    engine = new_engine(io=io)
    handles = [depart(engine, torch.full((1000,), float(i)), Tier.NVME) for i in range(8)]
    assert io.writing.wait(10)
    for i, handle in enumerate(handles):
        assert torch.equal(fetch(engine, handle), torch.full((1000,), float(i)))
    assert engine.stats.take()["disk_read_bytes"] == 0
    io.write_gate.set()
    assert eventually(lambda: settled(engine) or not handles.clear())
    assert engine.store is not None
    assert engine.store.written_bytes <= 4 * 4096, "writes that had not begun are not needed any more"


def test_room_that_is_still_written_is_not_given_away(new_engine: EngineMaker) -> None:
    io = FaultyIO()
    io.write_gate = threading.Event()
    engine = new_engine(io=io)
    for end in (lambda handle: fetch(engine, handle), lambda handle: None):
        io.write_gate.clear()
        io.writing.clear()
        handle = depart(engine, torch.zeros(10), Tier.NVME)
        assert io.writing.wait(10)
        end(handle)
        del handle
        gauges = engine.stats.take()
        assert gauges["disk_acquired_bytes"] == gauges["host_acquired_bytes"] == 4096
        io.write_gate.set()
        assert eventually(lambda: settled(engine))


def test_a_failed_write_loses_nothing_and_warns_once(new_engine: EngineMaker) -> None:
    io = FaultyIO()
    io.write_errors = [errno.EIO] * 3
    engine = new_engine(io=io)

    def step() -> list[torch.Tensor]:
        handles = [depart(engine, torch.full((1000,), float(i)), Tier.NVME, f"mm_{i}") for i in range(3)]
        assert eventually(lambda: engine.store is not None and engine.store.acquired_bytes == 0)
        return [fetch(engine, handle) for handle in handles]

    with pytest.warns(UserWarning, match=r"could not write .* mm_\d .*nothing is lost.*goes on, slower") as caught:
        values = step()
    assert len(caught) == 1
    assert all(torch.equal(value, torch.full((1000,), float(i))) for i, value in enumerate(values))
    assert engine.stats.take()["disk_write_failures"] == 3


@pytest.mark.filterwarnings("ignore:.*could not write:UserWarning")
def test_a_disk_that_fails_is_blamed_for_the_buffers_it_holds(new_engine: EngineMaker) -> None:
    """The only staging buffer keeps a value that could not be written: the disk is the cause, not the host budget."""
    io = FaultyIO()
    engine = new_engine(io=io, host_budget_bytes=4096)
    engine.reserve(pool=[], staging=[PoolClass(nbytes=4096, count=1)], disk_bytes=0)
    early = depart(engine, torch.zeros(10), Tier.NVME, "mm_1")
    assert eventually(lambda: engine.pool.acquired_bytes == 0), "written"
    io.write_errors = [errno.ENOSPC]
    held = depart(engine, torch.ones(10), Tier.NVME, "mm_2")
    with pytest.raises(StoreError, match=r"could not write .* mm_2 .*\n.*mm_3 found no free staging buffer"):
        engine.offload(torch.zeros(10), Tier.NVME, "mm_3")
    ticket = engine.prefetch(early)
    with pytest.raises(StoreError, match=r"could not write .* mm_2 .*\n.*mm_1 found no free staging buffer"):
        engine.wait(ticket)
    assert torch.equal(fetch(engine, held), torch.ones(10)), "nothing is lost"
    del early, ticket, held
    assert torch.equal(fetch(engine, depart(engine, torch.ones(10), Tier.NVME)), torch.ones(10))


def test_a_failed_read_raises_at_wait_and_the_next_step_runs(new_engine: EngineMaker) -> None:
    io = FaultyIO()
    engine = new_engine(io=io)
    handle = depart(engine, torch.zeros(10), Tier.NVME, "softmax_3")
    assert eventually(lambda: engine.pool.acquired_bytes == 0)
    io.read_errors = [errno.EIO]
    ticket = engine.prefetch(handle)
    with pytest.raises(StoreError, match=r"could not read .* softmax_3 .* it is lost"):
        engine.wait(ticket)
    del handle, ticket
    handle = depart(engine, torch.ones(10), Tier.NVME)
    assert torch.equal(fetch(engine, handle), torch.ones(10))


def test_a_failed_copy_raises_and_the_next_step_runs(new_engine: EngineMaker) -> None:
    engine = new_engine(streams=FaultyCpuStreams(failing=[0, 2]))
    src = torch.zeros(10)
    handle = engine.offload(src, Tier.HOST)
    with pytest.raises(InvariantError, match="injected copy failure"):
        engine.release(handle, src)
    del handle
    ticket = engine.prefetch(depart(engine, torch.ones(10), Tier.HOST))
    with pytest.raises(InvariantError, match="injected copy failure"):
        engine.wait(ticket)
    del ticket
    assert torch.equal(fetch(engine, depart(engine, torch.ones(10), Tier.HOST)), torch.ones(10))


@pytest.mark.parametrize("poison", [False, True])
def test_a_slow_disk_holds_the_caller_back_inside_the_budget(new_engine: EngineMaker, poison: bool) -> None:  # noqa: FBT001
    """One staging buffer, sixteen values, readers in the same pool: slow, but it always goes on."""
    io = FaultyIO()
    io.delay_s = 0.003
    engine = new_engine(io=io, host_budget_bytes=4096, streams=FaultyCpuStreams(delay_s=0.008, poison=poison))
    engine.reserve(pool=[], staging=[PoolClass(nbytes=4096, count=1)], disk_bytes=16 * 4096)
    for _ in range(2):
        handles = [depart(engine, torch.full((1000,), float(i)), Tier.NVME) for i in range(16)]
        tickets = [engine.prefetch(handle) for handle in handles]
        for i, ticket in enumerate(tickets):
            assert torch.equal(engine.wait(ticket), torch.full((1000,), float(i)))
    del handles, tickets
    stats = engine.stats.take()
    assert stats["host_pool_bytes"] == 4096
    assert stats["stall_out_ns"] > 0


def test_budgets_are_ceilings(new_engine: EngineMaker) -> None:
    engine = new_engine(host_budget_bytes=3 * 4096, spill_budget_bytes=2 * 4096)
    away = [depart(engine, torch.zeros(1000), Tier.NVME) for _ in range(2)]
    with pytest.raises(BudgetError, match="spill budget is 8192 bytes"):
        engine.offload(torch.zeros(1000), Tier.NVME, "x")
    assert eventually(lambda: engine.pool.acquired_bytes == 0)
    home = [depart(engine, torch.zeros(1000), Tier.HOST) for _ in range(3)]
    with pytest.raises(BudgetError, match="host budget of 12288 bytes"):
        engine.offload(torch.zeros(1000), Tier.HOST, "x")
    with pytest.raises(BudgetError, match="host budget"):
        engine.reserve(pool=[PoolClass(nbytes=4096, count=4)], staging=[], disk_bytes=0)
    assert engine.stats.take()["host_pool_bytes"] == 3 * 4096
    home.clear()
    assert all(torch.equal(fetch(engine, handle), torch.zeros(1000)) for handle in away)


def test_a_tensor_without_a_buffer_is_named_with_the_likely_cause(new_engine: EngineMaker) -> None:
    engine = new_engine(host_budget_bytes=4096, spill_budget_bytes=4096)
    engine.reserve(pool=[PoolClass(nbytes=4096, count=1)], staging=[], disk_bytes=0)
    blocker = depart(engine, torch.zeros(1000), Tier.HOST)
    with pytest.raises(BudgetError, match=r"^mm_37 \(9000 bytes\) .* host budget of 4096 bytes") as caught:
        engine.offload(torch.zeros(9000, dtype=torch.uint8), Tier.HOST, "mm_37")
    assert "largest that plans hold is 4096 bytes: a shape has grown" in str(caught.value)
    with pytest.raises(BudgetError, match=r"^mm_38 \(4000 bytes\) .* host budget of 4096 bytes") as caught:
        engine.offload(torch.zeros(1000), Tier.HOST, "mm_38")
    assert "1 transfers are under way, of another region" in str(caught.value)
    with pytest.raises(BudgetError, match=r"^mm_39 \(9000 bytes\) .* spill budget is 4096 bytes"):
        engine.offload(torch.zeros(9000, dtype=torch.uint8), Tier.NVME, "mm_39")
    del blocker


def test_the_second_backward_is_refused_by_name(new_engine: EngineMaker) -> None:
    engine = new_engine()
    handle = depart(engine, torch.zeros(10), Tier.HOST, "mm_37")
    ticket = engine.prefetch(handle)
    with pytest.raises(UsageError, match=r"mm_37 .* a second time.*retain_graph"):
        engine.prefetch(handle)
    engine.wait(ticket)
    with pytest.raises(UsageError, match=r"mm_37 .* a second time.*retain_graph"):
        engine.wait(ticket)
    with pytest.raises(UsageError, match=r"mm_37 .* a second time.*retain_graph"):
        engine.prefetch(handle)
    with pytest.raises(UsageError, match="cannot wait for a tensor: .* was copied"):
        engine.wait(torch.tensor([12345]))


@pytest.mark.parametrize("pack", [torch.clone, lambda key: key.to(torch.float64)])
def test_a_copy_of_a_handle_is_refused_by_name(
    new_engine: EngineMaker, pack: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Whether the original still lives or not: nobody would know when the copy dies."""
    engine = new_engine()
    handle = depart(engine, torch.zeros(10), Tier.HOST, "mm_37")
    copy = pack(handle)
    with pytest.raises(UsageError, match=r"mm_37: .*copied.*saved_tensors_hooks"):
        engine.prefetch(copy)
    assert torch.equal(fetch(engine, handle), torch.zeros(10)), "the original is as good as before"
    handle = depart(engine, torch.zeros(10), Tier.HOST, "mm_38")
    copy = pack(handle)
    del handle
    with pytest.raises(UsageError, match=r"mm_38: .*copied.*saved_tensors_hooks"):
        engine.prefetch(copy)
    assert settled(engine)


def test_views_of_a_handle_are_the_handle(new_engine: EngineMaker) -> None:
    engine = new_engine()
    handle = depart(engine, torch.ones(10), Tier.HOST).detach().view(1)
    assert torch.equal(engine.wait(engine.prefetch(handle).view(-1)), torch.ones(10))


def test_what_cannot_be_offloaded_is_refused(new_engine: EngineMaker) -> None:
    engine = new_engine()
    with pytest.raises(InvariantError, match=r"mm_1: size \(3, 4\) with stride \(0, 1\) overlaps or has gaps"):
        engine.offload(torch.zeros(4).expand(3, 4), Tier.HOST, "mm_1")
    with pytest.raises(InvariantError, match="from meta to host on cpu"):
        engine.offload(torch.zeros(4, device="meta"), Tier.HOST)
    with pytest.raises(InvariantError, match="from cpu to device"):
        engine.offload(torch.zeros(4), Tier.DEVICE)
    with pytest.raises(InvariantError, match="conjugate or negative"):
        engine.offload(torch.zeros(4, dtype=torch.complex64).conj(), Tier.HOST, "mm_1")
    bare = Engine(torch.device("cpu"), host_budget_bytes=4096)
    with pytest.raises(OptionError, match="no spill_dir"):
        bare.offload(torch.zeros(4), Tier.NVME)
    bare.close()


def test_several_threads_share_an_engine(new_engine: EngineMaker) -> None:
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.001), host_budget_bytes=1 << 20)
    engine.reserve(pool=[], staging=[PoolClass(nbytes=20_480, count=2)], disk_bytes=0)
    wrong: list[object] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for step in range(12):
            value = float(seed * 100 + step)
            handles = [depart(engine, torch.full((5000,), value + i / 10), dice.choice(TIERS)) for i in range(3)]
            tickets = {i: engine.prefetch(handles[i]) for i in dice.sample(range(3), 2)}
            wrong.extend(
                i for i, t in tickets.items() if not torch.equal(engine.wait(t), torch.full((5000,), value + i / 10))
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert engine.stats.take()["dropped"] == 4 * 12


def test_autograd_saves_handles_and_frees_them(new_engine: EngineMaker) -> None:
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.001))

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            copy = x.detach().clone()
            ctx.save_for_backward(depart(engine, copy, Tier.HOST))
            return x * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            (handle,) = ctx.saved_tensors
            return 2 * fetch(engine, handle) * grad

    x = torch.randn(500, requires_grad=True)
    Square.apply(x).sum().backward()
    assert torch.equal(x.grad, 2 * x)
    y = Square.apply(x)
    assert engine.stats.take()["transfers"] == 1
    del y
    stats = engine.stats.take()
    assert (stats["dropped"], stats["transfers"], stats["host_acquired_bytes"]) == (1, 0, 0)
    with pytest.raises(KeyError, match=r"trips has a new name: stats\(\).transfers"):
        _ = stats["trips"]
    with pytest.raises(KeyError, match="'trip'"):
        _ = stats["trip"]


@pytest.mark.parametrize("tier", TIERS)
def test_close_in_the_middle(new_engine: EngineMaker, tier: Tier) -> None:
    io = FaultyIO()
    io.delay_s = 0.02
    engine = new_engine(streams=FaultyCpuStreams(delay_s=0.02), io=io)
    handles = [engine.offload(torch.randn(3000), tier) for _ in range(6)]
    tickets = [engine.prefetch(handle) for handle in handles[:3]]
    value = engine.wait(tickets.pop(0)) if tier is Tier.HOST else None
    engine.close()
    engine.close()
    if value is not None:
        value.sum()
    for deed in (
        lambda: engine.offload(torch.zeros(1), tier),
        lambda: engine.release(handles[5], torch.zeros(1)),
        lambda: engine.prefetch(handles[5]),
        lambda: engine.wait(tickets[0]),
        lambda: engine.reserve(pool=[], staging=[], disk_bytes=0),
    ):
        with pytest.raises(TencacheError, match="engine of cpu is closed"):
            deed()


def test_close_frees_a_caller_that_waits(new_engine: EngineMaker) -> None:
    io = FaultyIO()
    engine = new_engine(io=io, host_budget_bytes=4096)
    handle = depart(engine, torch.zeros(10), Tier.NVME)
    assert eventually(lambda: engine.pool.acquired_bytes == 0)
    blocker = engine.offload(torch.zeros(10), Tier.HOST)  # the only buffer: the read below can get none
    ticket = engine.prefetch(handle)
    caught: list[TencacheError] = []

    def wait() -> None:
        try:
            engine.wait(ticket)
        except TencacheError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(caught) == 1
    del blocker


def test_a_forked_child_is_told_at_once(new_engine: EngineMaker) -> None:
    """Its threads are not there, and its locks may be held forever: nothing may wait for either."""
    streams = FaultyCpuStreams()
    engine = new_engine(streams=streams)
    handle = depart(engine, torch.ones(10), Tier.HOST)
    streams.gate = threading.Event()
    ticket = engine.prefetch(handle)

    def told() -> int:
        count = 0
        for deed in (
            lambda: engine.offload(torch.zeros(1), Tier.HOST),
            lambda: engine.release(handle, torch.zeros(1)),
            lambda: engine.prefetch(handle),
            lambda: engine.wait(ticket),
            lambda: engine.reserve(pool=[], staging=[], disk_bytes=0),
        ):
            try:
                deed()
            except TencacheError as error:
                count += "forked" in str(error) and "spawn" in str(error)
        engine.close()
        return count

    try:
        with engine._lock:  # as another thread may have it when the process forks
            child = forked(told)
        assert exit_code(child) == 5
    finally:
        streams.gate.set()
    assert torch.equal(engine.wait(ticket), torch.ones(10))


def test_profiler_ranges_carry_the_label(new_engine: EngineMaker) -> None:
    engine = new_engine()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fetch(engine, depart(engine, torch.zeros(10), Tier.HOST, "mm_37"))
    names = {event.key for event in profile.key_averages()}
    assert {f"tencache::{deed} mm_37" for deed in ("offload", "release", "prefetch", "wait")} <= names


def test_ops_stay_on_the_cpu_whatever_the_default_device(new_engine: EngineMaker) -> None:
    engine = new_engine()
    src = torch.zeros(10)
    with torch.device("meta"):
        handle = engine.offload(src, Tier.HOST)
        token = engine.release(handle, src)
        ticket = engine.prefetch(handle)
        assert engine.wait(ticket).device == src.device
    for key in (handle, token, ticket):
        assert key.device.type == "cpu"
        assert (key.dtype, tuple(key.shape)) == (torch.int64, (1,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle, ticket
        engine.stats.take()
