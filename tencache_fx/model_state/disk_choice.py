"""Which parameters of a model go to disk, because host memory has no room for them.

To have one byte less of host memory costs a step two bytes of the disk for optimizer state, which is read and written;
two for a frozen weight, which the forward and the backward read; and three for a trained one, which is written, too. So
state goes there first (`placement.py`), which takes no decision here, then frozen weights, and trained ones last: as
few as will do, the largest first. All of them pass through buffers that are as large as the largest; so where large
ones on disk would take more of the disk's time than smaller ones, because of these buffers, the smaller ones go.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tencache_fx.errors import BudgetError
from tencache_fx.model_state.disk_state import line_bytes
from tencache_fx.model_state.passing_buffers import passing_bytes
from tencache_fx.units import PAGE_BYTES, format_bytes, round_up

_SHARE = 8  # one part in so many of the host budget is left for tensors that regions offload, if anything goes to disk
_FROZEN_COST, _TRAINED_COST = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A parameter that is to be offloaded. One that is `in_file` takes no room on disk; it is frozen."""

    name: str
    nbytes: int
    state_bytes: int
    trained: bool
    in_file: bool

    @property
    def cost(self) -> int:
        """Return the bytes that a step moves to and from the disk if it is there."""
        return self.nbytes * (_TRAINED_COST if self.trained else _FROZEN_COST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What there is room for.

    Of `host_budget_bytes`, `host_bytes` are free but for `gradient_bytes` that others will need; `disk_bytes` are those
    free in the store, None without one. Buffers for parameters of at most `passing_bytes` are there already.
    """

    host_budget_bytes: int
    host_bytes: int
    gradient_bytes: int
    disk_bytes: int | None
    passing_bytes: int


def choose_for_disk(candidates: Sequence[Candidate], room: Room) -> frozenset[str]:
    """Return the names of those that go to disk.

    Beside those in host memory it leaves room for gradients, for the buffers that state passes through, or without a
    store for state, and for the tensors of regions; and less if that cannot be. Raises `BudgetError` if neither host
    memory nor disk has room for all.
    """
    most = [each for each in candidates if each.in_file or room.disk_bytes is not None]
    trained = [each for each in candidates if each.trained]
    beside_bytes = room.gradient_bytes + sum(_pages(each.nbytes) for each in trained)
    if trained:
        state_bytes = sum(each.state_bytes for each in trained)
        most_bytes = state_bytes if room.disk_bytes is None else line_bytes(room.host_budget_bytes)
        beside_bytes += min(state_bytes, most_bytes)
    all_bytes = sum(_pages(each.nbytes) for each in candidates)
    if not most or all_bytes <= room.host_bytes - beside_bytes:
        return frozenset()  # without any that may, the pool refuses what is too much
    for left_bytes in (beside_bytes + room.host_budget_bytes // _SHARE, beside_bytes, 0):
        if (found := _cheapest(candidates, most, room, room.host_bytes - left_bytes)) is not None:
            return found
    on_disk = sum(each.nbytes for each in most if not each.in_file)
    raise BudgetError(
        f"the parameters take {format_bytes(all_bytes)}; host memory has {format_bytes(max(0, room.host_bytes))} of "
        f"host_budget left, and the disk {format_bytes(room.disk_bytes or 0)} of spill_budget for "
        f"{format_bytes(on_disk)} that may go there through four buffers of the largest; raise host_budget or "
        "spill_budget."
    )


def _cheapest(
    candidates: Sequence[Candidate], most: Sequence[Candidate], room: Room, host_bytes: int
) -> frozenset[str] | None:
    """Return what costs least on disk so that the rest and the buffers take at most `host_bytes`; None if nothing does.

    O(n^2) in parameters, for each size that the largest on disk may have.
    """
    all_bytes = sum(_pages(each.nbytes) for each in candidates)
    if all_bytes <= host_bytes:
        return frozenset()
    best: tuple[int, frozenset[str]] | None = None
    for largest in sorted({each.nbytes for each in most}, reverse=True):
        buffers_bytes = passing_bytes(largest) if largest > room.passing_bytes else 0
        over_bytes = all_bytes + buffers_bytes - host_bytes
        chosen = _first_to_go((each for each in most if each.nbytes <= largest), over_bytes, room.disk_bytes or 0)
        if chosen is not None:
            found = sum(each.cost for each in chosen), frozenset(each.name for each in chosen)
            best = found if best is None or found[0] < best[0] else best
    return None if best is None else best[1]


def _first_to_go(most: Iterable[Candidate], over_bytes: int, disk_bytes: int) -> list[Candidate] | None:
    """Return frozen ones first, large ones first, up to `over_bytes`; None if they are not enough."""
    chosen: list[Candidate] = []
    for each in sorted(most, key=lambda each: (each.trained, not each.in_file, -each.nbytes, each.name)):
        if over_bytes <= 0:
            break
        taken = 0 if each.in_file else _pages(each.nbytes)
        if taken <= disk_bytes:
            chosen.append(each)
            disk_bytes -= taken
            over_bytes -= _pages(each.nbytes)
    return chosen if over_bytes <= 0 else None


def _pages(nbytes: int) -> int:
    return round_up(max(1, nbytes), PAGE_BYTES)
