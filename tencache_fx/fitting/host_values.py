"""Values of fake tensors that a model's own code reads on the host, between the regions that are compiled.

There a model branches on data, such as `if torch.rand([]) < self.layerdrop`: torch.compile ends a region before it, and
Python decides. A fake tensor has no value to decide by. One random number counts as its mean here, and what follows
from it is computed. Any other condition counts as false, and is told in the forecast. Other values are not guessed.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
_NONE: Mapping[str, Any] = MappingProxyType({})
_UNIFORM = (_aten.rand.default, _aten.rand.generator)


class HostValues(FakeTensorMode):
    """A mode of fake tensors that has values for conditions; `guessed` is how many were taken to be false."""

    def __init__(self) -> None:
        super().__init__()
        self.guessed = 0

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NONE
    ) -> Any:
        """Return what an op returns; while torch traces a region, as ever: there it has to see that a value is read."""
        if TracingContext.try_get() is not None:
            return super().dispatch(func, types, args, kwargs)
        if func is _aten._local_scalar_dense.default and _is_unknown_condition(args[0]):
            self.guessed += 1
            return False
        made: Any = super().dispatch(func, types, args, kwargs)
        if func in _UNIFORM and made.numel() == 1 and made.device.type == "cpu":
            with torch.utils._python_dispatch._disable_current_modes():
                mean = torch.full(made.shape, 0.5, dtype=made.dtype)
            return self.fake_tensor_converter.from_real_tensor(self, mean, make_constant=True)
        return made


def _is_unknown_condition(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.dtype is torch.bool and value.constant is None
