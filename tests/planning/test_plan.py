"""The arithmetic of plan.py against the plainest code that says the same."""

from dataclasses import replace

import pytest
from drawn import drawn_cases
from hypothesis import example, given
from hypothesis import strategies as st
from outcomes import Outcomes
from problems import (
    GIB,
    boundary_bytes,
    links,
    make_region,
    make_storage,
    moving_problems,
    problems,
    problems_with_swaps,
    transformer,
)

from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import held_at, inactive_intervals, live_bytes, minimal_swaps
from tencache_fx.planning.parameter_schedule import schedule_parameters, with_parameters_scheduled
from tencache_fx.planning.plan import CopyIn, CopyOut, Plan, Transfer, TransferKind
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.pool_sizing import pool_classes, size_classes, staging_classes, total_bytes
from tencache_fx.planning.problem import Kind, Problem, Step, Storage, Tier
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.simulator import program
from tencache_fx.serialization import from_json, from_raw, to_json
from tencache_fx.units import round_up

Case = tuple[Problem, tuple[Transfer, ...]]
SEEN = Outcomes()
LENT = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6), st.sampled_from((1, 5000, 130_000, 131_000, 140_000, 10**6))),
    max_size=12,
).map(lambda spans: [(Step(start), Step(start + length), nbytes) for start, length, nbytes in spans])


@given(case=problems_with_swaps())
def test_live_bytes_counts_what_is_held(case: Case) -> None:
    problem, transfers = case
    live = live_bytes(problem, transfers)
    for step, op in enumerate(problem.ops):
        held = held_at(problem, transfers, Step(step))
        beside = problem.external_bytes + boundary_bytes(problem, step)
        assert live[step] == sum(s.nbytes for s in held) + op.scratch_bytes + beside
        away = {s.name for s in transfers if s.freed_at <= step < s.prefetch_at}
        assert {s.name for s in held} == {s.name for s in problem.storages if s.birth <= step < s.death} - away
        assert [s.nbytes for s in held] == sorted((s.nbytes for s in held), reverse=True)


def surely_away(problem: Problem, storage: Storage) -> list[range]:
    """For each inactive interval, the steps at which the storage can be counted as away."""
    found = []
    for u, v in inactive_intervals(storage):
        sides = {problem.boundary} if u < problem.boundary <= v else set()
        leaves = {*problem.barriers, *sides} if problem.barriers else set(range(len(problem.ops) + 1))
        comes = {*(barrier + 1 for barrier in problem.barriers), *sides} if problem.barriers else leaves
        gone = min((k for k in leaves if k > u), default=v)
        fetch = max((k for k in comes if k <= v), default=u)
        found.append(range(gone, fetch))
    return [away for away in found if away]


@given(problem=problems())
def test_minimal_swaps_are_the_longest(problem: Problem) -> None:
    def away_ns(away: range) -> int:
        return sum(problem.ops[k].duration_ns for k in away)

    swaps = {transfer.name: transfer for transfer in minimal_swaps(problem)}
    for storage in problem.storages:
        intervals = surely_away(problem, storage)
        if storage.spillable and storage.nbytes >= problem.min_spill_bytes and intervals:
            swap = swaps.pop(storage.name)
            assert (swap.copy_out_after, swap.needed_at) in inactive_intervals(storage)
            assert range(swap.freed_at, swap.prefetch_at) in intervals
            assert away_ns(range(swap.freed_at, swap.prefetch_at)) == max(map(away_ns, intervals))
    assert not swaps


@drawn_cases(200)
@given(problem=problems())
def test_floor_is_between_its_bound_and_the_peak(problem: Problem) -> None:
    """No plan beats the bound in which a storage is away during all its inactive intervals."""
    away = [
        (steps, s.nbytes)
        for s in problem.storages
        if s.spillable and s.nbytes >= problem.min_spill_bytes
        for steps in surely_away(problem, s)
    ]
    live = live_bytes(problem)
    bound = max(int(live[k]) - sum(n for steps, n in away if k in steps) for k in range(len(problem.ops)))
    assert bound <= floor_bytes(problem) <= int(live.max())
    once = all(len(surely_away(problem, s)) <= 1 for s in problem.storages)
    assert not once or bound == floor_bytes(problem)


@SEEN.reaching(0.3, "parameters")
@given(problem=moving_problems())
def test_the_floor_with_parameters_is_what_their_schedule_holds_without_room(problem: Problem) -> None:
    scheduled = schedule_parameters(problem.within(device_bytes=0), 0.0)
    SEEN.note("parameters" if scheduled else "none")
    left = with_parameters_scheduled(problem, scheduled)
    held = live_bytes(left, minimal_swaps(left))
    assert floor_bytes(problem) == int(held.max(initial=problem.external_bytes))


def stores_in_turns() -> Problem:
    """Return a region in which a gradient may stay until the next one is done, but not until that one may be gone."""
    first, second = (
        make_storage(name, 2, uses, kind=Kind.STORED, parameter=name) for name, uses in (("w0", [0]), ("w1", [4]))
    )
    barriers = tuple(map(Step, (3, 6, 9)))
    return make_region([1] * 10, 0, first, second, make_storage("x", 2, [5]), links=links(10**8), barriers=barriers)


@SEEN.reaching(0.3, "late stores")
@drawn_cases(500)
@example(problem=stores_in_turns(), more_bytes=0, lead=0.0)
@given(problem=moving_problems(), more_bytes=st.integers(0, 9), lead=st.sampled_from((0.0, 1.0, 4.0)))
def test_parameters_are_scheduled_within_a_budget_that_has_room_for_the_floor(
    problem: Problem, more_bytes: int, lead: float
) -> None:
    """A store that takes its time leaves the room that later ones cannot do without."""
    limit = floor_bytes(problem) + more_bytes
    scheduled = schedule_parameters(problem.within(device_bytes=limit), lead)
    dead = {storage.name: storage.death for storage in problem.storages}
    stores = [transfer for transfer in scheduled if transfer.kind is TransferKind.STORE]
    SEEN.note("late stores" if any(each.freed_at > dead[each.name] for each in stores) else "none")
    left = with_parameters_scheduled(problem, scheduled)
    assert int(live_bytes(left, minimal_swaps(left)).max(initial=problem.external_bytes)) <= limit


@given(problem=problems(), nbytes=st.integers(0, 9))
def test_what_is_derived_once_holds_for_other_budgets_and_is_not_written_to(problem: Problem, nbytes: int) -> None:
    fresh = replace(problem)
    live, least = live_bytes(problem), floor_bytes(problem)
    expected = live.tolist()
    live += nbytes + 1
    other = problem.within(device_bytes=nbytes)
    assert live_bytes(problem).tolist() == live_bytes(other).tolist() == live_bytes(fresh).tolist() == expected
    assert floor_bytes(other) == floor_bytes(fresh) == least
    changed = replace(problem, external_bytes=problem.external_bytes + 1)
    assert live_bytes(changed).tolist() == [each + 1 for each in expected]


@given(acquired=LENT)
def test_size_classes_are_enough_and_no_more(acquired: list[tuple[Step, Step, int]]) -> None:
    classes = size_classes(acquired)
    tops = [pool.nbytes for pool in classes]
    assert tops == sorted(set(tops), reverse=True)
    assert all(top % 4096 == 0 for top in tops)
    members: dict[int, list[tuple[Step, Step]]] = {top: [] for top in tops}
    for start, stop, nbytes in acquired:
        top = min(top for top in tops if top >= nbytes)
        assert round_up(nbytes, 4096) >= 0.97 * top
        members[top].append((start, stop))
    for pool in classes:
        at_once = [sum(start <= gap < stop for start, stop in members[pool.nbytes]) for gap in range(16)]
        assert pool.count == max(at_once)


@given(case=problems_with_swaps(), room=st.integers(0, 10))
def test_pools_by_tier(case: Case, room: int) -> None:
    _, transfers = case
    on_disk = [transfer for transfer in transfers if transfer.tier is Tier.NVME]
    staging = staging_classes(transfers, room * 4096)
    assert total_bytes(staging) == (4096 * max(1, min(4, len(on_disk), room)) if on_disk else 0)
    for tier in (Tier.HOST, Tier.NVME):
        acquired = [
            (transfer.copy_out_after, transfer.needed_at, transfer.nbytes)
            for transfer in transfers
            if transfer.tier is tier
        ]
        assert pool_classes(transfers, tier) == size_classes(acquired)


@given(case=problems_with_swaps())
def test_program_keeps_each_transfers_order(case: Case) -> None:
    _, transfers = case
    events = program(transfers)
    assert [event.step for event in events] == sorted(event.step for event in events)
    for transfer in transfers:
        mine = [(event.verb, event.step) for event in events if event.transfer == transfer]
        assert mine == [
            ("offload", transfer.copy_out_after + 1),
            ("release", transfer.freed_at),
            ("prefetch", transfer.prefetch_at),
            ("wait", transfer.needed_at),
        ]


@given(problem=problems())
def test_problem_survives_json(problem: Problem) -> None:
    assert from_json(Problem, to_json(problem)) == problem


@SEEN.reaching(0.3, "planned")
@given(problem=problems())
def test_plan_survives_json(problem: Problem) -> None:
    try:
        plan = make_plan(problem, "teraio")
    except BudgetError:
        SEEN.note("refused")
        return
    SEEN.note("planned" if plan.transfers else "left alone")
    assert from_json(Plan, to_json(plan)) == plan


def test_a_real_plan_survives_json() -> None:
    plan = make_plan(transformer(layers=3, device_bytes=8 * GIB), "teraio")
    assert plan.transfers
    assert hash(from_json(Plan, to_json(plan))) == hash(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"boundary"', '"border"'), "expected the fields"),
        (('"host"', '"cloud"'), "cloud"),
        (('"boundary": ', '"boundary": "x", "b": '), "expected"),
    ],
)
def test_bad_json_is_refused(change: tuple[str, str], message: str) -> None:
    plan = make_plan(transformer(layers=2, device_bytes=6 * GIB), "teraio")
    text, kind = (to_json(plan), Plan) if change[0] == '"host"' else (to_json(transformer(layers=1)), Problem)
    assert change[0] in text
    with pytest.raises(ValueError, match=message):
        from_json(kind, text.replace(*change, 1))


def test_values_are_hashable() -> None:
    problem = transformer(layers=1)
    assert hash(problem) == hash(replace(problem))


def test_a_transfer_has_only_the_steps_of_its_copies() -> None:
    out, back = CopyOut(after=Step(1), freed_at=Step(2)), CopyIn(prefetch_at=Step(4), needed_at=Step(5))
    swap = Transfer(name="x", nbytes=8, tier=Tier.HOST, out=out, back=back)
    load, store = replace(swap, out=None), replace(swap, back=None)
    kinds = [transfer.kind for transfer in (swap, load, store)]
    assert kinds == [TransferKind.SWAP, TransferKind.LOAD, TransferKind.STORE]
    assert [transfer.steps for transfer in (swap, load, store)] == [(1, 2, 4, 5), (4, 5), (1, 2)]
    with pytest.raises(AssertionError):
        _ = load.freed_at
    for transfer in (swap, load, store):
        assert from_json(Transfer, to_json(transfer)) == transfer
    with pytest.raises(ValueError, match="neither out nor back"):
        from_json(Transfer, to_json(replace(load, back=None)))


def test_a_transfer_that_an_earlier_version_wrote_is_refused_with_its_fields() -> None:
    with pytest.raises(ValueError, match=r"expected the fields \['back', 'name', 'nbytes', 'out', 'tier'\]"):
        from_raw(Transfer, {"name": "x", "nbytes": 8, "tier": "host", "copy_out_after": 1, "kind": "round"})


def test_old_names_tell_the_new_ones() -> None:
    problem = transformer()
    with pytest.raises(AttributeError, match="has a new name: Problem.boundary_bytes"):
        _ = problem.between_bytes
    with pytest.raises(AttributeError, match="has a new name: Plan.transfers"):
        _ = make_plan(problem, "none").spills
    with pytest.raises(AttributeError, match="'Problem' object has no attribute 'spills'"):
        _ = problem.spills
