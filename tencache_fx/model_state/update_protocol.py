"""What threads that update offloaded parameters are given, and how."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from tencache_fx.model_state.update_room import Begun, Room


class Update(Protocol):
    """One parameter's update, whose parts may each run in either place, with the same result.

    One with its state on disk has one part.
    """

    @property
    def parts(self) -> int:
        """Return how many parts there are."""

    def on_host(self, part: int) -> None:
        """Carry a part out."""

    def on_device(self, part: int, room: Room) -> Begun:
        """Issue a part."""

    def on_disk(self) -> Begun:
        """Begin it with state that is on disk."""

    def end(self, error: BaseException | None) -> None:
        """End it once no part is under way: all of them are done, or one has failed, and others have not begun."""


class Submit(Protocol):
    """Submits an update, see `Updates.submit`."""

    def __call__(
        self,
        update: Update,
        urgency: int,
        can_begin: Callable[[], bool],
        *,
        on_disk: bool = False,
        note: Callable[["Future[None]"], object] | None = None,
    ) -> "Future[None]":
        """Have it done once it can begin.

        `note`, if there is one, is called first, with what this returns. Whoever waits for that from then on has the
        update done, even if an interrupt comes before all else here.
        """
