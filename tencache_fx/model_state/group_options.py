"""The options of an optimizer's group, and the texts by which its steps are looked up."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor


class GroupOptions(dict[str, Any]):
    """A group's options by name, without its parameters, as they are when this is made: the key of a cache.

    Its texts are made once: a step asks for them for each parameter.
    """

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "GroupOptions":
        """Return the options of a group, of which these may be a copy already."""
        return group if isinstance(group, cls) else cls({name: group[name] for name in group if name != "params"})

    @cached_property
    def text(self) -> str:
        """A text that differs where the options do."""
        return exactly(self)

    @cached_property
    def outline(self) -> str:
        """A text that differs where another option is not a number, or is 0, and not by the digits of numbers."""
        return exactly({name: _is_there(value) for name, value in self.items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.text)


def exactly(values: Mapping[str, Any]) -> str:
    """Return all digits of all values: a tensor's own text has a few of them."""
    return repr([(name, each.tolist() if isinstance(each, Tensor) else each) for name, each in values.items()])


def _is_there(value: Any) -> Any:
    """Return an option without the digits of its numbers: an array may be there or not for a momentum of 0, say."""
    if isinstance(value, tuple | list):
        return [_is_there(each) for each in value]
    return bool(value) if isinstance(value, float | Tensor) else value
