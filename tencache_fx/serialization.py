"""Frozen dataclasses, such as a `Problem` or a `Plan`, to JSON text and back.

What is read may be damaged, so it is checked here, for all who read: each field is there and of its type, and each
number is one that a size, a time, a step or a rate can be. A class with rules of its own has a method `check`, which
raises `ValueError`.
"""

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T")

MOST = (1 << 63) - 1
"""No size, time, step or rate is larger: sums of them are added up in 64 bits."""

Positive = Annotated[int, "above zero"]
"""The type of a field that is divided by. Other whole numbers may be 0."""


def to_json(value: "DataclassInstance") -> str:
    """Return `value` as JSON text that `from_json` reads back to an equal value."""
    return json.dumps(dataclasses.asdict(value), indent=1)


def from_json(cls: type[_T], text: str) -> _T:
    """Read a value of the dataclass `cls`, such as a `Problem` or a `Plan`, from JSON text.

    Raises `ValueError` when a field is unknown, missing, of the wrong type or out of its range.
    """
    return from_raw(cls, parse_json(text))


def parse_json(text: str) -> Any:
    """Return what JSON text says; raises `ValueError` for text that is none, that nests too deep, and for NaN."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it nests too deep.") from error


def from_raw(cls: type[_T], raw: object) -> _T:
    """Return the value of the dataclass `cls` that `raw`, JSON that was parsed, stands for; raises `ValueError`."""
    return typing.cast(_T, _read(cls, raw, cls.__name__))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number.")


def _read(kind: Any, raw: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        value = _read(typing.get_args(kind)[0], raw, where)
        if value <= 0:
            raise ValueError(f"{where}: expected a number above zero, found {value}.")
        return value
    if origin is tuple:
        if not isinstance(raw, list):
            raise ValueError(f"{where}: expected a list, found {reprlib.repr(raw)}.")
        kinds = typing.get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(raw)
        if len(raw) != len(kinds):
            raise ValueError(f"{where}: expected {len(kinds)} items, found {reprlib.repr(raw)}.")
        return tuple(_read(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(zip(kinds, raw, strict=True)))
    if origin is types.UnionType:
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return None if raw is None else _read(inner[0], raw, where)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, raw, where)
    return _read_plain(getattr(kind, "__supertype__", kind), raw, where)


def _read_fields(kind: Any, raw: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(raw, dict) or not set(raw) <= set(hints):
        raise ValueError(f"{where}: expected the fields {sorted(hints)}, found {reprlib.repr(raw)}.")
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    if missing := required - set(raw):
        raise ValueError(f"{where}: missing {sorted(missing)}.")
    value = kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in raw.items()})
    if hasattr(value, "check"):
        try:
            value.check()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return value


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _read_plain(base: Any, raw: Any, where: str) -> Any:
    if isinstance(base, type) and issubclass(base, StrEnum):
        if raw not in list(base):
            raise ValueError(f"{where}: expected one of {[str(each) for each in base]}, found {reprlib.repr(raw)}.")
        return base(raw)
    if type(raw) is not base:
        raise ValueError(f"{where}: expected {base.__name__}, found {reprlib.repr(raw)}.")
    if base is int and not 0 <= raw <= MOST:
        raise ValueError(f"{where}: expected a number from 0 to {MOST}, found {reprlib.repr(raw)}.")
    if base is float and not math.isfinite(raw):
        raise ValueError(f"{where}: expected a number, found {raw}.")
    return raw
