"""Collectives that overlap with kernels: their order stays, each value is made before it is read, and gaps open."""

import operator
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tencache_fx.passes import collective_overlap
from tencache_fx.passes.collective_overlap import overlap_collectives
from tencache_fx.passes.collectives import (
    begins_collective,
    begins_gathering,
    is_collective_wait,
    keeps_its_place,
    waits_behind,
)
from tencache_fx.passes.op_kinds import is_heavy

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SIZE = 64


class Graph:
    """A graph of squares, which collectives gather from halves and scatter to halves."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph, self._mode = fx.Graph(), mode

    def value(self, node: fx.Node, rows: int, columns: int = SIZE) -> fx.Node:
        with self._mode:
            node.meta["val"] = torch.empty(rows, columns)
        return node

    def given(self, name: str, rows: int = SIZE) -> fx.Node:
        return self.value(self.graph.placeholder(name), rows)

    def mm(self, one: fx.Node, other: fx.Node) -> fx.Node:
        return self.value(self.graph.call_function(aten.mm.default, (one, other)), SIZE)

    def gathered(self, part: fx.Node) -> fx.Node:
        work = self.graph.call_function(c10d.all_gather_into_tensor.default, (part, 2, "0"))
        return self.value(self.graph.call_function(c10d.wait_tensor.default, (self.value(work, SIZE),)), SIZE)

    def mean(self, whole: fx.Node) -> fx.Node:
        work = self.graph.call_function(c10d.reduce_scatter_tensor.default, (whole, "sum", 2, "0"))
        total = self.graph.call_function(c10d.wait_tensor.default, (self.value(work, SIZE // 2),))
        divided = self.graph.call_function(aten.div.Tensor, (self.value(total, SIZE // 2), 2))
        return self.value(divided, SIZE // 2)

    def small_sum(self, whole: fx.Node) -> fx.Node:
        row = self.value(self.graph.call_function(aten.mean.dim, (whole, [0], True)), 1)
        work = self.value(self.graph.call_function(c10d.all_reduce.default, (row, "sum", "0")), 1)
        return self.value(self.graph.call_function(c10d.wait_tensor.default, (work,)), 1)


def heavy_between(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield each begin of a collective, with the matrix products between it and the wait for it."""
    order = list(graph.nodes)
    for start in filter(begins_collective, order):
        (wait,) = waits_behind(start)
        yield start, sum(map(is_heavy, order[order.index(start) : order.index(wait)]))


def backward_of_layers(layers: int) -> fx.Graph:
    """Linear layers' backward as torch writes it: the gradient of the weight first, the gather behind it."""
    with FakeTensorMode() as mode:
        made = Graph(mode)
        parts = [made.given(f"part{i}", SIZE // 2) for i in range(layers)]
        saved = [made.given(f"x{i}") for i in range(layers)]
        gradient, outputs = made.given("dy"), []
        for part, x in zip(parts, saved, strict=True):
            of_weight = made.mm(gradient, x)
            gradient = made.mm(gradient, made.gathered(part))
            outputs += [made.mean(of_weight), made.small_sum(gradient)]
        made.graph.output((*outputs, gradient))
    return made.graph


def forward_of_layers(layers: int, products: int) -> fx.Graph:
    """Layers that gather a weight each, for the first of so many products in a row."""
    with FakeTensorMode() as mode:
        made = Graph(mode)
        parts = [made.given(f"part{i}", SIZE // 2) for i in range(layers)]
        x = made.given("x")
        for part in parts:
            x = made.mm(x, made.gathered(part))
            for _ in range(products - 1):
                x = made.mm(x, x)
        made.graph.output((x,))
    return made.graph


def test_collectives_of_linear_layers_are_under_way_while_products_run():
    graph = backward_of_layers(4)
    before = {start.name: count for start, count in heavy_between(graph)}
    assert set(before.values()) == {0}
    overlap_collectives(graph)
    after = {start.name: count for start, count in heavy_between(graph)}
    large = [count for name, count in after.items() if "all_reduce" not in name]
    assert min(large) >= 1, after
    assert max(large) <= 3, "one weight, and one gradient, more than before is whole"


def test_a_gather_runs_beside_two_products_and_no_more_than_two_are_under_way():
    graph = forward_of_layers(5, products=1)
    overlap_collectives(graph)
    most = 0
    under_way: set[fx.Node] = set()
    for node in graph.nodes:
        if begins_gathering(node):
            under_way.add(node)
        elif is_collective_wait(node):
            under_way -= {*node.all_input_nodes}
        most = max(most, len(under_way))
    assert most == 2
    assert [count for _, count in heavy_between(graph)] == [0, 1, 2, 2, 2]


def test_a_gather_begins_one_ahead_where_two_products_run_beside_it():
    graph = forward_of_layers(4, products=3)
    overlap_collectives(graph)
    assert [count for _, count in heavy_between(graph)] == [0, 3, 3, 3]


def test_gathers_that_ranks_agree_on_begin_before_sums_until_two_products_run_beside_them():
    fixed, free = backward_of_layers(5), backward_of_layers(5)
    gathers, sums = begun(free, gathering=True), begun(free, gathering=False)
    overlap_collectives(fixed)
    overlap_collectives(free, [node.name for node in gathers])
    beside = [[count for start, count in heavy_between(graph) if begins_gathering(start)] for graph in (fixed, free)]
    assert min(beside[0][2:]) == 1, "sums are in the way"
    assert beside[1][2:] == [2, 2, 2]
    assert begun(free, gathering=True) == gathers
    assert begun(free, gathering=False) == sums


def test_twice_the_layers_take_twice_the_time(monkeypatch: pytest.MonkeyPatch):
    def looked_at(layers: int) -> int:
        seen: list[fx.Node] = []

        def noted(node: fx.Node) -> bool:
            seen.append(node)
            return keeps_its_place(node)

        graph = backward_of_layers(layers)
        with monkeypatch.context() as patch:
            patch.setattr(collective_overlap, "keeps_its_place", noted)
            overlap_collectives(graph, [node.name for node in begun(graph, gathering=True)])
        return len(seen)

    assert looked_at(40) < 2.2 * looked_at(20)


def begun(graph: fx.Graph, *, gathering: bool) -> list[fx.Node]:
    return [node for node in graph.nodes if begins_collective(node) and begins_gathering(node) == gathering]


def test_what_cannot_move_holds_the_wait_before_it():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        x = made.given("x")
        total = made.small_sum(made.mm(x, x))
        norm = made.value(made.graph.call_function(aten.linalg_vector_norm.default, (total,)), 1)
        made.graph.output((made.mm(x, x), made.mm(x, x), norm))
    order = list(made.graph.nodes)
    overlap_collectives(made.graph)
    assert list(made.graph.nodes) == order, "the norm is computed where it was, and it reads the sum"


@given(
    st.lists(st.tuples(st.sampled_from("gsamp"), st.integers(0, 99), st.integers(0, 99)), max_size=30),
    st.sets(st.integers(0, 30)),
)
def test_any_graph_computes_the_same_in_the_same_order_of_collectives(deeds, free):
    with FakeTensorMode() as mode:
        made = Graph(mode)
        parts = [made.given(f"part{i}", SIZE // 2) for i in range(3)]
        squares = [made.given("x")]
        results = []
        for deed, one, other in deeds:
            square = squares[one % len(squares)]
            if deed == "g":
                squares.append(made.gathered(parts[other % 3]))
            elif deed == "s":
                parts.append(made.mean(square))
                results.append(parts[-1])
            elif deed == "a":
                results.append(made.small_sum(square))
            elif deed == "m":
                squares.append(made.mm(square, squares[other % len(squares)]))
            else:
                squares.append(made.value(made.graph.call_function(aten.sin.default, (square,)), SIZE))
        made.graph.output((*results, squares[-1]))
    before = [node for node in made.graph.nodes if begins_collective(node)]
    count = len(made.graph.nodes)
    gaps = dict(heavy_between(made.graph)) if all(len(list(waits_behind(each))) == 1 for each in before) else {}
    names = [node.name for place, node in enumerate(filter(begins_gathering, before)) if place in free]
    overlap_collectives(made.graph, names)
    made.graph.lint()  # each value is made before it is read
    after = [node for node in made.graph.nodes if begins_collective(node)]
    assert [node for node in after if node.name not in names] == [node for node in before if node.name not in names]
    assert list(filter(begins_gathering, after)) == list(filter(begins_gathering, before))
    assert len(made.graph.nodes) == count
    if gaps:
        assert all(found >= gaps[start] for start, found in heavy_between(made.graph))
    overlap_collectives(made.graph)
    assert [node for node in made.graph.nodes if begins_collective(node)] == after


def opaque(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


OPAQUE = torch.library.custom_op("tencache_test::opaque", opaque, mutates_args=(), schema="(Tensor value) -> Tensor")


def test_nothing_moves_across_an_op_that_may_communicate_by_itself():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        part, x = made.given("part", SIZE // 2), made.given("x")
        total = made.mean(x)
        unknown = made.value(made.graph.call_function(torch.ops.tencache_test.opaque.default, (x,)), SIZE)
        product = made.mm(made.mm(unknown, x), made.gathered(part))
        made.graph.output((product, total))
    overlap_collectives(made.graph)
    names = [node.name.removesuffix("_default") for node in made.graph.nodes]
    assert names.index("wait_tensor") < names.index("opaque") < names.index("all_gather_into_tensor")
    assert names.index("all_gather_into_tensor") < names.index("mm")


def test_no_wait_moves_behind_a_write_to_what_the_collective_may_still_read():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        buffer, x = made.given("buffer"), made.given("x")
        total = made.mean(buffer)
        product = made.mm(x, x)
        written = made.value(made.graph.call_function(aten.copy_.default, (buffer, product)), SIZE)
        made.graph.output((written, total))
    overlap_collectives(made.graph)
    names = [node.name.removesuffix("_default") for node in made.graph.nodes]
    assert names.index("mm") < names.index("wait_tensor") < names.index("copy_")


def test_a_wait_behind_the_next_begin_is_left_alone():
    """The sum of several tensors names its results behind that, and what needs nothing begins early."""
    with FakeTensorMode() as mode:
        made = Graph(mode)
        x, y = made.given("x"), made.given("y")
        several = made.graph.call_function(c10d.reduce_scatter_tensor_coalesced.default, ([x], "sum", 2, "0"))
        with mode:
            several.meta["val"] = [torch.empty(SIZE // 2, SIZE)]
        first = made.graph.call_function(operator.getitem, (several, 0))
        first.meta["val"] = several.meta["val"][0]
        total = made.value(made.graph.call_function(c10d.wait_tensor.default, (first,)), SIZE // 2)
        other = made.mean(y)
        made.graph.output((total, other, made.mm(x, y)))
    overlap_collectives(made.graph)
    order = list(made.graph.nodes)
    (begun,) = (node for node in order if node.target is c10d.reduce_scatter_tensor.default)
    assert order.index(several) < order.index(begun) < order.index(first) < order.index(total)
