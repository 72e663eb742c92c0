"""Kernels of the graph ops: look the engine up by its index and hand over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.ops import LIBRARY
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine_registry import server_by_id

_TIERS = {tier.value: tier for tier in Tier}  # `Tier(...)` takes several times as long


def _offload(src: Tensor, engine: int, tier: str, label: str) -> Tensor:
    return server_by_id(engine).offload(src, _TIERS[tier], label)


def _release(handle: Tensor, src: Tensor, engine: int, donated: bool = False) -> Tensor:  # noqa: FBT001
    return server_by_id(engine).release(handle, src, donated=donated)


def _prefetch(handle: Tensor, engine: int) -> Tensor:
    return server_by_id(engine).prefetch(handle)


def _wait(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return server_by_id(engine).wait(ticket)


_KERNELS = (("offload", _offload), ("release", _release), ("prefetch", _prefetch), ("wait", _wait))
for _name, _kernel in _KERNELS:
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
