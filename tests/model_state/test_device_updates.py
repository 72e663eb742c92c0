"""Small parameters that are updated together: the same bits as one by one, in few calls, in memory that plans leave."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from conftest import collect
from harness import Block
from hypothesis import given, settings
from hypothesis import strategies as st
from meter import Meter
from problems import links, make_region, make_storage
from torch import Tensor, nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.model_state import device_updates
from tencache_fx.model_state.step_kernel import Kernel, StateDtype
from tencache_fx.optim import AdamW, OffloadedOptimizer
from tencache_fx.planning.external import drift_bytes, update_bytes
from tencache_fx.planning.problem import Budgets, Kind
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.engine_registry import engines, leave_for_updates, swap_points

SIZES = ((7,), (64,), (3, 5), (4096,), (16, 256), (5000,), (1,), (2, 2, 2), (0,), (8192,))
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
MOST = device_updates._MOST_BYTES  # at once, where no plan leaves less


class Plan:
    """Leaves memory for updates as long as it lives."""


@contextmanager
def leaving(nbytes: int | None) -> Iterator[None]:
    plan = Plan()
    leave_for_updates(plan, CPU, nbytes)
    yield
    leave_for_updates(plan, CPU, None)


def trained(sizes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], state: StateDtype) -> list[Tensor]:
    """Return weights, masters and moments after three steps, with weights set and options changed between them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size).to(dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.02, "weight_decay": 0.0}]
    optimizer = AdamW([group for group in groups if group["params"]], lr=0.1, state_dtype=state)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            if index % 3 != step:  # others are a step behind
                parameter.grad = torch.randn_like(parameter)
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            parameters[step % len(parameters)].data.add_(0.25)  # whose version torch does not count
    kept = optimizer.state_dict()["state"]
    return [p.detach() for p in parameters] + [kept[key][name] for key in kept for name in ("master", "exp_avg")]


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_updates, "_MOST_ELEMENTS", {"cpu": -1})


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.sampled_from((torch.float32, torch.bfloat16, "8bit")),
    st.sampled_from((None, 1 << 20, 20_000)),
)
def test_what_runs_together_changes_no_bit(
    parameters: list[tuple[tuple[int, ...], torch.dtype]], state: StateDtype, free_bytes: int | None
) -> None:
    sizes, dtypes = zip(*parameters, strict=True)
    with leaving(free_bytes):
        together = trained(sizes, dtypes, state)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        apart = trained(sizes, dtypes, state)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the elements of each call of an update are added."""
    lengths: list[int] = []
    compiled = Kernel.compiled

    def count(self: Kernel, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
        update = compiled(self, dtype, device)

        def call(change: Tensor, *rest: Any) -> None:
            lengths.append(len(change))
            update(change, *rest)

        return call

    patch.setattr(Kernel, "compiled", count)
    return lengths


def test_small_parameters_of_a_group_dtype_and_number_of_dimensions_take_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = counted(monkeypatch)
    some = [nn.Parameter(torch.randn(size)) for size in ((8,), (4, 4), (2, 3, 4), (100,))]
    other = [nn.Parameter(torch.randn(size).bfloat16()) for size in ((8,), (30,))]
    optimizer = AdamW([*some, *other], lr=0.1)
    for parameter in (*some, *other):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sorted(lengths) == [16, 24, 38, 108]


def test_what_is_copied_at_once_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = counted(monkeypatch)
    parameters = [nn.Parameter(torch.randn(400)) for _ in range(20)]
    others = [nn.Parameter(torch.randn(9000)), nn.Parameter(torch.randn(1000))]
    optimizer = AdamW([*parameters, *others], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with leaving(
        9 * 400 * 36
    ):  # bytes of nine of them: gradient twice, weight, state of three arrays, three for masters
        optimizer.step()
    assert sorted(lengths) == [800, 1000, 3600, 3600, 9000]  # there is room for three of 1000 elements: too few


def taken(optimizer: torch.optim.Optimizer, meter: Meter) -> int:
    """Return the most bytes that a step makes for a while; the meter has to have seen two: it meets the state there."""
    with meter:  # it meets the gradients
        gradients = [parameter.grad.detach() for group in optimizer.param_groups for parameter in group["params"]]
    meter.peak = before = meter.held
    with meter:
        optimizer.step()
    del gradients
    return meter.peak - before


def kinds_of_parameters() -> list[dict[str, Any]]:
    """Return groups of many parameters of two dtypes and numbers of dimensions, some of whose gradients are strided."""
    torch.manual_seed(0)
    groups = []
    for lr in (0.1, 0.2, 0.3):
        some = [nn.Parameter(torch.randn(64, 32).to(dtype)) for dtype in DTYPES * 20]
        for index, parameter in enumerate(some):
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient if index % 3 else gradient.t().contiguous().t()
        groups.append({"params": some, "lr": lr})
    return groups


@pytest.mark.parametrize("state", [torch.float32, "8bit"])
@pytest.mark.parametrize(("free_bytes", "least_bytes"), [(None, 800_000), (1_000_000, 400_000), (100_000, 0)])
def test_copies_take_no_more_than_plans_leave(state: StateDtype, free_bytes: int | None, least_bytes: int) -> None:
    """Those of gradients included, of parameters that wait for others of their kind."""
    optimizer, meter = AdamW(kinds_of_parameters(), state_dtype=state), Meter()
    with leaving(free_bytes):
        copied_bytes = [taken(optimizer, meter) for _ in range(4)]
    if free_bytes is not None:
        assert max(copied_bytes[2:]) <= free_bytes
    assert min(copied_bytes[2:]) >= least_bytes


def test_the_plan_that_leaves_least_counts_as_long_as_it_lives() -> None:
    limit = partial(device_updates.most_copied_bytes, CPU)
    with leaving(5000):
        with leaving(2000), leaving(1 << 40):
            assert limit() == 2000
        plan = Plan()
        leave_for_updates(plan, CPU, 1000)
        leave_for_updates(plan, torch.device("cpu", 0), 4000)
        elsewhere = Plan()
        leave_for_updates(elsewhere, torch.device("cuda", 0), 10)
        assert limit() == 4000
        del plan
        assert limit() == 5000
    assert limit() == MOST


def test_a_plan_leaves_what_is_kept_for_drift_or_is_free_when_its_last_step_is_over() -> None:
    held = [make_storage("gradient", 4000, (2, 3)), make_storage("saved", 2000, (1, 2))]
    for held_bytes, left_bytes in ((0, 100), (25_600 - 4000 - 100, 100), (25_600 - 4000 - 30, 30), (25_600, 0)):
        budgets = Budgets(device_bytes=25_600, host_bytes=0)
        region = make_region((1, 1, 1, 1), 2, *held, links=links(), budgets=budgets, external_bytes=held_bytes)
        assert update_bytes(25_600, region) == left_bytes
    assert update_bytes(25_600) == 100


def trained_within(budget: int, scope: str) -> int:
    """Return the most bytes that updates take in a training whose parameters are nearly all that is there."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x, meter = nn.Sequential(*(Block(64, 2) for _ in range(16))), torch.randn(2, 64), Meter()
    optimizer = AdamW(model.parameters(), lr=0.01)
    options = {"compiler": "eager", "calibrate": False, "scope": scope, "host_budget": 1 << 28, "device_budget": budget}
    run: Callable[[Tensor], Tensor] = model
    for block in model if scope == "step" else ():
        block.compile(backend="tencache", options=options)
    if scope == "region":  # torch 2.11 compiles each part of an nn.Sequential by itself
        run = torch.compile(lambda x: model(x), backend="tencache", options=options)
    copied_bytes = []
    for _ in range(4):
        run(x).square().mean().backward()
        copied_bytes.append(taken(optimizer, meter))
        optimizer.zero_grad()
    return max(copied_bytes[2:])


@pytest.fixture
def closed() -> Iterator[None]:
    yield
    torch.compiler.reset()
    tencache_fx.close()


@pytest.mark.usefixtures("closed")
def test_updates_stay_within_what_the_plan_of_a_step_leaves() -> None:
    budget = 4_000_000
    copied_bytes = trained_within(budget, "step")
    (program,) = recorder_of(swap_points(engines()[0])).programs.values()
    assert program.planned is not None
    assert program.planned.plan is not None
    planned_bytes = program.planned.joined.problem.budgets.device_bytes
    assert planned_bytes is not None
    assert program.planned.plan.forecast.peak_bytes <= planned_bytes
    assert copied_bytes <= budget - planned_bytes


@pytest.mark.usefixtures("closed")
def test_updates_stay_within_a_budget_that_is_just_what_a_region_needs() -> None:
    trained_within(1 << 30, "region")
    parameter_bytes = sum(s.nbytes for s in regions()[-1].problem.storages if s.kind is Kind.PARAMETER)
    budget = regions()[-1].plan.forecast.peak_bytes
    left_bytes = budget - 2 * parameter_bytes  # beside gradients
    assert 0 < left_bytes < drift_bytes(budget)
    assert trained_within(budget, "region") <= left_bytes


@pytest.mark.usefixtures("closed")
def test_another_budget_counts_for_updates_from_the_next_step_on() -> None:
    model, x = nn.Sequential(*(Block(64, 2) for _ in range(4))), torch.randn(64, 64)
    tencache_fx.configure(device_budget=4_000_000, compiler="eager", calibrate=False, host_budget=1 << 28)
    try:
        for block in model:
            block.compile(backend="tencache", options={"scope": "step"})
        for budget in (4_000_000, 3_000_000, 5_000_000):
            tencache_fx.configure(device_budget=budget)
            for _ in range(2):
                model(x).square().mean().backward()
                assert device_updates.most_copied_bytes(CPU) == drift_bytes(budget)
    finally:
        tencache_fx.configure(reset=True)


def trained_with_its_step(budget: int) -> nn.Sequential:
    """Return a model that was planned by steps; it has code of its own, which goes with it."""
    code = {"forward": FunctionType(Block.forward.__code__.replace(), Block.forward.__globals__)}
    kind, x = type("Own", (Block,), code), torch.randn(64, 64)
    model = nn.Sequential(*(kind(64, 2) for _ in range(2)))
    options = {"compiler": "eager", "calibrate": False, "scope": "step", "host_budget": 1 << 28}
    for block in model:
        block.compile(backend="tencache", options={**options, "device_budget": budget})
    for _ in range(3):
        model(x).square().mean().backward()
    assert any(step.device_budget == budget for step in tencache_fx.steps())
    return model


@pytest.mark.usefixtures("closed")
def test_a_step_counts_as_long_as_the_code_of_its_regions_lives() -> None:
    """Another model's optimizer has no part in a budget that nobody runs within any more."""
    limit = partial(device_updates.most_copied_bytes, CPU)
    models = [trained_with_its_step(budget) for budget in (4_000_000, 2_000_000, 3_000_000)]
    assert limit() == drift_bytes(2_000_000)
    del models[1]
    collect()
    assert limit() == drift_bytes(3_000_000)
    models[0](torch.randn(64, 64)).square().mean().backward()
    assert limit() == drift_bytes(3_000_000), "the model that did not run last lives, too"
    torch.compiler.reset()
    collect()
    assert limit() == MOST
    models[0](torch.randn(64, 64)).square().mean().backward()
    assert limit() == drift_bytes(4_000_000)


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(("scope", "budget"), [("step", 4_000_000), ("region", 290_000)])
def test_plans_for_an_engine_that_was_closed_count_no_more(scope: str, budget: int) -> None:
    model, x = Block(64, 2), torch.randn(64, 64)
    options = {"compiler": "eager", "calibrate": False, "host_budget": 1 << 28, "recompute": "none", "scope": scope}
    model.compile(backend="tencache", options={**options, "device_budget": budget})
    model(x).square().mean().backward()
    assert engines()
    assert device_updates.most_copied_bytes(CPU) == drift_bytes(budget)
    tencache_fx.close()
    assert regions(), "their code lives, though it cannot run any more"
    assert device_updates.most_copied_bytes(CPU) == MOST


def test_a_weight_set_before_a_step_that_failed_is_taken_over_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(3)]
    optimizer = AdamW(parameters, lr=0.1, weight_decay=0.0)

    def give_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones(8)

    give_gradients()
    optimizer.step()
    for parameter in parameters:
        parameter.data.fill_(5.0)
    give_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
    assert all(torch.equal(parameter, torch.full((8,), 5.0)) for parameter in parameters)
    optimizer.step()
    assert all(((parameter > 4.8) & (parameter < 5.0)).all() for parameter in parameters)


def test_parameters_that_share_memory_are_updated_one_behind_the_other() -> None:
    found = []
    for make in (partial(OffloadedOptimizer, optimizer_class=torch.optim.SGD), torch.optim.SGD):
        first = nn.Parameter(torch.zeros(8))
        second = nn.Parameter(first.data)
        optimizer = make([first, second], lr=0.1)
        for _ in range(3):
            first.grad, second.grad = torch.ones(8), torch.full((8,), 2.0)
            optimizer.step()
        found.append(first.detach().clone())
    assert torch.allclose(*found)
