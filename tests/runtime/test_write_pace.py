"""The endurance budget of disks: what is written in a day."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import eventually
from harness import EAGER
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tencache_fx
from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.problem import Links, Tier, steady_bytes_per_s
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import engines
from tencache_fx.runtime.write_pace import WritePace

BLOCK_BYTES = 8 << 20
DAY_NS = 24 * 60 * 60 * 10**9


class Clock:
    """A pace's clock: it goes on by what is slept."""

    def __init__(self, most_bytes: int) -> None:
        self.ns = 0
        clock = self

        class Pace(WritePace):
            def _sleep(self, missing_s: float) -> None:
                clock.ns += int(missing_s * 1e9) + 1

        self.pace = Pace(most_bytes, lambda: self.ns)


@given(
    st.integers(24 * 10, 10_000),
    st.lists(st.tuples(st.integers(1, 10), st.integers(0, DAY_NS // 20)), min_size=1, max_size=200),
)
def test_no_day_has_more_than_its_budget(bytes_per_day: int, writes: list[tuple[int, int]]) -> None:
    clock = Clock(10)
    clock.pace.limit(bytes_per_day)
    done: list[tuple[int, int]] = []
    for nbytes, pause_ns in writes:
        clock.ns += pause_ns
        clock.pace.admit(nbytes)
        done.append((clock.ns, nbytes))
        assert sum(each for at, each in done if at > clock.ns - DAY_NS) <= bytes_per_day


def test_writes_go_at_a_steady_rate_once_a_part_is_written_at_once() -> None:
    clock = Clock(10)
    clock.pace.limit(24_000)
    for _ in range(100):
        clock.pace.admit(10)
    assert clock.ns == 0, "a twenty-fourth at once"
    for _ in range(100):
        clock.pace.admit(10)
    assert clock.ns == pytest.approx(1000 / steady_bytes_per_s(24_000) * 1e9, rel=1e-3)


def test_a_budget_that_is_raised_counts_for_who_waits() -> None:
    pace = WritePace(10, lambda: 0)
    pace.limit(240)
    pace.admit(10)
    waiting = threading.Thread(target=pace.admit, args=(10,))
    waiting.start()
    assert eventually(lambda: pace.holds_up)
    pace.limit(None)
    waiting.join(30)
    assert not waiting.is_alive()
    assert not pace.holds_up


def test_a_closed_engine_does_not_wait_for_the_budget(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    store = engine.store
    assert store is not None
    store.write_pace.limit(24 * BLOCK_BYTES)
    values = [torch.full((BLOCK_BYTES // 4,), float(number)) for number in range(2)]
    handles = [engine.offload(value, Tier.NVME, "x") for value in values]
    for handle, value in zip(handles, values, strict=True):
        engine.release(handle, value)
    assert eventually(lambda: store.write_pace.holds_up and store.written_bytes == BLOCK_BYTES)
    begin_s = time.monotonic()
    engine.close()
    assert time.monotonic() - begin_s < 30
    assert store.written_bytes == 2 * BLOCK_BYTES, "what had begun is finished"


def test_who_finds_no_buffer_is_told_of_the_budget(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(host_budget_bytes=2 * BLOCK_BYTES)
    store = engine.store
    assert store is not None
    engine.pool._patience_s = 0.5
    store.write_pace.limit(24 * BLOCK_BYTES)
    value = torch.zeros(BLOCK_BYTES // 4)
    handles = [engine.offload(value, Tier.NVME, "x") for _ in range(3)]
    assert eventually(lambda: store.write_pace.holds_up)
    with pytest.raises(BudgetError, match="Writes wait for spill_write_budget, 201 MB a day; raise it"):
        engine.offload(value, Tier.NVME, "y")
    store.write_pace.limit(None)
    del handles


def test_what_is_too_little_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"spill_write_budget is 1 MB, .* give 201 MB or more"):
        WritePace(BLOCK_BYTES, lambda: 0).limit(1_000_000)
    for wrong in ("auto", "10%", "101%", "fast", "0", "-1GB"):
        told = f"spill_write_budget='{wrong}' is not a number of bytes above zero; give one, such as \"2TB\", or None."
        with pytest.raises(OptionError, match=re.escape(told)):
            tencache_fx.configure(spill_write_budget=wrong)


def test_links_write_no_faster_than_the_budget() -> None:
    links = Links(
        d2h_bytes_per_s=1,
        h2d_bytes_per_s=1,
        d2h_duplex_bytes_per_s=1,
        h2d_duplex_bytes_per_s=1,
        disk_write_bytes_per_s=10**9,
        disk_read_bytes_per_s=10**9,
    )
    assert links.within(None) == links
    assert links.within(10**18) == links
    found = links.within(24 * 60 * 60 * 24)
    assert (found.disk_write_bytes_per_s, found.disk_read_bytes_per_s) == (23, 10**9)


def test_regions_are_planned_and_run_within_the_budget(tmp_path: Path) -> None:
    """And `configure` changes it at once; `report` says what a day comes to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    options = {**EAGER, "device_budget": "2.3MB", "host_budget": "400kB", "spill_dir": tmp_path}
    x = torch.randn(256, 64)
    plain = model(x).square().mean()
    run = torch.compile(model, backend="tencache", options={**options, "spill_write_budget": "1GB"})
    loss = run(x).square().mean()
    loss.backward()
    assert torch.equal(loss, plain)
    record = tencache_fx.regions()[-1]  # regions of other tests may live
    assert record.problem.links.disk_write_bytes_per_s == int(steady_bytes_per_s(10**9))
    (engine,) = engines()
    assert engine.store is not None
    assert engine.store.write_pace.bytes_per_day == 10**9
    report = tencache_fx.report()
    assert "a day at this rate (spill_write_budget 1 GB)" in report
    tencache_fx.configure(spill_write_budget="2GB")
    assert engine.store.write_pace.bytes_per_day == 2 * 10**9
    with pytest.raises(OptionError, match="give 201 MB or more"):
        tencache_fx.configure(spill_write_budget="1MB")
    assert engine.store.write_pace.bytes_per_day == 2 * 10**9
    tencache_fx.configure(spill_write_budget=None)
    assert engine.store.write_pace.bytes_per_day is None
