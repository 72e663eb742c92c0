"""Transfers under way, and the tensors that stand for them in the graph.

A transfer is one value's. The *handle* (from offload) owns it until prefetch, the *ticket* (from prefetch) until wait:

    OFFLOADED --prefetch--> PREFETCHING --wait--> ENDED
      |                       |
      +--handle died----------+--ticket died--> DROPPED

Handles and tickets are one-element CPU int64 tensors over a numpy array. The array dies with the tensor's storage,
however many Python wrappers or saved variables there were, and its finalizer notes the key. A finalizer may run in any
thread, at any time, even while a lock is held: it only appends to a deque, which is drained at the next runtime call.
"""

import itertools
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Buffer
from tencache_fx.runtime.store import Extent
from tencache_fx.runtime.streams import Event
from tencache_fx.tensors import ordinary_tensors

_REMEMBERED = 4096
"""How many transfers that are over can still be named in an error."""


class Stage(Enum):
    """How far a transfer is."""

    OFFLOADED = auto()
    PREFETCHING = auto()
    ENDED = auto()
    DROPPED = auto()


class Layout(NamedTuple):
    """Size, strides, dtype and device of a tensor, which it has again after its transfer."""

    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(src: Tensor, label: str) -> "Layout":
        """Return the layout of `src`; raises `InvariantError` when its bytes do not say it all."""
        if not (src.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(src)):
            raise InvariantError(
                f"cannot offload {label}: size {tuple(src.size())} with stride {src.stride()} overlaps or has "
                "gaps; offload its base instead."
            )
        if src.is_conj() or src.is_neg():
            raise InvariantError(f"cannot offload {label}, a lazy conjugate or negative view; resolve it first.")
        return Layout(src.nbytes, src.size(), src.stride(), src.dtype, src.device)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor has these sizes and strides."""
        return tensor.size() == self.size and tensor.stride() == self.stride

    def empty(self) -> Tensor:
        """Allocate such a tensor on the caller's current stream: an ordinary one, which a copy lane may write to."""
        with ordinary_tensors():
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True, eq=False)
class ActiveTransfer:
    """One transfer. Guarded by the engine's lock; it owns what a field points to, while that is not None."""

    key: int
    label: str
    tier: Tier
    layout: Layout
    copied_out: Event
    src: Tensor | None  # until released: the copy out reads it
    buffer: Buffer | None  # while the value, or a write of it, is there
    stage: Stage = Stage.OFFLOADED
    extent: Extent | None = None
    writing: bool = False
    reading: bool = False
    written: "Future[None] | None" = None
    read: "Future[None] | None" = None
    dst: Tensor | None = None
    copied_in: Event | None = None
    payload: object | None = None  # owns the value in host memory instead of this: a gradient's buffer
    owners: int = 0  # how many of handle and ticket live

    def hand_out(self) -> tuple[Tensor, Event]:
        """End it; return the tensor, and the event of its copy in. Raises `UsageError` the second time."""
        if self.stage is not Stage.PREFETCHING:
            raise UsageError(self.refusal())
        dst, copied_in = self.dst, self.copied_in
        assert dst is not None
        assert copied_in is not None
        self.stage, self.dst, self.copied_in = Stage.ENDED, None, None
        return dst, copied_in

    def refusal(self) -> str:
        """Return the message for a second request for the value."""
        return (
            f"{self.label} was asked for a second time: a region with a plan has one backward, which frees the "
            "offloaded values; call backward once, without retain_graph=True, or compile with device_budget=None."
        )


class _Owner(weakref.ref["np.ndarray[tuple[int], np.dtype[np.int64]]"]):
    """A handle or a ticket, by the array of its key, of which its end is noted: `weakref.finalize` takes far longer.

    It knows the deque alone, so that a tensor that lives on does not keep the engine alive.
    """

    __slots__ = ("address", "dead", "key", "kind")

    address: int
    dead: "deque[_Owner]"
    key: int
    kind: str


def _note_end(owner: _Owner) -> None:
    owner.dead.append(owner)


class TransferTable:
    """Finds transfers by handle and ticket; learns of their deaths. Not thread-safe but for the finalizers."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)
        self._transfers: dict[int, ActiveTransfer] = {}
        self._owners: dict[int, _Owner] = {}  # by address, up to the next one there, or to `pop_dead`
        self.dead: deque[_Owner] = deque()  # those of which nobody has taken account
        self._past: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._transfers)

    def next_key(self) -> int:
        """Return a key never used before."""
        return next(self._keys)

    def add(self, transfer: ActiveTransfer) -> Tensor:
        """Enter the transfer; return its handle."""
        return self._issue(transfer, "handle")

    def ticket(self, transfer: ActiveTransfer) -> Tensor:
        """Enter the transfer, if it is not there yet; return its ticket."""
        return self._issue(transfer, "ticket")

    def find(self, tensor: Tensor, deed: str) -> ActiveTransfer:
        """Return the transfer that a handle or ticket stands for.

        Raises `UsageError` for a copy of one: nothing says when it dies, and its number may have been rounded.
        """
        owner = self._owners.get(tensor.data_ptr())
        if owner is not None and owner() is not None:  # nothing else can be at its address: no need to read the key
            return self._transfers[owner.key]
        key = int(tensor.item())
        transfer = self._transfers.get(key)
        label = dict(self._past).get(key, "a tensor") if transfer is None else transfer.label
        raise UsageError(
            f"cannot {deed} {label}: the handle that autograd saved for it was copied; run the compiled region outside "
            "of saved_tensors_hooks that copy (save_on_cpu, for instance), since its tensors are offloaded already."
        )

    def pop_dead(self) -> tuple[ActiveTransfer, str] | None:
        """Return a transfer and which of its owners ("handle", "ticket") died, or None when no more did."""
        if not self.dead:
            return None
        owner = self.dead.popleft()
        if self._owners.get(owner.address) is owner:
            del self._owners[owner.address]
        transfer = self._transfers[owner.key]
        transfer.owners -= 1
        if not transfer.owners:
            del self._transfers[owner.key]
            self._past.append((owner.key, transfer.label))
        return transfer, owner.kind

    def clear(self) -> tuple[ActiveTransfer, ...]:
        """Forget every transfer and return them; deaths are ignored from now on."""
        table = tuple(self._transfers.values())
        self._transfers.clear()
        self._owners.clear()
        self.dead = deque()
        return table

    def _issue(self, transfer: ActiveTransfer, kind: str) -> Tensor:
        array = np.array([transfer.key], dtype=np.int64)
        tensor, owner = torch.from_numpy(array), _Owner(array, _note_end)
        owner.address, owner.dead, owner.key, owner.kind = tensor.data_ptr(), self.dead, transfer.key, kind
        # Nothing is called from here on, so no interrupt leaves a transfer without an owner, whose end nobody notes.
        self._transfers[transfer.key] = transfer
        self._owners[owner.address] = owner
        transfer.owners += 1
        return tensor


def new_token() -> Tensor:
    """Return a fresh one-element tensor that stands for an order only."""
    return torch.from_numpy(np.zeros(1, dtype=np.int64))
