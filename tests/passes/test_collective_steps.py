"""Collectives of captured graphs as planning knows them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from harness import capture_of, compiled
from torch import Tensor, nn

import tencache_fx
from tencache_fx.hardware import collective_rates, rates
from tencache_fx.hardware.collective_rates import FIXED_RATES, GroupRates, agree_on_rates, backend_of, group_rates
from tencache_fx.passes.collective_steps import Group, find_collectives
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.lifetimes import StorageNodes, measure_lifetimes
from tencache_fx.planning.collectives import busy_ns, in_between
from tencache_fx.planning.plan import Forecast
from tencache_fx.planning.problem import Budgets, Collective, CollectiveKind, Op, Problem
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.verify import verify_plan
from tencache_fx.region import compilation, kept_region
from tencache_fx.region.registry import REGIONS

OPS = torch.ops._c10d_functional
RANKS, SIDE = 2, 64
RATES = GroupRates(latency_ns=1000, bytes_per_s=10**9)


@pytest.fixture(autouse=True, scope="module")
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Gathered(torch.autograd.Function):
    """Multiply by a weight of which each rank has half, and give each rank its half of the gradient's sum."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, part: Tensor) -> Tensor:
        name = dist.group.WORLD.group_name
        whole = OPS.wait_tensor(OPS.all_gather_into_tensor(part, RANKS, name))
        ctx.save_for_backward(x, whole)
        return x @ whole

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, whole = ctx.saved_tensors
        name = dist.group.WORLD.group_name
        mine = OPS.reduce_scatter_tensor(x.t() @ gradient, "sum", RANKS, name)
        total = OPS.all_reduce(gradient.sum(0), "sum", name)
        of_x = gradient @ whole.t()
        return of_x + OPS.wait_tensor(total).sum(), OPS.wait_tensor(mine)


def captured(*, waits: bool = True) -> tuple[RegionGraphs, Sequence[StorageNodes], dict[str, Collective]]:
    """Return the graphs, their storages, and their collectives by name; of these `waits` says that all are awaited."""
    x, part = (torch.randn(rows, SIDE, requires_grad=True) for rows in (256, SIDE // RANKS))
    capture = capture_of(lambda x, part: Gathered.apply(x.sin(), part * 2), x, part)
    if not waits:
        (wait,) = (node for node in capture.nodes if node.name == "wait_tensor")
        wait.target = torch.ops.aten.clone.default
    repair_view_fakes(capture)
    storages = measure_lifetimes(capture)
    found = find_collectives(capture, storages, {dist.group.WORLD.group_name: Group(RANKS, RATES)})
    return capture, storages, {each.name: each for each in found}


def test_each_collective_has_its_kind_its_bytes_and_its_steps():
    capture, _, found = captured()
    steps = {node.name: step for step, node in enumerate(capture.nodes)}
    gather, scatter, total = found.values()
    assert [each.kind for each in found.values()] == [
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_REDUCE,
    ]
    assert [each.nbytes for each in found.values()] == [4 * SIDE * SIDE, 4 * SIDE * SIDE, 4 * SIDE]
    half, whole_ns = 1000 + 2 * SIDE * SIDE, 1000 + 4 * SIDE  # a reduction for all sends two halves
    assert [each.duration_ns for each in found.values()] == [half, half, whole_ns]
    assert all(each.begin == steps[name] for name, each in found.items())
    assert gather.needed_at == steps["wait_tensor"]
    assert steps["wait_tensor_1"] == total.needed_at < scatter.needed_at == steps["wait_tensor_2"]
    assert (gather.reads, gather.writes) == (("mul",), ("all_gather_into_tensor",))
    assert scatter.begin + 2 < scatter.needed_at


def test_what_nobody_waits_for_is_under_way_until_the_end():
    capture, storages, found = captured(waits=False)
    gather = found["all_gather_into_tensor"]
    assert gather.needed_at == len(capture.nodes)
    problem = Problem(
        ops=tuple(Op(name=node.name, duration_ns=1) for node in capture.nodes),
        boundary=capture.boundary,
        storages=tuple(item.storage for item in storages),
        links=rates.FIXED_LINKS,
        budgets=Budgets(device_bytes=None, host_bytes=0),
        collectives=tuple(found.values()),
    )
    verify_plan(problem, make_plan(problem, "none"))
    assert in_between(problem) == {*gather.reads, *gather.writes}


class HalfLinear(nn.Module):
    """A layer whose weight is gathered from halves."""

    def __init__(self, side: int = SIDE) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(side // RANKS, side))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Gathered.apply(x, self.part))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_plan_has_the_collectives_of_its_region(compiler: str):
    """Over gloo's rates, as `fake` has none of its own: a begin costs a launch, and the wait what is left then."""
    model = nn.Sequential(HalfLinear(), HalfLinear())
    options = {"device_budget": "1MB", "compiler": compiler, "calibrate": False}
    known = set(REGIONS.live())
    compiled(model, options)(torch.randn(256, SIDE)).sum().backward()
    (record,) = (each.record for each in REGIONS.live() if each not in known)
    problem, forecast = record.problem, record.plan.forecast
    fixed = FIXED_RATES["cpu"]
    kinds = [each.kind for each in problem.collectives]
    assert kinds.count(CollectiveKind.ALL_GATHER) >= 2
    assert (kinds.count(CollectiveKind.REDUCE_SCATTER), kinds.count(CollectiveKind.ALL_REDUCE)) == (2, 2)
    assert {each.bytes_per_s for each in problem.collectives} == {fixed.bytes_per_s}
    assert {each.latency_ns for each in problem.collectives} == {fixed.latency_ns}
    assert 0 < forecast.stall_collective_ns <= forecast.collective_ns == busy_ns(problem)
    for each in problem.collectives:
        assert problem.ops[each.begin].duration_ns < each.duration_ns / 10
        assert problem.ops[each.needed_at].duration_ns == 0
    assert forecast.makespan_ns == (
        sum(op.duration_ns for op in problem.ops)
        + forecast.stall_out_ns
        + forecast.stall_in_ns
        + forecast.stall_collective_ns
    )


class Reduced(nn.Module):
    """A sum over ranks of what the rows make is under way while a weight is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = HalfLinear(), HalfLinear()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        total = OPS.all_reduce(hidden.detach(), "sum", dist.group.WORLD.group_name)
        return self.second(hidden) + OPS.wait_tensor(total)


def test_with_other_sizes_collectives_move_what_they_read_and_write_then():
    options = {"device_budget": "4MB", "compiler": "eager", "calibrate": False}
    x = torch.randn(256, SIDE)
    torch._dynamo.mark_dynamic(x, 0)
    known = set(REGIONS.live())
    compiled(Reduced(), options)(x).sum().backward()
    (region,) = (each for each in REGIONS.live() if each not in known)
    formulas, problem = region.current.footprint.formulas, region.record.problem
    larger = formulas.resize(problem, formulas.planned, tuple(8 * size for size in formulas.planned))
    grown = {(a.kind, b.nbytes / a.nbytes) for a, b in zip(problem.collectives, larger.collectives, strict=True)}
    of_rows = {ratio for kind, ratio in grown if kind is CollectiveKind.ALL_REDUCE}
    assert 8 in of_rows
    assert {ratio for kind, ratio in grown if kind is not CollectiveKind.ALL_REDUCE} == {1}


def test_a_region_is_kept_for_the_rates_that_it_was_planned_for(monkeypatch: pytest.MonkeyPatch):
    """Else another start would take up a plan that overlaps, or copies, at the rates of another link."""
    keys = []

    def cache_key(*given: object) -> str | None:
        keys.append(kept_region.cache_key(*given))
        return None  # no entry is read or written

    monkeypatch.setattr(compilation, "cache_key", cache_key)

    def program(x: Tensor, part: Tensor) -> Tensor:
        return Gathered.apply(x, part)

    x, part = torch.randn(256, SIDE), torch.randn(SIDE // RANKS, SIDE, requires_grad=True)
    for quick in (None, None, RATES):
        torch.compiler.reset()
        if quick is not None:
            monkeypatch.setitem(collective_rates._AGREED, dist.group.WORLD, {"cpu": quick})
        options = {"device_budget": "1MB", "host_budget": "1MB", "calibrate": False}
        torch.compile(program, backend="tencache", options=options)(x, part)
    assert None not in keys
    assert keys[0] == keys[1] != keys[2]


def test_ranks_that_send_nothing_are_not_measured():
    group = dist.group.WORLD
    assert backend_of(group, torch.device("cpu")) == "fake"
    assert group_rates(group, "cpu") == FIXED_RATES["cpu"]
    assert agree_on_rates(group, torch.device("cpu"), calibrate=True) == FIXED_RATES["cpu"]


def test_collectives_overlap_where_that_is_forecast_to_be_faster(monkeypatch: pytest.MonkeyPatch):
    """With room, gathers hide behind products. Where all waits for slow copies, they would only hold more memory."""
    slow = {name: 2 * 10**8 for name in asdict(rates.FIXED_LINKS) if name.startswith(("d2h", "h2d"))}
    monkeypatch.setattr(rates, "FIXED_LINKS", replace(rates.FIXED_LINKS, **slow))
    quick = {"cpu": GroupRates(latency_ns=20_000, bytes_per_s=10**10)}
    monkeypatch.setitem(collective_rates._AGREED, dist.group.WORLD, quick)

    def forecast_with(budget: int, **patches: bool) -> Forecast:
        with monkeypatch.context() as patch:
            for name, answer in patches.items():
                patch.setattr(compilation, name, lambda *_, answer=answer: answer)
            torch.compiler.reset()
            model = nn.Sequential(*(HalfLinear(256) for _ in range(6)))
            options = {"device_budget": budget, "compiler": "eager", "calibrate": False}
            compiled(model, options)(torch.randn(256, 256))
        return tencache_fx.regions()[-1].plan.forecast

    peak_bytes = forecast_with(1 << 30, may_overlap=False).peak_bytes
    for budget, overlaps in ((peak_bytes * 9 // 10, True), (peak_bytes * 8 // 10, False)):
        in_turn, overlapping = forecast_with(budget, may_overlap=False), forecast_with(budget, may_gain_in_turn=False)
        assert in_turn.collective_ns > in_turn.stall_collective_ns > 3 * overlapping.stall_collective_ns
        assert (overlapping.makespan_ns < in_turn.makespan_ns) == overlaps
        assert forecast_with(budget) == (overlapping if overlaps else in_turn)
