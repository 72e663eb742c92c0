"""How much a device holds, also where its allocator does not count."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from tencache_fx.hardware.device_memory import AllocatorCounts, allocator_counts, forget_peak
from tencache_fx.tensors import storage_of


class Seen(weakref.ref[torch.UntypedStorage]):
    """A reference to a storage that a gauge has seen, which does not keep it alive."""

    __slots__ = ("key", "nbytes")
    key: int  # its address, which is another storage's once it has died
    nbytes: int


Storages = frozenset[Seen]
_NONE: Storages = frozenset()


def counts_all(device: torch.device) -> bool:
    """Return whether a gauge counts what nobody has shown it, too."""
    return device.type == "cuda"


class MemoryGauge:
    """Reads the bytes held on one device: what its allocator counts; on a CPU, those of the storages seen so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: dict[int, Seen] = {}  # by address
        self._parameter_bytes = 0
        self._peak_bytes = 0  # noted since the last mark

    @property
    def counts_all(self) -> bool:
        """Whether what nobody has shown it counts, too."""
        return counts_all(self._device)

    def see(self, tensors: Iterable[Tensor]) -> Storages:
        """Count the storages of `tensors` for as long as they live; return them, if all is not counted anyway."""
        if self.counts_all:
            return _NONE
        found = []
        for tensor in tensors:
            if tensor.device != self._device or (storage := storage_of(tensor)) is None:
                continue
            seen = self._seen.get(storage._cdata)
            if not _has_memory(storage):
                if seen is not None:
                    self._forget(seen)
                continue
            if seen is None:
                # A storage has one Python object for as long as it lives.
                seen = Seen(storage, self._forget)
                seen.key, seen.nbytes = storage._cdata, storage.nbytes()
                self._seen[seen.key] = seen
                if isinstance(tensor, torch.nn.Parameter):
                    self._parameter_bytes += seen.nbytes
            found.append(seen)
        return frozenset(found)

    def take_parameter_bytes(self) -> int:
        """Return the bytes of parameters seen since the last call for the first time: they had been there before."""
        nbytes, self._parameter_bytes = self._parameter_bytes, 0
        return nbytes

    def bytes_of(self, storages: Storages) -> int:
        """Return how many of the bytes seen on a CPU are those of `storages`."""
        return sum(each.nbytes for each in storages if self._seen.get(each.key) is each)

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
        if counts is not None:
            return counts.held_bytes
        return sum(each.nbytes for each in list(self._seen.values()))  # at once: others let storages die

    def _forget(self, seen: Seen) -> None:
        """Count a storage no longer: it has died, or has no memory any more."""
        if self._seen.get(seen.key) is seen:
            del self._seen[seen.key]


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether there are bytes behind a storage."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # a tensor subclass has them elsewhere, or they were freed
        return False
