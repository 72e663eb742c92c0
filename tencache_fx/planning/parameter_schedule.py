"""When offloaded parameters are loaded and gradients stored, and which parameters are pinned on the device.

These transfers are given, only their times are chosen: a copy in is issued as late as is safe, by packing the link
backwards, and then up to `lead` copy times (the prefetch lead) earlier where memory allows it; the bytes of a gradient
are free when its copy has landed, or earlier, with a wait, where they are wanted. The other choice is which parameters
need no load: of a cyclic order no set of parameters is better to keep than another of the same size (Belady's rule
gains nothing when everything is read once per round), so those that are read first are pinned, whose copies nothing
could hide. Those on disk are pinned before them, because they take longest to load.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from tencache_fx.planning.collectives import ideal_ns, paced_ns
from tencache_fx.planning.liveness import Profile, least_bytes, with_windows_of
from tencache_fx.planning.plan import CopyIn, CopyOut, Forecast, Transfer, TransferKind
from tencache_fx.planning.problem import Kind, Links, Problem, Step, Storage, Tier
from tencache_fx.planning.schedule import Barriers, barriers_of, copy_times, time_returns
from tencache_fx.planning.tuning import TUNING

_NO_LIMIT = 1 << 62


def has_offloaded(problem: Problem) -> bool:
    """Whether any parameters or gradients of the region are offloaded."""
    return any(storage.kind in (Kind.FETCHED, Kind.STORED) for storage in problem.storages)


def schedule_parameters(problem: Problem, lead: float) -> tuple[Transfer, ...]:
    """Return the loads of all offloaded parameters and the stores of their gradients.

    Memory stays within the device budget beside the least that all others can hold, if it can. O(n x steps).
    """
    limit = problem.budgets.device_bytes
    limit = _NO_LIMIT if limit is None else limit
    memory = least_bytes(problem)
    barriers = barriers_of(problem)
    arrivals = [storage for storage in problem.storages if storage.kind is Kind.FETCHED]
    starts_ns = _starts_ns(problem, arrivals)
    tight = [_arrival(problem, barriers, storage) for storage in arrivals]
    for transfer in tight:
        memory[transfer.prefetch_at : transfer.needed_at] += transfer.nbytes
    departures = _departures(problem, barriers, memory, limit, starts_ns)
    timed = time_returns(problem, barriers, tight, memory, limit, starts_ns, lead)
    return (*timed, *departures)


def least_bytes_with_parameters(problem: Problem) -> Profile:
    """Return the device bytes in use at each step with every transfer without slack, those of parameters included."""
    memory, barriers = least_bytes(problem), barriers_of(problem)
    for storage in problem.storages:
        if storage.kind is Kind.FETCHED:
            memory[_latest_prefetch(problem, barriers, storage) : storage.birth] += storage.nbytes
        elif storage.kind is Kind.STORED:
            memory[storage.death : _earliest_freed(problem, barriers, storage)[0]] += storage.nbytes
    return memory


def with_parameters_scheduled(problem: Problem, parameter_transfers: Collection[Transfer]) -> Problem:
    """Return `problem` with the lives and the links that loads and stores leave, to plan the rest for."""
    by_name = {transfer.name: transfer for transfer in parameter_transfers}
    storages = tuple(_with_transfer(storage, by_name.get(storage.name)) for storage in problem.storages)
    total_ns = max(1, ideal_ns(problem))
    out_bytes = sum(transfer.nbytes for transfer in parameter_transfers if transfer.kind is TransferKind.STORE)
    in_bytes = sum(transfer.nbytes for transfer in parameter_transfers if transfer.kind is TransferKind.LOAD)
    links = _derated(problem.links, out_bytes * 1e9 / total_ns, in_bytes * 1e9 / total_ns)
    return with_windows_of(replace(problem, storages=storages, links=links), problem)


def step_ns(problem: Problem, forecast: Forecast) -> int:
    """Return how long a whole training step takes: as long as the device does, or as the host's memory.

    That is all its forwards and backwards, of which the forecast is for one, and the update.
    """
    device_ns = problem.accumulation * forecast.makespan_ns + exposed_update_ns(problem, forecast)
    return max(device_ns, host_memory_ns(problem, forecast.d2h_bytes + forecast.h2d_bytes))


def early_step_ns(problem: Problem, forecast: Forecast) -> int:
    """Return how long the same step takes if each update begins in the backward, as soon as its gradient is there."""
    return step_ns(replace(problem, updates_in_backward=True), forecast)


def exposed_update_ns(problem: Problem, forecast: Forecast) -> int:
    """Return for how long a step waits for updates that begin after the last backward.

    They overlap with the next forward only: the last parameter that it reads waits for its own update.
    """
    own_bytes = late_update_bytes(problem)
    if not own_bytes:
        return 0
    stored_bytes = sum(storage.nbytes for storage in problem.storages if storage.kind is Kind.STORED)
    busy_bytes = own_bytes + max(0, forecast.d2h_bytes - stored_bytes)
    return max(0, busy_bytes * 1_000_000_000 // problem.links.host_bytes_per_s - forecast.forward_ns)


def late_update_bytes(problem: Problem) -> int:
    """Return what updates after the last backward read and write in host memory, and what the next forward fetches.

    What that forward copies out comes on top. 0 for updates that come with the backward, or of which there are none, or
    if the memory's rate is not known.
    """
    own_bytes = updating_bytes(problem)
    if not problem.links.host_bytes_per_s or not own_bytes or problem.updates_in_backward:
        return 0
    fetched_bytes = sum(s.nbytes for s in problem.storages if s.kind is Kind.FETCHED and s.birth < problem.boundary)
    return own_bytes + fetched_bytes


def host_memory_ns(problem: Problem, copied_bytes: int) -> int:
    """Return how long the host's memory is busy in a step, whose forwards and backwards copy so many bytes each.

    The bytes are those over the links. With gradients in host memory, their optimizer's state is there, too, and to
    update it takes the host's memory most of the step; copies over the links are then not free, however well they hide
    behind kernels. 0 if there are none, or the memory's rate is not known.
    """
    rate, own_bytes = problem.links.host_bytes_per_s, updating_bytes(problem)
    if not rate or not own_bytes:
        return 0
    busy_bytes = own_bytes + problem.accumulation * copied_bytes + adding_bytes(problem)
    return busy_bytes * 1_000_000_000 // rate


def adding_bytes(problem: Problem) -> int:
    """Return what is read and written in host memory to add up a step's gradients there.

    To add one to the sum is to read both and to write one.
    """
    return 3 * (problem.accumulation - 1) * stored_bytes(problem)


def stored_bytes(problem: Problem) -> int:
    """Return the bytes of all gradients that one backward copies to host memory."""
    return sum(storage.nbytes for storage in problem.storages if storage.kind is Kind.STORED)


def updating_bytes(problem: Problem) -> int:
    """Return what updates in host memory read and write there in a step.

    A parameter that is pinned on the device is copied there once, after its update; a gradient that was added up there
    is copied out before it.
    """
    gradients = gradients_to_host(problem)
    if not gradients:
        return 0
    # Its gradient is read, its state read and written, and its weight, which is as large as the gradient, written. Of
    # several gradients of a parameter one is the sum.
    state_bytes = {each.parameter: each.state_traffic_bytes for each in gradients}
    summed_bytes = {each.parameter: each.nbytes for each in gradients if each.kind is Kind.GRADIENT}
    update_bytes = sum(2 * gradient.nbytes for gradient in gradients)
    update_bytes += sum(state_bytes.values()) + sum(summed_bytes.values())
    parameters = {gradient.parameter for gradient in gradients}
    return update_bytes + sum(
        s.nbytes for s in problem.storages if s.kind is Kind.PARAMETER and s.parameter in parameters
    )


def gradients_to_host(problem: Problem) -> list[Storage]:
    """Return the gradients of parameters that are updated in host memory: stored, or on the device up to then."""
    return [s for s in problem.storages if s.kind is Kind.STORED or (s.kind is Kind.GRADIENT and s.parameter)]


def given_bytes(problem: Problem) -> int:
    """Return what is copied over the links in any case: offloaded parameters and their gradients."""
    return sum(storage.nbytes for storage in problem.storages if storage.kind in (Kind.FETCHED, Kind.STORED))


def keep_resident(
    problem: Problem,
    resident: Collection[str],
    updated_here: Collection[str] = (),
    summed_here: Collection[str] = (),
) -> Problem:
    """Return `problem` with these parameters on the device all the time; of some, all that belongs to them.

    The gradients of those in `updated_here` and `summed_here` are not stored. The device holds the state of the former
    beside the region, and the sums of both if an update follows several backwards.
    """
    if not resident:
        return problem
    end = Step(len(problem.ops))
    state_bytes: dict[str, int] = {}
    sum_bytes: dict[str, int] = {}
    staying = {**dict.fromkeys(summed_here, True), **dict.fromkeys(updated_here, False)}
    lives: dict[str, list[Storage]] = {}
    others: list[Storage] = []
    for storage in problem.storages:
        if storage.kind is Kind.STORED and storage.parameter in staying:
            death = storage.caller_frees_at or end
            gradient = replace(storage, kind=Kind.GRADIENT, death=death, caller_frees_at=Step(0))
            if problem.accumulation > 1:
                sum_bytes[storage.parameter] = storage.nbytes
            if not staying[storage.parameter]:
                state_bytes[storage.parameter] = storage.state_bytes
                gradient = replace(gradient, parameter="").without_state()
            others.append(gradient)
        elif storage.kind is Kind.FETCHED and storage.parameter in resident:
            lives.setdefault(storage.parameter, []).append(storage)
            if problem.copies_parameters:
                others.append(replace(storage, kind=Kind.ACTIVATION, birth=storage.ready, spillable=False))
        else:
            others.append(storage)
    kept = [
        replace(
            parts[0],
            name=f"{parameter} on the device" if problem.copies_parameters else parts[0].name,
            kind=Kind.PARAMETER,
            birth=Step(0),
            ready=Step(0),
            death=end,
            uses=tuple(sorted({use for part in parts for use in part.uses})),
        )
        for parameter, parts in lives.items()
    ]
    external_bytes = problem.external_bytes + sum(state_bytes.values()) + sum(sum_bytes.values())
    copied = problem.copies_parameters
    now = {} if copied else {part.name: parts[0].name for parts in lives.values() for part in parts[1:]}
    collectives = tuple(each.renamed(now) for each in problem.collectives)
    return replace(problem, storages=(*kept, *others), external_bytes=external_bytes, collectives=collectives)


def least_bytes_beside_parameters(problem: Problem) -> int:
    """Return the most that is on the device at any step beside offloaded parameters, gradients and their state."""
    memory = least_bytes(problem)
    for storage in problem.storages:
        if storage.kind in (Kind.FETCHED, Kind.STORED):
            memory[storage.birth : storage.death] -= storage.nbytes
    return int(memory.max(initial=problem.external_bytes))


def pinned_bytes(
    problem: Problem,
    resident: Collection[str],
    updated_here: Collection[str] = (),
    summed_here: Collection[str] = (),
) -> int:
    """Return what these parameters, and the state and the sums of some, take on the device all the time."""
    nbytes = {s.parameter: s.nbytes for s in problem.storages if s.kind is Kind.FETCHED}
    state_bytes = {s.parameter: s.state_bytes for s in problem.storages if s.kind is Kind.STORED}
    pinned = sum(nbytes.get(each, 0) for each in resident) + sum(state_bytes.get(each, 0) for each in updated_here)
    if problem.accumulation > 1:
        sum_bytes = {s.parameter: s.nbytes for s in problem.storages if s.kind is Kind.STORED}
        pinned += sum(sum_bytes.get(each, 0) for each in {*updated_here, *summed_here})
    return pinned


def first_parameters(problem: Problem, share: float, having: Kind = Kind.FETCHED) -> tuple[str, ...]:
    """Return the parameters that are read first, those on disk before others, up to `share` of the bytes of all.

    Only those count of which there is a storage of kind `having`: that have a gradient, for STORED.
    """
    sizes: dict[str, int] | None = problem.derived.get(("bytes in order of reading", having))
    if sizes is None:  # many shares are tried
        sizes = problem.derived["bytes in order of reading", having] = _bytes_in_order_of_reading(problem, having)
    left_bytes = int(sum(sizes.values()) * share)
    chosen: list[str] = []
    for parameter, nbytes in sizes.items():
        if nbytes <= left_bytes:
            left_bytes -= nbytes
            chosen.append(parameter)
    return tuple(chosen)


def _bytes_in_order_of_reading(problem: Problem, having: Kind) -> dict[str, int]:
    sizes: dict[str, int] = {}
    candidates = {storage.parameter for storage in problem.storages if storage.kind is having}
    for storage in sorted(problem.storages, key=lambda s: (s.tier is not Tier.NVME, s.birth, s.name)):
        if storage.kind is Kind.FETCHED and storage.parameter in candidates:
            sizes.setdefault(storage.parameter, storage.nbytes)
    return sizes


def _starts_ns(problem: Problem, arrivals: Iterable[Storage]) -> list[float]:
    """Return when each step starts at the earliest, and when the last one ends: once what it reads has arrived.

    Where copies take longer than kernels, steps wait. Without these waits copies would seem to be in time only if they
    began so early that they queue up, and each would hold its bytes on the device meanwhile.
    """
    starts_ns = np.concatenate([[0.0], np.cumsum(paced_ns(problem), dtype=float)])
    waits_ns = np.zeros_like(starts_ns)
    late_ns = disk_ns = link_ns = 0.0
    in_backward = False
    for storage in sorted(arrivals, key=lambda each: each.birth):
        if not in_backward and storage.birth >= problem.boundary:  # its graph begins these
            in_backward = True
            disk_ns = link_ns = max(link_ns, starts_ns[problem.boundary] + late_ns)
        times = copy_times(problem.links, storage.nbytes, storage.tier)
        if storage.tier is Tier.NVME:
            disk_ns += times.read
            link_ns = max(link_ns, disk_ns)
        link_ns += times.into
        waits_ns[storage.birth] += (wait_ns := max(0.0, link_ns - late_ns - starts_ns[storage.birth]))
        late_ns += wait_ns
    return [float(start_ns) for start_ns in starts_ns + np.cumsum(waits_ns)]


def _arrival(problem: Problem, barriers: Barriers, storage: Storage) -> Transfer:
    """Return the load that begins as late as can be."""
    back = CopyIn(prefetch_at=_latest_prefetch(problem, barriers, storage), needed_at=storage.birth)
    return Transfer(name=storage.name, nbytes=storage.nbytes, tier=storage.tier, back=back)


def _latest_prefetch(problem: Problem, barriers: Barriers, storage: Storage) -> Step:
    first = Step(0) if storage.birth < problem.boundary else problem.boundary
    latest = barriers.fetch_by(storage.birth)
    if problem.copies_parameters and storage.ready:  # the graph's own op fetches what no earlier point has
        latest = min(latest, storage.ready)
    return max(first, latest)


def _earliest_freed(problem: Problem, barriers: Barriers, storage: Storage) -> tuple[Step, Step]:
    """Return the first step at which the bytes of a gradient are free, and the last: the end of its graph."""
    end = problem.boundary if storage.death <= problem.boundary else Step(len(problem.ops))
    return min(barriers.freed_from(storage.death), end), end


def _departures(
    problem: Problem, barriers: Barriers, memory: Profile, limit: int, starts_ns: Sequence[float]
) -> list[Transfer]:
    """Time the gradients in the order in which they are done; `memory` is kept up to date.

    First of all each gets the steps up to which its bytes cannot be free: an earlier one that takes its time must not
    be in the way of a later one.
    """
    transfers, link_free = [], 0.0
    done = sorted((s for s in problem.storages if s.kind is Kind.STORED), key=lambda s: (s.death, s.name))
    ends = [_earliest_freed(problem, barriers, storage) for storage in done]
    for storage, (earliest, _) in zip(done, ends, strict=True):
        memory[storage.death : earliest] += storage.nbytes
    for storage, (earliest, end) in zip(done, ends, strict=True):
        times = copy_times(problem.links, storage.nbytes, Tier.HOST)
        link_free = max(starts_ns[storage.death], link_free) + times.out
        landed = min(barriers.freed_from(bisect_left(starts_ns, link_free, earliest, end)), end)
        over = memory[earliest:landed] + storage.nbytes > limit
        gone = max(earliest, barriers.freed_by(earliest + int(over.argmax()))) if over.any() else landed
        memory[earliest:gone] += storage.nbytes
        out = CopyOut(after=max(storage.uses), freed_at=gone)
        transfers.append(Transfer(name=storage.name, nbytes=storage.nbytes, tier=Tier.HOST, out=out))
    return transfers


def _with_transfer(storage: Storage, transfer: Transfer | None) -> Storage:
    if transfer is None:
        return storage
    if transfer.out is None:
        at = transfer.prefetch_at
        return storage if at == storage.birth else storage.living(at, storage.death, storage.uses, storage.ready)
    freed = transfer.freed_at
    return storage if freed == storage.death else storage.living(storage.birth, freed, storage.uses, storage.ready)


def _derated(links: Links, out_bytes_per_s: float, in_bytes_per_s: float) -> Links:
    left = {}
    for way, taken in (("d2h", out_bytes_per_s), ("h2d", in_bytes_per_s)):
        for name in (f"{way}_bytes_per_s", f"{way}_duplex_bytes_per_s"):
            rate = getattr(links, name)
            left[name] = min(rate, max(1, int(max(rate - taken, rate * TUNING.least_link_share))))  # 0: no link
    return replace(links, **left)
