"""Follow the layouts of what Inductor's patterns have put into a graph.

Inductor replaces an attention that is written out with a fused op (torch: `_inductor/fx_passes/fuse_attention.py`),
whose result can have other strides than the product had that it replaces. The fakes of the views of it still tell the
old strides, and a copy into the new ones may stand behind them:

    r = scaled_dot_product(...); p = permute(r); c = clone(p, contiguous); v = view(c)

Inductor drops that copy after the partition (torch: `_inductor/fx_passes/post_grad.py: remove_noop_ops`). Then the
result and its copy are one buffer, where a plan has two. Here the views get their strides, and the copy goes first.

Or a copy is missing: the result is padded, and no view makes `v` of it. Inductor copies it then, and so does the graph:

    r = slice(scaled_dot_product(...)); v = view(r)   becomes   ...; c = clone(r, contiguous); v = view(c)
"""

import torch
from torch import fx
from torch._inductor.fx_passes.post_grad import remove_noop_ops

from tencache_fx.passes.fake_aliasing import aliases_inputs, refresh_views

_aten = torch.ops.aten


def settle_pattern_layouts(graph: fx.Graph) -> None:
    """Correct the fakes of views, drop copies that change nothing, and add those that are missing. O(nodes)."""
    refresh_views(graph)
    for view in graph.find_nodes(op="call_function", target=_aten.view.default):
        if not aliases_inputs(view):
            _copy_before(view)
    remove_noop_ops(graph)


def _copy_before(view: fx.Node) -> None:
    """Have a view, whose fake is of a copy, read that copy."""
    (viewed,) = view.all_input_nodes[:1]
    with view.graph.inserting_before(view):
        copied = view.graph.call_function(_aten.clone.default, (viewed,), {"memory_format": torch.contiguous_format})
    fake = view.meta["val"]
    with fake.fake_mode:
        copied.meta = {**viewed.meta, "val": fake.view(viewed.meta["val"].shape)}
    view.replace_input_with(viewed, copied)
