"""What the optimizers refuse: parameters and saved states that they cannot use."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tencache_fx.errors import OptionError, UsageError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise `OptionError` if a group has parameters that cannot be used."""
    for parameter in group["params"]:
        if parameter.dtype not in _DTYPES:
            raise OptionError(
                f"a parameter is of {parameter.dtype}, and master weights are fp32; give parameters of bfloat16, "
                "float16 or float32."
            )
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            raise OptionError(
                f"a parameter of size {tuple(parameter.shape)} has strides {parameter.stride()}, with gaps between its "
                "elements or the same memory for several; give parameters that are contiguous."
            )


def check_sizes(parameter: Tensor, saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `OptionError` if what was saved of a parameter's state is that of another."""
    for name in names:
        if name in saved and saved[name].shape != parameter.shape:
            raise OptionError(
                f"the saved {name} has size {tuple(saved[name].shape)}, its parameter {tuple(parameter.shape)}; "
                "load the state of the same model."
            )


def check_unchanged(parameter: Tensor, state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `UsageError` if a parameter has another size than its state."""
    for name in names:
        if name in state and state[name].shape != parameter.shape:
            raise UsageError(
                f"a parameter has size {tuple(parameter.shape)}, and its {name} {tuple(state[name].shape)}; a "
                "parameter whose size has changed needs a new optimizer."
            )
