"""Ranks hear of one another's failures: who waits for a rank that has failed ends within 30 seconds, and says why.

A rank that raises and lives on, or that is killed, leaves the others in a collective until the timeout of their process
group, ten minutes with NCCL. A collective that waits cannot tell a rank that has failed from one that takes its time:

    rank 1 raises in region 2; it writes down that it has failed, with 41 collectives issued
    rank 0 reads that within a second; it has issued 42, so it waits for rank 1
    ten seconds later it still does: it logs why, aborts its collectives, and ends if that does not set it free

A rank whose main thread does anything else meanwhile is not taken for failed, nor for waiting if it comes to another
line, or issues more. A rank that goes on to another stage withdraws its failure. If all ranks fail alike, and go on,
none waits for another.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.util import Finalize

import torch.distributed as dist

from tencache_fx.errors import RankError
from tencache_fx.runtime.process_groups import abort_collectives, issued_collectives, store_connection
from tencache_fx.runtime.rank_notes import RankNote, RankNotes

log = logging.getLogger("tencache_fx")

TORCH_ERRORS = (RuntimeError, ValueError, LookupError, AttributeError, AssertionError, OSError)
"""What torch's process groups and stores raise where one of them has ended; their own errors are RuntimeErrors."""
POLL_S = 1.0
GRACE_S = 10.0
"""How long a rank waits for one that has failed before it ends."""
LEAVE_S = 5.0
"""How long its main thread has to leave a collective that was aborted, before the process is ended."""
_BUSY = 0.2
"""With more than this share of a core a main thread does something, and does not only look whether it may go on."""
LOST_S = 2.5
"""How long an error that may come of a lost connection is held back until it is known what the other rank died of."""

_Place = tuple[int, int]


class RankWatch:
    """Watches the other ranks of the default process group in a thread of its own, for as long as that exists."""

    def __init__(self) -> None:
        """Begin to watch; raises `RuntimeError` if that group's store has no second connection."""
        self.process = os.getpid()
        self.cause: str | None = None  # why this rank's collectives were aborted
        self._group = weakref.ref(dist.GroupMember.WORLD)  # kept alive, it would stand in the way of the next group
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._notes = RankNotes(store_connection(), self._rank, self._size)
        self._lock = threading.Lock()
        self._mine: RankNote | None = None
        self._told_error = 0
        self._last: tuple[float, _Place, float] = 0.0, (0, 0), 0.0  # when the main thread was seen, where, its CPU time
        self._waiting: dict[tuple[object, ...], float] = {}  # for whom, and where either stands, since when
        self._at_exit = Finalize(None, self._note_end, exitpriority=100)  # for child processes: atexit is not for them
        atexit.register(self._note_end)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tencache-ranks", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    @property
    def is_current(self) -> bool:
        """Whether the default process group is still the one that is watched."""
        return dist.is_initialized() and dist.GroupMember.WORLD is self._group()

    def go_on(self) -> None:
        """Withdraw a failure of this rank; raises `RankError` if its collectives were aborted."""
        self._told_error = 0
        if self.cause is not None:
            raise RankError(self.cause)
        if self._mine is not None:
            self._note(None)

    def fail(self, error: BaseException, what: str) -> None:
        """Write down that this rank has failed in `what`; add to the error what is known of other ranks."""
        if self._told_error == id(error):  # by a stage within this one
            return
        self._told_error = id(error)
        told = f"failed in {what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self._note(RankNote(rank=self._rank, state="failed", told=told, issued=issued_collectives()))
        if _may_be_lost(error) and (cause := self.cause or self._find_cause()) is not None:
            error.add_note(cause)

    def _note_end(self) -> None:
        """Write down that this process ends, in good order or not."""
        self._forget_exit()
        with contextlib.suppress(*TORCH_ERRORS):
            if not self._notes.is_served:
                return
            told = "has ended" if self._mine is None else f"{self._mine.told.rstrip('.')}; it has ended"
            issued = issued_collectives() if self.is_current else {}
            self._notes.write(RankNote(rank=self._rank, state="ended", told=told, issued=issued))

    def _note(self, note: RankNote | None, before: RankNote | None = None) -> None:
        """Write this rank's note; only if it still is the one `before`, if that is said."""
        with self._lock:
            if before is not None and self._mine is not before:
                return
            self._mine = note
            try:
                self._notes.write(note)
            except TORCH_ERRORS as error:
                log.warning("rank %d cannot tell the others how it is: %s", self._rank, error)

    def _stop(self) -> None:
        """End the thread before the interpreter is taken down.

        After that Python ends a thread that asks for its lock, by unwinding it. If that is in a call of the store, the
        process aborts, for C++ there may not raise: "terminate called without an active exception".
        """
        if os.getpid() == self.process:
            self._over.set()
            self._thread.join(LEAVE_S)

    def _watch(self) -> None:
        try:
            while self.is_current and self.cause is None and not self._over.is_set():
                self._look()
                self._over.wait(POLL_S)
            if self.cause is None and not self._over.is_set():  # the process group is left
                self._forget_exit()  # nobody there waits for this rank any more
                if self._notes.is_served:
                    self._notes.write_issued({})
        except TORCH_ERRORS as error:  # whoever keeps the store has ended
            log.debug("rank %d watches the others no longer: %s", self._rank, error)
        finally:
            atexit.unregister(self._stop)

    def _forget_exit(self) -> None:
        self._at_exit.cancel()
        atexit.unregister(self._note_end)

    def _look(self) -> None:
        """End this rank if it waits for one that has failed; say anew how far it is if it has itself."""
        now, place, issued = time.monotonic(), _place_of_main_thread(), issued_collectives()
        (before, last_place, last_cpu_s), cpu_s = self._last, _cpu_s_of_main_thread()
        moved = place != last_place or cpu_s - last_cpu_s > _BUSY * (now - before)
        self._last = now, place, cpu_s
        self._notes.write_issued(issued)
        if (mine := self._mine) is not None:
            if moved or mine.issued != issued:
                self._note(replace(mine, issued=issued, moves=mine.moves + moved), before=mine)
            return
        here = place, *issued.items()
        waiting: dict[tuple[object, ...], RankNote] = {
            (note.rank, note.moves, *here): note for note in self._notes.read() if _waits_for(note, issued)
        }
        self._waiting = {each: self._waiting.get(each, now) for each in waiting}
        for each, since in self._waiting.items():
            if now - since >= GRACE_S and self.cause is None:
                self._leave(self._told(waiting[each]), place)

    def _leave(self, cause: str, place: _Place) -> None:
        """Abort this rank's collectives; end the process if its main thread waits on."""
        self.cause = cause
        log.error("rank %d: %s This rank waits for it, and aborts its collectives.", self._rank, cause)
        aborting = threading.Thread(target=self._abort, name="tencache-abort", daemon=True)
        aborting.start()
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until:
            time.sleep(LEAVE_S / 50)
            if _place_of_main_thread() != place:
                return
        log.critical("rank %d: %s This rank still waits for it, and ends now.", self._rank, cause)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)

    def _abort(self) -> None:
        try:
            abort_collectives()
        except TORCH_ERRORS as error:
            log.warning("rank %d cannot abort its collectives: %s", self._rank, error)

    def _find_cause(self) -> str | None:
        """Return why this rank may have lost another one, which it may learn a little later; None if none failed."""
        until = time.monotonic() + LOST_S
        while True:
            try:
                issued = issued_collectives()
                notes = [note for note in self._notes.read() if note.state != "ended" or _waits_for(note, issued)]
            except TORCH_ERRORS:
                notes = list(self._notes.killed())
            if notes:
                return self._told(min(notes, key=lambda note: (note.state != "killed", note.rank)))
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_S / 10)

    def _told(self, note: RankNote) -> str:
        return f"rank {note.rank} of {self._size} {note.told.rstrip('.')}."


def _waits_for(note: RankNote, issued: Mapping[str, int]) -> bool:
    """Return whether a rank that has `issued` these collectives has one among them that another one has not issued."""
    return any(count > note.issued[group] for group, count in issued.items() if group in note.issued)


def _may_be_lost(error: BaseException) -> bool:
    """Return whether an error may come of another rank's end: backends raise a `RuntimeError` then, with such words."""
    words = ("connection", "gloo", "nccl", "peer", "rank")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _cpu_s_of_main_thread() -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def _place_of_main_thread() -> _Place:
    """Return which frame the main thread is in, and where in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)
