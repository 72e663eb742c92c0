"""Have what leaves the device lie in memory as the graph says, before anything reads it.

Inductor chooses the strides of most values, as their first reader likes them, and an op that it calls as it is lays out
its results by the strides of what it reads: attention of a query that has been transposed, or a sort. A copy out wants
the strides of the graph, since they are asked back. Asked for at the copy, they would be those of a second value, made
for the copy and freed while that runs. So they are fixed where the value is made, for all its readers:

    out = attention(q, k, v)          becomes      made = attention(q, k, v); out = in_order(made, order)
    handle = offload(out)                          handle = offload(out)

Only the order of strides is said: torch's own `force_stride_order` would compare strides that are symbols with numbers,
and so guard on the sizes. It is free where the strides are Inductor's choice (torch: `_inductor/ir.py:
require_strides`), and a copy elsewhere. The first thing that such an op reads, a query or what is sorted, is fixed,
too: then its results mostly need no copy.

The gradient that a backward of cuDNN's attention reads is fixed as well. torch keeps what it has built for one call,
and takes it for a gradient of other strides (torch: `aten/src/ATen/native/cudnn/MHA.cpp: MHAParams`). The result is
wrong where Inductor lays it out in one way in one layer, and in another in the next, as it does by the runtime's ops.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from tencache_fx.ops import IN_ORDER, OFFLOAD, OFFLOAD_GRAD, RELEASE, RUNTIME_OPS, arguments_of
from tencache_fx.passes.inductor_model import is_fusible
from tencache_fx.passes.op_kinds import is_heavy, is_view
from tencache_fx.tensors import byte_hint, is_hinted, storage_of

_LEAVE = (OFFLOAD, OFFLOAD_GRAD, RELEASE)
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def find_fixed(graph: fx.Graph) -> list[str]:
    """Return the names of the nodes whose strides are to be the graph's; inputs lie as their caller has them."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.target is _CUDNN_BACKWARD:
            (gradient, *_) = node.all_input_nodes
            if gradient.op == "call_function":
                found[gradient.name] = None
        if node.target in _LEAVE:
            made = _made(arguments_of(node)["src"])
            maker = made.all_input_nodes[0] if made.target is operator.getitem else made
            called = not (is_fusible(maker) or is_heavy(maker))  # as it is, and with results that follow its input
            read = [_made(each) for each in maker.all_input_nodes[:1] if called]
            found |= {each.name: None for each in (made, *read) if _is_fixable(each)}
    return list(found)


def fix_layouts(graph: fx.Graph, names: Collection[str]) -> None:
    """Fix the strides of what the nodes of these names return. O(nodes)."""
    for node in [each for each in graph.nodes if each.name in names]:
        value = node.meta["val"]
        with graph.inserting_after(node):
            fixed = graph.call_function(
                IN_ORDER, (node, list(ir.get_stride_order(list(map(byte_hint, value.stride())))))
            )
        fixed.meta = dict(node.meta)
        node.replace_all_uses_with(fixed, delete_user_cb=lambda user, fixed=fixed: user is not fixed)


def _lower(src: ir.TensorBox, order: list[int]) -> Any:
    """Lower `in_order`, as torch does `force_stride_order` (torch: `_inductor/lowering.py`)."""
    return ir.ExternKernel.require_stride_order(src, order)


register_lowering(IN_ORDER, type_promotion_kind=None)(_lower)


def _made(node: fx.Node) -> fx.Node:
    """Return the node that makes the tensor that `node` is, or is a view of; of one that makes several, its result."""
    while is_view(node) and node.all_input_nodes:
        (before, *_) = node.all_input_nodes
        if node.target is operator.getitem and not is_view(before):
            return node
        node = before
    return node


def _is_fixable(made: fx.Node) -> bool:
    """Return whether what a node makes has a memory of its own, and strides whose order is known while it is traced."""
    value = made.meta.get("val")
    return (
        made.op == "call_function"
        and made.target not in RUNTIME_OPS
        and isinstance(value, torch.Tensor)
        and storage_of(value) is not None
        and all(is_hinted(stride) for stride in value.stride())
    )
