"""How many cases a property is tried with."""

from typing import Any

from hypothesis import settings

_FEW = 30


def drawn_cases(count: int, **how: Any) -> settings:
    """Return settings for `count` drawn cases; a third of them, where each run draws the same.

    `--hypothesis-profile explore`, which draws others each time, draws all of them.
    """
    if settings.default.derandomize:
        count = min(count, max(_FEW, count // 3))
    return settings(max_examples=count, **how)
