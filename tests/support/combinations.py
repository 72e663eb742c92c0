"""All combinations of what a test is given: every value in some quick case, and the others nightly."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def each_in_a_quick_case(**values: Sequence[Any]) -> pytest.MarkDecorator:
    """Return a mark that gives a test all combinations of `values`, by argument; most of them are slow.

    As many are quick as the argument with the most values has. A value may be a `pytest.param` of one value.
    """
    axes = [[_param(each) for each in some] for some in values.values()]
    quick = {tuple(row % len(axis) for axis in axes) for row in range(max(map(len, axes)))}
    cases = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        chosen = [axis[place] for axis, place in zip(axes, places, strict=True)]
        marks = [mark for each in chosen for mark in each.marks]
        if places not in quick:
            marks.append(pytest.mark.slow)
        name = "-".join(each.id or _name(each.values[0]) for each in chosen)
        cases.append(pytest.param(*(each.values[0] for each in chosen), marks=marks, id=name))
    return pytest.mark.parametrize(tuple(values), cases)


def _param(value: Any) -> Any:
    """Return a `pytest.param` as it is, and any other value as one."""
    return value if isinstance(value, type(pytest.param(0))) else pytest.param(value)


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
