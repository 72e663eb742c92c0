"""What is on the device beside what a region makes: its inputs, and external memory."""

from collections.abc import Iterable

from tencache_fx.planning.problem import Kind, Problem, Step, Storage
from tencache_fx.units import PAGE_BYTES

_DRIFT = 256  # one part in so many of the budget is left free
_BUDGET_PARTS = 4096  # a storage smaller than one of so many parts of the budget is not worth a transfer


def least_spill_bytes(device_budget: int | None) -> int:
    """Return the bytes from which on a storage is worth a transfer."""
    return max(PAGE_BYTES, (device_budget or 0) // _BUDGET_PARTS)


def drift_bytes(device_budget: int | None) -> int:
    """Return what plans leave free of a budget, for external memory that grows from call to call."""
    return (device_budget or 0) // _DRIFT


def update_bytes(device_budget: int, problem: Problem | None = None) -> int:
    """Return what an optimizer may take besides while it updates parameters on the device: what drift is left for.

    Nothing else runs then. A region that needs nearly all of the budget leaves no drift: there it is what is free
    behind the last step of its `problem`.
    """
    nbytes = drift_bytes(device_budget)
    if problem is None or problem.boundary == len(problem.ops):  # no optimizer follows a region without a backward
        return nbytes
    left_bytes = sum(storage.nbytes for storage in problem.storages if storage.death == len(problem.ops))
    return max(0, min(nbytes, device_budget - problem.external_bytes - left_bytes))


def is_input(storage: Storage) -> bool:
    """Whether `storage` is a parameter or an input, which exists before the region runs."""
    return storage.birth == Step(0) and storage.kind in (Kind.PARAMETER, Kind.INPUT)


def input_bytes(storages: Iterable[Storage]) -> int:
    """Return the bytes of the parameters and inputs among `storages`."""
    return sum(storage.nbytes for storage in storages if is_input(storage))


def external_bytes(held_bytes: int, input_bytes: int) -> int:
    """Return how many of the bytes held when the region was compiled are not its own inputs.

    On a CPU device, where nothing is counted, 0: there the budget covers what the region itself holds.
    """
    return max(0, held_bytes - input_bytes)
