"""Who lives where and how long: storages found in small captured regions, against what anybody can see in them."""

import operator
from collections.abc import Callable

import pytest
import torch
from harness import EAGER, capture_of, compiled
from torch import Tensor, fx
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.passes.buffer_reuse import reuse_in_place
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.lifetimes import measure_lifetimes
from tencache_fx.planning.liveness import inactive_intervals
from tencache_fx.planning.problem import Kind, Step, Storage
from tencache_fx.tensors import tensors_of


def storages_of(capture: RegionGraphs) -> dict[str, Storage]:
    repair_view_fakes(capture)
    return {item.storage.name: item.storage for item in measure_lifetimes(capture)}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_kinds_bytes_and_lives() -> None:
    capture = capture_of(lambda x, w: torch.tanh(x @ w), leaf(16, 8), leaf(8, 4))
    found = storages_of(capture)
    steps = len(capture.nodes)
    assert (found["primals_1"].kind, found["primals_1"].nbytes) == (Kind.INPUT, 16 * 8 * 4)
    assert (found["primals_1"].birth, found["primals_1"].death) == (0, steps)
    assert (found["tanh"].kind, found["tanh"].nbytes, found["tanh"].death) == (Kind.OUTPUT, 16 * 4 * 4, steps)
    product = found["mm"]
    assert (product.kind, product.birth, product.death) == (Kind.ACTIVATION, 0, 2), "tanh is its last reader"
    gradients = [s for s in found.values() if s.kind is Kind.GRADIENT]
    assert sorted(s.nbytes for s in gradients) == [8 * 4 * 4, 16 * 8 * 4]
    assert all(s.death == steps for s in gradients)
    assert found["tangents_1"].birth == capture.boundary


def test_constants_of_the_graph_are_there_before_and_after() -> None:
    table = torch.randn(16, 8).tolist()
    capture = capture_of(lambda x: (x * torch.tensor(table)).sin() * torch.tensor(table), leaf(16, 8))
    found = storages_of(capture)
    constants = [node for graph in capture.graphs for node in graph.find_nodes(op="get_attr")]
    assert constants
    for constant in {node.name for node in constants}:
        storage = found[constant]
        assert (storage.kind, storage.nbytes, storage.spillable) == (Kind.PARAMETER, 16 * 8 * 4, False)
        assert (storage.birth, storage.death) == (0, len(capture.nodes))


def test_views_share_one_storage() -> None:
    capture = capture_of(lambda x: (x * 2).view(4, 4).t().reshape(2, 2, 4).tanh(), leaf(16))
    found = storages_of(capture)
    assert sum(s.kind is Kind.ACTIVATION and s.birth < capture.boundary for s in found.values()) <= 2


def test_zeros_without_bytes_stay() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: torch.tanh(x @ w), (x,), (x.sin(),))[1]

    capture = capture_of(forward, leaf(64, 64), leaf(64, 64))
    zeros = {node.name for node in capture.nodes if node.target is torch.ops.aten._efficientzerotensor.default}
    found = storages_of(capture)
    assert zeros & found.keys()
    assert not any(found[name].spillable for name in zeros & found.keys())
    assert found["sin"].spillable


def test_an_op_with_several_outputs_is_ready_once_they_are_named() -> None:
    def program(x: Tensor) -> Tensor:
        values, order = (x * 2).sort(dim=1)
        return (values.sin() * order).exp()

    capture = capture_of(program, leaf(64, 64))
    found = storages_of(capture)
    names = {node.name: step for step, node in enumerate(capture.nodes)}
    first, second = found["sort"], found["sort#2"]
    assert {first.birth, second.birth} == {names["sort"]}
    getitems = sorted(
        step
        for step, node in enumerate(capture.nodes)
        if node.target is operator.getitem and node.all_input_nodes[0].name == "sort"
    )
    assert sorted({first.ready, second.ready}) == getitems
    assert all(u >= s.ready for s in (first, second) for u, _ in inactive_intervals(s))


def test_what_is_made_beside_a_random_state_is_there_at_once() -> None:
    def block(x: Tensor) -> Tensor:
        return dropout(x.sin(), 0.5).sin()

    run = compiled(lambda x: checkpoint(block, x, use_reentrant=False).sum(), EAGER)
    run(leaf(64, 64)).backward()
    problem = tencache_fx.regions()[-1].problem
    (drawn,) = (step for step, op in enumerate(problem.ops) if op.name.startswith("run_and_save_rng_state"))
    born = {storage.nbytes for storage in problem.storages if storage.birth == drawn}
    assert {64 * 64 * 4, 64 * 64} <= born, "the values and the mask"


def test_parts_of_a_storage_cannot_leave_from_the_backward() -> None:
    """The backward is handed two halves of one product, and has nothing that spans it."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        left, right = (x @ w).split(32, dim=1)
        return (left.sin().exp() * right.sin().exp()).tanh()

    found = storages_of(capture_of(program, leaf(64, 64), leaf(64, 64)))
    capture = capture_of(program, leaf(64, 64), leaf(64, 64))
    product = storages_of(capture)["mm"]
    assert found["mm"] == product, "the same graph gives the same answer"
    assert product.spillable
    assert all(u < capture.boundary for u, _ in inactive_intervals(product))


def test_a_backward_that_does_nothing() -> None:
    capture = capture_of(lambda x, y: x + y.sin(), leaf(8, 8), torch.randn(8, 8))
    assert capture.boundary == len(capture.nodes)
    found = storages_of(capture)
    assert found["tangents_1"].birth == Step(len(capture.nodes))


def test_views_of_merged_nodes_alias_what_they_view() -> None:
    """AOTAutograd's partitioner merges equal nodes; the views of the one that went must follow the one that stayed."""

    def program(x: Tensor) -> Tensor:
        first, second = x.sin().t(), x.sin()
        return (first.exp() + second.exp().unsqueeze(0).squeeze(0).t()).tanh()

    capture = capture_of(program, leaf(16, 16))
    repair_view_fakes(capture)
    for graph in capture.graphs:
        for node in graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and any(r.alias_info is not None for r in schema.returns):
                made = {t.untyped_storage()._cdata for t in tensors_of(node)}
                given = {t.untyped_storage()._cdata for a in node.all_input_nodes for t in tensors_of(a)}
                assert made <= given, node
    handed = {n.name: n for n in capture.forward.nodes}
    for node in capture.backward.find_nodes(op="placeholder") if capture.backward else ():
        if node.name in handed and isinstance(node.meta["val"], Tensor):
            mine, other = node.meta["val"].untyped_storage(), handed[node.name].meta["val"].untyped_storage()
            assert mine._cdata == other._cdata


def test_stale_fakes_are_found() -> None:
    """A view whose fake stands alone, as after a merge: its base must live until the view's last reader."""
    capture = capture_of(lambda x: x.sin().t().exp().tanh(), leaf(16, 16))
    view = next(node for node in capture.forward.nodes if "permute" in node.name or node.name == "t")
    view.meta["val"] = view.meta["val"].clone()
    found = storages_of(capture)
    assert view.name not in found
    assert found["sin"].death > next(step for step, node in enumerate(capture.nodes) if node is view)


@pytest.mark.parametrize("op", [torch.ops.aten.sin.default, torch.ops.aten.mul.Tensor], ids=["of one", "of two"])
def test_what_is_computed_again_is_other_memory_than_a_saved_view_of_it(op: Callable[..., object]) -> None:
    """The backward has a view of a value, and computes the value again: for a while there are two."""
    capture = capture_of(lambda x: x.sin().t().exp().tanh(), leaf(16, 16))
    assert capture.backward is not None
    graph, (value, view) = capture.backward, (n for n in capture.forward.nodes if n.name in ("sin", "permute", "t"))
    given = graph.find_nodes(op="placeholder")[: len(op._schema.arguments)]
    reader = next(node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(given[0]):
        saved = graph.placeholder(view.name)
    with graph.inserting_before(reader):
        again = graph.call_function(op, tuple(given))
        read = graph.call_function(torch.ops.aten.add.Tensor, (again, saved))
    for node, meta in ((saved, view), (again, value), (read, value)):
        node.meta["val"] = meta.meta["val"]
    read.meta["val"] = read.meta["val"].clone()
    repair_view_fakes(capture)
    stood = {tensor.untyped_storage()._cdata for tensor in tensors_of(saved)}
    assert not stood & {tensor.untyped_storage()._cdata for tensor in tensors_of(again)}
    assert stood == {tensor.untyped_storage()._cdata for tensor in tensors_of(value)}


def index() -> Tensor:
    return torch.arange(12).remainder(5)


def put(base: Tensor, values: Tensor) -> Tensor:
    return torch.index_put(base, (index(),), values, accumulate=True)


def add(base: Tensor, values: Tensor) -> Tensor:
    return torch.scatter_add(base, 0, index()[:, None].expand(12, 8), values)


@pytest.mark.parametrize("scatter", [put, add])
@pytest.mark.parametrize(
    ("make", "read_again", "taken"),
    [
        (lambda x: x * 2, lambda base: 0, 1),
        (lambda x: x * 2, lambda base: torch.mm(base, base.t()).sum(), 0),  # the product reads it, too
        (lambda x: torch.cat([x.sin(), x.cos()]), lambda base: 0, 0),  # Inductor copies what it has put together
    ],
)
def test_a_scatter_writes_into_what_nobody_else_reads(scatter, make, read_again, taken) -> None:
    def program(x: Tensor) -> Tensor:
        base = make(x)
        return scatter(base, x[:12].sin()).tanh().sum() + read_again(base)

    assert len(scatters_in_place(program)) == taken


def test_a_scatter_of_parts_of_what_it_begins_with() -> None:
    assert not scatters_in_place(lambda x: put(base := x * 2, base[:12]).tanh().sum())


def scatters_in_place(program: Callable[[Tensor], Tensor]) -> list[fx.Node]:
    capture = capture_of(program, leaf(64, 8))
    model = InductorModel.of(capture)
    _, taken = reuse_in_place(capture, model, measure_lifetimes(capture, model))
    found = [node for node in taken if "index_put" in node.name or "scatter" in node.name]
    assert [taken[node] for node in found] == [node.args[0] for node in found]
    return found
