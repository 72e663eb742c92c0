"""Where runtime ops are written: in the gaps between steps."""

from typing import Any

import torch
from torch import Tensor, fx

from tencache_fx.ops import key_tensor
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.problem import Step


class Gaps:
    """Where to write: the ops of one gap stand before the step that follows it, or before the graph's output."""

    def __init__(self, capture: RegionGraphs) -> None:
        self._steps = capture.nodes
        self._outputs = {graph: graph.find_nodes(op="output")[0] for graph in capture.graphs}

    def anchor(self, graph: fx.Graph, step: Step) -> fx.Node:
        """Return the node that follows the gap before `step`."""
        follows = self._steps[step] if step < len(self._steps) else None
        return follows if follows is not None and follows.graph is graph else self._outputs[graph]

    def write(
        self, graph: fx.Graph, step: Step, op: torch._ops.OpOverload, *args: Any, name: str | None = None
    ) -> fx.Node:
        """Insert a call of `op` into `graph` in the gap before `step`, behind what was written there earlier."""
        with graph.inserting_before(self.anchor(graph, step)):
            return graph.call_function(op, args, name=name)


def node_name(role: str, transfer: Transfer) -> str:
    """Return a name for a node that plays a role in a transfer."""
    return f"{role}_{transfer.name.replace('#', '_again')}"


def key_node(node: fx.Node, like: Any) -> fx.Node:
    """Return `node`, its value now the fake of a handle, token or ticket, under the fake mode of `like`."""
    with like.fake_mode:
        node.meta["val"] = key_tensor()
    return node


def fake_like(value: Any) -> Tensor:
    """Return another fake of the same geometry, with a storage of its own."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
