"""What the optimizers refuse: parameters and states that they cannot use."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tencache_fx.errors import OptionError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_params(params: object) -> None:
    """Raise `OptionError` if an optimizer is given what cannot be several parameters, or groups of them."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise OptionError(
            f"params is a {type(params).__name__}; give model.parameters(), a list of parameters, or groups of them."
        )


def check_group(group: Mapping[str, Any]) -> None:
    """Raise `OptionError` if a group has parameters that cannot be used."""
    if len(set(group["params"])) < len(group["params"]):
        raise OptionError("a parameter is in a group twice, and would be updated twice; give each one once.")
    for parameter in group["params"]:
        if is_lazy(parameter):
            raise OptionError(
                "a parameter has no size yet, as it is of a lazy module; call the model with a batch first."
            )
        if is_traceable_wrapper_subclass(parameter):
            raise OptionError(
                f"a parameter of size {tuple(parameter.shape)} is a {type(parameter).__name__}, as fully_shard and "
                "tensor parallelism make it, and this optimizer keeps the state of ordinary tensors; give a class of "
                "torch.optim the parameters that are sharded."
            )
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


def find_misfit(parameter: Tensor, state: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return what is of another size than its parameter, in words; None if nothing is."""
    for name in names:
        if name in state and state[name].shape != parameter.shape:
            return f"{name} has size {tuple(state[name].shape)}, its parameter {tuple(parameter.shape)}"
    return None


def check_whole(offloaded: OffloadedParameter | None) -> None:
    """Raise `OptionError` for a parameter of which there are other parts elsewhere."""
    if offloaded is not None and offloaded.shard is not None:
        raise OptionError(
            f"{offloaded.name} is spread over ranks, each with some of its rows, and this optimizer looks at whole "
            "matrices; leave shard out, or use OffloadedOptimizer with a class that updates each element by itself."
        )
