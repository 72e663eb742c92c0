"""Offloaded parameters of steps of several regions: copied in ahead of their graphs, gradients out behind them."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from combinations import each_in_a_quick_case
from conftest import collect
from harness import Block, faulty_engine
from test_step_plans import inputs
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state.offloading import LEAST_BYTES
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.optim import AdamW
from tencache_fx.planning.plan import TransferKind
from tencache_fx.planning.step import FRUGAL
from tencache_fx.region.step_recorder import StepRecorder, recorder_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points

DEPTH, WIDTH, STEPS = 6, 64, 5
LARGE, ROOMY, TIGHT = 100_000_000, 6_000_000, 3_300_000
OPTIONS = {"compiler": "eager", "calibrate": False, "scope": "step", "host_budget": 1 << 28}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))


def offloaded(budget: int, **options: object) -> nn.Sequential:
    model = tencache_fx.offload(blocks(), "cpu")
    for block in model:
        block.compile(backend="tencache", options={**OPTIONS, "device_budget": budget, **options})
    return model


def plain() -> nn.Sequential:
    model = blocks()
    for block in model:
        block.compile(backend="aot_eager_decomp_partition")
    return model


Loop = Callable[[nn.Sequential, torch.optim.Optimizer, int], Tensor]


def updated(result: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """End a step: return its loss."""
    loss = result.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def readable(module: nn.Module, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the parameters can be read and written to, offloaded or not."""
    return tencache_fx.summon(module) if isinstance(optimizer, AdamW) else contextlib.nullcontext()


def once(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    return updated(model(inputs(step)), optimizer)


def accumulated(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    total = torch.zeros(())
    for part in range(2):
        loss = model(inputs(2 * step + part)).square().mean()
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def twice(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Each parameter is read by two calls of the step, in which its blocks run in different orders."""
    x = inputs(step)
    for block in (*model, *reversed(model)):
        x = block(x)
    return updated(x, optimizer)


def changed(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    """Parameters are written to within the step, when some of them may be on their way already."""
    x = inputs(step)
    for index, block in enumerate(model):
        if index == 2 and step % 2:
            module = model[4]
            with torch.no_grad(), readable(module, optimizer):
                for parameter in module.parameters():
                    parameter.mul_(1.5)
        x = block(x)
    return updated(x, optimizer)


def trained(model: nn.Sequential, optimizer: torch.optim.Optimizer, loop: Loop) -> list[Tensor]:
    losses = [loop(model, optimizer, step) for step in range(STEPS)]
    with readable(model, optimizer):
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def recorder(engine: Engine) -> StepRecorder:
    return recorder_of(swap_points(engine))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28, delay_s=0.001) as found:
        yield found


@each_in_a_quick_case(
    loop=[once, accumulated, twice, changed],
    budget=[pytest.param(LARGE, id="large"), pytest.param(ROOMY, id="roomy"), pytest.param(TIGHT, id="tight")],
    in_backward=[pytest.param(False, id="step"), pytest.param(True, id="backward")],
)
def test_steps_are_right(loop: Loop, budget: int, in_backward: bool, engine: Engine) -> None:  # noqa: FBT001
    """Copies are late, and freed memory is poisoned. In a large budget all parameters stay on the device."""
    if in_backward and loop is accumulated:
        pytest.skip("an optimizer that updates in the backward does not accumulate")
    reference = plain()
    expected = trained(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), loop)
    torch.compiler.reset()
    model = offloaded(budget)
    optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=in_backward)
    found = trained(model, optimizer, loop)
    worst = max(float((mine - true).abs().max()) for mine, true in zip(found, expected, strict=True))
    assert worst < 1e-5, "the two optimizers differ in rounding"
    plan = tencache_fx.steps()[-1].plan
    assert plan.forecast.peak_bytes <= budget
    kinds = {transfer.kind for transfer in plan.transfers}
    if budget == LARGE:
        assert not kinds
        assert len(plan.resident) == len(plan.updated_here) == sum(p.nbytes >= LEAST_BYTES for p in model.parameters())
        assert engine.stats.take()["device_updates"] > 0
    elif budget == ROOMY:
        assert kinds or plan.resident
    else:
        assert {TransferKind.LOAD, TransferKind.STORE} <= kinds
    assert recorder(engine).points.schedule is not FRUGAL
    assert recorder(engine).points.extra_bytes == 0


def test_parameters_come_while_another_region_runs(engine: Engine) -> None:
    model = offloaded(ROOMY)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        once(model, optimizer, step)
    schedule = recorder(engine).points.schedule
    ahead = [
        key
        for point, keys in schedule.prefetches.items()
        for key in keys
        if key.label.startswith("load_param") and (key.region, key.call) != (point.region, point.call)
    ]
    assert ahead
    engine.stats.take()
    once(model, optimizer, 3)
    fetches = [t for t in tencache_fx.steps()[-1].plan.transfers if t.kind is TransferKind.LOAD]
    swaps = [t for t in tencache_fx.steps()[-1].plan.transfers if t.kind is TransferKind.SWAP]
    assert engine.stats.take()["prefetches"] == len(fetches) + len(swaps), "none is copied twice"


def test_reports_tell_of_parameters_and_gradients(engine: Engine, tmp_path: Path) -> None:
    model = offloaded(ROOMY, dump_dir=str(tmp_path))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        once(model, optimizer, step)
    assert "a step on cpu, 6 calls of" in tencache_fx.report()
    (text,) = (path.read_text() for path in tmp_path.rglob("schedule.txt"))
    assert re.search(r"fetch +\S+ +comes from host, copied at the ", text)
    assert re.search(r"store +\S+ +goes to host, freed at ", text)
    assert ">> copies" in text


def test_nothing_is_copied_ahead_for_a_model_that_is_gone(engine: Engine) -> None:
    model = offloaded(ROOMY)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        once(model, optimizer, step)
    taken = engine.pool.acquired_bytes
    assert taken > 0
    model, optimizer = nn.Sequential(), torch.optim.SGD([torch.zeros(1)])
    torch.compiler.reset()
    parameters_of(engine).updates.wait()  # the last step's go on in a thread
    collect()
    engine.enter()
    assert engine.pool.acquired_bytes == 0


def test_a_step_that_ends_early_leaves_nothing_on_its_way(engine: Engine) -> None:
    model = offloaded(ROOMY)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        once(model, optimizer, step)
    result = model[1](model[0](inputs(3)))
    on_the_way = recorder(engine).points._parameters.extra_bytes
    assert on_the_way > 0
    del result
    collect()
    recorder(engine).settle()
    assert recorder(engine).points._parameters.extra_bytes == 0


def test_a_step_that_fails_leaves_nothing_on_its_way(engine: Engine) -> None:
    model = offloaded(ROOMY)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        once(model, optimizer, step)

    def fail(*_: object) -> None:
        raise RuntimeError("asked for")

    handle = model[3].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="asked for"):
        once(model, optimizer, 3)
    handle.remove()
    collect()
    once(model, optimizer, 4)
    once(model, optimizer, 5)
    assert recorder(engine).points.extra_bytes == 0
    assert recorder(engine).points.in_use == 0
