"""torch's process groups, where its public functions do not tell: collectives issued, the store, aborting."""

import contextlib
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_ANSWER_S = 2.0


def several_ranks() -> bool:
    """Return whether this process is one of several ranks that can wait for one another."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def count_up(what: str) -> int:
    """Return how often this rank has counted `what` in this run, this time included; 0 for ranks that are simulated."""
    if not several_ranks():
        return 0
    return int(dist.distributed_c10d._get_default_store().add(f"tencache/count/{dist.get_rank()}/{what}", 1))


def store_connection() -> Any:
    """Return a connection of its own to the store (`torch.distributed.Store`) of the default process group.

    Calls of a store that is shared wait for one another, and one of them may wait for another rank.
    """
    return dist.distributed_c10d._get_default_store().clone()


def is_served(store: Any) -> bool:
    """Return whether whoever keeps the store is still there: torch prints a trace when a request is not answered."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)  # those of a TCPStore
    if host is None or port is None:
        return True
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


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


def resolve(name: str) -> "dist.ProcessGroup":
    """Return the process group of that name."""
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    found: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return found


def may_overlap(groups: Iterable[str], device: torch.device) -> bool:
    """Return whether several collectives of the groups of these names may be under way on `device` at once.

    Gloo's threads write one string without a lock: where there are several, the heap is corrupted (torch 2.11 to 2.14:
    `ProcessGroupGloo.cpp: runLoop`).
    """
    for name in groups:
        group = resolve(name)
        if device not in group._device_types and torch.device(device.type) not in group._device_types:
            return False
        backend: Any = group._get_backend(device)
        if backend.name() == "gloo" and backend.options._threads > 1:
            return False
    return True


def abort_collectives() -> None:
    """Abort the collectives of all groups: NCCL's end, gloo's go on. Raises what the backend does (`RuntimeError`)."""
    dist.distributed_c10d._abort_process_group()
