"""One captured region: the forward and backward graphs that AOTAutograd's partitioner made, as one line of steps."""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from tencache_fx.ops import arguments_of
from tencache_fx.planning.problem import Step

_IN_KERNELS = ("flex_attention", "flex_attention_backward")


@dataclass(frozen=True, kw_only=True)
class RegionGraphs:
    """The graphs of one region, before anything is rewritten.

    `num_outputs` counts the forward's own outputs (mutated inputs and user outputs); what follows them in its output
    node is saved for the backward. `static_inputs` are the positions of parameters and buffers among the forward's
    placeholders, `offloaded` those of offloaded parameters, by name, `donated` those of tensors that the
    caller is expected to hold no longer once the forward is over. Inference regions have no backward.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    num_outputs: int
    static_inputs: frozenset[int]
    device: torch.device
    offloaded: Mapping[int, str] = field(default_factory=dict)
    donated: frozenset[int] = frozenset()

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
    return bool(arguments_of(node).get("group_size") != 1)


def step_nodes(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the nodes that run, in order: each is one step."""
    return tuple(node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output"))


def bodies_of(node: fx.Node) -> tuple[fx.Graph, ...]:
    """Return the graphs that an op runs, such as the branches of a `torch.cond`; none for other ops.

    What attention calls for each score becomes a part of its kernel: it is none of these.
    """
    module = node.graph.owning_module
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() in _IN_KERNELS:
        return ()
    given = () if module is None else node.all_input_nodes
    found = (operator.attrgetter(str(each.target))(module) for each in given if each.op == "get_attr")
    return tuple(each.graph for each in found if isinstance(each, fx.GraphModule))


def with_bodies(graph: fx.Graph) -> Iterator[fx.Graph]:
    """Yield a graph, and all that its ops run."""
    yield graph
    for node in step_nodes(graph):
        for body in bodies_of(node):
            yield from with_bodies(body)


def placeholders(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Return the graph's inputs in order."""
    return tuple(graph.find_nodes(op="placeholder"))


def output_args(graph: fx.Graph) -> tuple[object, ...]:
    """Return what the graph returns, in order."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)


def set_outputs(graph: fx.Graph, values: Sequence[object], dropped: Collection[int]) -> None:
    """Let `graph` return `values`, but for those at the positions `dropped`; torch's descriptions stay in step."""
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(value for index, value in enumerate(values) if index not in dropped),)
    if "desc" in output.meta:
        output.meta["desc"] = [each for index, each in enumerate(output.meta["desc"]) if index not in dropped]


def keep_saved_flag(saved: fx.Node, instead: fx.Node) -> None:
    """AOTAutograd counts the saved values that carry this flag, in what the forward returns."""
    if "saved_tensor_with_no_vc_check" in saved.meta:
        instead.meta["saved_tensor_with_no_vc_check"] = saved.meta["saved_tensor_with_no_vc_check"]


def call_on_fakes(node: fx.Node, target: Callable[..., Any] | None = None) -> Any:
    """Return what a node's target, or another one, makes of the fakes of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    called: Any = node.target if target is None else target
    return called(*args, **kwargs)
