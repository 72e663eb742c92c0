"""Which device bytes are live at each step, with and without a plan's transfers. No torch here."""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Problem, Step, Storage, Tier


def inactive_intervals(storage: Storage) -> tuple[tuple[Step, Step], ...]:
    """Return `(last use, next use)` pairs with at least one whole step between them, from which it may leave.

    Until `held_until` the caller uses it.
    """
    pairs: Iterable[tuple[Step, Step]] = pairwise(storage.uses)
    if until := storage.held_until:
        pairs = ((Step(max(u, until - 1)), v) for u, v in pairs if u < until <= v)
    ready = storage.ready
    return tuple([(u, v) for u, v in pairs if v - u > 1 and u >= ready])


def live_bytes(problem: Problem, spills: Iterable[Transfer] = ()) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the device bytes in use at each step under `spills`, held-outside bytes included.

    One difference array and one running sum: O(steps + storages + spills).
    """
    delta = [0] * (len(problem.ops) + 1)  # single elements of an array are slow
    for storage in problem.storages:
        delta[storage.birth] += storage.nbytes
        delta[storage.death] -= storage.nbytes
    for spill in spills:
        delta[spill.freed_at] -= spill.nbytes
        delta[spill.prefetch_at] += spill.nbytes
    scratch = np.array([op.scratch_bytes for op in problem.ops], dtype=np.int64)
    if more_bytes := problem.boundary_bytes:
        scratch[problem.boundary] += more_bytes
    return np.cumsum(delta[:-1], dtype=np.int64) + scratch + problem.outside_bytes


def is_candidate(problem: Problem, storage: Storage) -> bool:
    """Say whether a policy may spill `storage` at all: allowed, worth an op, and with links to travel on."""
    linked = problem.links.d2h_bytes_per_s > 0 and problem.links.h2d_bytes_per_s > 0
    return linked and storage.spillable and storage.nbytes >= max(1, problem.min_spill_bytes)


def earliest_offload(problem: Problem, storage: Storage, last_use: Step) -> Step:
    """Return the first step after which `storage` may be copied out for the trip that follows `last_use`.

    Graphs are functional, so the copy may start before the last read; but an offload sits in its trip's own graph.
    """
    ready = max(storage.birth, storage.ready)
    return max(ready, problem.boundary) if last_use >= problem.boundary else ready


def fence_in(problem: Problem, spill: Transfer) -> Transfer | None:
    """Return `spill` with bytes that count as gone only from a fence on, and as taken from behind a fence on.

    None if the storage is then never away. Without fences, `spill` as it is.
    """
    if not problem.fences:
        return spill
    gone, fetch = _fenced(problem, spill.copy_out_after, spill.freed_at, spill.prefetch_at, spill.needed_at)
    return dataclasses.replace(spill, freed_at=gone, prefetch_at=fetch) if gone < fetch else None


def _fenced(problem: Problem, offload: Step, gone: Step, fetch: Step, back: Step) -> tuple[Step, Step]:
    """Return what fences leave of `[gone, fetch)`; who leaves from one graph for the other is away between them."""
    fences, boundary = problem.fences, problem.boundary
    after, before = bisect_left(fences, gone), bisect_left(fences, fetch) - 1
    gone = fences[after] if after < len(fences) else Step(len(problem.ops))
    fetch = Step(fences[before] + 1) if before >= 0 else Step(0)
    return (min(gone, boundary), max(fetch, boundary)) if offload < boundary <= back else (gone, fetch)


def minimal_swaps(problem: Problem) -> tuple[Transfer, ...]:
    """Return, for every candidate, its longest trip with no slack at all: the least any plan of ours can hold.

    Each storage travels at most once, over the inactive interval that contains the most time.
    """
    ends_ns = list(accumulate(op.duration_ns for op in problem.ops))
    spills = []
    for s in (s for s in problem.storages if is_candidate(problem, s)):
        trips = []  # as numbers, with the time that each is away: only the longest is to be an object
        for u, v in inactive_intervals(s):
            gone, fetch = _fenced(problem, u, Step(u + 1), v, v) if problem.fences else (Step(u + 1), v)
            if gone < fetch:
                trips.append((ends_ns[fetch - 1] - ends_ns[gone - 1], gone, fetch, u, v))
        if trips:
            _, a, b, u, v = max(trips)
            spills.append(
                Transfer(
                    name=s.name,
                    nbytes=s.nbytes,
                    tier=Tier.HOST,
                    copy_out_after=u,
                    freed_at=a,
                    prefetch_at=b,
                    needed_at=v,
                )
            )
    return tuple(spills)


def held_at(problem: Problem, spills: Iterable[Transfer], step: Step) -> tuple[Storage, ...]:
    """Return the storages with device bytes at `step`, largest first."""
    spills = tuple(spills)
    away = {spill.name for spill in spills if spill.freed_at <= step < spill.prefetch_at}
    early = {spill.name for spill in spills if spill.prefetch_at <= step < spill.freed_at}
    held = [s for s in problem.storages if s.name in early or (s.birth <= step < s.death and s.name not in away)]
    return tuple(sorted(held, key=lambda s: (-s.nbytes, s.name)))
