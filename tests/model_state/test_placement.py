"""Where updates run and state is: on the host, through the device, on the device; the same training each way."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import collect
from faulty_streams import FaultyCpuStreams
from harness import Block
from problems import trained_offloaded
from tied_model import ROOMY, TIGHT, TIGHT_BF16, batch, compiled, network, small_plan, train, trained, weights
from torch import nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.errors import InvariantError
from tencache_fx.model_state import optimizer as optimizer_module
from tencache_fx.model_state.device_updates import DeviceUpdate, update_on_device
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.update_protocol import Submit
from tencache_fx.model_state.update_queue import Updates
from tencache_fx.optim import AdamW
from tencache_fx.planning.evaluation import Candidate
from tencache_fx.planning.parameter_schedule import (
    exposed_update_ns,
    first_parameters,
    host_memory_ns,
    keep_resident,
    pinned_bytes,
    step_ns,
)
from tencache_fx.planning.plan import CopyIn, CopyOut, Plan, TransferKind
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Kind, Problem, Recipe, Step
from tencache_fx.planning.recompute_search import RecomputeSearch
from tencache_fx.planning.search import Trial, choose_for_region, make_plan, take_turns
from tencache_fx.planning.tuning import TUNING
from tencache_fx.planning.verify import verify_plan
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine_registry import engines, install_engine


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_updates_that_stream_through_the_device_are_those_of_the_host(
    new_engine: Callable[..., object], dtype: torch.dtype
) -> None:
    """The device takes what the host has not begun: on a busy machine the host may be done with all of it before."""
    losses, after = trained(home=False, dtype=dtype, steps=6)
    budget = TIGHT if dtype == torch.float32 else TIGHT_BF16

    def streams_some() -> bool:
        tencache_fx.close()
        install_engine(new_engine(streams=FaultyCpuStreams(delay_s=0.002)))
        (engine,) = engines()
        parameters_of(engine).updates.open_room(8 << 20)
        model = tencache_fx.offload(network(dtype))
        optimizer = AdamW(model.parameters(), weight_decay=0.1)
        assert train(model, compiled(model, budget), optimizer, range(6)) == losses
        assert all(torch.equal(value, after[name]) for name, value in weights(model).items())
        counts = engine.stats.take()
        updated = sum(home.parameter.requires_grad for home in parameters_of(engine))
        small = sum(parameter.requires_grad and find_offloaded(parameter) is None for parameter in model.parameters())
        assert counts["updates"] == 6 * (updated + small)
        assert 6 * small <= counts["device_updates"] < counts["updates"]
        return bool(counts["device_updates"] > 6 * small)

    assert any(streams_some() for _ in range(5))


@pytest.mark.parametrize("now", [pytest.param(False, marks=pytest.mark.slow), True])
def test_with_room_for_it_state_is_on_the_device_and_nothing_is_offloaded(now: bool) -> None:  # noqa: FBT001
    losses, after = trained(home=False, dtype=torch.bfloat16, steps=6)
    model = tencache_fx.offload(network(torch.bfloat16))
    optimizer = AdamW(model.parameters(), weight_decay=0.1, step_in_backward=now)
    assert train(model, compiled(model, ROOMY), optimizer, range(3)) == losses[:3]
    (engine,) = engines()
    updated = [home for home in parameters_of(engine) if home.parameter.requires_grad]
    assert all(home.updated_on_device for home in updated)
    assert not engine.pool.acquired_for(Use.STATE)
    record = regions()[-1]
    state_bytes = sum(6 * home.nbytes for home in updated)
    assert record.problem.external_bytes - record.captured.external_bytes == state_bytes
    assert sum(home.device_state_bytes for home in updated) == state_bytes
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    tight = compiled(model, TIGHT_BF16)  # another region that has no room for it: it is evicted, and the run goes on
    assert train(model, tight, optimizer, range(3, 6)) == losses[3:]
    assert not any(home.updated_on_device for home in updated if home.name not in regions()[-1].plan.updated_here)
    assert engine.pool.acquired_for(Use.STATE)
    assert not torch.equal(saved["1.into.weight"], weights(model)["1.into.weight"])
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


def test_nothing_of_it_is_on_the_device_between_steps() -> None:
    model = tencache_fx.offload(network())
    homes = [home for p in model.parameters() if (home := find_offloaded(p)) is not None]
    assert len(homes) == 1 + 3 * 2
    assert not any(home.on_device for home in homes)
    optimizer = AdamW(model.parameters())
    train(model, compiled(model), optimizer, range(2))
    record = regions()[-1]
    away = [home for home in homes if home.name not in record.plan.resident]
    assert len(away) >= 4
    assert not any(home.on_device for home in away)
    assert record.plan.forecast.peak_bytes <= 7e5
    kinds = {storage.kind for storage in record.problem.storages}
    assert kinds >= {Kind.FETCHED, Kind.STORED}
    (engine,) = engines()
    optimizer.state_dict()
    home_bytes = sum(home.backing._buffer.nbytes for home in homes)
    updated = [home for home in homes if home.parameter.requires_grad]
    assert engine.pool.acquired_for(Use.STATE) == sum(3 * home.nbytes for home in updated)
    assert engine.stats.take()["host_acquired_bytes"] == home_bytes + engine.pool.acquired_for(Use.STATE)
    del optimizer
    collect()
    assert engine.stats.take()["host_acquired_bytes"] == home_bytes


def test_with_room_parameters_stay_and_are_not_copied_in() -> None:
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters())
    train(model, compiled(model, None), optimizer, range(2))
    optimizer.state_dict()  # waits for updates under way
    (engine,) = engines()
    assert all(home.on_device for home in parameters_of(engine))
    assert not any(home.updated_on_device for home in parameters_of(engine))
    updated = sum(home.nbytes for home in parameters_of(engine) if home.parameter.requires_grad)
    assert engine.stats.take()["h2d_bytes"] == 2 * updated  # once after each update, and not for reading
    with torch.no_grad():  # a region that has no room takes them away again, for as long as it runs
        small = compiled(model, "400kB")
        torch.testing.assert_close(small(batch(0)), compiled(model, None)(batch(0)))


@pytest.mark.parametrize(
    ("way", "change", "rule"),
    [
        (TransferKind.LOAD, {"back": CopyIn(prefetch_at=Step(0), needed_at=Step(1))}, "load-steps"),
        (TransferKind.LOAD, {"nbytes": 1}, "same-bytes"),
        (TransferKind.LOAD, {"back": None, "out": CopyOut(after=Step(0), freed_at=Step(1))}, "one-way"),
        (TransferKind.STORE, {"out": CopyOut(after=Step(0), freed_at=Step(0))}, "store-steps"),
        (TransferKind.STORE, {"out": CopyOut(after=Step(0), freed_at=Step(1))}, "store-steps"),
        (TransferKind.LOAD, None, "every-parameter"),
        (TransferKind.STORE, None, "every-parameter"),
    ],
)
def test_each_rule_of_one_way_transfers_is_checked(
    way: TransferKind, change: dict[str, object] | None, rule: str
) -> None:
    problem, plan = small_plan()
    verify_plan(problem, plan)
    victim = [transfer for transfer in plan.transfers if transfer.kind is way][-1]
    others = [transfer for transfer in plan.transfers if transfer is not victim]
    broken = others if change is None else [*others, replace(victim, **change)]
    with pytest.raises(InvariantError, match=rule):
        verify_plan(problem, replace(plan, transfers=tuple(broken)))


def test_a_step_takes_as_long_as_the_host_memory_does() -> None:
    problem, plan = small_plan()
    problem = replace(problem, updates_in_backward=True)
    assert step_ns(problem, plan.forecast) == plan.forecast.makespan_ns  # nothing is known of the host's memory
    slow = replace(problem, links=replace(problem.links, host_bytes_per_s=10**6))
    sunk_bytes = sum(storage.nbytes for storage in problem.storages if storage.kind is Kind.STORED)
    moved_bytes = plan.forecast.d2h_bytes + plan.forecast.h2d_bytes
    # of fp32: gradient and weight once, three arrays read and written
    assert step_ns(slow, plan.forecast) >= (8 * sunk_bytes + moved_bytes) * 1000
    least = make_plan(slow, "teraio")
    assert least.forecast.d2h_bytes + least.forecast.h2d_bytes <= moved_bytes
    fast = replace(problem, links=replace(problem.links, host_bytes_per_s=10**15))
    assert step_ns(fast, plan.forecast) == plan.forecast.makespan_ns
    assert step_ns(replace(fast, accumulation=5), plan.forecast) == 5 * plan.forecast.makespan_ns
    more_ns = step_ns(replace(slow, accumulation=5), plan.forecast) - step_ns(slow, plan.forecast)
    assert more_ns == 4 * (moved_bytes + 3 * sunk_bytes) * 1000  # updates are as before


def test_only_the_next_forward_hides_updates_behind_the_last_backward() -> None:
    problem, plan = small_plan()
    forecast = plan.forecast
    backward_ns = forecast.makespan_ns - forecast.forward_ns
    stored_bytes = sum(storage.nbytes for storage in problem.storages if storage.kind is Kind.STORED)
    fetched_bytes = sum(s.nbytes for s in problem.storages if s.kind is Kind.FETCHED and s.birth < problem.boundary)
    resident_bytes = sum(s.nbytes for s in problem.storages if s.kind is Kind.PARAMETER and s.parameter)
    assert min(fetched_bytes, resident_bytes) > 0
    # of fp32: gradient and weight once, three arrays read and written
    late_bytes = 8 * stored_bytes + resident_bytes + fetched_bytes + forecast.d2h_bytes - stored_bytes
    rate = late_bytes * 1_000_000_000 // (2 * forecast.forward_ns)
    late_ns = late_bytes * 1_000_000_000 // rate
    slow = replace(problem, links=replace(problem.links, host_bytes_per_s=rate))
    copied_bytes = forecast.d2h_bytes + forecast.h2d_bytes
    assert exposed_update_ns(slow, forecast) == late_ns - forecast.forward_ns > 0
    assert step_ns(slow, forecast) == late_ns + backward_ns > host_memory_ns(slow, copied_bytes)
    often = replace(slow, accumulation=4)
    assert step_ns(often, forecast) == max(
        step_ns(slow, forecast) + 3 * forecast.makespan_ns, host_memory_ns(often, copied_bytes)
    )
    early = replace(slow, updates_in_backward=True)
    assert exposed_update_ns(early, forecast) == 0
    assert step_ns(early, forecast) < step_ns(slow, forecast)


def test_a_plan_knows_of_an_optimizer_that_updates_during_backward() -> None:
    for early in (False, True):
        torch.compiler.reset()
        model = tencache_fx.offload(nn.Sequential(*(Block(160) for _ in range(2))))
        optimizer = AdamW(model.parameters(), step_in_backward=early)
        run = torch.compile(model, backend="tencache", options={"device_budget": "4MB", "compiler": "eager"})
        run(torch.randn(8, 160)).square().mean().backward()
        optimizer.step()
        assert tencache_fx.regions()[-1].problem.updates_in_backward is early


def test_a_plan_with_less_room_takes_the_state_off_the_device_before_it_runs() -> None:
    """The first larger batch is planned anew in its call, and runs in what that plan counts."""
    torch.manual_seed(0)
    model = tencache_fx.offload(nn.Sequential(*(Block(160) for _ in range(3))))
    optimizer = AdamW(model.parameters(), step_in_backward=True)
    options = {"device_budget": "4MB", "compiler": "eager", "calibrate": False, "recompute": "none"}
    run = torch.compile(model, backend="tencache", dynamic=True, options=options)
    homes = list(parameters_of(engines()[0]))
    seen = []

    def look(*_: object) -> None:
        seen.append((sum(home.updated_on_device for home in homes), sum(home.device_state_bytes for home in homes)))

    model[2].norm.weight.register_hook(look)
    for rows in (8, 8, 700, 700):
        run(torch.randn(rows, 160)).square().mean().backward()
    optimizer.state_dict()
    assert seen[1] == (6, 6 * 12 * 160 * 160)
    planned = len(regions()[-1].plan.updated_here)
    assert planned < 6
    assert seen[2] == seen[3] == (planned, planned * 12 * 160 * 160)


def test_updates_that_run_by_themselves_are_begun_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward waits for those, and the host is busy with the others for a while."""
    torch.manual_seed(0)
    model = tencache_fx.offload(nn.Sequential(*(Block(160) for _ in range(3))))
    optimizer, begun = AdamW(model.parameters()), []
    options = {"device_budget": "2MB", "compiler": "eager", "calibrate": False, "recompute": "none"}
    run, begin, update_here = (
        torch.compile(model, backend="tencache", options=options),
        Updates.together,
        update_on_device,
    )

    @contextlib.contextmanager
    def note_begun(self: Updates) -> Iterator[Submit]:
        with begin(self) as submit:

            def note(*args: Any, **kwargs: Any) -> "Future[None]":
                begun.append(False)
                return submit(*args, **kwargs)

            yield note

    def note_here(updates: Iterable[DeviceUpdate], issued: list[DeviceUpdate]) -> None:
        some = list(updates)
        begun.extend([True] * sum(each.weight.numel() == 160 * 160 for each in some))  # of small ones none is offloaded
        update_here(some, issued)

    monkeypatch.setattr(Updates, "together", note_begun)
    monkeypatch.setattr(optimizer_module, "update_on_device", note_here)
    run(torch.randn(8, 160)).square().mean().backward()
    optimizer.step()
    optimizer.state_dict()
    assert begun == sorted(begun)
    assert len(begun) == 6
    assert 0 < sum(begun) < 6


def test_weights_loaded_into_an_ordinary_model_are_taken_over_when_it_gets_offloaded_parameters_again() -> None:
    model = tencache_fx.offload(nn.Sequential(nn.Linear(192, 192)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for loaded in (False, True):
        if loaded:
            tencache_fx.close()
            torch.compiler.reset()
            with torch.no_grad():
                model[0].weight.fill_(0.5)
            tencache_fx.offload(model)
        run = compiled(model, None)
        run(torch.ones(4, 192)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.state_dict()["0.weight"]
    assert (weight - 0.5).abs().max() < 2e-3


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.35, 0.6, 1.0])
def test_room_goes_to_state_before_it_goes_to_weights_alone(share: float) -> None:
    """A weight alone saves two copies; with its gradient and state it takes eight times the room, and saves more."""
    count, nbytes = 64, 16
    problem = trained_offloaded(count, nbytes)
    room_bytes = int(share * count * nbytes * 8)
    plan = make_plan(problem.within(device_bytes=floor_bytes(problem) + room_bytes), "joint")
    staying = keep_resident(problem, **plan.pinned)
    verify_plan(staying.within(device_bytes=floor_bytes(problem) + room_bytes), plan)
    assert len(plan.updated_here) >= int(share * count) - 2


@pytest.mark.parametrize("room", [3, 11, 35])
def test_weights_come_with_time_to_spare_where_it_costs_nothing(room: int) -> None:
    """Updates keep the host busy longer than the device, however late weights come: that is no reason to come late."""
    nbytes = 60  # a copy takes six tenths of an operation
    problem = trained_offloaded(24, nbytes)
    problem = problem.within(device_bytes=floor_bytes(problem) + room * nbytes)
    plan, late = make_plan(problem, "joint"), make_plan(problem, "joint", tuning=replace(TUNING, leads=(0.0,)))
    verify_plan(keep_resident(problem, **plan.pinned), plan)
    for cost in ("makespan_ns", "d2h_bytes", "h2d_bytes"):
        assert getattr(plan.forecast, cost) <= getattr(late.forecast, cost)
    assert time_to_spare(plan) > time_to_spare(late)


@pytest.mark.parametrize("accumulation", [1, 5])
def test_gradients_on_the_device_cost_what_is_read_and_written_for_them(accumulation: int) -> None:
    count, nbytes = 6, 16
    problem = replace(trained_offloaded(count, nbytes), accumulation=accumulation)
    every = [f"w{index}" for index in range(count)]
    stored = keep_resident(problem, every)
    summed = keep_resident(problem, every, (), every)
    updated = keep_resident(problem, every, every)
    sums = nbytes * count * (accumulation > 1)
    assert stored.external_bytes == 0
    assert summed.external_bytes == pinned_bytes(problem, (), (), every) == sums
    assert updated.external_bytes == pinned_bytes(problem, (), every) == sums + 6 * nbytes * count
    # An update reads the gradient, reads and writes state, writes the weight, and copies it to the device. A stored
    # gradient is written by each backward, and read and written with the sum by all but the first.
    update_bytes = (1 + 12 + 1 + 1) * nbytes * count
    assert host_bytes(stored) == update_bytes + (3 * (accumulation - 1)) * nbytes * count
    assert host_bytes(summed) == update_bytes + nbytes * count
    assert host_bytes(updated) == 0


def host_bytes(problem: Problem) -> int:
    """Return what the host's memory reads and writes in a step, copies over the links apart."""
    return host_memory_ns(replace(problem, links=replace(problem.links, host_bytes_per_s=1_000_000_000)), 0)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("accumulation", [2, 4, 32])
def test_sums_on_the_device_are_only_chosen_where_they_help(share: float, accumulation: int) -> None:
    count, nbytes = 24, 60
    problem = replace(trained_offloaded(count, nbytes), accumulation=accumulation)
    problem = problem.within(device_bytes=floor_bytes(problem) + int(share * count * nbytes * 8))
    plan, without = (make_plan(problem, "joint", tuning=each) for each in (TUNING, replace(TUNING, gradient_shares=())))
    assert not without.summed_here
    assert set(plan.summed_here) <= set(plan.resident) - set(plan.updated_here)
    verify_plan(keep_resident(problem, **plan.pinned), plan)
    took, takes = (step_ns(keep_resident(problem, **each.pinned), each.forecast) for each in (without, plan))
    assert takes <= took * 1.005
    assert plan.summed_here or accumulation < 32 or share < 0.3
    lacking = replace(problem.budgets, host_lacking_bytes=1)
    for never in ({"updates_in_backward": True}, {"sums_stay": False}, {"budgets": lacking}):
        assert not make_plan(replace(problem, **never), "joint").summed_here


def time_to_spare(plan: Plan) -> int:
    return sum(
        transfer.needed_at - transfer.prefetch_at for transfer in plan.transfers if transfer.kind is TransferKind.LOAD
    )


def test_what_is_recomputed_is_chosen_in_turns_with_what_stays() -> None:
    """Searched beside each start; then beside the parameters that are pinned in the fastest plan, while that is new."""
    starts = [Candidate(policy="teraio"), Candidate(policy="teraio", resident=("a", "b"))]
    asked: list[Candidate] = []

    def search(start: Candidate) -> tuple[str, ...]:
        asked.append(start)
        return (f"{len(asked)}",)

    def try_out(names: tuple[str, ...]) -> Trial:
        step_ns = {"1": 5, "2": 3, "3": 2}[names[0]]
        return Trial(step_ns, ("a",) if names[0] in ("2", "3") else (), ())

    assert take_turns(starts, search, try_out, turns=3) == ("3",)
    assert asked == [*starts, replace(starts[0], resident=("a",))]
    asked.clear()
    assert take_turns(starts, search, try_out, turns=0) == ("2",)
    assert asked == starts


@pytest.mark.parametrize(("times", "searched"), [((5, 6, 1), [0, 1]), ((5, 5, 1), [0, 1]), ((5, 4, 3), [0, 1, 2])])
def test_more_room_is_tried_where_less_of_it_is_worth_it(times: tuple[int, ...], searched: list[int]) -> None:
    starts = [Candidate(policy="teraio", reserved_bytes=room) for room in range(3)]
    asked: list[int] = []

    def search(start: Candidate) -> tuple[str, ...]:
        asked.append(start.reserved_bytes)
        return (str(start.reserved_bytes),)

    def try_out(names: tuple[str, ...]) -> Trial:
        return Trial(times[int(names[0])], (), ())

    best = min(searched, key=lambda room: times[room])
    assert take_turns(starts, search, try_out, turns=0) == (str(best),)
    assert asked == searched


def test_what_is_recomputed_leaves_rooms_that_may_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched beside no weights, a room for state, which gains nothing, and all weights; not without a budget."""
    problem, _ = small_plan()
    recipe = Recipe(name=problem.storages[0].name, steps=(Step(1),))
    problem = replace(problem.within(device_bytes=4_000_000), recipes=(recipe,))
    asked: list[Problem] = []

    def run(self: RecomputeSearch) -> tuple[str, ...]:
        asked.append(self.problem)
        return ()

    monkeypatch.setattr(RecomputeSearch, "run", run)
    assert choose_for_region(problem) == ()
    first, room, last = asked[:3]
    assert first == problem
    assert 4_000_000 > room.budgets.device_bytes >= floor_bytes(problem)
    assert last == keep_resident(problem, first_parameters(problem, 1.0))
    asked.clear()
    assert choose_for_region(problem.within(device_bytes=None)) == ()
    assert not asked
