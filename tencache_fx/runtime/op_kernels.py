"""Kernels of the graph ops: look the engine up by its index and hand over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.ops import LIBRARY
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine_registry import engine_by_id


def _offload(src: Tensor, engine: int, tier: str, label: str) -> Tensor:
    return engine_by_id(engine).offload(src, Tier(tier), label)


def _release(handle: Tensor, src: Tensor, engine: int, lent: bool = False) -> Tensor:  # noqa: FBT001
    return engine_by_id(engine).release(handle, src, lent=lent)


def _prefetch(handle: Tensor, engine: int) -> Tensor:
    return engine_by_id(engine).prefetch(handle)


def _wait(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return engine_by_id(engine).wait(ticket)


def _fetch(home: Tensor, engine: int, label: str) -> Tensor:
    return engine_by_id(engine).fetch(home, label)


def _settle(home: Tensor, engine: int, label: str) -> Tensor:
    return engine_by_id(engine).settle(home)


def _renew(home: Tensor, engine: int, label: str) -> Tensor:
    return engine_by_id(engine).renew(home)


def _sink(src: Tensor, engine: int, label: str, home: str, shard: bool = False) -> Tensor:  # noqa: FBT001
    return engine_by_id(engine).sink(src, label, home, shard=shard)


def _homed(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return engine_by_id(engine).homed(handle)


_KERNELS = (
    ("offload", _offload),
    ("release", _release),
    ("prefetch", _prefetch),
    ("wait", _wait),
    ("fetch", _fetch),
    ("settle", _settle),
    ("renew", _renew),
    ("sink", _sink),
    ("homed", _homed),
)
for _name, _kernel in _KERNELS:
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
