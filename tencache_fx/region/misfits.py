"""Regions that do not fit into the device budget while they are planned with their step."""

from collections.abc import Iterable


class Misfits:
    """Says which regions are to be planned by themselves, where their storages may be away within a graph.

    Each was seen at some device budget, and stays a misfit at that and at less.
    """

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        self._stuck: dict[int, int] = {}

    def note(self, index: int, limit: int) -> None:
        """Note that a region does not fit into `limit` bytes."""
        self._limits[index] = max(limit, self._limits.get(index, 0))

    def has(self, index: int, limit: int) -> bool:
        """Return whether a region is known not to fit into `limit` bytes."""
        return limit <= self._limits.get(index, 0)

    def note_stuck(self, index: int, limit: int) -> None:
        """Note that a region has no plan by itself within `limit` bytes either."""
        self._stuck[index] = max(limit, self._stuck.get(index, 0))

    def may_leave(self, index: int, limit: int) -> bool:
        """Return whether a region may have a plan by itself within `limit` bytes."""
        return limit > self._stuck.get(index, 0)

    def forget(self, regions: Iterable[int]) -> None:
        """Forget regions of which no code is left."""
        for index in regions:
            self._limits.pop(index, None)
            self._stuck.pop(index, None)
