"""Copy device memory to the host piece by piece, update it there, and copy it back: for parameters that are not
offloaded, and whose optimizer's state is in host memory.

While the host works on one piece, the next ones are copied out and the last ones in. A piece's buffer has
the bytes that came out, and then those that go in.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event, Lane
from tencache_fx.units import PAGE_BYTES, round_up

PIECE_BYTES = 32 << 20
_DEPTH = 4  # pieces under way: one coming out, one worked on, one going in, and one to spare
_SOURCES = 2  # each in a buffer of its own: compilers take two views of one memory for the same

Round = tuple[tuple[Buffer, ...], ...]
"""The buffers of the pieces under way, one for each source."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Generic[_T]):
    """Device memory, 1-D, at most `PIECE_BYTES` of each: two `sources` come out; `target`, like the first, is written.

    `about` is the caller's.
    """

    sources: tuple[Tensor, ...]
    target: Tensor
    about: _T


def round_shape(sizes_bytes: Collection[int]) -> tuple[int, int]:
    """Return how many buffers, and of how many bytes each, a round takes for sources of these sizes.

    >>> round_shape([]), round_shape([100]), round_shape([100, 3 << 30])
    ((0, 0), (2, 4096), (8, 33554432))
    """
    count = sum(-(-nbytes // PIECE_BYTES) for nbytes in sizes_bytes)
    return _SOURCES * min(count, _DEPTH), round_up(min(PIECE_BYTES, max(sizes_bytes, default=0)), PAGE_BYTES)


@contextlib.contextmanager
def open_round(engine: Engine, sizes_bytes: Collection[int]) -> Iterator[Round]:
    """Acquire the buffers for the pieces of sources of these sizes.

    Raises `BudgetError` when there is no room for them.
    """
    acquired: list[Buffer] = []
    try:
        count, nbytes = round_shape(sizes_bytes)
        while len(acquired) < count:
            acquired.append(engine.object_buffers.acquire(nbytes, Use.ROUND))
        yield tuple(zip(*(acquired[k::_SOURCES] for k in range(_SOURCES)), strict=True))
    except BaseException:
        # Whoever handles this may free what is still being copied.
        engine.streams.wait_host([event for buffer in acquired for event in buffer.after])
        raise
    finally:
        for buffer in acquired:
            engine.pool.release(buffer)


def work_on_host(
    engine: Engine, opened: Round, pieces: Iterable[Piece[_T]], work: Callable[[_T, tuple[Tensor, ...]], None]
) -> None:
    """Copy the sources of each piece out; let `work(about, copies)` turn the first into what goes in.

    The round was `opened` for sources of their sizes.

    Returns once all work is done; what the caller's compute stream does next comes behind the last copy in. A piece is
    read and written behind all that this stream had been given when the piece was taken from `pieces`. Raises what
    `work` or a copy raises: then pieces before that one are done, later ones untouched.
    """
    streams = engine.streams
    waiting: deque[tuple[Piece[_T], tuple[Buffer, ...]]] = deque()
    came_in: list[Event] = []
    free = deque(opened)
    for piece in itertools.chain(pieces, itertools.repeat(None)):
        if piece is not None:
            buffers = free.popleft()
            after = (streams.record_compute(), *(event for buffer in buffers for event in buffer.after))
            for buffer, source in zip(buffers, piece.sources, strict=True):
                buffer.after = (streams.copy(Lane.OUT, _like(buffer, source), source, after),)
            waiting.append((piece, buffers))
        if not waiting:
            break
        if piece is None or len(waiting) == _DEPTH - 1:
            done, buffers = waiting.popleft()
            for event in (event for buffer in buffers for event in buffer.after):
                event.synchronize()
            copies = tuple(map(_like, buffers, done.sources))
            work(done.about, copies)
            came_in.append(streams.copy(Lane.IN, done.target, copies[0]))
            buffers[0].after = (came_in[-1],)
            free.append(buffers)
    for event in came_in:
        streams.wait_compute(event)  # the last is behind all others, but each may have failed


def _like(buffer: Buffer, tensor: Tensor) -> Tensor:
    return buffer.memory[: tensor.nbytes].view(tensor.dtype)
