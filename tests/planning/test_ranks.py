"""A captured region as it would be among other numbers of ranks."""

from dataclasses import replace
from typing import Any

import pytest
from drawn import drawn_cases
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from problems import trained_offloaded

from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.coarsening import coarsen
from tencache_fx.planning.evaluation import Candidate, Evaluator
from tencache_fx.planning.planner import floor_bytes, least_step_ns
from tencache_fx.planning.problem import Budgets, CollectiveKind, Kind, Problem, Recipe, Step, Storage
from tencache_fx.planning.ranks import Cluster, find_scaling, ranks_of, spread
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_bound import RecomputeBound
from tencache_fx.planning.search import plan_region
from tencache_fx.planning.verify import verify_plan

MIB = 1 << 20


def cluster(ranks: int, **changes: Any) -> Cluster:
    given = {"per_node": 8, "latency_ns": 10, "bytes_per_s": 10**12, "network_bytes_per_s": 2 * 10**10}
    return Cluster(ranks=ranks, **{**given, **changes})


def region(count: int = 6, nbytes: int = MIB) -> Problem:
    """Equal parameters, each read in the forward and in the backward, and their gradients."""
    problem = trained_offloaded(count, nbytes)
    budgets = Budgets(device_bytes=None, host_bytes=100 * MIB, host_taken_bytes=count * 8 * nbytes)
    return replace(problem, budgets=budgets)


def moving(problem: Problem, kind: Kind) -> list[int]:
    return [storage.nbytes for storage in problem.storages if storage.kind is kind]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_has_one_part_and_gathers_the_rest(ranks: int) -> None:
    before = region()
    problem = spread(before, cluster(ranks))
    problem.check()
    for each in (*problem.storages, *problem.collectives):
        each.check()
    assert ranks_of(before) == 1
    assert ranks_of(problem) == ranks
    assert (before.sums_stay, problem.sums_stay) == (True, False)
    assert moving(problem, Kind.FETCHED) == [MIB // ranks] * 12
    assert moving(problem, Kind.STORED) == [MIB // ranks] * 6
    assert {s.state_bytes for s in problem.storages if s.kind is Kind.STORED} == {6 * MIB // ranks}
    whole = [s for s in problem.storages if s.kind is Kind.ACTIVATION]
    assert [s.nbytes for s in whole] == [MIB] * 18
    kinds = [each.kind for each in problem.collectives]
    assert kinds.count(CollectiveKind.ALL_GATHER) == 12
    assert kinds.count(CollectiveKind.REDUCE_SCATTER) == 6
    assert {each.ranks for each in problem.collectives} == {ranks}
    problem_of_plan, plan = plan_region(problem, "joint")
    verify_plan(problem_of_plan, plan)
    assert plan.forecast.collective_ns == sum(each.duration_ns for each in problem.collectives)


def test_what_was_recorded_on_several_ranks_is_scaled_as_it_is() -> None:
    two = spread(region(), cluster(2))
    four = spread(two, cluster(4, latency_ns=70))
    assert ranks_of(four) == 4
    direct = spread(region(), cluster(4, latency_ns=70))
    assert sorted(moving(four, Kind.FETCHED)) == sorted(moving(direct, Kind.FETCHED))
    assert [each.duration_ns for each in four.collectives] == [each.duration_ns for each in direct.collectives]
    assert [each.begin for each in four.collectives] == [each.begin for each in two.collectives]
    assert four.budgets == direct.budgets
    one = spread(two, cluster(1))
    assert moving(one, Kind.FETCHED) == [MIB] * 12
    assert {each.duration_ns for each in one.collectives} == {0}


def test_ranks_share_what_a_node_has() -> None:
    before = region(nbytes=8 * MIB)
    before = replace(before, links=replace(before.links, host_peak_bytes_per_s=10**11))
    rate = before.links.host_bytes_per_s
    for ranks, here in ((1, 1), (4, 4), (8, 8), (16, 8), (64, 8)):
        problem = spread(before, cluster(ranks))
        assert problem.links.host_bytes_per_s == rate // here
        assert problem.links.host_peak_bytes_per_s == before.links.host_peak_bytes_per_s // here
        taken_bytes = problem.budgets.host_taken_bytes
        assert taken_bytes == 384 * MIB // ranks
        assert problem.budgets.host_bytes == 484 * MIB // here - taken_bytes


def test_a_collective_takes_as_long_as_the_slower_of_link_and_network() -> None:
    one_node, two_nodes = (spread(region(), cluster(ranks)).collectives[0] for ranks in (8, 16))
    assert one_node.duration_ns == 10 + MIB * 7 // 8 // 1000
    # half of it comes from the other node, over eight network links of 20 bytes a ns
    assert two_nodes.duration_ns == pytest.approx(20 + MIB / 2 / 160, abs=2)
    slow = spread(region(), cluster(16, bytes_per_s=10**10)).collectives[0]
    assert slow.duration_ns == 20 + MIB * 15 // 16 // 10


def test_a_parameter_too_small_for_so_many_parts_stays_whole() -> None:
    problem = spread(region(nbytes=256 << 10), cluster(4))
    assert moving(problem, Kind.FETCHED) == [64 << 10] * 12
    with pytest.raises(OptionError, match="none of its parameters are in host memory"):
        spread(region(nbytes=255 << 10), cluster(4))


def test_what_reads_a_parameter_that_only_the_forward_gathers_is_not_recomputed() -> None:
    problem = region()
    value = replace(problem.storages[0], name="v", kind=Kind.ACTIVATION, parameter="", uses=(Step(1), Step(8)))
    value = replace(value, birth=Step(1), death=Step(9), spillable=True)
    other = replace(value, name="u", uses=(Step(2), Step(8)), birth=Step(2))
    free = replace(
        problem.storages[3], uses=(Step(3),), birth=Step(3), death=Step(4), kind=Kind.ACTIVATION, parameter=""
    )
    storages = [s for s in problem.storages if s.parameter != "w2"]  # step 2 reads no parameter
    recipes = (Recipe(name="v", steps=(Step(1),)), Recipe(name="u", steps=(Step(2),)))
    problem = replace(problem, storages=(*storages, value, other, replace(free, name="f")), recipes=recipes)
    problem.check()
    assert [each.name for each in spread(problem, cluster(2)).recipes] == ["v", "u"]
    assert [each.name for each in spread(problem, cluster(1)).recipes] == ["v", "u"]
    early = (s for s in problem.storages if (s.parameter, s.birth) != ("w1", 10))
    problem = replace(problem, storages=tuple(early))
    assert [each.name for each in spread(problem, cluster(2)).recipes] == ["u"]


def products(count: int) -> Problem:
    """Parameters, each read by a product whose result is saved, and read in the middle of the backward."""
    problem = region(count)
    late = Step(problem.boundary + count // 2)
    saved = [
        Storage(
            name=f"y{k}",
            nbytes=3 * MIB,
            kind=Kind.ACTIVATION,
            birth=Step(k),
            death=Step(late + 1),
            uses=(Step(k), late),
            spillable=True,
        )
        for k in range(count)
    ]
    recipes = tuple(Recipe(name=each.name, steps=(each.birth,)) for each in saved)
    problem = replace(problem, storages=(*problem.storages, *saved), recipes=recipes)
    problem.check()
    return problem


def test_a_product_that_runs_again_reads_what_the_backward_gathers() -> None:
    """The parameter of step 1 is gathered at the end of the backward, and its product runs again in the middle."""
    problem = spread(products(6), cluster(2))
    whole = {s.name: s for s in problem.storages if s.name.endswith("whole") and s.birth < problem.boundary}
    late = {s.name: s for s in problem.storages if s.name.endswith("whole") and s.birth >= problem.boundary}
    before = next(s for s in whole.values() if Step(1) in s.uses and s.birth == Step(0) and s.death == Step(2))
    assert before.gathered_at in {s.birth for s in late.values()}
    after = recompute(problem, ["y1"])
    found = {s.name: s for s in after.storages}
    assert found[before.name] == before
    again = found[before.name + "#again"]
    shift = len(after.ops) - len(problem.ops)
    assert [after.ops[use].name for use in again.uses] == [problem.ops[1].name + "#again"]
    assert again.death == before.gathered_at + shift
    assert not again.spillable
    assert [each.duration_ns for each in after.collectives] == [each.duration_ns for each in problem.collectives]


@drawn_cases(60, suppress_health_check=list(HealthCheck))
@given(count=st.integers(2, 7), ranks=st.sampled_from((2, 8, 16)), more=st.integers(0, 6), data=st.data())
def test_bounds_hold_where_products_run_again(count: int, ranks: int, more: int, data: st.DataObject) -> None:
    problem = spread(products(count), cluster(ranks))
    problem = problem.within(device_bytes=floor_bytes(problem) + more * MIB)
    names = [each.name for each in problem.recipes if data.draw(st.booleans())]
    evaluator, base = Evaluator(problem), Candidate(policy="teraio")
    candidate = base.recomputing(names)
    after = evaluator.problem_for(candidate)
    after.check()
    for each in (*after.storages, *after.collectives):
        each.check()
    quick_ns = RecomputeBound(problem).least_ns(names)
    assert quick_ns <= least_step_ns(after) + 1
    costs = evaluator.evaluate(candidate).costs
    assert costs is None or quick_ns <= costs.step_ns
    coarse = coarsen(problem, 4)
    for each in recompute(coarse.problem, [recipe.name for recipe in coarse.problem.recipes]).storages:
        each.check()


@drawn_cases(60, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(1, 7),
    ranks=st.sampled_from((1, 2, 3, 8, 16, 512)),
    more_bytes=st.integers(0, 8 * MIB),
    rate=st.sampled_from((10**9, 10**12)),
)
def test_plans_for_any_number_of_ranks_hold(count: int, ranks: int, more_bytes: int, rate: int) -> None:
    problem = spread(region(count, 64 * MIB), cluster(ranks, bytes_per_s=rate))
    problem.check()
    problem = problem.within(device_bytes=floor_bytes(problem) + more_bytes)
    evaluator = Evaluator(problem)
    outcome = evaluator.evaluate(Candidate(policy="teraio"))
    assert outcome.plan is not None
    verify_plan(problem, outcome.plan)


def test_a_comparison_says_what_each_number_of_ranks_gains() -> None:
    problem = region(8, 64 * MIB)
    problem = problem.within(device_bytes=floor_bytes(problem) + 400 * MIB, host_bytes=10**10)
    found = find_scaling(problem, [cluster(ranks) for ranks in (1, 2, 8, 16)])
    assert [(point.ranks, point.nodes) for point in found.points] == [(1, 1), (2, 1), (8, 1), (16, 2)]
    assert [point.refusal for point in found.points] == [""] * 4
    one, *more = found.points
    assert one.collective_ns == 0
    assert all(point.collective_ns > 0 for point in more)
    assert found.points[2].updated_here > one.updated_here  # a part takes less room
    assert found.points[2].step_ns < one.step_ns
    assert found.points[2].host_bytes < one.host_bytes
    tight = problem.within(device_bytes=floor_bytes(problem))
    with pytest.raises(BudgetError):
        plan_region(spread(tight, cluster(4)), "joint")
    (point,) = find_scaling(tight, [cluster(4)]).points
    assert "device" in point.refusal
    assert point.step_ns == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 12}, "12 ranks do not fill nodes of 8"),
        ({"ranks": 0}, "0 ranks do not fill"),
        ({"ranks": 8, "bytes_per_s": 0}, "sends 0 bytes per second"),
    ],
)
def test_clusters_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        cluster(**changes)


def test_groups_of_several_sizes_are_refused() -> None:
    two = spread(region(), cluster(2))
    first, *others = two.collectives
    with pytest.raises(OptionError, match="groups of 2, 4 ranks"):
        ranks_of(replace(two, collectives=(replace(first, ranks=4), *others)))
