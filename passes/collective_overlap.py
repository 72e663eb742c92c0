"""Collectives under way while kernels run: each begins as early, and is waited for as late, as keeps their order.

Torch's graph gathers a weight where it is read, and waits for each sum of gradients at once: kernels stand still for
the whole of every collective. For a linear layer's backward, with `W` of the next layer to come:

    before   dw = mm(..); a = gather(W); w = wait(a); dx = mm(.., w); s = scatter(dw); g = wait(s); h = div(g, 2)
    after    a = gather(W); ...; dw = mm(..); s = scatter(dw); w = wait(a); dx = mm(.., w); ...; g = wait(s); ...

A gather begins one ahead: behind the wait for the gather before it. If fewer than two matrix products then run beside
it, it begins behind the wait for the one before that: a product that is ready at the same time fills the device first,
and the gather only begins to run as that ends. A sum is waited for before the next one of its size begins. So there are
one or two more weights, and one more gradient, whole on the device. Collectives begin in the order that the graph had:
all ranks have to agree on that, and each may do this or not, as its memory allows (FSDP2 has the same prefetch,
`torch/distributed/fsdp/_fully_shard`; Inductor's `comms.py` the same for a graph). Only gathers that the caller names
may come before sums, where it tells the other ranks. And nothing moves across an op that may communicate by itself, nor
across one that writes to what exists: a collective may still read that.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import fx

from tencache_fx.passes.collectives import begins_collective, begins_gathering, keeps_its_place, waits_behind
from tencache_fx.passes.op_kinds import is_heavy, is_pointwise, is_view, nbytes_of

_BESIDE = 2  # matrix products that a gather is to run beside: it may begin to run only when the first ends
_LIKE_SIZE = 10  # a sum is not waited for before one that is so many times smaller


def overlap_collectives(graph: fx.Graph, free: Collection[str] = ()) -> None:
    """Move the begins of collectives up, and waits for sums of gradients down. O(collectives x nodes).

    The gathers of these names may also begin before sums that began before them: all ranks are to agree on that order.
    """
    order = list(graph.nodes)
    starts = [node for node in order if begins_collective(node)]
    if not starts:
        return
    _begin_early(order, starts, free)
    _wait_late(order, [node for node in order if begins_collective(node)])
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)
    graph.lint()


def _begin_early(order: list[fx.Node], starts: Sequence[fx.Node], free: Collection[str]) -> None:
    """Move each begin behind what it reads, and the begin before it; a gather behind an earlier gather's wait, too."""
    last: list[fx.Node] = []  # to begin
    gathers: list[fx.Node] = []
    for start in starts:
        own = order.index(start)
        fixed = (place + 1 for place in range(own - 1, -1, -1) if keeps_its_place(order[place]))
        earliest = _behind(order, start.all_input_nodes, next(fixed, 0))
        place = _behind(order, last, earliest)
        if begins_gathering(start):
            needed = min((order.index(wait) for wait in waits_behind(start)), default=len(order))
            one, two = (list(waits_behind(gathers[-n])) if len(gathers) >= n else [] for n in (1, 2))
            ahead = _behind(order, one, place)
            place = ahead if _products(order[ahead:needed]) >= _BESIDE else _behind(order, two, place)
            if start.name in free:
                earliest = _behind(order, [*gathers[-1:], *two], earliest)
                place = _beside_products(order, earliest, min(place, own), needed)
            gathers.append(start)
        if place < own:
            order.remove(start)
            order.insert(place, start)
        last = [max([*last, start], key=order.index)]


def _beside_products(order: Sequence[fx.Node], earliest: int, place: int, needed: int) -> int:
    """Return the last place, up to `place`, with enough products between it and where the gather is needed."""
    count = _products(order[place:needed])
    while place > earliest and count < _BESIDE:
        place -= 1
        count += is_heavy(order[place])
    return place


def _products(nodes: Sequence[fx.Node]) -> int:
    return sum(map(is_heavy, nodes))


def _behind(order: Sequence[fx.Node], nodes: Sequence[fx.Node], place: int) -> int:
    """Return `place`, or the one behind the last of the nodes if that comes later."""
    return max([place, *(order.index(node) + 1 for node in nodes)])


def _wait_late(order: list[fx.Node], starts: Sequence[fx.Node]) -> None:
    """Move the waits for what is no gather, and what only reshapes or scales it, to where the next one begins."""
    for place, start in enumerate(starts):
        if begins_gathering(start):
            continue
        size = _nbytes(start)
        later = (
            each for each in starts[place + 1 :] if not begins_gathering(each) and _nbytes(each) * _LIKE_SIZE > size
        )
        until = order.index(next(later, order[-1]))
        for wait in waits_behind(start):
            if until <= order.index(wait):  # the next one begins before
                break
            moved, until = _movable(order, wait, until)
            target = order[until]
            for node in moved:
                order.remove(node)
                order.insert(order.index(target), node)


def _movable(order: Sequence[fx.Node], wait: fx.Node, until: int) -> tuple[list[fx.Node], int]:
    """Return the wait and those behind it that have to move with it, up to `until`; less far if one cannot."""
    begin = order.index(wait)
    moved = {wait: None}
    for place in range(begin + 1, until):
        node = order[place]
        if keeps_its_place(node):
            return list(moved), place
        if moved.keys().isdisjoint(node.all_input_nodes):
            continue
        if not (is_pointwise(node) or is_view(node)):
            return list(moved), place
        moved[node] = None
    return list(moved), until


def _nbytes(start: fx.Node) -> int:
    return sum(map(nbytes_of, start.all_input_nodes))
