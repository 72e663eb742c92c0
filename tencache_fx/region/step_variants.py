"""Steps whose order is another one each time: layers are skipped at random, experts have more or less to do, texts are
longer or shorter.

An order that nobody has seen runs by the schedule of one that has a plan and makes the same calls, of sizes as near as
can be, instead of moving all that can be moved. The plan does not show what is held then, so each run is checked by an
upper bound instead. What the schedule lists at calls that are left out is not done: their storages are not there, and
others come when they are asked for. What it does not list, as of calls that it does not have, leaves.
"""

from collections.abc import Iterable

import numpy as np

from tencache_fx.planning.step import SwapKey, Visit
from tencache_fx.region.step_planner import Program
from tencache_fx.region.step_residency import Place
from tencache_fx.runtime.swap_points import SwapPoints

_TOLERANCE = 8  # one part in so many: sizes that differ by no more share a plan


def find_nearest(programs: Iterable[Program], place: Place) -> Program | None:
    """Return the program with a plan that makes a run like `place`, of sizes as near as can be; None if there is none.

    Larger ones come first, for they move more, and of equal ones the longest.
    """

    def rank(program: Program) -> tuple[bool, int, int]:
        more_bytes = program.sizes[place.run] - place.nbytes
        return more_bytes < 0, abs(more_bytes), -len(program.order)

    return min((each for each in programs if each.has_plan and place.run in each.sizes), key=rank, default=None)


def is_like(program: Program, other: Program) -> bool:
    """Return whether the plan of `other` is good for `program`: it has nearly all its runs, in about the same sizes.

    It is not where it knows nothing of a region: all of that would leave.
    """
    regions, known = ({run[0] for run in each.sizes} for each in (program, other))
    if not regions <= known:
        return False
    own_bytes = sum(program.sizes.values())
    known_bytes = sum(nbytes for run, nbytes in other.sizes.items() if run in program.sizes)
    return abs(own_bytes - known_bytes) * _TOLERANCE <= own_bytes


def most_bytes(visit: Visit, points: SwapPoints) -> int:
    """Return what the device holds at most in a run that begins: with all that stays, and all that is brought early."""
    region, call, backward = visit.region, (visit.index, visit.call), visit.backward
    here_bytes = 0  # of what this backward reads
    for swap in region.swaps if backward else ():
        name = SwapKey(*call, swap.name)
        here_bytes += swap.nbytes if name in points.schedule.kept and points.is_here(name) else 0
    steps = region.steps(backward=backward)
    own, others = np.full(len(steps), here_bytes), np.zeros(len(steps), dtype=np.int64)
    places = {0: steps.start} | {at: point.step for at, point in enumerate(region.points[backward], 1)}
    for at, name, nbytes in points.brought_early(*call, backward=backward):
        changed = own if (name.region, name.call) == call else others
        changed[places.get(at, steps.stop) - steps.start :] += nbytes
    needed_bytes = region.kept_bytes[backward]
    if backward:
        needed_bytes = np.minimum(needed_bytes, region.own_bytes[backward] + own)
    return visit.held_bytes + points.extra_bytes - here_bytes + int((needed_bytes + others).max(initial=0))
