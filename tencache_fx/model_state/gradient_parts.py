"""Gradients of parameters that are spread over ranks: of each, a rank has the part that belongs to its rows.

Whoever takes such a gradient's norm has to know that. One in host memory says so by itself (`HostGradient`); for one
that stays on the device a hook on the parameter does, before autograd adds it to what is there.
"""

import torch
from torch import Tensor

from tencache_fx import compat
from tencache_fx.model_state.grad_accumulation import GradientAccumulator
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer


class PartHook:
    """Has the gradients of one parameter known as parts of what is spread over the process group named `shard`."""

    def __init__(self, parameter: Tensor, additions: GradientAccumulator, shard: str) -> None:
        self._additions, self._shard, self._stride = additions, shard, parameter.stride()
        is_frozen = not parameter.requires_grad
        if parameter.is_floating_point() or parameter.is_complex():  # else it never has a gradient
            parameter.requires_grad_(True)  # torch takes hooks of others only; this one may be trained later
            parameter.register_hook(self)
            parameter.requires_grad_(not is_frozen)

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return a gradient that is known as a part; None for one that is already, and where nothing is offloaded."""
        if isinstance(gradient, HostGradient) or self._additions.closed:
            return None
        value = gradient.detach()
        if value.stride() != self._stride:
            value = torch.empty_strided(value.size(), self._stride, dtype=value.dtype, device=value.device).copy_(value)
        return HostGradient(HostGradientBuffer.on_device(self._additions, value, self._shard))


compat.run_as_is(PartHook.__call__)
