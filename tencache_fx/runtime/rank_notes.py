"""What ranks write down about themselves where all others can read it: the store of their process group.

tencache/ranks/changes              how often a note was written: all that a reader asks for while nothing happens
tencache/ranks/note/RANK            a rank's note, or "none" once it is withdrawn
tencache/ranks/issued/RANK          the collectives that it has issued, a second ago or less
tencache/ranks/host/HOST/count      how many ranks have entered the list of their host
tencache/ranks/host/HOST/INDEX      [rank, process, when that started]

Ranks of one host look one another's processes up in /proc: one that was killed can write nothing.
"""

import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tencache_fx.runtime.process_groups import is_served

_KEY = "tencache/ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNote:
    """What has become of a rank.

    `issued` are the collectives that it has issued, by process group; `moves` counts how often its main thread was seen
    to have gone on since.
    """

    rank: int
    state: Literal["failed", "ended", "killed"]
    told: str
    issued: Mapping[str, int] = field(default_factory=dict)
    moves: int = 0


class RankNotes:
    """The notes of all ranks, as one of them knows and writes them; several threads may."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lock = threading.Lock()
        self._changes = 0
        self._notes: dict[int, RankNote] = {}
        self._host = f"{_KEY}/host/{_host()}"
        self._issued: dict[str, int] | None = None
        self._entries = 0
        self._processes: dict[int, tuple[int, str]] = {}
        index = store.add(f"{self._host}/count", 1) - 1
        store.set(f"{self._host}/{index}", json.dumps([rank, os.getpid(), _start_of(os.getpid())]))
        if store.check([_note_key(rank)]):  # of a former process group
            self.write(None)
        store.add(f"{_KEY}/changes", 0)

    @property
    def is_served(self) -> bool:
        """Whether whoever keeps the store is still there."""
        return is_served(self._store)

    def write(self, note: RankNote | None) -> None:
        """Write this rank's note, or withdraw it."""
        with self._lock:
            self._write(self._rank, note)

    def write_issued(self, issued: Mapping[str, int]) -> None:
        """Write which collectives this rank has issued: what is known of it if it is killed."""
        with self._lock:
            if issued != self._issued:
                self._store.set(_issued_key(self._rank), json.dumps(issued))
                self._issued = dict(issued)

    def read(self) -> tuple[RankNote, ...]:
        """Return the notes of all other ranks that have one; writes those of killed ones, for ranks of other hosts.

        Raises `RuntimeError` (`torch.distributed.DistError`) if whoever keeps the store has ended.
        """
        with self._lock:
            self._read_processes()
            killed = self.killed()  # before notes are read: who ends in good order writes one first
            changes = int(self._store.get(f"{_KEY}/changes"))
            if changes != self._changes:
                notes = [self._read(rank) for rank in range(self._size) if rank != self._rank]
                self._notes = {note.rank: note for note in notes if note is not None}
                self._changes = changes
            for note in killed:
                if note.rank not in self._notes and self._store.check([_issued_key(note.rank)]):
                    issued = json.loads(self._store.get(_issued_key(note.rank)))
                    self._notes[note.rank] = replace(note, issued=issued)
                    self._write(note.rank, self._notes[note.rank])
            return tuple(self._notes.values())

    def killed(self) -> tuple[RankNote, ...]:
        """Return a note for each rank of this host whose process has ended; without the store."""
        return tuple(
            RankNote(rank=rank, state="killed", told=f"has ended (process {process} on {socket.gethostname()})")
            for rank, (process, start) in self._processes.items()
            if rank != self._rank and _start_of(process) != start
        )

    def _read(self, rank: int) -> RankNote | None:
        if not self._store.check([_note_key(rank)]):
            return None
        text = self._store.get(_note_key(rank)).decode()
        return None if text == "none" else RankNote(**json.loads(text))

    def _write(self, rank: int, note: RankNote | None) -> None:
        self._store.set(_note_key(rank), "none" if note is None else json.dumps(asdict(note)))
        self._store.add(f"{_KEY}/changes", 1)

    def _read_processes(self) -> None:
        count = int(self._store.get(f"{self._host}/count"))
        while self._entries < count and self._store.check([entry := f"{self._host}/{self._entries}"]):
            rank, process, start = json.loads(self._store.get(entry))
            self._processes[rank] = process, start
            self._entries += 1


def _note_key(rank: int) -> str:
    return f"{_KEY}/note/{rank}"


def _issued_key(rank: int) -> str:
    return f"{_KEY}/issued/{rank}"


def _host() -> str:
    """Return what names this host, and on it the processes that see one another in /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()}/{_link('/proc/self/ns/pid')}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "none"


def _start_of(process: int) -> str:
    """Return when a process started, in ticks since the host did; nothing of one that has ended (proc_pid_stat(5))."""
    try:
        text = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return ""
    fields = text.rpartition(b")")[2].decode().split()
    return "" if fields[0] in "ZX" else fields[19]
