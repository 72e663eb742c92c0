"""Moves the values of the spill store block by block, straight from and to pool buffers."""

from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from functools import partial

from tencache_fx.errors import StoreError
from tencache_fx.runtime.spill_files import SpillFile
from tencache_fx.runtime.traffic import Traffic
from tencache_fx.units import PAGE_BYTES

_ZERO_PROGRESS_TRIES = 8


@dataclass(frozen=True, slots=True)
class BlockTransfers:
    """Moves values one way, down to disk or up from it; `fate` is what an error message says of the value.

    `admit` is called with the bytes of each block before it is moved, and may block.
    """

    traffic: Callable[[SpillFile], Traffic]
    call: Callable[[int, memoryview, int], int]
    verb: str
    fate: str
    block_bytes: int
    admit: Callable[[int], None] = lambda _: None

    def move(self, label: str, places: Sequence[tuple[SpillFile, int, int]], view: memoryview) -> None:
        """Move `view` from or to these places `(file, offset, nbytes)`, one behind the other, all blocks in parallel.

        Returns, or raises the first `StoreError`, when all have ended: nobody uses `view` any more.
        """
        blocks: list[tuple[SpillFile, memoryview, int]] = []
        start = 0
        for file, offset, nbytes in places:
            for skip in range(0, nbytes, self.block_bytes):
                size = min(self.block_bytes, nbytes - skip)
                blocks.append((file, view[start : start + size], offset + skip))
                start += size
        if len(blocks) == 1:
            self._move(label, *blocks[0])
            return
        jobs = [self.traffic(block[0]).threads.begin(self._move, label, *block) for block in blocks]
        wait_futures(jobs)  # all of them, even if one fails: the others still use the buffer
        for job in jobs:
            job.result()

    def _move(self, label: str, file: SpillFile, view: memoryview, offset: int) -> None:
        """Move one block; survives short transfers and names what failed."""
        traffic, done, tries = self.traffic(file), 0, 0
        self.admit(view.nbytes)
        while done < view.nbytes:
            request = partial(self.call, file.fd, view[done:], offset + done)
            try:
                moved = traffic.move(request, view.nbytes - done)
                reason = f"only {done + moved} of {view.nbytes} bytes moved"
            except OSError as error:
                moved, reason, tries = 0, str(error.strerror or error), _ZERO_PROGRESS_TRIES
            # O_DIRECT goes on at a page boundary only: a torn page is moved again.
            whole = moved if done + moved == view.nbytes else moved // PAGE_BYTES * PAGE_BYTES
            done += whole
            tries = 0 if whole else tries + 1
            if tries > _ZERO_PROGRESS_TRIES:
                raise StoreError(
                    f"could not {self.verb} {view.nbytes} bytes of {label} at offset {offset} of the "
                    f"spill file in {file.directory} ({reason}); {self.fate}. Check the disk or name another spill_dir."
                )
