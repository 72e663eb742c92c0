"""The norm of one gradient, where it is."""

import torch
from torch import Tensor


def norm_of(value: Tensor) -> Tensor:
    """Return the Euclidean norm of a tensor, fp32, on its device."""
    dtype = value.dtype
    if dtype is torch.float32 and value.is_cuda:
        plain: Tensor = torch.linalg.vector_norm(value)
        return plain
    wide = torch.float64 if value.is_cpu else torch.float32  # a CPU adds up in the order of memory
    norm: Tensor = torch.linalg.vector_norm(value, dtype=torch.promote_types(dtype, wide))
    return norm if norm.dtype is torch.float32 else norm.float()
