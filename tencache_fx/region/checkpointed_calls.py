"""Checkpointed calls of a region: what runs again in the backward has to save the same as the first time."""

from collections import deque

import torch

from tencache_fx import compat
from tencache_fx.region.compiled_region import CompiledRegion

_REMEMBERED = 1024  # forwards, of which none may ever run again


class CheckpointedCalls:
    """The region as it ran in each checkpointed forward; since then it may have been planned again.

    Checkpointed code runs again in the backward, the last first. Code that only looks as if it did, because it runs
    under other hooks for saved tensors, is remembered in vain.
    """

    def __init__(self) -> None:
        self._ran: deque[CompiledRegion] = deque(maxlen=_REMEMBERED)
        self._runs_again = False

    @property
    def under_way(self) -> bool:
        """Whether the call that begins is one of several in a checkpointed forward, or runs again in the backward.

        Those of one checkpoint run again the first one first: all have to run alike.
        """
        if not torch.is_grad_enabled() or not compat.saves_by_hooks():
            return False
        return compat.in_backward() or bool(self._ran and not self._runs_again)

    def choose(self, current: CompiledRegion) -> CompiledRegion:
        """Return how the call that begins is to run: as `current`, unless it runs again what has run otherwise."""
        if not torch.is_grad_enabled() or not compat.saves_by_hooks():
            return current
        if compat.in_backward():
            self._runs_again = True
            return self._ran.pop() if self._ran else current
        if self._runs_again:  # what is left was dropped without a backward
            self._runs_again = False
            self._ran.clear()
        self._ran.append(current)
        return current
