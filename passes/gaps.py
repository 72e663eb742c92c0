"""Where runtime ops are written: in the gaps between steps."""

from collections.abc import Callable

from torch import fx

from tencache_fx.passes.graphs import RegionGraphs
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

    def write(self, graph: fx.Graph, step: Step, make: Callable[[], fx.Node]) -> fx.Node:
        """Insert a node into `graph` in the gap before `step`, behind what was written there earlier."""
        with graph.inserting_before(self.anchor(graph, step)):
            return make()
