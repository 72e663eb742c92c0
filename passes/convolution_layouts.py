"""Write down the copies that Inductor makes of inputs of convolutions.

A convolution reads its input in the memory format of its result (torch: `_inductor/kernel/conv.py: convolution`). An
input that a layer norm over channels has laid out in another way is copied, or computed in another layout than the
graph says. An op that stores the value would be given a second copy, which is freed while it is still being copied out.
With the copy in the graph, each value has one layout, and the plan counts both:

    x = gelu(normed)                                  becomes  x = gelu(normed); c = clone(x)
    y = convolution(x, w, ...)                                 y = convolution(c, w, ...)
    ... = convolution_backward(gradient, x, w, ...)            ... = convolution_backward(gradient, c, w, ...)
"""

import torch
from torch import fx

from tencache_fx.tensors import byte_hint

_aten = torch.ops.aten
_READERS = (_aten.convolution.default, _aten.convolution_backward.default)
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def copy_for_convolutions(graph: fx.Graph) -> None:
    """Have convolutions, and their backwards, read their inputs in the memory format of the results. O(nodes)."""
    for convolution in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        given, value = convolution.args[0], convolution.args[0].meta["val"]
        wanted = _format_of(convolution.meta["val"])
        if wanted is None or _has_format(value, wanted):
            continue
        with graph.inserting_before(convolution):
            copied = graph.call_function(_aten.clone.default, (given,), {"memory_format": wanted})
        copied.meta = {**given.meta, "val": value.clone(memory_format=wanted)}
        for reader in (user for user in tuple(given.users) if user.target in _READERS):
            if reader is convolution or (reader.args[1] is given and reader > convolution):
                reader.replace_input_with(given, copied)


def _format_of(value: torch.Tensor) -> torch.memory_format | None:
    return next((each for each in _FORMATS if _has_format(value, each)), None)


def _has_format(value: torch.Tensor, wanted: torch.memory_format) -> bool:
    """Return whether a value has a memory format at the sizes seen while tracing: no guard is put on symbols."""
    sizes, strides = ([byte_hint(each) for each in numbers] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, device="meta").is_contiguous(memory_format=wanted)
