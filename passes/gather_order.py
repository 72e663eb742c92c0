"""Collectives of a graph in the order that all ranks have agreed on.

Ranks that recompute other things have their gathers, sums of gradients and other ops in another order. Here the ops are
sorted anew so that collectives begin as agreed, and all else stays as near to its place as that allows. A gather that
has to begin earlier does: it reads a parameter, which is there from the start.

    agreed   gather(a), gather(b), scatter
    before   scatter; b = gather(B); a = gather(A)
    after    a = gather(A); b = gather(B); scatter

Nothing moves across an op that writes to what exists, or may do anything. Random numbers are drawn in the same order.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.passes.collectives import begins_collective, begins_gathering, keeps_its_place
from tencache_fx.passes.op_kinds import draws_numbers


def begun_in(graph: fx.Graph | None) -> tuple[str, ...]:
    """Return the names of the nodes that begin collectives, in order; they are the same on all ranks."""
    return () if graph is None else tuple(node.name for node in graph.nodes if begins_collective(node))


def gather_in_order(graph: fx.Graph, order: Sequence[str]) -> None:
    """Sort a graph so that its collectives begin in this order. O(arguments + nodes log nodes), nothing if they do.

    Raises `InvariantError` for other collectives than these, and for an order in which one would need what comes later.
    """
    begun = begun_in(graph)
    if begun == tuple(order):
        return
    if sorted(begun) != sorted(order):
        raise InvariantError(
            f"order: a graph begins {len(begun)} collectives, and another rank has {len(order)}, or others; "
            "compile the same model on all ranks."
        )
    nodes = list(graph.nodes)
    by_name = {node.name: node for node in nodes if begins_collective(node)}
    after = _behind(nodes, [by_name[name] for name in order])
    found = list(_sorted(nodes, after, _wanted(nodes, [by_name[name] for name in order])))
    if len(found) < len(nodes):
        raise InvariantError(
            f"order: another rank begins these {len(order)} collectives in an order in which one would need here what "
            "comes later; compile the same model with the same options on all ranks."
        )
    for before, node in pairwise(found):
        before.append(node)
    graph.lint()


def _behind(nodes: Sequence[fx.Node], begins: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return by node those that may come only behind it."""
    after: dict[fx.Node, list[fx.Node]] = {node: list(node.users) for node in nodes}
    for first, second in (*pairwise(begins), *pairwise(filter(draws_numbers, nodes))):
        after[first].append(second)
    fixed: fx.Node | None = None
    since: list[fx.Node] = []
    for node in nodes:
        if fixed is not None:
            after[fixed].append(node)
        if keeps_its_place(node):
            for each in since:
                after[each].append(node)
            fixed, since = node, []
        else:
            since.append(node)
    return after


def _wanted(nodes: Sequence[fx.Node], begins: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the place that each node is to have as nearly as may be: a gather's is before what comes behind it."""
    place = {node: at for at, node in enumerate(nodes)}
    for first, second in reversed(list(pairwise(begins))):
        if begins_gathering(first) and place[second] < place[first]:
            pending = [first]
            while pending:
                node = pending.pop()
                place[node] = place[second]
                pending += (each for each in node.all_input_nodes if place[each] > place[second])
    return place


def _sorted(
    nodes: Sequence[fx.Node], after: dict[fx.Node, list[fx.Node]], place: dict[fx.Node, int]
) -> Iterator[fx.Node]:
    """Yield the nodes, each behind those that it may come only behind; not all, if some wait for one another."""
    number = {node: at for at, node in enumerate(nodes)}
    waits = dict.fromkeys(nodes, 0)
    for behind in after.values():
        for node in behind:
            waits[node] += 1
    ready = [(place[node], number[node]) for node in nodes if not waits[node]]
    heapq.heapify(ready)
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        yield node
        for each in after[node]:
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(ready, (place[each], number[each]))
