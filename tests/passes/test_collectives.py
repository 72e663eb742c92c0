"""Collectives in the graph: they read and write beside what follows them, until they are waited for."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from harness import capture_of
from test_refreshes import graph_of
from test_verify_graph import Written, breaks, carry_out
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

import tencache_fx
from tencache_fx.errors import InvariantError
from tencache_fx.ops import REFRESH_PARAM, SYNC_PARAM
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.lifetimes import StorageNodes, measure_lifetimes
from tencache_fx.passes.parameter_transfers import write_refreshes
from tencache_fx.passes.verify_parameters import check_parameters
from tencache_fx.planning.liveness import inactive_intervals
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Kind, Step
from tencache_fx.region.collective_order import compare, find_order
from tencache_fx.runtime.process_groups import may_overlap

COLLECTIVES = torch.ops._c10d_functional
WIDTH = 256


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def begin(given: Tensor) -> Tensor:
    return COLLECTIVES.all_reduce(given, "sum", dist.group.WORLD.group_name)


def chain(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


class LateInForward(torch.autograd.Function):
    """Begin a collective, compute, wait for it: all in the forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, shard: Tensor, weight: Tensor) -> Tensor:
        given = shard * 2
        whole = begin(given)
        x = chain(x, weight, weight, weight)
        whole = COLLECTIVES.wait_tensor(whole)
        ctx.save_for_backward(given, whole)
        return x @ whole

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        given, whole = ctx.saved_tensors
        return gradient @ (whole + given).t(), None, None


class LateInBackward(torch.autograd.Function):
    """Begin a collective in the forward, and wait for it in the backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, shard: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(begin(shard * 2))
        return x.sin() @ weight

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = ctx.saved_tensors
        gradient = gradient.exp().sin()
        return gradient @ COLLECTIVES.wait_tensor(whole).t(), None, None


class Large(torch.autograd.Function):
    """Begin a collective, hold something as large as what it reads for a while, wait for it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, shard: Tensor, weight: Tensor) -> Tensor:
        whole = begin(shard * 2)
        x = x + (x.t() @ x).sum()
        whole = COLLECTIVES.wait_tensor(whole)
        ctx.save_for_backward(whole)
        return x @ whole

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = ctx.saved_tensors
        return gradient @ whole.t(), None, None


def captured(late: type[torch.autograd.Function], *, rows: int = 512, layers: int = 5) -> RegionGraphs:
    def program(x: Tensor, shard: Tensor, *weights: Tensor) -> Tensor:
        return chain(late.apply(x, shard, weights[0]), *weights)

    leaves = [torch.randn(64, 64, requires_grad=True) for _ in range(layers)]
    capture = capture_of(program, torch.randn(rows, 64, requires_grad=True), torch.randn(64, 64), *leaves)
    repair_view_fakes(capture)
    return capture


def measured(capture: RegionGraphs) -> tuple[dict[str, int], dict[str, StorageNodes]]:
    """Return the steps by name, and the storages."""
    steps = {node.name: step for step, node in enumerate(capture.nodes)}
    return steps, {item.storage.name: item for item in measure_lifetimes(capture)}


def test_a_wait_returns_what_the_collective_writes() -> None:
    steps, found = measured(captured(LateInForward))
    assert "wait_tensor" in steps
    assert "wait_tensor" not in found
    assert "wait_tensor" in {node.name for node in found["all_reduce"].members}


@pytest.mark.parametrize("late", [LateInForward, LateInBackward])
def test_nothing_leaves_while_a_collective_writes_it(late: type[torch.autograd.Function]) -> None:
    capture = captured(late)
    steps, found = measured(capture)
    begun, waited = steps["all_reduce"], steps["wait_tensor"]
    assert waited > begun + 2
    whole = found["all_reduce"].storage
    assert (whole.kind, whole.birth, whole.ready) == (Kind.ACTIVATION, begun, waited)
    assert all(u >= waited for u, _ in inactive_intervals(whole))
    if late is LateInForward:
        assert whole.spillable
        assert inactive_intervals(whole)


@pytest.mark.parametrize("late", [LateInForward, LateInBackward])
def test_what_a_collective_reads_stays_until_the_wait(late: type[torch.autograd.Function]) -> None:
    steps, found = measured(captured(late))
    begun, waited = steps["all_reduce"], steps["wait_tensor"]
    given = found["mul"].storage
    assert given.death == (waited + 1 if late is LateInBackward else given.uses[-1] + 1)
    assert set(range(begun, waited + 1)) <= set(given.uses)


def test_what_nobody_waits_for_stays() -> None:
    capture = captured(LateInForward)
    (wait,) = (node for node in capture.nodes if node.name == "wait_tensor")
    wait.target = torch.ops.aten.alias.default
    steps, found = measured(capture)
    assert not found["all_reduce"].storage.spillable
    assert found["mul"].storage.death == found["all_reduce"].storage.death == len(steps)


def test_what_is_written_by_name_is_written() -> None:
    """As `out=` of a collective is."""
    capture = captured(LateInForward)
    (begun,) = (node for node in capture.nodes if node.name == "all_reduce")
    (other,) = (node for node in capture.nodes if node.name == "mul")
    begun.target, begun.kwargs = COLLECTIVES.all_gather_into_tensor_out.default, {"out": other}
    begun.meta["val"] = other.meta["val"]
    repair_view_fakes(capture)
    assert not measured(capture)[1]["mul"].storage.spillable
    _, found = measured(captured(LateInForward))
    assert found["mul"].storage.spillable


@pytest.fixture
def written() -> Written:
    """A plan in which what a collective writes is offloaded, and what it reads, which the backward reads too."""
    found = carry_out(captured(LateInForward))
    assert {"all_reduce", "mul"} <= {transfer.name for transfer in found.plan.transfers}
    return found


def node_of(written: Written, name: str) -> fx.Node:
    (node,) = (node for node in written.capture.forward.nodes if node.name == name)
    return node


def test_what_leaves_unfinished_is_found(written: Written) -> None:
    begun = node_of(written, "all_reduce")
    offload, release = (node_of(written, f"{role}_all_reduce") for role in ("offload", "release"))
    assert offload.args[0] is release.args[1] is node_of(written, "wait_tensor")
    offload.args, release.args = (begun, *offload.args[1:]), (release.args[0], begun, *release.args[2:])
    written.check()
    begun.append(offload)
    with breaks("under-way"):
        written.check()


def test_what_is_released_while_a_collective_reads_it_is_found(written: Written) -> None:
    release = node_of(written, "release_mul")
    assert node_of(written, "wait_tensor") < release
    node_of(written, "all_reduce").append(release)
    with breaks("released-last"):
        written.check()


def test_a_wait_whose_fake_stands_alone_is_found(written: Written) -> None:
    wait = node_of(written, "wait_tensor")
    wait.meta["val"] = wait.meta["val"].clone()
    with breaks("aliasing"):
        written.check()


def test_what_a_collective_reads_counts_until_the_wait_in_the_checker() -> None:
    capture = captured(Large, rows=1, layers=1)
    steps, found = measured(capture)
    given, begun = found["mul"].storage, Step(steps["all_reduce"])
    freed = replace(found["mul"], storage=replace(given, death=Step(begun + 1), uses=(given.birth, begun)))
    with breaks("peak"):
        carry_out(capture, [freed if item is found["mul"] else item for item in found.values()])
    carry_out(captured(Large, rows=1, layers=1))


def with_gather(*, wait_last: bool) -> fx.Graph:
    """A backward that gathers a weight that stays; an offload_grad begins its update before the gather is over."""
    graph = graph_of("offload_grad", "refresh_param")
    weight, _ = graph.find_nodes(op="placeholder")
    (sync,) = graph.find_nodes(op="call_function", target=SYNC_PARAM)
    (refresh,) = graph.find_nodes(op="call_function", target=REFRESH_PARAM)
    with graph.inserting_after(sync):
        begun = graph.call_function(COLLECTIVES.all_gather_into_tensor.default, (weight, 1, "0"))
    begun.meta["val"] = torch.ones(2, 2)
    with graph.inserting_after(refresh) if wait_last else graph.inserting_before(refresh):
        wait = graph.call_function(COLLECTIVES.wait_tensor.default, (begun,))
    wait.meta["val"] = begun.meta["val"]
    return graph


def test_a_parameter_is_refreshed_behind_the_gather_that_reads_it() -> None:
    problem = SimpleNamespace(storages=[SimpleNamespace(name="change", parameter="weight")])
    check_parameters(problem, (with_gather(wait_last=False),))
    with breaks("refreshes"):
        check_parameters(problem, (graph := with_gather(wait_last=True),))
    (refresh,) = graph.find_nodes(op="call_function", target=REFRESH_PARAM)
    refresh.replace_all_uses_with(refresh.args[0])
    graph.erase_node(refresh)
    with FakeTensorMode() as mode:
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = mode.from_tensor(node.meta["val"])
    write_refreshes(SimpleNamespace(backward=graph), frozenset(), 0)
    (refresh,) = graph.find_nodes(op="call_function", target=REFRESH_PARAM)
    (wait,) = graph.find_nodes(op="call_function", target=COLLECTIVES.wait_tensor.default)
    assert wait < refresh


def test_two_ranks_wait_late_in_a_tight_budget(tmp_path: Path) -> None:
    script = [sys.executable, str(Path(__file__).resolve().parents[1] / "support" / "late_waits.py")]
    ranks = [
        subprocess.Popen([*script, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for each in found:
        assert not each["free"]["transfers"]
        assert any(name.startswith("all_reduce") for name in each["tight"]["transfers"])
        for budget in ("free", "tight"):
            assert each[budget]["error"] < 1e-4
            names = ["all_reduce", *(f"all_reduce_{k}" for k in range(1, 4))]
            waits = ["wait_tensor_1", "wait_tensor_2", "wait_tensor_3", "wait_tensor"]
            assert each[budget]["collectives"] == [
                [name, "all reduce", 2, 4 * WIDTH * WIDTH, name, wait] for name, wait in zip(names, waits, strict=True)
            ]
            assert 0 < each[budget]["exposed"] < each[budget]["under way"], "kernels run between begins and waits"


def test_ranks_that_run_collectives_in_another_order_are_told() -> None:
    store = torch.distributed.HashStore()
    order = ["all_gather of a", "all_gather of b"]
    compare(store, "region", order, 3)
    compare(store, "region", list(order), 3)
    compare(store, "another region", order[::-1], 4)
    with pytest.raises(InvariantError, match="order: region 3 runs 2 collectives in another order"):
        compare(store, "region", order[::-1], 3)


def test_programs_that_differ_in_how_they_reduce_alone_are_two_programs() -> None:
    options = {"device_budget": "4MB", "compiler": "eager", "calibrate": False}
    for way in ("sum", "max"):
        torch.compiler.reset()

        def run(x: Tensor, way: str = way) -> Tensor:
            total = COLLECTIVES.all_reduce(torch.sin(x.detach()), way, dist.group.WORLD.group_name)
            return COLLECTIVES.wait_tensor(total) * x

        x = torch.randn(128, WIDTH, requires_grad=True)
        found = torch.compile(run, backend="tencache", options=options)(x)
        assert torch.equal(found, torch.sin(x) * x), "of one rank"
        assert tencache_fx.regions()[-1].problem.collectives


def test_ranks_of_two_rows_of_a_mesh_have_one_order_whatever_their_groups_are_called() -> None:
    def ordered(*groups: str) -> tuple[list[str], list[str]]:
        graph = fx.Graph()
        with FakeTensorMode():
            given = graph.placeholder("given")
            given.meta["val"] = torch.empty(4)
            for group in groups:
                graph.call_function(COLLECTIVES.all_reduce.default, (given, "sum", group)).meta["val"] = torch.empty(4)
        return find_order([graph])

    assert ordered("3", "5")[0] == ["3", "5"]
    assert ordered("3", "5")[1] == ordered("4", "6")[1]
    assert ordered("3", "5", "3")[1] != ordered("3", "5", "5")[1]
    assert ordered() == ([], [])


def test_a_region_overlaps_its_collectives_unless_that_is_unsafe_or_its_budget_has_no_room() -> None:
    """Over gloo several at once corrupt the heap, so another backend stands in for those that overlap."""
    fake = dist.new_group([0], backend="fake")
    try:
        gloo = dist.group.WORLD
        assert not may_overlap([gloo.group_name], torch.device("cpu"))
        assert may_overlap([fake.group_name], torch.device("cpu"))
        parts = [torch.randn(WIDTH, WIDTH) for _ in range(3)]

        def begins_ahead(group: dist.ProcessGroup, device_budget: int) -> bool:
            def program(x: Tensor, *parts: Tensor) -> Tensor:
                for part in parts:
                    whole = COLLECTIVES.all_gather_into_tensor(part, 1, group.group_name)
                    x = torch.tanh(x @ COLLECTIVES.wait_tensor(whole))
                return x

            torch.compiler.reset()
            options = {"compiler": "eager", "calibrate": False, "device_budget": device_budget}
            with torch.no_grad():
                torch.compile(program, backend="tencache", options=options)(torch.randn(8, WIDTH), *parts)
            names = [op.name for op in tencache_fx.regions()[-1].problem.ops]
            return names.index("all_gather_into_tensor_1") < names.index("mm")

        assert not begins_ahead(gloo, 1 << 30)
        least = floor_bytes(tencache_fx.regions()[-1].problem)
        assert begins_ahead(fake, 1 << 30)
        assert not begins_ahead(fake, least)
    finally:
        torch.compiler.reset()
        dist.destroy_process_group(fake)
