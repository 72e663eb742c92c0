"""Reading single numbers of a CUDA device while large copies out are under way.

`item()` copies a number to the host, and the device copies in that direction one thing after the other, whatever the
stream: the number comes behind all that is queued there. Where a kernel writes it to pinned host memory instead, it
comes behind the compute stream only, as it does where nothing is copied.
"""

import contextlib
import weakref
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

    `read` is given a tensor of one integer, [1], and returns that in host memory; None leaves it to torch. `count` says
    how many numbers of the device were asked for.

    Within it, each call of torch takes the host 1 us more, and one that torch has in Python twice as much.
    """

    def __init__(self, device: torch.device, read: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._device, self._read = device, read
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, on a copy in host memory if it reads a number."""
        if func in _READS and (copied := self._copied(args[0])) is not None:
            if func is Tensor.tolist:  # the others give the same of any shape
                copied = copied.reshape(args[0].shape)
            args = copied, *args[1:]
        return func(*args, **kwargs) if kwargs else func(*args)

    def _copied(self, value: Tensor) -> Tensor | None:
        """Return a number of the device in host memory, [1]; None for what is to be read by torch."""
        if type(value) not in (Tensor, torch.nn.Parameter) or value.device != self._device or value.numel() != 1:
            return None
        dtype = value.dtype
        integer = _INTEGERS.get(dtype.itemsize)
        if integer is None or value.is_sparse or value.is_quantized or value.is_conj() or value.is_neg():
            return None
        self.count += 1
        if value.requires_grad:
            value = value.detach()
        number = self._read(value.reshape(1).view(integer))
        return None if number is None else number.view(dtype)


class MappedNumber:
    """Eight bytes of pinned host memory that kernels of a CUDA device write to; for one thread.

    `waits` is called before the host waits for a number, which is queued by then; not where another stream is current
    than the one that was when this was made, for what that calls is for the latter.
    """

    def __init__(self, device: torch.device, waits: Callable[[], None] = lambda: None) -> None:
        self._device, self._waits = device, waits
        self._stream, self._written = torch.cuda.current_stream(device), torch.cuda.Event()
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
        # By its handle, for `torch.cuda.current_stream` looks the device up anew and makes an object.
        if torch._C._cuda_getCurrentRawStream(self._stream.device_index) == self._stream.cuda_stream:
            self._written.record(self._stream)  # what `waits` queues behind that is not waited for
            self._waits()
            self._written.synchronize()
        else:
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


def read_past_copies(
    device: torch.device, waits: Callable[[], None] = lambda: None
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which numbers of the device are read without waiting for copies; it may be entered again.

    `waits` is called before each wait for a number, on the stream that is the current one now.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return ScalarReads(device, MappedNumber(device, waits).read)


class StepReads:
    """The contexts of a class's steps, one for each, in which they read numbers of the device past its copies.

    `expected` says whether the class reads such numbers at all; None if nobody knows. Of a class that reads none, only
    the first of the steps has that context, to see whether it still does not: every call of torch takes longer there.

    What `work_meanwhile` was given is called once in a step, while the host would wait for the last number that it
    reads, as far as that is known from the step before: the device is busy then with most of what the step computes.
    """

    def __init__(self, device: torch.device, *, expected: bool | None) -> None:
        self._waits = _Waits()  # by itself: nothing here is in a circle, which would keep device memory for a while
        self._past_copies = read_past_copies(device, self._waits.add)
        self._everywhere, self._first = expected is not False, True
        self._parameters = 0  # of this step

    def work_meanwhile(self, work: Callable[[], None]) -> None:
        """Have a method called, for as long as there is its object."""
        self._waits.work = weakref.WeakMethod(work)

    @property
    def any(self) -> bool:
        """Return whether a step has read a number of the device so far."""
        return isinstance(self._past_copies, ScalarReads) and self._past_copies.count > 0

    def next(self, parameters: int) -> contextlib.AbstractContextManager[object]:
        """Return the context of the next step, which is of so many parameters."""
        waits = self._waits
        waits.last = waits.count * parameters // self._parameters if self._parameters else 0
        self._parameters, waits.count = parameters, 0
        first, self._first = self._first, False
        return self._past_copies if first or self._everywhere or self.any else contextlib.nullcontext()


class _Waits:
    """Counts the numbers that a step waits for, and calls `work` before it does for the one that is to be its last."""

    def __init__(self) -> None:
        self.count = self.last = 0
        self.work: weakref.WeakMethod[Callable[[], None]] | None = None
        self._level = _level()

    def add(self) -> None:
        self.count += 1
        if self.count == self.last and self.work is not None and _level() == self._level:
            work = self.work()
            if work is not None:
                work()


def _level() -> tuple[int, object]:
    """Return what tells whether a class has calls of torch go elsewhere: within it, nobody else is to call torch."""
    return torch._C._len_torch_dispatch_stack(), torch._C._functorch.maybe_current_level()
