"""A region as torch hands it over, with the options that the user asks for: the same in each of its compilations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.options import Options
from tencache_fx.region.graph_copy import keep_numbers


@dataclass(frozen=True, kw_only=True)
class RegionSource:
    """One captured region: its Dynamo graph, options and device. `settings` are Inductor's.

    `own_budget` says that the device budget was given with the compilation, and not for the process.
    """

    index: int
    graph: fx.GraphModule
    options: Options
    device: torch.device
    settings: Mapping[str, Any]
    own_budget: bool = True
    name: str = field(default_factory=lambda: str(torch._guards.CompileContext.current_compile_id() or ""))
    context: torch._guards.TracingContext | None = field(default_factory=torch._guards.TracingContext.try_get)

    @property
    def takes_fakes(self) -> bool:
        """Whether the compiled code may be called with fake tensors: Inductor's usually reads their memory."""
        return self.options.compiler == "eager" or compat.runs_on_fakes(self.settings)

    def fakes(self) -> list[Any]:
        """Return the inputs' fakes, with the sizes torch traced the region with."""
        fakes = [node.meta["example_value"] for node in self.graph.graph.find_nodes(op="placeholder")]
        return keep_numbers(fakes, self.context)
