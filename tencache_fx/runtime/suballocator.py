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
    """`starts` says where in the block each part is; `after` are copies that may still touch the gaps."""

    starts: dict[Buffer, int] = field(default_factory=dict)
    after: tuple[Event, ...] = ()

    def find(self, nbytes: int, block_bytes: int) -> int | None:
        """Return where the first gap of `nbytes` starts, if there is one."""
        start = 0
        for taken, part in sorted((taken, part.nbytes) for part, taken in self.starts.items()):
            if taken - start >= nbytes:
                break
            start = taken + part
        else:
            return start if block_bytes - start >= nbytes else None
        return start


class Suballocator:
    """Knows the blocks. Not thread-safe: the pool's lock guards it."""

    def __init__(self) -> None:
        self._rooms: dict[Buffer, _Room] = {}
        self.opened: Counter[tuple[Use, int]] = Counter()
        """How many buffers of each class are open now."""

    def parts(self) -> Iterator[Buffer]:
        """Yield the parts that are acquired."""
        for room in self._rooms.values():
            yield from room.starts

    def open(self, block: Buffer) -> None:
        """Make a free buffer a block: it has room for parts now, behind the copies that still touch it."""
        assert not block.holders, "somebody has the buffer"
        self._rooms[block] = _Room(after=block.after)
        block.after = ()
        self.opened[block.use, block.nbytes] += 1

    def place(self, nbytes: int) -> Buffer | None:
        """Return a part of the first block that has room; None if none has. `nbytes` are whole pages.

        The block that was opened first fills up first, so that the later ones are empty sooner.
        """
        for block, room in self._rooms.items():
            start = room.find(nbytes, block.nbytes)
            if start is not None:
                room.after = _pending(room.after)
                part = block.piece(start, nbytes, Use.GRADIENT)
                part.after = room.after
                room.starts[part] = start
                return part
        return None

    def free(self, part: Buffer) -> Buffer | None:
        """Free a part behind its `after`; return the block if it was its last one: that is open no more."""
        block = part.block
        assert block is not None
        room = self._rooms[block]
        del room.starts[part]
        room.after = _pending((*room.after, *part.after))
        if room.starts:
            return None
        del self._rooms[block]
        self.opened[block.use, block.nbytes] -= 1
        block.after = room.after
        return block


def _pending(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in dict.fromkeys(events) if not event.query())
