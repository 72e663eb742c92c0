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

Values are dealt to the directories in proportion to their rates (`dealing.py`), so that all of them are done with a
value at the same time: in pieces of an eighth of a block at least, smaller values whole. The rates are those that were
measured of the file systems, then those that transfers reach (`traffic.py`). What one directory has no room for goes to
the others. A free range that is too short becomes a piece of its own, so free space is never lost to fragmentation.

Files are opened `O_DIRECT` where the file system takes it, and moved in blocks of at most 8 MiB, several at a time: as
fast as io_uring, without a dependency. Each directory has threads of its own, so that a slow one does not hold up the
others, and of these some for each way: a read must not queue behind the writes that wait for the disk.
"""

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tencache_fx.errors import BudgetError, OptionError, StoreError
from tencache_fx.hardware.disk import Disk
from tencache_fx.runtime.block_transfers import BlockTransfers
from tencache_fx.runtime.dealing import Dealer, split
from tencache_fx.runtime.file_io import FileIO
from tencache_fx.runtime.spill_files import SpillFile, open_unnamed
from tencache_fx.runtime.traffic import Traffic
from tencache_fx.runtime.write_pace import WritePace
from tencache_fx.units import PAGE_BYTES, round_up

BLOCK_BYTES = 8 << 20
WORKERS = 4
_LEAST_PART = 8  # a piece is this part of a block at least, or it is not worth a request


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryUse:
    """What one spill directory is taken to do, the share of what is dealt next, and what it has done so far.

    The rates are those expected of it, or reached by late transfers. The share is 0 for a former directory.
    """

    directory: Path
    write_bytes_per_s: int
    read_bytes_per_s: int
    share: float
    file_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0


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
        self.acquired_bytes = 0
        self._least_bytes = max(PAGE_BYTES, block_bytes // _LEAST_PART // PAGE_BYTES * PAGE_BYTES)
        self._workers = workers
        self._io = FileIO() if io is None else io
        self._lock = threading.Lock()
        self._dealer = Dealer(self._least_bytes)
        self._files: list[SpillFile] = []  # all there ever were: pieces name them by index
        self._current: list[int] = []  # those that take what comes
        self.spill_to(directories)
        self._opened_ns = self._io.now_ns()
        self.write_pace = WritePace(block_bytes, self._io.now_ns)
        self._writes = BlockTransfers(
            lambda file: file.writes,
            self._io.pwrite,
            "write",
            "it is still in host memory, nothing is lost",
            block_bytes,
            self.write_pace.admit,
        )
        self._reads = BlockTransfers(
            lambda file: file.reads, self._io.pread, "read", "it is lost, and so is this step", block_bytes
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
                        fd = open_unnamed(directory)
                        opened.append(SpillFile(directory, fd, self._traffic("write"), self._traffic("read")))
            except OSError as error:
                for file in opened:
                    file.close()
                raise OptionError(
                    f"spill_dir {directory} cannot hold the spill file ({error.strerror}); "
                    "create it, make it writable, or name another one."
                ) from error
            known |= {file.directory: len(self._files) + i for i, file in enumerate(opened)}
            self._files += opened
            current = [known[directory] for directory in dict.fromkeys(directories)]
            if current != self._current:
                self._current = current
                self._dealer.reset()
            self._close_former()

    def expect_rates(self, disks: Mapping[Path, Disk]) -> None:
        """Deal by these measured rates, where transfers have not shown others; by their mean for other directories."""
        if not disks:
            return
        write_rate = sum(disk.write_bytes_per_s for disk in disks.values()) // len(disks)
        read_rate = sum(disk.read_bytes_per_s for disk in disks.values()) // len(disks)
        with self._lock:
            for file in (self._files[i] for i in self._current):
                disk = disks.get(file.directory)
                file.writes.expect(disk.write_bytes_per_s if disk else write_rate, guessed=disk is None)
                file.reads.expect(disk.read_bytes_per_s if disk else read_rate, guessed=disk is None)

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

    @property
    def written_bytes(self) -> int:
        """Return the bytes that were written to all directories so far."""
        return sum(file.writes.moved_bytes for file in self._files)

    @property
    def open_ns(self) -> int:
        """Return how long it has been open."""
        return self._io.now_ns() - self._opened_ns

    def uses(self) -> tuple[DirectoryUse, ...]:
        """Return what each directory has done, those of now first, then former ones."""
        with self._lock:
            order = [*self._current, *(i for i in range(len(self._files)) if i not in self._current)]
            total = sum(self._files[i].both_ways_bytes_per_s for i in self._current)
            found: dict[Path, DirectoryUse] = {}
            for i in order:
                file = self._files[i]
                before = found.get(file.directory)  # one that was left, and is used again, has had several files
                if before is None:
                    before = DirectoryUse(
                        directory=file.directory,
                        write_bytes_per_s=file.writes.bytes_per_s,
                        read_bytes_per_s=file.reads.bytes_per_s,
                        share=file.both_ways_bytes_per_s / total if i in self._current else 0.0,
                    )
                found[file.directory] = replace(
                    before,
                    file_bytes=before.file_bytes + file.nbytes,
                    written_bytes=before.written_bytes + file.writes.moved_bytes,
                    read_bytes=before.read_bytes + file.reads.moved_bytes,
                )
        return tuple(found.values())

    def reserve(self, nbytes: int) -> None:
        """Grow the files to at least `nbytes` together, each in proportion to its directory's rate.

        Raises `BudgetError` above the spill budget, `StoreError` when the disks have not enough room.
        """
        with self._lock:
            missing = round_up(nbytes, PAGE_BYTES) - sum(self._files[i].nbytes for i in self._current)
            self._check_room(missing)
            self._spread(max(0, missing), split, self._grow)

    def allocate(self, nbytes: int, label: str) -> Extent:
        """Return room for a value; grows the files when they are full, and raises as `reserve` does.

        A directory's file also grows when another one has free space, so that its share does not go there.
        """
        with self._lock:
            total = round_up(max(1, nbytes), PAGE_BYTES)
            pieces: list[Piece] = []
            try:
                self._check_room(total - sum(self._files[i].free.free_bytes for i in self._current))
                self._spread(total, self._dealer.deal, lambda i, share: self._take(i, share, pieces))
            except (BudgetError, StoreError) as error:
                self._put(pieces)
                raise type(error)(f"{label} ({nbytes} bytes) cannot go to disk: {error}") from error
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
        self._writes.move(extent.label, self._places(extent), view)

    def read(self, extent: Extent, view: memoryview) -> None:
        """Read the value into `view` (page-aligned, whole pages). Raises `StoreError`; the value is lost then."""
        self._reads.move(extent.label, self._places(extent), view)
        if extent.crc is not None and (found := zlib.crc32(view[: extent.nbytes])) != extent.crc:
            where = ", ".join(f"{self._files[p.file].directory} at offset {p.offset}" for p in extent.pieces)
            raise StoreError(
                f"{extent.label} came back from disk changed: checksum {found:08x}, written as "
                f"{extent.crc:08x} ({extent.nbytes} bytes in {where}); it is lost, and so is this step. Check the disk."
            )

    def close(self) -> None:
        """Join the threads and close the files, which frees the disk space. Idempotent."""
        for file in self._files:
            file.close()

    def _places(self, extent: Extent) -> list[tuple[SpillFile, int, int]]:
        return [(self._files[piece.file], piece.offset, piece.nbytes) for piece in extent.pieces]

    def _close_former(self) -> None:
        """Close the files of former directories that nothing is in: nobody reads or writes there."""
        for i, file in enumerate(self._files):
            if i not in self._current and file.is_empty:
                file.close()

    def _traffic(self, name: str) -> Traffic:
        return Traffic(name, self._workers, self._least_bytes, self._io.now_ns)

    def _spread(
        self,
        nbytes: int,
        deal: Callable[[int, Mapping[int, int]], Mapping[int, int]],
        take: Callable[[int, int], int],
    ) -> None:
        """Deal `nbytes` to the directories, each of which will `take` some; what one does not goes to the others.

        Raises `StoreError` for what none takes.
        """
        left, rates = nbytes, {i: self._files[i].both_ways_bytes_per_s for i in self._current}
        while left:
            assert left % PAGE_BYTES == 0, "no whole pages"
            if not rates:
                files = [self._files[i] for i in self._current]
                raise StoreError(
                    f"{_names(files)} refused {left} more bytes for the spill file, all are {self.file_bytes} bytes "
                    f"({', '.join({file.refusal or 'no space left': 0 for file in files})}); "
                    "free some space or name another spill_dir. Nothing is lost."
                )
            for i, share in deal(left, rates).items():
                taken = take(i, share)
                left -= taken
                if taken < share:
                    del rates[i]

    def _take(self, index: int, nbytes: int, pieces: list[Piece]) -> int:
        """Add pieces of a file that grows for it, if it can; return their bytes, `nbytes` or what there is."""
        free = self._files[index].free
        self._grow(index, nbytes - free.free_bytes)
        taken = free.take(nbytes)
        pieces.extend(Piece(index, start, size) for start, size in taken)
        return sum(size for _, size in taken)

    def _put(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._files[piece.file].free.put(piece.offset, piece.nbytes)
        self._close_former()

    def _check_room(self, nbytes: int) -> None:
        """Raise `BudgetError` or `StoreError` if the files cannot be `nbytes` larger together: nothing has changed."""
        if nbytes <= 0:
            return
        if self.file_bytes + nbytes > self.budget_bytes:
            raise BudgetError(
                f"the spill store needs {self.file_bytes + nbytes} bytes of disk; the spill budget is "
                f"{self.budget_bytes} bytes. Raise spill_budget, or host_budget so that less is spilled."
            )
        files = [self._files[i] for i in self._current]
        room_bytes = sum(self._room_bytes(file) for file in files)
        if nbytes > room_bytes:
            raise StoreError(
                f"{_names(files)} {'has' if len(files) == 1 else 'together have'} {room_bytes} bytes free; the spill "
                f"store needs {nbytes} more there. Free some space, lower spill_budget, or name another spill_dir. "
                "Nothing is lost."
            )

    def _room_bytes(self, file: SpillFile) -> int:
        return self._io.free_bytes(file.fd) // PAGE_BYTES * PAGE_BYTES

    def _grow(self, index: int, nbytes: int) -> int:
        """Grow a file by `nbytes`, or by the pages that budget and disk have room for; return by how much."""
        file = self._files[index]
        nbytes = min(nbytes, (self.budget_bytes - self.file_bytes) // PAGE_BYTES * PAGE_BYTES)
        nbytes = min(nbytes, self._room_bytes(file)) if nbytes > 0 else 0
        if nbytes <= 0:
            return 0
        try:
            self._io.allocate(file.fd, file.nbytes, nbytes)
        except OSError as error:
            file.refusal = str(error.strerror or error)
            return 0
        file.free.put(file.nbytes, nbytes)
        file.nbytes += nbytes
        file.refusal = ""
        return nbytes


def _names(files: Sequence[SpillFile]) -> str:
    return ", ".join(str(file.directory) for file in files)
