"""Which tensors that are put together have no memory of their own: on a GPU, readers may compute them from their parts.

Inductor has the parts of most `cat`s written into one buffer (torch: `_inductor/ir.py: ConcatKernel`). On a GPU it
computes one inside its readers instead, if they are all elementwise, and a part is not in memory yet (torch:
`_inductor/lowering.py: cat, pointwise_cat`). A copy of it that has another layout is such a reader:

    up = x[...]; whole = cat(skip, up); copied = clone(whole)  # one kernel reads `skip` and `x`, and writes `copied`

From 2.14 on it does not where somebody else reads a part, which would be computed twice. A `cat` counts as fused only
where all versions fuse it.
"""

from collections.abc import Collection

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tencache_fx.passes.op_kinds import is_pointwise, packet_of, readers_of
from tencache_fx.tensors import tensors_of

_MOST_PARTS = 8  # of more than these, only simple ones are fused


def is_stored_cat(node: fx.Node, registers: Collection[fx.Node], *, on_gpu: bool) -> bool:
    """Return whether a node is a `cat` with a memory of its own; `registers` are the values before it that have none.

    `on_gpu` says that the graph is for a GPU, though its tensors may be on a CPU. O(parts + their readers).
    """
    return packet_of(node) is torch.ops.aten.cat and not (
        (on_gpu or _is_on_gpu(node)) and _is_computed_by_readers(node, registers)
    )


def _is_computed_by_readers(cat: fx.Node, registers: Collection[fx.Node]) -> bool:
    parts = [each for each in tree_leaves(cat.args[0]) if isinstance(each, fx.Node)]
    fresh = [part for part in parts if part in registers]
    readers = readers_of(cat)
    return (
        1 < len(parts) <= _MOST_PARTS
        and bool(fresh and readers)
        and all(map(is_pointwise, readers))
        and all(len(part.users) == 1 for part in fresh)
        and not any(is_pointwise(reader) for part in parts for reader in readers_of(part))
    )


def _is_on_gpu(node: fx.Node) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors_of(node))
