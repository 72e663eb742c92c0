"""Matrix products with odd sizes, traced on a CPU, padded as Inductor pads them on a GPU.

Tensor cores want rows that begin at multiples of 16 bytes. Inductor copies operands into padded ones, and takes a part
of the product, where timing both ways tells it that this is faster (torch: `_inductor/fx_passes/pad_mm.py`); on a CPU
it never does. The copies are large: for a vocabulary of 50,257, those of the logits' gradient are. Here a product
counts as padded if Inductor would time it, because its work outweighs what it reads and writes, and if rows of an
operand, or of the result, begin where tensor cores are slow. Full precision is not for these.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import pad_mm
from torch.fx.experimental.proxy_tensor import make_fx

from tencache_fx.hardware.roofline import Roofline
from tencache_fx.ops import arguments_of

_aten = torch.ops.aten
_PADDED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.mm.default: pad_mm.mm_replace,
        _aten.bmm.default: pad_mm.bmm_replace,
        _aten.addmm.default: pad_mm.addmm_replace,
    }
)


@contextlib.contextmanager
def padding_of_gpu(roofline: Roofline) -> Iterator[None]:
    """Have Inductor pad products as on a GPU with these rates, inside, unless its setting `shape_padding` is off."""
    with config.patch(joint_custom_post_pass=_Padding(roofline)):
        yield


class _Padding(CustomGraphPass):
    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline

    def __call__(self, graph: fx.Graph) -> None:
        if not config.shape_padding:
            return
        for op, replace in _PADDED.items():
            for node in graph.find_nodes(op="call_function", target=op):
                if _is_odd(node) and self._is_timed(node):
                    _replace(node, replace)

    def uuid(self) -> Any | None:
        return repr(self._roofline)

    def _is_timed(self, node: fx.Node) -> bool:
        """Return whether Inductor would time a product: by half of what the device computes for each byte it moves."""
        rows, inner, columns = _sizes(node)
        dtype = node.meta["val"].dtype
        moved = rows * inner + inner * columns + rows * columns
        balance = self._roofline.flops_rate(dtype) / self._roofline.memory_bytes_per_s
        return bool(moved and rows * inner * columns / moved > balance / 2)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    given = arguments_of(node)
    return given.get("mat1", given["self"]), given["mat2"]


def _sizes(node: fx.Node) -> tuple[int, int, int]:
    first, second = (operand.meta["val"] for operand in _operands(node))
    return first.shape[-2], first.shape[-1], second.shape[-1]


def _is_odd(node: fx.Node) -> bool:
    sizes, dtype = _sizes(node), node.meta["val"].dtype
    if not all(isinstance(size, int) for size in sizes) or dtype not in (torch.float16, torch.bfloat16):
        return False
    alignment = pad_mm.get_alignment_size_dtype(dtype)
    rows = [max(operand.meta["val"].stride()[-2:]) for operand in _operands(node)]
    return any(stride % alignment for stride in (*rows, sizes[-1]))


def _replace(node: fx.Node, replace: Callable[..., Any]) -> None:
    """Replace a product by what Inductor would put there: product(a, b) becomes product(pad(a), pad(b))[part]."""
    operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
    values = [operand.meta["val"] for operand in operands]
    with values[0].fake_mode:
        padded = make_fx(functools.partial(replace, **node.kwargs), select_decomp_table())(*values)
    with node.graph.inserting_before(node):
        places = padded.graph.find_nodes(op="placeholder")
        result = node.graph.graph_copy(padded.graph, dict(zip(places, operands, strict=True)))
    assert isinstance(result, fx.Node)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
