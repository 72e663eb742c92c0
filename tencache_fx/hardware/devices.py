"""Devices as tensors name them."""

import torch

from tencache_fx.errors import OptionError


def resolve_device(device: torch.device) -> torch.device:
    """Return `device` with its index, as tensors have it; raises `OptionError` for a kind that has no runtime."""
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    if device.type == "cpu":
        return device if device.index is None else torch.device("cpu")
    raise OptionError(f"device {device} is not supported; use a cuda or cpu device.")
