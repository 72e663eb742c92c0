"""Swap points by themselves: what they count as on the device though it could be away."""

import itertools
import sys
import threading
from types import MappingProxyType

import pytest
import torch
from conftest import collect
from harness import faulty_engine
from torch import Tensor

from tencache_fx.errors import BudgetError, TencacheError, UsageError
from tencache_fx.planning.problem import Tier
from tencache_fx.planning.step import FRUGAL, StepSchedule, SwapKey
from tencache_fx.runtime.engine_registry import swap_points
from tencache_fx.runtime.streams import Lane
from tencache_fx.runtime.swap_points import SwapPoints
from tencache_fx.units import PAGE_BYTES

BYTES = 1 << 16
SAVED = SwapKey(0, 0, "saved")
LEAVING = StepSchedule(away=MappingProxyType({SAVED: Tier.HOST}), deferred=frozenset((SAVED,)))
"""It is copied out, and its bytes are to be freed at a point that does not come."""


def save(points: SwapPoints, call: int = 0) -> Tensor:
    """Run a forward that saves one storage; return its handle."""
    points.begin(0, call, backward=False)
    source = torch.ones(BYTES // 4)
    handle = points.offload(source, Tier.HOST, "saved")
    points.release(handle, source)
    points.end()
    return handle


def bring_back(points: SwapPoints, handle: Tensor, call: int = 0) -> Tensor:
    points.begin(0, call, backward=True)
    found = points.wait(points.prefetch(handle))
    points.end()
    return found


def keeping(*calls: int) -> StepSchedule:
    return StepSchedule(kept=frozenset(SwapKey(0, call, "saved") for call in calls))


def test_what_stays_counts_until_its_backward_asks_for_it_or_it_is_dropped() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0, 1))
        handles = [save(points, call) for call in (0, 1, 2)]
        assert points.extra_bytes == 2 * BYTES, "the third is away"
        assert bring_back(points, handles[1], 1).eq(1).all()
        assert points.extra_bytes == BYTES
        del handles
        collect()
        assert points.extra_bytes == 0


def test_what_stays_leaves_when_a_schedule_says_so_and_counts_no_more() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0))
        handle = save(points)
        assert points.extra_bytes == BYTES
        points.follow(FRUGAL)
        assert points.extra_bytes == 0
        assert bring_back(points, handle).eq(1).all()


def test_what_found_no_room_is_counted_while_another_thread_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    interval, over, failures = sys.getswitchinterval(), threading.Event(), []
    with faulty_engine(host_budget_bytes=PAGE_BYTES) as engine:
        points = swap_points(engine)
        monkeypatch.setattr(engine, "offload", refuse)

        def offload() -> None:
            try:
                for call in itertools.cycle(range(256)):
                    handles[call] = save(points, call)
                    if over.is_set():
                        return
            except Exception as error:
                failures.append(error)

        handles: dict[int, Tensor] = {}
        thread = threading.Thread(target=offload)
        sys.setswitchinterval(1e-6)
        try:
            thread.start()
            for _ in range(5000):
                points.stranded.bytes_beside((0, 0))
        finally:
            sys.setswitchinterval(interval)
            over.set()
            thread.join()
        assert not failures
        assert points.stranded.bytes_beside((1, 0)) == BYTES * len(handles)


def refuse(*_args: object, **_more: object) -> Tensor:
    raise BudgetError("host memory is full")


def test_room_is_made_by_the_oldest_that_stay_and_no_more_of_them_than_it_takes() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0, 1, 2, 3))
        handles = [save(points, call) for call in range(4)]
        assert points.make_room(BYTES + 1, (0, 0)) == 2 * BYTES, "of calls 1 and 2"
        assert points.extra_bytes == 2 * BYTES
        assert engine.stats.take()["offloads"] == 2
        assert points.make_room(1 << 30, (0, 3)) == BYTES, "of call 0: that of the call about to run stays"
        assert points.make_room(1 << 30, (0, 3)) == 0
        for call in (3, 2, 1, 0):
            assert bring_back(points, handles[call], call).eq(1).all()
        assert points.extra_bytes == 0


def donate(points: SwapPoints, source: Tensor, call: int = 0) -> Tensor:
    """Run a forward that saves its input; return the handle."""
    points.begin(0, call, backward=False)
    handle = points.offload(source, Tier.HOST, "saved")
    points.release(handle, source, donated=True)
    points.end()
    return handle


def test_a_donated_input_that_stays_counts_once_its_caller_has_dropped_it() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0))
        source = torch.ones(BYTES // 4)
        handle = donate(points, source)
        assert points.extra_bytes == 0, "it would be there if it left, too"
        del source
        assert points.extra_bytes == BYTES
        assert bring_back(points, handle).eq(1).all()
        assert points.extra_bytes == 0


def test_an_input_that_was_donated_to_two_calls_counts_once() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0, 1))
        source = torch.ones(BYTES // 4)
        handles = [donate(points, source, call) for call in (0, 1)]
        assert points.extra_bytes == 0
        del source
        assert points.extra_bytes == BYTES
        for call in (1, 0):
            assert bring_back(points, handles[call], call).eq(1).all()
            assert points.extra_bytes == BYTES * call


def test_a_donated_input_on_its_way_out_counts_once_its_caller_has_dropped_it() -> None:
    with faulty_engine(delay_s=0.05) as engine:
        points = swap_points(engine)
        points.follow(LEAVING)
        source = torch.ones(BYTES // 4)
        handle = donate(points, source)
        assert points.extra_bytes == 0
        del source
        assert points.extra_bytes == BYTES, "the copy under way holds it no longer than the plan does"
        engine.streams.record(Lane.OUT).synchronize()
        assert points.extra_bytes == BYTES
        assert bring_back(points, handle).eq(1).all()


def test_bytes_of_a_closed_engine_are_not_counted() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(LEAVING)
        source = torch.ones(BYTES // 4)
        handle = donate(points, source)
        engine.close()
        with pytest.raises(TencacheError, match="is closed; compile the model again"):
            assert points.extra_bytes
        del handle


def test_a_donated_input_that_is_asked_back_before_it_has_left_is_no_callers() -> None:
    with faulty_engine(delay_s=0.05) as engine:
        points = swap_points(engine)
        points.follow(LEAVING)
        source = torch.ones(BYTES // 4)
        address, handle = source.data_ptr(), donate(points, source)
        del source
        found = bring_back(points, handle)
        assert found.data_ptr() == address
        assert found.eq(1).all()
        assert not points.shared


def test_that_a_caller_keeps_a_donated_input_counts_for_other_steps_only_if_their_order_is_known() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0))
        for points.in_known_order in (False, True):
            points.begin(0, 0, backward=False)
            source = torch.ones(BYTES // 4)
            handle = points.offload(source, Tier.HOST, "saved")
            points.release(handle, source, donated=True)
            points.end()
            found = bring_back(points, handle)
            assert found.data_ptr() != source.data_ptr(), "the caller's is not written over"
            assert bool(points.shared) == points.in_known_order


def test_a_storage_of_an_abandoned_round_counts_no_more_once_another_has_its_place() -> None:
    """Somebody may hold its graph; no point frees it, so that it is there like all that others hold."""
    with faulty_engine() as engine:
        points = swap_points(engine)
        points.follow(keeping(0))
        first = save(points)
        second = save(points)
        assert points.extra_bytes == BYTES
        del first
        collect()
        assert points.extra_bytes == BYTES
        del second
        collect()
        assert points.extra_bytes == 0


def test_a_handle_whose_memory_a_hook_has_freed_is_refused() -> None:
    with faulty_engine() as engine:
        points = swap_points(engine)
        freed = torch.zeros(1, dtype=torch.int64)
        freed.untyped_storage().resize_(0)
        points.begin(0, 0, backward=True)
        with pytest.raises(UsageError, match="cannot prefetch a tensor"):
            points.prefetch(freed)
        assert points.take(freed) is None
        points.end()
