"""What a compilation decided, as values: a region's problem, plan and rewritten graphs. No torch here."""

from dataclasses import dataclass

from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of a graph: `type` as in "f32[4, 8]", `runtime` true for a node of ours, `note` what it does there."""

    name: str
    op: str
    target: str
    inputs: tuple[str, ...]
    type: str
    runtime: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A rewritten graph; `phase` is "forward", "backward" or "inference"."""

    phase: str
    nodes: tuple[NodeRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The plan of a step of several regions: `runs` are their graphs in order, such as "forward 0.2" (region, call)."""

    device: str
    runs: tuple[str, ...]
    problem: Problem
    plan: Plan


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
        storages, count = {s.name: s for s in self.problem.storages}, len(self.problem.ops)
        for transfer in self.plan.transfers:
            if transfer.name not in storages or max(transfer.steps) > count:
                raise ValueError(
                    f"the plan has a transfer of {transfer.name} that its problem has no storage or no step for."
                )
        if not set(self.plan.recomputed) <= {recipe.name for recipe in self.captured.recipes}:
            raise ValueError("the plan recomputes what there is no recipe for.")
