"""The external memory of a region that is planned by itself among others of a step, on a CPU.

A GPU's allocator counts what all hold, so such a plan sees the others there. A CPU's does not. Here the recorder of
steps notes what it sees beside each graph, and the region's own peak is one between the graphs of the others.
"""

import gc
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from tencache_fx.hardware.memory_gauge import Storages
from tencache_fx.runtime.swap_points import SwapPoints


class ExternalMemory:
    """The most external memory of each region when one of its graphs began, in this turn or the last.

    A turn is a round, as the recorder of steps has them. Of a region that is planned by itself it begins with a forward
    while none of the region's waits. What stays on the device by the schedule of the others is not among the bytes: it
    leaves where there is no room.
    """

    def __init__(self, points: SwapPoints) -> None:
        self._points = points
        self._before: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self._alone: set[int] = set()
        self._turns: Counter[int] = Counter()

    @property
    def counts(self) -> bool:
        """Whether nobody else counts it."""
        return not self._points.gauge.counts_all

    def begin_round(self) -> None:
        """Begin a turn of all regions that are planned with their step."""
        for index in {*list(self._before), *list(self._now)} - self._alone:
            self._begin_turn(index)

    def note(self, index: int, own: Storages) -> None:
        """Note what is held when a graph of a region begins, whose inputs are its `own`.

        A backward's own are the inputs of its forward, too.
        """
        self._alone.discard(index)
        self._note(index, own)

    def _note(self, index: int, own: Storages) -> None:
        if self.counts:
            external_bytes = max(0, self._held_bytes(own) - self._points.extra_bytes)
            self._now[index] = max(self._now.get(index, 0), external_bytes)

    def collect_garbage(self) -> None:
        """Have garbage collected, and forget it: what torch's compiler left holds on to inputs and whole models."""
        before_bytes = self._points.gauge.held_bytes()
        gc.collect()
        if self.counts:
            freed_bytes = max(0, before_bytes - self._points.gauge.held_bytes())
            for seen in (self._before, self._now):
                for index in list(seen):
                    seen[index] = max(0, seen.get(index, 0) - freed_bytes)

    def turn(self, index: int) -> int:
        """Return the number of a region's turn that was begun last."""
        return self._turns[index]

    def last_bytes(self, index: int) -> int:
        """Return the external memory of a region in its turn that was begun last."""
        return self._now.get(index, 0)

    def most_bytes(self, index: int) -> int:
        """Return the most external memory of a region, in that turn and the one before."""
        return max(self._before.get(index, 0), self._now.get(index, 0))

    def forget_turn_before(self, index: int) -> None:
        """Forget all that was seen of a region before the turn that was begun last."""
        self._before.pop(index, None)

    def begin_alone(
        self,
        index: int,
        tensors: Iterable[Tensor],
        given: Storages,
        *,
        own_bytes: int,
        limit_bytes: int,
        begins_turn: bool,
    ) -> Storages:
        """Note that a graph begins whose region is planned by itself, and takes `own_bytes` at most, all told.

        What stays on the device by the schedule of others leaves if both do not fit. Return the graph's own storages:
        those that it takes, and those that its forward was `given`.
        """
        self._alone.add(index)
        if begins_turn:
            self._begin_turn(index)
        own = self._points.see(tensors) | given
        self._note(index, own)
        peak_bytes = self._held_bytes(own) + own_bytes
        if peak_bytes > limit_bytes:
            peak_bytes -= self._points.make_room(peak_bytes - limit_bytes, (index, -1))
        self._points.gauge.rise_to(peak_bytes)
        return own

    def end_alone(self, results: Iterable[Tensor]) -> None:
        """Note what such a graph has returned."""
        self._points.see(results)

    def forget(self, regions: Iterable[int]) -> None:
        """Forget regions of which no code is left."""
        for index in regions:
            self._before.pop(index, None)
            self._now.pop(index, None)
            self._turns.pop(index, None)
            self._alone.discard(index)

    def _begin_turn(self, index: int) -> None:
        """Let what was seen before the last turn be forgotten."""
        self._before[index] = self._now.pop(index, 0)
        self._turns[index] += 1

    def _held_bytes(self, own: Storages) -> int:
        gauge = self._points.gauge
        return max(0, gauge.held_bytes() - gauge.bytes_of(own))
