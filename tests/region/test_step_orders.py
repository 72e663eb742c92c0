"""Steps in unusual orders, and with too little of everything: numbers stay right, and what is refused is told."""

import logging
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import faulty_engine
from meter import Meter
from test_step_plans import (
    BUDGETS,
    DEPTH,
    WIDTH,
    blocks,
    equal,
    gradients,
    inputs,
    meter,
    one_by_one,
    recorder,
    wanted,
)
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.errors import BudgetError, StoreError, UsageError
from tencache_fx.planning.step import FRUGAL
from tencache_fx.region import region
from tencache_fx.region.compilation import compile_region
from tencache_fx.region.compiled_region import CompiledRegion
from tencache_fx.runtime.engine import Engine

__all__ = ["meter"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


def test_what_was_modified_before_it_had_to_leave_is_refused(engine: Engine) -> None:
    """It was to stay, and leaves because room is needed: what was written would be what comes back."""
    model = one_by_one(blocks(4), device_budget=12_000_000)
    for step in range(2):
        gradients(model, model, inputs(step))
    assert recorder(engine).points.schedule is not FRUGAL
    result = model[0](inputs())
    kept = result
    result = model[1](result)
    with torch.no_grad():
        kept.add_(1)
    del kept
    for index in (2, 3):
        result = model[index](result)
    assert recorder(engine).points.make_room(1 << 30, (-1, -1)) > 0
    with pytest.raises(UsageError, match="modified in place"):
        result.sum().backward()


def test_where_host_memory_is_full_what_has_no_plan_yet_stays(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tencache_fx")
    expected, model = wanted(3), one_by_one(blocks(), device_budget=BUDGETS["plenty"])
    left = engine.offload

    def refuse_most(*args: object, **more: object) -> Tensor:
        refuse_most.calls += 1
        if refuse_most.calls > 3:
            raise BudgetError("host memory is full")
        return left(*args, **more)

    refuse_most.calls = 0
    with monkeypatch.context() as patch:
        patch.setattr(engine, "offload", refuse_most)
        assert equal(gradients(model, model, inputs(0)), expected[0])
        assert refuse_most.calls > 4
    assert caplog.text.count("stays on the device, as others may: host memory is full") == 1
    for step in (1, 2):
        assert equal(gradients(model, model, inputs(step)), expected[step])
    assert recorder(engine).points.in_use == 0


def test_a_failure_while_nothing_can_leave_ends_the_round(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that is seen is the first one, and the steps after it are planned as if nothing had been."""
    expected, model = wanted(3), one_by_one(blocks(), device_budget=BUDGETS["plenty"])
    for step in range(2):
        gradients(model, model, inputs(step))
    result = model[1](model[0](inputs()))

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("asked for")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "offload", refuse)
        with pytest.raises(StoreError, match="asked for") as caught:
            model[0](inputs())
        assert caught.value.__context__ is None
    del caught, result
    assert equal(gradients(model, model, inputs(2)), expected[2])
    assert recorder(engine).points.schedule is not FRUGAL
    assert len(recorder(engine).programs) == 1


def test_host_memory_that_does_not_hold_one_call_is_no_limit_beside_a_disk(tmp_path: Path) -> None:
    options = {"host_budget": 1_200_000, "spill_dir": tmp_path, "spill_budget": 1 << 26}
    expected, model = wanted(3), one_by_one(blocks(), device_budget=BUDGETS["some"], **options)
    for step, each in enumerate(expected):
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
    assert tencache_fx.stats()["disk_read_bytes"] > 0
    tencache_fx.close()
    torch.compiler.reset()


@pytest.mark.parametrize("order", [("some", "plenty"), ("plenty", "some")])
def test_of_several_budgets_the_least_counts(engine: Engine, meter: Meter, order: tuple[str, str]) -> None:
    expected, model = wanted(5), blocks()
    for half, budget in zip((model[:4], model[4:]), order, strict=True):
        one_by_one(half, device_budget=BUDGETS[budget])
    planned = []
    for step, each in enumerate(expected):
        meter.peak = meter.held
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
        assert meter.peak <= BUDGETS["some"] or step == 0, f"step {step}"
        planned += [program.plans for program in recorder(engine).programs.values()]
    assert 0.8 * BUDGETS["some"] < meter.peak, "a plan was found"
    assert planned[-1] == planned[-2], "and stays"


def test_a_step_whose_last_blocks_are_checkpointed_is_one_round(engine: Engine) -> None:
    """Their forwards run again within the backward, in which those of the first blocks wait for long."""
    expected, model = wanted(3), one_by_one(blocks(), device_budget=BUDGETS["some"])

    def run(x: Tensor) -> Tensor:
        for index, block in enumerate(model):
            x = checkpoint(block, x, use_reentrant=False) if index >= 2 else block(x)
        return x

    for step, each in enumerate(expected):
        assert equal(gradients(model, run, inputs(step)), each), f"step {step}"
    (program,) = recorder(engine).programs.values()
    assert len(program.visits) == DEPTH + 2 * (DEPTH - 2) + 2
    assert program.schedule is not FRUGAL


def test_what_generated_code_makes_may_stay(engine: Engine) -> None:
    """Its calls count as writes to a tensor, and not to those that share its storage."""
    model, plain = one_by_one(blocks(3), device_budget=BUDGETS["plenty"], compiler="inductor"), blocks(3)
    for step in range(2):
        found, expected = gradients(model, model, inputs(step)), gradients(plain, plain, inputs(step))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert recorder(engine).points.schedule.kept


def test_what_is_held_between_steps_is_in_no_plan(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer takes more than the budget; nothing of the step waits for its backward then."""
    model, points = one_by_one(blocks(), device_budget=BUDGETS["some"]), recorder(engine).points
    seen = points.gauge.bytes_since
    monkeypatch.setattr(
        points.gauge, "bytes_since", lambda mark: seen(mark) if points.in_use else (seen(mark)[0], 1 << 30)
    )
    for step, each in enumerate(wanted(3)):
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
    assert points.schedule is not FRUGAL


def test_a_step_is_planned_again_once_it_is_known_what_is_held_between_its_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak of earlier work hides that at first: all that was allocated since the last run may have been there."""
    model, points = one_by_one(blocks(), device_budget=BUDGETS["some"]), recorder(engine).points
    seen, hidden = points.gauge.bytes_since, True
    monkeypatch.setattr(points.gauge, "bytes_since", lambda mark: (seen(mark)[0], 1 << 30) if hidden else seen(mark))
    expected = wanted(5)
    for step in range(2):
        assert equal(gradients(model, model, inputs(step)), expected[step]), f"step {step}"
    (program,) = recorder(engine).programs.values()
    assert program.planned is not None
    assert program.planned.plan is None
    hidden = False
    for step in range(2, 5):
        assert equal(gradients(model, model, inputs(step)), expected[step]), f"step {step}"
    assert program.planned.plan is not None
    assert points.schedule is program.schedule


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("dropped", ["checkpointed", "without a backward"])
def test_a_forward_that_keeps_only_what_others_keep_ends_with_its_step(engine: Engine, dropped: str) -> None:
    """Its parameters live on, whether its graph does or not: other steps are no part of this one."""
    first, second = blocks(4), nn.Sequential(Product())
    one_by_one(first, device_budget=BUDGETS["some"])
    one_by_one(second, device_budget=BUDGETS["some"])
    for step in range(6):
        result = first[1](first[0](inputs(step)))
        if dropped == "checkpointed":
            result = checkpoint(second, result, use_reentrant=False)
        else:
            second(result.detach())
        first[3](first[2](result)).square().mean().backward()
    (program,) = recorder(engine).programs.values()
    assert len(program.visits) == (11 if dropped == "checkpointed" else 9)
    assert program.schedule is not FRUGAL


@pytest.mark.parametrize("scope", ["auto", "step", "region"])
def test_blocks_of_one_kind_of_which_the_first_are_checkpointed(engine: Engine, scope: str) -> None:
    """They share their code, and that it is part of a step shows only when the others run: it runs again as it ran."""
    expected, model = wanted(4), one_by_one(blocks(), device_budget=9_000_000, scope=scope)

    def run(x: Tensor) -> Tensor:
        for index, block in enumerate(model):
            x = checkpoint(block, x, use_reentrant=False) if index < 2 else block(x)
        return x

    for step, each in enumerate(expected):
        assert equal(gradients(model, run, inputs(step)), each), f"step {step}"


def test_what_is_validated_with_autograd_does_not_make_a_step_last_for_ever(engine: Engine) -> None:
    """Its result lives until the next validation, and so does its graph: a forward always waits."""
    expected, model = wanted(12), one_by_one(blocks(), device_budget=BUDGETS["plenty"])
    lengths, validated = [], None
    for step, each in enumerate(expected):
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
        lengths.append(len(recorder(engine)._visits))
        validated = model(inputs(100))
    assert validated is not None
    assert max(lengths[6:]) <= max(lengths[:6])
    assert any(program.schedule is not FRUGAL for program in recorder(engine).programs.values())


def test_regions_are_planned_again_one_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing has state that all threads share: Dynamo's lock is held, whether Dynamo compiles or we do."""
    left_free: list[bool] = []

    def try_lock() -> None:
        left_free.append(compile_lock.acquire(blocking=False))
        if left_free[-1]:
            compile_lock.release()

    def compiled(*args: object) -> CompiledRegion:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return compile_region(*args)

    monkeypatch.setattr(region, "compile_region", compiled)
    model = one_by_one(blocks(4), device_budget=BUDGETS["plenty"], scope="auto")
    for step in range(3):
        gradients(model, model, inputs(step))
    assert len(left_free) > 1
    assert not any(left_free)


@pytest.mark.parametrize("budget", [BUDGETS["some"], 8_500_000, BUDGETS["plenty"]])
def test_layers_that_are_skipped_at_random_run_by_the_plan_of_a_step_that_has_them(
    engine: Engine, meter: Meter, budget: int
) -> None:
    """Nearly each order is new. In a tight budget the rest of a step may move all it can, and does so in the budget."""
    model = one_by_one(blocks(), device_budget=budget)
    plain, draw = one_by_one(blocks(), "aot_eager_decomp_partition"), random.Random(0)

    def run(layers: nn.Sequential, skipped: set[int], x: Tensor) -> Tensor:
        for index, block in enumerate(layers):
            x = x if index in skipped else block(x)
        return x

    def moved() -> int:
        return int(engine.stats.take()["d2h_bytes"])

    for step in range(3):
        gradients(model, model, inputs(step))
    assert len(recorder(engine).programs) == 1
    assert moved() > 0, "the first step moves all that it can"
    for step in range(8):
        skipped = set(draw.sample(range(DEPTH), k=draw.randint(1, 3)))
        expected = gradients(plain, partial(run, plain, skipped), inputs(step))
        meter.peak = meter.held
        found = gradients(model, partial(run, model, skipped), inputs(step))
        assert equal(found, expected), f"step {step}"
        assert meter.peak <= budget
        if budget == BUDGETS["plenty"]:
            assert recorder(engine).points.schedule is not FRUGAL
            assert moved() == 0
    assert len(recorder(engine).programs) > 2
