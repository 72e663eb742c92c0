"""The weights that a streamed step has begun to write, and how those who read them learn that it has ended."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.runtime.streams import Event


class Write:
    """What the readers of a weight wait for that a step writes: `settle` ends the step's writes where it has not.

    Nothing here wakes a reader, for whoever would may be interrupted. Each reader asks for the end by itself.
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle: Callable[[], None] | None = settle  # None once it has ended
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._settle is None

    def exception(self) -> BaseException | None:
        """Block until it has ended; return how it failed."""
        if (settle := self._settle) is not None:
            settle()
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """End it."""
        self._error = error
        self._settle = None


@dataclass(eq=False)
class Departure:
    """The copies out of updates of some `parameters`: their `event`, once they are queued.

    `writes` are the weights in host memory, each with what its readers wait for. Who has noted where the states are
    sets `kept`.
    """

    parameters: list[Tensor]
    settle: Callable[[], None]
    writes: list[tuple[OffloadedParameter, Write]] = field(default_factory=list)
    event: Event | None = None
    kept: bool = False

    def begin_write(self, offloaded: OffloadedParameter) -> Write:
        """Return what the readers of a weight are to wait for."""
        write = Write(self.settle)
        self.writes.append((offloaded, write))
        return write

    def fail(self, error: BaseException) -> None:
        """Tell the readers of all weights that have not been told yet."""
        for _, write in self.writes:
            if not write.done():
                write.end(error)
