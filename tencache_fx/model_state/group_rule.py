"""A rule with the options of one group, for the time of a step: what parameters have in common is looked up once."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tencache_fx.model_state.disk_state import DiskState
from tencache_fx.model_state.group_options import GroupOptions
from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.placement import shown_of
from tencache_fx.model_state.step_kernel import LEAST_8BIT, Rule, Step
from tencache_fx.model_state.stored_form import StoredForm


class GroupRule:
    """A `rule` with the options that a group has when this is made."""

    def __init__(self, rule: Rule, group: Mapping[str, Any]) -> None:
        self._rule, self._options = rule, GroupOptions.of(group)
        self._kinds: dict[tuple[int, bool], KindRule] = {}

    def of(self, parameter: Tensor) -> "KindRule":
        """Return the rule for a parameter of the group. Raises `OptionError` when its options cannot be used."""
        dim, elements = parameter.dim(), parameter.numel()
        key = dim, elements < LEAST_8BIT
        if (found := self._kinds.get(key)) is None:
            found = self._kinds[key] = KindRule(self._rule, self._options, dim, elements)
        return found


class KindRule:
    """A `rule` with a group's `options` for parameters of so many dimensions, small ones or others as `elements` are.

    That is all that a rule looks at of a parameter.
    """

    def __init__(self, rule: Rule, options: GroupOptions, dim: int, elements: int) -> None:
        self._rule, self._options, self._dim, self._elements = rule, options, dim, elements
        self._nexts: dict[tuple[object, ...], Step] = {}
        self._arrays = tuple(rule.arrays(options, dim, elements, split=split) for split in (False, True))

    def arrays(self, *, split: bool = False) -> Mapping[str, StoredForm]:
        """Return the arrays of the state, with what a `split` master has besides the weight in place of the master."""
        return self._arrays[split]

    def initial(self) -> Mapping[str, float]:
        """Return what is in each array before the first step."""
        return self._rule.initial(self._options, self._dim)

    def next(self, held: State | DiskState, entry: Mapping[str, Any]) -> Step:
        """Return the step that a parameter is to take, given its state and what an optimizer's `state` has of it.

        Most parameters take the same one: it is looked up by the one before.
        """
        if not held.counted.are_in(entry, len(shown_of(held))):
            return self._find_next(held, entry)
        key = held.counted.step, held.made, held.weight is not None
        if (found := self._nexts.get(key)) is None:
            found = self._nexts[key] = self._find_next(held, entry)
        return found

    def _find_next(self, held: State | DiskState, entry: Mapping[str, Any]) -> Step:
        kept = {*self.arrays(), *held.tensors}
        scalars = {name: each for name, each in entry.items() if name not in kept}
        split = held.weight is not None
        return self._rule.step(self._options, self._dim, scalars, held.made, self._elements, split=split)
