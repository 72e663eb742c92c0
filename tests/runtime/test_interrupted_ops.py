"""An interrupt as a copy out begins leaves no buffer, and no room on disk, with nobody to give it back."""

import time
from collections.abc import Callable

import pytest
import torch
from interrupts import Interrupts
from torch import Tensor

from tencache_fx.model_state.parameter_ops import offload_grad
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine

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
