"""How long the host itself works on the graphs of a region that runs on a GPU: it issues each kernel and each copy.

A step cannot be shorter than that, however fast the device is. What the host waits for does not count.
"""

import statistics
import time
from collections import deque
from typing import Any

import torch

from tencache_fx.kept_code import Phase
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan, keep_boxed
from tencache_fx.region.dynamic_shapes import Sizes

_KEPT = 15  # runs of each graph
_LEAST = 5  # of which so many must be there: the first ones load kernels


class HostClock:
    """A monitor that measures, and never has its region planned again. On a CPU, which computes, it has no figure."""

    optional = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spent_ns: dict[Phase, deque[int]] = {}

    @property
    def host_ns(self) -> int | None:
        """Return the median time of the host's work on a forward and its backward; None while there are few runs."""
        if not self._spent_ns or any(len(spent) < _LEAST for spent in self._spent_ns.values()):
            return None
        return sum(int(statistics.median(list(spent))) for spent in self._spent_ns.values())

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, timed; boxed if `run` is."""
        if self._device.type == "cpu":
            return run
        spent_ns = self._spent_ns[phase] = deque(maxlen=_KEPT)

        def timed_run(*args: Any) -> Any:
            begin_ns = time.thread_time_ns()
            result = run(*args)
            spent_ns.append(time.thread_time_ns() - begin_ns)
            return result

        return keep_boxed(run, timed_run)

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion:
        """Return the region as it is."""
        return current

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Do nothing: `instrument` has begun anew."""

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Return the region as it is."""
        return current
