"""One captured region: the forward and backward graphs that AOTAutograd's partitioner made, as one line of steps."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import sympy
import torch
from torch import fx

from tencache_fx.errors import TencacheError
from tencache_fx.plan import Step

_NO_BOUND = 1 << 50  # torch's bound of a size that may be anything is one of 64-bit integers


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The graphs of one region, before anything is rewritten.

    `num_outputs` counts the forward's own outputs (mutated inputs and user outputs); what follows them in its output
    node is saved for the backward. `static_inputs` are the positions of parameters and buffers among the forward's
    placeholders, `homes` those of parameters with a home elsewhere, by name, `given_up` those of tensors that the
    caller is expected to hold no longer once the forward is over. Inference regions have no backward.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    num_outputs: int
    static_inputs: frozenset[int]
    device: torch.device
    homes: Mapping[int, str] = field(default_factory=dict)
    given_up: frozenset[int] = frozenset()

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of every step, forward first, in captured order."""
        return (*step_nodes(self.forward), *(step_nodes(self.backward) if self.backward is not None else ()))

    @cached_property
    def boundary(self) -> Step:
        """The first backward step; the number of steps if there is none."""
        return Step(len(step_nodes(self.forward)))

    @cached_property
    def scatters(self) -> bool:
        """Whether gradients are reduced here so that each of several ranks has a part: parameters are such parts then.

        torch: `distributed/_functional_collectives.py`, as functions or behind DTensors.
        """
        return any(_is_scatter(node) for graph in self.graphs for node in graph.nodes)

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """Forward, then backward if there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def phases(self) -> tuple[tuple[fx.Graph, str], ...]:
        """The graphs with their names: forward and backward, or inference."""
        if self.backward is None:
            return ((self.forward, "inference"),)
        return ((self.forward, "forward"), (self.backward, "backward"))


def _is_scatter(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or "reduce_scatter" not in node.target.name():
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("group_size") != 1)


def step_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes that run, in order: each is one step."""
    return tuple(node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))


def placeholders(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the graph's inputs in order."""
    return tuple(graph.find_nodes(op="placeholder"))


def output_args(graph: fx.Graph) -> tuple[object, ...]:
    """Return what the graph returns, in order."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors a node makes or stands for; nothing for symbols, tokens and void ops."""
    return tuple(_tensors_in(node.meta.get("val")))


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for a sparse one, which has none: asking for it raises."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def is_lazy(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's bytes are not its values: it is yet to be conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def byte_hint(size: int | torch.SymInt) -> int:
    """Return a size, a symbolic one at the value seen while tracing, or if only a run knows it, the most it can be.

    Raises `TencacheError` if nothing bounds it.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is not None:
        return int(size.node.hint)
    if (most := upper_bound(size)) is None:
        raise TencacheError(
            f"the size {size} is known only when the region runs, and nothing bounds it, so its memory cannot be "
            "planned; bound it (torch._check(size <= most)), keep what has that size out of the region "
            "(torch.compiler.disable), or set device_budget to None."
        )
    return most


def upper_bound(size: torch.SymInt) -> int | None:
    """Return the most that a size can be beside the others as seen while tracing; None if nothing bounds it."""
    shape_env = size.node.shape_env
    assert shape_env is not None
    upper = shape_env.bound_sympy(size.node.expr.xreplace(dict(shape_env.backed_var_to_val))).upper
    return int(upper) if isinstance(upper, sympy.Integer) and upper < _NO_BOUND else None


def main_device(values: Iterable[object]) -> torch.device:
    """Return the device whose memory is planned: the accelerator that holds most of the tensors, else the CPU."""
    held = Counter(value.device for value in values if isinstance(value, torch.Tensor))
    accelerators = {device: count for device, count in held.items() if device.type != "cpu"}
    if not accelerators:
        return torch.device("cpu")
    return max(sorted(accelerators, key=str), key=lambda device: accelerators[device])
