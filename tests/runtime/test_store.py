"""The store against a dict, with faults below it; its free list against a set of pages."""

import errno
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from faulty_streams import FaultyIO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tencache_fx.errors import BudgetError, OptionError, StoreError
from tencache_fx.runtime.file_io import FileIO
from tencache_fx.runtime.freelist import FreeList
from tencache_fx.runtime.store import Extent, Store
from tencache_fx.units import PAGE_BYTES, round_up

BUDGET_PAGES = 40
BLOCK_BYTES = 2 * PAGE_BYTES


def page_view(data: bytes = b"", *, nbytes: int = 0) -> memoryview:
    """Return page-aligned memory that begins with `data`."""
    view = memoryview(mmap.mmap(-1, round_up(max(1, nbytes, len(data)), PAGE_BYTES)))
    view[: len(data)] = data
    return view


def noise(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60), st.randoms(use_true_random=False))
def test_free_list_is_a_set_of_bytes(moves: list[tuple[bool, int]], random: object) -> None:
    free, model, taken = FreeList(), set(range(50)), []
    free.put(0, 50)
    for take, number in moves:
        if take:
            whole = any(set(range(s, s + number)) <= model for s in range(50)) and number > 0
            pieces = free.take(number)
            got = [byte for start, size in pieces for byte in range(start, start + size)]
            assert len(got) == len(set(got)) == min(number, len(model))
            assert set(got) <= model
            assert not whole or len(pieces) == 1, "was torn although a whole range was free"
            model -= set(got)
            taken += pieces
        elif taken:
            start, size = taken.pop(number % len(taken))
            free.put(start, size)
            model |= set(range(start, start + size))
        assert free.free_bytes == len(model)
    for start, size in taken:
        free.put(start, size)
    assert free.take(50) == ((0, 50),)


def test_free_list_notices_a_second_free() -> None:
    free = FreeList()
    free.put(0, 10)
    with pytest.raises(AssertionError, match="freed twice"):
        free.put(5, 2)


class StoreMachine(RuleBasedStateMachine):
    """Writes, reads and frees values at random while the disk misbehaves."""

    kept = Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.parent = tempfile.TemporaryDirectory()
        self.values: dict[Extent, bytes] = {}
        self.serial = 0

    @initialize(count=st.integers(1, 3), short=st.booleans(), checksum=st.booleans(), reserved=st.integers(0, 30))
    def open(self, count: int, short: bool, checksum: bool, reserved: int) -> None:  # noqa: FBT001
        directories = [Path(self.parent.name) / str(i) for i in range(count)]
        for directory in directories:
            directory.mkdir()
        self.io = FaultyIO(seed=count)
        self.io.short = short
        self.store = Store(
            directories, BUDGET_PAGES * PAGE_BYTES, checksum=checksum, workers=2, block_bytes=BLOCK_BYTES, io=self.io
        )
        self.directories = directories
        self.store.reserve(reserved * PAGE_BYTES)
        assert self.store.file_bytes == reserved * PAGE_BYTES

    @rule(data=st.data())
    def change_directories(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.directories), min_size=1, unique=True))
        self.store.spill_to(chosen)
        assert self.store.directories == tuple(chosen)

    @property
    def used_pages(self) -> int:
        return sum(-(-len(value) // PAGE_BYTES) for value in self.values.values())

    @rule(target=kept, nbytes=st.integers(1, 9 * PAGE_BYTES), failing=st.booleans())
    def write(self, nbytes: int, failing: bool) -> Extent | None:  # noqa: FBT001
        self.serial += 1
        value = noise(nbytes, self.serial)
        # Former files are no larger than needed only once they are empty.
        former = [f for i, f in enumerate(self.store._files) if i not in self.store._current]
        wasted_bytes = sum(file.free.free_bytes for file in former)
        fits = self.used_pages + wasted_bytes // PAGE_BYTES + -(-nbytes // PAGE_BYTES) <= BUDGET_PAGES
        if not fits:
            with pytest.raises(BudgetError, match="spill_budget"):
                self.store.allocate(nbytes, "too large")
            return None
        extent = self.store.allocate(nbytes, f"v{self.serial}")
        view = page_view(value)
        if failing:
            self.io.write_errors = [errno.EIO]
            with pytest.raises(StoreError, match="nothing is lost"):
                self.store.write(extent, view)
            assert bytes(view[:nbytes]) == value
            self.store.free(extent)
            return None
        self.store.write(extent, view)
        self.values[extent] = value
        return extent

    @rule(extent=kept, failing=st.booleans())
    def read(self, extent: Extent | None, failing: bool) -> None:  # noqa: FBT001
        if extent is None or extent not in self.values:
            return
        view = page_view(nbytes=extent.nbytes)
        if failing:
            self.io.read_errors = [errno.EIO]
            with pytest.raises(StoreError, match=r"it is lost, and so is this step"):
                self.store.read(extent, view)
        self.store.read(extent, view)
        assert bytes(view[: extent.nbytes]) == self.values[extent]

    @rule(extent=consumes(kept))
    def free(self, extent: Extent | None) -> None:
        if extent is not None and self.values.pop(extent, None) is not None:
            self.store.free(extent)

    @invariant()
    def accounts_agree(self) -> None:
        assert self.store.acquired_bytes == self.used_pages * PAGE_BYTES
        assert self.store.acquired_bytes <= self.store.file_bytes <= BUDGET_PAGES * PAGE_BYTES
        places = [(p.file, p.offset + i) for e in self.values for p in e.pieces for i in range(0, p.nbytes, PAGE_BYTES)]
        assert len(places) == len(set(places)) == self.used_pages
        assert all(not list(Path(self.parent.name, name).iterdir()) for name in os.listdir(self.parent.name))

    def teardown(self) -> None:
        for extent, value in self.values.items():
            view = page_view(nbytes=extent.nbytes)
            self.store.read(extent, view)
            assert bytes(view[: extent.nbytes]) == value
            self.store.free(extent)
        self.store.close()
        self.parent.cleanup()


def test_store_is_a_dict_of_values(no_leaks: None) -> None:
    run_machine(
        StoreMachine,
        settings=settings(max_examples=30, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow]),
    )


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def store(no_leaks: None, spill_dir: Path, io: FaultyIO):
    store = Store((spill_dir,), 64 * PAGE_BYTES, block_bytes=BLOCK_BYTES, io=io)
    yield store
    store.close()
    store.close()


def test_a_write_error_names_place_size_and_fate(store: Store, io: FaultyIO, spill_dir: Path) -> None:
    extent = store.allocate(5000, "mm_37")
    io.write_errors = [errno.ENOSPC]
    with pytest.raises(StoreError) as caught:
        store.write(extent, page_view(nbytes=5000))
    line = str(caught.value)
    for part in ("write 8192 bytes of mm_37", "offset 0", str(spill_dir), "injected disk failure", "nothing is lost"):
        assert part in line
    assert isinstance(caught.value, OSError)
    assert store.written_bytes == 0


def test_every_block_has_ended_when_an_error_comes(store: Store, io: FaultyIO) -> None:
    """The caller reuses the buffer at once, so no other block may still be on its way."""
    extent = store.allocate(8 * BLOCK_BYTES, "big")
    active, most = [0], [0]
    lock = threading.Lock()

    class Slow(FileIO):
        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            with lock:
                active[0] += 1
                most[0] = max(most[0], active[0])
                first = offset == 0
            threading.Event().wait(0.02)
            with lock:
                active[0] -= 1
            if first:
                raise OSError(errno.EIO, "boom")
            return super().pwrite(fd, view, offset)

    slow = Store(store.directories, 64 * PAGE_BYTES, block_bytes=BLOCK_BYTES, io=Slow())
    extent = slow.allocate(8 * BLOCK_BYTES, "big")
    with pytest.raises(StoreError, match="boom"):
        slow.write(extent, page_view(nbytes=8 * BLOCK_BYTES))
    assert active == [0]
    assert most[0] > 1, "blocks should move in parallel"
    slow.close()


def test_a_truncated_file_is_an_error_and_not_a_hang(no_leaks: None, spill_dir: Path) -> None:
    class Empty(FileIO):
        def pread(self, fd: int, view: memoryview, offset: int) -> int:
            return 0

    store = Store((spill_dir,), 1 << 20, io=Empty())
    extent = store.allocate(100, "x")
    store.write(extent, page_view(nbytes=100))
    with pytest.raises(StoreError, match="only 0 of 4096 bytes moved"):
        store.read(extent, page_view(nbytes=100))
    store.close()


def test_odd_short_transfers_end_well(no_leaks: None, spill_dir: Path) -> None:
    """A transfer that stops inside a page goes on at that page's start, as O_DIRECT wants."""

    class Odd(FileIO):
        def __init__(self) -> None:
            self.odd = 0

        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            assert offset % PAGE_BYTES == 0
            super().pwrite(fd, view, offset)
            self.odd += 1
            return view.nbytes - 100 if self.odd % 2 else view.nbytes

    store = Store((spill_dir,), 1 << 20, io=Odd())
    value = noise(3 * PAGE_BYTES, 1)
    extent = store.allocate(len(value), "x")
    store.write(extent, page_view(value))
    view = page_view(nbytes=len(value))
    store.read(extent, view)
    assert bytes(view) == value
    store.close()


def test_a_flipped_bit_is_found(no_leaks: None, spill_dir: Path) -> None:
    class Rot(FileIO):
        def pread(self, fd: int, view: memoryview, offset: int) -> int:
            moved = super().pread(fd, view, offset)
            view[17] ^= 4
            return moved

    store = Store((spill_dir,), 1 << 20, checksum=True, io=Rot())
    extent = store.allocate(100, "softmax_3")
    store.write(extent, page_view(noise(100, 2)))
    with pytest.raises(StoreError, match=r"softmax_3 came back from disk changed: checksum \w{8}, written as \w{8}"):
        store.read(extent, page_view(nbytes=100))
    store.close()


def test_reserve_names_both_numbers(store: Store, io: FaultyIO, spill_dir: Path) -> None:
    with pytest.raises(
        BudgetError, match=r"needs 266240 bytes of disk; the spill budget is 262144 bytes.*spill_budget"
    ):
        store.reserve(65 * PAGE_BYTES)
    io.room_bytes = 4096
    with pytest.raises(StoreError, match=r"has 4096 bytes free; the spill store needs 8192 more there"):
        store.reserve(2 * PAGE_BYTES)
    io.room_bytes = None
    io.full = True
    with pytest.raises(StoreError, match=r"refused 8192 more bytes"):
        store.allocate(5000, "x")
    io.full = False
    assert store.file_bytes == store.acquired_bytes == 0
    store.reserve(2 * PAGE_BYTES)
    store.reserve(PAGE_BYTES)
    assert store.file_bytes == 2 * PAGE_BYTES


def test_a_full_disk_sends_the_rest_to_another(no_leaks: None, tmp_path: Path) -> None:
    class OneFull(FileIO):
        def free_bytes(self, fd: int) -> int:
            return 0 if fd == store._files[0].fd else 1 << 30

    for name in "ab":
        (tmp_path / name).mkdir()
    store = Store((tmp_path / "a", tmp_path / "b"), 1 << 20, block_bytes=PAGE_BYTES, io=OneFull())
    extent = store.allocate(4 * PAGE_BYTES, "x")
    assert {piece.file for piece in extent.pieces} == {1}
    store.close()


def test_large_values_are_striped_and_small_ones_take_turns(no_leaks: None, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    store = Store((tmp_path / "a", tmp_path / "b"), 1 << 20, block_bytes=PAGE_BYTES)
    store.reserve(1 << 19)
    large = store.allocate(6 * PAGE_BYTES, "large")
    assert sorted((piece.file, piece.nbytes) for piece in large.pieces) == [(0, 3 * PAGE_BYTES), (1, 3 * PAGE_BYTES)]
    small = [store.allocate(100, "small").pieces[0].file for _ in range(4)]
    assert sorted(small) == [0, 0, 1, 1]
    store.close()


def test_a_directory_that_is_not_there(no_leaks: None, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(OptionError, match=r"spill_dir .*nowhere cannot hold the spill file \(No such file"):
        Store((tmp_path / "here", tmp_path / "nowhere"), 1 << 20)


def test_memory_file_systems_work_too(no_leaks: None) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        store = Store((Path(name),), 1 << 20)
        value = noise(10_000, 3)
        extent = store.allocate(len(value), "x")
        store.write(extent, page_view(value))
        view = page_view(nbytes=len(value))
        store.read(extent, view)
        assert bytes(view[: len(value)]) == value
        assert os.listdir(name) == []
        store.close()
