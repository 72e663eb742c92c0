"""Updates of parameters all of whose state is on their device: small ones many at a time, in one pass over copies.

A model has hundreds of small parameters: norms, biases, adapters. By itself each takes a few kernels and their calls,
during which the device, and the threads that update other parameters, wait for the host.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.step_kernel import Step
from tencache_fx.model_state.stored_form import BLOCK
from tencache_fx.model_state.update import MASTER_BYTES, dense_like, flat, gradient_on_device, set_master
from tencache_fx.runtime.engine_registry import left_for_updates
from tencache_fx.tensors import storage_key

_MOST_BYTES = 64 << 20  # of copies for one call: some two million elements with fp32 state
_LEAST_COUNT = 4  # parameters that there is room for: copies of fewer take as long to begin as the calls they save

_LEAST_MASTERS = 1 << 8  # elements compared at once, whatever they take: fewer would take long

# Of a parameter that is copied: a larger one takes longer to copy, twice, than to call by itself.
_MOST_ELEMENTS = MappingProxyType({"cuda": 1 << 18, "cpu": 1 << 13})


def most_copied_bytes(device: torch.device) -> int:
    """Return how many bytes of a device copies for updates may take at once: no more than plans leave free there."""
    free_bytes = left_for_updates(device)
    return _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, free_bytes)


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceUpdate:
    """An update of a `parameter`, on its device, by a `gradient`, wherever that is, with its `state` and `step`.

    `offloaded` is the record of one that is offloaded, and `entry` what an optimizer's `state` has of it. `weight` are
    its elements, [n]. `fresh` says that it may have been set since its master was made.
    """

    parameter: Tensor
    gradient: Tensor
    offloaded: OffloadedParameter | None
    state: State
    entry: dict[str, Any]
    step: Step
    weight: Tensor
    fresh: bool

    @property
    def copied_bytes(self) -> int:
        """The bytes that it takes at most as one of several.

        The gradient counts twice, for it may be a copy itself.
        """
        compared_bytes = MASTER_BYTES * self.weight.numel() if self.fresh else 0
        return 3 * self.weight.nbytes + self.state.nbytes + compared_bytes

    def may_join(self, copied_bytes: int, most_bytes: int) -> bool:
        """Return whether it may be one of several whose copies take `most_bytes` at most, it `copied_bytes` of them.

        State that is kept in blocks must end where a block does.
        """
        count = self.weight.numel()
        if count > _MOST_ELEMENTS[self.weight.device.type] or copied_bytes * _LEAST_COUNT > most_bytes:
            return False
        return self.state.is_elementwise or count % BLOCK == 0

    def change(self) -> Tensor:
        """Return the gradient's elements, [n], in the order and the dtype of the weight's.

        It may be a copy: updates that wait for others have none yet.
        """
        parameter, gradient = self.parameter, gradient_on_device(self.gradient)
        if gradient.dtype != parameter.dtype:  # else `to` would do nothing, but let another thread run
            gradient = gradient.to(parameter.dtype)
        return flat(dense_like(parameter, gradient))


def update_on_device(updates: Iterable[DeviceUpdate], issued: list[DeviceUpdate]) -> None:
    """Carry out updates of parameters on their devices, behind what the caller's streams have been given so far.

    Each is added to `issued` once it is on its device's queue. Which of them run together changes no bit. Their copies
    take `most_copied_bytes` at most.
    """
    limits: dict[torch.device, int] = {}
    numbers: dict[tuple[Step, torch.device], Tensor] = {}
    waiting: dict[tuple[Step, torch.device, torch.dtype, bool], _Waiting] = defaultdict(_Waiting)
    for update in updates:
        device = update.weight.device
        place = update.step, device
        if place not in numbers:
            numbers[place] = _sent(update.step.numbers, device)
        if device not in limits:
            limits[device] = most_copied_bytes(device)
        copied_bytes = update.copied_bytes
        if not update.may_join(copied_bytes, limits[device]):
            issued += _run([update], numbers[place], limits[device])
            continue
        kind = *place, update.weight.dtype, update.fresh
        if not waiting[kind].takes(update, copied_bytes, limits[device]):
            issued += _run(waiting.pop(kind).updates, numbers[place], limits[device])
            waiting[kind].takes(update, copied_bytes, limits[device])  # the first one always
    for (step, device, *_), some in waiting.items():
        issued += _run(some.updates, numbers[step, device], limits[device])


class _Waiting:
    """Updates that are to run together."""

    def __init__(self) -> None:
        self.updates: list[DeviceUpdate] = []
        self._copied_bytes = 0
        self._storages: set[int] = set()

    def takes(self, update: DeviceUpdate, copied_bytes: int, most_bytes: int) -> bool:
        """Add another, for which there is room, and return True; one that shares memory has to see what is written."""
        key = storage_key(update.weight)
        if self.updates and (key in self._storages or self._copied_bytes + copied_bytes > most_bytes):
            return False
        self.updates.append(update)
        self._copied_bytes += copied_bytes
        self._storages.add(key)
        return True


def _run(updates: list[DeviceUpdate], numbers: Tensor, most_bytes: int) -> list[DeviceUpdate]:
    """Update parameters of one dtype and device, all of them fresh or none, that take the same step; return them.

    Copies take `most_bytes` at most, but for that of one gradient alone that has other strides than its weight.
    """
    columns = list(zip(*((each.change(), each.weight, *each.state.arrays) for each in updates), strict=True))
    with torch.autocast(updates[0].weight.device.type, enabled=False):  # it refuses `cat` of some dtypes
        change, weight, *arrays = (torch.cat(column) if len(column) > 1 else column[0] for column in columns)
    if updates[0].fresh:
        set_master(arrays[0], weight, max(_LEAST_MASTERS, most_bytes // MASTER_BYTES))
    updates[0].step.kernel.compiled(weight.dtype, weight.device)(change, weight, *arrays, numbers)
    if len(updates) > 1:
        for column, joint in zip(columns[1:], (weight, *arrays), strict=True):
            torch._foreach_copy_(column, joint.split_with_sizes([each.numel() for each in column]))
    return updates


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a step's numbers on the device of its parameters."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
