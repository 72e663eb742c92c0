"""The order in which chunks of parameters are copied in and updated, and how far copies in run ahead of updates."""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from tencache_fx.errors import TencacheError
from tencache_fx.model_state.streamed_update import Chunk, UpdateStream
from tencache_fx.model_state.update_chunks import Wanted


class ChunkQueue:
    """Chunks that are updated one behind the other: copies in of the first ones have begun, as many as have room.

    `prepare` makes the updates of a chunk, before anything of it is copied. For one thread.
    """

    def __init__(
        self, chunks: Iterable[list[Wanted]], prepare: Callable[[list[Wanted]], Chunk], stream: UpdateStream
    ) -> None:
        self._left, self._started = deque(chunks), deque[Chunk]()
        self._prepare, self._stream = prepare, stream
        self._prepared: Chunk | None = None  # the first of those left
        self._error: Exception | None = None

    @property
    def moves(self) -> int:
        """Return how many times the copies of a chunk, in or out, have yet to begin."""
        return 2 * len(self._left) + len(self._started)

    def start(self) -> bool:
        """Begin the copies in of the next chunk, if there is one, and room for it; return whether they have begun."""
        if self._error is not None:
            raise self._error
        if not self._left:
            return False
        if self._prepared is None:
            self._prepared = self._prepare(self._left[0])
        if not self._stream.has_room(self._prepared):
            return False
        self._stream.start(self._prepared)
        self._started.append(self._prepared)
        self._left.popleft()
        self._prepared = None
        return True

    def start_ahead(self) -> None:
        """Begin copies in amid the update of a chunk; it is not to blame for what they raise, which `start` does later.

        Interrupts end the update.
        """
        if not self._left:
            return
        try:
            with torch.no_grad():
                while self.start():
                    pass
        except (RuntimeError, TencacheError) as error:
            self._error = error

    def take(self) -> Chunk:
        """Return the first chunk whose copies in have begun; it is to be updated now."""
        return self._started.popleft()
