"""Follow the layouts of what Inductor's patterns have put into a graph.

Inductor replaces an attention that is written out with a fused op (torch: `_inductor/fx_passes/fuse_attention.py`),
whose result can have other strides than the product had that it replaces. The fakes of the views of it still tell the
old strides, and a copy into the new ones may stand behind them:

    r = scaled_dot_product(...); p = permute(r); c = clone(p, contiguous); v = view(c)

Inductor drops that copy after the partition (torch: `_inductor/fx_passes/post_grad.py: remove_noop_ops`). Then the
result and its copy are one buffer, where a plan has two. Here the views get their strides, and the copy goes first.
"""

from torch import fx
from torch._inductor.fx_passes.post_grad import remove_noop_ops

from tencache_fx.passes.fake_aliasing import refresh_views


def settle_pattern_layouts(graph: fx.Graph) -> None:
    """Correct the fakes of views, and drop the copies that change nothing, in place. O(nodes)."""
    refresh_views(graph)
    remove_noop_ops(graph)
