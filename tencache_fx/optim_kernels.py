"""The arithmetic of the optimizers, in one pass over memory: functions that Inductor compiles for the CPU."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tencache_fx import compat

_EXAMPLE_LENGTH = 1 << 20  # so many elements that it is compiled for all threads
_LEAST_LENGTH = 1 << 12


def adamw_numbers(group: Mapping[str, Any], step: int) -> Tensor:
    """Return what the kernel multiplies with, fp32."""
    beta_1, beta_2 = group["betas"]
    lr = float(group["lr"])
    return torch.tensor(
        [
            -1.0 if group["maximize"] else 1.0,
            1 - lr * group["weight_decay"],
            1 - beta_1,
            beta_2,
            1 - beta_2,
            lr / (1 - beta_1**step),
            (1 - beta_2**step) ** 0.5,
            group["eps"],
        ],
        dtype=torch.float64,
        device="cpu",
    ).float()


def _adamw(
    gradient: Tensor, weight: Tensor, written: Tensor, master: Tensor, mean: Tensor, square: Tensor, numbers: Tensor
) -> None:
    """Update the fp32 state by a gradient, and leave the new weight in its place; all [n], but for `adamw_numbers`.

    Where the weight is what was written last, its master has more digits, which are worth keeping; else somebody has
    set it since.
    """
    sign, decay, keep_1, beta_2, keep_2, rate, root, eps = numbers.unbind()
    known = torch.where(written == weight, master, weight.float())
    change = gradient.float() * sign
    mean.add_((change - mean) * keep_1)
    square.mul_(beta_2).add_(change * change * keep_2)
    master.copy_(known * decay - rate * (mean / (square.sqrt() / root + eps)))
    gradient.copy_(master)
    written.copy_(master)


def adamw_at_home(
    gradient: Tensor, weight: Tensor, master: Tensor, mean: Tensor, square: Tensor, numbers: Tensor
) -> None:
    """Update the fp32 state by a gradient, and write the new weight; all [n], `numbers` as `adamw_numbers`."""
    sign, decay, keep_1, beta_2, keep_2, rate, root, eps = numbers.unbind()
    change = gradient.float() * sign
    mean.add_((change - mean) * keep_1)
    square.mul_(beta_2).add_(change * change * keep_2)
    master.copy_(master * decay - rate * (mean / (square.sqrt() / root + eps)))
    weight.copy_(master)


ADAMW: Callable[..., None] = torch.compile(_adamw, dynamic=True)
"""The update in one pass over memory, compiled for the CPU at its first call, for any length."""


@functools.cache
def adamw_kernel(dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
    """Return `adamw_at_home` for weights and gradients of `dtype`, compiled for `device` at the first call."""
    dtypes = (dtype, dtype, *[torch.float32] * 3)
    length = _EXAMPLE_LENGTH if device.type == "cpu" else _LEAST_LENGTH  # of a device, a budget may be all but full
    tensors = [torch.zeros(length, dtype=each, device=device) for each in dtypes]
    return compat.compile_for_threads(adamw_at_home, [*tensors, torch.ones(8, device=device)])
