"""The pool against a model of what is acquired: no overlap, no lost byte, never above the budget."""

import itertools
import random
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tencache_fx.errors import BudgetError, OptionError, TencacheError
from tencache_fx.planning.plan import PoolClass
from tencache_fx.runtime import waiters
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import CpuStreams, Event
from tencache_fx.units import PAGE_BYTES, round_up

BUDGET_BYTES = 24 * PAGE_BYTES
sizes = st.one_of(st.integers(1, 9 * PAGE_BYTES), st.integers(1, 9).map(lambda pages: pages * PAGE_BYTES))
pages = st.integers(1, 9)
uses = st.sampled_from(list(Use))


class Flag:
    """An event that happens when told."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        assert self.happened


def span(buffer: Buffer) -> tuple[int, int]:
    start = buffer.memory.data_ptr()
    return start, start + buffer.nbytes


class PinCounter(CpuStreams):
    """Knows which memory is pinned; can refuse."""

    def __init__(self, *, refuse: bool = False) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}
        self.refuse = refuse

    def pin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]", threads: int | None = None) -> bool:
        assert memory.ctypes.data % PAGE_BYTES == 0
        self.pinned[memory.ctypes.data] = memory.nbytes
        return not self.refuse

    def unpin(self, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        assert self.pinned.pop(memory.ctypes.data) == memory.nbytes


class PoolMachine(RuleBasedStateMachine):
    """Lends, holds and returns at random; buffers are known to the model by address."""

    acquired = Bundle("acquired")

    def __init__(self) -> None:
        super().__init__()
        self.streams = PinCounter()
        self.pool = Pool(self.streams, BUDGET_BYTES, patience_s=0)
        self.holders: dict[Buffer, int] = {}
        self.asked: dict[Buffer, int] = {}
        self.left: list[tuple[int, int, Flag]] = []
        self.stuck: set[Buffer] = set()
        self.reserved: list[tuple[Use, Counter[int]]] = []
        self.serial = 0

    def pending(self, buffer: Buffer) -> set[Flag]:
        """Return the copies that may still touch a buffer's memory, whoever it was acquired to."""
        start, stop = span(buffer)
        return {flag for a, b, flag in self.left if not flag.happened and a < stop and start < b}

    @property
    def blocks(self) -> set[Buffer | None]:
        return {b.block for b in self.holders if b.block is not None}

    @property
    def free(self) -> list[Buffer]:
        return [b for b in self.pool._buffers if b not in self.holders and b not in self.blocks]

    @property
    def busy(self) -> list[Buffer]:
        """All mapped memory that cannot make way: acquired, or still being copied."""
        free = set(self.free)
        return [b for b in self.pool._buffers if b not in free or self.pending(b)]

    def fits(self, nbytes: int) -> bool:
        """Return whether a new buffer fits beside all that cannot make way; idle ones do."""
        return sum(b.nbytes for b in self.busy) + round_up(nbytes, PAGE_BYTES) <= BUDGET_BYTES

    def planned(self, use: Use, nbytes: int) -> int:
        return max((classes[nbytes] for each, classes in self.reserved if each is use), default=0)

    def short_class(self, nbytes: int, use: Use) -> int | None:
        """Return the reserved class of a request, if fewer buffers than reserved are there."""
        size = round_up(nbytes, PAGE_BYTES)
        known = {size for each, classes in self.reserved for size in classes if each is use}
        own = min((each for each in known if size <= each <= 2 * size), default=None)
        have = sum(b.use is use and b.nbytes == own and b not in self.blocks for b in self.pool._buffers)
        return own if own is not None and have < self.planned(use, own) else None

    def can_acquire(self, nbytes: int, use: Use) -> bool:
        if any(b.use is use and b.nbytes >= nbytes for b in self.free):
            return True
        short = self.short_class(nbytes, use)
        if short is not None and self.fits(short):
            return True
        coming = [b for b in self.holders if b.use is use is Use.STAGING and b not in self.stuck]
        waits = any(b.nbytes >= nbytes and self.planned(use, b.nbytes) for b in coming)
        return not waits and self.fits(nbytes)

    @rule(classes=st.dictionaries(pages, st.integers(1, 4), min_size=1, max_size=3), use=uses)
    def reserve(self, classes: dict[int, int], use: Use) -> None:
        wanted = Counter({count * PAGE_BYTES: number for count, number in classes.items()})
        busy = Counter(b.nbytes for b in self.busy if b.use is use)
        new_bytes = sum(size * max(0, number - busy[size]) for size, number in wanted.items())
        asked = [PoolClass(nbytes=size - 7, count=number) for size, number in wanted.items()]
        allowed = sum(b.nbytes for b in self.busy) + new_bytes <= BUDGET_BYTES
        before = list(self.pool._buffers)
        try:
            (self.pool.promise if use is Use.GRADIENT else self.pool.reserve)(asked, use)
        except BudgetError:
            assert not allowed or self.blocks
            assert list(self.pool._buffers) == before
            return
        assert allowed or self.blocks, "gradients that are suballocations count"
        have = Counter(b.nbytes for b in self.pool._buffers if b.use is use)
        assert use is Use.GRADIENT or have >= wanted
        self.reserved.append((use, wanted))

    @rule(target=acquired, nbytes=sizes, use=uses)
    def acquire(self, nbytes: int, use: Use) -> Buffer | None:
        allowed = self.can_acquire(nbytes, use)
        before = self.pool.allocated_bytes
        most_bytes = self.short_class(nbytes, use) or nbytes * 2
        free_fit = any(b.use is use and nbytes <= b.nbytes <= most_bytes for b in self.free)
        try:
            buffer = self.pool.acquire(nbytes, use)
        except BudgetError:
            assert not allowed
            return None
        assert allowed or (use is Use.GRADIENT and buffer.block is not None)
        assert not (free_fit and self.pool.allocated_bytes > before), "grew although a buffer was free"
        assert buffer not in self.holders
        assert buffer.use is use
        assert buffer.nbytes >= nbytes
        assert buffer.memory.data_ptr() % PAGE_BYTES == 0
        assert set(buffer.after) >= self.pending(buffer)
        self.take(buffer)
        self.holders[buffer], self.asked[buffer] = 1, nbytes
        self.serial += 1
        buffer.after = ()
        buffer.memory.fill_(self.serial % 251)
        buffer.view[0] = self.serial % 251
        return buffer

    def take(self, buffer: Buffer) -> None:
        """Forget the copies that touched this memory: its taker has waited for them."""
        start, stop = span(buffer)
        parts = [(a, min(b, start), flag) for a, b, flag in self.left]
        parts += [(max(a, stop), b, flag) for a, b, flag in self.left]
        self.left = [(a, b, flag) for a, b, flag in parts if a < b]

    @rule(buffer=acquired)
    def retain(self, buffer: Buffer | None) -> None:
        if buffer is not None and buffer in self.holders:
            self.pool.retain(buffer)
            self.holders[buffer] += 1

    @rule(buffer=consumes(acquired), copies=st.integers(0, 2), done=st.booleans())
    def release(self, buffer: Buffer | None, copies: int, done: bool) -> None:  # noqa: FBT001
        if buffer is None or buffer not in self.holders:
            return
        value = int(buffer.memory[0])
        assert bool((buffer.memory == value).all()), "somebody else wrote to an acquired buffer"
        flags = [Flag() for _ in range(copies)]
        for flag in flags:
            flag.happened = done
        self.left += [(*span(buffer), flag) for flag in flags]
        for i in range(self.holders.pop(buffer)):
            self.pool.release(buffer, *(flags if i == 0 else ()))
        self.stuck.discard(buffer)

    @rule(buffer=acquired)
    def mark_stuck(self, buffer: Buffer | None) -> None:
        if buffer is not None and buffer in self.holders and buffer.use is Use.STAGING:
            self.pool.mark_stuck(buffer)
            self.stuck.add(buffer)

    @rule(data=st.data())
    def finish_copies(self, data: st.DataObject) -> None:
        flags = list({flag: None for _, _, flag in self.left if not flag.happened})
        if flags:
            data.draw(st.sampled_from(flags)).happened = True

    @invariant()
    def accounts_agree(self) -> None:
        assert self.pool.acquired_bytes == sum(b.nbytes for b in self.holders)
        assert self.pool.requested_bytes == sum(self.asked[b] for b in self.holders)
        assert self.pool.acquired_bytes <= self.pool.allocated_bytes <= BUDGET_BYTES
        assert self.pool.allocated_bytes == sum(self.streams.pinned.values())
        assert self.pool.high_water_bytes >= self.pool.acquired_bytes

    @invariant()
    def lent_buffers_do_not_overlap(self) -> None:
        spans = sorted(map(span, self.holders))
        assert all(a[1] <= b[0] for a, b in pairwise(spans))

    def return_everything(self) -> None:
        for buffer, holders in self.holders.items():
            for _ in range(holders):
                self.pool.release(buffer)
        for _, _, flag in self.left:
            flag.happened = True
        self.holders.clear()
        assert not any(self.pool._suballocator.parts())
        self.stuck.clear()

    def teardown(self) -> None:
        """Whatever came before: what was reserved together can be acquired together, in any order."""
        self.return_everything()
        for k, (use, classes) in enumerate(self.reserved):
            wanted = list(classes.elements())
            random.Random(k).shuffle(wanted)
            for size in wanted:
                buffer = self.pool.acquire(size - 7, use)
                assert buffer.nbytes == size
                assert self.pool.allocated_bytes <= BUDGET_BYTES
                self.holders[buffer] = 1
            self.return_everything()
        self.pool.close()
        assert self.pool.allocated_bytes == 0
        assert not self.streams.pinned
        self.streams.close()


def test_pool_is_a_dict_of_buffers(no_leaks: None) -> None:
    run_machine(
        PoolMachine,
        settings=settings(max_examples=60, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]),
    )


def pool_of(*classes: PoolClass, budget_bytes: int = BUDGET_BYTES, use: Use = Use.SWAP) -> Pool:
    pool = Pool(PinCounter(), budget_bytes)
    pool.reserve(classes, use)
    return pool


def test_reserve_takes_the_maximum_and_not_the_sum() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=3), PoolClass(nbytes=5000, count=1))
    assert pool.allocated_bytes == 3 * 4096 + 8192
    acquired = [pool.acquire(4000, Use.SWAP) for _ in range(2)]
    pool.reserve([PoolClass(nbytes=4096, count=2), PoolClass(nbytes=8192, count=2)], Use.SWAP)
    assert pool.allocated_bytes == 3 * 4096 + 2 * 8192
    pool.reserve([PoolClass(nbytes=4096, count=1)], Use.STAGING)
    assert pool.allocated_bytes == 3 * 4096 + 2 * 8192 + 4096
    assert len({buffer.memory.data_ptr() for buffer in acquired}) == 2
    pool.close()


def test_reserve_above_the_budget_names_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"7 more pinned buffers of 4096 bytes .* 0 of 24576 bytes .* host_budget"):
        pool_of(PoolClass(nbytes=4096, count=7), budget_bytes=6 * 4096)


def advised_bytes(refused: Callable[[], object]) -> int:
    with pytest.raises(BudgetError) as caught:
        refused()
    found = re.search(r"raise host_budget to (\d+)MiB or more", str(caught.value))
    assert found is not None, str(caught.value)
    return int(found[1]) << 20


@pytest.mark.parametrize("deed", ["reserve", "promise", "make_room", "acquire"])
def test_a_refusal_names_a_budget_that_is_enough(deed: str) -> None:
    mib = 1 << 20
    pool = pool_of(PoolClass(nbytes=mib, count=2), budget_bytes=4 * mib)
    held = pool.acquire(2 * mib, Use.GRADIENT), pool.acquire(mib, Use.SWAP)
    deeds: dict[str, Callable[[], object]] = {
        "reserve": lambda: pool.reserve([PoolClass(nbytes=2 * mib, count=3)], Use.STAGING),
        "promise": lambda: pool.promise([PoolClass(nbytes=2 * mib, count=4)], Use.GRADIENT),
        "make_room": lambda: pool.make_room([2 * mib, mib], Use.STATE),
        "acquire": lambda: pool.acquire(3 * mib, Use.GRADIENT),
    }
    least = {"reserve": 9, "promise": 9, "make_room": 6, "acquire": 6}[deed]
    advised = advised_bytes(deeds[deed])
    assert advised <= (least + 1) * mib, "of what is idle no more is counted than the pool keeps"
    pool.resize_budget(advised)
    deeds[deed]()
    assert pool.allocated_bytes <= advised
    for buffer in held:
        pool.release(buffer)
    pool.close()


def test_where_memory_is_scarce_a_transfer_takes_no_more_than_it_needs() -> None:
    pool = pool_of(PoolClass(nbytes=4 * PAGE_BYTES, count=2), budget_bytes=8 * PAGE_BYTES)
    small = [pool.acquire(PAGE_BYTES, Use.SWAP) for _ in range(8)]
    assert pool.acquired_bytes == 8 * PAGE_BYTES
    for buffer in small:
        pool.release(buffer)
    large = [pool.acquire(4 * PAGE_BYTES, Use.SWAP) for _ in range(2)]
    for buffer in large:
        pool.release(buffer)
    pool.close()


def test_a_reserved_pool_never_grows() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=2), PoolClass(nbytes=16384, count=1), budget_bytes=1 << 20)
    before = pool.allocated_bytes
    for _ in range(5):
        acquired = [pool.acquire(n, Use.SWAP) for n in (4096, 16000, 3000)]
        for buffer in acquired:
            pool.release(buffer)
    assert pool.allocated_bytes == before
    pool.close()


def test_idle_memory_makes_way_for_what_is_needed() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=4), budget_bytes=16384)
    buffer = pool.acquire(16384, Use.SWAP)
    assert pool.allocated_bytes == 16384 == buffer.nbytes
    with pytest.raises(BudgetError, match=r"16384 bytes has 0 left \(16384 in use\)"):
        pool.acquire(1, Use.SWAP)
    pool.release(buffer)
    pool.reserve([PoolClass(nbytes=4096, count=4)], Use.STAGING)
    assert pool.allocated_bytes == 16384
    pool.close()


def test_what_was_reserved_comes_back_after_larger_sizes() -> None:
    """Two transfers of a batch of 512 are planned; others run in between, each within the budget on its own."""
    pool = pool_of(PoolClass(nbytes=16384, count=2), budget_bytes=4 * 16384)
    for batch in (512, 2048, 512, 1024, 2048, 512):
        acquired = [pool.acquire(16384 * batch // 512, Use.SWAP) for _ in range(2 if batch < 2048 else 1)]
        assert pool.allocated_bytes <= 4 * 16384
        for buffer in acquired:
            pool.release(buffer)
    assert sum(b.nbytes == 16384 for b in pool._buffers) == 2
    pool.close()


def test_what_nobody_reserved_makes_way_first() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=2), budget_bytes=4 * 4096)
    pool.release(pool.acquire(8192, Use.SWAP))
    kept = [b for b in pool._buffers if b.nbytes == 4096]
    pool.acquire(5000, Use.STAGING)
    assert [b for b in pool._buffers if b.use is Use.SWAP] == kept
    pool.close()


def test_reserve_waits_for_copies_that_give_room() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=1), budget_bytes=8192)
    flag = Flag()
    pool.release(pool.acquire(1, Use.SWAP), flag)
    thread, results = in_thread(lambda: pool.reserve([PoolClass(nbytes=8192, count=1)], Use.STAGING))
    time.sleep(0.1)
    assert not results
    flag.happened = True
    thread.join(10)
    assert results == [None]
    assert pool.allocated_bytes == 8192
    pool.close()


def in_thread(deed: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(deed())
        except TencacheError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_staging_waits_for_its_planned_number_instead_of_growing() -> None:
    pool = pool_of(PoolClass(nbytes=8192, count=1), budget_bytes=1 << 20, use=Use.STAGING)
    first = pool.acquire(8192, Use.STAGING)
    thread, results = in_thread(lambda: pool.acquire(100, Use.STAGING))
    time.sleep(0.1)
    assert not results
    pool.release(first)
    thread.join(10)
    assert results == [first]
    assert pool.allocated_bytes == 8192
    pool.close()


def test_nobody_waits_for_parked_buffers() -> None:
    pool = pool_of(PoolClass(nbytes=8192, count=2), budget_bytes=3 * 8192, use=Use.STAGING)
    held = [pool.acquire(8192, Use.STAGING) for _ in range(2)]
    for buffer in held:
        pool.mark_stuck(buffer)
    pool.acquire(8192, Use.STAGING)  # grows
    pool.mark_stuck(held[0])
    thread, results = in_thread(lambda: pool.acquire(8192, Use.STAGING))
    time.sleep(0.1)
    assert not results, "one of the three is not parked, so it is waited for"
    pool.stop()
    thread.join(10)
    assert isinstance(results[0], TencacheError)
    pool.close()
    full = pool_of(PoolClass(nbytes=8192, count=1), budget_bytes=8192, use=Use.STAGING)
    full.mark_stuck(full.acquire(1, Use.STAGING))
    with pytest.raises(BudgetError, match="staging"):
        full.acquire(1, Use.STAGING)
    full.close()


def test_a_swap_waits_for_copies_that_give_room() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=1), budget_bytes=8192)
    flag = Flag()
    pool.release(pool.acquire(1, Use.SWAP), flag)
    thread, results = in_thread(lambda: pool.acquire(8192, Use.SWAP))
    time.sleep(0.1)
    assert not results
    flag.happened = True
    thread.join(10)
    assert isinstance(results[0], Buffer)
    assert pool.allocated_bytes == 8192
    pool.close()


def test_finished_buffers_come_before_returning_ones() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=2))
    a, b = pool.acquire(1, Use.SWAP), pool.acquire(1, Use.SWAP)
    flag = Flag()
    pool.release(a, flag)
    pool.release(b)
    assert pool.acquire(1, Use.SWAP) is b
    again = pool.acquire(1, Use.SWAP)
    assert again is a
    assert again.after == (flag,)
    pool.close()


def test_after_return_decides_what_guards_a_buffer() -> None:
    flag = Flag()

    class Guarding(PinCounter):
        def after_return(self, memory: object, after: tuple[Event, ...]) -> tuple[Event, ...]:
            return (*after, flag)

    pool = Pool(Guarding(), 4096)
    pool.release(pool.acquire(1, Use.SWAP))
    assert pool.acquire(1, Use.SWAP).after == (flag,)
    pool.close()


def test_refused_pinning_warns_once_and_goes_on() -> None:
    pool = Pool(PinCounter(refuse=True), BUDGET_BYTES)
    with pytest.warns(UserWarning, match=r"refused to pin 4096 bytes .* 5x slower.*ulimit -l"):
        pool.acquire(1, Use.SWAP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.acquire(1, Use.SWAP)
    pool.close()


def test_budget_can_shrink_to_what_is_in_use() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=1), PoolClass(nbytes=8192, count=2), budget_bytes=1 << 20)
    pool.acquire(1, Use.SWAP)
    pool.resize_budget(4096)
    assert pool.allocated_bytes == 4096
    with pytest.raises(OptionError, match="host_budget 4095 bytes is below the 4096 bytes"):
        pool.resize_budget(4095)
    pool.close()


def test_a_budget_that_does_not_fit_changes_nothing() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=3), budget_bytes=1 << 20)
    acquired = [pool.acquire(1, Use.SWAP) for _ in range(2)]
    with pytest.raises(OptionError, match="host_budget 8191 bytes is below the 8192 bytes of host memory in use"):
        pool.resize_budget(8191)
    assert pool.budget_bytes == 1 << 20
    assert pool.allocated_bytes == 3 * 4096
    for each in acquired:
        pool.release(each)
    pool.close()


def test_a_smaller_budget_waits_for_copies_under_way() -> None:
    pool, flag = pool_of(PoolClass(nbytes=4096, count=2), budget_bytes=1 << 20), Flag()
    pool.release(pool.acquire(1, Use.SWAP), flag)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (pool.resize_budget(1), done.set()))
    thread.start()
    assert not done.wait(0.1)
    flag.happened = True
    assert done.wait(10)
    thread.join()
    assert pool.allocated_bytes == 0
    pool.close()


@pytest.mark.parametrize("change", [Pool.raise_budget, Pool.resize_budget])
def test_who_waits_for_a_buffer_gets_it_when_the_budget_is_raised(
    change: Callable[[Pool, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told: it would look again by itself only once the test is over."""
    monkeypatch.setattr(waiters, "_POLL_S", 60.0)
    pool, found = Pool(CpuStreams(), 4096), []
    first = pool.acquire(1, Use.STAGING)
    thread = threading.Thread(target=lambda: found.append(pool.acquire(1, Use.STAGING)))
    thread.start()
    time.sleep(0.1)
    assert not found
    change(pool, 8192)
    thread.join(10)
    assert len(found) == 1
    assert found[0] is not first
    pool.close()


def test_room_is_made_for_all_or_nothing_changes() -> None:
    pool = pool_of(PoolClass(nbytes=4096, count=4), budget_bytes=6 * 4096)
    pool.acquire(1, Use.SWAP)
    with pytest.raises(BudgetError, match=r"offloaded parameters need 24576 bytes .* of 24576 bytes has 20480 left"):
        pool.make_room([4097, 8192, 8192], Use.PARAMETER)
    assert pool.allocated_bytes == 4 * 4096
    pool.make_room([4097, 8192, 1], Use.PARAMETER)
    for nbytes in (4097, 8192, 1):
        pool.acquire(nbytes, Use.PARAMETER)
    assert pool.allocated_bytes == 6 * 4096
    pool.close()


@pytest.mark.parametrize("deed", ["acquire", "release"])
def test_an_interrupt_never_leaves_the_pool_to_one_thread(deed: str) -> None:
    """As a function of `threading` returns, which may have taken the lock."""
    for at in itertools.count():
        pool, returns = Pool(CpuStreams(), 1 << 20), 0
        buffer = pool.acquire(4096, Use.SWAP)

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            nonlocal returns
            if event == "return" and frame.f_code.co_filename == threading.__file__:
                returns += 1
                if returns == at + 1:  # noqa: B023 - it is called in this round only
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            if deed == "acquire":
                pool.acquire(4096, Use.SWAP)
            else:
                pool.release(buffer)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        thread, results = in_thread(lambda: pool.room_bytes)  # noqa: B023
        thread.join(20)
        assert results, f"behind return {at}"
        if returns <= at:
            break
