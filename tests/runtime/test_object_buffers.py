"""Buffers that objects own, and the work that gives them back."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tencache_fx.errors import BudgetError
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import CpuStreams
from tencache_fx.units import PAGE_BYTES


class Awaited(Future[None]):
    """Counts who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.waiting.release()
        return super().exception(timeout)


def test_two_threads_wait_for_the_same_work() -> None:
    streams = CpuStreams()
    pool = Pool(streams, 2 * PAGE_BYTES)
    buffers = ObjectBuffers(pool, streams)
    held = [pool.acquire(PAGE_BYTES, Use.GRADIENT) for _ in range(2)]
    with pytest.raises(BudgetError):
        buffers.acquire_or_wait(PAGE_BYTES, Use.SWAP)
    work = Awaited()
    buffers.expect(work)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(buffers.acquire_or_wait, PAGE_BYTES, Use.SWAP) for _ in range(2)]
        for _ in found:
            assert work.waiting.acquire(timeout=30)
        for buffer in held:
            pool.release(buffer)
        work.set_result(None)
        assert len({id(each.result(30)) for each in found}) == 2
    pool.close()
    streams.close()
