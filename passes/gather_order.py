"""Collectives of a graph in an order that all ranks have agreed on: gathers begin earlier where that takes it.

A gather reads a parameter, which is there from the start, so it can begin as early as anybody wants; what it makes is
then on the device for longer. Nothing else is moved.

    agreed   gather(a), gather(b), scatter
    before   scatter; b = gather(B); a = gather(A)
    after    a = gather(A); b = gather(B); scatter
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.passes.collectives import begins_collective, begins_gathering, is_collective_wait
from tencache_fx.passes.op_kinds import is_mutating


def begun_in(graph: fx.Graph | None) -> tuple[str, ...]:
    """Return the names of the nodes that begin collectives, in order; they are the same on all ranks."""
    return () if graph is None else tuple(node.name for node in graph.nodes if begins_collective(node))


def gather_in_order(graph: fx.Graph, order: Sequence[str]) -> None:
    """Begin gathers early enough for the collectives to begin in this order. O(collectives x nodes).

    Raises `InvariantError` for other collectives than these, and for an order that gathers alone cannot bring about.
    """
    begun = begun_in(graph)
    if begun == tuple(order):
        return
    if sorted(begun) != sorted(order):
        raise InvariantError(
            f"order: a graph begins {len(begun)} collectives, and another rank has {len(order)}, or others; "
            "compile the same model on all ranks."
        )
    by_name = {node.name: node for node in graph.nodes if begins_collective(node)}
    for first, second in reversed(list(pairwise(by_name[name] for name in order))):
        place = {node: at for at, node in enumerate(graph.nodes)}
        if place[first] < place[second]:
            continue
        for node in sorted(_needed(first, place[second], place), key=place.__getitem__):
            if node is not first and (begins_collective(node) or is_collective_wait(node) or is_mutating(node)):
                raise _impossible(first, second)
            second.prepend(node)
        if not begins_gathering(first):
            raise _impossible(first, second)
    graph.lint()


def _needed(last: fx.Node, after: int, place: dict[fx.Node, int]) -> set[fx.Node]:
    """Return a node, and those it is computed from, as far as they are behind the place `after`."""
    found, pending = {last}, [last]
    while pending:
        fresh = {each for each in pending.pop().all_input_nodes if place[each] > after and each not in found}
        found |= fresh
        pending += fresh
    return found


def _impossible(first: fx.Node, second: fx.Node) -> InvariantError:
    return InvariantError(
        f"order: on another rank, {first.name} begins before {second.name}, and here it cannot; compile the same model "
        "with the same options on all ranks."
    )
