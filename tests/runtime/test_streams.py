"""The CPU lanes obey the rules that CUDA streams obey: order within a lane, events between lanes."""

import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_fx.errors import InvariantError
from tencache_fx.runtime.cuda_streams import CudaStreams, find_memcpy, open_streams
from tencache_fx.runtime.streams import CpuStreams, Lane

pytestmark = pytest.mark.usefixtures("no_leaks")


def flat(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_a_lane_keeps_its_order() -> None:
    streams = FaultyCpuStreams(delay_s=0.002)
    cell, seen = flat(0), []
    for value in range(1, 20):
        streams.copy(Lane.OUT, cell, flat(value))
        streams.submit(Lane.OUT, lambda: seen.append(int(cell)))
    streams.close()
    assert seen == list(range(1, 20))


def test_lanes_run_side_by_side_and_do_not_block_the_caller() -> None:
    streams = FaultyCpuStreams()
    streams.gate = threading.Event()
    a, b = flat(0), flat(0)
    out, back = streams.copy(Lane.OUT, a, flat(1)), streams.copy(Lane.IN, b, flat(2))
    assert not out.query()
    assert not back.query()
    streams.gate.set()
    out.synchronize()
    back.synchronize()
    assert (int(a), int(b)) == (1, 2)
    streams.close()


@settings(max_examples=25)
@given(chain=st.lists(st.sampled_from(list(Lane)), min_size=2, max_size=12), seed=st.integers(0, 1000))
def test_a_chain_of_events_carries_a_value(chain: list[Lane], seed: int) -> None:
    streams = FaultyCpuStreams(delay_s=0.002, seed=seed)
    cells = [flat(7), *(flat(0) for _ in chain)]
    event = streams.record_compute()
    for lane, src, dst in zip(chain, cells, cells[1:], strict=False):
        event = streams.copy(lane, dst, src, (event,))
    streams.wait_compute(event)
    assert int(cells[-1]) == 7
    streams.close()


def test_a_failed_copy_raises_for_its_readers_only() -> None:
    """Who waits for the value hears of it; who only waits for the memory goes on."""
    streams = FaultyCpuStreams(failing=[0])
    a, b = flat(0), flat(0)
    failed = streams.copy(Lane.OUT, a, flat(1))
    after = streams.copy(Lane.IN, b, flat(2), (failed,))
    streams.wait_compute(after)
    assert int(b) == 2
    streams.wait_host([failed])
    with pytest.raises(InvariantError, match="injected copy failure"):
        streams.wait_compute(failed)
    streams.close()


def test_compute_waits_and_the_watch_sees_it() -> None:
    streams = FaultyCpuStreams()
    streams.gate = threading.Event()
    event = streams.copy(Lane.IN, flat(0), flat(1))
    watch = streams.watch()
    assert watch.elapsed_ns() is None
    threading.Timer(0.05, streams.gate.set).start()
    streams.wait_compute(event)
    watch.stop()
    elapsed_ns = watch.elapsed_ns()
    assert elapsed_ns is not None
    assert elapsed_ns > 30_000_000
    streams.close()


def test_close_finishes_what_was_queued() -> None:
    streams = FaultyCpuStreams(delay_s=0.01)
    cells = [flat(0) for _ in range(10)]
    for cell in cells:
        streams.copy(Lane.OUT, cell, flat(1))
    streams.close()
    assert [int(cell) for cell in cells] == [1] * 10
    streams.close()


def test_the_lane_keeps_tensors_alive_and_lets_go_of_them() -> None:
    streams = FaultyCpuStreams()
    streams.gate = threading.Event()
    memory = np.zeros(4, dtype=np.uint8)
    alive = weakref.ref(memory)
    streams.copy(Lane.OUT, flat(0, 0, 0, 0), torch.from_numpy(memory))
    del memory
    assert alive() is not None
    streams.gate.set()
    until = time.monotonic() + 10
    while alive() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert alive() is None
    streams.close()


def test_cpu_streams_never_touch_cuda() -> None:
    streams = open_streams(torch.device("cpu"))
    assert isinstance(streams, CpuStreams)
    assert streams.pin(np.zeros(1, dtype=np.uint8))
    streams.close()
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


def test_copies_are_of_bytes_whatever_their_shape_is() -> None:
    streams = CpuStreams()
    src = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    there, back = torch.empty(48, dtype=torch.uint8), torch.empty_strided((4, 3), (1, 4), dtype=torch.float32)
    out = streams.copy(Lane.OUT, there, src)
    streams.copy(Lane.IN, back, there, (out,)).synchronize()
    assert torch.equal(there.view(torch.float32), torch.arange(12, dtype=torch.float32))
    assert torch.equal(back, src)
    streams.close()


def test_there_may_be_no_bindings_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert find_memcpy() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver")
def test_a_copy_that_cuda_refuses_is_an_error() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    memcpy = find_memcpy()
    assert memcpy is not None
    with pytest.raises(RuntimeError, match=r"CUDA error: a copy of 8 bytes could not be issued: .*cudaError"):
        memcpy(0, 0, 8, 0)


@pytest.mark.parametrize(
    ("handle", "stream_id", "lasts"), [(0, 0, True), (1 << 40, 35, True), (1 << 40, 1 << 40, False)]
)
def test_the_handle_of_somebody_elses_stream_does_not_stand_for_it_for_good(
    handle: int,
    stream_id: int,
    lasts: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own streams never end: the default one, and those of its pools, which it knows by other numbers."""

    class Seen(CudaStreams):
        def __init__(self) -> None:
            self.device, self._index = torch.device("cuda", 0), 0
            self._by_handle, self._lasting = {}, set()

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: handle, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(stream_id=stream_id))
    streams = Seen()
    for _ in range(2):
        assert streams.compute_key() == (handle if lasts else None)


def test_copies_of_a_new_thread_are_issued_on_the_device_of_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its current device is the first one: a process of several devices failed there, with an invalid value."""
    current, issued = threading.local(), []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.index = self.index

        def __exit__(self, *_: object) -> None:
            current.index = 0

    class Second(CudaStreams):
        def __init__(self) -> None:
            self._index, self.lanes = 1, {Lane.IN: SimpleNamespace(cuda_stream=7)}  # type: ignore[dict-item]
            self._memcpy = lambda *_: issued.append(getattr(current, "index", 0))

    monkeypatch.setattr(torch.cuda, "device", Device)
    thread = threading.Thread(target=Second().transfer, args=(Lane.IN, [(flat(1), flat(2))]))
    thread.start()
    thread.join()
    assert issued == [1]
