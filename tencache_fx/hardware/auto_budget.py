"""A budget that is "auto": the same in each start of a program, as far as the free memory allows.

Free memory and disk change by the minute. A region that may use all of them is planned for just so many bytes, and a
second start would find none of what the first one kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tencache_fx.hardware.cache import cached
from tencache_fx.serialization import Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoBudget:
    """The bytes that an "auto" budget came to."""

    nbytes: Positive


def lasting_bytes(most_bytes: int, about: Mapping[str, object]) -> int:
    """Return a budget of at most `most_bytes`, and of less by a sixteenth at most.

    It is that of an earlier start with the same facts `about` the tier, if this is in the range; else less by a
    thirty-second, so that later starts may find a little more free, or a little less.
    """
    key = {"what": "auto", **{name: str(value) for name, value in about.items()}}
    least_bytes = most_bytes - most_bytes // 16
    middle_bytes = most_bytes - most_bytes // 32
    if middle_bytes <= 0:
        return most_bytes
    found = cached(
        key,
        AutoBudget,
        lambda: AutoBudget(nbytes=middle_bytes),
        accept=lambda kept: least_bytes <= kept.nbytes <= most_bytes,
    )
    return found.nbytes
