"""Bytes, rates and durations as text, and rounding of sizes. No torch here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

PAGE_BYTES = 4096
"""A page of memory, and the unit of direct I/O: every buffer and every extent is whole pages."""


def round_up(nbytes: int, unit: int) -> int:
    """Return the least multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit


_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

_TIME_UNITS = ("ns", "us", "ms", "s")


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` in decimal units with three significant digits.

    >>> format_bytes(999), format_bytes(16_800_000), format_bytes(-2_500_000_000)
    ('999 B', '16.8 MB', '-2.5 GB')
    """
    return _format_scaled(nbytes, _BYTE_UNITS)


def at_least(nbytes: int) -> str:
    """Return `nbytes` as an option's value, rounded up so that it is enough.

    >>> at_least(5 << 20), at_least((5 << 20) + 1)
    ('5MiB', '6MiB')
    """
    return f"{-(-nbytes // (1 << 20))}MiB"


def format_rate(bytes_per_s: int) -> str:
    """Return a rate, such as "12.5 GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_flops(flops_per_s: int) -> str:
    """Return a rate of floating-point operations, such as "770 TFLOP/s"."""
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"


def format_ns(duration_ns: int) -> str:
    """Return a duration with three significant digits.

    >>> format_ns(0), format_ns(12_345), format_ns(297_000_000), format_ns(-1_500_000_000)
    ('0 ns', '12.3 us', '297 ms', '-1.5 s')
    """
    return _format_scaled(duration_ns, _TIME_UNITS)


def _format_scaled(amount: int, units: Sequence[str]) -> str:
    size, unit = float(abs(amount)), 0
    while size >= 999.5 and unit < len(units) - 1:
        size /= 1000
        unit += 1
    digits = f"{size:.0f}" if size >= 999.5 else f"{size:.3g}"
    return f"{'-' if amount < 0 else ''}{digits} {units[unit]}"
