"""Measured values, kept on disk between processes.

They are JSON in `$XDG_CACHE_HOME/tencache_fx` (or `~/.cache/tencache_fx`); deleting that folder is always safe.
"""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tencache_fx.serialization import from_raw, parse_json
from tencache_fx.version import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger("tencache_fx")

_T = TypeVar("_T", bound="DataclassInstance")


def cached(key: Mapping[str, str], cls: type[_T], measure: Callable[[], _T], *, renew: bool = False) -> _T:
    """Return the value of the dataclass `cls` that is kept under `key`; else, or to `renew` it, measure it and keep it.

    `key["what"]` begins the file's name; all of `key`, and this package's version, decide whether a value may be used.
    A file that is damaged is measured again and replaced; a folder that cannot be written costs only the time to
    measure in the next process.
    """
    if not renew and (value := kept(key, cls)) is not None:
        return value
    value = measure()
    _keep(key, value)
    return value


def kept(key: Mapping[str, str], cls: type[_T]) -> _T | None:
    """Return the value of the dataclass `cls` that is kept under `key`, or None if there is none that can be used.

    It is as it was written, by its digest, and in the ranges of its fields, by `values`.
    """
    full, path = _file(key)
    try:
        found = parse_json(path.read_text())
        if not isinstance(found, dict) or found.get("key") != full:
            raise ValueError("it was measured for something else.")
        value = from_raw(cls, found.get("value"))
        if found.get("digest") != _digest(full, value):
            raise ValueError("it is not as it was written.")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("measuring again, because %s cannot be used: %s", path, str(error))
        return None
    return value


def _keep(key: Mapping[str, str], value: "DataclassInstance") -> None:
    full, path = _file(key)
    entry = {"key": full, "value": dataclasses.asdict(value), "digest": _digest(full, value)}
    try:
        replace_file(path, json.dumps(entry, indent=1).encode())
    except OSError as error:
        log.info("measured rates cannot be kept in %s: %s", path, error.strerror)


def _digest(key: Mapping[str, str], value: "DataclassInstance") -> str:
    """Return what tells a value and its key from damaged ones."""
    return hashlib.sha256(json.dumps([key, dataclasses.asdict(value)], sort_keys=True).encode()).hexdigest()


def _file(key: Mapping[str, str]) -> tuple[dict[str, str], Path]:
    """Return `key` with this package's version, and the file for it."""
    full = {**key, "version": __version__}
    name = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()[:16]
    return full, folder() / f"{key['what']}-{name}.json"


def folder() -> Path:
    """Return the folder of all that is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tencache_fx"


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old bytes or the new, never a part; raises `OSError` if it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
