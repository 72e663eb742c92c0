"""Checks that all ranks run their collectives in one order: else they hang, or add up what does not belong together.

Ranks plan each for itself. The first rank that has compiled a region writes its order to the store of the default
process group, and the others compare theirs. Nobody waits for anybody.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.passes.collectives import begins_collective
from tencache_fx.region.source import RegionSource


def check_order(source: RegionSource, graphs: Sequence[fx.Graph], offloaded: Collection[str]) -> None:
    """Raise `InvariantError` if another rank has compiled this region with its collectives in another order.

    It is the same region if its graph, what is `offloaded` of it, and its options but for the budgets are the same.
    """
    order = [_told(node) for graph in graphs for node in graph.nodes if begins_collective(node)]
    if not order or not dist.is_available() or not dist.is_initialized():
        return
    options = source.options
    asked = options.recompute, options.compiler, options.policy, options.scope, sorted(offloaded)
    key = hashlib.sha256(repr((source.fingerprint, asked)).encode()).hexdigest()
    compare(dist.distributed_c10d._get_default_store(), f"tencache/order/{key}", order, source.index)


def compare(store: Any, key: str, order: Sequence[str], region: int) -> None:
    """Compare an order with what a store (`torch.distributed.Store`) has under `key`: this one, if it had nothing."""
    mine = hashlib.sha256("\n".join(order).encode()).hexdigest()
    first = store.compare_set(key, "", mine)
    if first.decode() != mine:
        raise InvariantError(
            f"order: region {region} runs {len(order)} collectives in another order than on another rank, which would "
            "then hang or be wrong; compile it with the same options on all ranks, recompute and compiler included."
        )


def _told(node: fx.Node) -> str:
    """Return what all ranks have to agree on: the op, its sizes and its group."""
    others = [each for each in node.args if not isinstance(each, fx.Node)]
    sizes = [tuple(map(str, each.meta["val"].shape)) for each in node.all_input_nodes]
    return repr((str(node.target), sizes, others))
