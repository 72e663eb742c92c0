"""How long a region takes, from call to call and graph by graph: measured without ever waiting for the device."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from tencache_fx.planning.recalibration import PhaseTimes

_WARM_UP = 3  # runs of each graph that are not measured
_MEASURED = 7


class CallTimes:
    """When a region was called, the last times."""

    def __init__(self) -> None:
        self._calls_ns: deque[int] = deque(maxlen=33)

    def note(self) -> None:
        """Note a call, now."""
        self._calls_ns.append(time.perf_counter_ns())

    def measured(self) -> dict[str, int | None]:
        """Return how many calls were seen and the median time from one to the next, user code included."""
        between_ns = [later - earlier for earlier, later in pairwise(self._calls_ns)]
        return {
            "calls_seen": len(self._calls_ns),
            "call_to_call_ns": int(statistics.median(between_ns)) if between_ns else None,
        }


class PhaseClock:
    """Times each graph of one region, `_MEASURED` times after warming up; then it costs nothing any more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stopped = False
        self._spans: dict[str, list[tuple[Any, Any]]] = {}  # by phase
        self._runs: dict[str, int] = {}

    def timed(self, phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, timed as `phase` while that is wanted; boxed if `run` is."""
        spans = self._spans[phase] = []
        self._runs[phase] = 0

        def timed_run(*args: Any) -> Any:
            self._runs[phase] += 1
            if self._stopped or not _WARM_UP < self._runs[phase] <= _WARM_UP + _MEASURED:
                return run(*args)
            start = self._mark()
            result = run(*args)
            spans.append((start, self._mark()))
            return result

        timed_run._boxed_call = getattr(run, "_boxed_call", False)  # type: ignore[attr-defined]
        return timed_run

    def stop(self) -> None:
        """Measure nothing any more, and forget what was measured."""
        self._stopped = True
        self._spans.clear()

    def times(self) -> PhaseTimes | None:
        """Return the medians, once every graph has been measured often enough and the device has got that far."""
        if self._spans.keys() not in ({"forward", "backward"}, {"inference"}):  # or it was stopped
            return None
        if any(len(spans) < _MEASURED for spans in self._spans.values()):
            return None
        if self._device.type == "cuda" and not all(spans[-1][1].query() for spans in self._spans.values()):
            return None
        medians = {
            phase: int(statistics.median(self._ns(*span) for span in spans)) for phase, spans in self._spans.items()
        }
        return PhaseTimes(
            forward_ns=medians.get("forward", 0) + medians.get("inference", 0), backward_ns=medians.get("backward", 0)
        )

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _ns(self, start: Any, end: Any) -> int:
        return int(start.elapsed_time(end) * 1e6) if self._device.type == "cuda" else end - start
