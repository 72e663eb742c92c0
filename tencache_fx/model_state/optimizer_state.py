"""The state that an optimizer has of each parameter, wherever that is: made, moved, saved and loaded.

Updates go on while the host has returned from `step`. So `state` waits for them first.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tencache_fx.errors import InvariantError, OptionError, UsageError
from tencache_fx.model_state.counted_scalars import on_cpu, write_counts
from tencache_fx.model_state.disk_state import DiskState
from tencache_fx.model_state.group_rule import GroupRule, KindRule
from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.modules import engine_of
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.optimizer_checks import find_misfit
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.placement import (
    StatePlacement,
    decoded_of,
    hold_state,
    is_in,
    is_split,
    saved_of,
    set_state,
    shown_of,
    will_be_split,
)
from tencache_fx.model_state.shard import Shard
from tencache_fx.model_state.step_kernel import LEAST_8BIT, MASTER, Rule, Step
from tencache_fx.model_state.update import dense_like, flat, weakly
from tencache_fx.planning.problem import Tier

_MOST_NAMED = 8


class OptimizerState(torch.optim.Optimizer):
    """An optimizer by `rule`, as far as its state goes."""

    def __init__(self, params: ParamsT, rule: Rule, defaults: dict[str, Any]) -> None:
        self._written: dict[Tensor, Tensor] = {}  # each weight as the last step left it
        self._states: dict[Tensor, State | DiskState] = {}  # where what `state` has of each parameter is kept
        self._places = StatePlacement()
        self._versions: dict[
            Tensor, tuple[weakref.ref[OffloadedParameter], int]
        ] = {}  # of each record, as the last step left it
        self._group_of: dict[Tensor, dict[str, Any]] = {}  # as far as it has been asked for
        self._groups: list[tuple[int, int]] = []  # which groups that is of, and how large they were
        self._urgency: dict[Tensor, int] = {}  # by the order in which the next forward will read, as far as is known
        self._rule, self._is_made = rule, False
        super().__init__(params, defaults)
        self._map_ahead(self.param_groups)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Return what the class keeps of each parameter, with its master weight, once no update is under way.

        The error of one of them is raised by the next reader of its parameter.
        """
        for offloaded in self._all_offloaded():
            offloaded.join_update()
        return self._state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        for offloaded in self._all_offloaded():
            offloaded.join_update()
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, including that on disk."""
        self._wait_updates()
        packed: dict[str, Any] = super().__getstate__()
        state = {p: decoded_of(self._states.get(p), kept) for p, kept in self._state.items()}
        return {**packed, "state": defaultdict(dict, state), "_rule": self._rule}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._state = self.__dict__.pop("state")  # it came with the others
        self._written, self._versions, self._states = {}, {}, {}
        self._places, self._urgency, self._group_of, self._groups = StatePlacement(), {}, {}, []
        self._is_made = False
        for group in self.param_groups:
            self._place(group)
        self._map_ahead(self.param_groups)

    def _place(self, group: dict[str, Any]) -> None:
        """Take note of the parameters of a group, behind all others; what their first steps need is begun."""
        for parameter in group["params"]:
            self._urgency[parameter] = len(self._urgency)
            dim, count, split = parameter.dim(), parameter.numel(), will_be_split(parameter)
            arrays, whole = (self._rule.arrays(group, dim, count, split=each) for each in (split, False))
            self._places.add(parameter, arrays, whole)
        kinds = {
            (p.dim(), p.dtype, min(p.numel(), LEAST_8BIT), will_be_split(p)) for p in group["params"] if p.requires_grad
        }
        for dim, dtype, elements, split in kinds:
            self._rule.begin(group, dim, dtype, elements, split=split)
        if self._is_made:
            self._map_ahead([group])

    def _map_ahead(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Begin to map host memory for the state of groups, as far as an earlier start of the program tells.

        Those that the optimizer begins with are looked up together: there may be one for each parameter.
        """
        self._is_made = True
        trained = (p for group in groups for p in group["params"] if p.requires_grad)
        for device in {p.device for p in trained if find_offloaded(p) is not None}:
            parameters_of(engine_of(device)).map_state_as_before()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, once the updates under way are done, as torch does.

        Arrays of parameters that are spread over ranks are DTensors, as these are in the model's `state_dict`.
        State on disk is copied to a file without a name there, from which its tensors are mapped. State in 8 bits is
        decoded to fp32 tensors, from which it is made again to the last bit; so are masters that are split.
        """
        self._wait_updates()
        packed: dict[str, Any] = super().state_dict()
        parameters = (p for group in self.param_groups for p in group["params"])
        indices = (index for group in packed["param_groups"] for index in group["params"])
        for index, parameter in zip(indices, parameters, strict=True):
            held, kept = self._states.get(parameter), packed["state"].get(index, {})
            if held is not None:
                kept = packed["state"][index] = decoded_of(held, kept)
            if kept and (shard := _shard_of(parameter)) is not None:
                packed["state"][index] = {name: _as_saved(shard, value) for name, value in kept.items()}
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of this class or of torch's own; a master weight that is missing is the weight.

        Raises `OptionError` when it is that of other parameters, or was made with options that cannot be used,
        `ValueError` as torch does when the groups do not match, and `InvariantError` if updates have failed, which
        nobody was told yet: call it again then, once the model's weights are those of the checkpoint.
        """
        self._wait_updates()
        for own, group in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for dim in {parameter.dim() for parameter in own["params"]}:
                self._rule.arrays({**self.defaults, **group}, dim)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        pairs = dict(zip(indices, parameters, strict=False))
        saved_of = {
            pairs[k]: {name: _part_of(pairs[k], value) for name, value in saved.items() if value is not None}
            for k, saved in state_dict["state"].items()
            if k in pairs
        }
        for parameter, saved in saved_of.items():
            if (misfit := find_misfit(parameter, saved, self._rule_of(parameter).arrays())) is not None:
                raise OptionError(f"the saved {misfit}; load the state of the same model.")
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._states, self._group_of = {}, {}
        for parameter, saved in saved_of.items():
            place = self._places.of(parameter, find_offloaded(parameter), None)
            self._keep(parameter, saved, place, self._rule_of(parameter))
        self._written, self._versions = {}, {}

    def _wait_updates(self) -> None:
        """Block until no update is under way; raises one error for all that failed, which then count as told."""
        all_offloaded = self._all_offloaded()
        for offloaded in all_offloaded:  # an interrupt here loses no error
            offloaded.join_update()
        failed: list[tuple[str, InvariantError]] = []
        for offloaded in all_offloaded:
            try:
                offloaded.wait_update()
            except InvariantError as error:
                failed.append((offloaded.name, error))
        if not failed:
            return
        (name, first), count = failed[0], len(failed)
        if count == 1:
            raise first
        names = ", ".join(name for name, _ in failed[:_MOST_NAMED]) + (", ..." if count > _MOST_NAMED else "")
        raise InvariantError(
            f"{count} parameters could not be updated, {names}; of {name}: {first.__cause__!r}. Their weights and "
            "states may be those of before, or in part those of after: go back to a checkpoint."
        ) from first

    def _all_offloaded(self) -> list[OffloadedParameter]:
        found = map(find_offloaded, self._urgency)
        return [offloaded for offloaded in found if offloaded is not None]

    def _is_in_a_group(self, parameter: Tensor) -> bool:
        groups = [(id(group), len(group["params"])) for group in self.param_groups]
        if parameter not in self._group_of or groups != self._groups:  # somebody may have moved some
            self._groups = groups
            self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        return parameter in self._group_of

    def _rule_of(self, parameter: Tensor) -> KindRule:
        """Return the rule for a parameter, with the options that its group has now."""
        assert self._is_in_a_group(parameter)
        return GroupRule(self._rule, self._group_of[parameter]).of(parameter)

    def _is_fresh(self, parameter: Tensor, offloaded: OffloadedParameter) -> bool:
        """Return whether the weight may have been set since its master was made, or last taken over."""
        reference, version = self._versions.get(parameter, (None, -1))
        return reference is None or reference() is not offloaded or version != offloaded.version

    def _take_weight(self, parameter: Tensor, offloaded: OffloadedParameter) -> None:
        """Note that the master has been made of the weight as it is now."""
        self._versions[parameter] = weakref.ref(offloaded), offloaded.version

    def _place_state(self, parameter: Tensor) -> None:
        """Move a parameter's state to where it is to be now."""
        self._ready(parameter, find_offloaded(parameter), self._rule_of(parameter))

    def _ready(
        self, parameter: Tensor, offloaded: OffloadedParameter | None, rule: KindRule
    ) -> tuple[State | DiskState, dict[str, Any]]:
        """Return the parameter's state, made at its first step, in the order the parameter has in memory now.

        Beside it comes what `state` has of the parameter.
        """
        entry: dict[str, Any] = self._state[parameter]
        held = self._states.get(parameter)
        self._leave_former(parameter, offloaded)
        place = self._places.of(parameter, offloaded, held)
        arrays = rule.arrays(split=is_split(parameter, offloaded, place))
        same = held is not None and held.layout == (parameter.size(), parameter.stride())
        right = held is not None and same and held.place == place
        if held is None or not right or not is_in(held, entry) or held.forms != arrays:
            saved, held = saved_of(held, entry, arrays, stored=same and place is Tier.DEVICE), None
            if (misfit := find_misfit(parameter, saved, arrays)) is not None:
                raise UsageError(f"{misfit}; a parameter whose size has changed needs a new optimizer.")
            held, entry = self._keep(parameter, saved, place, rule)
        self._tell(parameter, offloaded, held)
        if offloaded is not None and held.weight is not None and held.weight.data_ptr() != _address(offloaded):
            held.take_weight(flat(offloaded.host))
        if offloaded is not None or place is Tier.DEVICE or held.weight is not None:
            self._written.pop(parameter, None)  # the weight goes on without it
            return held, entry
        written = self._written.get(parameter)
        written = entry[MASTER].to(parameter.dtype, copy=True) if written is None else dense_like(parameter, written)
        self._written[parameter] = written
        return held, entry

    def _tell(self, parameter: Tensor, offloaded: OffloadedParameter | None, held: State | DiskState) -> None:
        """Let an offloaded parameter know of its state."""
        known = None if offloaded is None or offloaded.optimizer_state is None else offloaded.optimizer_state()
        if offloaded is not None and known is not held:
            set_state(offloaded, held)
            offloaded.place_state = weakly(self._place_state, parameter)

    def _leave_former(self, parameter: Tensor, offloaded: OffloadedParameter | None) -> None:
        """Wait for an update that is under way of a parameter that was given another storage since."""
        reference, _ = self._versions.get(parameter, (None, -1))
        former = None if reference is None else reference()
        if former is not None and former is not offloaded:
            former.wait_update()
            if (held := self._states.get(parameter)) is not None:
                held.keep_weight()  # its host copy is written to no longer
            if not former.summoned:  # else it will have the parameter again
                del self._versions[parameter]
                former.forget()

    def _keep(
        self, parameter: Tensor, saved: Mapping[str, Any], place: Tier, rule: KindRule
    ) -> tuple[State | DiskState, dict[str, Any]]:
        """Make a parameter's state of what was `saved` of it; a master that is missing is NaN until a step."""
        offloaded = find_offloaded(parameter)
        split = is_split(parameter, offloaded, place)
        arrays, values = rule.arrays(split=split), {**rule.initial(), **saved}
        held = hold_state(parameter, arrays, values, place)
        if split:
            held.weight = _weight_of(values[MASTER], parameter, offloaded)
        held.made = frozenset(name for name in arrays if name in saved and name != MASTER)
        in_host_memory = rule.arrays(split=is_split(parameter, offloaded, Tier.HOST))
        self._places.add(parameter, in_host_memory, rule.arrays())
        if MASTER not in saved:  # it is the weight's as it is now
            self._versions.pop(parameter, None)
            self._written.pop(parameter, None)
        scalars = {name: on_cpu(value) for name, value in saved.items() if name not in arrays}
        entry = scalars | dict(shown_of(held))
        self._states[parameter], self._state[parameter] = held, entry
        self._tell(parameter, offloaded, held)
        return held, entry


def count_steps(steps: Iterable[tuple[State | DiskState, dict[str, Any], Step]]) -> None:
    """Note, of the state of each parameter and what `state` has of it, that it has taken a step."""
    counts = []
    for held, entry, step in steps:
        if len(held.made) < len(held.forms):  # it was the first one
            held.made = frozenset(held.forms)
            entry.update(shown_of(held))
        counts.append((held.counted, step, entry))
    write_counts(counts)


def _address(offloaded: OffloadedParameter) -> int:
    """Return where the host copy is, in host memory; waits for nothing."""
    return offloaded.backing.value().data_ptr()


def _weight_of(master: Tensor | float, parameter: Tensor, offloaded: OffloadedParameter | None) -> Tensor:
    """Return the weight of which a split master is: the host copy, or another one until that is taken over."""
    weight = None if offloaded is None else flat(offloaded.host)
    if not isinstance(master, Tensor):  # there is none: it is the weight, or NaN until that is seen
        if weight is not None:
            return weight
        return torch.full((parameter.numel(),), master, dtype=parameter.dtype, device="cpu")
    rounded = flat(dense_like(parameter, master.to(device="cpu", dtype=parameter.dtype, copy=True)))
    is_it = weight is not None and torch.equal(rounded.view(torch.int16), weight.view(torch.int16))
    return weight if weight is not None and is_it else rounded


def _shard_of(parameter: Tensor) -> Shard | None:
    """Return how a parameter is spread over ranks; None for a whole one."""
    offloaded = find_offloaded(parameter)
    return None if offloaded is None else offloaded.shard


def _as_saved(shard: Shard, value: Any) -> Any:
    """Return a value of the state of a parameter that is spread: what is of the part's size is a part, too."""
    is_part = isinstance(value, Tensor) and value.size() == shard.local_size
    return shard.as_dtensor(value) if is_part else value


def _part_of(parameter: Tensor, value: Any) -> Any:
    """Return this rank's part of a saved value, if its parameter is spread."""
    shard = _shard_of(parameter)
    part = shard.take(value) if shard is not None and isinstance(value, Tensor) else None
    return value if part is None else part
