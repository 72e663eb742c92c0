"""Budgets of host memory and disk that are configured while a model trains: the next step is planned for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import Block, faulty_engine
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.planning.problem import Tier
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.engine import Engine

WIDTH, ROWS, DEPTH = 64, 512, 4
LARGE, SMALL, LEAST = 8 << 20, 1 << 20, 200_000
DEVICE = {"region": 4_000_000, "step": 4_200_000}

Given = dict[str, object]


class Whole(nn.Sequential):
    """Blocks with a forward of their own: Dynamo of 2.11 compiles those of torch's `Sequential` one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=LARGE) as found:
        yield found


def plain_blocks() -> Whole:
    torch.manual_seed(0)
    return Whole(*(Block(WIDTH, 4) for _ in range(DEPTH)))


def compiled(scope: str, **more: object) -> nn.Sequential:
    """Return blocks that are compiled as one, or one by one and planned as a step."""
    model = plain_blocks()
    given: Given = {"compiler": "eager", "calibrate": False, "scope": scope, "device_budget": DEVICE[scope]}
    given |= {"recompute": "none", **more}
    for each in (model,) if scope == "region" else model:
        each.compile(backend="tencache", options=given)
    return model


def check(model: nn.Module) -> None:
    """Run a step, and see that its gradients are those of the model that is not compiled."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = plain_blocks()
    plain(x).square().mean().backward()
    model.zero_grad()
    model(x).square().mean().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def swaps(scope: str) -> tuple[int, dict[Tier, int]]:
    """Return the host budget that the plan is for, and how many bytes it offloads to each tier."""
    record = tencache_fx.regions()[-1] if scope == "region" else tencache_fx.steps()[-1]
    found = dict.fromkeys((Tier.HOST, Tier.NVME), 0)
    for each in record.plan.transfers:
        found[each.tier] += each.nbytes
    return record.problem.budgets.whole_host_bytes, found


def steps(model: nn.Module, count: int = 3) -> None:
    for _ in range(count):
        check(model)


@pytest.mark.parametrize("scope", ["region", "step"])
def test_the_next_step_is_planned_for_a_lower_host_budget_and_for_a_higher_one(
    engine: Engine, tmp_path: Path, scope: str
) -> None:
    tencache_fx.configure(host_budget=LARGE, spill_dir=str(tmp_path), spill_budget="64MiB")
    model = compiled(scope)
    steps(model)
    _, before = swaps(scope)
    assert before[Tier.HOST] > SMALL
    assert not before[Tier.NVME]
    tencache_fx.configure(host_budget=SMALL)
    engine.stats.take()
    steps(model)
    budget, found = swaps(scope)
    assert budget <= SMALL
    assert found[Tier.NVME]
    assert engine.pool.budget_bytes == SMALL
    tencache_fx.configure(host_budget=LARGE)
    steps(model)
    assert swaps(scope)[1] == before
    compilations = REGIONS.compilations
    tencache_fx.configure(host_budget=2 * LARGE)
    steps(model)
    assert REGIONS.compilations == compilations, "no plan is better"


@pytest.mark.parametrize("scope", ["region", "step"])
def test_a_host_budget_that_is_too_low_is_refused_in_one_sentence_until_it_is_raised(
    engine: Engine, scope: str
) -> None:
    tencache_fx.configure(host_budget=LARGE)
    model = compiled(scope)
    steps(model)
    tencache_fx.configure(host_budget=LEAST)
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"need [\d.]+ MB of pinned host memory; host_budget is 200 kB"):
            check(model)
    assert engine.pool.budget_bytes == LEAST
    tencache_fx.configure(host_budget=LARGE)
    steps(model)


@pytest.mark.parametrize("scope", ["region", "step"])
def test_a_budget_given_with_the_compilation_is_kept_and_limited(engine: Engine, tmp_path: Path, scope: str) -> None:
    model = compiled(scope, host_budget=LARGE // 2, spill_dir=str(tmp_path), spill_budget="64MiB")
    steps(model)
    assert LARGE // 4 < swaps(scope)[0] <= LARGE // 2
    tencache_fx.configure(host_budget=SMALL)
    steps(model)
    assert swaps(scope)[0] <= SMALL
    assert engine.pool.budget_bytes == SMALL
    tencache_fx.configure(host_budget=2 * LARGE)
    steps(model)
    assert LARGE // 4 < swaps(scope)[0] <= LARGE // 2


@pytest.mark.parametrize("scope", ["region", "step"])
def test_the_next_step_is_planned_for_another_budget_of_the_disk(engine: Engine, tmp_path: Path, scope: str) -> None:
    tencache_fx.configure(host_budget=LARGE, spill_dir=str(tmp_path), spill_budget=SMALL)
    model = compiled(scope)
    steps(model)
    assert not swaps(scope)[1][Tier.NVME]
    tencache_fx.configure(host_budget=SMALL)
    with pytest.raises(BudgetError, match=r"transfers .* need [\d.]+ MB of .* 1\.05 MB\.\n  Set"):
        check(model)
    tencache_fx.configure(spill_budget="64MiB")
    steps(model)
    assert swaps(scope)[1][Tier.NVME] > SMALL
    assert engine.store is not None
    least_bytes = engine.store.file_bytes
    tencache_fx.configure(spill_budget=least_bytes)
    steps(model)
    assert swaps(scope)[1][Tier.NVME] > SMALL
    assert engine.store.budget_bytes == least_bytes


def test_a_directory_that_is_configured_later_is_planned_with(engine: Engine, tmp_path: Path) -> None:
    tencache_fx.configure(host_budget=LARGE)
    model = compiled("region")
    steps(model)
    tencache_fx.configure(host_budget=SMALL)
    with pytest.raises(BudgetError, match="spill_dir"):
        check(model)
    tencache_fx.configure(spill_dir=str(tmp_path), spill_budget="64MiB")
    steps(model)
    assert swaps("region")[1][Tier.NVME]


def test_a_variant_that_is_compiled_later_keeps_to_the_budget(engine: Engine, tmp_path: Path) -> None:
    """Its options are those of the first one, whose budget counts no more."""
    tencache_fx.configure(host_budget=LARGE, spill_dir=str(tmp_path), spill_budget="64MiB")
    model = compiled("region")
    steps(model)
    tencache_fx.configure(host_budget=SMALL)
    tencache_fx.offload(model[0], "cpu")
    model.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    assert engine.pool.budget_bytes == SMALL
    assert swaps("region")[0] <= SMALL


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_a_backward_under_way_goes_on_before_the_next_step_is_planned(engine: Engine, tmp_path: Path) -> None:
    tencache_fx.configure(host_budget=LARGE, spill_dir=str(tmp_path), spill_budget="64MiB")
    model = compiled("region")
    steps(model)
    whole_bytes, _ = swaps("region")
    model.zero_grad()
    x = torch.randn(ROWS, WIDTH)
    loss = losses(model, x)
    assert engine.pool.acquired_bytes > SMALL, "what the backward reads is in host memory"
    tencache_fx.configure(host_budget=engine.pool.acquired_bytes)
    loss.backward()
    assert swaps("region")[0] == whole_bytes, "the former plan has gone on"
    assert not engine.pool.acquired_bytes
    plain = plain_blocks()
    losses(plain, x).backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    tencache_fx.configure(host_budget=SMALL)
    steps(model)
    assert swaps("region")[0] <= SMALL
    assert swaps("region")[1][Tier.NVME]
