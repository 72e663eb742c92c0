"""The regions compiled in this process, for reports: each is listed for as long as its compiled code lives."""

import atexit
import itertools
import os
import warnings
import weakref
from collections import deque
from typing import Protocol

import torch

from tencache_fx import compat
from tencache_fx.errors import OptionError
from tencache_fx.records import RegionRecord
from tencache_fx.runtime.engine_registry import find_engine


class Waiting(Protocol):
    """The register's view of a region's forwards whose backward is to come."""

    @property
    def pending_bytes(self) -> int:
        """Return the bytes that they keep on the device, and could do without."""

    def report_peak(self, peak_bytes: int) -> None:
        """Note that the device had to hold so much in all meanwhile."""


class Scope(Protocol):
    """The register's view of what a region is planned with."""

    by_step: bool

    def waits(self, thread: int) -> bool:
        """Return whether a forward of this thread waits for its backward."""

    def meet(self, thread: int) -> None:
        """Note that a forward begins in this thread, be it of this region or of another one."""


class Region(Protocol):
    """A compiled region, as the register knows it."""

    index: int
    device: torch.device

    @property
    def record(self) -> RegionRecord | None:
        """Return the record of its plan."""

    @property
    def in_steps(self) -> bool:
        """Return whether it is planned with the others of its step."""

    @property
    def scope(self) -> Scope:
        """Return what it is planned with."""

    @property
    def boundary_memory(self) -> Waiting:
        """Return the monitor of its forwards."""

    def measured(self) -> dict[str, int | None]:
        """Return its measured figures."""

    def dump_measured(self) -> None:
        """Write that to its dump directory, if it has one."""


class Regions:
    """A register of live regions. One instance exists, `REGIONS`."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Region] = weakref.WeakSet()
        self._left: deque[torch.device] = deque()  # by regions that are garbage, in whatever thread that was noticed
        self._indices = itertools.count()
        self._pid = os.getpid()
        self.compilations = 0  # begun so far, of whatever region

    def next_index(self) -> int:
        """Return the index of the next region: they are never used twice."""
        return next(self._indices)

    def add(self, region: Region) -> None:
        """List `region` until it is garbage."""
        self._live.add(region)
        weakref.finalize(region, self._left.append, region.device).atexit = False

    def give_back(self) -> None:
        """Unmap the host buffers that plans have reserved on devices of which no region is left."""
        left: set[torch.device] = set()
        while self._left:
            left.add(self._left.popleft())
        for device in left - {region.device for region in self._live}:
            if (engine := find_engine(device)) is not None:
                engine.forget_reserved()

    def live(self) -> tuple[Region, ...]:
        """Return the live regions, oldest first."""
        return tuple(sorted(self._live, key=lambda region: region.index))

    def waiting(self, device: torch.device) -> tuple[Waiting, ...]:
        """Return the regions of which forwards keep something on `device` that they could do without."""
        found = (region.boundary_memory for region in self._live if region.device == device)
        return tuple(each for each in found if each.pending_bytes)

    def scopes(self, device: torch.device) -> tuple[Scope, ...]:
        """Return the scopes of the regions on `device`."""
        return tuple(region.scope for region in self._live if region.device == device)

    def dump_measured(self) -> None:
        """Let every region with a dump directory write what was measured of it; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        for region in self.live():
            try:
                region.dump_measured()
            except OptionError as error:  # at exit nobody can mend it, and the other regions' measures are worth having
                warnings.warn(str(error), stacklevel=2)


REGIONS = Regions()
atexit.register(REGIONS.dump_measured)


def compilations() -> int:
    """Return a number that changes with each compilation, of our backend's or of others'."""
    return REGIONS.compilations + compat.frames_compiled()
