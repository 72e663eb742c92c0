"""How often Python looks for garbage while a region is compiled."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.garbage import seldom_collected
from tencache_fx.region.compilation import Compilation

OPTIONS = {"compiler": "eager", "calibrate": False}


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the thresholds of the collector while regions are compiled."""
    found: list[int] = []
    run = Compilation.run

    def watched(self: Compilation, *args: Any, **kwargs: Any) -> Any:
        found.append(gc.get_threshold()[0])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Compilation, "run", watched)
    return found


@pytest.fixture
def before() -> Iterator[tuple[int, int, int]]:
    thresholds = gc.get_threshold()
    yield thresholds
    gc.set_threshold(*thresholds)


def train(budget: str) -> None:
    model = torch.compile(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="tencache", options={**OPTIONS, "device_budget": budget}
    )
    model(torch.randn(4, 8)).sum().backward()
    tencache_fx.close()


def test_garbage_is_looked_for_seldom_while_a_region_is_compiled(
    during: list[int], before: tuple[int, int, int]
) -> None:
    train("1MB")
    assert during[0] > 100 * before[0]
    assert gc.get_threshold() == before


def test_it_is_looked_for_as_before_where_compiling_fails(during: list[int], before: tuple[int, int, int]) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="BudgetError"):
        train("16B")
    assert during
    assert gc.get_threshold() == before


@pytest.mark.parametrize("threshold", [0, 1 << 30])
def test_who_wants_none_looked_for_by_itself_gets_that(before: tuple[int, int, int], threshold: int) -> None:
    gc.set_threshold(threshold, *before[1:])
    with seldom_collected():
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_of_several_threads_the_last_one_sets_it_back(before: tuple[int, int, int]) -> None:
    """A model may be offloaded in one thread while another one compiles."""
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(seldom_collected())
    second.enter_context(seldom_collected())
    first.close()
    assert gc.get_threshold()[0] > before[0]
    second.close()
    assert gc.get_threshold() == before
