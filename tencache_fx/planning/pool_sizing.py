"""How many buffers of which sizes swaps need: host memory and disk are sized by what is in use at once."""

from collections.abc import Iterable, Sequence

from tencache_fx.planning.plan import PoolClass, Transfer, TransferKind
from tencache_fx.planning.problem import Step, Tier
from tencache_fx.units import PAGE_BYTES, round_up


def size_classes(in_use: Sequence[tuple[Step, Step, int]]) -> tuple[PoolClass, ...]:
    """Return the fewest buffers that serve the `in_use` intervals `(from, until, nbytes)`, sized by class.

    Sizes are rounded to pages; neighbouring sizes share a class while that wastes under 3 %. A class needs as many
    buffers as are in use at once (an interval graph's clique number), so the pool cannot run dry: 10Cache sizes its
    classes by share of bytes instead. O(n log n) in intervals.
    """
    classes: list[list[tuple[Step, Step]]] = []
    tops: list[int] = []
    for start, stop, nbytes in sorted(in_use, key=lambda item: (-item[2], item[0], item[1])):
        size = round_up(nbytes, PAGE_BYTES)
        if not tops or size < tops[-1] * 0.97:
            tops.append(size)
            classes.append([])
        classes[-1].append((start, stop))
    return tuple(PoolClass(nbytes=top, count=_most_at_once(spans)) for top, spans in zip(tops, classes, strict=True))


def pool_classes(transfers: Iterable[Transfer], tier: Tier) -> tuple[PoolClass, ...]:
    """Return the buffers (host) or extents (nvme) that the swaps to `tier` need; each is in use from the copy out to
    `needed_at`.

    A swap uses the smallest class that holds it. Offloaded parameters and gradients have buffers of their own.
    """
    swaps = [transfer for transfer in transfers if transfer.tier is tier and transfer.kind is TransferKind.SWAP]
    return size_classes([(transfer.copy_out_after, transfer.needed_at, transfer.nbytes) for transfer in swaps])


def staging_classes(transfers: Iterable[Transfer], room_bytes: int) -> tuple[PoolClass, ...]:
    """Return the buffers that swaps to NVMe pass through: each holds the largest, four at most, one at least.

    Four let a copy out, a write, a read and a copy in go on at once. Fewer if `room_bytes` of host memory hold fewer;
    the one that is always there may exceed them, which the caller has to check. Parameters on disk pass through buffers
    of their own, beside the host memory of plans.
    """
    swaps = (transfer for transfer in transfers if transfer.kind is TransferKind.SWAP)
    sizes = [transfer.nbytes for transfer in swaps if transfer.tier is Tier.NVME]
    if not sizes:
        return ()
    nbytes = round_up(max(sizes), PAGE_BYTES)
    return (PoolClass(nbytes=nbytes, count=max(1, min(4, len(sizes), room_bytes // nbytes))),)


def host_buffers(transfers: Sequence[Transfer], host_bytes: int) -> tuple[tuple[PoolClass, ...], tuple[PoolClass, ...]]:
    """Return the pool and the staging buffers that `transfers` need in host memory of `host_bytes`."""
    pool = pool_classes(transfers, Tier.HOST)
    return pool, staging_classes(transfers, host_bytes - total_bytes(pool))


def total_bytes(classes: Iterable[PoolClass]) -> int:
    """Return the bytes of all buffers of `classes`."""
    return sum(pool.nbytes * pool.count for pool in classes)


def _most_at_once(spans: Sequence[tuple[Step, Step]]) -> int:
    events = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    most = now = 0
    for _, change in events:  # at one point in time returns (-1) sort before loans (+1)
        now += change
        most = max(most, now)
    return most
