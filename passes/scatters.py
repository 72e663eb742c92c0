"""Scatters as Inductor generates them: what they write into, and which values it computes inside them.

The values that an `index_put` writes, and its indices, are computed where they are written, as in an elementwise kernel
(torch: `_inductor/lowering.py: index_put_impl_`), so that they need not be in memory:

    wide = to(gradient, float32); sums = index_put(zeros, indices, wide, accumulate)  # one kernel reads `gradient`

Not where torch's own kernel is called: for boolean indices, for sums in a dtype that the device may not be able to add
to in one go, and where all is to be deterministic. Nor where the values are computed from what is written to.
"""

from collections.abc import Callable

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tencache_fx.ops import arguments_of
from tencache_fx.passes.op_kinds import base_of, packet_of, readers_of

_aten = torch.ops.aten
_PUTS = frozenset((_aten.index_put, _aten._unsafe_index_put))
_SCATTERS = _PUTS | frozenset(
    (_aten._unsafe_masked_index_put_accumulate, _aten.scatter, _aten.scatter_add, _aten.scatter_reduce)
)
_ADDED = (torch.float16, torch.float32, torch.float64)  # bf16 only on some GPUs


def is_scatter(node: fx.Node) -> bool:
    """Return whether a node writes a copy of its first argument at places that another argument tells."""
    return packet_of(node) in _SCATTERS


def computes(scatter: fx.Node, value: fx.Node, is_view: Callable[[fx.Node], bool]) -> bool:
    """Return whether Inductor computes `value`, which the node `scatter` reads, inside the kernel of that."""
    if packet_of(scatter) not in _PUTS or torch.are_deterministic_algorithms_enabled():
        return False
    given = arguments_of(scatter)
    begun = base_of(given["self"], is_view)
    indices = [each.meta["val"] for each in tree_leaves(given["indices"]) if isinstance(each, fx.Node)]
    return (
        begun is not value
        and begun.op == "call_function"
        and readers_of(begun, is_view) == {scatter}
        and all(index.dtype in (torch.int32, torch.int64) for index in indices)
        and (not given.get("accumulate") or given["self"].meta["val"].dtype in _ADDED)
    )
