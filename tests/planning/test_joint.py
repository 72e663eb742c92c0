"""The joint policy: whole trainings in which some of what was saved is computed again, and its choice on problems."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from drawn import drawn_cases
from harness import EAGER, compiled, entering_bytes, faulty_engine, planned_floor, problems_of, train
from hypothesis import HealthCheck, given
from outcomes import Outcomes
from problems import PLENTY, choose_recomputed, links, offloaded_weights, transformer
from programs import tight_problems, transformer_recipes
from rates import pretend_slow_links
from work import counted_calls
from zoo import Case, Gpt2, text

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import first_parameters, keep_resident
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.recompute_search import recomputed_for
from tencache_fx.planning.search import make_plan, plan_region
from tencache_fx.planning.tuning import TUNING
from tencache_fx.planning.verify import verify_plan
from tencache_fx.records import RegionRecord
from tencache_fx.region import candidate, compilation
from tencache_fx.region.joint_split import split_joint

Measure = Callable[[Problem], int]
JOINT = {**EAGER, "policy": "joint", "calibrate": True}
DECODER = Case(name="decoder", build=lambda: Gpt2(layers=3), batch=text)
SEEN = Outcomes()
ODD_BYTES = 1024  # scalars of autograd and of the loop, outside the region


@pytest.fixture
def slow_links() -> None:
    pretend_slow_links()


@pytest.fixture(scope="module")
def decoder() -> tuple[Problem, int]:
    """The decoder's problem, and a budget a bit above the floor of swaps alone."""
    (problem,) = problems_of(DECODER)
    peak, floor = int(live_bytes(problem).max()), planned_floor(problem)
    return problem, floor + (peak - floor) // 8


def decided() -> RegionRecord:
    return tencache_fx.regions()[-1]


def names_in(record: RegionRecord, phase: str) -> list[str]:
    return [row.name for listing in record.listings if listing.phase == phase for row in listing.nodes]


def returned_by_forward(record: RegionRecord) -> set[str]:
    (forward,) = [listing for listing in record.listings if listing.phase == "forward"]
    return {name for row in forward.nodes if row.op == "output" for name in row.inputs}


def test_a_decoder_trains_the_same_with_some_of_it_computed_again(
    decoder: tuple[Problem, int], slow_links: None
) -> None:
    plain = train(DECODER, lambda model: compiled(model, EAGER), 4)
    torch.compiler.reset()
    with faulty_engine():
        ours = train(DECODER, lambda model: compiled(model, {**JOINT, "device_budget": decoder[1]}), 4)
        record = decided()
    assert torch.equal(ours.losses, plain.losses)
    for mine, other in ((ours.gradients, plain.gradients), (ours.state, plain.state)):
        assert not [name for name in other if not torch.equal(mine[name], other[name])]
    check_listings(record)


def check_listings(record: RegionRecord) -> None:
    """What is computed again is in both graphs, and the forward does not return it."""
    captured, plan = record.captured, record.plan
    assert plan.recomputed
    recipes = {recipe.name: recipe for recipe in captured.recipes}
    again = {captured.ops[step].name for name in plan.recomputed for step in recipes[name].steps}
    assert again <= set(names_in(record, "forward"))
    assert again <= set(names_in(record, "backward"))
    outputs = returned_by_forward(record)
    assert not again & outputs
    assert outputs & set(names_in(record, "forward")), "others are still saved"
    assert plan.forecast.recompute_ns > 0
    assert sum(op.duration_ns for op in record.problem.ops) == plan.forecast.ideal_ns + plan.forecast.recompute_ns


def test_the_measured_peak_is_within_the_budget(decoder: tuple[Problem, int], slow_links: None) -> None:
    problem, budget = decoder
    torch.manual_seed(0)
    model = DECODER.build()
    run = compiled(model, {**JOINT, "device_budget": budget})
    batch = text(0)

    def step() -> None:
        run(*batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    peak = tencache_fx.peak_bytes(step, torch.device("cpu"), warm_up=lambda: (step(), step()))
    plan = decided().plan
    assert plan.recomputed
    assert plan.forecast.peak_bytes <= budget < live_bytes(problem).max()
    assert peak <= plan.forecast.peak_bytes - entering_bytes(problem) + ODD_BYTES


def test_what_torch_saves_all_the_same_is_made_up_for(
    decoder: tuple[Problem, int], slow_links: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to nothing may be offloaded, and at first torch recomputes but half of what it is told to."""
    asked: list[int] = []

    def deaf(*args: object, again: frozenset[str] = frozenset(), **kwargs: object) -> object:
        if again:
            asked.append(len(again))
        if len(asked) == 1:
            again = frozenset(sorted(again)[::2])
        return split_joint(*args, again=again, **kwargs)

    monkeypatch.setattr(compilation, "split_joint", deaf)
    budget = int(live_bytes(decoder[0]).max()) * 8 // 10
    train(DECODER, lambda model: compiled(model, {**JOINT, "device_budget": budget, "host_budget": 4096}), 1)
    assert len(asked) > 1
    assert asked[1] > asked[0]
    plan = decided().plan
    assert plan.recomputed
    assert not plan.transfers
    assert plan.forecast.peak_bytes <= budget


def plan_or_none(problem: Problem, policy: str) -> tuple[Problem, Plan] | None:
    try:
        return plan_region(problem, policy)
    except BudgetError:
        return None


@SEEN.reaching(0.2, "recomputed")
@drawn_cases(70, suppress_health_check=[HealthCheck.too_slow])
@given(problem=tight_problems(most_forward=14, most_backward=14))
def test_joint_is_never_slower_and_fits_wherever_another_does(problem: Problem) -> None:
    joint = plan_or_none(problem, "joint")
    others = {policy: plan_or_none(problem, policy) for policy in ("none", "10cache", "teraio")}
    SEEN.note("refused" if joint is None else "recomputed" if joint[1].recomputed else "without recomputing")
    for found in (joint, *others.values()):
        if found is not None:
            verify_plan(*found)
    for policy, other in others.items():
        if other is not None:
            assert joint is not None, policy
            assert joint[1].forecast.makespan_ns <= other[1].forecast.makespan_ns, policy
    if joint is not None:
        assert joint == plan_region(problem, "joint")
        assert joint[1].forecast.ideal_ns == sum(op.duration_ns for op in problem.ops)


@drawn_cases(60, suppress_health_check=[HealthCheck.too_slow])
@given(problem=tight_problems())
def test_every_name_chosen_has_a_recipe_and_what_fits_is_left_alone(problem: Problem) -> None:
    names = choose_recomputed(problem)
    assert list(names) == sorted(set(names))
    assert set(names) <= {recipe.name for recipe in problem.recipes}
    for device_bytes in (None, int(live_bytes(problem).max())):
        roomy = problem.within(device_bytes=device_bytes)
        assert choose_recomputed(roomy) == ()
    assert choose_recomputed(replace(problem, recipes=())) == ()


def at(problem: Problem, share: float) -> Problem:
    """`problem` with a budget between its floor (0) and its peak (1)."""
    floor, peak = floor_bytes(problem), int(live_bytes(problem).max())
    device_bytes = floor + int((peak - floor) * share)
    return problem.within(device_bytes=device_bytes)


@pytest.mark.parametrize(("share", "most"), [(0.0, 1.3), (0.15, 1.2), (0.4, 1.1), (0.7, 1.01)])
def test_a_transformer_gains_where_the_links_are_full(share: float, most: float) -> None:
    """Shares of the way from the floor of swaps to what is held without a budget; times over the ideal time."""
    problem = at(transformer_recipes(transformer(layers=4)), share)
    (chosen, joint), (_, teraio) = plan_region(problem, "joint"), plan_region(problem, "teraio")
    verify_plan(chosen, joint)
    assert joint.forecast.makespan_ns <= most * joint.forecast.ideal_ns
    if share < 0.5:
        assert joint.recomputed
        assert joint.forecast.makespan_ns < 0.95 * teraio.forecast.makespan_ns


@pytest.mark.parametrize(("rate", "share", "most"), [(12, 0.6, 0.8), (24, 0.8, 0.9), (48, 0.8, 0.99)])
def test_weights_that_would_fill_the_link_stay_for_some_recomputing(rate: int, share: float, most: float) -> None:
    """Frozen weights in host memory, rates in GB/s; times over that of what is best recomputed if all are offloaded."""
    problem = offloaded_weights(transformer_recipes(transformer(layers=4)))
    problem = at(replace(problem, links=links(rate * 10**9, copy_latency_ns=10_000)), share)
    travelling = make_plan(recompute(problem, choose_recomputed(problem)), "joint").forecast.makespan_ns
    chosen, plan = plan_region(problem, "joint")
    verify_plan(chosen, plan)
    assert plan.resident
    assert plan.recomputed
    assert plan.forecast.makespan_ns < most * travelling


@pytest.mark.parametrize(("rate", "share"), [(48, 0.2), (48, 0.6), (12, 0.6)])
def test_time_to_spare_costs_half_a_percent_at_most(rate: int, share: float) -> None:
    """Weights that came as early as there are leads would take what others need: steps would be 3 to 10 % longer."""
    problem = offloaded_weights(transformer_recipes(transformer(layers=4)))
    problem = at(replace(problem, links=links(rate * 10**9, copy_latency_ns=10_000)), share)
    early = make_plan(problem, "joint")
    late = make_plan(problem, "joint", tuning=replace(TUNING, tolerance_per_mille=0))
    assert early.forecast.makespan_ns <= 1.005 * late.forecast.makespan_ns
    copied_bytes, least_bytes = (plan.forecast.d2h_bytes + plan.forecast.h2d_bytes for plan in (early, late))
    assert copied_bytes <= 1.005 * least_bytes


def test_weights_stay_where_only_recomputing_makes_room_for_them() -> None:
    problem = offloaded_weights(transformer_recipes(transformer(layers=4)))
    problem = replace(
        problem,
        storages=tuple(replace(storage, spillable=False) for storage in problem.storages),
        recipes=tuple(recipe for recipe in problem.recipes if not recipe.name.startswith("x_")),
        links=links(24 * 10**9),
    )
    every = first_parameters(problem, 1.0)
    staying = keep_resident(problem, every)
    floors = floor_bytes(recompute(staying, [recipe.name for recipe in problem.recipes])), floor_bytes(staying)
    assert floors[0] < floors[1] // 2
    chosen, plan = plan_region(problem.within(device_bytes=sum(floors) // 2), "joint")
    verify_plan(chosen, plan)
    assert set(plan.resident) == set(every)


def test_what_may_not_be_offloaded_can_be_recomputed() -> None:
    """Gates, norms and so on of each layer again from its input: all at once would hold as much as before."""
    problem = transformer_recipes(transformer(layers=4))
    problem = replace(problem, storages=tuple(replace(storage, spillable=False) for storage in problem.storages))
    inside = [recipe.name for recipe in problem.recipes if not recipe.name.startswith("x_")]
    floors = floor_bytes(problem), floor_bytes(recompute(problem, inside))
    assert floors[1] < 0.8 * floors[0]
    problem = problem.within(device_bytes=sum(floors) // 2)
    with pytest.raises(BudgetError):
        plan_region(problem, "teraio")
    chosen, plan = plan_region(problem, "joint")
    verify_plan(chosen, plan)
    assert plan.recomputed
    assert not plan.transfers


@pytest.mark.parametrize(
    ("layers", "split", "steps", "share", "million_calls"),
    [
        (16, 1, 350, 0.15, 10),
        pytest.param(32, 1, 700, 0.15, 15, marks=pytest.mark.slow),
        pytest.param(32, 1, 700, 0.0, 20, marks=pytest.mark.slow),
        pytest.param(70, 6, 10_000, 0.15, 60, marks=pytest.mark.slow),
    ],
)
def test_choosing_takes_bounded_work(layers: int, split: int, steps: int, share: float, million_calls: int) -> None:
    problem = transformer_recipes(transformer(layers=layers, split=split, host_bytes=PLENTY))
    assert len(problem.ops) >= steps
    tight = at(problem, share)
    names, calls = counted_calls(lambda: choose_recomputed(tight))
    assert calls < million_calls * 1_000_000
    assert names


def test_equal_layers_cost_the_same_whatever_they_are_called() -> None:
    """The answer depends on the problem's values only: renamed storages give the same time."""
    problem = at(transformer_recipes(transformer(layers=2)), 0.2)
    new = {storage.name: f"z{index:03}" for index, storage in enumerate(problem.storages)}
    renamed = replace(
        problem,
        storages=tuple(replace(storage, name=new[storage.name]) for storage in problem.storages),
        recipes=tuple(replace(recipe, name=new[recipe.name]) for recipe in problem.recipes),
    )
    times = [plan_region(each, "joint")[1].forecast.makespan_ns for each in (problem, renamed)]
    assert times[0] == pytest.approx(times[1], rel=0.03)


def test_policies_without_recipes_plan_as_before() -> None:
    problem = at(transformer(layers=3), 0.3)
    assert plan_region(problem, "joint") == (problem, make_plan(problem, "joint"))


def test_a_plan_is_found_where_the_choices_searched_for_do_not_fit(
    decoder: tuple[Problem, int], slow_links: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is searched for fits by its model, but not as torch splits the graph; with more recomputed it would."""
    asked: list[tuple[str, ...]] = []

    def too_little(problem: Problem) -> tuple[str, ...]:
        asked.append((problem.recipes[0].name,))
        return asked[-1]

    monkeypatch.setattr(candidate, "kept_choice", too_little)
    budget = int(live_bytes(decoder[0]).max()) * 8 // 10
    train(DECODER, lambda model: compiled(model, {**JOINT, "device_budget": budget, "host_budget": 4096}), 1)
    assert asked
    plan = decided().plan
    assert len(plan.recomputed) > 1
    assert plan.forecast.peak_bytes <= budget


@pytest.mark.parametrize("needed_bytes", [floor_bytes, lambda problem: int(live_bytes(problem).max())])
def test_as_few_eighths_are_recomputed_as_fit(decoder: tuple[Problem, int], needed_bytes: Measure) -> None:
    problem, _ = decoder
    assert recomputed_for(problem, needed_bytes(problem), needed_bytes) == ()
    least = recomputed_for(problem, 0, needed_bytes)
    least_bytes = needed_bytes(recompute(problem, least))
    assert least_bytes <= needed_bytes(problem)
    limit = (least_bytes + needed_bytes(problem)) // 2
    enough = recomputed_for(problem, limit, needed_bytes)
    assert set(enough) <= set(least)
    assert needed_bytes(recompute(problem, enough)) <= limit
    assert least or needed_bytes is floor_bytes, "without transfers recomputing frees memory here"
