"""The forwards of a step that wait for their backwards."""

from dataclasses import dataclass

from torch.multiprocessing.reductions import StorageWeakRef

from tencache_fx.hardware.memory_gauge import Storages
from tencache_fx.planning.swap_region import SwapRegion

TURNS = 2
"""A forward that still waits when so many later rounds might have ended is not waited for any more."""


@dataclass(slots=True, eq=False)
class Call:
    """A forward that has run, and whose backward may come; `residual` is something that it has left for that.

    It has waited for so many `turns`, of `most_turns`. One that has left nothing but its own inputs, which `given` has
    the storages of while it runs, is waited for no longer than its turn: they say nothing of its graph.
    """

    index: int
    number: int
    region: SwapRegion
    checkpointed: bool
    given: frozenset[int] = frozenset()
    inputs: Storages = frozenset()  # of the forward, on a CPU
    residual: StorageWeakRef | None = None
    turns: int = 0
    most_turns: int = TURNS
