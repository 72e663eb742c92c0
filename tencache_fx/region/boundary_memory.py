"""External memory on the device between a region's forward and its backward: a loss in eager mode, other regions.

No graph of the region shows it, so a first plan may keep as much for the backward as fits beside nothing. This monitor
sees that it was too much; the region is then planned again, with that many bytes free at the boundary of its graphs.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_fx.hardware.device_memory import allocator_counts, forget_peak
from tencache_fx.kept_code import Phase
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan, keep_boxed
from tencache_fx.region.dynamic_shapes import Sizes
from tencache_fx.region.registry import REGIONS, compilations
from tencache_fx.tensors import last_made, storages_on

log = logging.getLogger("tencache_fx")

_ASKS = 4  # how often a region is planned again for this
_PRESSES = 64  # how often forwards that wait may be in the way of others, before they are taken to be kept for good
_MARGIN = 256  # one part in so many of the budget more is asked for than was seen, so that once is enough


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward that has ended, and whose backward has not begun: bytes as they were then.

    `kept_bytes` are those it has left on the device; `residual` is the last of them. `asks` says how often its region
    had been planned again by then, `compilations` how many there had been of any.
    """

    held_bytes: int
    kept_bytes: int
    peak_bytes: int
    compilations: int
    asks: int
    residual: StorageWeakRef | None

    @property
    def waits(self) -> bool:
        """Return True if its backward may still come, and frees something."""
        return self.residual is not None and not self.residual.expired()


class BoundaryMemory:
    """Watches it for one region, whose device budget is `budget_bytes`; nothing without one, and on a CPU."""

    optional = False

    def __init__(self, index: int, device: torch.device, budget_bytes: int | None) -> None:
        self.index = index
        self.wanted_bytes = 0  # to be free at the boundary
        self._asked_bytes = 0  # of them, those that the plan was asked for
        self._planned_bytes = 0  # and those that it has
        self._asks = self._presses = 0
        self._device, self._budget_bytes = device, budget_bytes
        self._waiting: list[_Forward] = []
        self._warned = False
        self._clean_at = -1  # so many compilations ago was the device's peak forgotten

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, watched as the region's forward or backward; boxed if `run` is."""
        if self._budget_bytes is None or phase not in ("forward", "backward"):
            return run
        forward = phase == "forward"

        def watched_run(*args: Any) -> Any:
            if not forward:
                self._begin_backward()
                return run(*args)
            if (before := allocator_counts(self._device)) is None:
                return run(*args)
            given = {storage._cdata for storage in storages_on(self._device, args)}
            results = run(*args)
            self._end_forward(before.held_bytes, last_made(self._device, results, given))
            return results

        return keep_boxed(run, watched_run)

    @property
    def pending_bytes(self) -> int:
        """Return the bytes that forwards keep for a backward that is to come, and will not keep the next time."""
        if self._presses >= _PRESSES:
            return 0
        least = self._asks if self._at_its_least else self._asks + 1
        return sum(forward.kept_bytes for forward in self._waiting if forward.asks < least and forward.waits)

    @property
    def _at_its_least(self) -> bool:
        return self._planned_bytes < self._asked_bytes or self._asks >= _ASKS

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return why the region has to be planned again: it keeps less free than others were seen to hold."""
        if self.wanted_bytes > self._asked_bytes and self._asks < _ASKS:
            return "others hold too much between its forward and its backward"
        return current

    def report_peak(self, peak_bytes: int) -> None:
        """Note that the device had to hold `peak_bytes` in all since the first forward that waits has ended."""
        self._presses += 1
        if self._waiting and self._budget_bytes is not None:
            first = next((forward for forward in self._waiting if forward.waits), self._waiting[-1])
            more_bytes = peak_bytes - first.held_bytes + self._budget_bytes // _MARGIN
            self.wanted_bytes = max(self.wanted_bytes, more_bytes)

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Note what the region's plan was asked to keep free at the boundary, and what it keeps."""
        if compiled.record is not None:
            self._asks += request.boundary_bytes > self._asked_bytes
            self._asked_bytes = request.boundary_bytes
            self._planned_bytes = compiled.record.problem.boundary_bytes

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Go on with the plan there is; nothing is watched any more."""
        self.wanted_bytes, self._budget_bytes, self._waiting = self._asked_bytes, None, []
        return current

    def _end_forward(self, before_bytes: int, made: torch.UntypedStorage | None) -> None:
        """Note that a forward has ended; of what it has left, `made` is the last that was not there before."""
        counts = allocator_counts(self._device)
        if counts is None or self._budget_bytes is None:
            return
        after_bytes, peak_bytes = counts.held_bytes, counts.peak_bytes
        self._presses, compiled = 0, compilations()
        if peak_bytes > self._budget_bytes and self._clean_at != compiled:
            self._clean_at = compiled  # else what was before would hide what comes now
            forget_peak(self._device)
            peak_bytes = after_bytes
        self._waiting = [forward for forward in self._waiting if forward.waits]
        self._waiting.append(
            _Forward(
                held_bytes=after_bytes,
                kept_bytes=max(0, after_bytes - before_bytes),
                peak_bytes=peak_bytes,
                compilations=compiled,
                asks=self._asks,
                residual=None if made is None else StorageWeakRef(made),
            )
        )

    def _begin_backward(self) -> None:
        """Compare the peak since the forward of this backward, the last one that waits, has ended, with the budget."""
        waiting = list(self._waiting)  # another thread may run the region, too
        if not waiting or (counts := allocator_counts(self._device)) is None:
            return
        peak_bytes = counts.peak_bytes
        forward = next((each for each in reversed(waiting) if each.waits), waiting[-1])
        assert self._budget_bytes is not None
        risen = peak_bytes > max(forward.peak_bytes, self._budget_bytes)
        if risen and forward.compilations == compilations():  # to compile takes memory, too, but once
            self.report_peak(peak_bytes)
            if self._at_its_least and not self._warned and not REGIONS.waiting(self._device):
                self._warned = True
                log.warning(
                    "%s holds %d bytes between the forward and the backward of region %d, which keeps as little as it "
                    "can then; that is %d more than device_budget: set it to so much, or hold less outside of compiled "
                    "functions, such as in the loss.",
                    self._device,
                    peak_bytes,
                    self.index,
                    peak_bytes - self._budget_bytes,
                )
        self._waiting = [each for each in self._waiting if each is not forward]
