"""What a device holds between the swap points of a step, beside what the step's plan says."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.step import Point
from tencache_fx.region.step_planner import Program
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.swap_points import SwapPoints


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time from a point to the next: what was held at most, and what the plan says."""

    begin: Point
    end: Point
    held_bytes: int
    planned_bytes: int

    def __str__(self) -> str:
        """Return a line: where, and both figures."""
        return f"{self.begin} to {self.end}: {self.held_bytes} bytes, planned {self.planned_bytes}"


def spans_of(points: SwapPoints, run_step: Callable[[], object]) -> list[Span]:
    """Run a step whose order is known and planned; return its spans in which ops run, by the plan it has followed.

    Memory is that of the points' gauge, which begins its peak anew at each of them.
    """
    passed: list[tuple[Point, int]] = []  # with what was held at most since the point before
    followed: list[Program | None] = []
    gauge, pass_point = points.gauge, SwapPoints._pass_point
    mark = gauge.mark()

    def noted(self: SwapPoints) -> object:
        nonlocal mark
        run = self._runs.now
        followed.append(recorder_of(self)._expected)
        passed.append((Point(run.region, run.call, run.backward, run.position), gauge.bytes_since(mark)[1]))
        result = pass_point(self)
        gauge.forget_peak_over(0)
        mark = gauge.mark()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwapPoints, "_pass_point", noted)
        run_step()
    (program,) = set(followed)
    assert program is not None, "the step was not expected"
    planned = program.planned
    assert planned is not None
    assert planned.plan is not None, "the step has no plan"
    live = live_bytes(planned.joined.problem, planned.plan.transfers)
    steps = {point: step for step, point in planned.joined.points}
    assert [point for point, _ in passed] == [point for _, point in planned.joined.points], "another order ran"
    frees = {
        Point(visit.index, visit.call, visit.backward, position)
        for visit in planned.visits
        for position, point in enumerate(visit.region.points[visit.backward], 1)
        if point.deed == "release"
    }
    return [
        Span(
            begin=begin,
            end=end,
            held_bytes=held,
            # What a release frees is still there when its span begins: it goes with the last name for it.
            planned_bytes=int(live[max(0, steps[begin] - (begin in frees)) : steps[end]].max()),
        )
        for (begin, _), (end, held) in pairwise(passed)
        if steps[end] > steps[begin]
    ]
