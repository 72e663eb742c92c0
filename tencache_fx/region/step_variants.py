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
from tencache_fx.region.step_planner import Program, place_of
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


def most_bytes(visit: Visit, program: Program, points: SwapPoints) -> int:
    """Return what the device holds at most from the begin of a run to that of the next one.

    With all that stays and all that is brought early; between the runs with as much more as `program`, whose schedule
    is followed, was seen to hold there, and larger as the region's activations are.
    """
    region, call, backward = visit.region, (visit.index, visit.call), visit.backward
    kept = [swap for swap in region.swaps if SwapKey(*call, swap.name) in points.schedule.kept]
    here_bytes = 0  # of what this backward reads
    if backward:
        here_bytes = sum(swap.nbytes for swap in kept if points.is_here(SwapKey(*call, swap.name)))
    steps = region.steps(backward=backward)
    own, others = np.full(len(steps), here_bytes), np.zeros(len(steps), dtype=np.int64)
    places = {0: steps.start} | {at: point.step for at, point in enumerate(region.points[backward], 1)}
    for at, name, nbytes in points.brought_early(*call, backward=backward):
        changed = own if (name.region, name.call) == call else others
        changed[places.get(at, steps.stop) - steps.start :] += nbytes
    needed_bytes = region.kept_bytes[backward]
    if backward:
        needed_bytes = np.minimum(needed_bytes, region.own_bytes[backward] + own)
    beside_bytes = visit.held_bytes + points.extra_bytes - here_bytes
    left_bytes = 0 if backward else sum(swap.nbytes for swap in kept)
    gap_bytes = left_bytes + _gap_bytes(visit, program) + (int(others[-1]) if len(others) else 0)
    return beside_bytes + max(int((needed_bytes + others).max(initial=0)), gap_bytes)


def _gap_bytes(visit: Visit, program: Program) -> int:
    """Return by how much more than at the begin of a run is held until the next begins, without what stays.

    As it was when `program` ran last, and larger as the region's activations are; 0 where the program has no such run,
    or no next one.
    """
    at = program.places.get(place_of(visit).run)
    if at is None or at + 1 >= len(program.visits):
        return 0
    before, after = program.visits[at : at + 2]
    # What dies in between, as the last step's gradients may, is taken to die after all else was made.
    grown_bytes = max(0, after.held_bytes - before.held_bytes) + max(0, after.gap_bytes - after.held_bytes)
    return -(-grown_bytes * visit.region.activation_bytes // max(1, before.region.activation_bytes))
