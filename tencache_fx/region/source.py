"""A region as torch hands it over, with the options that the user asks for: the same in each of its compilations."""

import contextlib
import copy
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.options import SETTINGS, Options
from tencache_fx.region.ambient_state import CompilerSettings, unchanged
from tencache_fx.region.dynamic_shapes import parts_of
from tencache_fx.region.graph_copy import keep_numbers
from tencache_fx.tensors import byte_hint


@dataclass(frozen=True, kw_only=True)
class RegionSource:
    """One captured region: its Dynamo graph, options and device. `settings` are Inductor's.

    These were given with the compilation; `compilers` has all that torch's compilers were set to then. `own` are the
    names of options that were given with the compilation, `configured` is what the process was told by then. A piece of
    a captured graph has so many `calls` in each run of that, and nobody reads its inputs `last_read` behind it.
    """

    index: int
    graph: fx.GraphModule
    options: Options
    device: torch.device
    settings: Mapping[str, Any]
    own: frozenset[str] = frozenset({"device_budget", "host_budget", "spill_budget", "spill_dir"})
    calls: int | None = None
    last_read: frozenset[int] = frozenset()
    configured: Mapping[str, object] = field(default_factory=lambda: SETTINGS.given)
    compile_id: str = field(default_factory=lambda: str(torch._guards.CompileContext.current_compile_id() or ""))
    context: torch._guards.TracingContext | None = field(default_factory=torch._guards.TracingContext.try_get)
    compilers: CompilerSettings = field(default_factory=CompilerSettings.now, repr=False)

    @cached_property
    def name(self) -> str:
        """What people know it by: where its code is, or its module's class, and torch's number for it."""
        calls = f"{self.calls} calls" if self.calls is not None and self.calls > 1 else ""
        return ", ".join(part for part in (_code_of(self.graph.graph), self.compile_id, calls) if part)

    @cached_property
    def fingerprint(self) -> str:
        """A name for the region that is the same in every process, on every device: its ops and their sizes."""
        seen = [(node.name, _sizes(node.meta.get("example_value"))) for node in self.graph.graph.nodes]
        return hashlib.sha256(repr((torch.is_grad_enabled(), seen)).encode()).hexdigest()

    @cached_property
    def bound_bytes(self) -> int:
        """Several times the bytes of all that its Dynamo graph makes. Raises `TencacheError` if nothing bounds them."""
        found = (node.meta.get("example_value") for node in self.graph.graph.nodes)
        values = [each for value in found for each in (value if isinstance(value, (list, tuple)) else (value,))]
        tensors = (part for _, part in parts_of(values) if isinstance(part, torch.Tensor))
        return 8 * sum(byte_hint(tensor.numel()) * tensor.itemsize for tensor in tensors)

    @property
    def breaks_off(self) -> bool:
        """Whether more of the same function runs beside the region: it is a piece, or ends at a graph break."""
        return self.calls is not None or compat.ends_at_graph_break(self.graph)

    @property
    def takes_fakes(self) -> bool:
        """Whether the compiled code may be called with fake tensors: Inductor's usually reads their memory."""
        return self.options.compiler == "eager" or compat.runs_on_fakes(self.settings)

    @contextlib.contextmanager
    def as_captured(self) -> Iterator[None]:
        """Have torch set as it was when it handed the region over, to compile it again; all is set back at the end."""
        context = _once_more(self.context)
        with torch._guards.tracing(context), self.compilers.in_force(), unchanged(self.device):
            yield

    def fakes(self) -> list[Any]:
        """Return the inputs' fakes, with the sizes torch traced the region with."""
        fakes = [node.meta["example_value"] for node in self.graph.graph.find_nodes(op="placeholder")]
        return keep_numbers(fakes, self.context)


def _sizes(value: object) -> object:
    """Return the sizes of a value as seen while tracing, and whether it requires a gradient."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad, *map(_sizes, value.shape)
    if isinstance(value, torch.SymInt):
        return str(value.node.hint)
    return tuple(map(_sizes, value)) if isinstance(value, (list, tuple)) else str(value)


def _once_more(context: torch._guards.TracingContext | None) -> torch._guards.TracingContext | None:
    """Return the context to compile a region in again, that of its first compilation.

    Regions that torch's DDPOptimizer cut out of one graph share a context, which counts their backwards as they are
    compiled, each once. What is compiled again is in a copy that does not count.
    Source: `_dynamo/backends/distributed.py: DDPOptimizerContext`.
    """
    if context is None or context.ddp_optimizer_ctx is None:
        return context
    alone = copy.copy(context)
    alone.ddp_optimizer_ctx = None
    return alone


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def _code_of(graph: fx.Graph) -> str:
    """Return where the first op of a Dynamo graph is, such as "forward (model.py:12)"; else its module's class."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if (frame := _FRAME.search(node.meta.get("stack_trace") or "")) is not None:  # the first is the outermost
            function = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", frame["function"])
            return f"{function} ({Path(frame['file']).name}:{frame['line']})"
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            return str(getattr(kind, "__name__", kind))
    return ""
