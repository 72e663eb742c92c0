"""What an optimizer's `state` has of a parameter besides arrays: its count of steps, above all."""

import copy
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, TypeGuard

import torch
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
        self._numbers: Mapping[str, Any] = {}  # in the tensors of these: not every write to one raises its version

    def write(self, step: Step, state: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Have `state` say that the step was taken, once the copies returned, `(to, from)`, are made."""
        values, numbers, copies = self._values, step.numbers_after, []
        for name, value in step.after.items():
            mine = values.get(name)
            if name in numbers and state.get(name) is mine and _may_hold(mine, value):
                copies.append((mine, value))
            else:
                state[name] = values[name] = on_cpu(value)
        if len(values) > len(step.after):  # some are of an earlier step
            others = {name: value for name, value in values.items() if name not in step.after}
            numbers = {
                **numbers,
                **{name: value.tolist() for name, value in others.items() if isinstance(value, Tensor)},
            }
        self._numbers, self.step = numbers, step
        return copies

    def are_in(self, state: Mapping[str, Any], arrays: int) -> bool:
        """Return whether `state` has these beside so many arrays, and nothing else, as the last step has left them."""
        values, numbers = self._values, self._numbers
        if len(state) != arrays + len(values) or not all(map(is_, map(state.get, values), values.values())):
            return False
        return [values[name].tolist() for name in numbers] == [*numbers.values()]


def write_counts(steps: Iterable[tuple[CountedScalars, Step, dict[str, Any]]]) -> None:
    """Have the `state` of each parameter say that its step was taken: by one call of torch for all of them.

    Each call lets another thread run Python, for which this one then waits.
    """
    with ordinary_tensors():  # which may be written to in any mode
        copies = [copy for counted, step, state in steps for copy in counted.write(step, state)]
        if copies:
            torch._foreach_copy_([mine for mine, _ in copies], [value for _, value in copies])


def on_cpu(value: Any) -> Any:
    """Return a copy of a value that a class keeps of a parameter."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _may_hold(mine: Any, value: Tensor) -> TypeGuard[Tensor]:
    """Return whether a tensor of ours can have a value."""
    return isinstance(mine, Tensor) and mine.size() == value.size() and mine.dtype == value.dtype
