"""Put a product where Inductor will compute it: beside the sum that takes it up.

Inductor turns `mm` and a later `add` into one `addmm`, and computes it where the `add` stood (torch:
`_inductor/fx_passes/post_grad.py: addmm`). The operands of the product live until then: with tied weights, the
gradient of the logits lives through the whole backward.

    p = mm(a, b); ...; s = add(p, q)      becomes      ...; p = mm(a, b); s = add(p, q)
"""

import torch
from torch import fx
from torch._inductor.pattern_matcher import is_mutation_op

from tencache_fx.compat import may_unfuse
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.op_kinds import is_heavy, is_pointwise, readers_of

_aten = torch.ops.aten


def sink_products(capture: RegionGraphs) -> None:
    """Move, in place, each product that Inductor will fuse with a sum to that sum. O(nodes).

    The graph means what it meant, and Inductor makes of it what it would have made.
    """
    for graph in capture.graphs:
        for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
            if (product := fused_product(node)) is not None:
                node.prepend(product)


def runs_heavy(node: fx.Node) -> bool:
    """Return whether a heavy kernel runs at this step: that of a fused product runs at its sum."""
    if node.target is _aten.add.Tensor:
        return fused_product(node) is not None
    return is_heavy(node) and not any(fused_product(user) is node for user in node.users)


def fused_product(total: fx.Node) -> fx.Node | None:
    """Return the product that Inductor computes together with the sum `total`, if there is one: of two, the second.

    Not across a write to memory, such as a release: there, Inductor matches no patterns
    (torch: `_inductor/pattern_matcher.py: compute_mutation_region_ids`).
    """
    if total.target is not _aten.add.Tensor:
        return None
    for product, other in (total.args[::-1], total.args):
        if isinstance(product, fx.Node) and isinstance(other, fx.Node) and _is_fused(product, other, total):
            return product
    return None


def _is_fused(product: fx.Node, other: fx.Node, total: fx.Node) -> bool:
    """Return whether Inductor computes `total` as `addmm(other, *product.args)`."""
    if product.target is not _aten.mm.default or len(product.users) > 1 or total.kwargs:
        return False
    if _is_written_between(product, total):
        return False
    made, added = product.meta["val"], other.meta.get("val")
    if not isinstance(added, torch.Tensor) or added.dtype != made.dtype or added.shape not in _expandable_to(made):
        return False
    if made.device.type == "cpu" or not may_unfuse(other, total):
        return True
    return not all(is_pointwise(reader) for reader in readers_of(total))


def _is_written_between(first: fx.Node, last: fx.Node) -> bool:
    node = first.next
    while node is not last:
        if is_mutation_op(node):
            return True
        node = node.next
    return False


def _expandable_to(made: torch.Tensor) -> tuple[tuple[int | torch.SymInt, ...], ...]:
    """Return the shapes that are broadcast to a product's."""
    rows, columns = made.shape
    return (), (columns,), (1,), (rows, columns), (1, columns), (rows, 1), (1, 1)
