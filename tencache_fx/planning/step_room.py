"""What the runs of a step hold where host memory has no room for all that is to leave, and there is no disk.

What finds no room stays on the device, up to its backward. A step that has no plan yet offloads whatever comes first.
"""

from collections.abc import Collection, Sequence

from tencache_fx.planning.step import Visit
from tencache_fx.units import PAGE_BYTES, round_up

CALLS_TO_COME = 2
"""In a step that nobody has seen to its end as many calls may follow as there were: room for so many times as much."""


def needed_bytes(visit: Visit, staying: Collection[str], beside_bytes: int) -> int:
    """Return the most that a run needs with everything away that can be, but for some.

    Of its own call the storages `staying` are on the device, of other calls `beside_bytes`.
    """
    if not staying:
        return visit.peak_bytes + beside_bytes
    region, needed = visit.region, visit.region.own_bytes[visit.backward].copy()
    for swap in (each for each in region.swaps if each.name in staying):  # else the graph itself counts it
        begin = region.steps(backward=visit.backward).start
        away = slice(0, swap.prefetch_at - begin) if visit.backward else slice(swap.freed_at, None)
        needed[away] += swap.nbytes
    return visit.held_bytes + beside_bytes + int(needed.max(initial=0))


def unplanned_peak_bytes(visits: Sequence[Visit], host_bytes: int) -> int:
    """Return the most that these runs hold without a plan, with so many bytes of host memory and no disk."""
    returning = {(visit.index, visit.call) for visit in visits if visit.backward}
    staying: dict[tuple[int, int], dict[str, int]] = {}
    away: dict[tuple[int, int], int] = {}
    room_bytes, most_bytes = host_bytes, 0
    for visit in visits:
        call = visit.index, visit.call
        if not visit.backward and call in returning:
            staying[call], away[call] = {}, 0
            for swap in sorted(visit.region.swaps, key=lambda each: each.copy_out_after):
                nbytes = round_up(swap.nbytes, PAGE_BYTES)
                if away[call] + nbytes <= room_bytes:
                    away[call] += nbytes
                else:
                    staying[call][swap.name] = swap.nbytes
            room_bytes -= away[call]
        own = staying.get(call, {}) if not visit.backward else staying.pop(call, {})
        beside_bytes = sum(sum(each.values()) for other, each in staying.items() if other != call)
        most_bytes = max(most_bytes, needed_bytes(visit, own, beside_bytes))
        if visit.backward:
            room_bytes += away.pop(call, 0)
    return most_bytes
