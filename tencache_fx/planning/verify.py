"""The plan's independent checker: every rule of a valid plan, re-derived in the plainest way.

It shares no code with the policies, the planner or the arithmetic in `plan.py`. It may not be clever, and but for what
the device holds, which regions of many thousand steps ask for, it may be slow.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from tencache_fx.errors import InvariantError
from tencache_fx.planning.plan import Plan, PoolClass, Transfer, TransferKind
from tencache_fx.planning.problem import Kind, Problem, Storage, Tier


def verify_plan(problem: Problem, plan: Plan) -> None:
    """Return quietly if `plan` keeps every rule.

    Raises `InvariantError` that names the broken rule, the trip and the numbers. O(spills x steps).
    """
    storages = {storage.name: storage for storage in problem.storages}
    seen: set[str] = set()
    for spill in plan.spills:
        if spill.name not in storages:
            _fail("known-storage", spill, "the region has no storage of that name")
        if spill.name in seen:
            _fail("one-trip", spill, "it travels twice")
        seen.add(spill.name)
        if spill.kind is TransferKind.ROUND:
            _check_storage(problem, storages[spill.name], spill)
            _check_trip(problem, storages[spill.name], spill)
        else:
            _check_move(problem, storages[spill.name], spill)
    for storage in problem.storages:
        if storage.kind in (Kind.FETCHED, Kind.SUNK) and storage.name not in seen:
            _fail("every-move", None, f"{storage.name}, a {storage.kind}, does not travel")
    _check_device(problem, plan)
    _check_host(problem, plan)
    _check_disk(problem, plan)
    _check_traffic(plan)


def _fail(rule: str, spill: Transfer | None, what: str) -> NoReturn:
    where = "" if spill is None else f" ({spill.name}, {spill.nbytes} bytes to {spill.tier})"
    raise InvariantError(f"the plan breaks the rule {rule}{where}: {what}.")


def _check_storage(problem: Problem, storage: Storage, spill: Transfer) -> None:
    if spill.nbytes != storage.nbytes:
        _fail("same-bytes", spill, f"the storage has {storage.nbytes} bytes")
    if not storage.spillable:
        _fail("spillable", spill, "the storage may not leave the device")
    if spill.nbytes < problem.min_spill_bytes:
        _fail("worth-an-op", spill, f"trips start at {problem.min_spill_bytes} bytes")
    if spill.tier not in (Tier.HOST, Tier.NVME):
        _fail("tier", spill, "a trip goes to host or nvme")


def _check_move(problem: Problem, storage: Storage, spill: Transfer) -> None:
    """A parameter comes in before its first reader in the same graph, a gradient leaves behind its last."""
    start, end = (0, problem.boundary) if storage.birth < problem.boundary else (problem.boundary, len(problem.ops))
    if spill.nbytes != storage.nbytes:
        _fail("same-bytes", spill, f"the storage has {storage.nbytes} bytes")
    if spill.tier is not Tier.HOST:
        _fail("tier", spill, "homes are in host memory")
    if storage.kind is not (Kind.FETCHED if spill.kind is TransferKind.IN else Kind.SUNK):
        _fail("one-way", spill, f"a {storage.kind} does not go {spill.kind}")
    if (
        spill.kind is TransferKind.IN
        and not start <= spill.prefetch_at <= storage.birth == spill.needed_at == spill.freed_at == spill.copy_out_after
    ):
        _fail("move-in", spill, f"fetch {spill.prefetch_at}, back {spill.needed_at}, but it is born at {storage.birth}")
    if spill.kind is TransferKind.OUT and not max(storage.uses) == spill.copy_out_after < spill.freed_at <= end:
        _fail(
            "move-out",
            spill,
            f"offload {spill.copy_out_after}, gone {spill.freed_at}, but its last use is {max(storage.uses)}",
        )
    if spill.kind is TransferKind.OUT and not spill.prefetch_at == spill.needed_at == storage.death:
        _fail("move-out", spill, f"fetch {spill.prefetch_at}, back {spill.needed_at}, but it dies at {storage.death}")
    fences = {*problem.fences, problem.boundary, len(problem.ops)}
    if problem.fences and spill.kind is TransferKind.OUT and spill.freed_at not in fences:
        _fail("fences", spill, f"gone {spill.freed_at} is no fence")
    behind = {fence + 1 for fence in problem.fences} | {0, problem.boundary}
    if problem.fences and spill.kind is TransferKind.IN and spill.prefetch_at not in behind:
        _fail("fences", spill, f"fetch {spill.prefetch_at} does not follow a fence")


def _check_fences(problem: Problem, spill: Transfer) -> None:
    """Bytes are sure to be gone at a fence or the boundary, and are to be counted from behind one of these."""
    if not problem.fences:
        return
    fences = set(problem.fences)
    if spill.freed_at not in fences | {problem.boundary, len(problem.ops)}:
        _fail("fences", spill, f"gone {spill.freed_at} is no fence")
    if spill.prefetch_at not in {fence + 1 for fence in fences} | {0, problem.boundary}:
        _fail("fences", spill, f"fetch {spill.prefetch_at} does not follow a fence")


def _check_trip(problem: Problem, storage: Storage, spill: Transfer) -> None:
    offload, gone, fetch, back = spill.copy_out_after, spill.freed_at, spill.prefetch_at, spill.needed_at
    if offload < storage.birth:
        _fail("offload-after-birth", spill, f"offload {offload} is before its birth at {storage.birth}")
    if offload < storage.ready:
        _fail("offload-when-ready", spill, f"offload {offload} is before step {storage.ready}, when it is complete")
    if offload >= gone:
        _fail("offload-before-gone", spill, f"offload {offload}, gone {gone}")
    if gone > fetch:
        _fail("gone-before-fetch", spill, f"gone {gone}, fetch {fetch}")
    if fetch > back:
        _fail("fetch-before-back", spill, f"fetch {fetch}, back {back}")
    if back not in storage.uses:
        _fail("back-is-a-use", spill, f"back {back} is none of its uses {storage.uses}")
    earlier = [use for use in storage.uses if use < back]
    if not earlier:
        _fail("used-before", spill, f"back {back} is its first use")
    last = max(earlier)
    if gone <= last:
        _fail("gone-after-last-use", spill, f"gone {gone}, but it is used at {last}")
    if not (last < storage.held_until <= gone and storage.held_until <= back) and storage.held_until:
        until = storage.held_until
        _fail("held-by-the-caller", spill, f"gone {gone}, last used at {last}, but the caller holds it until {until}")
    if last < problem.boundary <= back and not gone <= problem.boundary <= fetch:
        _fail("boundary", spill, f"gone {gone}, fetch {fetch}, but the backward graph starts at {problem.boundary}")
    _check_fences(problem, spill)
    if last >= problem.boundary > offload:
        _fail("boundary", spill, f"offload {offload} is in the forward graph, but it is used there until {last}")


def _check_device(problem: Problem, plan: Plan) -> None:
    trips = {spill.name: spill for spill in plan.spills}
    held = np.array([problem.outside_bytes + op.scratch_bytes for op in problem.ops], dtype=np.int64)
    coming_bytes = 0
    for storage in problem.storages:
        trip = trips.get(storage.name)
        birth, death = storage.birth, storage.death
        if trip is not None and trip.kind is TransferKind.IN:
            birth = trip.prefetch_at
        elif trip is not None and trip.kind is TransferKind.OUT:
            death = trip.freed_at
        held[birth:death] += storage.nbytes
        if trip is not None and trip.kind is TransferKind.ROUND:
            held[max(birth, trip.freed_at) : min(death, trip.prefetch_at)] -= storage.nbytes
        if birth == problem.boundary and storage.kind is not Kind.FETCHED:
            coming_bytes += storage.nbytes
    if problem.boundary < len(problem.ops):
        own_bytes = coming_bytes + problem.ops[problem.boundary].scratch_bytes
        held[problem.boundary] += max(0, problem.between_bytes - own_bytes)
    limit = problem.budgets.device_bytes
    if limit is not None and (over := np.flatnonzero(held > limit)).size:
        step, name = over[0], problem.ops[over[0]].name
        _fail("device-budget", None, f"step {step} ({name}) holds {held[step]} bytes, the budget is {limit}")
    most = held.max(initial=problem.outside_bytes)
    at = int(held.argmax()) if held.size else 0
    if plan.forecast.peak_bytes != most:
        _fail("forecast-peak", None, f"{plan.forecast.peak_bytes} bytes foretold, {most} found at step {at}")


def _check_host(problem: Problem, plan: Plan) -> None:
    _check_lent("pool", plan.pool, [s for s in plan.spills if s.tier is Tier.HOST and s.kind is TransferKind.ROUND])
    for spill in plan.spills:
        if spill.tier is Tier.NVME and not any(c.nbytes >= spill.nbytes and c.count > 0 for c in plan.staging):
            _fail("staging", spill, f"no staging buffer holds it: {plan.staging}")
    held = sum(c.nbytes * c.count for c in (*plan.pool, *plan.staging))
    if held > problem.budgets.host_bytes:
        _fail("host-budget", None, f"pool and staging hold {held} bytes, the budget is {problem.budgets.host_bytes}")
    if plan.forecast.host_bytes != held:
        _fail("forecast-host", None, f"{plan.forecast.host_bytes} bytes foretold, {held} found")


def _check_lent(rule: str, classes: Sequence[PoolClass], spills: Sequence[Transfer]) -> None:
    """Check that at no gap more buffers of a class are lent than there are; a trip takes the smallest that holds it."""
    by_class: dict[PoolClass, list[Transfer]] = {pool: [] for pool in classes}
    for spill in spills:
        holding = [pool for pool in classes if pool.nbytes >= spill.nbytes]
        if not holding:
            _fail(rule, spill, "no buffer holds it")
        by_class[min(holding, key=lambda pool: pool.nbytes)].append(spill)
    for pool, lent in by_class.items():
        for gap in _gaps(lent):
            now = sum(spill.copy_out_after <= gap < spill.needed_at for spill in lent)
            if now > pool.count:
                _fail(rule, None, f"{now} buffers of {pool.nbytes} bytes are lent after step {gap}, of {pool.count}")


def _gaps(spills: Iterable[Transfer]) -> list[int]:
    """Return where most can be lent at once: only an offload makes the number grow."""
    return sorted({spill.copy_out_after for spill in spills})


def _check_disk(problem: Problem, plan: Plan) -> None:
    trips = [spill for spill in plan.spills if spill.tier is Tier.NVME]
    for gap in _gaps(trips):
        held = sum(spill.nbytes for spill in trips if spill.copy_out_after <= gap < spill.needed_at)
        if held > plan.forecast.disk_bytes:
            _fail("forecast-disk", None, f"{plan.forecast.disk_bytes} bytes foretold, {held} found after step {gap}")
    if plan.forecast.disk_bytes > problem.budgets.disk_bytes:
        used, limit = plan.forecast.disk_bytes, problem.budgets.disk_bytes
        _fail("disk-budget", None, f"the extents hold {used} bytes, the budget is {limit}")


def _check_traffic(plan: Plan) -> None:
    f = plan.forecast
    moved_out = sum(spill.nbytes for spill in plan.spills if spill.kind is not TransferKind.IN)
    moved_in = sum(spill.nbytes for spill in plan.spills if spill.kind is not TransferKind.OUT)
    on_disk = sum(spill.nbytes for spill in plan.spills if spill.tier is Tier.NVME)
    for link, foretold, found in (
        ("d2h", f.d2h_bytes, moved_out),
        ("h2d", f.h2d_bytes, moved_in),
        ("disk write", f.disk_write_bytes, on_disk),
        ("disk read", f.disk_read_bytes, on_disk),
    ):
        if foretold != found:
            _fail("forecast-traffic", None, f"{foretold} bytes foretold over {link}, {found} found")
