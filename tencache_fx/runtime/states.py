"""What an optimizer keeps of a parameter: fp32 arrays in one buffer of pinned host memory, within the host budget."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.plan import round_up
from tencache_fx.runtime.homes import Homes

_ALIGN_BYTES = 64
_LEAST_BYTES = 64 << 10  # less is not worth a mapping of its own


class State:
    """The arrays of one parameter, by `names`: as 1-D `arrays`, and as `tensors` of its shape that share their memory.

    The buffer goes back with the last reference to this, its memory with the last tensor that shares it. Raises
    `BudgetError` when the host budget has no room.
    """

    def __init__(self, homes: Homes, parameter: Tensor, names: Sequence[str]) -> None:
        self.stride = parameter.stride()
        count = parameter.numel()
        each_bytes = round_up(4 * count, _ALIGN_BYTES)
        if each_bytes * len(names) < _LEAST_BYTES:
            memory = torch.empty(each_bytes * len(names), dtype=torch.uint8, device="cpu")
        else:
            buffer = homes.lend_state(each_bytes * len(names))
            memory = buffer.memory
            weakref.finalize(self, homes.discard_later, buffer).atexit = False
        starts = [index * each_bytes for index in range(len(names))]
        self.arrays = tuple(memory[start : start + 4 * count].view(torch.float32) for start in starts)
        self.tensors = {
            name: array.as_strided(parameter.size(), parameter.stride())
            for name, array in zip(names, self.arrays, strict=True)
        }
