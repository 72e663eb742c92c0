"""The rate of a disk that is read and written at once, with direct I/O: what a step waits for whose state is there.

    python examples/bench/disk.py /scratch

Some files are read while as many others are written, by as many threads of each kind as our store has. Prints one JSON
line: bytes moved both ways over the time it took.
"""

import argparse
import json
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tencache_fx.runtime.store import WORKERS

PIECE_BYTES = 16 << 20


def move(path: Path, nbytes: int, *, write: bool) -> None:
    """Read or write a file of `nbytes` from its beginning, past the page cache."""
    piece = mmap.mmap(-1, PIECE_BYTES)  # page-aligned, as direct I/O wants it
    file = os.open(path, (os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY) | os.O_DIRECT, 0o600)
    try:
        for offset in range(0, nbytes, PIECE_BYTES):
            moved = os.pwritev(file, [piece], offset) if write else os.preadv(file, [piece], offset)
            if moved != PIECE_BYTES:
                raise OSError(f"{moved} of {PIECE_BYTES} bytes were moved at {offset} of {path}.")
    finally:
        os.close(file)


def rate(directory: Path, names: list[tuple[str, bool]], nbytes: int) -> int:
    """Return bytes per second over all of these files, each read, or written where its flag says so, by a thread."""
    start_ns = time.perf_counter_ns()
    with ThreadPoolExecutor(len(names)) as threads:
        for done in [threads.submit(move, directory / name, nbytes, write=write) for name, write in names]:
            done.result()
    return len(names) * nbytes * 10**9 // (time.perf_counter_ns() - start_ns)


def main() -> None:
    """Measure writing, reading, and both at once, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=int, default=2, help="the size of each file")
    arguments = parser.parse_args()
    nbytes = arguments.gib << 30
    old, new = ([f"{kind}{i}" for i in range(WORKERS)] for kind in ("old", "new"))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        at = Path(name)
        written = rate(at, [(each, True) for each in old], nbytes)
        read = rate(at, [(each, False) for each in old], nbytes)
        mixed = rate(at, [*((each, False) for each in old), *((each, True) for each in new)], nbytes)
    print(json.dumps({"write_bytes_per_s": written, "read_bytes_per_s": read, "mixed_bytes_per_s": mixed}))


if __name__ == "__main__":
    main()
