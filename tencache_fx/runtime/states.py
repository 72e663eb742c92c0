"""What an optimizer keeps of a parameter: fp32 arrays in pinned host memory, within its budget, or on the device."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.plan import Tier, round_up
from tencache_fx.runtime.homes import Homes

_ALIGN_BYTES = 64
_LEAST_BYTES = 64 << 10  # less is not worth a mapping of its own


class State:
    """The arrays of one parameter, by `names`: as 1-D `arrays`, and as `tensors` of its shape that share their memory.

    They are in host memory, or `on_device`, which is the parameter's. A buffer in host memory goes back with the last
    reference to this, its memory with the last tensor that shares it. Raises `BudgetError` when the host budget has no
    room.
    """

    def __init__(self, homes: Homes, parameter: Tensor, names: Sequence[str], *, on_device: bool) -> None:
        self.stride = parameter.stride()
        self.place = Tier.DEVICE if on_device else Tier.HOST
        count = parameter.numel()
        each_bytes = round_up(4 * count, _ALIGN_BYTES)
        self.nbytes = each_bytes * len(names)
        if on_device or self.nbytes < _LEAST_BYTES:
            device = parameter.device if on_device else "cpu"
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        else:
            buffer = homes.lend_state(self.nbytes)
            memory = buffer.memory
            weakref.finalize(self, homes.discard_later, buffer).atexit = False
        starts = [index * each_bytes for index in range(len(names))]
        self.arrays = tuple(memory[start : start + 4 * count].view(torch.float32) for start in starts)
        self.tensors = {
            name: array.as_strided(parameter.size(), parameter.stride())
            for name, array in zip(names, self.arrays, strict=True)
        }
