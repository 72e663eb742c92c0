"""Attributes that have new names: reading one by its old name raises an error that has the new one."""

from typing import NoReturn


class Renamed:
    """An attribute's old name: `old = Renamed("new")` in the class body.

    >>> class Plan:
    ...     spills = Renamed("transfers")
    >>> Plan().spills
    Traceback (most recent call last):
    AttributeError: Plan.spills has a new name: Plan.transfers.
    """

    def __init__(self, new: str) -> None:
        self._new, self._old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(new_name(owner.__name__, self._old, self._new))


def new_name(owner: str, old: str, new: str) -> str:
    """Return the sentence that says what `owner` calls `old` now."""
    return f"{owner}.{old} has a new name: {owner}.{new}."
