"""Inputs that Inductor writes to where they are: a cache of keys and values gets a row, and is never there twice.

AOTAutograd makes of `cache.index_copy_(...)` a value of its own, and copies that into the input at the end:

    new = index_put(cache, where, row); ... reads of new ...; copy_(cache, new)

Inductor writes the row into the input instead, if nobody reads that behind the scatter any more (torch:
`_inductor/fx_passes/reinplace.py: reinplace_inplaceable_ops_core`): `new` is then another name for the input.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tencache_fx.ops import arguments_of
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.op_kinds import storages_of
from tencache_fx.tensors import tensors_of

_aten = torch.ops.aten
_PUTS = (_aten.index_put.default, _aten._unsafe_index_put.default)
_PARTS = (_aten.slice_scatter.default, _aten.select_scatter.default)


def find_mutations(capture: RegionGraphs) -> Mapping[fx.Node, fx.Node]:
    """Return the values that are written into an input of their graph, and into which. O(nodes + readers of inputs)."""
    found: dict[fx.Node, fx.Node] = {}
    for graph in capture.graphs:
        copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
        back = {copy.all_input_nodes[0]: copy for copy in reversed(copies)}  # the first of each
        order = {node: index for index, node in enumerate(graph.nodes)} if back else {}
        readers: defaultdict[int, list[fx.Node]] = defaultdict(list)  # by storage
        for node in order:
            for key in storages_of(node):
                readers[key] += node.users
        for node in order:
            if node.target not in _PUTS + _PARTS:
                continue
            base, *others = [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
            root = found.get(base, base)
            if root.op != "placeholder" or root not in back or not _is_there(root, capture):
                continue
            if any(storages_of(other) & storages_of(base) or _is_mask(other) for other in others):
                continue
            if node.target in _PARTS and (base is not root or arguments_of(back[root])["src"] is not node):
                continue
            until = {root: order[back[root]]} | ({} if base is root else {base: len(order)})
            users = ((user, end) for each, end in until.items() for key in storages_of(each) for user in readers[key])
            if not any(order[node] < order[user] < end for user, end in users):
                found[node] = root
    return found


def _is_there(node: fx.Node, capture: RegionGraphs) -> bool:
    """Return whether a node is a tensor on the region's device: of others nothing is counted."""
    return all(each.device == capture.device and each.layout is torch.strided for each in tensors_of(node))


def _is_mask(node: fx.Node) -> bool:
    """Return whether a node is a mask, by which Inductor may choose between old and new, in a buffer of its own."""
    return any(each.dtype is torch.bool for each in tensors_of(node))
