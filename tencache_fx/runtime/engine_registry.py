"""Which engine serves which graph: the only state of the process that outlives a call, and it can be closed."""

import atexit
import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from tencache_fx.errors import InvariantError, TencacheError
from tencache_fx.garbage import CollectorPause
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.hardware.rates import measured_disk, rates_by_directory
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.process_groups import several_ranks
from tencache_fx.runtime.rank_watch import TORCH_ERRORS, RankWatch
from tencache_fx.runtime.store import Store
from tencache_fx.runtime.swap_points import SwapPoints

log = logging.getLogger("tencache_fx")


class Registry:
    """At most one open engine per device, and all that ever were, by index: an index is never used twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[int, Engine] = {}
        self._points: dict[int, SwapPoints] = {}
        self._rank_lock = threading.Lock()
        self._rank_watch: RankWatch | None = None
        self._unwatched: object = None  # the default process group, if its ranks cannot be watched
        self._count = 0
        self._left_bytes: WeakKeyDictionary[object, tuple[torch.device, int]] = WeakKeyDictionary()

    def leave_for_updates(self, owner: object, device: torch.device, nbytes: int | None) -> None:
        """Note what the plan of `owner` leaves free of a device, in place of what it left before."""
        with self._lock:
            self._drop_closed()
            self._left_bytes.pop(owner, None)
            if nbytes is not None:
                self._left_bytes[owner] = device, nbytes

    def left_for_updates(self, device: torch.device) -> int | None:
        """Return the least that a plan leaves free of a device; None without any."""
        with self._lock:
            self._drop_closed()
            return min((nbytes for where, nbytes in self._left_bytes.values() if where == device), default=None)

    def by_id(self, index: int) -> Engine | SwapPoints:
        """Return an open engine, or the swap points of one; raises `TencacheError` when it was closed."""
        points = self._points.get(index)
        engine = self._engines.get(index) if points is None else points.engine
        if engine is None or engine.closed:
            raise TencacheError(
                f"engine {index}, which this compiled graph uses, is closed; "
                "call torch.compiler.reset() and compile again."
            )
        return points or engine

    def open_engines(self) -> tuple[Engine, ...]:
        """Return the open engines, oldest first; in a forked child, those that it opened itself."""
        with self._lock:
            self._drop_closed()
            return tuple(engine for engine in self._engines.values() if not engine.inherited)

    def engine_of(self, device: torch.device) -> Engine | None:
        """Return the open engine of a device, if there is one: asked for often, so without the lock.

        The dict that it looks at is replaced by others, and never changed.
        """
        for engine in self._engines.values():
            if engine.device == device and not engine.closed and not engine.inherited:
                return engine
        return None

    def inherited_engines(self) -> tuple[Engine, ...]:
        """Return the engines that the process from which this one was forked had open."""
        return tuple(engine for engine in self._engines.values() if engine.inherited and not engine.closed)

    def install(self, engine: Engine) -> None:
        """Make `engine` its device's; raises `InvariantError` when the device has another open one."""
        if self.engine_of(engine.device) is not None:
            raise InvariantError(f"{engine.device} has an open engine already; call tencache_fx.close() first.")
        with self._lock:
            self._drop_closed()
            engine.id = self._count
            self._count += 1
            self._engines = {**self._engines, engine.id: engine}

    def points_of(self, engine: Engine) -> SwapPoints:
        """Return the swap points of an engine, made when they are first asked for."""
        with self._lock:
            self._drop_closed()
            found = next((points for points in self._points.values() if points.engine is engine), None)
            if found is None:
                found = SwapPoints(engine)
                found.id = self._count
                self._count += 1
                self._points[found.id] = found
            return found

    def expected_indices(self, device: torch.device) -> tuple[int, int]:
        """Return the indices of a device's engine and its swap points: those there are, or will be if opened next."""
        engine, count = self.engine_of(device), self._count
        points = (each for each in self.open_points() if each.engine is engine)
        here = next((each.id for each in points), None)
        return (count, count + 1) if engine is None else (engine.id, count if here is None else here)

    def open_points(self) -> tuple[SwapPoints, ...]:
        """Return the swap points of open engines."""
        with self._lock:
            return tuple(points for points in self._points.values() if not points.closed)

    def rank_watch(self) -> RankWatch | None:
        """Return who watches the other ranks of the default process group; None if there are none.

        A group that was aborted is there no longer; whoever goes on nevertheless is to hear of it.
        """
        with self._rank_lock:  # its own: it may be held for as long as the store takes
            watch = self._rank_watch
            group = dist.GroupMember.WORLD if several_ranks() else None
            if group is not self._unwatched and group is not None and (watch is None or not watch.is_current):
                try:
                    watch = self._rank_watch = RankWatch()
                except TORCH_ERRORS as error:
                    self._unwatched = group
                    log.warning("ranks that wait for one that fails will wait for their group's timeout: %s", error)
            if watch is None or watch.process != os.getpid():  # the latter in a forked child
                return None
            return watch if watch.is_current or watch.cause is not None else None

    def close_all(self, *, at_exit: bool = False) -> None:
        """Close every engine of this process, and keep nothing of them; `at_exit` says that the process ends."""
        for engine in self.open_engines():
            engine.close(at_exit=at_exit)
        with self._lock:
            self._drop_closed()

    def reset_in_child(self) -> None:
        """Make a forked child's copy safe: its lock is free, and the parent's engines are never taken apart.

        They have threads, streams and copies under way that are not there: each gets one reference that nobody drops,
        not even the interpreter's own end.
        """
        for engine in self._engines.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        self._lock, self._rank_lock = threading.Lock(), threading.Lock()

    def _drop_closed(self) -> None:
        """Forget closed engines, their swap points, and what plans left free of their devices. Lock held.

        Regions that were compiled for one of them have to be compiled again before they run.
        """
        devices = {engine.device for engine in self._engines.values() if engine.closed}
        if not devices:
            return
        self._engines = {index: engine for index, engine in self._engines.items() if not engine.closed}
        self._points = {index: points for index, points in self._points.items() if not points.closed}
        for owner in [owner for owner, (device, _) in self._left_bytes.items() if device in devices]:
            del self._left_bytes[owner]


_REGISTRY = Registry()
_PAUSE = CollectorPause()
atexit.register(_REGISTRY.close_all, at_exit=True)
os.register_at_fork(after_in_child=_REGISTRY.reset_in_child)
# Destructors count on what the handlers of a fork, ours and those of others, have yet to make anew in the child.
# Registered last, these are the first of those that run before a fork, and the last of those behind it.
os.register_at_fork(before=_PAUSE.begin, after_in_parent=_PAUSE.end, after_in_child=_PAUSE.end_in_child)


class RankStage(contextlib.ContextDecorator):
    """A stage of what all ranks do, called `what`: if it raises on one of them, those that wait for it hear of it."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Raise `RankError` if this rank's collectives were aborted, because another one had failed."""
        if (watch := _REGISTRY.rank_watch()) is not None:
            watch.go_on()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Tell the others of an error; add to it what they have told."""
        if error is None or isinstance(error, _StopRecomputationError):  # the latter: all it needs has been saved
            return
        with contextlib.suppress(*TORCH_ERRORS):  # the error itself is what its caller is to see
            if (watch := _REGISTRY.rank_watch()) is not None:
                watch.fail(error, self._what)


def open_engine(
    device: torch.device,
    *,
    host_budget_bytes: int,
    spill_dirs: Sequence[Path] = (),
    spill_budget_bytes: int = 0,
    spill_write_bytes_per_day: int | None = None,
    checksum: bool = False,
) -> Engine:
    """Return the open engine of `device`, or a new one.

    An open one has at least these budgets from now on, and its values go to these directories, if any are given; what
    is elsewhere is read there. Of several, each gets bytes in proportion to its rate: to begin with, what was measured
    earlier. An endurance budget counts for all that is written from now on. Raises `OptionError` or `StoreError` for
    directories that cannot be used, and for an endurance budget that is too small.
    """
    engine = find_engine(device)
    if engine is None:
        engine = Engine(
            resolve_device(device),
            host_budget_bytes=host_budget_bytes,
            spill_dirs=spill_dirs,
            spill_budget_bytes=spill_budget_bytes,
            checksum=checksum,
        )
        engine.serves_all = False
        install_engine(engine)
        _set_up_disks(engine, spill_dirs, spill_write_bytes_per_day)
        return engine
    engine.pool.raise_budget(host_budget_bytes)
    if spill_dirs and engine.store is None:
        engine.attach_store(Store(spill_dirs, spill_budget_bytes, checksum=checksum))
    elif spill_dirs and engine.store is not None:
        engine.store.spill_to(spill_dirs)
        engine.store.raise_budget(spill_budget_bytes)
        engine.store.checksum |= checksum
    _set_up_disks(engine, spill_dirs, spill_write_bytes_per_day)
    return engine


def _set_up_disks(engine: Engine, spill_dirs: Sequence[Path], write_bytes_per_day: int | None) -> None:
    """Let the store keep an endurance budget, if one is given, and deal by what was measured of these directories.

    One alone gets everything anyway.
    """
    if engine.store is not None and write_bytes_per_day is not None:
        engine.store.write_pace.limit(write_bytes_per_day)
    if engine.store is not None and len(spill_dirs) > 1:
        engine.store.expect_rates(rates_by_directory(spill_dirs, measured_disk))


def find_engine(device: torch.device) -> Engine | None:
    """Return the open engine of `device`, if there is one."""
    return _REGISTRY.engine_of(resolve_device(device))


def leave_for_updates(owner: object, device: torch.device, nbytes: int | None) -> None:
    """Note that the plan of `owner` leaves so much of `device` free for updates; None without one.

    That counts for as long as `owner` lives, and until the engine of `device` is closed.
    """
    _REGISTRY.leave_for_updates(owner, resolve_device(device), nbytes)


def left_for_updates(device: torch.device) -> int | None:
    """Return the bytes of `device` that each plan leaves free for updates there, at least; None without any plan."""
    return _REGISTRY.left_for_updates(resolve_device(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a device's runtime has taken from the system, and how much of that is in use.

    Offloaded parameters, their gradients and optimizer state are among these.
    """

    host_bytes: int = 0
    host_acquired_bytes: int = 0
    gradient_acquired_bytes: int = 0
    state_acquired_bytes: int = 0
    disk_bytes: int = 0
    disk_acquired_bytes: int = 0


def usage(device: torch.device) -> Usage:
    """Return what the open engine of `device` uses; nothing if there is none."""
    engine = find_engine(device)
    if engine is None:
        return Usage()
    pool, store = engine.pool, engine.store
    return Usage(
        host_bytes=pool.allocated_bytes + pool.ahead.mapped_bytes,
        host_acquired_bytes=pool.acquired_bytes,
        gradient_acquired_bytes=pool.acquired_for(Use.GRADIENT),
        state_acquired_bytes=pool.acquired_for(Use.STATE),
        disk_bytes=0 if store is None else store.file_bytes,
        disk_acquired_bytes=0 if store is None else store.acquired_bytes,
    )


def engine_by_id(index: int) -> Engine:
    """Return the open engine with this index; raises `TencacheError` when it was closed."""
    found = _REGISTRY.by_id(index)
    return found.engine if isinstance(found, SwapPoints) else found


def server_by_id(index: int) -> Engine | SwapPoints:
    """Return what serves the graph ops with this index; raises `TencacheError` when it was closed."""
    return _REGISTRY.by_id(index)


def swap_points(engine: Engine) -> SwapPoints:
    """Return the swap points of `engine`: one for all its regions whose transfers a schedule decides."""
    return _REGISTRY.points_of(engine)


def expected_indices(device: torch.device) -> tuple[int, int]:
    """Return the indices that graphs will call the engine of `device` by, and its swap points."""
    return _REGISTRY.expected_indices(resolve_device(device))


def open_swap_points() -> tuple[SwapPoints, ...]:
    """Return the swap points of all open engines."""
    return _REGISTRY.open_points()


def engines() -> tuple[Engine, ...]:
    """Return all open engines."""
    return _REGISTRY.open_engines()


def close_engines() -> None:
    """Close all open engines."""
    _REGISTRY.close_all()


def inherited_engines() -> tuple[Engine, ...]:
    """Return the engines of the process from which this one was forked; it has none of their memory."""
    return _REGISTRY.inherited_engines()


def install_engine(engine: Engine) -> None:
    """Make `engine`, built with streams or a store of your own, the one of its device."""
    _REGISTRY.install(engine)
