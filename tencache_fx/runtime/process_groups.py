"""torch's process groups, where its public functions do not tell: collectives issued, the store, aborting."""

import contextlib
from typing import Any

import torch.distributed as dist


def several_ranks() -> bool:
    """Return whether this process is one of several ranks that can wait for one another."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def store_connection() -> Any:
    """Return a connection of its own to the store (`torch.distributed.Store`) of the default process group.

    Calls of a store that is shared wait for one another, and one of them may wait for another rank.
    """
    return dist.distributed_c10d._get_default_store().clone()


def issued_collectives() -> dict[str, int]:
    """Return how many collectives this rank has issued, by process group and backend; the same names on all ranks.

    Only its own ranks know a group, and count alike: who is ahead waits, or will, for who is behind. A backend that
    does not count is missing.
    """
    counts: dict[str, int] = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):
                backend: Any = group._get_backend(device)
                counts[f"{name} on {device.type}"] = int(backend._get_sequence_number_for_group())
    return counts


def groups_with(rank: int) -> frozenset[str]:
    """Return the groups, named as `issued_collectives` does, that a rank is in together with this one."""
    return frozenset(
        f"{name} on {device.type}"
        for group, name in list(dist.distributed_c10d._world.pg_names.items())
        if rank in dist.distributed_c10d._world.pg_group_ranks[group]
        for device in group._device_types
    )


def abort_collectives() -> None:
    """Abort the collectives of all groups: NCCL's end, gloo's go on. Raises what the backend does (`RuntimeError`)."""
    dist.distributed_c10d._abort_process_group()
