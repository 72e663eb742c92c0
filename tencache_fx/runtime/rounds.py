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

from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.pool import Buffer, Use
from tencache_fx.runtime.streams import Event, Lane

PIECE_BYTES = 32 << 20
_DEPTH = 4  # pieces under way: one coming out, one worked on, one going in, and one to spare

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Generic[_T]):
    """At most `PIECE_BYTES` of device memory: `source` comes out, `target` (as many bytes) is written; both 1-D.

    `about` is the caller's.
    """

    source: Tensor
    target: Tensor
    about: _T


def work_at_home(engine: Engine, pieces: Iterable[Piece[_T]], work: Callable[[_T, Tensor], None]) -> None:
    """Copy each piece's source out, let `work(about, memory)` turn it into what is copied to its target.

    `memory` is host memory that looks like the source. Returns once all work is done; what the caller's compute stream
    does next comes behind the last copy in. A piece is read and written behind all that this stream had been given when
    the piece was taken from `pieces`. Raises `BudgetError` when there is no room for the buffers, and what `work` or a
    copy raises: then pieces before that one are done, later ones untouched.
    """
    streams, pool = engine.streams, engine.pool
    waiting: deque[tuple[Piece[_T], Buffer, Event]] = deque()
    lent: list[Buffer] = []
    free: deque[Buffer] = deque()
    came_in: list[Event] = []
    try:
        for piece in itertools.chain(pieces, itertools.repeat(None)):
            if piece is not None:
                if len(lent) < _DEPTH:
                    lent.append(pool.lend(PIECE_BYTES, Use.ROUND))
                    free.append(lent[-1])
                buffer = free.popleft()
                after = (streams.record_compute(), *buffer.after)
                out = streams.copy(Lane.OUT, _like(buffer, piece.source), piece.source, after)
                buffer.after = (out,)
                waiting.append((piece, buffer, out))
            if not waiting:
                break
            if piece is None or len(waiting) == _DEPTH - 1:
                done, buffer, out = waiting.popleft()
                out.synchronize()
                memory = _like(buffer, done.source)
                work(done.about, memory)
                came_in.append(streams.copy(Lane.IN, done.target, memory, (out,)))
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


def _like(buffer: Buffer, tensor: Tensor) -> Tensor:
    return buffer.memory[: tensor.nbytes].view(tensor.dtype)
