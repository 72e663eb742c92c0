"""Updates of parameters all of whose state is on their device: small ones many at a time, in one pass over copies.

A model has hundreds of small parameters: norms, biases, adapters. By itself each takes a few kernels and their calls,
during which the device, and the threads that update other parameters, wait for the host.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.step_kernel import Step
from tencache_fx.model_state.stored_form import BLOCK
from tencache_fx.model_state.update import set_master
from tencache_fx.tensors import storage_key

JOINT_ELEMENTS = 1 << 21
"""Elements that are copied and updated together at most: what that takes besides, some 50 MB, is in no plan."""

# Of a parameter that is copied: a larger one takes longer to copy, twice, than to call by itself.
_MOST_ELEMENTS = MappingProxyType({"cuda": 1 << 18, "cpu": 1 << 13})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceUpdate:
    """An update of the elements `weight` by `change`, both [n] in the parameter's dtype, with its `state` and `step`.

    `fresh` says that the weight may have been set since its master was made. `done` is called once the update is on the
    device's queue.
    """

    change: Tensor
    weight: Tensor
    state: State
    step: Step
    fresh: bool
    done: Callable[[], None]

    @property
    def joins(self) -> bool:
        """Whether it may be one of several: state that is kept in blocks must end where a block does."""
        count = self.weight.numel()
        in_blocks = all(form.is_elementwise for form in self.state.forms.values()) or count % BLOCK == 0
        return count <= _MOST_ELEMENTS[self.weight.device.type] and in_blocks


def update_on_device(updates: Iterable[DeviceUpdate]) -> None:
    """Carry out updates of parameters on their devices, behind what the caller's streams have been given so far.

    Which of them run together changes no bit.
    """
    numbers: dict[tuple[Step, torch.device], Tensor] = {}
    waiting: dict[tuple[Step, torch.device, torch.dtype, bool], _Waiting] = defaultdict(_Waiting)
    for update in updates:
        place = update.step, update.weight.device
        if place not in numbers:
            numbers[place] = _sent(update.step.numbers, update.weight.device)
        if not update.joins:
            _run([update], numbers[place])
            continue
        kind = *place, update.weight.dtype, update.fresh
        if not waiting[kind].takes(update):
            _run(waiting.pop(kind).updates, numbers[place])
        waiting[kind].add(update)
    for (step, device, *_), some in waiting.items():
        _run(some.updates, numbers[step, device])


class _Waiting:
    """Updates that are to run together."""

    def __init__(self) -> None:
        self.updates: list[DeviceUpdate] = []
        self._elements = 0
        self._storages: set[int] = set()

    def takes(self, update: DeviceUpdate) -> bool:
        """Return whether there is room for another: one that shares memory has to see what those before it write."""
        is_apart = storage_key(update.weight) not in self._storages
        return not self.updates or (is_apart and self._elements + update.weight.numel() <= JOINT_ELEMENTS)

    def add(self, update: DeviceUpdate) -> None:
        """Add one that it takes."""
        self.updates.append(update)
        self._elements += update.weight.numel()
        self._storages.add(storage_key(update.weight))


def _run(updates: Sequence[DeviceUpdate], numbers: Tensor) -> None:
    """Update parameters of one dtype and device, all of them fresh or none, that take the same step."""
    columns = list(zip(*((each.change, each.weight, *each.state.arrays) for each in updates), strict=True))
    change, weight, *arrays = (torch.cat(column) if len(column) > 1 else column[0] for column in columns)
    if updates[0].fresh:
        set_master(arrays[0], weight)
    updates[0].step.kernel.compiled(weight.dtype, weight.device)(change, weight, *arrays, numbers)
    if len(updates) > 1:
        for column, joint in zip(columns[1:], (weight, *arrays), strict=True):
            torch._foreach_copy_(column, joint.split([each.numel() for each in column]))
    for each in updates:
        each.done()


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a step's numbers on the device of its parameters."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
