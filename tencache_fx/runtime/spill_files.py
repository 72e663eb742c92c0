"""The files that values are spilled to: without a name, so that a crash leaves nothing behind."""

import mmap
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tencache_fx.hardware.disk import both_ways_rate
from tencache_fx.runtime.freelist import FreeList
from tencache_fx.runtime.traffic import Traffic
from tencache_fx.units import PAGE_BYTES


@dataclass(slots=True, eq=False)
class SpillFile:
    """One of them, in `directory`: its size, what of it is free, and what moves to it and from it.

    `refusal` is what its file system answered if it refused to let the file grow.
    """

    directory: Path
    fd: int
    writes: Traffic
    reads: Traffic
    nbytes: int = 0
    free: FreeList = field(default_factory=FreeList)
    closed: bool = False
    refusal: str = ""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is in it."""
        return self.free.free_bytes == self.nbytes

    @property
    def both_ways_bytes_per_s(self) -> int:
        """Return the rate at which values are dealt to it."""
        return both_ways_rate(self.writes.bytes_per_s, self.reads.bytes_per_s)

    def close(self) -> None:
        """Join the threads, once they have done what they were given, and give the disk space back. Idempotent."""
        if not self.closed:
            self.writes.threads.stop()
            self.reads.threads.stop()
            os.close(self.fd)
            self.nbytes, self.free, self.closed = 0, FreeList(), True


def open_unnamed(directory: Path) -> int:
    """Return a descriptor of a new file without a name, `O_DIRECT` if one aligned write shows that it works."""
    probe = mmap.mmap(-1, PAGE_BYTES)
    for direct in (os.O_DIRECT, 0):
        try:
            fd = _create(directory, direct)
        except OSError:
            if direct:
                continue
            raise
        try:
            os.pwritev(fd, [probe], 0)
        except OSError:
            os.close(fd)
            if not direct:
                raise
        else:
            os.ftruncate(fd, 0)
            return fd
    raise AssertionError("the loop returns or raises")


def _create(directory: Path, direct: int) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | direct, 0o600)
    except OSError:  # not every file system has O_TMPFILE; a missing directory fails again below
        fd, name = tempfile.mkstemp(prefix="tencache-", dir=directory)
        os.close(fd)
        try:
            return os.open(name, os.O_RDWR | os.O_CLOEXEC | direct)
        finally:
            os.unlink(name)
