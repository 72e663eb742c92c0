"""Plans for as many backwards as come before an update: seen in the first steps, and known to the next process."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from harness import Block, faulty_engine
from rates import pretend_slow_links
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.optim import AdamW
from tencache_fx.planning.parameter_schedule import gradients_to_host, step_ns
from tencache_fx.planning.problem import Kind
from tencache_fx.planning.search import make_plan, plan_region
from tencache_fx.region.backward_counter import BackwardCounter
from tencache_fx.runtime.engine import Engine

WIDTH, DEPTH, ROWS, PARTS = 128, 6, 32, 4
BUDGET = 5_500_000  # for all weights, or for the state of some


@pytest.fixture
def engine() -> Iterator[Engine]:
    pretend_slow_links(bytes_per_s=10**8, host_bytes_per_s=10**9)
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


@pytest.fixture
def slow_engine() -> Iterator[Engine]:
    """An engine on a machine whose host memory is hardly faster than its links."""
    pretend_slow_links(bytes_per_s=10**8, host_bytes_per_s=2 * 10**8)
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


def inputs(part: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(part))


class Loop:
    """A loop that adds up gradients over some parts of a step, with its model compiled whole, or block by block."""

    def __init__(self, *, whole: bool, budget: int = BUDGET, host: int = 1 << 28) -> None:
        torch.manual_seed(0)
        self.model = tencache_fx.offload(nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH))), "cpu")
        options = {"compiler": "eager", "device_budget": budget, "host_budget": host, "recompute": "none"}
        scope = {"scope": "region" if whole else "step"}
        self.run = self.model
        if whole:
            self.run = torch.compile(self.model, backend="tencache", options={**options, **scope})
        else:
            for block in self.model:
                block.compile(backend="tencache", options={**options, **scope})
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)

    def step(self, parts: int, most: float | None = None) -> float:
        total = 0.0
        for part in range(parts):
            loss = self.run(inputs(part)).square().mean() / parts
            loss.backward()
            total += loss.item()
        self.stored = [isinstance(each.grad, HostGradient) for each in self.model.parameters()]
        if most is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()
        self.left = [each.grad.isfinite().all().item() for each in self.model.parameters()]
        self.optimizer.zero_grad()
        return total


def expected(parts: list[int], most: float | None = None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for count in parts:
        losses.append(0.0)
        for part in range(count):
            loss = model(inputs(part)).square().mean() / count
            loss.backward()
            losses[-1] += loss.item()
        if most is not None:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_region_is_planned_for_as_many_backwards_as_come_before_an_update(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(whole=True)
    with caplog.at_level("INFO", "tencache_fx"):
        losses = [loop.step(PARTS) for _ in range(4)]
    assert losses == pytest.approx(expected([PARTS] * 4), rel=1e-4)
    record = tencache_fx.regions()[-1]
    assert record.problem.accumulation == PARTS
    assert caplog.text.count(f"{PARTS} backwards come before an update, and it was planned for 1") == 1
    torch.compiler.reset()
    Loop(whole=True).step(1)
    assert tencache_fx.regions()[-1].problem.accumulation == PARTS, "as an earlier run was"


def test_a_region_is_planned_for_few_other_numbers(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    loop, parts = Loop(whole=True), [1, 1, 1, 6, 6, 1, 3, 3, 1, 2, 2, 5, 5, 1]
    with caplog.at_level("INFO", "tencache_fx"):
        losses = [loop.step(count) for count in parts]
    assert losses == pytest.approx(expected(parts), rel=1e-4)
    assert 1 <= caplog.text.count("backwards come before an update") <= 3


def test_a_step_is_planned_for_as_many_rounds_as_come_before_an_update(engine: Engine) -> None:
    loop = Loop(whole=False)
    plans = []
    losses = []
    for _ in range(6):
        losses.append(loop.step(PARTS))
        plans.append(tencache_fx.steps()[-1])
    assert losses == pytest.approx(expected([PARTS] * 6), rel=1e-4)
    assert plans[0].problem.accumulation == 1
    assert plans[-1].problem.accumulation == PARTS
    assert plans[-1].plan == plans[-2].plan


def test_a_plan_for_many_backwards_is_no_slower_then_than_one_for_one(engine: Engine) -> None:
    loop = Loop(whole=True)
    for _ in range(4):
        loop.step(PARTS)
    record = tencache_fx.regions()[-1]
    one = make_plan(replace(record.captured, accumulation=1), "joint")
    assert step_ns(record.problem, record.plan.forecast) < step_ns(record.problem, one.forecast)


@pytest.mark.parametrize(("budget", "all_fit"), [(5_500_000, False), (9_000_000, False), (11_000_000, True)])
def test_sums_stay_on_the_device_where_host_memory_is_slow(
    slow_engine: Engine,
    budget: int,
    all_fit: bool,  # noqa: FBT001
) -> None:
    """A sum in host memory is read and written there for each backward; from the device it is copied once a step."""
    loop = Loop(whole=True, budget=budget)
    losses = [loop.step(8, most=0.05) for _ in range(3)]
    tencache_fx.stats()
    losses += [loop.step(8, most=0.05) for _ in range(3)]
    assert losses == pytest.approx(expected([8] * 6, most=0.05), rel=1e-4)
    record, copied_bytes = tencache_fx.regions()[-1], tencache_fx.stats()["d2h_bytes"]
    problem, plan = record.problem, record.plan
    assert problem.accumulation == 8
    assert plan.summed_here
    assert not set(plan.summed_here) & set(plan.updated_here)
    stored = {each.parameter for each in problem.storages if each.kind is Kind.STORED}
    assert sum(loop.stored) == len(stored)
    assert all_fit == (not stored)
    sums = {each.parameter: each.nbytes for each in gradients_to_host(problem) if each.kind is Kind.GRADIENT}
    assert set(sums) == set(plan.summed_here)
    assert all(loop.left), "a gradient is the loop's until that drops it"
    assert problem.external_bytes - record.captured.external_bytes >= sum(sums.values())
    if all_fit:
        assert copied_bytes == 3 * sum(sums.values())


@pytest.mark.parametrize("parts_of_host", [18, 16])
def test_sums_do_not_stay_where_an_update_has_no_host_memory_for_them(parts_of_host: int) -> None:
    """Weights, gradients and states take five times the weights' bytes; states that are on the device leave room."""
    pretend_slow_links(bytes_per_s=10**8, host_bytes_per_s=2 * 10**8)
    host = parts_of_host * DEPTH * 8 * WIDTH * WIDTH  # each part is a quarter of all weights
    with faulty_engine(host_budget_bytes=host):
        loop = Loop(whole=True, budget=11_000_000, host=host)
        losses = [loop.step(8) for _ in range(4)]
        plan = tencache_fx.regions()[-1].plan
        assert plan.summed_here == ()
        assert plan.updated_here
        del loop
    assert losses == pytest.approx(expected([8] * 4), rel=1e-4)


def test_a_loop_may_go_back_to_one_backward_a_step(slow_engine: Engine) -> None:
    parts, losses, summed = [8, 8, 8, 1, 1, 1, 1], [], []
    loop = Loop(whole=True, budget=11_000_000)
    for count in parts:
        losses.append(loop.step(count))
        summed.append(bool(tencache_fx.regions()[-1].plan.summed_here))
    assert losses == pytest.approx(expected(parts), rel=1e-4)
    assert (summed[2], summed[-1]) == (True, False)


def test_regions_of_a_step_store_what_they_add_up(slow_engine: Engine) -> None:
    loop = Loop(whole=False, budget=11_000_000)
    assert [loop.step(8) for _ in range(6)] == pytest.approx(expected([8] * 6), rel=1e-4)
    record = tencache_fx.steps()[-1]
    assert record.problem.accumulation == 8
    assert record.plan.summed_here == ()
    for captured in (record.problem, *(each.captured for each in tencache_fx.regions())):
        assert not plan_region(captured, "joint")[1].summed_here, "whoever plans it again finds what will run"


class Updated:
    """Stands for a parameter that has been updated so often."""

    updates = 0


def test_only_what_lies_between_two_updates_is_counted() -> None:
    counter, parameter = BackwardCounter(), Updated()
    counter.watch(parameter)  # type: ignore[arg-type]
    for count, found in ((3, None), (5, 5), (5, 5), (1, 1), (1, 1), (4, 4), (7, 4), (1, 4)):
        for _ in range(count):
            counter.note()
            counter.look()
        parameter.updates += 1
        counter.look()
        assert counter.per_update == found
    counter.watch(Updated())  # type: ignore[arg-type]
    counter.look()
    assert counter.per_update == 4
