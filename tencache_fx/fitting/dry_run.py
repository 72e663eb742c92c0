"""Regions that are captured and planned as the backend does it, and not carried out: stand-ins run instead of graphs.

Where the region would run, its outputs' sizes are returned, so that torch goes on to the next region.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tencache_fx.errors import BudgetError
from tencache_fx.options import Options
from tencache_fx.passes.graphs import output_args
from tencache_fx.planning.problem import Problem
from tencache_fx.region.candidate import Candidate, RegionPlanner
from tencache_fx.region.compilation import Phase, Region
from tencache_fx.region.dynamic_shapes import Sizes
from tencache_fx.region.environment import Environment
from tencache_fx.region.graph_copy import copy_module
from tencache_fx.tensors import byte_hint

Compiled = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settler:
    """A parameter that would have a home."""

    name: str
    nbytes: int
    state_bytes: int
    on_device: bool = False
    updated_here: bool = False
    state_here_bytes: int = 0


class DryRun(Region):
    """One captured region and, in `draft`, the plan for it or why there is none; None where it cannot be planned.

    `settlers` are the parameters with a home, by their position among the inputs.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[object],
        options: Options,
        device: torch.device,
        settings: Mapping[str, Any],
        settlers: Mapping[int, Settler],
        around: Environment,
    ) -> None:
        super().__init__(gm, inputs, options, device, settings, {})
        self.draft: Candidate | None = None
        self.settlers = settlers
        self._around = around

    @property
    def captured(self) -> Problem | None:
        """The region's problem as it was captured, before anything was chosen."""
        return self._captured

    def compile(self, inputs: Sequence[Any], sizes: tuple[Sizes, Sizes] | None = None) -> None:
        """Capture and plan the region, for what others hold on the device now."""
        self._home_names = {index: settler.name for index, settler in self.settlers.items()}
        by_name = {settler.name: settler for settler in self.settlers.values()}
        self._drafts = RegionPlanner(
            self.options, self._settings, self.device, self._fakes(), sizes, 0, by_name, self._around
        )
        self._compiled = self._lower_source(copy_module(self._source), inputs)

    def compile_for(self, options: Options) -> None:
        """Capture and plan it anew, with other options."""
        self.options, self.draft, self.record = options, None, None
        self._compile_anew(None)

    def __call__(self, *args: Any) -> Any:
        """Return fakes like what the region returns."""
        assert self._compiled is not None
        return self._compiled(*args)

    def _carry_out(self, draft: Candidate) -> None:
        self.draft = draft
        if not isinstance(draft.plan, BudgetError):
            self._keep(draft, draft.plan, ())

    def lower(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compiled, *, phase: Phase) -> Any:
        """Return what stands for the graph."""
        if phase == "inference":
            self._plan_inference(gm)
        return _stand_in(gm.graph)


def _stand_in(graph: fx.Graph) -> Compiled:
    """Return a function that returns fakes, of the mode it is called in, like what `graph` returns."""
    returned = [value.meta["val"] if isinstance(value, fx.Node) else value for value in output_args(graph)]

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
