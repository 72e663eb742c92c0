"""What a spill directory's filesystem can do: its rates, whether it takes direct I/O, what kind it is."""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tencache_fx.errors import StoreError
from tencache_fx.hardware.capacity import disk_space
from tencache_fx.hardware.timing import per_second
from tencache_fx.serialization import Positive
from tencache_fx.units import format_rate

log = logging.getLogger("tencache_fx")

_MiB = 1 << 20
_FILE_BYTES = 256 * _MiB
_BLOCK_BYTES = 8 * _MiB
_THREADS = 2  # more did not help on any disk that was tried
_LIMIT_NS = 1_000_000_000  # for each direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Sequential rates of one filesystem; without `direct` I/O they are those of the page cache."""

    write_bytes_per_s: Positive
    read_bytes_per_s: Positive
    direct: bool

    @property
    def both_ways_bytes_per_s(self) -> int:
        """Return the rate of bytes that are written and read back, one after the other."""
        return both_ways_rate(self.write_bytes_per_s, self.read_bytes_per_s)


def both_ways_rate(write_bytes_per_s: int, read_bytes_per_s: int) -> int:
    """Return the bytes per second, at least 1, that go there and come back: what the store deals values by."""
    return max(1, write_bytes_per_s * read_bytes_per_s // (write_bytes_per_s + read_bytes_per_s))


def joint_rates(disks: Sequence[Disk]) -> tuple[int, int]:
    """Return the rates of writing and of reading of all disks together, values dealt to them by their rates both ways.

    That is their sum where each disk reads as many times faster than it writes as the others do. Elsewhere it is less:
    writing ends with the disk that writes its share last. (0, 0) without any.
    """
    total = sum(disk.both_ways_bytes_per_s for disk in disks)
    return (
        min((disk.write_bytes_per_s * total // disk.both_ways_bytes_per_s for disk in disks), default=0),
        min((disk.read_bytes_per_s * total // disk.both_ways_bytes_per_s for disk in disks), default=0),
    )


def measure_disk(directory: Path) -> Disk:
    """Write and read a file that has no name, past the page cache where the filesystem allows it (tmpfs may not).

    At most two seconds and 256 MiB. Raises `StoreError` when `directory` cannot be written or read.
    """
    try:
        free_bytes = disk_space([directory]).available_bytes
        file_bytes = max(_BLOCK_BYTES, min(_FILE_BYTES, free_bytes // 2 // _BLOCK_BYTES * _BLOCK_BYTES))
        with (
            _unlinked_file(directory) as (file, direct),
            mmap.mmap(-1, _BLOCK_BYTES) as block,
        ):  # mmap: aligned for direct I/O
            block.write(os.urandom(_BLOCK_BYTES))
            os.posix_fallocate(file, 0, file_bytes)
            # All threads share the block: what it holds does not matter.
            written_bytes, write_rate = _disk_rate(lambda at: os.pwrite(file, block, at), file_bytes, sync=file)
            _, read_rate = _disk_rate(lambda at: os.preadv(file, [block], at), written_bytes, sync=None)
    except OSError as error:
        raise StoreError(
            f"spill_dir {directory} cannot be used: {error.strerror}; free some space there, or name another directory."
        ) from error
    found = Disk(write_bytes_per_s=write_rate, read_bytes_per_s=read_rate, direct=direct)
    log.info(
        "measured %s: write %s, read %s",
        directory,
        format_rate(found.write_bytes_per_s),
        format_rate(found.read_bytes_per_s),
    )
    return found


@contextlib.contextmanager
def _unlinked_file(directory: Path) -> Iterator[tuple[int, bool]]:
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        descriptor, direct = file.fileno(), True
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            direct = False
            log.info("%s has no direct I/O (%s): its rates are the page cache's", directory, error.strerror)
        yield descriptor, direct


def _disk_rate(move: Callable[[int], int], file_bytes: int, *, sync: int | None) -> tuple[int, int]:
    """Call `move(offset)` for each block of a file until all is done or time is up; return bytes moved and their rate.

    `sync` is the file to flush before the clock stops.
    """
    start_ns = time.perf_counter_ns()
    deadline_ns = start_ns + _LIMIT_NS

    def step(offset: int) -> int:
        return move(offset) if time.perf_counter_ns() < deadline_ns else 0

    with ThreadPoolExecutor(_THREADS) as threads:
        moved_bytes = sum(threads.map(step, range(0, file_bytes, _BLOCK_BYTES)))
    if sync is not None:
        os.fdatasync(sync)
    return moved_bytes, per_second(moved_bytes, (time.perf_counter_ns() - start_ns) / 1e9)


def filesystem_id(directory: Path) -> str:
    """Return what is the same for all directories of one filesystem. Raises `StoreError` when it cannot be read."""
    try:
        return f"{os.stat(directory).st_dev:x}-{os.statvfs(directory).f_fsid:x}"
    except OSError as error:
        raise StoreError(f"spill_dir {directory} cannot be read: {error.strerror}; name another directory.") from error


def filesystem_type(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the name of the filesystem that holds `directory`, such as "ext4"; "" where the kernel does not say.

    `mounts` is the kernel's table (Linux: `proc_pid_mountinfo(5)`): the longest mount point above `directory` wins, of
    several on one point the last.
    """
    if not mounts.exists():
        return ""
    place, found = directory.resolve(), (-1, "")
    for line in mounts.read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= found[0]:
            found = (len(point.parts), rest.split()[0])
    return found[1]
