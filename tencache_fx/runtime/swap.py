"""One storage of one call at its swap points, and the handles and tickets that own it."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tencache_fx.planning.step import StepSchedule, SwapKey


class State(Enum):
    """Where a storage is."""

    HERE = auto()  # on the device, whether a copy is under way or not
    AWAY = auto()
    COMING = auto()
    ENDED = auto()


class ExtraBytes:
    """A sum of bytes, to which any thread adds without a lock; it is asked for in each run, and so kept up to date.

    A donated input counts once its caller has dropped it, and once for all calls that it was donated to: up to then
    each is among those `_doubted`, by the address of its storage. `references` says how many tensors the engine has of
    what one of its handles stands for.
    """

    def __init__(self, references: Callable[[Tensor], int]) -> None:
        self.changes: deque[int] = deque()
        self._references = references
        self._nbytes = 0
        self._doubted: dict[int, list[weakref.ref[Swap]]] = {}

    @property
    def nbytes(self) -> int:
        """Return the sum. For one thread at a time."""
        while self.changes:
            self._nbytes += self.changes.popleft()
        return self._nbytes - sum(map(self._uncounted_bytes, list(self._doubted)))

    def doubt(self, swap: "Swap") -> None:
        """Note a donated input that stays: its caller has it as well. For one thread at a time."""
        assert swap.src is not None
        self._doubted.setdefault(swap.src.untyped_storage()._cdata, []).append(weakref.ref(swap))

    def _uncounted_bytes(self, address: int) -> int:
        """Return by how much less a storage counts than its swaps say."""
        found = [(swap, swap.src) for ref in self._doubted[address] if (swap := ref()) is not None]
        here = {
            swap: src
            for swap, src in found
            if src is not None and swap.counted_bytes and src.untyped_storage()._cdata == address
        }
        if not here:
            del self._doubted[address]
            return 0
        ours = sum(1 if swap.handle is None else 1 + self._references(swap.handle) for swap in here)
        others = uses_of(next(iter(here.values()))) > ours
        if not others and len(here) == 1:
            del self._doubted[address]
        counted_bytes = [swap.counted_bytes for swap in here]
        return sum(counted_bytes) if others else sum(counted_bytes[1:])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Swap:
    """One storage of one call. Guarded by the lock of its `SwapPoints`."""

    key: int
    name: SwapKey
    nbytes: int
    src: Tensor | None
    version: int
    donated: bool = False
    shared: bool = False  # its caller keeps it as well
    modified: bool = False  # since the forward, before its bytes were free: the copy may be of either
    state: State = State.HERE
    released: bool = False  # the forward has no reader left
    asked: bool = False  # the backward's prefetch has passed
    handle: Tensor | None = None  # the engine's, while a copy is out
    leaving: Tensor | None = None  # its handle, where the copy was asked back before its bytes were free
    ticket: Tensor | None = None
    owners: set[int] = field(default_factory=set)  # the addresses of our handle and ticket
    extra: ExtraBytes | None = None
    counted_bytes: int = 0  # in `extra`

    def count(self) -> None:
        """Count anew the bytes that it holds on the device, and would not if everything left at once."""
        held = self.state in (State.HERE, State.COMING) and self.released and not self.asked and not self.shared
        nbytes = self.nbytes if held else 0
        if self.extra is not None and nbytes != self.counted_bytes:
            self.extra.changes.append(nbytes - self.counted_bytes)
            self.counted_bytes = nbytes
            if self.donated and nbytes and self.src is not None:
                self.extra.doubt(self)

    def end(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """End it; return what it had: the tensor itself, the ticket of a copy in, and the handle of a copy out."""
        had = self.src, self.ticket, self.leaving
        self.src = self.ticket = self.handle = self.leaving = None
        self.state = State.ENDED
        self.count()
        return had

    def forget(self) -> None:
        """Take back what it counted, and count no more."""
        if self.extra is not None and self.counted_bytes:
            self.extra.changes.append(-self.counted_bytes)
        self.extra, self.counted_bytes = None, 0

    def __del__(self) -> None:
        """Take back what it counted."""
        self.forget()


@dataclass(slots=True)
class GraphRun:
    """The run of a graph under way in a thread."""

    region: int
    call: int
    backward: bool
    position: int = 0
    schedule: StepSchedule | None = None
    acts: Mapping[int, tuple[tuple[SwapKey, ...], tuple[SwapKey, ...]]] = field(default_factory=dict)
    """What `schedule` has done in this run, by position."""


class _Key(np.ndarray[Any, np.dtype[np.int64]]):
    """The memory of a handle or ticket: it owns a swap, and dies with the tensor's storage."""

    swap: Swap | None = None


def owner_of(swap: Swap) -> Tensor:
    """Return a new tensor that owns the swap: a handle or a ticket."""
    key = np.array([swap.key], dtype=np.int64).view(_Key)
    key.swap = swap
    tensor = torch.from_numpy(key)
    swap.owners.add(tensor.data_ptr())
    return tensor


def refusal_of(swap: Swap) -> str:
    """Return the sentence with which a second backward is refused."""
    return (
        f"{swap.name.label} was asked for a second time: a region with a plan has one backward, which frees the "
        "offloaded values; call backward once, without retain_graph=True, or compile with device_budget=None."
    )


def is_shared(src: Tensor, ours: int) -> bool:
    """Return whether somebody has the storage of `src` beside so many tensors of ours."""
    return uses_of(src) > ours


def uses_of(src: Tensor) -> int:
    """Return how many tensors have the storage of `src`."""
    storage = src.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` itself
