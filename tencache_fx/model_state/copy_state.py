"""Where the value of an offloaded parameter is: which of its two copies holds it, and how that changes."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from tencache_fx import compat
from tencache_fx.runtime.streams import Event


class CopyState(Enum):
    """Which copies hold a parameter's value. There is always a host copy; a device copy from `load` to `evict`.

        state         host copy       device copy             next states
        HOST          the value       none                    SHARED by load; UPDATING by begin_update
        SHARED        the value       the value               HOST by evict; DEVICE_NEWER by mark_device_newer; UPDATING
        HOST_NEWER    the value       the one before          SHARED by load or set_readers; HOST by evict; UPDATING
        DEVICE_NEWER  the one before  the value               SHARED by sync_host or write_back
        UPDATING      written to      none or the one before  HOST, SHARED or HOST_NEWER by finish_update

    An update ends in HOST if there is no device copy, in HOST_NEWER if it is not known yet when nobody reads that any
    more, and else refreshes it. One that failed ends in HOST or HOST_NEWER. `evict` copies a DEVICE_NEWER parameter to
    the host first.

    Others write to copies, too. A tensor of a `state_dict` shares the host copy: a write to it turns SHARED into
    HOST_NEWER, and raises `UsageError` for DEVICE_NEWER, since one of the two values is lost. `summon`, and a module
    that runs uncompiled, change the device copy of a SHARED parameter: `write_back` follows.
    """

    HOST = auto()
    SHARED = auto()
    HOST_NEWER = auto()
    DEVICE_NEWER = auto()
    UPDATING = auto()


NEXT_STATES = {
    CopyState.HOST: {CopyState.SHARED, CopyState.UPDATING},
    CopyState.SHARED: {CopyState.HOST, CopyState.HOST_NEWER, CopyState.DEVICE_NEWER, CopyState.UPDATING},
    CopyState.HOST_NEWER: {CopyState.HOST, CopyState.SHARED, CopyState.UPDATING},
    CopyState.DEVICE_NEWER: {CopyState.SHARED},
    CopyState.UPDATING: {CopyState.HOST, CopyState.SHARED, CopyState.HOST_NEWER},
}


class Work(Protocol):
    """An update under way, as its readers see it; a `Future` is one."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def exception(self) -> BaseException | None:
        """Block until it has ended; return how it failed."""


class LateWork(Future[None]):
    """Work that is handed in later, or as soon as somebody waits for it: by `hand_in`, which may be called again."""

    def __init__(self, hand_in: Callable[[], None]) -> None:
        super().__init__()
        self._hand_in = hand_in

    def result(self, timeout: float | None = None) -> None:
        """Block until it has ended; raise what it has raised."""
        self._hand_in()
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until it has ended; return how it failed."""
        self._hand_in()
        return super().exception(timeout)


@dataclass(slots=True, eq=False)
class HostUpdate:
    """The last update of a host copy."""

    work: Work | None = None  # until somebody was told how it went
    # The device copy as the update found it, while that is to be refreshed: whoever makes another one waits first.
    device: Tensor | None = None
    readers: Event | None = None  # behind it, nobody reads the device copy from before the update; None if unknown


def is_on_device(parameter: Tensor) -> bool:
    """Whether there are bytes behind a parameter."""
    return compat.has_bytes(parameter.untyped_storage()) or parameter.numel() == 0
