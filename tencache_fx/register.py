"""The regions compiled in this process, for reports: each is listed for as long as its compiled code lives."""

import atexit
import itertools
import os
import warnings
import weakref
from typing import Protocol

from tencache_fx.dump import RegionRecord
from tencache_fx.errors import OptionError


class Region(Protocol):
    """What the register needs of a compiled region."""

    index: int
    record: RegionRecord | None

    def measured(self) -> dict[str, int | None]:
        """Return what was measured of it."""

    def dump_measured(self) -> None:
        """Write that to its dump directory, if it has one."""


class Regions:
    """A register of live regions. One instance exists, `REGIONS`."""

    def __init__(self) -> None:
        self._live: weakref.WeakSet[Region] = weakref.WeakSet()
        self._indices = itertools.count()
        self._pid = os.getpid()

    def next_index(self) -> int:
        """Return the index of the next region: they are never used twice."""
        return next(self._indices)

    def add(self, region: Region) -> None:
        """List `region` until it is garbage."""
        self._live.add(region)

    def live(self) -> tuple[Region, ...]:
        """Return the live regions, oldest first."""
        return tuple(sorted(self._live, key=lambda region: region.index))

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
