"""One open engine per device; what may change on it, and what may not."""

import ctypes
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import collect, eventually, open_files
from forked import exit_code, forked
from hypothesis import given, settings
from hypothesis import strategies as st

import tencache_fx
from tencache_fx.errors import InvariantError, OptionError, TencacheError
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import (
    Registry,
    engine_by_id,
    engines,
    install_engine,
    open_engine,
    swap_points,
)

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_an_open_engine_is_found_again() -> None:
    engine = open_engine(torch.device("cpu", 0), host_budget_bytes=4096)
    assert open_engine(CPU, host_budget_bytes=8192) is engine
    assert engine_by_id(engine.id) is engine
    assert engines() == (engine,)
    engine.close()
    assert engines() == ()
    with pytest.raises(TencacheError, match=rf"engine {engine.id}, which this compiled graph uses, is closed"):
        engine_by_id(engine.id)
    other = open_engine(CPU, host_budget_bytes=4096)
    assert other.id > engine.id, "a graph that names a closed engine must never find another one"
    other.close()


def test_who_asks_for_less_leaves_more_to_others(spill_dir: Path) -> None:
    engine = open_engine(CPU, host_budget_bytes=8192)
    assert engine.store is None
    for asked, found in ((8192, 8192), (16384, 16384), (4096, 16384)):
        on_disk = {"spill_dirs": (spill_dir,), "spill_budget_bytes": asked, "checksum": asked == 16384}
        open_engine(CPU, host_budget_bytes=asked, **on_disk)
        assert engine.store is not None
        assert engine.store.budget_bytes == found
        assert engine.store.checksum == (found == 16384)
        assert engine.pool.budget_bytes == found
    open_engine(CPU, host_budget_bytes=4096)
    assert engine.store.directories == (spill_dir,)
    engine.close()


def test_values_go_to_the_directories_named_last(spill_dir: Path, tmp_path: Path) -> None:
    """Those in others are read there, and what they took of the disk is given back with the last of them."""
    others = tmp_path / "a", tmp_path / "b"
    for each in others:
        each.mkdir()
    disk = {"host_budget_bytes": 1 << 20, "spill_budget_bytes": 1 << 20}
    engine = open_engine(CPU, spill_dirs=(spill_dir,), **disk)
    values = [torch.randn(4096) for _ in range(3)]
    handles = [engine.offload(values[0], Tier.NVME)]
    assert eventually(lambda: engine.stats.take()["host_acquired_bytes"] == 0)
    open_engine(CPU, spill_dirs=others, **disk)
    assert engine.store is not None
    assert engine.store.directories == others
    handles += [engine.offload(value, Tier.NVME) for value in values[1:]]
    assert eventually(lambda: engine.stats.take()["host_acquired_bytes"] == 0)
    assert sum(str(spill_dir) in each for each in open_files()) == 1
    assert engine.store.file_bytes == 3 * 16384
    for handle, value in zip(handles, values, strict=True):
        assert torch.equal(engine.wait(engine.prefetch(handle)), value)
    assert eventually(lambda: engine.store.acquired_bytes == 0)
    assert not any(str(spill_dir) in each for each in open_files())
    assert engine.store.file_bytes == 2 * 16384
    with pytest.raises(OptionError, match="cannot hold the spill file"):
        open_engine(CPU, spill_dirs=(spill_dir, tmp_path / "missing"), **disk)
    assert engine.store.directories == others
    engine.close()


def test_an_installed_engine_is_the_one_of_its_device() -> None:
    engine = Engine(CPU, host_budget_bytes=4096)
    assert engine.id == -1
    install_engine(engine)
    assert open_engine(CPU, host_budget_bytes=4096) is engine
    with pytest.raises(InvariantError, match="cpu has an open engine already"):
        install_engine(Engine(CPU, host_budget_bytes=4096))
    engine.close()


def test_other_devices_are_refused() -> None:
    with pytest.raises(OptionError, match="device meta is not supported"):
        open_engine(torch.device("meta"), host_budget_bytes=4096)


def test_a_forked_child_leaves_the_engines_alone() -> None:
    registry = Registry()
    engine = Engine(CPU, host_budget_bytes=4096)
    registry.install(engine)

    def left() -> int:
        registry.close_all()
        return int(engine.closed) + len(registry.open_engines())

    assert exit_code(forked(left)) == 0
    registry.close_all()
    assert engine.closed


class Owner:
    """Has a plan."""


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(("cpu", "cuda:0")), st.sampled_from((None, 10, 20, 30)), st.integers(0, 3)),
            st.tuples(st.just("end"), st.none(), st.integers(0, 3)),
            st.tuples(st.sampled_from(("open", "close", "close all")), st.none(), st.just(0)),
        ),
        max_size=12,
    )
)
def test_what_plans_leave_counts_until_they_end_or_their_engine_does(
    deeds: list[tuple[str, int | None, int]],
) -> None:
    registry, owners = Registry(), [Owner() for _ in range(4)]
    wanted: dict[int, tuple[str, int]] = {}  # by the owner's number
    engine: Engine | None = None
    try:
        for deed, nbytes, number in deeds:
            if deed == "end":
                owners[number] = Owner()
                wanted.pop(number, None)
            elif deed == "open":
                if engine is None:
                    registry.install(engine := Engine(CPU, host_budget_bytes=4096))
            elif deed.startswith("close"):
                if engine is not None:
                    registry.close_all() if deed == "close all" else engine.close()
                    wanted = {at: left for at, left in wanted.items() if left[0] != "cpu"}
                engine = None
            else:
                registry.leave_for_updates(owners[number], torch.device(deed), nbytes)
                wanted.pop(number, None)
                if nbytes is not None:
                    wanted[number] = deed, nbytes
            for device in ("cpu", "cuda:0"):
                left = registry.left_for_updates(torch.device(device))
                assert left == min((nbytes for where, nbytes in wanted.values() if where == device), default=None)
    finally:
        registry.close_all()


def test_nothing_keeps_what_was_closed() -> None:
    engine = open_engine(CPU, host_budget_bytes=4096)
    points = swap_points(engine)
    recorder_of(points)
    gone = weakref.ref(engine), weakref.ref(points), weakref.ref(points.observer)
    del engine, points
    tencache_fx.close()
    collect()
    assert [each() for each in gone] == [None] * 3


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def map_at(address: int, nbytes: int) -> None:
    """Map new memory there."""
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    read_write, private_fixed_anonymous = 0x3, 0x32
    libc.mmap(address, nbytes, read_write, private_fixed_anonymous, -1, 0)


@pytest.mark.parametrize("closed", [False, True])
def test_a_forked_child_never_unmaps_its_parents_buffers(*, closed: bool) -> None:
    """They are not mapped there, and something else may be by the time the child takes apart what it has of them."""
    engine = Engine(CPU, host_budget_bytes=1 << 20)
    engine.reserve(pool=[PoolClass(nbytes=1 << 20, count=1)], staging=[], disk_bytes=0)
    memory = engine.pool.acquire(1 << 20, Use.SWAP).memory
    address = memory.data_ptr()
    if closed:  # whoever has a view of a buffer keeps it
        engine.close()

    def end() -> int:
        nonlocal engine, memory
        empty = not is_mapped(address)
        map_at(address, 1 << 20)
        occupied = is_mapped(address)
        del engine, memory
        gc.collect()
        return empty + 2 * occupied + 4 * is_mapped(address)

    assert exit_code(forked(end)) == 7
    engine.close()


def test_a_process_that_ends_in_the_middle_ends_well(tmp_path: Path) -> None:
    """Threads, copies and writes under way, an exception on top: one traceback, and it is the user's."""
    program = f"""
import pathlib, torch
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine_registry import open_engine
engine = open_engine(torch.device("cpu"), host_budget_bytes=1 << 26,
                     spill_dirs=(pathlib.Path({str(tmp_path)!r}),), spill_budget_bytes=1 << 26)
handles = [engine.offload(torch.randn(1 << 18), tier) for tier in (Tier.HOST, Tier.NVME) * 4]
tickets = [engine.prefetch(handle) for handle in handles[:4]]
raise KeyError("mine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert list(tmp_path.iterdir()) == []
