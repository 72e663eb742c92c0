"""When gradients are stored: as a walk from barrier to barrier does it, one at a time."""

import numpy as np
from hypothesis import given
from outcomes import Outcomes
from problems import links, make_region, make_storage, moving_problems

from tencache_fx.planning.liveness import least_bytes, live_bytes
from tencache_fx.planning.parameter_schedule import (
    _departures,
    _earliest_freed,
    keep_resident,
    schedule_parameters,
    updating_bytes,
    with_parameters_scheduled,
)
from tencache_fx.planning.problem import Kind, Tier
from tencache_fx.planning.schedule import Barriers, copy_times

_SEEN = Outcomes()


def _walk(problem, barriers, memory, limit, starts_ns):
    """Return from where on each gradient is free: a barrier that its copy lands by, or sooner for want of room."""
    link_free, freed = 0.0, []
    for storage in sorted((s for s in problem.storages if s.kind is Kind.STORED), key=lambda s: (s.death, s.name)):
        link_free = max(starts_ns[storage.death], link_free) + copy_times(problem.links, storage.nbytes, Tier.HOST).out
        gone, end = _earliest_freed(problem, barriers, storage)
        memory[storage.death : gone] += storage.nbytes
        while gone < end and starts_ns[gone] < link_free:
            following = min(barriers.freed_from(gone + 1), end)
            if (memory[gone:following] + storage.nbytes > limit).any():
                _SEEN.note("held up")
                break
            memory[gone:following] += storage.nbytes
            gone = following
            _SEEN.note("on its way")
        freed.append((storage.name, gone))
    return freed


@_SEEN.reaching(0.03, "held up")
@given(moving_problems())
def test_gradients_leave_as_in_a_walk_from_barrier_to_barrier(problem):
    limit = problem.budgets.device_bytes or 1 << 62
    barriers, memory = Barriers(problem), least_bytes(problem)
    starts_ns = np.concatenate([[0.0], np.cumsum([op.duration_ns for op in problem.ops])]).tolist()
    walked = memory.copy()
    expected = _walk(problem, barriers, walked, limit, starts_ns)
    transfers = _departures(problem, barriers, memory, limit, starts_ns)
    assert [(transfer.name, transfer.freed_at) for transfer in transfers] == expected
    assert (memory == walked).all()


def test_an_update_reads_the_weight_where_the_master_is_what_that_lacks():
    """Of 8 bf16 elements: gradient, weight, and state once in and once out; whole on the device."""
    given = make_storage("w", 16, [0], kind=Kind.FETCHED, parameter="w")
    for saved_bytes, expected in ((0, 2 * 16 + 2 * 96), (15, 2 * 16 + 2 * 81 + 16)):
        stored = make_storage(
            "g", 16, [1], kind=Kind.STORED, parameter="w", state_bytes=96, state_saved_bytes=saved_bytes
        )
        problem = make_region([1, 1], 1, given, stored)
        assert updating_bytes(problem) == expected
        here = keep_resident(problem, ["w"], ["w"])
        assert here.external_bytes == problem.external_bytes + 96
        assert updating_bytes(here) == 0


def test_loads_that_take_longer_than_kernels_are_not_issued_to_queue_up():
    """20 layers forward and 20 backward, each 30 ns on the link and 10 in kernels: at most two weights are there."""
    weights = [
        make_storage(f"w{layer}", 30, [layer], kind=Kind.FETCHED, parameter=f"w{layer % 20}") for layer in range(40)
    ]
    problem = make_region([10] * 40, 20, *weights, links=links())
    loads = schedule_parameters(problem, lead=0.0)
    held = live_bytes(with_parameters_scheduled(problem, loads)).tolist()
    assert held == ([60] * 19 + [30]) * 2
