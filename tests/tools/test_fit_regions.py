"""What the calls of several regions leave on the device for their backwards, as a forecast counts it."""

from dataclasses import replace

import pytest
from captured import read_problem

from tencache_fx.fitting.estimate import RegionPlan
from tencache_fx.fitting.several_regions import left_bytes, plan_several
from tencache_fx.options import Options
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.search import policy_floor_bytes


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("calls", [2, 5])
@pytest.mark.parametrize("name", ["llama", "recommender", "vit"])
def test_no_call_leaves_more_than_the_others_count_on(name: str, calls: int, share: float) -> None:
    alone = replace(read_problem(name), external_bytes=0, boundary_bytes=0).within(host_bytes=1 << 40)
    least_bytes, most_bytes = policy_floor_bytes(alone, "joint"), calls * int(live_bytes(alone).max())
    budget = least_bytes + int(share * (most_bytes - least_bytes))
    options = Options.suppose({"device_budget": budget, "host_budget": "60GiB"}, device_bytes=most_bytes)
    (region,) = plan_several([RegionPlan(captured=alone, planned=None, calls=calls)], options)
    assert region.planned is not None, region.refusal
    problem, plan = region.planned
    held_bytes = calls * left_bytes(problem, plan)
    assert held_bytes <= budget
    assert held_bytes - held_bytes // calls <= problem.external_bytes
    assert plan.forecast.peak_bytes <= budget
