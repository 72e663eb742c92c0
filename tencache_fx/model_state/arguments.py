"""What callers hand over, a model or a device: returned if it can be used, else refused in one sentence."""

from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tencache_fx.errors import OptionError
from tencache_fx.option_values import shown


def need_model(model: object) -> nn.Module:
    """Return a model; raises `OptionError` for what is none, and for one whose parameters have no sizes yet."""
    if not isinstance(model, nn.Module):
        kind = "class" if isinstance(model, type) else type(model).__name__
        raise OptionError(f"the model is a {kind}; give a torch.nn.Module.")
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise OptionError(f"{name} has no size yet, as it is of a lazy module; call the model with a batch first.")
    return model


def find_device(given: torch.device | str | int | None) -> torch.device:
    """Return the device of that name, or the GPU if there is one; raises `OptionError` for one that is not there."""
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device {shown(given)} is not a device; give cuda, cuda:1 or cpu.") from error
    count = torch.cuda.device_count()
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and (device.index or 0) >= count):
        others = "one of them, or cpu" if count else "cpu"
        raise OptionError(f"device {str(device)!r} is not there: torch sees {count} CUDA devices; give {others}.")
    return device
