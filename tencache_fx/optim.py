"""Optimizers whose state is in host memory: the device holds weights and gradients only.

    optimizer = tencache_fx.optim.AdamW(model.parameters(), lr=3e-4)

in place of `torch.optim.AdamW`, in any loop, and `OffloadedOptimizer` for any other class that updates each element by
itself. Master weights and moments are in host memory, beside each weight as it was last written: 12.1 bytes for a bf16
parameter, whose master is kept as what it has besides the weight. Gradients stay where autograd puts them, so clipping,
accumulation, `GradScaler`, schedulers and closures are torch's.

Offloaded parameters (`tencache_fx.offload`) are updated in host memory, and their gradients are there already: `step`
returns at once, and each parameter's next reader waits for its own update only. With `step_in_backward=True` updates
begin during backward, as gradients land.
"""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tencache_fx.model_state.optimizer import OffloadedOptimizer
from tencache_fx.model_state.step_kernel import StateDtype
from tencache_fx.model_state.streamed_optimizer import StreamedOptimizer
from tencache_fx.renames import new_name

__all__ = ["AdamW", "Muon", "OffloadedOptimizer", "StreamedOptimizer"]


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
        state_dtype: StateDtype = torch.float32,
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


class Muon(StreamedOptimizer):
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) as `torch.optim.Muon` has it.

    It is for matrices: give all other parameters to an optimizer of their own. See `StreamedOptimizer`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(
            params,
            torch.optim.Muon,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )


def __getattr__(name: str) -> Any:
    if name == "HomeOptimizer":
        raise AttributeError(new_name("tencache_fx.optim", name, "OffloadedOptimizer"))
    raise AttributeError(f"module 'tencache_fx.optim' has no attribute {name!r}; it has {', '.join(__all__)}.")
