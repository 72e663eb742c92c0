"""The record of a step's plan: its runs, problem and plan as values that can be written and read back."""

from collections.abc import Sequence

from tencache_fx.planning.plan import Plan
from tencache_fx.planning.step import StepProblem, Visit
from tencache_fx.records import StepOp, StepRecord, StepRun


def record_step(
    visits: Sequence[Visit], joined: StepProblem, plan: Plan, *, device: str, device_budget: int | None
) -> StepRecord:
    """Return the record of `plan`, which was made for `joined`, the problem of these runs."""
    points, runs = iter(joined.points), []
    for visit in visits:
        written = visit.region.points[visit.backward]
        begin, _ = next(points)
        ops = tuple(StepOp(step=next(points)[0], deed=point.deed, label=point.label) for point in written)
        end, _ = next(points)
        runs.append(
            StepRun(
                region=visit.index,
                call=visit.call,
                backward=visit.backward,
                name=visit.region.name,
                held_bytes=max(0, visit.held_bytes),
                gap_bytes=max(0, visit.gap_bytes),
                begin=begin,
                end=end,
                ops=ops,
            )
        )
    return StepRecord(device=device, device_budget=device_budget, runs=tuple(runs), problem=joined.problem, plan=plan)
