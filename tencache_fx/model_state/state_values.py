"""What an optimizer of any class keeps of a parameter: tensors that are streamed, and the rest, which is copied."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tencache_fx.model_state.host_state import HeldTensors
from tencache_fx.model_state.step_kernel import MASTER


def arrays_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state that are no single numbers, and the master weight, whatever that is."""
    return {
        name: value for name, value in state.items() if isinstance(value, Tensor) and (value.dim() or name == MASTER)
    }


def laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor without values like `value`, with the parameter's strides if it is of its size."""
    like = parameter if value.size() == parameter.size() else value
    return torch.empty_like(like, dtype=value.dtype, device="meta")


def is_held(parameter: Tensor, held: HeldTensors, arrays: Mapping[str, Tensor]) -> bool:
    """Return whether these tensors of a parameter's state are those held, in the order it has in memory now."""
    return held.tensors.keys() == arrays.keys() and all(
        held.tensors[name] is each and (each.size() != parameter.size() or each.stride() == parameter.stride())
        for name, each in arrays.items()
    )


def copy_of(value: Any) -> Any:
    """Return a copy of what an optimizer has of a parameter."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def widened(value: Any) -> Any:
    """Return a copy of what was saved, halves as fp32: torch saves those of a half in its dtype."""
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.detach().float()
    return copy_of(value)


def renewed(before: Any, value: Any) -> Any:
    """Return `value`, as `before` if that is a tensor that can have it: a `state_dict` shares it, as it does arrays."""
    if not (isinstance(before, Tensor) and isinstance(value, Tensor)):
        return value
    if (before.size(), before.dtype, before.device) != (value.size(), value.dtype, value.device):
        return value
    return before.copy_(value)
