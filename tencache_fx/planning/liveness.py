"""Which device bytes are live at each step, with and without a plan's transfers. No torch here."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from tencache_fx.planning.collectives import paced_ns
from tencache_fx.planning.plan import CopyIn, CopyOut, Transfer, TransferKind
from tencache_fx.planning.problem import Problem, Step, Storage, Tier

Profile = np.ndarray[Any, np.dtype[np.int64]]
Durations = np.ndarray[Any, np.dtype[np.float64]]


def inactive_intervals(storage: Storage) -> tuple[tuple[Step, Step], ...]:
    """Return `(last use, next use)` pairs with at least one whole step between them, in which it may be swapped out.

    Until `caller_frees_at` the caller uses it.
    """
    pairs: Iterable[tuple[Step, Step]] = pairwise(storage.uses)
    if until := storage.caller_frees_at:
        pairs = ((Step(max(u, until - 1)), v) for u, v in pairs if u < until <= v)
    ready = storage.ready
    return tuple([(u, v) for u, v in pairs if v - u > 1 and u >= ready])


def durations_ns(problem: Problem) -> Durations:
    """Return how long each step takes, with what it waits for collectives; not to be written to."""
    known: Durations | None = problem.derived.get("durations")
    if known is None:
        found = np.array(paced_ns(problem), dtype=np.float64)
        known = problem.derived["durations"] = found
    return known


def live_bytes(problem: Problem, transfers: Iterable[Transfer] = ()) -> Profile:
    """Return the device bytes in use at each step under `transfers`, external bytes included.

    One difference array and one running sum: O(steps + storages + transfers), and O(steps + transfers) from then on.
    """
    changes: list[tuple[int, int]] = []
    one_way = []
    for transfer in transfers:
        if transfer.out is None or transfer.back is None:
            one_way.append(transfer)
        else:
            changes.append((transfer.out.freed_at, -transfer.nbytes))
            changes.append((transfer.back.prefetch_at, transfer.nbytes))
    storages = {storage.name: storage for storage in problem.storages} if one_way else {}
    for transfer in one_way:
        for step, sign in device_changes(transfer, storages[transfer.name]):
            changes.append((step, sign * transfer.nbytes))
    return _changed(_kept_bytes(problem), changes)


def least_bytes(problem: Problem) -> Profile:
    """Return the device bytes in use at each step with every candidate on its minimal swap."""
    known: Profile | None = problem.derived.get("least bytes")
    if known is None:
        changes: list[tuple[int, int]] = []
        for window in _minimal_windows(problem):
            changes.append((window.freed_at, -window.storage.nbytes))
            changes.append((window.prefetch_at, window.storage.nbytes))
        known = problem.derived["least bytes"] = _changed(_kept_bytes(problem), changes)
    return known.copy()


def _kept_bytes(problem: Problem) -> Profile:
    """Return the device bytes in use at each step if nothing is transferred; not to be written to."""
    known: Profile | None = problem.derived.get("kept bytes")
    if known is not None:
        return known
    delta = [0] * (len(problem.ops) + 1)  # single elements of an array are slow
    for storage in problem.storages:
        delta[storage.birth] += storage.nbytes
        delta[storage.death] -= storage.nbytes
    scratch = np.array([op.scratch_bytes for op in problem.ops], dtype=np.int64)
    if more_bytes := problem.boundary_excess_bytes:
        scratch[problem.boundary] += more_bytes
    kept: Profile = np.cumsum(delta[:-1], dtype=np.int64) + scratch + problem.external_bytes
    problem.derived["kept bytes"] = kept
    return kept


def _changed(kept: Profile, changes: Sequence[tuple[int, int]]) -> Profile:
    """Return `kept` with so many bytes more from each of these steps on."""
    if not changes:
        return kept.copy()
    steps, nbytes = np.array(changes, dtype=np.int64).T
    delta = np.zeros(kept.size + 1, dtype=np.int64)
    np.add.at(delta, steps, nbytes)
    changed: Profile = kept + delta[:-1].cumsum()
    return changed


def device_changes(transfer: Transfer, storage: Storage) -> tuple[tuple[Step, int], tuple[Step, int]]:
    """Return the steps from which a transfer changes the device bytes of its storage, and whether by +1 or -1 times.

    A swap takes them away in between, a load adds them up to the storage's birth, a store from its death on.
    """
    if transfer.out is None:
        return (transfer.prefetch_at, 1), (storage.birth, -1)
    return (transfer.out.freed_at, -1), (storage.death if transfer.back is None else transfer.back.prefetch_at, 1)


def is_candidate(problem: Problem, storage: Storage) -> bool:
    """Whether a policy may offload `storage` at all: allowed, worth an op, and with links to be copied over."""
    linked = problem.links.d2h_bytes_per_s > 0 and problem.links.h2d_bytes_per_s > 0
    return linked and storage.spillable and storage.nbytes >= max(1, problem.min_spill_bytes)


def earliest_offload(problem: Problem, storage: Storage, last_use: Step) -> Step:
    """Return the first step after which `storage` may be copied out for the transfer that follows `last_use`.

    Graphs are functional, so the copy may start before the last read; but an offload sits in its transfer's own graph.
    """
    ready = max(storage.birth, storage.ready)
    return max(ready, problem.boundary) if last_use >= problem.boundary else ready


def swap_to_host(storage: Storage, after: Step, freed_at: Step, prefetch_at: Step, needed_at: Step) -> Transfer:
    """Return the swap of `storage` to host memory and back at these steps."""
    out, back = CopyOut(after=after, freed_at=freed_at), CopyIn(prefetch_at=prefetch_at, needed_at=needed_at)
    return Transfer(name=storage.name, nbytes=storage.nbytes, tier=Tier.HOST, out=out, back=back)


def clip_to_barriers(problem: Problem, transfer: Transfer) -> Transfer | None:
    """Return `transfer` with bytes that count as freed only from a scheduling barrier on, and as taken from behind one.

    None if its bytes are then never free. Without barriers, `transfer` as it is.
    """
    if not problem.barriers:
        return transfer
    freed, fetch = _clipped(
        problem, transfer.copy_out_after, transfer.freed_at, transfer.prefetch_at, transfer.needed_at
    )
    return transfer.leaving(freed_at=freed).prefetched(fetch) if freed < fetch else None


def _clipped(problem: Problem, offload: Step, freed: Step, fetch: Step, back: Step) -> tuple[Step, Step]:
    """Return what barriers leave of `[freed, prefetch)`; a swap from one graph to the other covers their boundary."""
    barriers, boundary = problem.barriers, problem.boundary
    after, before = bisect_left(barriers, freed), bisect_left(barriers, fetch) - 1
    freed = barriers[after] if after < len(barriers) else Step(len(problem.ops))
    fetch = Step(barriers[before] + 1) if before >= 0 else Step(0)
    return (min(freed, boundary), max(fetch, boundary)) if offload < boundary <= back else (freed, fetch)


class Window(NamedTuple):
    """An inactive interval of a candidate, and when its bytes are away if it is swapped out then without any slack."""

    storage: Storage
    freed_at: Step
    prefetch_at: Step
    last_use: Step
    next_use: Step


def windows(problem: Problem) -> Sequence[Window]:
    """Return those of all candidates whose bytes are ever free, in order."""
    known: list[Window] | None = problem.derived.get("windows")
    if known is None:
        known = []
        for s in (s for s in problem.storages if is_candidate(problem, s)):
            for u, v in inactive_intervals(s):
                freed, fetch = _clipped(problem, u, Step(u + 1), v, v) if problem.barriers else (Step(u + 1), v)
                if freed < fetch:
                    known.append(Window(s, freed, fetch, u, v))
        problem.derived["windows"] = known
    return known


def with_windows_of(problem: Problem, other: Problem) -> Problem:
    """Return `problem` with the windows of `other`, from which it differs in no op, and in nothing they depend on.

    So it has `by_windows`, where both keep what they derive from windows alone.
    """
    problem.derived["windows"], problem.derived["minimal windows"] = windows(other), _minimal_windows(other)
    problem.derived["by windows"], problem.derived["durations"] = by_windows(other), durations_ns(other)
    return problem


def by_windows(problem: Problem) -> dict[str, Any]:
    """Return what was derived from the problem's windows, and from nothing that differs between those that share them.

    Barriers are such a thing: windows depend on them.
    """
    known: dict[str, Any] = problem.derived.setdefault("by windows", {})
    return known


def _minimal_windows(problem: Problem) -> list[Window]:
    """Return the longest window of each candidate."""
    known: list[Window] | None = problem.derived.get("minimal windows")
    if known is not None:
        return known
    ends_ns = [0, *accumulate(paced_ns(problem))]
    longest: dict[str, tuple[tuple[int, Step, Step, Step, Step], Window]] = {}
    for window in windows(problem):
        _, freed, fetch, u, v = window
        away = (ends_ns[fetch] - ends_ns[freed], freed, fetch, u, v)
        before = longest.get(window.storage.name)
        if before is None or away > before[0]:
            longest[window.storage.name] = away, window
    found = [window for _, window in longest.values()]
    problem.derived["minimal windows"] = found
    return found


def minimal_swaps(problem: Problem) -> tuple[Transfer, ...]:
    """Return, for every candidate, its longest swap without any slack: the least any plan of ours can hold.

    Each storage is transferred at most once, over the inactive interval that contains the most time.
    """
    return tuple(
        swap_to_host(window.storage, window.last_use, window.freed_at, window.prefetch_at, window.next_use)
        for window in _minimal_windows(problem)
    )


def held_at(problem: Problem, transfers: Iterable[Transfer], step: Step) -> tuple[Storage, ...]:
    """Return the storages with device bytes at `step`, largest first."""
    by_name = {transfer.name: transfer for transfer in transfers}
    held = [storage for storage in problem.storages if _is_held(storage, by_name.get(storage.name), step)]
    return tuple(sorted(held, key=lambda s: (-s.nbytes, s.name)))


def _is_held(storage: Storage, transfer: Transfer | None, step: Step) -> bool:
    birth, death = storage.birth, storage.death
    if transfer is None:
        return birth <= step < death
    if transfer.kind is TransferKind.SWAP:
        return birth <= step < death and not transfer.freed_at <= step < transfer.prefetch_at
    return transfer.prefetch_at <= step < death if transfer.out is None else birth <= step < transfer.freed_at
