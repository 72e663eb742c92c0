"""Parameters on disk: their loads take a read and a copy in, and begin as much earlier."""

from dataclasses import replace

import pytest
from problems import links, make_region, make_storage

from tencache_fx.errors import InvariantError
from tencache_fx.planning.parameter_schedule import first_parameters, keep_resident
from tencache_fx.planning.plan import CopyIn, Transfer
from tencache_fx.planning.planner import plan_transfers
from tencache_fx.planning.problem import PASSING_BUFFERS, Budgets, Kind, Problem, Step, Storage, Tier
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.simulator import simulate
from tencache_fx.planning.verify import verify_plan
from tencache_fx.serialization import from_json, to_json

COUNT = 8


def weight(index: int, tier: Tier = Tier.NVME, nbytes: int = 100) -> Storage:
    return make_storage(f"w{index}", nbytes, [index], kind=Kind.FETCHED, parameter=f"w{index}", tier=tier)


def region(*tiers: Tier, device_bytes: int | None = 500) -> Problem:
    """Ops of 200 ns that read a weight each: to read it from disk takes 200 ns, to copy it in 100."""
    storages = [weight(index, tier) for index, tier in enumerate(tiers)]
    budgets = Budgets(device_bytes=device_bytes, host_bytes=0)
    return make_region([200] * len(tiers), len(tiers), *storages, links=links(), budgets=budgets)


def load(index: int, at: int = 0, tier: Tier = Tier.NVME) -> Transfer:
    back = CopyIn(prefetch_at=Step(at), needed_at=Step(index))
    return Transfer(name=f"w{index}", nbytes=100, tier=tier, back=back)


def test_a_load_from_disk_is_read_and_then_copied_in() -> None:
    problem = region(*[Tier.NVME] * COUNT)
    replay = simulate(problem, [load(index) for index in range(COUNT)])
    for index, times in enumerate(replay.transfers):
        assert times.read_end_ns == 200 * (index + 1)
        assert (times.in_start_ns, times.in_end_ns) == (times.read_end_ns, times.read_end_ns + 100)
        assert times.written_ns == times.write_start_ns == 0
    assert (replay.disk_read_bytes, replay.disk_write_bytes, replay.h2d_bytes) == (100 * COUNT, 0, 100 * COUNT)
    assert replay.stall_in_ns == 300  # the first; then the disk is as fast as the ops


def test_no_more_are_on_their_way_than_there_are_buffers() -> None:
    problem = region(*[Tier.NVME] * COUNT)
    slow = replace(problem, links=links(h2d_bytes_per_s=10**8, h2d_duplex_bytes_per_s=10**8))
    found = simulate(slow, [load(index) for index in range(COUNT)]).transfers
    for times in found:
        ways = sum(each.read_start_ns <= times.read_start_ns < each.in_end_ns for each in found)
        assert ways <= PASSING_BUFFERS
    assert found[PASSING_BUFFERS].read_start_ns == found[0].in_end_ns


def test_loads_begin_earlier_by_what_the_disk_takes() -> None:
    plans = {}
    for tier in (Tier.HOST, Tier.NVME):
        problem = region(*[Tier.HOST] * 5, tier, *[Tier.HOST] * 2, device_bytes=None)
        plans[tier] = plan_transfers(problem, "none", 0.0)
        verify_plan(problem, plans[tier])
        assert plans[tier].forecast.disk_read_bytes == (100 if tier is Tier.NVME else 0)
        assert plans[tier].forecast.disk_write_bytes == plans[tier].forecast.host_bytes == 0
    begins = {t: next(each.prefetch_at for each in plan.transfers if each.name == "w5") for t, plan in plans.items()}
    assert begins[Tier.NVME] < begins[Tier.HOST]
    assert plans[Tier.NVME].forecast.stall_in_ns <= plans[Tier.HOST].forecast.stall_in_ns


def test_those_on_disk_stay_on_the_device_first() -> None:
    problem = region(*[Tier.HOST] * 6, Tier.NVME, Tier.NVME)
    assert first_parameters(problem, 0.25) == ("w6", "w7")
    assert first_parameters(problem, 0.5) == ("w6", "w7", "w0", "w1")
    plan = make_plan(problem, "joint")
    verify_plan(keep_resident(problem, plan.resident), plan)
    assert {"w6", "w7"} <= set(plan.resident)


def test_a_plan_says_where_a_parameter_is() -> None:
    problem = region(Tier.HOST, Tier.NVME, device_bytes=None)
    plan = plan_transfers(problem, "none", 0.0)
    assert from_json(Problem, to_json(problem)) == problem
    for index, tier in ((0, Tier.NVME), (1, Tier.HOST)):
        wrong = tuple(replace(each, tier=tier) if each.name == f"w{index}" else each for each in plan.transfers)
        with pytest.raises(InvariantError, match="breaks the rule tier .*the parameter is in "):
            verify_plan(problem, replace(plan, transfers=wrong))
    on_host, loads = region(Tier.HOST, Tier.HOST, device_bytes=None), tuple(load(k, 0, Tier.HOST) for k in (0, 1))
    with pytest.raises(InvariantError, match="100 bytes predicted over disk read"):
        verify_plan(on_host, replace(plan, transfers=loads))
    with pytest.raises(ValueError, match="no rate of reading one"):
        replace(problem, links=links(disk_read_bytes_per_s=0)).check()
    with pytest.raises(ValueError, match="comes from the device"):
        weight(0, Tier.DEVICE).check()
