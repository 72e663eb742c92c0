"""What is on the device beside what a region makes: its inputs, and external memory."""

from collections.abc import Iterable

from tencache_fx.planning.problem import Kind, Step, Storage
from tencache_fx.units import PAGE_BYTES

_BUDGET_PARTS = 4096  # a storage smaller than one of so many parts of the budget is not worth a transfer


def least_spill_bytes(device_budget: int | None) -> int:
    """Return the bytes from which on a storage is worth a transfer."""
    return max(PAGE_BYTES, (device_budget or 0) // _BUDGET_PARTS)


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
