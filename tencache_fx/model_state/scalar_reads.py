"""Reading single numbers of a CUDA device while large copies out are under way.

`item()` copies a number to the host, and the device copies in that direction one thing after the other, whatever the
stream: the number comes behind all that is queued there. Where a kernel writes it to pinned host memory instead, it
comes behind the compute stream only, as it does where nothing is copied.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS: frozenset[Any] = frozenset(
    {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__}
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; numbers are read bit by bit


class ScalarReads(TorchFunctionMode):
    """Has Python's reads of single numbers of a device go through `read`, inside.

    `read` is given a tensor of one integer, and returns that in host memory; None leaves it to torch.
    """

    def __init__(self, device: torch.device, read: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._device, self._read = device, read

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, on a copy in host memory if it reads a number."""
        if func in _READS and (copied := self._copied(args[0])) is not None:
            args = copied, *args[1:]
        return func(*args, **(kwargs or {}))

    def _copied(self, value: Tensor) -> Tensor | None:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.device != self._device or value.numel() != 1:
            return None
        integer = _INTEGERS.get(value.itemsize)
        if integer is None or value.is_sparse or value.is_quantized or value.is_conj() or value.is_neg():
            return None
        number = self._read(value.detach().reshape(1).view(integer))
        return None if number is None else number.view(value.dtype).reshape(value.shape)


class MappedNumber:
    """Eight bytes of pinned host memory that kernels of a CUDA device write to; for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: dict[torch.dtype, tuple[Tensor, Tensor] | None] = {}

    def read(self, number: Tensor) -> Tensor | None:
        """Return a tensor of one integer in host memory, up to the next call; None where there is no way."""
        if number.dtype not in self._pairs:
            self._pairs[number.dtype] = self._mapped(number.dtype)
        pair = self._pairs[number.dtype]
        if pair is None:
            return None
        host, mapped = pair
        torch.maximum(number, number, out=mapped)  # a kernel, which `copy_` is not
        torch.cuda.current_stream(self._device).synchronize()
        return host

    def _mapped(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return host memory for an integer, as it is for the host and as it is for the device."""
        with torch.cuda.device(self._device):
            host = torch.zeros(1, dtype=dtype, device="cpu", pin_memory=True)
        code = "|u1" if dtype == torch.uint8 else f"<i{dtype.itemsize}"
        try:
            mapped = torch.as_tensor(_Exported(host, code), device=self._device)
        except RuntimeError:  # the device does not know host memory by the host's addresses
            return None
        return (host, mapped) if mapped.data_ptr() == host.data_ptr() else None


class _Exported:
    """Pinned memory as the protocol for CUDA arrays has it; lives as long as a tensor made of it."""

    def __init__(self, host: Tensor, code: str) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "data": (host.data_ptr(), False),
            "shape": (host.numel(),),
            "typestr": code,
            "version": 2,
        }


def read_past_copies(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which numbers of the device are read without waiting for copies; it may be entered again."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return ScalarReads(device, MappedNumber(device).read)
