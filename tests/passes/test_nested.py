"""Nested tensors: their lengths are read from what they consist of, and what comes is planned for."""

from collections.abc import Callable, Iterator

import pytest
import torch
from harness import EAGER, INDUCTOR, Options, compiled
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError

LENGTHS = ((33, 55, 22), (44, 60, 30), (90, 100, 80))


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))))


def nested(lengths: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(sum(lengths))
    return torch.nested.nested_tensor([torch.randn(n, 16, generator=draw) for n in lengths], layout=torch.jagged)


def train(wrap: Callable[[nn.Module], Callable[..., Tensor]]) -> Iterator[Tensor]:
    model = tower()
    run = wrap(model)
    for lengths in LENGTHS:
        model.zero_grad()
        loss = torch.cat([rows.sum(0) for rows in run(nested(lengths)).unbind()]).square().sum()
        loss.backward()
        yield loss.detach()
        yield model[0].weight.grad.clone()


@pytest.mark.filterwarnings("ignore:.*jagged layout")
@pytest.mark.parametrize("options", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_they_train_within_a_budget(options: Options) -> None:
    expected = list(train(lambda model: model))
    budget = "2MB" if options is EAGER else "1.3MB"
    found = list(train(lambda model: compiled(model, {**options, "device_budget": budget})))
    torch.testing.assert_close(found, expected)
    record = tencache_fx.regions()[-1]
    assert record.plan.transfers
    assert 270 * 256 * 4 in {storage.nbytes for storage in record.problem.storages}, "it was planned for the longest"


@pytest.mark.filterwarnings("ignore:.*jagged layout")
def test_lengths_beyond_the_budget_are_refused() -> None:
    steps = train(lambda model: compiled(model, {**EAGER, "device_budget": "1MB"}))
    next(steps)
    with pytest.raises(BudgetError, match=r"^region \d+ at s\d+ = (134|270)"):
        list(steps)
