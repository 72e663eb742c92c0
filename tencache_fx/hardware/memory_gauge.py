"""How much a device holds, also where its allocator does not count."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from tencache_fx.hardware.device_memory import AllocatorCounts, allocator_counts, forget_peak
from tencache_fx.tensors import storage_of

Storages = frozenset["weakref.ref[torch.UntypedStorage]"]


def references(tensors: Iterable[Tensor]) -> Storages:
    """Return references to the storages of `tensors`, which keep none of them alive."""
    return frozenset(weakref.ref(storage) for each in tensors if (storage := storage_of(each)) is not None)


class MemoryGauge:
    """Reads the bytes held on one device: what its allocator counts; on a CPU, those of the storages seen so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._parameter_bytes = 0
        self._peak_bytes = 0  # noted since the last mark

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

    def bytes_of(self, storages: Storages) -> int:
        """Return how many of the bytes seen on a CPU are those of `storages`."""
        return sum(self._seen.get(each, 0) for each in storages)

    def rise_to(self, nbytes: int) -> None:
        """Note that a CPU holds `nbytes` for a while, more than is seen."""
        self._peak_bytes = max(self._peak_bytes, nbytes)

    def mark(self) -> AllocatorCounts:
        """Return what is held now, for `bytes_since`; there is one mark at a time."""
        self._peak_bytes = 0
        counts = allocator_counts(self._device)
        return AllocatorCounts(*[self.held_bytes()] * 3) if counts is None else counts

    def bytes_since(self, mark: AllocatorCounts) -> tuple[int, int]:
        """Return what is held now, and a bound on the bytes held at once since `mark`.

        The allocator's own peak is not touched. The bound is exact where that peak has risen since then; else it is no
        more than that peak, and than what has been allocated.
        """
        now = allocator_counts(self._device)
        if now is None:
            held_bytes = self.held_bytes()
            return held_bytes, max(mark.held_bytes, held_bytes, self._peak_bytes)
        return now.held_bytes, min(now.peak_bytes, mark.held_bytes + now.ever_bytes - mark.ever_bytes)

    def forget_peak_over(self, limit_bytes: int) -> None:
        """Let the allocator's peak begin anew if it is over a limit: `bytes_since` is exact again."""
        counts = allocator_counts(self._device)
        if counts is not None and counts.peak_bytes > limit_bytes:
            forget_peak(self._device)

    def held_bytes(self) -> int:
        """Return the bytes that are there now."""
        counts = allocator_counts(self._device)
        return (
            sum(list(self._seen.values())) if counts is None else counts.held_bytes
        )  # at once: others let storages die


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether there are bytes behind a storage."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # a tensor subclass has them elsewhere, or they were freed
        return False
