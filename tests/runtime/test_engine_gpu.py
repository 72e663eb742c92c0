"""The same transfers on CUDA: late copies and poisoned memory, on the device and in pinned buffers."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MIB, eventually, settled
from faulty_streams import FaultyCudaStreams, FaultyIO

from tencache_fx.errors import InvariantError, StoreError, TencacheError, UsageError
from tencache_fx.hardware.device_memory import avoid_fragmentation
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.cuda_streams import CudaStreams
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.store import Store
from tencache_fx.runtime.streams import Lane

pytestmark = pytest.mark.gpu
TIERS = [Tier.HOST, Tier.NVME]
LATE = 5_000_000  # device clock cycles: about 3 ms, many times what each copy takes
COUNT = 1 << 19  # float32 elements: 2 MiB

EngineMaker = Callable[..., Engine]


@pytest.fixture
def new_cuda_engine(spill_dir: Path) -> Iterator[EngineMaker]:
    made: list[Engine] = []

    def make(
        *, delay_cycles: int = LATE, poison: bool = True, host_budget_bytes: int = 256 * MIB, io: FaultyIO | None = None
    ) -> Engine:
        device = torch.device("cuda", torch.cuda.current_device())
        streams = FaultyCudaStreams(device, delay_cycles=delay_cycles, poison=poison)
        engine = Engine(device, host_budget_bytes=host_budget_bytes, streams=streams)
        made.append(engine)
        engine.attach_store(Store((spill_dir,), 512 * MIB, checksum=True, io=io))
        return engine

    yield make
    try:
        for engine in made:
            if not engine.closed:
                assert eventually(lambda engine=engine: settled(engine)), engine.stats.take()
    finally:
        for engine in made:
            engine.close()
            assert engine.pool.allocated_bytes == 0


def spin() -> None:
    """Keep compute busy, so that the host runs far ahead of the device."""
    torch.cuda._sleep(LATE)


def make_value(number: float) -> torch.Tensor:
    return torch.full((COUNT,), number, device="cuda")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("late", [0, LATE])
def test_a_step_keeps_its_values(new_cuda_engine: EngineMaker, tier: Tier, late: int) -> None:
    """Sources are recycled right after release, as compiled code does; buffers are reused step after step."""
    engine = new_cuda_engine(delay_cycles=late)
    engine.reserve(
        pool=[PoolClass(nbytes=COUNT * 4, count=3)], staging=[PoolClass(nbytes=COUNT * 4, count=2)], disk_bytes=16 * MIB
    )
    held = engine.stats.take()["host_pool_bytes"]
    results = []
    for step in range(4):
        scratch = torch.empty(COUNT, device="cuda")
        handles = []
        for i in range(3):
            spin()
            scratch.fill_(step * 10 + i)  # late: an offload that did not wait for compute would copy what was before
            handles.append(engine.offload(scratch, tier, f"x{i}"))
            engine.release(handles[-1], scratch)  # poisons: a copy that is not over takes NaN along
        tickets = [engine.prefetch(handle) for handle in handles]
        del handles
        for i, ticket in enumerate(tickets):
            value = engine.wait(ticket)
            results.append((float(step * 10 + i), value.min(), value.max()))
            del value
    assert all(float(low) == float(high) == number for number, low, high in results)
    del tickets, ticket
    assert engine.stats.take()["host_pool_bytes"] == held


def test_layouts_come_back_exactly(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine()
    base = torch.randn(7 * 60 * 33 + 5, device="cuda").to(torch.bfloat16)
    src = base[5:].view(7, 60, 33).permute(2, 0, 1)
    want = src.clone()
    handle = engine.offload(src, Tier.HOST)
    engine.release(handle, src)
    value = engine.wait(engine.prefetch(handle))
    assert (value.stride(), value.dtype, value.device) == (src.stride(), src.dtype, src.device)
    assert value.data_ptr() % 16 == 0
    assert torch.equal(value, want)


@pytest.mark.parametrize("tier", TIERS)
def test_dropped_transfers_never_touch_memory_of_others(new_cuda_engine: EngineMaker, tier: Tier) -> None:
    """A ticket dies while its copy in is still to come: its device memory must not be handed out before."""
    engine = new_cuda_engine(poison=False)
    for _ in range(5):
        src = make_value(-1.0)
        handle = engine.offload(src, tier)
        engine.release(handle, src)
        ticket = engine.prefetch(handle)
        del src, handle, ticket
        gc.collect()
        engine.stats.take()
        others = [make_value(float(i)) for i in range(8)]
        torch.cuda.synchronize()
        assert all(bool((other == i).all()) for i, other in enumerate(others))
    assert eventually(lambda: settled(engine))


def test_offload_without_backward_in_flight(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine()
    for _ in range(10):
        engine.offload(make_value(1.0), Tier.HOST)
    assert eventually(lambda: settled(engine))
    assert engine.stats.take()["host_pool_bytes"] <= 10 * COUNT * 4


def test_the_host_does_not_wait(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine(delay_cycles=50 * LATE, poison=False)
    engine.reserve(pool=[PoolClass(nbytes=COUNT * 4, count=1)], staging=[], disk_bytes=0)
    src, spare = make_value(3.0), make_value(0.0)
    del spare  # its block serves prefetch, which then need not ask the driver
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    handle = engine.offload(src, Tier.HOST)
    engine.release(handle, src)
    value = engine.wait(engine.prefetch(handle))
    done.record()
    assert not done.query(), "every call returned before the device was through"
    assert bool((value == 3.0).all())


def test_stalls_are_measured_on_the_device(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine(delay_cycles=20 * LATE, poison=False)  # later than a busy host, too
    src = make_value(1.0)
    handle = engine.offload(src, Tier.HOST)
    engine.release(handle, src)
    engine.wait(engine.prefetch(handle))
    torch.cuda.synchronize()
    late = engine.stats.take()
    assert late["stall_in_ns"] > 500_000
    assert late["stall_out_ns"] > 500_000
    assert late["hit_rate"] == 0.0
    handle = engine.offload(src, Tier.HOST)
    torch.cuda.synchronize()
    engine.release(handle, src)
    ticket = engine.prefetch(handle)
    torch.cuda.synchronize()
    engine.wait(ticket)
    torch.cuda.synchronize()
    assert engine.stats.take()["hit_rate"] == 1.0


def test_buffers_are_pinned_and_unpinned(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine()
    engine.reserve(pool=[PoolClass(nbytes=16 * MIB, count=2)], staging=[], disk_bytes=0)
    memory = list(engine.pool._buffers)[1].memory
    assert memory.is_pinned()
    engine.close()
    assert not memory.is_pinned()


@pytest.mark.parametrize("bindings", [True, False])
def test_copies_are_of_bytes_with_and_without_bindings_to_cuda(bindings: bool) -> None:  # noqa: FBT001
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    if bindings:
        pytest.importorskip("cuda.bindings.runtime")
    else:
        streams._memcpy = None
    src = torch.randn(3, 1 << 20, device="cuda").t()
    there, back = torch.empty(src.nbytes, dtype=torch.uint8).pin_memory(), torch.empty_like(src)
    out = streams.copy(Lane.OUT, there, src, (streams.record_compute(),))
    streams.wait_compute(streams.copy(Lane.IN, back, there, (out,)))
    assert torch.equal(back, src)
    if bindings:
        with pytest.raises(InvariantError, match="a copy of 4 bytes to 8 bytes"):
            streams.copy(Lane.OUT, there[:8], src[:1, :1])
    streams.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a second device")
@pytest.mark.parametrize("profiled", [False, True])
def test_a_new_thread_copies_to_a_second_device(profiled: bool) -> None:  # noqa: FBT001
    device = torch.device("cuda", 1)
    with torch.cuda.device(device):
        avoid_fragmentation(device)  # memory in segments that grow is for its own device alone
        streams = CudaStreams(device)
        memory = np.frombuffer(bytearray(32 * MIB), dtype=np.uint8)
        assert streams.pin(memory)
        src, dst = torch.from_numpy(memory), torch.ones(32 * MIB, dtype=torch.uint8, device=device)
        ready = streams.record_compute()
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with profile if profiled else contextlib.nullcontext(), ThreadPoolExecutor(1) as threads:
            threads.submit(streams.copy, Lane.IN, dst, src, (ready,)).result().synchronize()
        assert not dst.any()
        streams.unpin(memory)


def test_refused_pinning_leaves_no_error_behind() -> None:
    """The driver refuses memory that is registered already; the next kernel must not report that."""
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    memory = np.frombuffer(bytearray(4 * MIB), dtype=np.uint8)
    start = -memory.ctypes.data % 4096
    page = memory[start : start + MIB]
    assert streams.pin(page)
    assert not streams.pin(page)
    assert float(torch.ones(10, device="cuda").sum()) == 10.0
    torch.cuda.synchronize()
    streams.unpin(page)
    streams.close()


def test_forwarding_and_a_bad_disk(new_cuda_engine: EngineMaker) -> None:
    io = FaultyIO()
    io.write_gate = threading.Event()
    engine = new_cuda_engine(io=io)
    src = make_value(5.0)
    handle = engine.offload(src, Tier.NVME)
    engine.release(handle, src)
    assert io.writing.wait(10)
    assert bool((engine.wait(engine.prefetch(handle)) == 5.0).all())
    io.write_gate.set()
    del handle
    src = make_value(6.0)
    handle = engine.offload(src, Tier.NVME)
    engine.release(handle, src)
    assert eventually(lambda: engine.pool.acquired_bytes == 0)
    io.read_errors = [5]
    ticket = engine.prefetch(handle)
    with pytest.raises(StoreError, match="it is lost"):
        engine.wait(ticket)


def test_backward_in_another_thread(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            copy = x.detach().clone()
            handle = engine.offload(copy, Tier.HOST)
            engine.release(handle, copy)
            ctx.save_for_backward(handle)
            return x * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            (handle,) = ctx.saved_tensors
            return 2 * engine.wait(engine.prefetch(handle)) * grad

    x = torch.randn(COUNT, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            Square.apply(x).sum().backward()
            assert torch.equal(x.grad, 2 * x)


def test_copies_follow_whichever_stream_the_caller_is_on(new_cuda_engine: EngineMaker) -> None:
    """Three streams take turns, one of them known by its handle only: what each writes late is what is copied out."""
    engine = new_cuda_engine(delay_cycles=0, poison=False)
    side = torch.cuda.Stream()
    streams = [torch.cuda.current_stream(), side, torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)]
    values = {stream: torch.zeros(COUNT, device="cuda") for stream in streams}
    torch.cuda.synchronize()
    for number in range(1, 4):
        found = []
        for stream, value in values.items():
            with torch.cuda.stream(stream):
                spin()
                value.fill_(number)
                handle = engine.offload(value, Tier.HOST)
                engine.release(handle, value)
                value.fill_(-1.0)
                ticket = engine.prefetch(handle)
                spin()
                found.append(engine.wait(ticket).clone())
            assert torch.cuda.current_stream() == streams[0]
        torch.cuda.synchronize()
        assert [each.unique().tolist() for each in found] == [[number]] * 3


def test_a_release_behind_a_copy_that_is_over_counts_no_stall(new_cuda_engine: EngineMaker) -> None:
    engine = new_cuda_engine(delay_cycles=0)
    for is_over in (True, False):
        spin()
        value = make_value(1.0)
        handle = engine.offload(value, Tier.HOST)
        if is_over:
            torch.cuda.synchronize()
        engine.release(handle, value)
        assert bool((engine.wait(engine.prefetch(handle)) == 1.0).all())
        torch.cuda.synchronize()
        assert (engine.stats.take()["stall_out_ns"] == 0) is is_over


def test_close_in_the_middle(new_cuda_engine: EngineMaker) -> None:
    """Copies are late, some prefetches have yet to begin: all is released, and what came back stays right."""
    engine = new_cuda_engine(delay_cycles=20 * LATE)
    held_bytes = torch.cuda.memory_allocated()
    handles = [engine.offload(make_value(float(i)), tier) for i, tier in enumerate(TIERS * 2)]
    value = engine.wait(engine.prefetch(handles[0]))
    ticket = engine.prefetch(handles[1])
    memories = [buffer.memory for buffer in engine.pool._buffers]
    assert all(memory.is_pinned() for memory in memories)
    engine.close()
    assert bool((value == 0.0).all())
    assert engine.pool.allocated_bytes == 0
    assert not any(memory.is_pinned() for memory in memories)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tencache")]
    for deed in (lambda: engine.wait(ticket), lambda: engine.prefetch(handles[2])):
        with pytest.raises(TencacheError, match="engine of cuda:. is closed"):
            deed()
    del value
    assert torch.cuda.memory_allocated() == held_bytes, "the engine keeps no device memory, whatever handles live on"


def test_hooks_that_copy_saved_tensors_are_refused(new_cuda_engine: EngineMaker) -> None:
    """`save_on_cpu` copies even what is on the CPU, if it is to be pinned."""
    engine = new_cuda_engine()
    hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
    src = make_value(1.0)
    handle = engine.offload(src, Tier.HOST, "mm_37")
    engine.release(handle, src)
    saved = hooks.pack_hook(handle)
    with pytest.raises(UsageError, match="mm_37: .* was copied"):
        engine.prefetch(hooks.unpack_hook(saved))
    del handle
    with pytest.raises(UsageError, match="mm_37: .* was copied"):
        engine.prefetch(hooks.unpack_hook(saved))
