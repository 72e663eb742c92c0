"""What a forward computes for its backward only, where what it is made of is there.

Partitioners leave the order of the joint graph, in which such ops stand behind the loss: the transposed weights of an
attention that is written out, and where a ReLU has cut off. Each of them would keep what it reads on the device, or
bring it back, until the forward ends.

    before   y = relu(x); ...; loss; t = permute(p); mask = le(y, 0)
    after    y = relu(x); mask = le(y, 0); ...; loss

Only views, sizes and elementwise ops are moved, and none across an op that writes to what it reads, or waits for it.
"""

import operator
from collections.abc import Iterable

from torch import fx
from torch.fx.experimental.proxy_tensor import is_sym_node

from tencache_fx.passes.collectives import is_collective_wait
from tencache_fx.passes.op_kinds import (
    draws_numbers,
    is_pointwise,
    is_view,
    storages_of,
    written_arguments,
)


def compute_early(forward: fx.Graph, num_outputs: int) -> None:
    """Move them in the forward's graph, whose first `num_outputs` results are the caller's. O(nodes + arguments)."""
    (results,) = forward.output_node().args
    assert isinstance(results, (list, tuple))
    for_caller = _made_of(each for each in results[:num_outputs] if isinstance(each, fx.Node))
    nodes = list(forward.nodes)
    first = sum(node.op == "placeholder" for node in nodes)  # of the ops: inputs stand before all of these
    places = {node: max(place, first - 1) for place, node in enumerate(nodes)}
    behind = dict(enumerate(nodes))  # by place the node that the next one moved there follows
    written: dict[int, int] = {}  # places of the last writes so far, by storage
    moved: set[fx.Node] = set()
    for node in nodes:
        writes = node.args[:1] if is_collective_wait(node) else written_arguments(node)  # until then it is not there
        written.update((storage, places[node]) for each in writes for storage in storages_of(each))
        if node in for_caller or not (_may_move(node) or (node.target is operator.getitem and node.args[0] in moved)):
            continue
        reads = (storage for each in node.all_input_nodes for storage in storages_of(each))
        place = max(first - 1, *(places[each] for each in node.all_input_nodes), *(written.get(s, 0) for s in reads))
        while nodes[place + 1].target is operator.getitem:  # an op with several results is followed by all of them
            place += 1
        if place + 1 < places[node]:
            behind[place].append(node)
            places[node], behind[place] = place, node
            moved.add(node)


def _made_of(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all that they are made of."""
    left = list(results)
    found = set(left)
    while left:
        more = [each for each in left.pop().all_input_nodes if each not in found]
        found.update(more)
        left.extend(more)
    return found


def _may_move(node: fx.Node) -> bool:
    """Return whether it makes no difference to others where a node runs."""
    if node.op != "call_function" or node.target is operator.getitem or not node.all_input_nodes:
        return False
    return not draws_numbers(node) and (is_sym_node(node) or is_view(node) or is_pointwise(node))
