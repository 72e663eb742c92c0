"""Regions that are captured and planned as the backend does it, and not carried out: stand-ins run instead of graphs.

Where the region would run, its outputs' sizes are returned, so that torch goes on to the next region.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tencache_fx.errors import BudgetError
from tencache_fx.kept_code import Phase
from tencache_fx.model_state.shard import Shard
from tencache_fx.options import Options
from tencache_fx.passes.graphs import output_args
from tencache_fx.planning.problem import Problem, Tier
from tencache_fx.records import RegionRecord
from tencache_fx.region.candidate import Candidate, RegionPlanner
from tencache_fx.region.compilation import Compilation
from tencache_fx.region.compiled_region import Compiled
from tencache_fx.region.environment import Environment
from tencache_fx.region.lowering import record_of
from tencache_fx.region.source import RegionSource
from tencache_fx.tensors import byte_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldBeOffloaded:
    """A parameter that would be offloaded."""

    name: str
    nbytes: int
    state_bytes: int
    host_state_bytes: int
    tier: Tier = Tier.HOST
    shard: Shard | None = None
    on_device: bool = False
    updated_on_device: bool = False
    device_state_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """One region as planned for some options: `run` stands for it; `refusal` says why there is no plan.

    Without a plan there is no `record`; a region that cannot be planned before it runs has no `captured` problem.
    """

    run: Compiled
    captured: Problem | None
    record: RegionRecord | None
    refusal: str


class DryRegion:
    """One captured region to plan for several options, with the parameters that would be offloaded, by position."""

    def __init__(
        self, source: RegionSource, offloaded: Mapping[int, WouldBeOffloaded], environment: Environment
    ) -> None:
        self._source, self._offloaded, self._environment = source, offloaded, environment

    def plan(self, inputs: Sequence[Any]) -> DryRun:
        """Return the region as planned for its own options, while torch captures it."""
        return self._run(self._source, inputs)

    def plan_for(self, options: Options) -> DryRun:
        """Return the region as planned for other options, any time later."""
        source = replace(self._source, options=options)
        with source.as_captured():
            return self._run(source, source.fakes())

    def _run(self, source: RegionSource, inputs: Sequence[Any]) -> DryRun:
        names = {index: parameter.name for index, parameter in self._offloaded.items()}
        by_name = {parameter.name: parameter for parameter in self._offloaded.values()}
        planner = RegionPlanner(source, None, 0, by_name, self._environment)
        lowering = StandIns()
        run = Compilation(source, planner, names, frozenset(), lowering).run(inputs)
        if (candidate := lowering.candidate) is None:
            return DryRun(run=run, captured=None, record=None, refusal="")
        if isinstance(candidate.plan, BudgetError):
            return DryRun(run=run, captured=candidate.original, record=None, refusal=str(candidate.plan))
        record = record_of(source, candidate, candidate.plan)
        return DryRun(run=run, captured=candidate.original, record=record, refusal="")


class StandIns:
    """A lowering that writes no plan, and lowers a graph to a function that returns fakes like its results."""

    def __init__(self) -> None:
        self.candidate: Candidate | None = None

    def write(self, candidate: Candidate) -> None:
        """Leave the graphs as they are, and go on without a plan, too."""
        self.candidate = candidate

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Return a stand-in for the graph: a function that returns fakes of the mode it is called in."""
        returned = [value.meta["val"] if isinstance(value, fx.Node) else value for value in output_args(gm.graph)]

        def run(args: list[Any]) -> list[Any]:
            args.clear()
            return [_like(value) for value in returned]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        size, stride = map(byte_hint, value.size()), map(byte_hint, value.stride())
        return torch.empty_strided(tuple(size), tuple(stride), dtype=value.dtype, device=value.device)
    return byte_hint(value) if isinstance(value, torch.SymInt) else value
