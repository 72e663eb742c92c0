"""How much a device holds, also where its allocator does not count."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tencache_fx.hardware.device_memory import allocated_ever_bytes, held_bytes, peak_held_bytes
from tencache_fx.tensors import storage_of


@dataclass(frozen=True, slots=True)
class Mark:
    """What a device held at one time, and its allocator's counts then, if it counts."""

    held_bytes: int
    ever_bytes: int | None
    peak_bytes: int | None


class MemoryGauge:
    """Reads the bytes held on one device: what its allocator counts; on a CPU, those of the storages seen so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._parameter_bytes = 0

    @property
    def counts_all(self) -> bool:
        """Whether what nobody has shown it counts, too."""
        return self._device.type == "cuda"

    def see(self, values: Iterable[object]) -> None:
        """Count the storages of the tensors among `values`, and in lists and tuples there, for as long as they live."""
        if self._device.type == "cuda":
            return
        for value in values:
            if isinstance(value, (list, tuple)):
                self.see(value)
            elif isinstance(value, Tensor) and value.device == self._device:
                storage = storage_of(value)
                if storage is None:
                    continue
                # A storage has one Python object for as long as it lives.
                reference = weakref.ref(storage, self._seen.pop)
                if not _has_memory(storage):
                    self._seen.pop(reference, None)
                elif reference not in self._seen:
                    self._seen[reference] = storage.nbytes()
                    if isinstance(value, torch.nn.Parameter):
                        self._parameter_bytes += storage.nbytes()

    def take_parameter_bytes(self) -> int:
        """Return the bytes of parameters seen since the last call for the first time: they had been there before."""
        nbytes, self._parameter_bytes = self._parameter_bytes, 0
        return nbytes

    def mark(self) -> "Mark":
        """Return what is held now, for `most_bytes_since`."""
        return Mark(self.held_bytes(), allocated_ever_bytes(self._device), peak_held_bytes(self._device))

    def most_bytes_since(self, mark: "Mark") -> int:
        """Return a bound on the bytes held at once since `mark`, without touching the allocator's own peak.

        Exact where that peak has risen since then; else it is no more than that peak, and than what has been allocated.
        """
        peak_bytes, ever_bytes = peak_held_bytes(self._device), allocated_ever_bytes(self._device)
        if peak_bytes is None or ever_bytes is None or mark.peak_bytes is None or mark.ever_bytes is None:
            return max(mark.held_bytes, self.held_bytes())
        return min(peak_bytes, mark.held_bytes + ever_bytes - mark.ever_bytes)

    def held_bytes(self) -> int:
        """Return the bytes that are there now."""
        if self._device.type == "cuda":
            return held_bytes(self._device)
        return sum(list(self._seen.values()))  # in one go: storages die in other threads


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether there are bytes behind a storage."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # a tensor subclass has them elsewhere, or they were freed
        return False
