"""The order of collectives that ranks agree on: gathers begin before sums if the first rank overlaps collectives."""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from torch import nn

import tencache_fx
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Collective, CollectiveKind, Problem
from tencache_fx.region import compilation, rank_agreement

WIDTH = 256
OPTIONS = {"device_budget": "64MB", "compiler": "eager", "calibrate": False}


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be one of two ranks that exchange nothing, but take their store for one that others read, too."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    monkeypatch.setattr(rank_agreement, "several_ranks", lambda: True)
    yield
    torch.compiler.reset()
    tencache_fx.close()
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def compiled(monkeypatch: pytest.MonkeyPatch, *, overlaps: bool) -> tuple[list[str], dict[str, int]]:
    """Return the names of collectives in order, and for gathers of the backward the products that run beside them."""
    torch.compiler.reset()
    monkeypatch.setattr(compilation, "may_overlap", lambda *_: overlaps)
    model = tencache_fx.offload(nn.Sequential(*(Block() for _ in range(3))), "cpu", shard=True)
    run = torch.compile(model, backend="tencache", options=OPTIONS)
    run(torch.randn(WIDTH, WIDTH)).square().mean().backward()
    return collectives(tencache_fx.regions()[-1].problem)


def collectives(problem: Problem) -> tuple[list[str], dict[str, int]]:
    """Return their names in order, and for gathers of the backward the products that run beside them."""
    before = [0, *accumulate(op.name.startswith("mm") for op in problem.ops)]  # products before each step

    def beside(each: Collective) -> int:
        return before[each.needed_at] - before[each.begin]

    ordered = sorted(problem.collectives, key=lambda each: each.begin)
    backward = [each for each in ordered if each.begin >= problem.boundary]
    return [each.name for each in ordered], {
        each.name: beside(each) for each in backward if each.kind is CollectiveKind.ALL_GATHER
    }


@pytest.mark.parametrize("later", [True, False])
def test_gathers_run_beside_products_and_who_comes_later_keeps_to_the_order(
    monkeypatch: pytest.MonkeyPatch,
    later: bool,  # noqa: FBT001
) -> None:
    order, beside = compiled(monkeypatch, overlaps=True)
    assert len(beside) == 5, "the first layer needs no gradient of its input"
    assert [*beside.values()][1:] == [2, 2, 2, 2], "one product comes before the first"
    assert compiled(monkeypatch, overlaps=later)[0] == order


def test_gathers_stay_behind_sums_where_the_first_rank_runs_collectives_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, beside = compiled(monkeypatch, overlaps=False)
    assert set(beside.values()) == {0}
    later, _ = compiled(monkeypatch, overlaps=True)
    assert later == order


def test_a_budget_that_is_enough_for_larger_inputs_still_is_behind_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gathers before sums one more weight is whole, which the larger inputs have no room for."""
    monkeypatch.setattr(compilation, "may_overlap", lambda *_: True)
    model = tencache_fx.offload(nn.Sequential(*(Block() for _ in range(4))), "cpu", shard=True)
    run = torch.compile(model, backend="tencache", dynamic=False, options={**OPTIONS, "device_budget": "5.5MB"})
    before = len(tencache_fx.regions())
    for rows in (16, WIDTH):
        run(torch.randn(rows, WIDTH)).square().mean().backward()
    peaks_bytes = [each.plan.forecast.peak_bytes for each in tencache_fx.regions()[before:]]
    assert len(peaks_bytes) == 2
    assert max(peaks_bytes) <= 5_500_000


def test_what_may_leave_the_device_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters stay on the device; larger inputs, which need that room, get it."""
    monkeypatch.setattr(compilation, "may_overlap", lambda *_: True)
    model = tencache_fx.offload(nn.Sequential(*(Block() for _ in range(4))), "cpu", shard=True)
    run = torch.compile(model, backend="tencache", dynamic=False, options={**OPTIONS, "device_budget": "16MB"})
    before = len(tencache_fx.regions())
    for rows in (WIDTH, 2 * WIDTH):
        run(torch.randn(rows, WIDTH)).square().mean().backward()
    first, second = tencache_fx.regions()[before:]
    assert floor_bytes(first.problem) > 8_000_000, "what stays is more than half of the budget"
    assert len(first.plan.resident) == 8
    _, beside = collectives(first.problem)
    assert [*beside.values()][1:] == [2] * 6
    assert collectives(second.problem)[0] == collectives(first.problem)[0]
    assert second.plan.forecast.peak_bytes <= 16_000_000
