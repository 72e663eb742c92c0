"""Counts backwards from one update of a parameter in host memory to the next."""

import weakref

from tencache_fx.model_state.offloaded_parameter import OffloadedParameter

_CHANGES = 2  # of the count, for each of which something is planned anew


class BackwardCounter:
    """Counts what is noted between two updates of one parameter.

    `per_update` is the last such count; None before there were two updates. If it changes again and again, it stays as
    it was after the second change. `count` is how many came since the last update that was seen. The last
    `plain_updates` came after one backward each.
    """

    def __init__(self) -> None:
        self.per_update: int | None = None
        self._parameter: weakref.ref[OffloadedParameter] | None = None
        self._updates = self.count = self.plain_updates = 0
        self._begun = False  # the count began with an update
        self._changes = -1

    def watch(self, parameter: OffloadedParameter | None) -> None:
        """Watch a parameter from now on, if that is another one."""
        if parameter is None or (self._parameter is not None and self._parameter() is parameter):
            return
        self._parameter, self._updates, self._begun = weakref.ref(parameter), parameter.updates, False

    @property
    def adds(self) -> bool:
        """Return whether the next backward adds to a gradient of one before: there was no update in between."""
        parameter = None if self._parameter is None else self._parameter()
        return bool(self.count) and parameter is not None and parameter.parameter.grad is not None

    def note(self) -> None:
        """Count one more backward, or one more round of several."""
        self.count += 1

    def look(self) -> None:
        """See whether there was an update since the last look."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None or parameter.updates == self._updates:
            return
        if self._begun and self.count not in (0, self.per_update) and self._changes < _CHANGES:
            self.per_update = self.count
            self._changes += 1
        if self.count:
            self.plain_updates = self.plain_updates + 1 if self.count == 1 else 0
        self._updates, self.count, self._begun = parameter.updates, 0, True
