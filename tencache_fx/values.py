"""Frozen dataclasses, such as a `Problem` or a `Plan`, to JSON text and back."""

import dataclasses
import json
import types
import typing
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T")


def to_json(value: "DataclassInstance") -> str:
    """Return `value` as JSON text that `from_json` reads back to an equal value."""
    return json.dumps(dataclasses.asdict(value), indent=1)


def from_json(cls: type[_T], text: str) -> _T:
    """Read a value of the dataclass `cls`, such as a `Problem` or a `Plan`, from JSON text.

    Raises `ValueError` when a field is unknown, missing or of the wrong type.
    """
    return typing.cast(_T, _read(cls, json.loads(text), cls.__name__))


def _read(kind: Any, raw: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(raw, list):
            raise ValueError(f"{where}: expected a list, found {raw!r}.")
        kinds = typing.get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(raw)
        if len(raw) != len(kinds):
            raise ValueError(f"{where}: expected {len(kinds)} items, found {raw!r:.200}.")
        return tuple(_read(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(zip(kinds, raw, strict=True)))
    if origin is types.UnionType:
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return None if raw is None else _read(inner[0], raw, where)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(raw, dict) or not set(raw) <= set(hints):
            raise ValueError(f"{where}: expected the fields {sorted(hints)}, found {raw!r:.200}.")
        required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
        if missing := required - set(raw):
            raise ValueError(f"{where}: missing {sorted(missing)}.")
        return typing.cast(Any, kind)(**{k: _read(hints[k], v, f"{where}.{k}") for k, v in raw.items()})
    base = getattr(kind, "__supertype__", kind)
    if isinstance(base, type) and issubclass(base, StrEnum):
        return base(raw)
    if type(raw) is not base:
        raise ValueError(f"{where}: expected {base.__name__}, found {raw!r}.")
    return raw
