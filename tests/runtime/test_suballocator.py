"""Gradients in buffers for transfers: shared while there is budget to spare, and what was reserved always comes."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from test_pool import Flag, PinCounter, pool_of, span
from tied_model import batch, compiled, network, weights
from torch import nn

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.optim import AdamW
from tencache_fx.planning.plan import PoolClass
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.engine_registry import engines, install_engine
from tencache_fx.runtime.pool import Pool
from tencache_fx.units import PAGE_BYTES

transfer_classes = st.dictionaries(st.integers(4, 12), st.integers(1, 3), min_size=1, max_size=2)
gradient_classes = st.dictionaries(st.integers(1, 12), st.integers(1, 3), min_size=1, max_size=2)
some_pages = st.one_of(st.just(0), st.integers(1, 12), st.integers(13, 60))


class SharingMachine(RuleBasedStateMachine):
    """Lends only what was reserved, promised or announced: none of it may ever be missing, whoever holds what."""

    @initialize(transfers=transfer_classes, gradients=gradient_classes, state_pages=some_pages, spare_pages=some_pages)
    def reserve(self, transfers: dict[int, int], gradients: dict[int, int], state_pages: int, spare_pages: int) -> None:
        self.limits = Counter({(Use.SWAP, size): count for size, count in transfers.items()})
        self.limits |= Counter({(Use.GRADIENT, size): count for size, count in gradients.items()})
        self.state_pages = state_pages
        pages = sum(size * count for (_, size), count in self.limits.items()) + state_pages + spare_pages
        self.streams = PinCounter()
        self.pool = Pool(self.streams, pages * PAGE_BYTES, patience_s=0)
        self.pool.keep_free(lambda: self.state_pages * PAGE_BYTES)
        for use, deed in ((Use.SWAP, self.pool.reserve), (Use.GRADIENT, self.pool.promise)):
            deed([PoolClass(nbytes=p * PAGE_BYTES, count=n) for (u, p), n in self.limits.items() if u is use], use)
        self.acquired: dict[Buffer, tuple[Use, int]] = {}
        self.left: list[tuple[int, int, Flag]] = []
        self.serial = 0

    def acquire(self, use: Use, pages: int) -> None:
        buffer = self.pool.acquire(pages * PAGE_BYTES - 7, use)
        start, stop = span(buffer)
        assert start % PAGE_BYTES == 0
        assert set(buffer.after) >= {f for a, b, f in self.left if not f.happened and a < stop and start < b}
        self.serial += 1
        buffer.memory.fill_(self.serial % 251)
        self.acquired[buffer] = use, pages

    def release(self, buffer: Buffer, *flags: Flag) -> None:
        assert bool((buffer.memory == buffer.memory[0]).all()), "somebody else wrote to it"
        del self.acquired[buffer]
        self.left += [(*span(buffer), flag) for flag in flags]
        self.pool.release(buffer, *flags)

    @rule(data=st.data())
    def acquire_one(self, data: st.DataObject) -> None:
        if rest := self.limits - Counter(self.acquired.values()):
            self.acquire(*data.draw(st.sampled_from(sorted(rest))))

    @rule(use=st.sampled_from([Use.SWAP, Use.GRADIENT]), backwards=st.booleans())
    def acquire_all(self, use: Use, backwards: bool) -> None:  # noqa: FBT001
        rest = sorted((self.limits - Counter(self.acquired.values())).elements(), reverse=backwards)
        for each, pages in rest:
            if each is use:
                self.acquire(each, pages)

    @rule(pages=st.integers(1, 30))
    def lend_state(self, pages: int) -> None:
        if pages := min(pages, self.state_pages):
            self.acquire(Use.STATE, pages)
            self.state_pages -= pages

    @rule(data=st.data(), done=st.booleans())
    def return_one(self, data: st.DataObject, done: bool) -> None:  # noqa: FBT001
        if held := [b for b, (use, _) in self.acquired.items() if use is not Use.STATE]:
            flag = Flag()
            flag.happened = done
            self.release(data.draw(st.sampled_from(held)), flag)

    @rule(use=st.sampled_from([Use.SWAP, Use.GRADIENT]))
    def return_all(self, use: Use) -> None:
        for buffer in [b for b, (each, _) in self.acquired.items() if each is use]:
            self.release(buffer)

    @rule()
    def finish_copies(self) -> None:
        for _, _, flag in self.left:
            flag.happened = True
        self.left.clear()

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.allocated_bytes == sum(self.streams.pinned.values()) <= self.pool.budget_bytes
            assert self.pool.acquired_bytes == sum(buffer.nbytes for buffer in self.acquired)
            for use in Use:
                assert self.pool.acquired_for(use) == sum(
                    b.nbytes for b, (each, _) in self.acquired.items() if each is use
                )
            assert all(a[1] <= b[0] for a, b in pairwise(sorted(map(span, self.acquired))))

    def teardown(self) -> None:
        """Whatever is held: the rest can be acquired. And steps that repeat map nothing any more."""
        if not hasattr(self, "pool"):
            return
        self.acquire_all(Use.SWAP, backwards=False)
        self.acquire_all(Use.GRADIENT, backwards=True)
        self.accounts_agree()
        self.finish_copies()
        sizes = []
        for _ in range(3):
            for use in (Use.GRADIENT, Use.SWAP):
                self.return_all(use)
                self.acquire_all(Use.GRADIENT if use is Use.SWAP else use, backwards=False)
            self.return_all(Use.GRADIENT)
            self.acquire_all(Use.SWAP, backwards=False)
            sizes.append(self.pool.allocated_bytes)
        assert sizes[1] == sizes[2]
        self.return_all(Use.SWAP)
        assert not +self.pool._suballocator.opened
        self.pool.close()
        assert not self.streams.pinned
        self.streams.close()


def test_what_was_reserved_comes_whoever_holds_what(no_leaks: None) -> None:
    run_machine(
        SharingMachine,
        settings=settings(max_examples=150, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]),
    )


def shared(budget_pages: int) -> Pool:
    """Return a pool of two transfers of four pages each, and three gradients of two that are promised."""
    pool = pool_of(PoolClass(nbytes=4 * PAGE_BYTES, count=2), budget_bytes=budget_pages * PAGE_BYTES)
    pool.promise([PoolClass(nbytes=2 * PAGE_BYTES, count=3)], Use.GRADIENT)
    assert pool.allocated_bytes == 8 * PAGE_BYTES
    return pool


def test_gradients_are_in_idle_buffers_of_transfers() -> None:
    pool = shared(budget_pages=22)
    gradients = [pool.acquire(5000, Use.GRADIENT) for _ in range(3)]
    assert pool.allocated_bytes == 8 * PAGE_BYTES
    assert pool.acquired_bytes == pool.acquired_for(Use.GRADIENT) == 6 * PAGE_BYTES
    assert len({gradient.block for gradient in gradients}) == 2
    transfers = [pool.acquire(4 * PAGE_BYTES, Use.SWAP) for _ in range(2)]
    assert pool.allocated_bytes == 16 * PAGE_BYTES
    for buffer in (*gradients, *transfers):
        pool.release(buffer)
    for _ in range(3):
        transfers = [pool.acquire(4 * PAGE_BYTES, Use.SWAP) for _ in range(2)]
        gradients = [pool.acquire(5000, Use.GRADIENT) for _ in range(3)]
        assert pool.allocated_bytes == 16 * PAGE_BYTES == pool.high_water_bytes + 2 * PAGE_BYTES
        for buffer in (*transfers, *gradients):
            pool.release(buffer)
    pool.close()


@pytest.mark.parametrize(("budget_pages", "to_come_pages"), [(14, 0), (17, 0), (22, 5)])
def test_without_budget_to_spare_nothing_is_shared(budget_pages: int, to_come_pages: int) -> None:
    pool = shared(budget_pages)
    pool.keep_free(lambda: to_come_pages * PAGE_BYTES)
    gradients = [pool.acquire(2 * PAGE_BYTES, Use.GRADIENT) for _ in range(3)]
    assert not any(gradient.block for gradient in gradients)
    assert pool.allocated_bytes == 14 * PAGE_BYTES
    pool.close()


def test_what_state_is_to_come_is_asked_once_for_all_free_buffers_of_a_class() -> None:
    """The answer takes a look at each parameter, and gradients come one after the other."""
    pool = pool_of(PoolClass(nbytes=4 * PAGE_BYTES, count=6), budget_bytes=40 * PAGE_BYTES)
    asked = []

    def to_come() -> int:
        asked.append(pool.acquired_bytes)
        return 30 * PAGE_BYTES

    pool.keep_free(to_come)
    gradients = [pool.acquire(2 * PAGE_BYTES, Use.GRADIENT) for _ in range(3)]
    assert not any(gradient.block for gradient in gradients)
    assert len(asked) <= len(gradients)
    pool.close()


def test_a_gap_between_gradients_is_found_again() -> None:
    pool = pool_of(PoolClass(nbytes=8 * PAGE_BYTES, count=1), budget_bytes=60 * PAGE_BYTES)
    parts = [pool.acquire(2 * PAGE_BYTES, Use.GRADIENT) for _ in range(4)]
    assert len({part.block for part in parts}) == 1
    assert pool.acquire(PAGE_BYTES, Use.GRADIENT).block is None, "it is full"
    pool.release(parts[1])
    pool.release(parts[2])
    assert pool.acquire(8 * PAGE_BYTES, Use.GRADIENT).block is None, "no gap is so large"
    again = pool.acquire(4 * PAGE_BYTES, Use.GRADIENT)
    assert again.block is parts[0].block
    assert span(again) == (span(parts[1])[0], span(parts[2])[1])
    pool.close()


def test_promises_are_held_but_not_taken() -> None:
    pool = shared(budget_pages=20)
    assert pool.held_for(Use.GRADIENT) == 6 * PAGE_BYTES
    assert pool.room_bytes == 6 * PAGE_BYTES
    assert pool.allocated_bytes == 8 * PAGE_BYTES
    own = pool.acquire(4 * PAGE_BYTES, Use.STATE)
    assert pool.room_bytes == 2 * PAGE_BYTES
    pool.discard(own)
    pool.close()


def test_a_buffer_is_for_transfers_again_behind_the_copies_of_its_suballocations() -> None:
    pool = shared(budget_pages=22)
    first, second = Flag(), Flag()
    a, b = (pool.acquire(2 * PAGE_BYTES, Use.GRADIENT) for _ in range(2))
    assert a.block is b.block
    pool.release(a, first)
    again = pool.acquire(2 * PAGE_BYTES, Use.GRADIENT)
    assert span(again) == span(a)
    assert again.after == (first,)
    pool.release(again, first)
    pool.release(b, second)
    held = [pool.acquire(4 * PAGE_BYTES, Use.SWAP) for _ in range(2)]
    assert [buffer.after for buffer in held] == [(), (first, second)]
    pool.close()


def test_a_buffer_that_copies_still_touch_is_opened_behind_them_where_no_other_is_left() -> None:
    pool = shared(budget_pages=40)
    first, second = Flag(), Flag()
    early, late = (pool.acquire(4 * PAGE_BYTES, Use.SWAP) for _ in range(2))
    pool.release(early, first)
    pool.release(late, second)
    second.happened = True
    gradients = [pool.acquire(4 * PAGE_BYTES, Use.GRADIENT) for _ in range(2)]
    assert [gradient.block for gradient in gradients] == [late, early]
    assert [gradient.after for gradient in gradients] == [(), (first,)]
    assert pool.allocated_bytes == 8 * PAGE_BYTES
    pool.close()


def trained_within(host_budget: str, parts: int) -> tuple[list[float], dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return losses, weights and every step's counts of a training whose transfers are larger than its gradients."""
    tencache_fx.configure(host_budget=host_budget)
    model = tencache_fx.offload(network())
    run = compiled(model, "3MB")
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    losses, counts = [], []
    for step in range(6):
        for part in range(parts):
            tokens = batch(step * parts + part, rows=512)
            loss = nn.functional.cross_entropy(run(tokens), (tokens * 7 + 3) % 128)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        counts.append(engines()[0].stats.take())
    found = losses, weights(model), counts
    torch.compiler.reset()
    tencache_fx.close()
    return found


@pytest.mark.parametrize(("parts", "apart_bytes"), [(1, 6_979_584), (2, 7_667_712)])
def test_training_takes_little_more_memory_than_it_ever_uses(parts: int, apart_bytes: int) -> None:
    """`apart_bytes` are parameters, state, transfers and gradients (of one part added to the others'), each apart."""
    losses, after, counts = trained_within("64MiB", parts)
    assert losses[-1] < losses[0]
    assert counts[-1]["host_pool_bytes"] < 1.05 * counts[-1]["host_high_water_bytes"]
    assert len({each["host_pool_bytes"] for each in counts}) == 1, "the first step maps everything"
    apart_losses, apart_after, apart_counts = trained_within(str(apart_bytes), parts)
    assert apart_losses == losses
    assert all(torch.equal(apart_after[name], value) for name, value in after.items())
    assert counts[-1]["host_pool_bytes"] < apart_counts[-1]["host_pool_bytes"] <= apart_bytes


def test_late_copies_and_dirty_buffers_change_nothing(new_engine: Callable[..., object]) -> None:
    losses, after, _ = trained_within("64MiB", parts=2)
    install_engine(new_engine(streams=FaultyCpuStreams(delay_s=0.002)))
    late_losses, late_after, _ = trained_within("64MiB", parts=2)
    assert late_losses == losses
    assert all(torch.equal(late_after[name], value) for name, value in after.items())


def test_buffers_that_are_there_are_reserved_without_room_for_others() -> None:
    """Beside a gradient in a part of one, and other memory in the rest of the budget."""
    classes = [PoolClass(nbytes=2 * PAGE_BYTES, count=1)]
    pool = pool_of(*classes, budget_bytes=4 * PAGE_BYTES)
    assert pool.acquire(PAGE_BYTES, Use.GRADIENT).block is not None
    pool.acquire(2 * PAGE_BYTES, Use.STATE)
    assert pool.allocated_bytes == pool.budget_bytes
    pool.reserve(classes, Use.SWAP)
    with pytest.raises(BudgetError, match="1 more pinned buffers"):
        pool.reserve([PoolClass(nbytes=2 * PAGE_BYTES, count=2)], Use.SWAP)
