"""The time between a region's forward and its backward, as a step of its own: external memory counts there.

    backward: (saved, tangent); pause(); ...

Without it the first backward step would have to count for that time, and what it reads could not be away.
"""

from torch import fx

from tencache_fx.ops import PAUSE
from tencache_fx.passes.addmm_fusion import runs_heavy
from tencache_fx.passes.graphs import RegionGraphs, step_nodes


def write_pause(capture: RegionGraphs) -> None:
    """Write the step at the begin of the backward."""
    assert capture.backward is not None
    steps = step_nodes(capture.backward)
    if steps:
        with capture.backward.inserting_before(steps[0]):
            capture.backward.call_function(PAUSE, (), name="between_graphs")


def drop_pause(capture: RegionGraphs) -> None:
    """Take the step away again, if it was written: nothing runs there."""
    if capture.backward is not None:
        for node in capture.backward.find_nodes(op="call_function", target=PAUSE):
            capture.backward.erase_node(node)


def is_barrier(node: fx.Node) -> bool:
    """Return whether a node keeps its place among the runtime ops in the code that a fusing compiler generates."""
    return node.target is PAUSE or runs_heavy(node)
