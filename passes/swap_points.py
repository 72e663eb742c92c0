"""Where the runtime ops of a region stand among its steps: there a schedule may act."""

from tencache_fx.ops import FETCH_PARAM, OFFLOAD, OFFLOAD_GRAD, PREFETCH, RELEASE, WAIT, label_of, source_of
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.planning.problem import Step
from tencache_fx.planning.swap_region import GraphPoint

_DEEDS = {
    OFFLOAD: "offload",
    RELEASE: "release",
    PREFETCH: "prefetch",
    WAIT: "wait",
    FETCH_PARAM: "fetch",
    OFFLOAD_GRAD: "store",
}


def find_points(capture: RegionGraphs) -> tuple[tuple[GraphPoint, ...], tuple[GraphPoint, ...]]:
    """Return the runtime ops of forward and backward in their order; `capture.nodes` are the steps without them."""
    steps = {node: k for k, node in enumerate(capture.nodes)}
    labels: dict[str, str] = {}  # by the name of a handle, or a ticket
    found: list[tuple[GraphPoint, ...]] = []
    passed = 0
    for graph in capture.graphs:
        points: list[GraphPoint] = []
        for node in graph.nodes:
            if node.target in _DEEDS:
                label = labels[source_of(node).name] if (own := label_of(node)) is None else own
                labels[node.name] = label
                points.append(GraphPoint(Step(steps.get(node, passed)), _DEEDS[node.target], label))
            if node in steps:  # a load's wait and a gradient's copy out are steps themselves
                passed = steps[node] + 1
        found.append(tuple(points))
    return found[0], found[1] if len(found) > 1 else ()
