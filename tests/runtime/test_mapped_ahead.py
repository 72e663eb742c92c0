"""Buffers that are mapped before they are wanted."""

import contextlib
import gc
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.model_state.offloading import Offloading
from tencache_fx.runtime.buffers import Buffer, Use, map_buffer
from tencache_fx.runtime.engine_registry import find_engine
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import CpuStreams
from tencache_fx.units import PAGE_BYTES

SIZE = 4 * PAGE_BYTES


class SlowPins(CpuStreams):
    """Pins when it may, and knows which memory is pinned and by which thread; can refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.may_pin = threading.Event()
        self.begun = threading.Event()
        self.pinned: dict[int, str] = {}
        self.refuse = False
        self._begun: list[int] = []  # several threads append to it

    @property
    def pins(self) -> int:
        return len(self._begun)

    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", threads: int | None = None) -> bool:
        self.begun.set()
        self._begun.append(memory.nbytes)
        if threading.current_thread() is not threading.main_thread():
            assert self.may_pin.wait(30)
        if not self.refuse:
            self.pinned[memory.ctypes.data] = threading.current_thread().name
        return not self.refuse

    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        del self.pinned[memory.ctypes.data]


@pytest.fixture
def streams() -> SlowPins:
    return SlowPins()


@pytest.fixture
def pool(streams: SlowPins) -> Iterator[Pool]:
    pool = Pool(streams, 10 * SIZE)
    yield pool
    streams.may_pin.set()
    pool.close()
    assert not streams.pinned
    streams.close()


class Stop(BaseException):
    """Raised by a signal's handler."""


def when_it_waits(handle: Callable[[], object]) -> None:
    """Call a signal's handler in the main thread, which is about to wait for what is being mapped."""
    signal.signal(signal.SIGALRM, lambda _signal, _frame: handle())
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def stop() -> None:
    raise Stop


def begin(pool: Pool, *sizes: int) -> None:
    pool.ahead.begin(sizes, Use.STATE)


def wait_idle() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tencache-map"):
            thread.join()


def wait_for_pins(streams: SlowPins, count: int) -> None:
    """Wait until so many have begun."""
    for _ in range(3000):
        if streams.pins == count:
            return
        time.sleep(0.01)
    pytest.fail(f"{streams.pins} of {count} buffers are being pinned.")


def test_who_acquires_one_gets_what_was_mapped_meanwhile(pool: Pool, streams: SlowPins) -> None:
    streams.may_pin.set()
    begin(pool, SIZE, SIZE)
    wait_idle()
    assert len(streams.pinned) == 2
    assert (pool.allocated_bytes, pool.ahead.nbytes) == (0, 2 * SIZE)
    buffers = [pool.acquire(SIZE, Use.STATE) for _ in range(2)]
    assert {each.memory.data_ptr() for each in buffers} == streams.pinned.keys()
    assert all(name.startswith("tencache-map") for name in streams.pinned.values())
    assert (pool.allocated_bytes, pool.ahead.nbytes) == (2 * SIZE, 0)


def test_one_that_is_being_mapped_is_waited_for_and_one_that_is_not_is_mapped_by_who_wants_it(
    pool: Pool, streams: SlowPins
) -> None:
    begin(pool, SIZE, SIZE, 2 * SIZE)
    wait_for_pins(streams, 2)
    other = pool.acquire(2 * SIZE, Use.STATE)
    assert streams.pinned == {other.memory.data_ptr(): threading.current_thread().name}
    threading.Timer(0.1, streams.may_pin.set).start()
    first = pool.acquire(SIZE, Use.STATE)
    assert streams.pinned[first.memory.data_ptr()].startswith("tencache-map")
    assert (pool.allocated_bytes, pool.ahead.nbytes) == (3 * SIZE, SIZE)


@pytest.mark.parametrize(("compiles", "count"), [(True, 2), (False, 4)])
def test_buffers_are_mapped_by_several_threads_each_by_itself(
    pool: Pool,
    streams: SlowPins,
    compiles: bool,  # noqa: FBT001
    count: int,
) -> None:
    pool.ahead.begin([SIZE] * 6, Use.STATE, compiles=compiles)
    wait_for_pins(streams, count)
    assert sum(thread.name.startswith("tencache-map") for thread in threading.enumerate()) == count
    streams.may_pin.set()
    wait_idle()
    assert (len(streams.pinned), streams.pins) == (6, 6)


def test_others_come_first_within_the_budget(pool: Pool, streams: SlowPins) -> None:
    streams.may_pin.set()
    begin(pool, *[SIZE] * 12)  # of which ten fit
    wait_idle()
    assert pool.ahead.nbytes == 10 * SIZE
    pool.acquire(3 * SIZE, Use.PARAMETER)
    assert pool.ahead.nbytes == 7 * SIZE
    assert len(streams.pinned) == 8
    pool.resize_budget(5 * SIZE)
    assert pool.ahead.nbytes == 2 * SIZE


def test_only_the_last_wish_counts(pool: Pool, streams: SlowPins) -> None:
    streams.may_pin.set()
    begin(pool, SIZE, SIZE, 2 * SIZE)
    wait_idle()
    begin(pool, SIZE, 3 * SIZE)
    wait_idle()
    assert pool.ahead.nbytes == 4 * SIZE
    assert len(streams.pinned) == 2
    assert streams.pins == 4  # one of the first is kept


def test_more_are_beside_what_others_wish_until_they_end(pool: Pool, streams: SlowPins) -> None:
    streams.may_pin.set()
    pool.ahead.begin_more([SIZE, SIZE], Use.STATE)
    begin(pool, SIZE)
    pool.ahead.begin_more([2 * SIZE], Use.STATE)
    assert pool.ahead.nbytes == 5 * SIZE
    begin(pool)
    assert pool.ahead.nbytes == 4 * SIZE
    begin(pool, SIZE)
    wait_idle()
    pool.acquire(SIZE, Use.STATE)
    pool.acquire(SIZE, Use.STATE)
    assert len(streams.pinned) == 4
    pool.ahead.end_more(Use.SWAP)
    assert pool.ahead.nbytes == 3 * SIZE
    pool.ahead.end_more(Use.STATE)
    assert pool.ahead.nbytes == 0
    assert len(streams.pinned) == 2


def test_what_the_driver_refuses_to_pin_is_told_by_who_wants_it(pool: Pool, streams: SlowPins) -> None:
    streams.refuse = True
    streams.may_pin.set()
    begin(pool, SIZE)
    wait_idle()
    with pytest.warns(UserWarning, match="refused to pin"):
        assert not pool.acquire(SIZE, Use.STATE).pinned
    assert (pool.allocated_bytes, pool.ahead.nbytes) == (SIZE, 0)
    assert streams.pins == 1  # the driver would refuse once more
    begin(pool, SIZE)
    wait_idle()
    begin(pool)
    assert pool.ahead.nbytes == 0


@pytest.mark.parametrize("unmap", [lambda pool: pool.resize_budget(0), begin], ids=["budget", "wish"])
def test_an_interrupt_while_one_is_unmapped_leaves_nothing_pinned(
    pool: Pool, streams: SlowPins, unmap: Callable[[Pool], None]
) -> None:
    begin(pool, SIZE)
    assert streams.begun.wait(30)
    with pytest.raises(Stop):  # noqa: PT012
        when_it_waits(stop)
        unmap(pool)
    assert pool.ahead.nbytes == SIZE
    streams.may_pin.set()
    unmap(pool)
    assert not streams.pinned


@pytest.mark.parametrize("size", [SIZE, 2 * SIZE])
def test_a_signals_handler_may_acquire_while_its_thread_waits_for_one(pool: Pool, streams: SlowPins, size: int) -> None:
    buffers = []

    def acquire() -> None:
        threading.Timer(0.1, streams.may_pin.set).start()
        buffers.append(pool.acquire(size, Use.STATE))

    begin(pool, SIZE)
    assert streams.begun.wait(30)
    when_it_waits(acquire)
    buffers.append(pool.acquire(SIZE, Use.STATE))
    assert {each.memory.data_ptr() for each in buffers} == streams.pinned.keys()
    assert (pool.allocated_bytes, pool.ahead.nbytes) == (SIZE + size, 0)


def test_a_thread_that_cannot_be_started_leaves_nothing_counted(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: stop())
    with pytest.raises(Stop):
        begin(pool, SIZE)
    assert pool.ahead.nbytes == 0


def test_what_was_acquired_meanwhile_is_no_room(pool: Pool, streams: SlowPins) -> None:
    """Another thread acquires while sizes are listed."""
    streams.may_pin.set()

    def sizes() -> Iterator[int]:
        pool.acquire(9 * SIZE, Use.PARAMETER)
        yield from [SIZE] * 3

    pool.ahead.begin(sizes(), Use.STATE)
    assert pool.ahead.nbytes == SIZE


def test_what_is_mapped_ahead_counts_in_the_stats_and_goes_with_what_was_compiled() -> None:
    model = tencache_fx.offload(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), "cpu")
    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(model, backend="tencache", options={"compiler": "eager", "device_budget": "9MiB"})
    run(torch.randn(64, 512))
    engine = find_engine(torch.device("cpu"))
    assert engine is not None
    ahead_bytes = engine.pool.ahead.nbytes
    assert ahead_bytes
    assert tencache_fx.stats()["host_pool_bytes"] == engine.pool.allocated_bytes + ahead_bytes
    gone = weakref.ref(model)
    del model, optimizer, run
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    tencache_fx.stats()
    assert engine.pool.ahead.nbytes == 0


@pytest.mark.parametrize("scope", ["region", "step"])
def test_state_is_mapped_while_the_model_is_compiled(scope: str) -> None:
    model = tencache_fx.offload(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), "cpu")
    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(
        model, backend="tencache", options={"scope": scope, "compiler": "eager", "device_budget": "9MiB"}
    )
    loss = run(torch.randn(64, 512)).square().mean()
    engine = find_engine(torch.device("cpu"))
    assert engine is not None
    ahead_bytes = engine.pool.ahead.nbytes
    assert ahead_bytes
    assert ahead_bytes % (512 * 512 * 12) == 0
    before_bytes = engine.pool.allocated_bytes
    loss.backward()
    optimizer.step()
    assert engine.pool.ahead.nbytes == 0
    assert engine.pool.acquired_for(Use.STATE) >= ahead_bytes
    assert engine.pool.allocated_bytes >= before_bytes + ahead_bytes


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_mapped_while_those_before_them_are_copied(
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,  # noqa: FBT001
) -> None:
    by: list[str] = []

    def pin(_: object, memory: object, threads: int | None = None) -> bool:
        by.append(threading.current_thread().name)
        return True

    def move_buffers(_: object, module: nn.Module) -> None:
        wait_idle()  # the next parameter is mapped by now
        if fails and module is model[2]:
            raise Stop

    monkeypatch.setattr(CpuStreams, "pin", pin)
    monkeypatch.setattr(Offloading, "move_buffers", move_buffers)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    with pytest.raises(Stop) if fails else contextlib.nullcontext():
        tencache_fx.offload(model, "cpu")
    engine = find_engine(torch.device("cpu"))
    assert engine is not None
    assert len(by) == 4
    assert sum(name.startswith("tencache-map") for name in by) >= 3
    assert engine.pool.ahead.nbytes == 0


def advised_huge(buffer: Buffer) -> bool:
    """Return whether the kernel was asked for huge pages where a buffer is."""
    address, flags = buffer.raw.ctypes.data, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(found[1], 16) <= address < int(found[2], 16)
        elif within and line.startswith("VmFlags:"):
            flags = line
    return "hg" in flags.split()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no transparent huge pages"
)
def test_large_buffers_are_in_huge_pages() -> None:
    streams = CpuStreams()
    large, small = (map_buffer(nbytes, Use.SWAP, streams) for nbytes in (4 << 20, 1 << 20))
    assert advised_huge(large)
    assert not advised_huge(small)
    streams.close()
