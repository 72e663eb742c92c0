"""Gradients in pieces of buffers for trips: at the end of the forward those are full, at the end of the backward free.

A *host* is a buffer for trips that was opened for gradients; its *tenants* are those that are in it. It is one for
trips again when the last of them has gone. Which buffer may be opened is the pool's to say.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.streams import Event


@dataclass(slots=True)
class _Room:
    """`starts` says where in the host each tenant is; `after` are copies that may still touch what others left."""

    starts: dict[Buffer, int] = field(default_factory=dict)
    after: tuple[Event, ...] = ()

    def find(self, nbytes: int, host_bytes: int) -> int | None:
        """Return where the first gap of `nbytes` starts, if there is one."""
        start = 0
        for taken, tenant in sorted((taken, tenant.nbytes) for tenant, taken in self.starts.items()):
            if taken - start >= nbytes:
                break
            start = taken + tenant
        else:
            return start if host_bytes - start >= nbytes else None
        return start


class Suballocator:
    """Knows the hosts. Not thread-safe: the pool's lock guards it."""

    def __init__(self) -> None:
        self._rooms: dict[Buffer, _Room] = {}
        self.opened: Counter[tuple[Use, int]] = Counter()
        """How many buffers of each class are open now."""

    def tenants(self) -> Iterator[Buffer]:
        """Yield the pieces that are lent."""
        for room in self._rooms.values():
            yield from room.starts

    def open(self, host: Buffer) -> None:
        """Make a free buffer a host: it has room for tenants now, behind the copies that still touch it."""
        assert not host.holds, "somebody has the buffer"
        self._rooms[host] = _Room(after=host.after)
        host.after = ()
        self.opened[host.use, host.nbytes] += 1

    def place(self, nbytes: int) -> Buffer | None:
        """Return a piece of the first host that has room; None if none has. `nbytes` are whole pages.

        The host that was opened first fills up first, so that the later ones are empty sooner.
        """
        for host, room in self._rooms.items():
            start = room.find(nbytes, host.nbytes)
            if start is not None:
                room.after = _pending(room.after)
                tenant = host.piece(start, nbytes, Use.GRADIENT)
                tenant.after = room.after
                room.starts[tenant] = start
                return tenant
        return None

    def leave(self, tenant: Buffer) -> Buffer | None:
        """Take a piece back, behind its `after`; return the host if it was the last one: that is open no more."""
        host = tenant.host
        assert host is not None
        room = self._rooms[host]
        del room.starts[tenant]
        room.after = _pending((*room.after, *tenant.after))
        if room.starts:
            return None
        del self._rooms[host]
        self.opened[host.use, host.nbytes] -= 1
        host.after = room.after
        return host


def _pending(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in dict.fromkeys(events) if not event.query())
