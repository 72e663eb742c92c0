"""Kernels of the graph ops: look the engine up by its index and hand over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.ops import LIBRARY
from tencache_fx.plan import Tier
from tencache_fx.runtime.registry import engine_by_id


def _offload(src: Tensor, engine: int, tier: str, label: str) -> Tensor:
    return engine_by_id(engine).offload(src, Tier(tier), label)


def _release(handle: Tensor, src: Tensor, engine: int) -> Tensor:
    return engine_by_id(engine).release(handle, src)


def _prefetch(handle: Tensor, engine: int) -> Tensor:
    return engine_by_id(engine).prefetch(handle)


def _wait(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return engine_by_id(engine).wait(ticket)


for _name, _kernel in (("offload", _offload), ("release", _release), ("prefetch", _prefetch), ("wait", _wait)):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
