"""A step's schedule keeps what its plan promises: it is carried out here, point by point, by other code."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from drawn import drawn_cases
from hypothesis import given
from hypothesis import strategies as st
from outcomes import Outcomes

from tencache_fx.errors import BudgetError
from tencache_fx.planning import step_recompute
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Budgets, Kind, Links, Op, Problem, Recipe, Step, Storage, Tier
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.step import (
    FRUGAL,
    Point,
    StepProblem,
    StepSchedule,
    Visit,
    align,
    join,
    to_schedule,
    with_regions,
)
from tencache_fx.planning.step_recompute import Recomputed, choose_for_step
from tencache_fx.planning.swap_region import GraphPoint, SwapRegion, boundary_swaps
from tencache_fx.planning.verify import verify_plan

SEEN = Outcomes()
LINKS = Links(
    d2h_bytes_per_s=10**9,
    h2d_bytes_per_s=10**9,
    d2h_duplex_bytes_per_s=10**9,
    h2d_duplex_bytes_per_s=10**9,
    copy_latency_ns=1,
)


TWO_CALLS = ((0, False), (1, False), (1, True), (0, True))


def budgets(device_bytes: int | None) -> Budgets:
    return Budgets(device_bytes=device_bytes, host_bytes=1 << 40)


@st.composite
def regions(draw: st.DrawFn) -> SwapRegion:
    """A region of a few steps, some of whose storages cross from forward to backward."""
    forward, backward = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    count = forward + backward
    storages = []
    for number in range(draw(st.integers(1, 5))):
        birth = draw(st.integers(0, forward - 1))
        last = draw(st.integers(birth, forward - 1))
        following = draw(st.integers(forward, count - 1))
        storages.append(
            Storage(
                name=f"s{number}",
                nbytes=draw(st.integers(1, 50)),
                kind=Kind.ACTIVATION,
                birth=Step(birth),
                death=Step(draw(st.integers(following + 1, count))),
                uses=tuple(Step(step) for step in sorted({birth, last, following})),
                spillable=draw(st.integers(0, 4)) > 0,
            )
        )
    problem = Problem(
        ops=tuple(Op(name=f"op{k}", duration_ns=draw(st.integers(1, 60)), scratch_bytes=0) for k in range(count)),
        boundary=Step(forward),
        storages=tuple(storages),
        links=LINKS,
        budgets=budgets(None),
    )
    swaps = boundary_swaps(problem)
    return SwapRegion(problem=problem, transfers=swaps, points=points_of(problem, swaps), original=problem)


def points_of(problem, swaps):
    """Write the ops as the graphs have them: by step, then offload, release, prefetch, wait."""
    deeds = {"offload": 0, "release": 1, "prefetch": 2, "wait": 3}
    every = [
        (step, deeds[deed], swap.name, deed)
        for swap in swaps
        for deed, step in (
            ("offload", swap.copy_out_after + 1),
            ("release", swap.freed_at),
            ("prefetch", swap.prefetch_at),
            ("wait", swap.needed_at),
        )
    ]
    forward = [GraphPoint(Step(step), deed, name) for step, order, name, deed in sorted(every) if order < 2]
    backward = [GraphPoint(Step(step), deed, name) for step, order, name, deed in sorted(every) if order >= 2]
    return tuple(forward), tuple(backward)


@st.composite
def rounds(draw: st.DrawFn) -> list[Visit]:
    """Forwards of one or two regions, then their backwards, in any order that a loop may have."""
    known = draw(st.lists(regions(), min_size=1, max_size=2))
    waiting: list[tuple[int, int]] = []
    counts = [0] * len(known)
    visits: list[Visit] = []
    for _ in range(draw(st.integers(2, 9))):
        if waiting and draw(st.integers(0, 2)) == 0:
            index, call = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            backward = True
        else:
            index, backward = draw(st.integers(0, len(known) - 1)), False
            call, counts[index] = counts[index], counts[index] + 1
            waiting.append((index, call))
        visits.append(visit_of(known[index], index, call, backward=backward, held_bytes=draw(st.integers(60, 90))))
    while waiting:
        index, call = waiting.pop()
        visits.append(visit_of(known[index], index, call, backward=True, held_bytes=draw(st.integers(60, 90))))
    return visits


def visit_of(region: SwapRegion, index: int, call: int, *, backward: bool, held_bytes: int) -> Visit:
    return Visit(
        index=index, call=call, backward=backward, region=region, held_bytes=held_bytes, gap_bytes=held_bytes + 5
    )


def carried_out(visits: list[Visit], schedule: StepSchedule) -> list[int]:
    """Return the bytes on the device in each gap and at each step: what was held, the region's own, and what stays."""
    here: dict[tuple[int, int, str], str] = {}  # what the schedule has on the device beyond the frugal one
    sizes = {(v.index, v.call, swap.name): swap.nbytes for v in visits for swap in v.region.swaps}
    found = []

    def extra() -> int:
        return sum(sizes[key] for key, state in here.items() if state == "here")

    def act(point: Point) -> None:
        for key in schedule.frees.get(point, ()):
            assert here[tuple(key)] == "here", f"{key} is freed, and is not there"
            here[tuple(key)] = "away"
        for key in schedule.prefetches.get(point, ()):
            assert here[tuple(key)] == "away", f"{key} is prefetched, and is not away"
            here[tuple(key)] = "here"

    for visit in visits:
        found.append(max(visit.held_bytes, visit.gap_bytes) + extra())
        steps, position = visit.region.steps(backward=visit.backward), 0
        own = visit.region.own_bytes[visit.backward]
        pending = list(visit.region.points[visit.backward])
        act(Point(visit.index, visit.call, visit.backward, position))
        for step in [*steps, steps.stop]:
            while pending and pending[0].step == step:
                written, position = pending.pop(0), position + 1
                act(Point(visit.index, visit.call, visit.backward, position))
                key = visit.index, visit.call, written.label
                if written.deed == "release" and any(
                    o.index == key[0] and o.call == key[1] and o.backward for o in visits
                ):
                    stays = key in schedule.kept or key in schedule.deferred
                    here[key] = "here" if stays else "away"
                elif written.deed == "prefetch":
                    here.pop(key, None)  # from here on the region itself counts it
            if step < steps.stop:
                found.append(visit.held_bytes + int(own[step - steps.start]) + extra())
        act(Point(visit.index, visit.call, visit.backward, position + 1))
    assert not here, "everything has come back"
    return found


def frees_before_it_copies(step: StepProblem, schedule: StepSchedule) -> bool:
    """Return whether of the points at one step none frees bytes behind one that has some copied back."""
    copied: dict[int, int] = {}  # by step, the first point at which something is copied back
    for place, (at, point) in enumerate(step.points):
        for key in schedule.frees.get(point, ()):
            if copied.get(at, place) < place and step.releases[key] < copied[at]:
                return False
        if schedule.prefetches.get(point):
            copied.setdefault(at, place)
    return True


def joined(visits: list[Visit], share: float) -> tuple[StepProblem, int]:
    """Return the problem with a budget between its floor (0) and its peak (1)."""
    unlimited = join(visits, LINKS, budgets(None))
    least = max(carried_out(visits, FRUGAL))
    most = int(live_bytes(unlimited.problem).max())
    limit = int(least + share * (most - least))
    return join(visits, LINKS, budgets(limit)), limit


@SEEN.reaching(0.5, "with transfers")
@drawn_cases(150)
@given(rounds(), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), st.sampled_from(["teraio", "10cache", "joint"]))
def test_a_schedule_holds_no_more_than_its_plan(visits, share, policy):
    step, limit = joined(visits, share)
    try:
        plan = make_plan(step.problem, policy)
    except BudgetError:
        assert share == 0.0, "with room above the floor there is a plan"
        SEEN.note("refused")
        return
    SEEN.note("with transfers" if plan.transfers else "left alone")
    verify_plan(step.problem, plan)
    schedule = to_schedule(step, plan)
    assert frees_before_it_copies(step, schedule)
    held = carried_out(visits, schedule)
    assert max(held) <= limit
    assert np.all(np.array(held) <= live_bytes(step.problem, plan.transfers))


@SEEN.reaching(0.3, "aligned")
@drawn_cases(150)
@given(rounds(), st.sampled_from([0.2, 0.5, 0.8]), st.sampled_from(["teraio", "10cache", "joint"]))
def test_an_aligned_plan_is_what_its_schedule_does(visits, share, policy):
    """The points at which the graphs can act are fewer than the steps: the plan knows that."""
    step, limit = joined(visits, share)
    planned = make_plan(step.problem, policy)
    plan = align(step, planned)
    SEEN.note("aligned" if plan.transfers != planned.transfers else "as planned")
    verify_plan(step.problem, plan)
    schedule = to_schedule(step, plan)
    assert frees_before_it_copies(step, schedule)
    assert max(carried_out(visits, schedule)) <= limit
    assert plan.forecast.peak_bytes <= limit
    places = {place for place, _ in step.points}
    for transfer in plan.transfers:
        assert transfer.freed_at in places
        assert transfer.prefetch_at in places | {transfer.needed_at}
    assert align(step, plan).transfers == plan.transfers


@drawn_cases(60)
@given(rounds())
def test_the_problem_is_what_the_runs_hold(visits):
    """With nothing away, and with everything away, the problem counts what carrying it out counts."""
    step = join(visits, LINKS, budgets(None))
    kept = StepSchedule(kept=frozenset(step.keys.values()))
    assert carried_out(visits, kept) == live_bytes(step.problem).tolist()
    shared = {(visit.index, swap.name) for visit in visits for swap in visit.region.swaps}
    assert not join(visits, LINKS, budgets(None), shared).problem.storages


def recomputing_region() -> SwapRegion:
    """A region whose one large storage is cheap to compute again."""
    large = Storage(
        name="large",
        nbytes=1000,
        kind=Kind.ACTIVATION,
        birth=Step(0),
        death=Step(5),
        uses=(Step(0), Step(1), Step(4)),
        spillable=True,
    )
    problem = Problem(
        ops=tuple(Op(name=f"op{k}", duration_ns=100) for k in range(6)),
        boundary=Step(3),
        storages=(large,),
        links=LINKS,
        budgets=budgets(None),
        recipes=(Recipe(name="large", steps=(Step(0),)),),
    )
    swaps = boundary_swaps(problem)
    return SwapRegion(problem=problem, transfers=swaps, points=points_of(problem, swaps), original=problem)


def test_what_is_cheaper_than_copying_is_recomputed():
    region = recomputing_region()
    order = [(call, False) for call in range(4)] + [(call, True) for call in (3, 2, 1, 0)]
    visits = [visit_of(region, 0, call, backward=backward, held_bytes=100) for call, backward in order]
    assert choose_for_step(visits, LINKS, budgets(1 << 20)) is None, "all fits"
    found = choose_for_step(visits, LINKS, budgets(2500))
    assert found == {0: Recomputed(first=("large",), first_calls=2)}, "two of four calls may save it"
    assert [found[0].names(call, checkpointed=False) for call in range(4)] == [frozenset({"large"})] * 2 + [
        frozenset()
    ] * 2
    found = choose_for_step(visits, LINKS, budgets(1300))
    assert found == {0: Recomputed(first=("large",), first_calls=3)}, "nothing is asked of the last"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
def test_what_is_not_planned_could_not_be_best(monkeypatch, share):
    """The choice is the same as if each had been planned, and some are not."""
    region = priced_region(steps=16)
    visits = [visit_of(region, 0, call, backward=back, held_bytes=100) for back in (False, True) for call in range(3)]
    _, limit = joined(visits, share)
    planned = []

    def counted(problem, *arguments, **options):
        planned.append(problem)
        return make_plan(problem, *arguments, **options)

    monkeypatch.setattr(step_recompute, "make_plan", counted)
    found, fewer = choose_for_step(visits, LINKS, budgets(limit)), len(planned)
    monkeypatch.setattr(step_recompute, "lower_bound_ns", lambda problem: 0)
    assert choose_for_step(visits, LINKS, budgets(limit)) == found
    assert fewer < len(planned) - fewer


def test_checkpointed_calls_are_modelled_as_they_run(monkeypatch):
    """All of them recompute what the first call does: they run again in another order."""
    region, tried = recomputing_region(), set()
    order = [(0, False), (1, False), (2, False), (3, False), (4, False), (5, False), (5, True), (6, False), (6, True)]
    visits = [
        replace(visit_of(region, 0, call, backward=back, held_bytes=100), checkpointed=call > 2)
        for call, back in [*order, (2, True), (1, True), (0, True)]
    ]

    def noted(problem, *arguments, **options):
        call, recomputing = "", set()
        for op in problem.ops:
            call = op.name.removeprefix("before 0.") if op.name.startswith("before") else call
            recomputing |= {int(call)} if op.name.endswith("#again") else set()
        tried.add(frozenset(recomputing))
        return make_plan(problem, *arguments, **options)

    monkeypatch.setattr(step_recompute, "make_plan", noted)
    found = choose_for_step(visits, LINKS, budgets(2500))
    assert found == {0: Recomputed(first=("large",), first_calls=2)}
    assert [call for call in range(7) if found[0].names(call, checkpointed=call > 2)] == [0, 1, 3, 4, 5, 6]
    assert {0, 1, 5, 6} in tried
    assert all((0 in each) == (5 in each) == (6 in each) for each in tried)


@pytest.mark.parametrize("first", [1, 3])
def test_each_call_is_modelled_at_its_own_size(monkeypatch, first):
    """Calls of one region with other inputs: both what they save, and how long it takes to compute it again."""
    base, planned = priced_region(steps=4), []

    def times(factor):
        def resize(problem):
            storages = tuple(replace(each, nbytes=factor * each.nbytes) for each in problem.storages)
            ops = tuple(replace(each, duration_ns=factor * each.duration_ns) for each in problem.ops)
            return replace(problem, storages=storages, ops=ops)

        return resize

    sizes = {0: first, 1: 4 - first}
    calls = {call: base.resized(times(size)) for call, size in sizes.items()}
    visits = [visit_of(calls[call], 0, call, backward=back, held_bytes=100) for call, back in TWO_CALLS]

    def noted(problem, *arguments, **options):
        planned.append(problem)
        return make_plan(problem, *arguments, **options)

    monkeypatch.setattr(step_recompute, "make_plan", noted)
    assert choose_for_step(visits, LINKS, budgets(4_000))
    modelled = [problem for problem in planned if any(op.name.endswith("#again") for op in problem.ops)]
    assert modelled
    for problem in modelled:
        assert {each.nbytes for each in problem.storages if each.name.startswith("0.0:")} <= {1000 * sizes[0]}
        assert {each.nbytes for each in problem.storages if each.name.startswith("0.1:")} <= {1000 * sizes[1]}
        again = [op.duration_ns for op in problem.ops if op.name == "op0#again"]
        assert again == [400 * sizes[1], 400 * sizes[0]]


def priced_region(steps: int) -> SwapRegion:
    """A region that saves the result of each forward step, at rising prices of computing it again."""
    storages = [
        Storage(
            name=f"s{k}",
            nbytes=1000,
            kind=Kind.ACTIVATION,
            birth=Step(k),
            death=Step(2 * steps - k),
            uses=(Step(k), Step(2 * steps - k - 1)),
            spillable=True,
        )
        for k in range(steps)
    ]
    problem = Problem(
        ops=tuple(Op(name=f"op{k}", duration_ns=400 + 100 * (k % steps)) for k in range(2 * steps)),
        boundary=Step(steps),
        storages=tuple(storages),
        links=LINKS,
        budgets=budgets(None),
        recipes=tuple(Recipe(name=f"s{k}", steps=(Step(k),)) for k in range(steps)),
    )
    swaps = boundary_swaps(problem)
    return SwapRegion(problem=problem, transfers=swaps, points=points_of(problem, swaps), original=problem)


def test_forwards_that_wait_keep_what_their_region_keeps():
    region = recomputing_region()
    frugal = SwapRegion(problem=region.problem, transfers=(), points=((), ()), original=region.problem)
    visits = [visit_of(region, 0, call, backward=back, held_bytes=100) for call, back in TWO_CALLS]
    found = with_regions(visits, dict.fromkeys(((0, 0), (0, 1)), frugal))
    assert [visit.held_bytes for visit in found] == [100, 1100, 2100, 1100]
    assert [visit.gap_bytes for visit in found] == [105, 1105, 2105, 1105]
    checkpointed = visit_of(region, 0, 2, backward=False, held_bytes=100)  # its graph is gone at once
    found = with_regions([checkpointed, *visits], dict.fromkeys(((0, 0), (0, 1), (0, 2)), frugal))
    assert [visit.held_bytes for visit in found] == [100, 100, 1100, 2100, 1100]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_a_schedule_says_where_a_storage_goes(tier):
    region = recomputing_region()
    visits = [visit_of(region, 0, call, backward=back, held_bytes=100) for call, back in TWO_CALLS]
    step = join(visits, LINKS, budgets(1500))
    plan = make_plan(step.problem, "teraio")
    moved = tuple(replace(transfer, tier=tier) for transfer in plan.transfers)
    away = to_schedule(step, replace(plan, transfers=moved)).away
    assert away
    assert set(away.values()) == {tier}


@drawn_cases(60)
@given(region=regions(), data=st.data())
def test_a_region_holds_what_its_code_does_behind_each_op(region: SwapRegion, data: st.DataObject) -> None:
    """Whatever the code holds, a region says as much of the steps behind the op, whatever its graphs do."""
    code = [[data.draw(st.integers(0, 400), label="bytes") for _ in range(len(points) + 1)] for points in region.points]
    holding = region.holding(code)
    live = live_bytes(region.problem, region.transfers)
    boundary = region.problem.boundary
    bare = replace(holding, margins=((), ()))
    for backward, (points, held) in enumerate(zip(region.points, code, strict=True)):
        own, graphs = holding.own_bytes[backward], bare.own_bytes[backward]
        handed = int(live[boundary * backward] - graphs[0])  # what is there when the graph begins
        first, stop = boundary * backward, len(live) if backward else boundary
        edges = [first, *(point.step for point in points), stop]
        for begin, end, nbytes in zip(edges, edges[1:], held, strict=False):
            near = own[max(0, begin - 1 - first) : max(end, begin + 1) - first]
            assert near.max() + handed >= nbytes, (begin, end)
        if all(begin < end for begin, end in pairwise(edges)):  # else a step is of two parts
            assert [int(own[begin - first : end - first].max()) + handed for begin, end in pairwise(edges)] == held
    most_bytes = max(max(held) for held in code)
    assert max(own.max() for own in holding.own_bytes) <= max(own.max() for own in bare.own_bytes) + most_bytes


@pytest.mark.parametrize("lengths", [(2, 2), (1,)], ids=["more ops", "no backward"])
def test_code_that_is_not_that_of_the_graphs_says_how_much_it_holds_at_most(lengths: tuple[int, ...]) -> None:
    region = recomputing_region()
    most_bytes = int(live_bytes(region.problem, region.transfers).max())
    held = [[0] * (len(points) + more) for points, more in zip(region.points, lengths, strict=False)]
    held[-1][0] = most_bytes + 70
    holding = region.holding(held)
    for own, bare in zip(holding.own_bytes, region.own_bytes, strict=True):
        assert (own - bare == 70).all()


def test_what_no_code_shows_is_held_beside_what_it_holds() -> None:
    region = recomputing_region()
    unseen = (0, 500, 0, 0, 0, 0)
    ops = tuple(replace(op, scratch_bytes=nbytes) for op, nbytes in zip(region.problem.ops, unseen, strict=True))
    region = replace(region, problem=replace(region.problem, ops=ops))
    code = [[900] * (1 + len(points)) for points in region.points]
    assert region.holding(code, unseen).own_bytes[0].max() == 900 + 500


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.OUTPUT], ids=["activations", "none"])
def test_what_code_holds_grows_with_the_activations(kind: Kind) -> None:
    """Where there are none, as behind recomputation by the user, with all that the region has."""
    found = recomputing_region()
    problem = replace(found.problem, storages=tuple(replace(each, kind=kind) for each in found.problem.storages))
    region = replace(found, problem=problem, original=problem, margins=((70,), (0, 31)))

    def resize(problem: Problem) -> Problem:
        return replace(problem, storages=tuple(replace(each, nbytes=each.nbytes * 5 // 2) for each in problem.storages))

    assert region.resized(resize).margins == ((175,), (0, 78))


@pytest.mark.parametrize("times", [{"large": 2, "fused": 1}, {"large": 2, "fused": 4}, {"large": 0.5, "fused": 0.25}])
def test_what_code_never_makes_is_not_taken_for_more_at_other_sizes(times: dict[str, float]) -> None:
    """It may not grow, as what is made of a weight, or as the square, as attention's scores: a plan counts the rest."""
    kept = recomputing_region().problem.storages[0]
    fused = replace(kept, name="fused", nbytes=4000, birth=Step(1), death=Step(2), uses=(Step(1),), spillable=False)
    problem = replace(recomputing_region().problem, storages=(kept, fused))
    region = replace(recomputing_region(), problem=problem, original=problem)

    def resize(problem: Problem) -> Problem:
        sized = (replace(each, nbytes=int(each.nbytes * times[each.name])) for each in problem.storages)
        return replace(problem, storages=tuple(sized))

    code = [[0] * (1 + len(points)) for points in region.points]
    code[0][0] = kept.nbytes  # and never what is fused
    holding = region.holding(code)
    assert holding.own_bytes[0].max() == kept.nbytes
    assert holding.resized(resize).own_bytes[0].max() >= kept.nbytes * times["large"]


def test_a_step_that_does_not_fit_is_refused_as_one() -> None:
    """What its ops have for scratch is what no plan moves."""
    ops = tuple(Op(name=f"op{step}", duration_ns=1, scratch_bytes=1000 * step) for step in range(4))
    problem = Problem(ops=ops, boundary=Step(2), storages=(), links=LINKS, budgets=budgets(2500))
    with pytest.raises(BudgetError, match=r"the op's own scratch 3 kB(.|\n)*The floor of this region is 3 kB"):
        make_plan(problem, "joint")
    with pytest.raises(BudgetError, match=r"what no plan moves, .* 3 kB(.|\n)*The floor of this step is 3 kB"):
        make_plan(replace(problem, copies_parameters=True), "joint")
