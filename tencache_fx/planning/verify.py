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

    Raises `InvariantError` that names the broken rule, the transfer and the numbers. O(spills x steps).
    """
    storages = {storage.name: storage for storage in problem.storages}
    seen: set[str] = set()
    for spill in plan.spills:
        if spill.name not in storages:
            _fail("known-storage", spill, "the region has no storage of that name")
        if spill.name in seen:
            _fail("one-transfer", spill, "it is transferred twice")
        seen.add(spill.name)
        if spill.kind is TransferKind.SWAP:
            _check_storage(problem, storages[spill.name], spill)
            _check_swap(problem, storages[spill.name], spill)
        else:
            _check_one_way(problem, storages[spill.name], spill)
    for storage in problem.storages:
        if storage.kind in (Kind.FETCHED, Kind.STORED) and storage.name not in seen:
            _fail("every-parameter", None, f"{storage.name}, a {storage.kind}, has no transfer")
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
        _fail("worth-an-op", spill, f"transfers start at {problem.min_spill_bytes} bytes")
    if spill.tier not in (Tier.HOST, Tier.NVME):
        _fail("tier", spill, "a transfer goes to host or nvme")


def _check_one_way(problem: Problem, storage: Storage, spill: Transfer) -> None:
    """A parameter comes in before its first reader in the same graph, a gradient is copied out behind its last."""
    start, end = (0, problem.boundary) if storage.birth < problem.boundary else (problem.boundary, len(problem.ops))
    if spill.nbytes != storage.nbytes:
        _fail("same-bytes", spill, f"the storage has {storage.nbytes} bytes")
    if spill.tier is not Tier.HOST:
        _fail("tier", spill, "parameters and gradients are offloaded to host memory")
    if storage.kind is not (Kind.FETCHED if spill.kind is TransferKind.LOAD else Kind.STORED):
        _fail("one-way", spill, f"a {storage.kind} has no transfer to {spill.kind}")
    if spill.kind is TransferKind.LOAD and not start <= spill.prefetch_at <= storage.birth == spill.needed_at:
        _fail(
            "load-steps", spill, f"fetch {spill.prefetch_at}, back {spill.needed_at}, but it is born at {storage.birth}"
        )
    if spill.kind is TransferKind.STORE and not max(storage.uses) == spill.copy_out_after < spill.freed_at <= end:
        _fail(
            "store-steps",
            spill,
            f"offload {spill.copy_out_after}, freed {spill.freed_at}, but its last use is {max(storage.uses)}",
        )
    barriers = {*problem.barriers, problem.boundary, len(problem.ops)}
    if problem.barriers and spill.kind is TransferKind.STORE and spill.freed_at not in barriers:
        _fail("barriers", spill, f"freed {spill.freed_at} is no barrier")
    behind = {barrier + 1 for barrier in problem.barriers} | {0, problem.boundary}
    if problem.barriers and spill.kind is TransferKind.LOAD and spill.prefetch_at not in behind:
        _fail("barriers", spill, f"fetch {spill.prefetch_at} does not follow a barrier")


def _check_barriers(problem: Problem, spill: Transfer) -> None:
    """Bytes are sure to be freed at a barrier or the boundary, and are to be counted from behind one of these."""
    if not problem.barriers:
        return
    barriers = set(problem.barriers)
    if spill.freed_at not in barriers | {problem.boundary, len(problem.ops)}:
        _fail("barriers", spill, f"freed {spill.freed_at} is no barrier")
    if spill.prefetch_at not in {barrier + 1 for barrier in barriers} | {0, problem.boundary}:
        _fail("barriers", spill, f"fetch {spill.prefetch_at} does not follow a barrier")


def _check_swap(problem: Problem, storage: Storage, spill: Transfer) -> None:
    offload, freed, fetch, back = spill.copy_out_after, spill.freed_at, spill.prefetch_at, spill.needed_at
    if offload < storage.birth:
        _fail("offload-after-birth", spill, f"offload {offload} is before its birth at {storage.birth}")
    if offload < storage.ready:
        _fail("offload-when-ready", spill, f"offload {offload} is before step {storage.ready}, when it is complete")
    if offload >= freed:
        _fail("offload-before-freed", spill, f"offload {offload}, freed {freed}")
    if freed > fetch:
        _fail("freed-before-prefetch", spill, f"freed {freed}, fetch {fetch}")
    if fetch > back:
        _fail("prefetch-before-needed", spill, f"fetch {fetch}, back {back}")
    if back not in storage.uses:
        _fail("needed-at-a-use", spill, f"back {back} is none of its uses {storage.uses}")
    earlier = [use for use in storage.uses if use < back]
    if not earlier:
        _fail("used-before", spill, f"back {back} is its first use")
    last = max(earlier)
    if freed <= last:
        _fail("freed-after-last-use", spill, f"freed {freed}, but it is used at {last}")
    if not (last < storage.caller_frees_at <= freed and storage.caller_frees_at <= back) and storage.caller_frees_at:
        until = storage.caller_frees_at
        _fail("held-by-the-caller", spill, f"freed {freed}, last used at {last}, but the caller holds it until {until}")
    if last < problem.boundary <= back and not freed <= problem.boundary <= fetch:
        _fail("boundary", spill, f"freed {freed}, fetch {fetch}, but the backward graph starts at {problem.boundary}")
    _check_barriers(problem, spill)
    if last >= problem.boundary > offload:
        _fail("boundary", spill, f"offload {offload} is in the forward graph, but it is used there until {last}")


def _check_device(problem: Problem, plan: Plan) -> None:
    transfers = {spill.name: spill for spill in plan.spills}
    held = np.array([problem.external_bytes + op.scratch_bytes for op in problem.ops], dtype=np.int64)
    coming_bytes = 0
    for storage in problem.storages:
        transfer = transfers.get(storage.name)
        birth, death = storage.birth, storage.death
        if transfer is not None and transfer.kind is TransferKind.LOAD:
            birth = transfer.prefetch_at
        elif transfer is not None and transfer.kind is TransferKind.STORE:
            death = transfer.freed_at
        held[birth:death] += storage.nbytes
        if transfer is not None and transfer.kind is TransferKind.SWAP:
            held[max(birth, transfer.freed_at) : min(death, transfer.prefetch_at)] -= storage.nbytes
        if birth == problem.boundary and storage.kind is not Kind.FETCHED:
            coming_bytes += storage.nbytes
    if problem.boundary < len(problem.ops):
        own_bytes = coming_bytes + problem.ops[problem.boundary].scratch_bytes
        held[problem.boundary] += max(0, problem.between_bytes - own_bytes)
    limit = problem.budgets.device_bytes
    if limit is not None and (over := np.flatnonzero(held > limit)).size:
        step, name = over[0], problem.ops[over[0]].name
        _fail("device-budget", None, f"step {step} ({name}) holds {held[step]} bytes, the budget is {limit}")
    most = held.max(initial=problem.external_bytes)
    at = int(held.argmax()) if held.size else 0
    if plan.forecast.peak_bytes != most:
        _fail("forecast-peak", None, f"{plan.forecast.peak_bytes} bytes predicted, {most} found at step {at}")


def _check_host(problem: Problem, plan: Plan) -> None:
    _check_in_use("pool", plan.pool, [s for s in plan.spills if s.tier is Tier.HOST and s.kind is TransferKind.SWAP])
    for spill in plan.spills:
        if spill.tier is Tier.NVME and not any(c.nbytes >= spill.nbytes and c.count > 0 for c in plan.staging):
            _fail("staging", spill, f"no staging buffer holds it: {plan.staging}")
    held = sum(c.nbytes * c.count for c in (*plan.pool, *plan.staging))
    if held > problem.budgets.host_bytes:
        _fail("host-budget", None, f"pool and staging hold {held} bytes, the budget is {problem.budgets.host_bytes}")
    if plan.forecast.host_bytes != held:
        _fail("forecast-host", None, f"{plan.forecast.host_bytes} bytes predicted, {held} found")


def _check_in_use(rule: str, classes: Sequence[PoolClass], spills: Sequence[Transfer]) -> None:
    """Check that no more buffers of a class are in use than there are; a swap takes the smallest that holds it."""
    by_class: dict[PoolClass, list[Transfer]] = {pool: [] for pool in classes}
    for spill in spills:
        holding = [pool for pool in classes if pool.nbytes >= spill.nbytes]
        if not holding:
            _fail(rule, spill, "no buffer holds it")
        by_class[min(holding, key=lambda pool: pool.nbytes)].append(spill)
    for pool, in_use in by_class.items():
        for gap in _gaps(in_use):
            now = sum(spill.copy_out_after <= gap < spill.needed_at for spill in in_use)
            if now > pool.count:
                _fail(rule, None, f"{now} buffers of {pool.nbytes} bytes are in use after step {gap}, of {pool.count}")


def _gaps(spills: Iterable[Transfer]) -> list[int]:
    """Return where most can be in use at once: only an offload makes the number grow."""
    return sorted({spill.copy_out_after for spill in spills})


def _check_disk(problem: Problem, plan: Plan) -> None:
    transfers = [spill for spill in plan.spills if spill.tier is Tier.NVME]
    for gap in _gaps(transfers):
        held = sum(spill.nbytes for spill in transfers if spill.copy_out_after <= gap < spill.needed_at)
        if held > plan.forecast.disk_bytes:
            _fail("forecast-disk", None, f"{plan.forecast.disk_bytes} bytes predicted, {held} found after step {gap}")
    if plan.forecast.disk_bytes > problem.budgets.disk_bytes:
        used, limit = plan.forecast.disk_bytes, problem.budgets.disk_bytes
        _fail("disk-budget", None, f"the extents hold {used} bytes, the budget is {limit}")


def _check_traffic(plan: Plan) -> None:
    f = plan.forecast
    moved_out = sum(spill.nbytes for spill in plan.spills if spill.kind is not TransferKind.LOAD)
    moved_in = sum(spill.nbytes for spill in plan.spills if spill.kind is not TransferKind.STORE)
    on_disk = sum(spill.nbytes for spill in plan.spills if spill.tier is Tier.NVME)
    for link, predicted, found in (
        ("d2h", f.d2h_bytes, moved_out),
        ("h2d", f.h2d_bytes, moved_in),
        ("disk write", f.disk_write_bytes, on_disk),
        ("disk read", f.disk_read_bytes, on_disk),
    ):
        if predicted != found:
            _fail("forecast-traffic", None, f"{predicted} bytes predicted over {link}, {found} found")
