"""Optimizers whose state is in host memory: the device holds weights and gradients only.

    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=3e-4)

in place of `torch.optim.AdamW`, in any loop, and `OffloadedOptimizer` for any other class that updates each element by
itself. Master weights and moments are in host memory, beside each weight as it was last written: 14 bytes for a bf16
parameter. Gradients stay where autograd puts them, so clipping, accumulation, `GradScaler`, schedulers and closures are
torch's.

Offloaded parameters (`tencache_fx.offload`) are updated in host memory, and their gradients are there already: `step`
returns at once, and each parameter's next reader waits for its own update only. With `step_in_backward=True` updates
begin during backward, as gradients land.
"""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tencache_fx.model_state.optimizer import OffloadedOptimizer
from tencache_fx.renames import new_name

__all__ = ["AdamW", "OffloadedOptimizer"]


class AdamW(OffloadedOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) as `torch.optim.AdamW` has it; see `OffloadedOptimizer`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        step_in_backward: bool = False,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            params,
            torch.optim.AdamW,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            step_in_backward=step_in_backward,
            state_dtype=state_dtype,
        )


def __getattr__(name: str) -> Any:
    if name == "HomeOptimizer":
        raise AttributeError(new_name("tencache_fx.optim", name, "OffloadedOptimizer"))
    raise AttributeError(f"module 'tencache_fx.optim' has no attribute {name!r}; it has {', '.join(__all__)}.")
