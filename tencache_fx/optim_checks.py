"""What the optimizers refuse: options, parameters and saved states that they cannot use."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tencache_fx.errors import OptionError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


def check_group(group: Mapping[str, Any]) -> None:
    """Raise `OptionError` if a group has options or parameters that cannot be used."""
    check_options(group)
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


def check_options(group: Mapping[str, Any]) -> None:
    """Raise `OptionError` if a group has options that cannot be used."""
    given = [name for name in _UNSUPPORTED if group.get(name)]
    if given:
        raise OptionError(f"{', '.join(given)} cannot be had with the optimizer's state at home; leave it out.")
    beta_1, beta_2 = group["betas"]
    for name, value in (("lr", float(group["lr"])), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not value >= 0:
            raise OptionError(f"{name} is {value}; give 0 or more.")
    if not (0 <= beta_1 < 1 and 0 <= beta_2 < 1):
        raise OptionError(f"betas are {group['betas']}; give two numbers of at least 0 and below 1.")


def check_sizes(parameter: Tensor, saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `OptionError` if what was saved of a parameter's state is that of another."""
    for name in names:
        if name in saved and saved[name].shape != parameter.shape:
            raise OptionError(
                f"the saved {name} has size {tuple(saved[name].shape)}, its parameter {tuple(parameter.shape)}; "
                "load the state of the same model."
            )
