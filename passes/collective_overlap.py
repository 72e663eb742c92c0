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

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import islice, pairwise

from torch import fx

from tencache_fx.passes.collectives import begins_collective, begins_gathering, keeps_its_place, waits_behind
from tencache_fx.passes.op_kinds import is_heavy, is_pointwise, is_view, nbytes_of

_BESIDE = 2  # matrix products that a gather is to run beside: it may begin to run only when the first ends
_LIKE_SIZE = 10  # a sum is not waited for before one that is so many times smaller


class _Order:
    """Nodes in an order that changes, and where each one is. To move one takes as long as it moves far."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.nodes = list(nodes)
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.is_heavy = cache(is_heavy)  # asked of a product for each gather near it

    def move(self, node: fx.Node, place: int) -> None:
        """Move a node to a place, as it is without the node where that was."""
        own = self.place[node]
        del self.nodes[own]
        self.nodes.insert(place, node)
        first, last = sorted((own, place))
        self.place.update(zip(self.nodes[first : last + 1], range(first, last + 1), strict=True))

    def behind(self, nodes: Sequence[fx.Node], place: int) -> int:
        """Return `place`, or the one behind the last of the nodes if that comes later."""
        return max([place, *(self.place[node] + 1 for node in nodes)])

    def products(self, first: int, end: int) -> int:
        """Return how many matrix products there are from one place up to another, itself left out."""
        return sum(map(self.is_heavy, self.nodes[first:end]))


def overlap_collectives(graph: fx.Graph, free: Collection[str] = ()) -> None:
    """Move the begins of collectives up, and waits for sums of gradients down.

    The gathers of these names may also begin before sums that began before them: all ranks are to agree on that order.
    O(nodes + how far they move); a sum that is much larger than all others looks at each of these.
    """
    order = _Order(graph.nodes)
    starts = [node for node in order.nodes if begins_collective(node)]
    if not starts:
        return
    _begin_early(order, starts, free)
    _wait_late(order, sorted(starts, key=order.place.__getitem__))
    for before, node in pairwise(order.nodes):
        if before.next is not node:
            before.append(node)
    graph.lint()


def _begin_early(order: _Order, starts: Sequence[fx.Node], free: Collection[str]) -> None:
    """Move each begin behind what it reads, and the begin before it; a gather behind an earlier gather's wait, too."""
    fixed = [place for place, node in enumerate(order.nodes) if keeps_its_place(node)]  # nothing moves across these
    last: list[fx.Node] = []  # to begin
    gathers: list[fx.Node] = []
    for start in starts:
        own = order.place[start]
        before = bisect_left(fixed, own)
        earliest = order.behind(start.all_input_nodes, fixed[before - 1] + 1 if before else 0)
        place = order.behind(last, earliest)
        if begins_gathering(start):
            needed = min((order.place[wait] for wait in waits_behind(start)), default=len(order.nodes))
            one, two = (list(waits_behind(gathers[-n])) if len(gathers) >= n else [] for n in (1, 2))
            ahead = order.behind(one, place)
            place = ahead if order.products(ahead, needed) >= _BESIDE else order.behind(two, place)
            if start.name in free:
                earliest = order.behind([*gathers[-1:], *two], earliest)
                place = _beside_products(order, earliest, min(place, own), needed)
            gathers.append(start)
        if place < own:
            order.move(start, place)
        last = [max([*last, start], key=order.place.__getitem__)]


def _beside_products(order: _Order, earliest: int, place: int, needed: int) -> int:
    """Return the last place, up to `place`, with enough products between it and where the gather is needed."""
    count = order.products(place, needed)
    while place > earliest and count < _BESIDE:
        place -= 1
        count += order.is_heavy(order.nodes[place])
    return place


def _wait_late(order: _Order, starts: Sequence[fx.Node]) -> None:
    """Move the waits for what is no gather, and what only reshapes or scales it, to where the next one begins."""
    sums = [(start, _nbytes(start)) for start in starts if not begins_gathering(start)]
    for place, (start, size) in enumerate(sums):
        later = (each for each, nbytes in islice(sums, place + 1, None) if nbytes * _LIKE_SIZE > size)
        until = order.place[next(later, order.nodes[-1])]
        for wait in waits_behind(start):
            if until <= order.place[wait]:  # the next one begins before
                break
            moved, until = _movable(order, wait, until)
            target = order.nodes[until]
            for node in moved:
                order.move(node, order.place[target] - 1)


def _movable(order: _Order, wait: fx.Node, until: int) -> tuple[list[fx.Node], int]:
    """Return the wait and those behind it that have to move with it, up to `until`; less far if one cannot."""
    begin = order.place[wait]
    moved = {wait: None}
    for place in range(begin + 1, until):
        node = order.nodes[place]
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
