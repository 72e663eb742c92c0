"""Checks that all ranks run their collectives in one order: else they hang, or add up what does not belong together.

Ranks plan each for itself. The first rank of a process group that has compiled a region writes its order to the store
of the default process group, and the others of that group compare theirs. Nobody waits for anybody. Ranks that share no
group, such as those of two rows of a mesh, may differ.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import fx
from torch.fx.node import map_aggregate

from tencache_fx.errors import InvariantError
from tencache_fx.ops import arguments_of
from tencache_fx.passes.collectives import begins_collective
from tencache_fx.region.source import RegionSource
from tencache_fx.tensors import byte_hint


def check_order(
    source: RegionSource, graphs: Sequence[fx.Graph], offloaded: Collection[str], models: Sequence[str]
) -> None:
    """Raise `InvariantError` if another rank of its groups has compiled this region with collectives in another order.

    It is the same region if its graph, its collectives in any order, what is `offloaded` of which `models`, and its
    options but for the budgets are the same.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    groups, order = find_order(graphs)
    options = source.options
    asked = options.recompute, options.compiler, options.policy, options.scope, sorted(offloaded), models
    begins = (node for node in source.graph.graph.nodes if "_c10d_functional." in str(node.target))
    stated = sorted(repr(map_aggregate((each.args, each.kwargs), partial(_plain, groups))) for each in begins)
    key = hashlib.sha256(repr((source.fingerprint, stated, asked)).encode()).hexdigest()
    for group in groups:
        compare(dist.distributed_c10d._get_default_store(), f"tencache/order/{key}/{group}", order, source.index)


def find_order(graphs: Sequence[fx.Graph]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the groups that run collectives here, and what all their ranks have to agree on: ops, sizes and groups.

    The order has a group's place among the groups: its name is another one in each row of a mesh.
    """
    nodes = [node for graph in graphs for node in graph.nodes if begins_collective(node)]
    arguments = [arguments_of(node) for node in nodes]
    groups = list(dict.fromkeys(given["group_name"] for given in arguments if "group_name" in given))
    return groups, [_told(node, given, groups) for node, given in zip(nodes, arguments, strict=True)]


def compare(store: Any, key: str, order: Sequence[str], region: int) -> None:
    """Compare an order with what a store (`torch.distributed.Store`) has under `key`: this one, if it had nothing."""
    mine = hashlib.sha256("\n".join(order).encode()).hexdigest()
    first = store.compare_set(key, "", mine)
    if first.decode() != mine:
        raise InvariantError(
            f"order: region {region} runs {len(order)} collectives in another order than on another rank, which would "
            "then hang or be wrong; compile it with the same options on all ranks, recompute and compiler included."
        )


def _told(node: fx.Node, arguments: Mapping[str, Any], groups: Sequence[str]) -> str:
    others = {
        name: groups.index(each) if name == "group_name" else each
        for name, each in arguments.items()
        if name == "group_name" or isinstance(each, (bool, int, str))
    }
    sizes = [tuple(map(byte_hint, each.meta["val"].shape)) for each in node.all_input_nodes]  # as in the fingerprint
    return repr((str(node.target), sizes, others))


def _plain(groups: Sequence[str], value: Any) -> Any:
    """Return what all ranks have alike of an argument of a collective: numbers, words, and the place of its group."""
    if isinstance(value, str) and value in groups:
        return groups.index(value)
    return value if isinstance(value, (bool, int, str)) else type(value).__name__
