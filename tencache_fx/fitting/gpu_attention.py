"""Attention of a model that is traced on a CPU, by the kernels that torch would choose on a GPU.

A CPU has one kernel for attention, without dropout; it takes masks of any strides. A GPU has several: cuDNN's, flash
attention, which takes no mask, and memory-efficient attention, which takes any mask that lies in order, and can return
its gradient. Where none of these fits, torch computes attention op by op, in fp32. Which one it takes follows from
sizes, strides, dtypes, and what `torch.nn.attention.sdpa_kernel` has allowed
(torch: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`, and `transformers/attention.cpp` for what it does to
their arguments).

The kernels' fakes are the same on any device, so the op of the GPU is in the graph, though its tensors are a CPU's.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.nn.attention import SDPBackend

from tencache_fx import compat
from tencache_fx.errors import UsageError
from tencache_fx.ops import by_name

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_BY_DEFAULT = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)

AS_214 = compat.TORCH >= (2, 14)
"""Whether torch chooses kernels as 2.14 does.

Memory-efficient attention takes groups of queries from then on, and all kernels one head of keys and values for all
queries. cuDNN's takes heads of 256, and dropout in sixteenths only.
"""


@contextlib.contextmanager
def attention_of_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Have attention of this thread's fake tensors on the CPU be what a GPU of this capability would run, inside.

    torch's dispatcher calls `attend` then, wherever the call is: Dynamo evaluates what it captures, AOTAutograd traces
    it, and the attention within `nn.MultiheadAttention` is in no graph of Dynamo's. The dispatcher is that of all
    threads. So others neither compile meanwhile, nor do this.
    """
    op, ours = _aten.scaled_dot_product_attention.default, threading.get_ident()

    def attend(*args: Any, **named: Any) -> Tensor:
        given = _Attention(**by_name(op, args, named))
        if threading.get_ident() != ours or not is_fake(given.query):
            return op.decompose(*args, **named)  # type: ignore[no-any-return]  # torch's own
        return _attend(capability, given)

    with compat.compile_lock():
        library = torch.library.Library("aten", "IMPL")
        library.impl("scaled_dot_product_attention", attend, "AutogradCPU")
        try:
            _forget_kernel()
            yield
        finally:
            library._destroy()
            _forget_kernel()


def _forget_kernel() -> None:
    """Have torch look for the kernel of attention anew; under `enable_python_dispatcher` it keeps what it has found."""
    _aten.scaled_dot_product_attention.default._uncache_dispatch(torch._C.DispatchKey.AutogradCPU)


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """The arguments of torch's attention; with `enable_gqa` a group of queries may share keys and values."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def three(self) -> tuple[Tensor, Tensor, Tensor]:
        """The query, the keys and the values."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether there will be a backward of the kernel."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in self.three)

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """The sizes of a query's head, a key's and a value's."""
        return self.query.size(-1), self.key.size(-1), self.value.size(-1)

    def added_mask(self) -> Tensor | None:
        """Return the mask as what is added to the scores."""
        if self.attn_mask is None or self.attn_mask.dtype is not torch.bool:
            return self.attn_mask
        return torch.zeros_like(self.attn_mask, dtype=self.query.dtype).masked_fill(
            self.attn_mask.logical_not(), -math.inf
        )


def _attend(capability: tuple[int, int], given: _Attention) -> Tensor:
    """Return what attention returns; raises `UsageError` if a GPU has no kernel for it."""
    for kernel in _kernels_in_order(capability):
        fits, run = _KERNELS[kernel]
        if fits(given, capability):
            return run(given)
    raise UsageError(
        f"no kernel of attention that sdpa_kernel() allows takes a query of size {tuple(given.query.shape)} and "
        f"{given.query.dtype} on a GPU; allow SDPBackend.MATH as well."
    )


def _kernels_in_order(capability: tuple[int, int]) -> list[SDPBackend]:
    """Return the kernels that are allowed now, in the order in which torch asks whether they fit.

    Hopper and Blackwell ask for cuDNN's first, from cuDNN 9.15.1 on.
    """
    order = [kernel for number in torch._C._get_sdp_priority_order() for kernel in _KERNELS if kernel.value == number]
    if tuple(order) == _BY_DEFAULT and capability[0] in (9, 10) and (torch.backends.cudnn.version() or 91501) > 91500:
        order = [SDPBackend.CUDNN_ATTENTION, *order[:-1]]
    allowed = torch.nn.attention._cur_sdpa_kernel_backends()
    return [kernel for kernel in order if kernel in allowed]


def _fits_cudnn(given: _Attention, capability: tuple[int, int]) -> bool:
    strictly = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    in_sixteenths = (given.dropout_p * 16).is_integer() or not AS_214
    lengths = given.query.size(-2), given.key.size(-2)
    return (
        _is_dense(given, _HALF, one_is_any=True)
        and _has_heads(given, groups=True)
        and _is_cudnns_mask(given)
        and _is_cudnns_head(given, capability)
        and in_sixteenths
        and not strictly
        and capability >= (8, 0)
        and lengths[1] != 1
        and not (given.dropout_p and lengths[0] == 1)
    )


def _is_cudnns_mask(given: _Attention) -> bool:
    """Whether a mask is one that cuDNN takes: none that is trained, and of sizes that it knows how to repeat."""
    mask, query = given.attn_mask, given.query
    if mask is None:
        return True
    whole = (query.size(0), query.size(1), query.size(2), given.key.size(2))
    fits = all(size in (1, full) for size, full in zip(mask.shape[::-1], whole[::-1], strict=False))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def _is_cudnns_head(given: _Attention, capability: tuple[int, int]) -> bool:
    asked, _, answered = given.head_sizes
    most, is_hopper = max(asked, answered), capability == (9, 0) or capability[0] == 10
    if asked % 8 or answered % 8:
        return False
    if most <= 128 or (is_hopper and (asked, answered) == (192, 128)):
        return True
    if not (AS_214 and is_hopper and most <= 256):
        return False
    return not given.trains or (asked, answered) == (256, 256)


def _fits_flash(given: _Attention, capability: tuple[int, int]) -> bool:
    size, *others = given.head_sizes
    is_small = capability in ((8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1))  # too little memory for some backwards
    too_wide = is_small and given.trains and size > 192 and (size <= 224 or given.dropout_p > 0)
    return (
        _is_dense(given, _HALF, one_is_any=True)
        and _has_heads(given, groups=True)
        and given.attn_mask is None
        and all(other == size for other in others)
        and size <= 256
        and not too_wide
        and capability >= (8, 0)
        and not (given.is_causal and given.query.size(-2) != given.key.size(-2))
    )


def _fits_efficient(given: _Attention, capability: tuple[int, int]) -> bool:
    asked, key, answered = given.head_sizes
    alignment = max(4, 16 // given.query.dtype.itemsize) if capability >= (8, 0) else 8
    known = (torch.float32, *_HALF) if capability >= (8, 0) else (torch.float32, torch.float16)
    return (
        _is_dense(given, known, one_is_any=False)
        and _has_heads(given, groups=AS_214)
        and asked == key
        and not asked % alignment
        and not answered % alignment
    )


def _is_dense(given: _Attention, dtypes: tuple[torch.dtype, ...], *, one_is_any: bool) -> bool:
    """Whether all lie in order in their last dimension, `one_is_any` for heads of one number, and have these dtypes."""
    in_order = all(each.stride(-1) == 1 for each in given.three) or (one_is_any and given.query.size(-1) == 1)
    return (
        all(each.dim() == 4 and each.dtype is given.query.dtype for each in given.three)
        and given.query.dtype in dtypes
        and given.query.size(-2) > 0
        and given.key.size(-2) > 0
        and in_order
        and (given.attn_mask is None or given.attn_mask.stride(-1) == 1)
    )


def _has_heads(given: _Attention, *, groups: bool) -> bool:
    """Whether all have the same batch, and as many heads, or, with `groups`, keys and values have fewer."""
    query, key, value = (each.shape for each in given.three)
    if not query[0] == key[0] == value[0]:
        return False
    if given.enable_gqa and groups:
        return key[1] == value[1] and query[1] % key[1] == 0
    return query[1] == key[1] == value[1] or (AS_214 and key[1] == value[1] == 1)


def _by_cudnn(given: _Attention) -> Tensor:
    made = _aten._scaled_dot_product_cudnn_attention.default(
        *given.three, given.added_mask(), given.trains, given.dropout_p, given.is_causal, scale=given.scale
    )
    return made[0]  # type: ignore[no-any-return]


def _by_flash(given: _Attention) -> Tensor:
    """Heads are padded to a multiple of 8."""
    size = given.query.size(-1)
    scale = 1 / math.sqrt(size) if given.scale is None else given.scale
    padded = [functional.pad(each, (0, 8 - size % 8)) if size % 8 else each for each in given.three]
    made = _aten._scaled_dot_product_flash_attention.default(*padded, given.dropout_p, given.is_causal, scale=scale)
    return made[0][..., :size] if size % 8 else made[0]  # type: ignore[no-any-return]


def _by_efficient(given: _Attention) -> Tensor:
    """A mask whose rows do not begin at multiples of 8 is padded."""
    mask = given.added_mask()
    if mask is not None:
        if any(stride % 8 for stride in mask.stride()[:-1]):
            size = mask.size(-1)
            mask = functional.pad(mask, (0, 8 - size % 8))[..., :size]
        mask = mask.expand(*given.query.shape[:3], given.key.size(2))
    made = _aten._scaled_dot_product_efficient_attention.default(
        *given.three, mask, given.trains, given.dropout_p, given.is_causal, scale=given.scale
    )
    return made[0]  # type: ignore[no-any-return]


def _op_by_op(given: _Attention) -> Tensor:
    made = _aten._scaled_dot_product_attention_math.default(
        *given.three,
        given.added_mask(),
        given.dropout_p,
        given.is_causal,
        scale=given.scale,
        enable_gqa=given.enable_gqa,
    )
    return made[0]  # type: ignore[no-any-return]


_Fits = Callable[[_Attention, tuple[int, int]], bool]
_KERNELS: Mapping[SDPBackend, tuple[_Fits, Callable[[_Attention], Tensor]]] = MappingProxyType(
    {
        SDPBackend.CUDNN_ATTENTION: (_fits_cudnn, _by_cudnn),
        SDPBackend.FLASH_ATTENTION: (_fits_flash, _by_flash),
        SDPBackend.EFFICIENT_ATTENTION: (_fits_efficient, _by_efficient),
        SDPBackend.MATH: (lambda *_: True, _op_by_op),
    }
)
