"""Write down the copies that Inductor makes of inputs of convolutions.

A convolution reads its input in the order of strides of its result (torch: `_inductor/kernel/conv.py: convolution`). An
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
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def copy_for_convolutions(graph: fx.Graph) -> None:
    """Have convolutions, and their backwards, read their inputs in the order of strides of the results. O(nodes)."""
    copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
    for convolution in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        given, result = convolution.all_input_nodes[0], convolution.meta["val"]
        value, read = given.meta["val"], convolution.args[:2]
        wanted = _format_of(result)
        if wanted is None or _has_order_of(value, result):
            continue
        if (given, wanted) not in copies:
            with graph.inserting_before(convolution):
                copied = graph.call_function(_aten.clone.default, (given,), {"memory_format": wanted})
            copied.meta = {**given.meta, "val": value.clone(memory_format=wanted)}
            copies[given, wanted] = copied
        for reader in tuple(given.users):
            backward = reader.target is _aten.convolution_backward.default and reader.args[1:3] == read
            if reader is convolution or backward:
                reader.replace_input_with(given, copies[given, wanted])


def _format_of(value: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format of a value at the sizes seen while tracing: no guard is put on symbols."""
    sizes, strides = _hints(value)
    seen = torch.empty_strided(sizes, strides, device="meta")
    return next((each for each in _FORMATS if seen.is_contiguous(memory_format=each)), None)


def _has_order_of(value: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether the strides of both fall in the same order, where neither has a size of 1."""
    (sizes, strides), (result_sizes, result_strides) = _hints(value), _hints(result)
    counted = [dim for dim in range(len(sizes)) if min(sizes[dim], result_sizes[dim]) > 1]
    return sorted(counted, key=lambda dim: -strides[dim]) == sorted(counted, key=lambda dim: -result_strides[dim])


def _hints(value: torch.Tensor) -> tuple[list[int], list[int]]:
    return [byte_hint(size) for size in value.shape], [byte_hint(stride) for stride in value.stride()]
