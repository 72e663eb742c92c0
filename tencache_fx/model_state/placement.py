"""Where the state of each parameter is to be: on the device, in host memory, or, where that has no room, on disk."""

import math
import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor

from tencache_fx.errors import BudgetError
from tencache_fx.model_state.disk_state import DiskState, flat_as, line_bytes
from tencache_fx.model_state.host_state import HeldTensors, State, buffer_bytes
from tencache_fx.model_state.modules import engine_of, roomy_engine
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.offloading import LEAST_BYTES
from tencache_fx.model_state.parameter_store import find_offloaded, has_state, parameters_of
from tencache_fx.model_state.split_master import Remainder
from tencache_fx.model_state.staged_update import round_shape
from tencache_fx.model_state.step_kernel import MASTER
from tencache_fx.model_state.stored_form import Stored, StoredForm, named_parts, state_bytes, store_values
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.units import PAGE_BYTES, round_up


class StatePlacement:
    """Decides it for the parameters of one optimizer, and remembers."""

    def __init__(self) -> None:
        self._order: dict[Tensor, int] = {}
        self._on_disk: dict[Tensor, bool] = {}

    def add(
        self, parameter: Tensor, forms: Mapping[str, StoredForm], on_device: Mapping[str, StoredForm] | None = None
    ) -> None:
        """Add a parameter that is to have such arrays, behind those that are read before it; or know it has others.

        Its arrays have other forms `on_device`, if these are given.
        """
        self._order[parameter] = nbytes = state_bytes(forms.values(), parameter.numel())
        if (offloaded := find_offloaded(parameter)) is not None:
            offloaded.host_state_bytes = nbytes
            offloaded.state_buffer_bytes = buffer_bytes(forms, parameter.numel())
            offloaded.state_bytes = state_bytes((on_device or forms).values(), parameter.numel())

    def of(self, parameter: Tensor, offloaded: OffloadedParameter | None, held: State | DiskState | None) -> Tier:
        """Return where a parameter's state is to be, given the record of one that is offloaded, and where it is now."""
        if offloaded is None:  # for a small one the host would wait, and the device then for the host
            stays = parameter.nbytes < LEAST_BYTES or parameter in parameters_of(engine_of(parameter.device)).kept
            return Tier.DEVICE if stays else Tier.HOST
        if offloaded.updated_on_device:
            return Tier.DEVICE
        if held is not None and held.place in (Tier.HOST, Tier.NVME):
            return held.place
        if engine_of(parameter.device).store is None:
            return Tier.HOST
        if parameter not in self._on_disk:
            self._choose(parameter)
        return Tier.NVME if self._on_disk.get(parameter) else Tier.HOST

    def _choose(self, wanted: Tensor) -> None:
        """Choose for `wanted`, and for all others that are trained.

        Give host memory to those that the next forward reads first: they are wanted soonest after their gradients.
        All states are read and written once a step, so which of them are on disk changes nothing else. State of frozen
        parameters, which may be loaded, comes last. They may be trained again, so their gradients have room, too.
        """
        device = wanted.device
        pool = engine_of(device).pool
        all_of = [p for p in self._order if p.device == device]
        found = {p: find_offloaded(p) for p in all_of if p.requires_grad or p in self._on_disk or p is wanted}
        updated = [(p, each) for p, each in found.items() if each is not None and not each.updated_on_device]
        updated.sort(key=lambda item: not item[0].requires_grad)
        gradient_bytes = sum(round_up(p.nbytes, PAGE_BYTES) for p, _ in updated)  # some may be there already
        gradient_bytes = max(0, gradient_bytes - pool.held_for(Use.GRADIENT))
        others = [p for p, each in found.items() if each is None and self.of(p, None, None) is Tier.HOST]
        round_bytes = math.prod(round_shape([p.nbytes for p in others]))
        room_bytes = pool.room_bytes - gradient_bytes - line_bytes(pool.budget_bytes) - round_bytes
        for parameter, offloaded in updated:
            nbytes = round_up(self._order[parameter], PAGE_BYTES) + PAGE_BYTES  # its arrays are aligned, one by one
            if parameter in self._on_disk:
                comes = not self._on_disk[parameter] and not has_state(offloaded)
                room_bytes -= nbytes if comes else 0
                continue
            self._on_disk[parameter] = nbytes > room_bytes
            room_bytes -= 0 if self._on_disk[parameter] else nbytes


def hold_state(
    parameter: Tensor, forms: Mapping[str, StoredForm], values: Mapping[str, Tensor | Stored | float], place: Tier
) -> State | DiskState:
    """Return a parameter's state with these values; on disk, too, if there is a store and host memory has no room.

    Raises `BudgetError` or `StoreError` when neither has.
    """
    engine, offloaded = roomy_engine(parameter.device), find_offloaded(parameter)
    if place is not Tier.NVME:
        try:
            held = State(engine.object_buffers, parameter, forms, on_device=place is Tier.DEVICE)
        except BudgetError:
            if engine.store is None or offloaded is None:
                raise
        else:
            held.directory = None if engine.store is None else engine.store.directories[0]
            arrays = {name: values[name] for name in forms}
            flattened = {name: flat_as(v, parameter) if isinstance(v, Tensor) else v for name, v in arrays.items()}
            store_values(forms, held.arrays, flattened, are_zero=held.is_zero)
            return held
    label = "a parameter" if offloaded is None else offloaded.name
    return DiskState(parameters_of(engine).disk_line, parameter, forms, values, label)


def shown_of(held: State | DiskState) -> Mapping[str, Tensor]:
    """Return what is in an optimizer's `state`: the parts of the master, and of the arrays that its class has made."""
    if held.shown is None or held.shown[0] is not held.made:  # else it is as it was at the last step
        names = named_parts({name: form for name, form in held.forms.items() if name in held.made or name == MASTER})
        held.shown = held.made, {name: tensor for name, tensor in held.tensors.items() if name in names}
    return held.shown[1]


def decoded_of(held: State | DiskState | None, state: Mapping[str, Any], *, stored: bool = False) -> dict[str, Any]:
    """Return what there is of a parameter in an optimizer's `state` and on disk, arrays as tensors of its shape.

    With `stored`, an array in memory stays encoded, as `Stored`, if its form does not keep elements one by one.
    """
    if held is None:
        return dict(state)
    if isinstance(held, DiskState):
        return {**state, **held.read()}
    in_blocks = {name: form for name, form in held.forms.items() if not form.is_elementwise}
    firsts = {name: name + form.parts[0].suffix for name, form in in_blocks.items()}
    decoded = {
        name: held.stored(name) if stored else held.decode(name)
        for name, first in firsts.items()
        if state.get(first) is held.tensors[first] and (first == name or name not in state)
    }
    parts = named_parts(in_blocks)
    others = {name: each for name, each in state.items() if name not in parts or each is not held.tensors[name]}
    return {**others, **decoded}


def saved_of(
    held: State | DiskState | None, state: Mapping[str, Any], forms: Mapping[str, StoredForm], *, stored: bool = False
) -> dict[str, Any]:
    """Return what `decoded_of` does, but for arrays that have not been made, or are not in `forms`."""
    if held is None:
        return dict(state)
    made = {*held.made, MASTER} if isinstance(held, DiskState) else held.forms.keys()
    gone = {name for name in held.forms if name not in forms or name not in made}
    return {name: each for name, each in decoded_of(held, state, stored=stored).items() if name not in gone}


def is_in(held: State | DiskState, state: Mapping[str, Any]) -> bool:
    """Return whether the arrays in `state` are those that are held, and no whole one is there in place of its parts."""
    if held.forms.keys() != held.tensors.keys() and not state.keys().isdisjoint(
        held.forms.keys() - held.tensors.keys()
    ):
        return False
    shown = shown_of(held)
    return all(map(is_, map(state.get, shown), shown.values()))  # no generator: a step asks for every parameter


def is_split(parameter: Tensor, offloaded: OffloadedParameter | None, place: Tier) -> bool:
    """Return whether the master is kept as what it has besides the weight, a bf16 one that is in host memory.

    Of a parameter that is not offloaded that is the weight as it was last written.
    """
    in_memory = offloaded is None or offloaded.tier is Tier.HOST
    return in_memory and place is not Tier.DEVICE and parameter.dtype == torch.bfloat16


def set_state(offloaded: OffloadedParameter, held: State | DiskState | HeldTensors) -> None:
    """Make `held` the state that goes with the weight: that of another optimizer keeps the weight as it is now."""
    known = None if offloaded.optimizer_state is None else offloaded.optimizer_state()
    if known is not held:
        if isinstance(known, Remainder):
            known.keep_weight()
        offloaded.optimizer_state = weakref.ref(held)


def will_be_split(parameter: Tensor) -> bool:
    """Return the same before there is a state, as if all of it were to be in host memory."""
    offloaded = find_offloaded(parameter)
    stays = offloaded is None and parameter.nbytes < LEAST_BYTES
    return is_split(parameter, offloaded, Tier.DEVICE if stays else Tier.HOST)
