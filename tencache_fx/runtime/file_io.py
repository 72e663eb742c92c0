"""The system calls below the spill store."""

import errno
import os
import time


class FileIO:
    """The system calls below the store; tests put failing ones in their place."""

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        """Write some of `view` at `offset`; return how many bytes."""
        return os.pwritev(fd, [view], offset)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        """Read some bytes at `offset` into `view`; return how many."""
        return os.preadv(fd, [view], offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Allocate disk space; where the file system cannot, grow the file, and a full disk shows up on writing."""
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(fd, offset + nbytes)

    def free_bytes(self, fd: int) -> int:
        """Return the free space of the file system."""
        stat = os.fstatvfs(fd)
        return stat.f_bavail * stat.f_frsize

    def now_ns(self) -> int:
        """Return the time, from a clock that never goes back."""
        return time.perf_counter_ns()
