"""What an optimizer's `state` has of a parameter besides arrays: its count of steps, above all."""

import copy
from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor

from tencache_fx.model_state.step_kernel import Step
from tencache_fx.tensors import ordinary_tensors


class CountedScalars:
    """The scalars that the last step has left in a parameter's `state`.

    A tensor that this has made is written to in place, as by torch's own optimizers.
    """

    def __init__(self) -> None:
        self.step: Step | None = None
        self._values: dict[str, Any] = {}
        self._numbers: list[tuple[Tensor, Any]] = []  # of tensors: not every write to one raises its version

    def write(self, step: Step, state: dict[str, Any]) -> None:
        """Have `state` say that the step was taken."""
        with ordinary_tensors():  # which may be written to in any mode
            for name, value in step.after.items():
                mine = self._values.get(name)
                if isinstance(value, Tensor) and state.get(name) is mine and _may_hold(mine, value):
                    mine.copy_(value)
                else:
                    state[name] = self._values[name] = on_cpu(value)
        self._numbers = [(value, value.tolist()) for value in self._values.values() if isinstance(value, Tensor)]
        self.step = step

    def are_in(self, state: Mapping[str, Any], arrays: int) -> bool:
        """Return whether `state` has these beside so many arrays, and nothing else, as the last step has left them."""
        return (
            len(state) == arrays + len(self._values)
            and all(state.get(name) is value for name, value in self._values.items())
            and all(tensor.tolist() == numbers for tensor, numbers in self._numbers)
        )


def on_cpu(value: Any) -> Any:
    """Return a copy of a value that a class keeps of a parameter."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _may_hold(mine: Any, value: Tensor) -> TypeGuard[Tensor]:
    """Return whether a tensor of ours can have a value."""
    return isinstance(mine, Tensor) and mine.size() == value.size() and mine.dtype == value.dtype
