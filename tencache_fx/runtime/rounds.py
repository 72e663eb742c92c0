"""Bring device memory to the host piece by piece, work on it there, and take it back: the runtime's side of an
optimizer whose state is at home.

While the host works on one piece, the next ones are on their way out and the last ones on their way in. A piece's
buffer holds what came out, and then what goes in.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from tencache_fx.plan import round_up
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.pool import Buffer, Use
from tencache_fx.runtime.streams import Event, Lane

PIECE_BYTES = 32 << 20
_DEPTH = 4  # pieces under way: one coming out, one worked on, one going in, and one to spare
_ALIGN_BYTES = 64

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Generic[_T]):
    """Device memory, 1-D, at most `PIECE_BYTES` of each: `sources` come out, `target`, like the first, is written.

    `about` is the caller's.
    """

    sources: tuple[Tensor, ...]
    target: Tensor
    about: _T


def work_at_home(
    engine: Engine, pieces: Iterable[Piece[_T]], count: int, work: Callable[[_T, tuple[Tensor, ...]], None]
) -> None:
    """Copy the sources of each of `count` pieces out; let `work(about, copies)` turn the first into what goes in.

    Returns once all work is done; what the caller's compute stream does next comes behind the last copy in. A piece is
    read and written behind all that this stream had been given when the piece was taken from `pieces`. Raises
    `BudgetError` when there is no room for the buffers, before anything is taken, and what `work` or a copy raises:
    then pieces before that one are done, later ones untouched.
    """
    streams, pool = engine.streams, engine.pool
    waiting: deque[tuple[Piece[_T], Buffer, tuple[Event, ...]]] = deque()
    lent: list[Buffer] = []
    came_in: list[Event] = []
    try:
        while len(lent) < min(count, _DEPTH):
            lent.append(pool.lend(2 * (PIECE_BYTES + _ALIGN_BYTES), Use.ROUND))
        free = deque(lent)
        for piece in itertools.chain(pieces, itertools.repeat(None)):
            if piece is not None:
                buffer = free.popleft()
                after = (streams.record_compute(), *buffer.after)
                pairs = zip(_like(buffer, piece.sources), piece.sources, strict=True)
                buffer.after = tuple(streams.copy(Lane.OUT, copy, source, after) for copy, source in pairs)
                waiting.append((piece, buffer, buffer.after))
            if not waiting:
                break
            if piece is None or len(waiting) == _DEPTH - 1:
                done, buffer, came_out = waiting.popleft()
                for event in came_out:
                    event.synchronize()
                copies = _like(buffer, done.sources)
                work(done.about, copies)
                came_in.append(streams.copy(Lane.IN, done.target, copies[0], came_out))
                buffer.after = (came_in[-1],)
                free.append(buffer)
        for event in came_in:
            streams.wait_compute(event)  # the last is behind all others, but each may have failed
    except BaseException:
        # Whoever handles this may free what is still being copied.
        streams.settle([event for buffer in lent for event in buffer.after])
        raise
    finally:
        for buffer in lent:
            pool.give_back(buffer)


def _like(buffer: Buffer, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the buffer's memory as so many tensors of these sizes, one behind the other."""
    starts = itertools.accumulate((round_up(tensor.nbytes, _ALIGN_BYTES) for tensor in tensors), initial=0)
    return tuple(
        buffer.memory[start : start + tensor.nbytes].view(tensor.dtype)
        for start, tensor in zip(starts, tensors, strict=False)
    )
