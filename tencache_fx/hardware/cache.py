"""What was measured, learned and planned, kept on disk between processes.

It is JSON in `$XDG_CACHE_HOME/tencache_fx` (or `~/.cache/tencache_fx`); deleting that folder is always safe. Of each
sort of file the ones used last are kept, as many as are within `MOST_BYTES`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tencache_fx.serialization import from_raw, parse_json
from tencache_fx.units import PAGE_BYTES, round_up
from tencache_fx.version import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger("tencache_fx")

MOST_BYTES = 64 << 20
"""The most bytes of all files of one sort, each counted as whole pages."""

_T = TypeVar("_T", bound="DataclassInstance")


class Uses:
    """Counts the files that were read, and those that had to be written, by their sort: the begin of their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._watchers: list[Callable[[Path], None]] = []

    def watch(self, watcher: Callable[[Path], None]) -> None:
        """Have `watcher` called with each file that is used or written from here on."""
        self._watchers.append(watcher)

    def note(self, path: Path, *, written: bool = False) -> None:
        """Count a file that was used, or written; the last ones used are kept longest."""
        with self._lock:
            (self._written if written else self._read)[_sort(path)] += 1
        if not written:
            with contextlib.suppress(OSError):  # it is somebody else's
                os.utime(path)
        for watcher in self._watchers:
            watcher(path)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return how many files of each sort were read, and how many written."""
        with self._lock:
            return {sort: (self._read[sort], self._written[sort]) for sort in sorted({*self._read, *self._written})}


USES = Uses()


def cached(
    key: Mapping[str, str],
    cls: type[_T],
    measure: Callable[[], _T],
    *,
    renew: bool = False,
    accept: Callable[[_T], bool] | None = None,
) -> _T:
    """Return the value of the dataclass `cls` that is kept under `key`; else, or to `renew` it, measure it and keep it.

    `key["what"]` begins the file's name; all of `key`, and this package's version, decide whether a value may be used.
    A file that is damaged, or whose value `accept` refuses, is measured again and replaced; a folder that cannot be
    written costs only the time to measure in the next process. Of processes that measure at once, the first one's value
    is kept and used by all: plans that were made by another one would not be found again.
    """
    if not renew and (value := kept(key, cls, accept)) is not None:
        return value
    value = measure()
    if not renew:
        if _keep(key, value, new=True):
            return value
        if (others := kept(key, cls, accept)) is not None:
            return others
    _keep(key, value)
    return value


def kept(key: Mapping[str, str], cls: type[_T], accept: Callable[[_T], bool] | None = None) -> _T | None:
    """Return the value of the dataclass `cls` that is kept under `key`, or None if there is none that can be used.

    It is as it was written, by its digest, in the ranges of its fields, by `serialization`, and one to `accept`.
    """
    full, name = _named(key)
    path = Path(name)
    try:
        path = folder() / name
        found = parse_json(path.read_text())
        if not isinstance(found, dict) or found.get("key") != full:
            raise ValueError("it was measured for something else.")
        value = from_raw(cls, found.get("value"))
        if found.get("digest") != _digest(full, value):
            raise ValueError("it is not as it was written.")
        if accept is not None and not accept(value):
            raise ValueError("its value does not do here.")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.info("%s cannot be used, and is made again: %s", path, str(error))
        return None
    USES.note(path)
    return value


def _keep(key: Mapping[str, str], value: "DataclassInstance", *, new: bool = False) -> bool:
    """Write a value's file, if that can be; return False where it is to be `new`, and there is one."""
    full, name = _named(key)
    entry = {"key": full, "value": dataclasses.asdict(value), "digest": _digest(full, value)}
    try:
        return keep_file(folder() / name, json.dumps(entry, indent=1).encode(), new=new)
    except OSError as error:
        log.info("%s cannot be kept: %s", name, str(error))
        return True


def _digest(key: Mapping[str, str], value: "DataclassInstance") -> str:
    """Return what tells a value and its key from damaged ones."""
    return hashlib.sha256(json.dumps([key, dataclasses.asdict(value)], sort_keys=True).encode()).hexdigest()


def _named(key: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return `key` with this package's version, and the name of the file for it."""
    full = {**key, "version": __version__}
    name = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()[:16]
    return full, f"{key['what']}-{name}.json"


def folder() -> Path:
    """Return the folder of all that is kept; raises `OSError` for a user without a home."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "tencache_fx"
    try:
        return Path.home() / ".cache" / "tencache_fx"
    except RuntimeError as error:
        raise FileNotFoundError(f"there is no cache folder: {error}") from error


def keep_file(path: Path, content: bytes, *, new: bool = False) -> bool:
    """Write a file of the folder, and delete those of its sort that were not used for longest, if they are too many.

    A reader sees the old bytes or the new, never a part. One that is to be `new` is not written, and False returned, if
    there is one already. Raises `OSError` if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_sort(path)}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        if not (new and _link(temporary, path)):
            os.replace(temporary, path)
    except FileExistsError:
        return False
    finally:
        Path(temporary).unlink(missing_ok=True)
    USES.note(path, written=True)
    _evict(path)
    return True


def _link(path: str, other: Path) -> bool:
    """Give a file another name; return False where file systems cannot. Raises `FileExistsError` if that is taken."""
    try:
        os.link(path, other)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


@functools.cache
def digest_sources(*folders: Path) -> str:
    """Return a digest of all Python source in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _evict(newest: Path) -> None:
    used: list[tuple[int, int, Path]] = []
    for path in newest.parent.glob(f"{_sort(newest)}-*"):
        with contextlib.suppress(OSError):  # another process has evicted it
            about = path.stat()
            used.append((about.st_mtime_ns, round_up(about.st_size, PAGE_BYTES), path))
    total_bytes = sum(nbytes for _, nbytes, _ in used)
    for _, nbytes, path in sorted(used):
        if total_bytes <= MOST_BYTES:
            break
        if path != newest:
            with contextlib.suppress(OSError):
                path.unlink()
            total_bytes -= nbytes


def _sort(path: Path) -> str:
    return path.name.partition("-")[0]
