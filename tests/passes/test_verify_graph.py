"""The checker of rewritten graphs: break each of its rules once, and the right one must speak."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness import capture_of
from torch import Tensor, fx

from tencache_fx.errors import InvariantError
from tencache_fx.hardware.rates import FIXED_LINKS
from tencache_fx.ops import OFFLOAD, PREFETCH, RELEASE, RUNTIME_OPS, WAIT
from tencache_fx.passes.graphs import RegionGraphs, step_nodes
from tencache_fx.passes.lifetimes import StorageNodes, measure_lifetimes
from tencache_fx.passes.transfers import insert_transfers
from tencache_fx.passes.verify_graph import verify_graphs
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Budgets, Op, Problem
from tencache_fx.planning.search import make_plan


@dataclass
class Written:
    """A region with its plan carried out, ready to be broken."""

    capture: RegionGraphs
    problem: Problem
    plan: Plan

    def check(self) -> None:
        verify_graphs(self.problem, self.plan, self.capture)

    def op(self, target: object, index: int = 0) -> fx.Node:
        """Return the runtime op of the `index`th transfer that crosses from the forward to the backward."""
        crossing = [s.name for s in self.plan.transfers if s.freed_at <= self.problem.boundary <= s.prefetch_at]
        role = {OFFLOAD: "offload", RELEASE: "release", PREFETCH: "prefetch", WAIT: "wait"}[target]
        (node,) = (
            n
            for g in self.capture.graphs
            for n in g.nodes
            if n.target is target and n.name == f"{role}_{crossing[index]}"
        )
        return node


def network(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


@pytest.fixture
def written() -> Written:
    return carry_out(capture_of(network, torch.randn(512, 64), *weights()))


@pytest.fixture
def donated() -> Written:
    """A region whose caller drops the first input."""
    capture = capture_of(network, torch.randn(512, 64, requires_grad=True) * 1, *weights())
    return carry_out(replace(capture, donated=frozenset((0,))))


def weights() -> list[Tensor]:
    return [torch.randn(64, 64, requires_grad=True) for _ in range(5)]


def carry_out(capture: RegionGraphs, known: Sequence[StorageNodes] = ()) -> Written:
    storages = known or measure_lifetimes(capture)
    problem = Problem(
        ops=tuple(Op(name=node.name, duration_ns=10_000) for node in capture.nodes),
        boundary=capture.boundary,
        storages=tuple(item.storage for item in storages),
        links=FIXED_LINKS,
        budgets=Budgets(device_bytes=None, host_bytes=1 << 30),
        min_spill_bytes=4096,
    )
    budget = Budgets(device_bytes=floor_bytes(problem), host_bytes=1 << 30)
    problem = replace(problem, budgets=budget)
    plan = make_plan(problem, "teraio")
    insert_transfers(capture, storages, plan, engine=0)
    made = Written(capture, problem, plan)
    made.check()
    return made


def breaks(rule: str) -> Any:
    return pytest.raises(InvariantError, match=rf"^{rule}: ")


def test_enough_transfers_to_break(written: Written) -> None:
    assert len([s for s in written.plan.transfers if s.freed_at <= written.problem.boundary <= s.prefetch_at]) >= 3


def test_a_release_is_dropped(written: Written) -> None:
    node = written.op(RELEASE)
    node.graph.erase_node(node)
    with breaks("pairs"):
        written.check()


def test_a_release_is_doubled(written: Written) -> None:
    node = written.op(RELEASE)
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)
    with breaks("pairs"):
        written.check()


def test_a_wait_on_nothing_of_ours(written: Written) -> None:
    wait = written.op(WAIT)
    tangent = next(n for n in wait.graph.nodes if n.name.startswith("tangents"))
    wait.replace_input_with(wait.args[0], tangent)  # type: ignore[arg-type]
    with breaks("pairs"):
        written.check()


def test_a_whole_swap_is_missing(written: Written) -> None:
    written.plan = replace(written.plan, transfers=written.plan.transfers[1:])
    with breaks("transfers"):
        written.check()


def test_a_release_of_another_tensor(written: Written) -> None:
    release, other = written.op(RELEASE), written.op(OFFLOAD, 1)
    release.args = (release.args[0], other.args[0], release.args[2])
    with pytest.raises(InvariantError, match="^(released-last|places|.*topolog)"):
        written.check()


def test_what_the_region_has_made_is_not_lent(written: Written) -> None:
    release = written.op(RELEASE)
    release.args = (*release.args, True)
    with breaks("owner"):
        written.check()


def test_donated_inputs_are_marked(donated: Written) -> None:
    donated.check()
    (release,) = (node for node in donated.capture.forward.nodes if node.target is RELEASE and node.args[3:])
    release.args = release.args[:3]
    with breaks("owner"):
        donated.check()


def test_a_reader_after_the_release(written: Written) -> None:
    release = written.op(RELEASE)
    with release.graph.inserting_after(release):
        late = release.graph.call_function(torch.ops.aten.neg.default, (release.args[1],))
        late.meta["val"] = release.args[1].meta["val"].neg()  # type: ignore[union-attr]
    with breaks("released-last"):
        written.check()


def test_a_view_read_after_the_release(written: Written) -> None:
    release = written.op(RELEASE)
    source = release.args[1]
    assert isinstance(source, fx.Node)
    with release.graph.inserting_after(source):
        view = release.graph.call_function(torch.ops.aten.alias.default, (source,))
        view.meta["val"] = torch.ops.aten.alias.default(source.meta["val"])
    with release.graph.inserting_after(release):
        late = release.graph.call_function(torch.ops.aten.neg.default, (view,))
        late.meta["val"] = source.meta["val"].neg()
    with breaks("released-last"):
        written.check()


def test_the_source_is_returned(written: Written) -> None:
    release = written.op(RELEASE)
    (output,) = release.graph.find_nodes(op="output")
    output.args = ((*output.args[0][:-1], release.args[1]),)
    with pytest.raises(InvariantError, match="^(released-last|hand-over): "):
        written.check()


@pytest.mark.parametrize(
    ("position", "value"), [(1, [256, 128]), (2, [1, 512]), (3, torch.bfloat16), (4, torch.device("meta"))]
)
def test_wrong_geometry(written: Written, position: int, value: object) -> None:
    wait = written.op(WAIT)
    wait.args = (*wait.args[:position], value, *wait.args[position + 1 :])  # type: ignore[assignment]
    with breaks("geometry"):
        written.check()


def test_a_wrong_fake(written: Written) -> None:
    wait = written.op(WAIT)
    wait.meta["val"] = wait.meta["val"].t()
    with breaks("geometry"):
        written.check()


def test_a_lazy_conjugate_leaves(written: Written) -> None:
    source = written.op(OFFLOAD).args[0]
    assert isinstance(source, fx.Node)
    with source.meta["val"].fake_mode:
        source.meta["val"] = torch.view_as_complex(source.meta["val"].unflatten(1, (-1, 2))).conj()
    with breaks("geometry"):
        written.check()


def test_hand_over_is_reordered(written: Written) -> None:
    first, second = written.op(OFFLOAD, 0), written.op(OFFLOAD, 1)
    (output,) = first.graph.find_nodes(op="output")
    swap = {first: second, second: first}
    output.args = (tuple(swap.get(v, v) for v in output.args[0]),)
    with breaks("hand-over"):
        written.check()


@pytest.mark.parametrize("which", [0, -1])
def test_a_saved_value_is_not_handed_over(written: Written, which: int) -> None:
    (output,) = written.capture.forward.find_nodes(op="output")
    values = list(output.args[0])
    del values[written.capture.num_outputs + which if which >= 0 else which]
    output.args = (tuple(values),)
    with breaks("hand-over"):
        written.check()


def test_a_view_that_stands_alone(written: Written) -> None:
    release = written.op(RELEASE)
    source = release.args[1]
    assert isinstance(source, fx.Node)
    with release.graph.inserting_after(source):
        view = release.graph.call_function(torch.ops.aten.alias.default, (source,))
        view.meta["val"] = source.meta["val"].clone()
    with breaks("aliasing"):
        written.check()


@pytest.mark.parametrize("target", [OFFLOAD, RELEASE, PREFETCH, WAIT])
def test_an_op_stands_elsewhere(written: Written, target: object) -> None:
    node = written.op(target)
    steps = [n for n in step_nodes(node.graph) if n.target not in RUNTIME_OPS]
    before = next(n for n in reversed(steps) if n < node)
    after = next((n for n in steps if node < n), None)
    users, inputs = set(node.users), set(node.all_input_nodes)
    if target is WAIT or before in inputs or after is None or after in users:
        if target is PREFETCH or (before not in inputs and target is not OFFLOAD):
            before.prepend(node)
        elif after is not None and after not in users:
            after.append(node)
        else:
            before.prepend(node)
    else:
        after.append(node)
    with pytest.raises((InvariantError, RuntimeError), match="^places: |used before it has been defined"):
        written.check()


def test_a_step_is_gone(written: Written) -> None:
    ops = (*written.problem.ops[:-1], Op(name="never_there", duration_ns=1))
    written.problem = replace(written.problem, ops=ops)
    with breaks("places"):
        written.check()


def test_a_lie_about_the_peak(written: Written) -> None:
    forecast = replace(written.plan.forecast, peak_bytes=written.plan.forecast.peak_bytes - 1)
    written.plan = replace(written.plan, forecast=forecast)
    with breaks("peak"):
        written.check()


def test_memory_that_the_plan_does_not_know(written: Written) -> None:
    """One more value, alive for the whole backward."""
    graph = written.op(WAIT).graph
    (tangent,) = (node for node in graph.nodes if node.name.startswith("tangents"))
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(step_nodes(graph)[0]):
        big = graph.call_function(torch.ops.aten.neg.default, (tangent,))
        big.meta["val"] = tangent.meta["val"].neg()
    with graph.inserting_before(output):
        reader = graph.call_function(torch.ops.aten.sum.default, (big,))
        reader.meta["val"] = big.meta["val"].sum()
    with breaks("peak"):
        written.check()


def test_too_few_buffers(written: Written) -> None:
    largest = max(written.plan.pool, key=lambda c: c.nbytes)
    fewer = tuple(replace(c, count=c.count - 1) if c is largest else c for c in written.plan.pool)
    written.plan = replace(written.plan, pool=fewer)
    with breaks("buffers"):
        written.check()


def test_buffers_that_are_too_small(written: Written) -> None:
    written.plan = replace(written.plan, pool=tuple(replace(c, nbytes=4096) for c in written.plan.pool))
    with breaks("buffers"):
        written.check()
