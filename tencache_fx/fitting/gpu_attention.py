"""Attention of a model that is traced on a CPU, by the kernels that torch would choose on a GPU.

A CPU has no kernel for attention with dropout, and takes masks of any strides. A GPU has kernels with dropout, and none
for a mask whose last dimension is not in order, such as one that was expanded from a value a row: there torch computes
attention op by op, in fp32 (torch: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).

Attention within `nn.MultiheadAttention` is one node of a captured graph, and stays what a CPU runs. So does attention
with a mask that needs a gradient.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from tencache_fx.ops import by_name


def choose_as_a_gpu(gm: fx.GraphModule) -> None:
    """Change each attention in a captured graph, and in those within it, to what a GPU would run."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=torch._C._nn.scaled_dot_product_attention):
                _choose(node)
            part.recompile()


def _choose(node: fx.Node) -> None:
    given = by_name(torch.ops.aten.scaled_dot_product_attention.default, node.args, node.kwargs)
    if _has_no_kernel(given.get("attn_mask")):
        node.target = _op_by_op
    else:
        given["dropout_p"] = 0.0
    node.args, node.kwargs = (), given


def _has_no_kernel(mask: Any) -> bool:
    value = mask.meta["example_value"] if isinstance(mask, fx.Node) else None
    return value is not None and value.size(-1) != 1 and value.stride(-1) != 1


def _op_by_op(*args: Any, **named: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*args, **named)
