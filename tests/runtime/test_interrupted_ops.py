"""An interrupt as a copy out begins leaves no buffer, and no room on disk, with nobody to give it back."""

import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from interrupts import Interrupts
from torch import Tensor

from tencache_fx.model_state.parameter_ops import offload_grad
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event, Lane
from tencache_fx.runtime.worker import Worker

FILES = (
    "engine.py",
    "transfer_lifecycle.py",
    "parameter_ops.py",
)
BYTES = 4 * 4096

OPS: dict[str, Callable[[Engine, Tensor], Tensor]] = {
    "to host memory": lambda engine, value: engine.offload(value, Tier.HOST, "mm_1"),
    "to disk": lambda engine, value: engine.offload(value, Tier.NVME, "mm_1"),
    "a gradient": lambda engine, value: offload_grad(engine, value, "mm_1"),
}


def all_held(engine: Engine) -> list[int]:
    found = engine.stats.take()  # which releases what dead objects owned
    return [int(found[key]) for key in ("host_acquired_bytes", "disk_acquired_bytes", "transfers")]


@pytest.mark.parametrize("name", list(OPS))
def test_at_each_line(new_engine: Callable[..., Engine], name: str) -> None:
    engine, value = new_engine(), torch.ones(BYTES // 4)
    classes = [PoolClass(nbytes=BYTES, count=1)]
    engine.reserve(pool=classes, staging=classes, disk_bytes=BYTES)
    engine.reserve_gradients([BYTES])
    OPS[name](engine, value)
    interrupts = Interrupts(FILES)
    for at in range(1000):
        interrupts.run(lambda: OPS[name](engine, value), at)
        until = time.monotonic() + 10  # a thread may be writing to the disk
        while any(held := all_held(engine)) and time.monotonic() < until:
            time.sleep(0.001)
        assert not any(held), interrupts.where
        if not interrupts.where:
            break
    assert at > 20


def test_a_write_that_was_handed_in_as_an_interrupt_came(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer and its room on disk may be others' by then."""
    engine, submit, writes = new_engine(), Worker.submit, list[object]()
    classes = [PoolClass(nbytes=BYTES, count=1)]
    engine.reserve(pool=(), staging=classes, disk_bytes=BYTES)
    monkeypatch.setattr(engine.store, "write", lambda *given: writes.append(given))

    def interrupted(worker: Worker, work: Callable[[], object]) -> None:
        submit(worker, work)
        if worker is engine.transfers._writers:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.offload(torch.ones(BYTES // 4), Tier.NVME, "mm_1")
    buffer = engine.pool.acquire(BYTES, Use.STAGING)
    engine.transfers._writers.begin(bool).result()
    assert not writes
    assert buffer.holders == 1
    engine.pool.release(buffer)


def test_what_was_waited_for_as_an_interrupt_came_outlives_its_copy() -> None:
    """As nothing else on the device waits for that."""
    streams = FaultyCpuStreams()
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 20, streams=streams)
    try:
        ticket = _prefetched(engine, streams)
        found = weakref.ref(engine.destination(ticket))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "wait_compute", _interrupted)
            try:
                engine.wait(ticket)
            except KeyboardInterrupt:
                pass
            else:
                pytest.fail("nothing was waited for")
        assert found() is not None
        streams.gate.set()
        streams.record(Lane.IN).synchronize()
        engine.transfers.drain()
        assert found() is None
    finally:
        streams.gate.set()
        engine.close()


def _prefetched(engine: Engine, streams: FaultyCpuStreams) -> Tensor:
    value = torch.ones(BYTES // 4)
    handle = engine.offload(value, Tier.HOST, "mm_1")
    engine.release(handle, value)
    streams.gate = threading.Event()
    return engine.prefetch(handle)


def _interrupted(event: Event) -> None:
    raise KeyboardInterrupt
