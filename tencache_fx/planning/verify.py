"""The plan's independent checker: every rule of a valid plan, re-derived in the plainest way.

It shares no code with the policies, the planner or the arithmetic in `plan.py`. It may not be clever, and but for what
the device holds, which regions of many thousand steps ask for, it may be slow.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from tencache_fx.errors import InvariantError
from tencache_fx.planning.plan import Plan, PoolClass, Transfer, TransferKind
from tencache_fx.planning.problem import Collective, Kind, Problem, Storage, Tier


def verify_plan(problem: Problem, plan: Plan) -> None:
    """Return quietly if `plan` keeps every rule.

    Raises `InvariantError` that names the broken rule, the transfer and the numbers. O(transfers x steps).
    """
    storages = {storage.name: storage for storage in problem.storages}
    seen: set[str] = set()
    for transfer in plan.transfers:
        if transfer.name not in storages:
            _fail("known-storage", transfer, "the region has no storage of that name")
        if transfer.name in seen:
            _fail("one-transfer", transfer, "it is transferred twice")
        seen.add(transfer.name)
        if transfer.nbytes != storages[transfer.name].nbytes:
            _fail("same-bytes", transfer, f"the storage has {storages[transfer.name].nbytes} bytes")
        if transfer.kind is TransferKind.SWAP:
            _check_storage(problem, storages[transfer.name], transfer)
            _check_swap(problem, storages[transfer.name], transfer)
        else:
            _check_one_way(problem, storages[transfer.name], transfer)
    for storage in problem.storages:
        if storage.kind in (Kind.FETCHED, Kind.STORED) and storage.name not in seen:
            _fail("every-parameter", None, f"{storage.name}, a {storage.kind}, has no transfer")
    _check_device(problem, plan)
    _check_host(problem, plan)
    _check_disk(problem, plan)
    _check_traffic(plan)
    _check_collectives(problem, plan)


def _fail(rule: str, transfer: Transfer | None, what: str) -> NoReturn:
    where = "" if transfer is None else f" ({transfer.name}, {transfer.nbytes} bytes to {transfer.tier})"
    raise InvariantError(f"the plan breaks the rule {rule}{where}: {what}.")


def _check_storage(problem: Problem, storage: Storage, transfer: Transfer) -> None:
    if not storage.spillable:
        _fail("spillable", transfer, "the storage may not leave the device")
    if transfer.nbytes < problem.min_spill_bytes:
        _fail("worth-an-op", transfer, f"transfers start at {problem.min_spill_bytes} bytes")
    if transfer.tier not in (Tier.HOST, Tier.NVME):
        _fail("tier", transfer, "a transfer goes to host or nvme")


def _check_one_way(problem: Problem, storage: Storage, transfer: Transfer) -> None:
    """A parameter comes in before its first reader in the same graph, a gradient is copied out behind its last."""
    start, end = (0, problem.boundary) if storage.birth < problem.boundary else (problem.boundary, len(problem.ops))
    if transfer.tier is not (storage.tier if transfer.kind is TransferKind.LOAD else Tier.HOST):
        _fail("tier", transfer, f"the parameter is in {storage.tier}, and gradients are offloaded to host memory")
    if storage.kind is not (Kind.FETCHED if transfer.kind is TransferKind.LOAD else Kind.STORED):
        _fail("one-way", transfer, f"a {storage.kind} has no transfer to {transfer.kind}")
    if transfer.kind is TransferKind.LOAD and not start <= transfer.prefetch_at <= storage.birth == transfer.needed_at:
        _fail(
            "load-steps",
            transfer,
            f"fetch {transfer.prefetch_at}, back {transfer.needed_at}, but it is born at {storage.birth}",
        )
    loads_late = transfer.kind is TransferKind.LOAD and transfer.prefetch_at > storage.ready > 0
    if problem.copies_parameters and loads_late:
        _fail("load-by-its-op", transfer, f"fetch {transfer.prefetch_at}, but its op fetches it at {storage.ready}")
    if (
        transfer.kind is TransferKind.STORE
        and not max(storage.uses) == transfer.copy_out_after < transfer.freed_at <= end
    ):
        _fail(
            "store-steps",
            transfer,
            f"offload {transfer.copy_out_after}, freed {transfer.freed_at}, but its last use is {max(storage.uses)}",
        )
    _check_barriers(problem, transfer)


def _check_barriers(problem: Problem, transfer: Transfer) -> None:
    """Bytes are sure to be freed at a barrier or the boundary, and are to be counted from behind one of these."""
    if not problem.barriers:
        return
    ends = {*problem.barriers, problem.boundary, len(problem.ops)}
    if transfer.out is not None and transfer.freed_at not in ends:
        _fail("barriers", transfer, f"freed {transfer.freed_at} is no barrier")
    begins = {barrier + 1 for barrier in problem.barriers} | {0, problem.boundary}
    if transfer.back is not None and transfer.prefetch_at not in begins:
        _fail("barriers", transfer, f"fetch {transfer.prefetch_at} does not follow a barrier")


def _check_swap(problem: Problem, storage: Storage, transfer: Transfer) -> None:
    offload, freed, fetch, back = transfer.copy_out_after, transfer.freed_at, transfer.prefetch_at, transfer.needed_at
    if offload < storage.birth:
        _fail("offload-after-birth", transfer, f"offload {offload} is before its birth at {storage.birth}")
    if offload < storage.ready:
        _fail("offload-when-ready", transfer, f"offload {offload} is before step {storage.ready}, when it is complete")
    if offload >= freed:
        _fail("offload-before-freed", transfer, f"offload {offload}, freed {freed}")
    if freed > fetch:
        _fail("freed-before-prefetch", transfer, f"freed {freed}, fetch {fetch}")
    if fetch > back:
        _fail("prefetch-before-needed", transfer, f"fetch {fetch}, back {back}")
    if back not in storage.uses:
        _fail("needed-at-a-use", transfer, f"back {back} is none of its uses {storage.uses}")
    earlier = [use for use in storage.uses if use < back]
    if not earlier:
        _fail("used-before", transfer, f"back {back} is its first use")
    last = max(earlier)
    if freed <= last:
        _fail("freed-after-last-use", transfer, f"freed {freed}, but it is used at {last}")
    if not (last < storage.caller_frees_at <= freed and storage.caller_frees_at <= back) and storage.caller_frees_at:
        until = storage.caller_frees_at
        _fail(
            "held-by-the-caller", transfer, f"freed {freed}, last used at {last}, but the caller holds it until {until}"
        )
    if last < problem.boundary <= back and not freed <= problem.boundary <= fetch:
        _fail(
            "boundary", transfer, f"freed {freed}, fetch {fetch}, but the backward graph starts at {problem.boundary}"
        )
    _check_barriers(problem, transfer)
    if last >= problem.boundary > offload:
        _fail("boundary", transfer, f"offload {offload} is in the forward graph, but it is used there until {last}")


def _check_device(problem: Problem, plan: Plan) -> None:
    by_name = {transfer.name: transfer for transfer in plan.transfers}
    held = np.array([problem.external_bytes + op.scratch_bytes for op in problem.ops], dtype=np.int64)
    coming_bytes = 0
    for storage in problem.storages:
        transfer = by_name.get(storage.name)
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
        held[problem.boundary] += max(0, problem.boundary_bytes - own_bytes)
    limit = problem.budgets.device_bytes
    if limit is not None and (over := np.flatnonzero(held > limit)).size:
        step, name = over[0], problem.ops[over[0]].name
        _fail("device-budget", None, f"step {step} ({name}) holds {held[step]} bytes, the budget is {limit}")
    most = held.max(initial=problem.external_bytes)
    at = int(held.argmax()) if held.size else 0
    if plan.forecast.peak_bytes != most:
        _fail("forecast-peak", None, f"{plan.forecast.peak_bytes} bytes predicted, {most} found at step {at}")


def _check_host(problem: Problem, plan: Plan) -> None:
    _check_in_use("pool", plan.pool, [s for s in plan.transfers if s.tier is Tier.HOST and s.kind is TransferKind.SWAP])
    for transfer in _swaps_to_disk(plan):
        if not any(c.nbytes >= transfer.nbytes and c.count > 0 for c in plan.staging):
            _fail("staging", transfer, f"no staging buffer holds it: {plan.staging}")
    held = sum(c.nbytes * c.count for c in (*plan.pool, *plan.staging))
    if held > problem.budgets.host_bytes:
        _fail("host-budget", None, f"pool and staging hold {held} bytes, the budget is {problem.budgets.host_bytes}")
    if plan.forecast.host_bytes != held:
        _fail("forecast-host", None, f"{plan.forecast.host_bytes} bytes predicted, {held} found")


def _check_in_use(rule: str, classes: Sequence[PoolClass], transfers: Sequence[Transfer]) -> None:
    """Check that no more buffers of a class are in use than there are; a swap takes the smallest that holds it."""
    by_class: dict[PoolClass, list[Transfer]] = {pool: [] for pool in classes}
    for transfer in transfers:
        holding = [pool for pool in classes if pool.nbytes >= transfer.nbytes]
        if not holding:
            _fail(rule, transfer, "no buffer holds it")
        by_class[min(holding, key=lambda pool: pool.nbytes)].append(transfer)
    for pool, in_use in by_class.items():
        for gap in _gaps(in_use):
            now = sum(transfer.copy_out_after <= gap < transfer.needed_at for transfer in in_use)
            if now > pool.count:
                _fail(rule, None, f"{now} buffers of {pool.nbytes} bytes are in use after step {gap}, of {pool.count}")


def _gaps(transfers: Iterable[Transfer]) -> list[int]:
    """Return where most can be in use at once: only an offload makes the number grow."""
    return sorted({transfer.copy_out_after for transfer in transfers})


def _check_disk(problem: Problem, plan: Plan) -> None:
    on_disk = _swaps_to_disk(plan)
    for gap in _gaps(on_disk):
        held = sum(transfer.nbytes for transfer in on_disk if transfer.copy_out_after <= gap < transfer.needed_at)
        if held > plan.forecast.disk_bytes:
            _fail("forecast-disk", None, f"{plan.forecast.disk_bytes} bytes predicted, {held} found after step {gap}")
    if plan.forecast.disk_bytes > problem.budgets.disk_bytes:
        used, limit = plan.forecast.disk_bytes, problem.budgets.disk_bytes
        _fail("disk-budget", None, f"the extents hold {used} bytes, the budget is {limit}")


def _swaps_to_disk(plan: Plan) -> list[Transfer]:
    """Return the transfers that need staging buffers and extents; a load from disk has those of its parameter."""
    return [each for each in plan.transfers if each.tier is Tier.NVME and each.kind is TransferKind.SWAP]


def _check_traffic(plan: Plan) -> None:
    f = plan.forecast
    moved_out = sum(transfer.nbytes for transfer in plan.transfers if transfer.kind is not TransferKind.LOAD)
    moved_in = sum(transfer.nbytes for transfer in plan.transfers if transfer.kind is not TransferKind.STORE)
    written = sum(transfer.nbytes for transfer in _swaps_to_disk(plan))
    read = sum(transfer.nbytes for transfer in plan.transfers if transfer.tier is Tier.NVME)
    for link, predicted, found in (
        ("d2h", f.d2h_bytes, moved_out),
        ("h2d", f.h2d_bytes, moved_in),
        ("disk write", f.disk_write_bytes, written),
        ("disk read", f.disk_read_bytes, read),
    ):
        if predicted != found:
            _fail("forecast-traffic", None, f"{predicted} bytes predicted over {link}, {found} found")


def _check_collectives(problem: Problem, plan: Plan) -> None:
    """Check that what a collective reads and writes is there from its begin on, until the step that waits has run."""
    storages = {storage.name: storage for storage in problem.storages}
    transfers = {transfer.name: transfer for transfer in plan.transfers}
    busy_ns = 0
    for each in problem.collectives:
        busy_ns += each.duration_ns
        if not 0 <= each.begin < each.needed_at <= len(problem.ops):
            _fail("collective-steps", None, f"{each.name} begins at {each.begin}, and {each.needed_at} waits for it")
        for name in (*each.reads, *each.writes):
            if name not in storages:
                _fail("collective-storage", None, f"{each.name} uses {name}, and the region has no such storage")
            _check_held(each, storages[name], transfers.get(name), len(problem.ops))
    if plan.forecast.collective_ns != busy_ns:
        _fail("forecast-collectives", None, f"{plan.forecast.collective_ns} ns predicted, {busy_ns} found")


def _check_held(collective: Collective, storage: Storage, transfer: Transfer | None, count: int) -> None:
    begin, end = collective.begin, min(collective.needed_at + 1, count)
    birth, death = storage.birth, storage.death
    if birth > begin or death < end:
        what = f"{collective.name} uses it during [{begin}, {end}), and it lives during [{birth}, {death})"
        _fail("collective-liveness", transfer, f"{storage.name}: {what}")
    if transfer is None or transfer.out is None or (transfer.back is not None and transfer.needed_at <= begin):
        return  # it stays, or came in before
    if transfer.freed_at < end:
        _fail("collective-holds", transfer, f"freed {transfer.freed_at}, but {collective.name} uses it until {end}")
    if storage.name in collective.writes and begin <= transfer.copy_out_after < collective.needed_at:
        after = transfer.copy_out_after
        _fail("collective-writes", transfer, f"offload {after}, but {collective.name} writes it until {end}")
