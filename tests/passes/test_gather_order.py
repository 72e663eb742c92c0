"""Graphs sorted anew for an order of collectives: all that is computed stays, and only what has to moves."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given
from test_collective_overlap import SIZE, Graph, aten, backward_of_layers
from torch import fx
from torch._higher_order_ops import invoke_subgraph
from torch._prims.rng_prims import run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode

from tencache_fx.errors import InvariantError
from tencache_fx.passes.collectives import begins_collective, keeps_its_place
from tencache_fx.passes.gather_order import begun_in, gather_in_order
from tencache_fx.region.joint_split import gathering_nodes, reading_nodes


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_a_graph_in_order_is_left_alone():
    graph = backward_of_layers(3)
    before = list(graph.nodes)
    gather_in_order(graph, begun_in(graph))
    assert list(graph.nodes) == before


def test_a_gather_begins_earlier_and_nothing_else_moves():
    """The second layer's weight is gathered before the first one's, as where its product runs again."""
    graph = backward_of_layers(3)
    begun, before = list(begun_in(graph)), names(graph)
    moved = begun[3]
    assert moved.startswith("all_gather")
    gather_in_order(graph, [moved, *(each for each in begun if each != moved)])
    assert begun_in(graph)[0] == moved
    others = [each for each in names(graph) if each != moved]
    assert others == [each for each in before if each != moved]


def test_the_order_of_one_rank_is_brought_about_on_another():
    """This rank gathers a weight for a product that it runs again; the other one first sums a gradient."""
    with FakeTensorMode() as mode:
        made = Graph(mode)
        part, x, dy = made.given("part", SIZE // 2), made.given("x"), made.given("dy")
        again = made.mm(x, made.gathered(part))
        of_weight = made.mm(dy, x)
        made.graph.output((made.mean(of_weight), made.mm(dy, again)))
    begun = begun_in(made.graph)
    assert [each.startswith("all_gather") for each in begun] == [True, False]
    gather_in_order(made.graph, begun[::-1])
    assert begun_in(made.graph) == begun[::-1]
    order = names(made.graph)
    places = [order.index(name) for name in (of_weight.name, begun[1], begun[0], again.name)]
    assert places == sorted(places)


def test_an_order_that_needs_what_comes_later_is_refused():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        product = made.mm(made.given("x"), made.gathered(made.given("part", SIZE // 2)))
        made.graph.output((made.mean(product),))
    before = list(made.graph.nodes)
    with pytest.raises(InvariantError, match="begins these 2 collectives in an order in which one would need"):
        gather_in_order(made.graph, begun_in(made.graph)[::-1])
    assert list(made.graph.nodes) == before
    with pytest.raises(InvariantError, match="begins 2 collectives, and another rank has 1, or others"):
        gather_in_order(made.graph, begun_in(made.graph)[:1])


def test_nothing_moves_across_a_write():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        part, buffer, x = made.given("part", SIZE // 2), made.given("buffer"), made.given("x")
        total = made.mean(buffer)
        written = made.value(made.graph.call_function(aten.copy_.default, (buffer, made.mm(x, x))), SIZE)
        made.graph.output((written, total, made.gathered(part)))
    assert keeps_its_place(written)
    with pytest.raises(InvariantError):
        gather_in_order(made.graph, begun_in(made.graph)[::-1])


def test_a_cast_of_a_gathered_weight_is_gathered_again_and_what_reads_it_is_not():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        part, x = made.given("part", SIZE // 2), made.given("x")
        cast = made.value(made.graph.call_function(aten._to_copy.default, (made.gathered(part),)), SIZE)
        scaled = made.value(made.graph.call_function(aten.mul.Tensor, (cast, x)), SIZE)
        product = made.mm(x, cast)
        made.graph.output((scaled, product, made.mm(product, x)))
    gathers = gathering_nodes(made.graph, [0])
    assert gathers == {*begun_in(made.graph), "wait_tensor_default", cast.name}
    assert reading_nodes(made.graph, gathers, 3) == {scaled.name, product.name}
    assert reading_nodes(made.graph, gathers, 1) == {scaled.name}, "of what the forward computes"


def test_random_numbers_are_drawn_in_the_same_order():
    with FakeTensorMode() as mode:
        made = Graph(mode)
        first, second = made.given("first", SIZE // 2), made.given("second", SIZE // 2)
        drawn = []
        for part in (first, second):
            whole = made.gathered(part)
            drawn.append(made.value(made.graph.call_function(aten.bernoulli.p, (whole, 0.5)), SIZE))
        made.graph.output(tuple(drawn))
    begun = begun_in(made.graph)
    gather_in_order(made.graph, begun[::-1])
    assert begun_in(made.graph) == begun[::-1]
    assert [name for name in names(made.graph) if "bernoulli" in name] == [node.name for node in drawn]


def test_a_gather_passes_what_draws_numbers_from_a_state_of_its_own():
    """As an op of a checkpointed layer does; other ops of higher order may do anything."""
    with FakeTensorMode() as mode:
        made = Graph(mode)
        part, state, x = made.given("part", SIZE // 2), made.given("state"), made.given("x")
        total = made.mean(made.mm(x, x))
        again = made.graph.call_function(run_with_rng_state, (state, aten.bernoulli.p, x, 0.5))
        whole = made.gathered(part)
        made.graph.output((total, made.mm(made.value(again, SIZE), whole)))
    begun = begun_in(made.graph)
    gather_in_order(made.graph, begun[::-1])
    assert begun_in(made.graph) == begun[::-1]
    with FakeTensorMode() as mode:
        made = Graph(mode)
        part, x = made.given("part", SIZE // 2), made.given("x")
        total = made.mean(made.mm(x, x))
        unknown = made.value(made.graph.call_function(invoke_subgraph, (None, "layer", x)), SIZE)
        made.graph.output((total, made.mm(unknown, made.gathered(part))))
    with pytest.raises(InvariantError, match="would need here what"):
        gather_in_order(made.graph, begun_in(made.graph)[::-1])


@given(st.lists(st.tuples(st.sampled_from("gsam"), st.integers(0, 99), st.integers(0, 99)), max_size=30), st.data())
def test_any_order_that_can_be_is_brought_about(deeds: list[tuple[str, int, int]], data: st.DataObject):
    """The orders of a graph's topological sorts, and no others."""
    with FakeTensorMode() as mode:
        made = Graph(mode)
        parts = [made.given(f"part{i}", SIZE // 2) for i in range(3)]
        squares, results = [made.given("x")], []
        for deed, one, other in deeds:
            square = squares[one % len(squares)]
            if deed == "g":
                squares.append(made.gathered(parts[other % len(parts)]))
            elif deed == "s":
                results.append(made.mean(square))
                parts.append(results[-1])
            elif deed == "a":
                results.append(made.small_sum(square))
            else:
                squares.append(made.mm(square, squares[other % len(squares)]))
        made.graph.output((*results, squares[-1]))
    graph, chance = made.graph, random.Random(data.draw(st.integers(0, 99)))
    read = {node: set(node.all_input_nodes) for node in graph.nodes}
    wanted = [node.name for node in shuffled(read, chance) if begins_collective(node)]
    gather_in_order(graph, wanted)
    graph.lint()
    assert list(begun_in(graph)) == wanted
    assert {node: set(node.all_input_nodes) for node in graph.nodes} == read


def shuffled(read: dict[fx.Node, set[fx.Node]], chance: random.Random) -> list[fx.Node]:
    """Return the nodes in some order in which each comes behind what it reads."""
    left, found = dict(read), []
    while left:
        ready = [node for node, given in left.items() if given.isdisjoint(left)]
        node = chance.choice(ready)
        if node.op == "output" and len(left) > 1:
            continue
        found.append(node)
        del left[node]
    return found
