"""How the value of an option is read, whatever it is: each reader returns what was asked for, or says what is wrong."""

import contextlib
import difflib
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tencache_fx.errors import OptionError
from tencache_fx.serialization import MOST, parse_json

_UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("kMGTP", start=1)
}
SIZE_EXAMPLES = 'such as 536870912, "12GiB", "12GB", "512 MiB", "80%" or "auto"'


@dataclass(frozen=True, slots=True)
class Size:
    """A size as it was asked for: bytes, a share of the tier, or neither (auto)."""

    text: str
    nbytes: int | None = None
    share: Decimal | None = None


AUTO = Size("auto")


def read_size(name: str, value: object) -> Size | None:
    """Return the size that `value` asks for, None for no limit.

    Raises `OptionError`, naming the option `name`, when `value` is no size or not above zero.

    >>> read_size("device_budget", "512 MiB").nbytes
    536870912
    """
    if _is_none(value):
        return None
    if isinstance(value, str) and value.strip().lower() == "auto":
        return AUTO
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = value if isinstance(value, str) else "1" if is_number else ""  # all digits of a number may be too many
    match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    units = {unit.lower(): scale for unit, scale in _UNITS.items()} | {"": 1, "%": 1}
    if not match or match[2].lower() not in units:
        raise OptionError(f"{name}={shown(value)} is not a size; give a size {SIZE_EXAMPLES}.")
    number, unit = Decimal(value if isinstance(value, int) else match[1]), match[2].lower()
    if unit != "%" and number > MOST // units[unit]:
        raise OptionError(f"{name}={shown(value)} is more than any machine has; give a size {SIZE_EXAMPLES}.")
    if number <= 0 or (unit != "%" and number * units[unit] < 1):
        raise OptionError(f"{name}={shown(value)} must be above zero; give a size {SIZE_EXAMPLES}.")
    if unit == "%":
        if number > 100:
            raise OptionError(f"{name}={shown(value)} is more than all there is; give at most 100%.")
        return Size(str(value), share=number / 100)
    return Size(str(value), nbytes=int(number * units[unit]))


def read_bytes(name: str, value: object) -> int | None:
    """Return the bytes that `value` asks for, None for no limit; raises `OptionError` for shares, too."""
    with contextlib.suppress(OptionError):  # which would name shares among what may be given
        size = read_size(name, value)
        if size is None or size.nbytes is not None:
            return None if size is None else size.nbytes
    raise OptionError(f'{name}={shown(value)} is not a number of bytes above zero; give one, such as "2TB", or None.')


class _Shown(reprlib.Repr):
    """Values in an error's line: the ends of long ones, and no digits of numbers that Python refuses to spell."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 120

    def repr_int(self, x: int, level: int) -> str:
        """Return a number, as `reprlib` asks for it."""
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value == "none")


def shown(value: object) -> str:
    """Return a value as it stands in an error: `repr`, but never long."""
    return _Shown().repr(value)


def shown_path(path: Path) -> str:
    """Return a path as it stands in an error: whole, or its beginning and its length."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"


def read_choice(choices: tuple[str, ...]) -> Callable[[str, object], str]:
    """Return the reader of an option that is one of `choices`."""

    def read(name: str, value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise OptionError(
            f"{name}={shown(value)} is unknown;{nearest(value, choices)} choose one of: {listed(choices)}."
        )

    return read


def read_flag(name: str, value: object) -> bool:
    """Return whether an option is on; raises `OptionError`, as all readers do, naming the option `name`."""
    flags: dict[object, bool] = {"1": True, "true": True, "yes": True, "on": True}
    flags |= {"0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in flags:
        return flags[value.lower()]
    raise OptionError(
        f"{name}={shown(value)} is neither true nor false; give True or False (in the environment 1 or 0)."
    )


def read_path(name: str, value: object) -> Path | None:
    """Return the absolute path of a directory, which need not be there; None for none."""
    if _is_none(value):
        return None
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise OptionError(f"{name}={shown(value)} is not a directory; give its path.")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise OptionError(f"{name}={shown(value)} names the home of a user who is not known; give its path.") from error
    except OSError as error:
        raise OptionError(
            f"{name}={shown(value)} is not below any directory: {error.strerror}; give all of its path."
        ) from error


def read_paths(name: str, value: object) -> tuple[Path, ...]:
    """Return the absolute paths of one directory or of several, each once."""
    if _is_none(value):
        return ()
    several = value if isinstance(value, list | tuple) else (value,)
    paths = [path for item in several if (path := read_path(name, item)) is not None]
    return tuple(dict.fromkeys(paths))


def read_inductor(name: str, value: object) -> tuple[tuple[str, Any], ...]:
    """Return Inductor's own options by name, from a mapping, from what this returns, or from JSON."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise OptionError(f"{name}={shown(value)} is not JSON ({error}); give an object such as {{}}.") from error
    if isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    ):
        value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise OptionError(
            f'{name}={shown(value)} is not a mapping; give options by name, such as {{"max_autotune": True}}.'
        )
    return tuple(sorted(value.items()))


def nearest(name: object, known: Mapping[str, object] | tuple[str, ...]) -> str:
    """Return, for an error message, " did you mean ...?" with the known name most like `name`; "" if none is."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if isinstance(name, str) else []
    return f" did you mean {found[0]}?" if found else ""


def listed(known: Mapping[str, object] | tuple[str, ...]) -> str:
    """Return names as they stand in a sentence."""
    return ", ".join(known)
