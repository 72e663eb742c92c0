"""What a compilation decided, as values: a region's problem, plan and rewritten graphs. No torch here."""

from dataclasses import dataclass

from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Kind, Problem, Step
from tencache_fx.planning.step import OWN_POINTS, Point, StepProblem, StepSchedule, SwapKey, to_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of a graph: `type` as in "f32[4, 8]", `runtime` true for a node of ours, `note` what it does there.

    `layer` is the module that the node is of, as in "layers.0.mlp (Linear)", where torch says.
    """

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    type: str
    runtime: bool = False
    note: str = ""
    layer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A rewritten graph; `phase` is "forward", "backward" or "inference"."""

    phase: str
    nodes: tuple[NodeRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOp:
    """A runtime op of a graph in a step: what it does to the storage `label` of its call, before `step`."""

    step: Step
    deed: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One run of a graph in a step: its steps are `[begin, end)` of the step's problem, the one before is the gap.

    `name` is the region's. The device held `held_bytes` when it began, and up to `gap_bytes` since the run before,
    without the storages that stayed by a schedule.
    """

    region: int
    call: int
    backward: bool
    name: str
    held_bytes: int
    gap_bytes: int
    begin: Step
    end: Step
    ops: tuple[StepOp, ...]

    @property
    def phase(self) -> str:
        """Either "forward" or "backward"."""
        return "backward" if self.backward else "forward"

    def __str__(self) -> str:
        """Return it as in "forward 0.2": its region, and the region's call."""
        return f"{self.phase} {self.region}.{self.call}"

    def check(self) -> None:
        """Raise `ValueError` for ops outside of it, or out of order."""
        steps = [self.begin, *(op.step for op in self.ops), self.end]
        if self.begin < 1 or steps != sorted(steps):
            raise ValueError(f"{self} has no gap before it, or ops that are not in [{self.begin}, {self.end}].")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The plan of a step of several regions, whose graphs run in the order of `runs`.

    `device_budget` is what was given for the device; the problem's is less what is kept free for memory that grows.
    """

    device: str
    device_budget: int | None
    runs: tuple[StepRun, ...]
    problem: Problem
    plan: Plan

    @property
    def joined(self) -> StepProblem:
        """The problem with the points at which a schedule may act."""
        points: list[tuple[Step, Point]] = []
        own: dict[str, dict[SwapKey, int]] = {"release": {}, "prefetch": {}}
        for run in self.runs:
            for position, op in enumerate(run.ops, len(points) + 1):
                own.get(OWN_POINTS.get(op.deed, ""), {})[SwapKey(run.region, run.call, op.label)] = position
            steps = (run.begin, *(op.step for op in run.ops), run.end)
            points += [(step, Point(run.region, run.call, run.backward, k)) for k, step in enumerate(steps)]
        names = {storage.name for storage in self.problem.storages}
        keys = {str(key): key for each in own.values() for key in each if str(key) in names}
        return StepProblem(
            problem=self.problem, keys=keys, points=tuple(points), releases=own["release"], prefetches=own["prefetch"]
        )

    @property
    def schedule(self) -> StepSchedule:
        """The schedule that carries the plan out."""
        return to_schedule(self.joined, self.plan)

    def check(self) -> None:
        """Raise `ValueError` for a plan that is for another problem, or runs that are not those of the problem."""
        _check_transfers(self.problem, self.plan)
        if self.plan.forecast.peak_step >= len(self.problem.ops):
            raise ValueError(f"the peak is at step {self.plan.forecast.peak_step}, of {len(self.problem.ops)}.")
        ends = [0, *(run.end for run in self.runs)]
        if ends[-1] != len(self.problem.ops) or [run.begin - 1 for run in self.runs] != ends[:-1]:
            raise ValueError("the runs do not follow one another, or are of another problem.")
        joined = self.joined
        released, back = ({str(key) for key in keys} for keys in (joined.releases, joined.prefetches))
        moved = [s for s in self.problem.storages if s.spillable or s.kind in (Kind.FETCHED, Kind.STORED)]
        for storage in moved:
            leaves, comes = storage.kind is not Kind.FETCHED, storage.kind is not Kind.STORED
            if (leaves and storage.name not in released) or (comes and storage.name not in back):
                raise ValueError(f"{storage.name} has no release, or no prefetch, in any run.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRecord:
    """Everything about one region: where it was compiled, what was asked, what was decided.

    `captured` is the region as torch's partitioner left it, with its recipes. `problem` is what `plan` is for: the
    same, unless more is recomputed. `code_peak_bytes` is what the generated code holds, where there is any and a device
    budget: the plan's forecast of that is a model.
    """

    region: int
    name: str
    torch_version: str
    device: str
    options: tuple[tuple[str, str], ...]
    captured: Problem
    problem: Problem
    plan: Plan
    listings: tuple[Listing, ...]
    code_peak_bytes: int | None = None

    def check(self) -> None:
        """Raise `ValueError` for a plan that is for another problem."""
        _check_transfers(self.problem, self.plan)
        if not set(self.plan.recomputed) <= {recipe.name for recipe in self.captured.recipes}:
            raise ValueError("the plan recomputes what there is no recipe for.")


def _check_transfers(problem: Problem, plan: Plan) -> None:
    """Raise `ValueError` for transfers of a plan that is for another problem."""
    storages, count = {s.name for s in problem.storages}, len(problem.ops)
    for transfer in plan.transfers:
        if transfer.name not in storages or max(transfer.steps) > count:
            raise ValueError(
                f"the plan has a transfer of {transfer.name} that its problem has no storage or no step for."
            )
