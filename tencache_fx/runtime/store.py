"""The spill store: extents in preallocated, unlinked files, moved by worker threads straight from and to pool buffers.

Layout. One file per directory, without a name (a crash leaves nothing behind), grown by `reserve` and never shrunk:

    offset 0          first page; there is no header, and nothing outlives the process
    offset k * 4096   a page; every piece starts and ends on a page boundary
    ...
    end of file       everything below it is allocated on disk (`posix_fallocate`)

An *extent* holds one value. It is a list of *pieces* `(file, offset, nbytes)` whose bytes follow each other in the
value, the last page padded with whatever the buffer held:

    value   |<- piece 0: file 0 ->|<- piece 1: file 1 ->|<- piece 2: file 0 ->|
            0                                              round_up(nbytes, 4096)

The directories may be changed at any time: what is allocated from then on is in the new ones, what was allocated before
stays where it is, and the file of a former directory is closed once nothing is in it.

Values of more than one block are striped over all files; a free range that is too short becomes a piece of its own, so
free space is never lost to fragmentation. Files are opened `O_DIRECT` where the file system takes it, and moved in
blocks of at most 8 MiB, several at a time: as fast as io_uring, without a dependency.
"""

import contextlib
import errno
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from pathlib import Path

from tencache_fx.errors import BudgetError, OptionError, StoreError
from tencache_fx.runtime.spill_files import SpillFile, open_unnamed
from tencache_fx.units import PAGE_BYTES, round_up

BLOCK_BYTES = 8 << 20
WORKERS = 4
_ZERO_PROGRESS_TRIES = 8


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


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` of a value at `offset` of a file."""

    file: int
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Extent:
    """Where one value lies. `crc` is its checksum, once written and if wanted."""

    label: str
    nbytes: int
    pieces: tuple[Piece, ...]
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class _Way:
    """Down to disk or up from it; `fate` is what an error message says of the value."""

    threads: ThreadPoolExecutor
    call: Callable[[int, memoryview, int], int]
    verb: str
    fate: str


class Store:
    """Keeps values on disk. Thread-safe."""

    def __init__(
        self,
        directories: Sequence[Path],
        budget_bytes: int,
        *,
        checksum: bool = False,
        workers: int = WORKERS,
        block_bytes: int = BLOCK_BYTES,
        io: FileIO | None = None,
    ) -> None:
        """Open a file in each directory; raises `OptionError` where that fails."""
        self.budget_bytes = budget_bytes
        self.checksum = checksum
        self.written_bytes = 0
        self.read_bytes = 0
        self.acquired_bytes = 0
        self._block_bytes = block_bytes
        self._io = FileIO() if io is None else io
        self._lock = threading.Lock()
        self._next = 0
        self._files: list[SpillFile] = []  # all there ever were: pieces name them by index
        self._current: list[int] = []  # those that take what comes
        self.spill_to(directories)
        # Two sets of threads: a read must not queue behind the writes that wait for the disk.
        self._write_way = _Way(
            ThreadPoolExecutor(workers, thread_name_prefix="tencache-write"),
            self._io.pwrite,
            "write",
            "it is still in host memory, nothing is lost",
        )
        self._read_way = _Way(
            ThreadPoolExecutor(workers, thread_name_prefix="tencache-read"),
            self._io.pread,
            "read",
            "it is lost, and so is this step",
        )

    @property
    def directories(self) -> tuple[Path, ...]:
        """Return where values go now."""
        return tuple(self._files[i].directory for i in self._current)

    def spill_to(self, directories: Sequence[Path]) -> None:
        """Write values to these directories from now on.

        Raises `OptionError` where a file cannot be opened in one; then they go where they went before.
        """
        with self._lock:
            known = {file.directory: i for i, file in enumerate(self._files) if not file.closed}
            opened: list[SpillFile] = []
            try:
                for directory in dict.fromkeys(directories):
                    if directory not in known:
                        opened.append(SpillFile(directory, open_unnamed(directory)))
            except OSError as error:
                for file in opened:
                    file.close()
                raise OptionError(
                    f"spill_dir {directory} cannot hold the spill file ({error.strerror}); "
                    "create it, make it writable, or name another one."
                ) from error
            known |= {file.directory: len(self._files) + i for i, file in enumerate(opened)}
            self._files += opened
            self._current, self._next = [known[directory] for directory in dict.fromkeys(directories)], 0
            self._close_former()

    def raise_budget(self, budget_bytes: int) -> None:
        """Raise the budget to this at least."""
        with self._lock:
            self.budget_bytes = max(self.budget_bytes, budget_bytes)

    def resize_budget(self, budget_bytes: int) -> None:
        """Set the budget; raises `OptionError` when the files are larger already, and leaves it as it was."""
        with self._lock:
            if budget_bytes < self.file_bytes:
                raise OptionError(
                    f"spill_budget {budget_bytes} bytes is below the {self.file_bytes} bytes that the spill files have "
                    f"({self.acquired_bytes} in use); give as much, or call tencache_fx.close() first."
                )
            self.budget_bytes = budget_bytes

    @property
    def file_bytes(self) -> int:
        """Return the disk space in use."""
        return sum(file.nbytes for file in self._files)

    def reserve(self, nbytes: int) -> None:
        """Grow the files to at least `nbytes` together, in equal shares.

        Raises `BudgetError` above the spill budget, `StoreError` when a disk has not enough room.
        """
        with self._lock:
            missing = round_up(nbytes, PAGE_BYTES) - sum(self._files[i].nbytes for i in self._current)
            for rank, i in enumerate(self._current):
                share = round_up(max(0, missing) // (len(self._current) - rank), PAGE_BYTES)
                self._grow(i, share)
                missing -= share

    def allocate(self, nbytes: int, label: str) -> Extent:
        """Return room for a value; grows the files when they are full, and raises as `reserve` does."""
        with self._lock:
            left = total = round_up(max(1, nbytes), PAGE_BYTES)
            count = len(self._current)
            width = min(count, -(-total // self._block_bytes))
            places = [(self._next + rank) % count for rank in range(count)]
            self._next = places[-1] if width == 1 else self._next
            order = [self._current[place] for place in places]
            pieces: list[Piece] = []
            for rank, i in enumerate(order[:width]):
                left -= self._take(i, round_up(left // (width - rank), PAGE_BYTES), pieces)
            for i in order:
                left -= self._take(i, left, pieces)
            if left:
                try:
                    grown = self._grow_any(order, left)
                except (BudgetError, StoreError) as error:
                    self._put(pieces)
                    raise type(error)(f"{label} ({nbytes} bytes) cannot go to disk: {error}") from error
                left -= self._take(grown, left, pieces)
            assert left == 0
            self.acquired_bytes += total
            return Extent(label=label, nbytes=nbytes, pieces=tuple(pieces))

    def free(self, extent: Extent) -> None:
        """Give the room back. No read or write of it may be under way."""
        with self._lock:
            self._put(extent.pieces)
            self.acquired_bytes -= sum(piece.nbytes for piece in extent.pieces)
        extent.pieces = ()

    def write(self, extent: Extent, view: memoryview) -> None:
        """Write the value that `view` (page-aligned, whole pages) begins with; returns when the disk has it.

        Raises `StoreError`; the value is still in `view` then.
        """
        if self.checksum:
            extent.crc = zlib.crc32(view[: extent.nbytes])
        self._move_all(self._write_way, extent, view)
        with self._lock:
            self.written_bytes += sum(piece.nbytes for piece in extent.pieces)

    def read(self, extent: Extent, view: memoryview) -> None:
        """Read the value into `view` (page-aligned, whole pages). Raises `StoreError`; the value is lost then."""
        self._move_all(self._read_way, extent, view)
        with self._lock:
            self.read_bytes += sum(piece.nbytes for piece in extent.pieces)
        if extent.crc is not None and (found := zlib.crc32(view[: extent.nbytes])) != extent.crc:
            where = ", ".join(f"{self._files[p.file].directory} at offset {p.offset}" for p in extent.pieces)
            raise StoreError(
                f"{extent.label} came back from disk changed: checksum {found:08x}, written as "
                f"{extent.crc:08x} ({extent.nbytes} bytes in {where}); it is lost, and so is this step. Check the disk."
            )

    def close(self) -> None:
        """Join the threads and close the files, which frees the disk space. Idempotent."""
        self._write_way.threads.shutdown(wait=True)
        self._read_way.threads.shutdown(wait=True)
        for file in self._files:
            file.close()

    def _close_former(self) -> None:
        """Close the files of former directories that nothing is in: nobody reads or writes there."""
        for i, file in enumerate(self._files):
            if i not in self._current and file.is_empty:
                file.close()

    def _take(self, index: int, nbytes: int, pieces: list[Piece]) -> int:
        taken = self._files[index].free.take(nbytes)
        pieces.extend(Piece(index, start, size) for start, size in taken)
        return sum(size for _, size in taken)

    def _put(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._files[piece.file].free.put(piece.offset, piece.nbytes)
        self._close_former()

    def _grow_any(self, order: Sequence[int], nbytes: int) -> int:
        """Grow the first file whose disk has room; return its index."""
        for i in order[:-1]:
            with contextlib.suppress(StoreError):
                self._grow(i, nbytes)
                return i
        self._grow(order[-1], nbytes)
        return order[-1]

    def _grow(self, index: int, nbytes: int) -> None:
        if nbytes <= 0:
            return
        file = self._files[index]
        if self.file_bytes + nbytes > self.budget_bytes:
            raise BudgetError(
                f"the spill store needs {self.file_bytes + nbytes} bytes of disk; the spill budget is "
                f"{self.budget_bytes} bytes. Raise spill_budget, or host_budget so that less is spilled."
            )
        room_bytes = self._io.free_bytes(file.fd)
        if nbytes > room_bytes:
            raise StoreError(
                f"{file.directory} has {room_bytes} bytes free; the spill store needs {nbytes} more there. "
                "Free some space, lower spill_budget, or name another spill_dir. Nothing is lost."
            )
        try:
            self._io.allocate(file.fd, file.nbytes, nbytes)
        except OSError as error:
            raise StoreError(
                f"{file.directory} refused {nbytes} more bytes for the spill file, which has {file.nbytes} "
                f"({error.strerror}); free some space or name another spill_dir. Nothing is lost."
            ) from error
        file.free.put(file.nbytes, nbytes)
        file.nbytes += nbytes

    def _move_all(self, way: _Way, extent: Extent, view: memoryview) -> None:
        """Move every block, in parallel; returns, or raises the first error, when all have ended."""
        blocks: list[tuple[SpillFile, memoryview, int]] = []
        start = 0
        for piece in extent.pieces:
            for skip in range(0, piece.nbytes, self._block_bytes):
                size = min(self._block_bytes, piece.nbytes - skip)
                blocks.append((self._files[piece.file], view[start : start + size], piece.offset + skip))
                start += size
        if len(blocks) == 1:
            self._move(way, extent, *blocks[0])
            return
        jobs = [way.threads.submit(self._move, way, extent, *block) for block in blocks]
        wait_futures(jobs)  # all of them, even if one fails: the others still use the buffer
        for job in jobs:
            job.result()

    def _move(self, way: _Way, extent: Extent, file: SpillFile, view: memoryview, offset: int) -> None:
        """Move one block; survives short transfers and names what failed."""
        done = tries = 0
        while done < view.nbytes:
            try:
                moved = way.call(file.fd, view[done:], offset + done)
                reason = f"only {done + moved} of {view.nbytes} bytes moved"
            except OSError as error:
                moved, reason, tries = 0, str(error.strerror or error), _ZERO_PROGRESS_TRIES
            # O_DIRECT goes on at a page boundary only: a torn page is moved again.
            whole = moved if done + moved == view.nbytes else moved // PAGE_BYTES * PAGE_BYTES
            done += whole
            tries = 0 if whole else tries + 1
            if tries > _ZERO_PROGRESS_TRIES:
                raise StoreError(
                    f"could not {way.verb} {view.nbytes} bytes of {extent.label} at offset {offset} of the "
                    f"spill file in {file.directory} ({reason}); {way.fate}. Check the disk or name another spill_dir."
                )
