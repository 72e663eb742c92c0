"""Values over several spill directories: who gets how much, how fast all are together, and what a full one does."""

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_store import noise, page_view
from throttled_io import ThrottledIO

from tencache_fx.errors import BudgetError, StoreError
from tencache_fx.hardware.disk import Disk
from tencache_fx.runtime.dealing import Dealer, split
from tencache_fx.runtime.file_io import FileIO
from tencache_fx.runtime.store import Extent, Store
from tencache_fx.runtime.traffic import Traffic
from tencache_fx.units import PAGE_BYTES

MIB = 1 << 20
RATES = {"a": 1, "b": 2, "c": 4, "d": 8}
StoreMaker = Callable[..., Store]


@pytest.fixture
def new_store(no_leaks: None, tmp_path: Path) -> Iterator[StoreMaker]:
    """Return a maker of stores over directories of these names."""
    made: list[Store] = []

    def make(names: Sequence[str], io: FileIO, *, budget_bytes: int = 1 << 30, block_bytes: int = MIB) -> Store:
        directories = [tmp_path / name for name in names]
        for directory in directories:
            directory.mkdir()
        made.append(Store(directories, budget_bytes, block_bytes=block_bytes, io=io))
        return made[-1]

    yield make
    for store in made:
        store.close()


def expect(store: Store, rates: Mapping[str, int]) -> None:
    """Tell the store rates by the names of its directories."""
    named = {directory: rates[directory.name] for directory in store.directories}
    store.expect_rates({at: Disk(write_bytes_per_s=r, read_bytes_per_s=r, direct=True) for at, r in named.items()})


def in_proportion(moved: Mapping[str, int], rates: Mapping[str, int], within: float) -> bool:
    """Return whether each directory has moved its part, but for `within` of it."""
    share = {name: moved[name] / sum(moved.values()) for name in rates}
    ideal = {name: rate / sum(rates.values()) for name, rate in rates.items()}
    return all(abs(share[name] - ideal[name]) <= within * ideal[name] for name in rates)


rate_lists = st.lists(st.integers(1, 10**10), min_size=1, max_size=6)


@given(st.integers(1, 5000), rate_lists)
def test_shares_are_whole_pages_in_proportion(pages: int, rates: list[int]) -> None:
    shares = split(pages * PAGE_BYTES, dict(enumerate(rates)))
    assert sum(shares.values()) == pages * PAGE_BYTES
    for i, share in shares.items():
        assert share % PAGE_BYTES == 0
        assert share >= 0
        assert abs(share - pages * PAGE_BYTES * rates[i] / sum(rates)) <= PAGE_BYTES + 1


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), rate_lists, st.sampled_from([1, 16, 256]))
def test_what_is_dealt_adds_up_and_nobody_is_far_behind(sizes: list[int], rates: list[int], least: int) -> None:
    dealer, known = Dealer(least * PAGE_BYTES), dict(enumerate(rates))
    again = Dealer(least * PAGE_BYTES)
    got = dict.fromkeys(known, 0)
    for pages in sizes:
        shares = dealer.deal(pages * PAGE_BYTES, known)
        assert shares == again.deal(pages * PAGE_BYTES, known), "deals otherwise the second time"
        assert sum(shares.values()) == pages * PAGE_BYTES
        assert all(share > 0 and share % PAGE_BYTES == 0 for share in shares.values())
        assert len(shares) == 1 or min(shares.values()) > (least - 2) * PAGE_BYTES, "a piece not worth a request"
        for i, share in shares.items():
            got[i] += share
    behind = [sum(sizes) * PAGE_BYTES * rate / sum(rates) - got[i] for i, rate in known.items()]
    assert max(map(abs, behind)) <= len(rates) * (2 * least + 2) * PAGE_BYTES


def test_a_directory_that_is_said_to_be_slow_gets_its_turn() -> None:
    dealer = Dealer(MIB)
    dealt = [dealer.deal(100_000 * PAGE_BYTES, {0: 10**9, 1: 10**5}) for _ in range(200)]
    assert 0 < sum(shares.get(1, 0) for shares in dealt) < 10 * MIB


@pytest.mark.parametrize("value_bytes", [4096, 200_000, 3 * MIB, 64 * MIB], ids=str)
def test_bytes_are_dealt_in_proportion_to_rates(new_store: StoreMaker, value_bytes: int) -> None:
    store = new_store(RATES, FileIO(), block_bytes=8 * MIB)
    expect(store, {name: rate * 100 * MIB for name, rate in RATES.items()})
    dealt = dict.fromkeys(RATES, 0)
    for _ in range(max(3, 256 * MIB // value_bytes) if value_bytes > 4096 else 600):
        extent = store.allocate(value_bytes, "x")
        for piece in extent.pieces:
            dealt[store.directories[piece.file].name] += piece.nbytes
        store.free(extent)
    assert in_proportion(dealt, RATES, within=0.03)


@pytest.mark.slow
def test_throttled_directories_are_as_fast_as_all_together(new_store: StoreMaker) -> None:
    """By the real clock, which is for a machine that does nothing else: a busy one is late with requests.

    The shares of directories, by a clock that counts requests only, are in the tests above and below.
    """
    rates = {name: rate * 8_000_000 for name, rate in RATES.items()}
    io = ThrottledIO(rates, sleeps=True)
    store = new_store(rates, io)
    expect(store, rates)
    values = [page_view(noise(8 * MIB, seed)) for seed in range(4)]
    views = [page_view(nbytes=8 * MIB) for _ in values]

    def move(value: memoryview, view: memoryview) -> None:
        extent = store.allocate(value.nbytes, "x")
        store.write(extent, value)
        store.read(extent, view)
        store.free(extent)

    best = 0.0
    with ThreadPoolExecutor(4) as threads:  # as the engine's workers do
        for _ in range(4):
            before, start_ns = io.written.copy(), io.now_ns()
            list(threads.map(move, values * 2, views * 2))
            taken_ns = io.now_ns() - start_ns
            moved = io.written - before
            best = max(best, 2 * sum(moved.values()) * 1e9 / taken_ns / sum(rates.values()))
            if best >= 0.9:
                break
    assert values == views
    assert in_proportion(moved, rates, within=0.1), moved
    assert best >= 0.9


def go_round(store: Store, count: int) -> None:
    """Write and read that many small values, one after the other."""
    view = page_view(nbytes=MIB)
    for _ in range(count):
        extent = store.allocate(MIB, "x")
        store.write(extent, view)
        store.read(extent, view)
        store.free(extent)


def test_rates_that_were_not_measured_are_found_while_running(new_store: StoreMaker) -> None:
    rates = {name: rate * 10**8 for name, rate in RATES.items()}
    io = ThrottledIO(rates)
    store = new_store(rates, io, block_bytes=8 * MIB)
    go_round(store, 20)
    before = io.written.copy()
    go_round(store, 300)
    assert in_proportion(io.written - before, rates, within=0.1)
    assert [use.share for use in store.uses()] == pytest.approx([1 / 15, 2 / 15, 4 / 15, 8 / 15], rel=0.1)


def test_a_directory_that_gets_slower_gets_less_and_recovers(new_store: StoreMaker) -> None:
    io = ThrottledIO({"a": 10**9, "b": 10**9})
    store = new_store("ab", io, block_bytes=8 * MIB)

    def run(count: int) -> float:
        """Return which part of what was written went to b."""
        before = io.written.copy()
        go_round(store, count)
        moved = io.written - before
        return moved["b"] / sum(moved.values())

    assert run(100) == pytest.approx(0.5, abs=0.02)
    io.rates["b"] //= 10
    assert run(200) < 0.45
    run(4000)
    assert run(500) == pytest.approx(1 / 11, rel=0.1)
    io.rates["b"] *= 10
    run(10_000)
    assert run(500) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("factor", [100, 0.01], ids=["too high", "too low"])
def test_a_wrong_measurement_is_corrected(new_store: StoreMaker, factor: float) -> None:
    io = ThrottledIO({"a": 10**9, "b": 10**9})
    store = new_store("ab", io, block_bytes=8 * MIB)
    expect(store, {"a": 10**9, "b": int(factor * 10**9)})
    go_round(store, 6000)
    assert [use.share for use in store.uses()] == pytest.approx([0.5, 0.5], rel=0.1)


def test_small_requests_and_waits_between_requests_say_nothing_of_a_rate() -> None:
    now = [0]
    traffic = Traffic("write", 1, 1000, lambda: now[0])
    traffic.expect(10**9)

    def take(duration_ns: int, nbytes: int) -> None:
        def call() -> int:
            now[0] += duration_ns
            return nbytes

        assert traffic.move(call, nbytes) == nbytes

    take(10**9, 999)
    assert traffic.bytes_per_s == 10**9
    for _ in range(100):
        now[0] += 10**10
        take(10**8, 2 * 10**8)
    assert traffic.bytes_per_s == pytest.approx(2 * 10**9, rel=0.01)
    assert traffic.moved_bytes == 999 + 2 * 10**10
    traffic.expect(5)
    assert traffic.bytes_per_s > 10**9, "it is known by now"
    with pytest.raises(OSError, match="late"):
        traffic.move(lambda: fail_late(now), 10**6)
    assert traffic.bytes_per_s < 10**8
    traffic.threads.stop()


def fail_late(now: list[int]) -> int:
    now[0] += 10**11
    raise OSError(errno.EIO, "late")


def test_a_directory_that_stands_still_does_not_hold_up_the_others(new_store: StoreMaker) -> None:
    goes_on, others = threading.Event(), threading.Semaphore(0)

    class Standing(FileIO):
        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            if fd == store._files[0].fd:
                assert goes_on.wait(30)
            else:
                others.release()
            return super().pwrite(fd, view, offset)

    store = new_store("ab", Standing())
    extent = store.allocate(32 * MIB, "x")
    thread = threading.Thread(target=store.write, args=(extent, page_view(nbytes=32 * MIB)))
    thread.start()
    for _ in range(16):
        assert others.acquire(timeout=30)
    goes_on.set()
    thread.join()
    assert [use.written_bytes for use in store.uses()] == [16 * MIB, 16 * MIB]


class RoomyIO(FileIO):
    """Disks with so much room, by file; their file system may refuse more although it says that there is room."""

    def __init__(self, room_pages: Sequence[int], *, refuses: bool) -> None:
        self.left = [pages * PAGE_BYTES for pages in room_pages]
        self.refuses = refuses
        self.fds: list[int] = []

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        i = self.fds.index(fd)
        if nbytes > self.left[i]:
            raise OSError(errno.ENOSPC, "injected full disk")
        self.left[i] -= nbytes
        super().allocate(fd, offset, nbytes)

    def free_bytes(self, fd: int) -> int:
        return 1 << 40 if self.refuses else self.left[self.fds.index(fd)]


rooms = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 1000)), min_size=1, max_size=4)


@given(rooms, st.lists(st.integers(1, 30), max_size=12), st.integers(0, 40), st.integers(PAGE_BYTES, 150 * PAGE_BYTES))
def test_what_one_directory_has_no_room_for_goes_to_the_others(
    tmp_path_factory: pytest.TempPathFactory,
    directories: list[tuple[int, int]],
    sizes: list[int],
    reserved: int,
    budget_bytes: int,
) -> None:
    """A value has its bytes, whole pages, none twice, and it is refused only where all together have no room for it."""
    io = RoomyIO([pages for pages, _ in directories], refuses=False)
    folder = tmp_path_factory.mktemp("several")
    paths = [folder / str(i) for i in range(len(directories))]
    for path in paths:
        path.mkdir()
    store = Store(paths, budget_bytes, block_bytes=16 * PAGE_BYTES, io=io)
    io.fds = [file.fd for file in store._files]
    store.expect_rates(
        {
            path: Disk(write_bytes_per_s=rate, read_bytes_per_s=rate, direct=True)
            for path, (_, rate) in zip(paths, directories, strict=True)
        }
    )
    total = min(budget_bytes // PAGE_BYTES, sum(pages for pages, _ in directories))
    if reserved <= total:
        store.reserve(reserved * PAGE_BYTES)
        assert store.file_bytes == reserved * PAGE_BYTES
    kept: list[Extent] = []
    used = 0
    for pages in sizes:
        if used + pages > total:
            with pytest.raises((BudgetError, StoreError)):
                store.allocate(pages * PAGE_BYTES, "x")
            store.free(kept.pop()) if kept else None
        else:
            kept.append(store.allocate(pages * PAGE_BYTES, "x"))
        used = sum(extent.nbytes for extent in kept) // PAGE_BYTES
        pieces = [piece for extent in kept for piece in extent.pieces]
        assert all(sum(piece.nbytes for piece in extent.pieces) == extent.nbytes for extent in kept)
        assert all(piece.nbytes > 0 and piece.nbytes % PAGE_BYTES == 0 for piece in pieces)
        places = [(p.file, p.offset + i) for p in pieces for i in range(0, p.nbytes, PAGE_BYTES)]
        assert len(set(places)) == len(places) == used
        assert store.acquired_bytes == used * PAGE_BYTES <= store.file_bytes <= budget_bytes
        assert store.file_bytes % PAGE_BYTES == 0
    store.close()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_full_directory(new_store: StoreMaker, refuses: bool) -> None:  # noqa: FBT001
    io = RoomyIO([100, 3, 100], refuses=refuses)
    store = new_store("abc", io, block_bytes=8 * PAGE_BYTES)
    io.fds = [file.fd for file in store._files]
    values = [np.random.default_rng(i).bytes(12 * PAGE_BYTES) for i in range(10)]
    extents = [store.allocate(len(value), "x") for value in values]
    for extent, value in zip(extents, values, strict=True):
        store.write(extent, page_view(value))
    for extent, value in zip(extents, values, strict=True):
        view = page_view(nbytes=len(value))
        store.read(extent, view)
        assert view == value
    full, rest = store.uses()[1], (store.uses()[0], store.uses()[2])
    assert full.file_bytes <= 3 * PAGE_BYTES
    assert [use.written_bytes // PAGE_BYTES for use in rest] == pytest.approx([60, 60], abs=4)
    assert full.share > 0, "that it is full says nothing of its rate"
    message = "refused .* bytes for the spill file" if refuses else "a, .*b, .*c together have .* bytes free"
    with pytest.raises(StoreError, match=message):
        store.allocate(100 * PAGE_BYTES, "y")
    assert store.acquired_bytes == 120 * PAGE_BYTES


def test_counters_of_a_directory_that_is_left_stay(new_store: StoreMaker) -> None:
    store = new_store("ab", FileIO())
    first, second = store.directories
    extent = store.allocate(4 * MIB, "x")
    store.write(extent, page_view(nbytes=4 * MIB))
    store.spill_to([second])
    store.free(extent)
    store.spill_to([second, first])
    extent = store.allocate(4 * MIB, "x")
    store.write(extent, page_view(nbytes=4 * MIB))
    store.spill_to([second])
    used = {use.directory: use for use in store.uses()}
    assert sum(use.written_bytes for use in used.values()) == store.written_bytes == 8 * MIB
    assert used[first].written_bytes >= 2 * MIB + MIB // 8
    assert (used[first].share, used[second].share) == (0.0, 1.0)
    store.free(extent)
