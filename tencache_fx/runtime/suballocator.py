"""Gradients in parts of transfer buffers, which are full at the end of the forward, and free at that of the backward.

A *block* is a transfer buffer that was opened for gradients; its *parts* are suballocated to them. It serves transfers
again once its last part is released. The pool decides which buffer may be opened.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.streams import Event


@dataclass(slots=True)
class _Room:
    """Where in a block its parts are, in order; `after` are copies that may still touch the gaps.

    No gap is larger than `most_bytes`.
    """

    most_bytes: int
    after: tuple[Event, ...] = ()
    parts: list[Buffer] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def place(self, block: Buffer, nbytes: int) -> Buffer | None:
        """Return a part in the first gap of `nbytes`, if there is one."""
        start = index = 0
        while index < len(self.parts) and self.starts[index] - start < nbytes:
            start = self.starts[index] + self.parts[index].nbytes
            index += 1
        if index == len(self.parts) and block.nbytes - start < nbytes:
            self.most_bytes = nbytes - 1
            return None
        placed = block.piece(start, nbytes, Use.GRADIENT)
        self.starts.insert(index, start)
        self.parts.insert(index, placed)
        return placed

    def remove(self, block: Buffer, part: Buffer) -> None:
        """Make a gap of a part, of which there may be a larger one now."""
        index = self.parts.index(part)
        del self.parts[index], self.starts[index]
        self.most_bytes = block.nbytes


class Suballocator:
    """Knows the blocks. Not thread-safe: the pool's lock guards it."""

    def __init__(self) -> None:
        self._rooms: dict[Buffer, _Room] = {}
        self._most_bytes = 0  # no gap in any of them is larger
        self.opened: Counter[tuple[Use, int]] = Counter()
        """How many buffers of each class are open now."""

    def parts(self) -> Iterator[Buffer]:
        """Yield the parts that are acquired."""
        for room in self._rooms.values():
            yield from room.parts

    def open(self, block: Buffer, nbytes: int) -> Buffer:
        """Make a free buffer a block, with parts behind the copies that still touch it; return a part of it."""
        assert not block.holders, "somebody has the buffer"
        room = self._rooms[block] = _Room(block.nbytes, block.after)
        block.after = ()
        self.opened[block.use, block.nbytes] += 1
        self._most_bytes = max(self._most_bytes, block.nbytes)
        part = self._place(block, room, nbytes)
        assert part is not None, "it was empty"
        return part

    def place(self, nbytes: int) -> Buffer | None:
        """Return a part of the first block that has room; None if none has. `nbytes` are whole pages.

        The block that was opened first fills up first, so that the later ones are empty sooner.
        """
        if nbytes > self._most_bytes:
            return None
        for block, room in self._rooms.items():
            if nbytes <= room.most_bytes and (part := self._place(block, room, nbytes)) is not None:
                return part
        self._most_bytes = nbytes - 1
        return None

    def _place(self, block: Buffer, room: _Room, nbytes: int) -> Buffer | None:
        part = room.place(block, nbytes)
        if part is not None:
            part.after = room.after = _pending(room.after)
        return part

    def free(self, part: Buffer) -> Buffer | None:
        """Free a part behind its `after`; return the block if it was its last one: that is open no more."""
        block = part.block
        assert block is not None
        room = self._rooms[block]
        room.remove(block, part)
        room.after = _pending((*room.after, *part.after))
        if room.parts:
            self._most_bytes = max(self._most_bytes, block.nbytes)
            return None
        del self._rooms[block]
        self.opened[block.use, block.nbytes] -= 1
        block.after = room.after
        return block


def _pending(events: tuple[Event, ...]) -> tuple[Event, ...]:
    if len(events) < 2:  # most often: no generator for these
        return () if not events or events[0].query() else events
    return tuple(event for event in dict.fromkeys(events) if not event.query())
