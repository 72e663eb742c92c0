"""Where to cut a forward into segments, so that recomputing one never reaches into the one before.

What is recomputed in a chain has to be recomputed all at once, and is in memory all at once. So a few values are kept,
at the narrowest places: with those of a step kept, whatever lies between two such steps can be made again from the
first. That is checkpointing as Chen et al. found it ("Training Deep Nets with Sublinear Memory Cost",
arXiv 1604.06174, algorithm 3): segments of about equal weight, cut where little crosses.
"""

from collections.abc import Sequence

import numpy as np

from tencache_fx.planning.problem import Kind, Problem, Storage


def kept_between_segments(problem: Problem, segment_bytes: int) -> frozenset[str]:
    """Return the names of the values that cross from one segment to a later one in the forward.

    Segments are at least half of `segment_bytes` of values with recipes, and each is cut where nothing within that
    distance is narrower. O(steps log steps + storages log steps + steps x window).
    """
    values = [storage for storage in problem.storages if _last_early_use(problem, storage)]
    cuts = np.array(_cuts(problem, values, segment_bytes), dtype=np.int64)
    births = np.array([storage.birth for storage in values], dtype=np.int64)
    lasts = np.array([_last_early_use(problem, storage) for storage in values], dtype=np.int64)
    crossed = np.searchsorted(cuts, lasts, side="right") > np.searchsorted(cuts, births, side="right")
    return frozenset(storage.name for storage, kept in zip(values, crossed, strict=True) if kept)


def _cuts(problem: Problem, values: Sequence[Storage], segment_bytes: int) -> list[int]:
    """Return the steps before which the forward is cut."""
    steps = problem.boundary
    names = {recipe.name for recipe in problem.recipes}
    crossing = np.zeros(steps + 2, dtype=np.int64)  # by step: what was made before it and is read in it or later
    weight = np.zeros(steps + 2, dtype=np.int64)
    for storage in values:
        crossing[storage.birth + 1] += storage.nbytes
        crossing[_last_early_use(problem, storage) + 1] -= storage.nbytes
        weight[storage.birth + 1] += storage.nbytes if storage.name in names else 0
    crossing, weight = np.cumsum(crossing), np.cumsum(weight)
    half = segment_bytes // 2
    first = np.searchsorted(weight, weight - half, side="left")
    last = np.searchsorted(weight, weight + half, side="right")
    cuts: list[int] = []
    done_bytes = 0
    for step in range(1, steps):
        if weight[step] - done_bytes < half:
            continue
        window = crossing[max(1, int(first[step])) : min(steps, int(last[step]))]
        if crossing[step] <= window.min(initial=crossing[step]):
            cuts.append(step)
            done_bytes = int(weight[step])
    return cuts


def _last_early_use(problem: Problem, storage: Storage) -> int:
    """Return the last step of the forward that reads what the forward made; 0 if there is none."""
    if storage.birth >= problem.boundary or storage.kind in (Kind.PARAMETER, Kind.INPUT):
        return 0
    return max((use for use in storage.uses if use < problem.boundary), default=0)
