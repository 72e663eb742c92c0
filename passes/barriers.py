"""Pin runtime ops where the plan put them: between the heavy kernels around them.

Inductor may move an op that no data edge holds, and a prefetch, whose output is eight bytes, looks free to hoist.
Nor does it keep heavy ops in order, or write down a value before a later op reads it; what these read would be held
longer than planned. So each runtime op and each heavy op is made to follow all that the graph has before it, with
Inductor's own `control_deps` (torch: `_inductor/fx_passes/control_dependencies.py`). That orders without extending any
lifetime, and kernels between two heavy ops are fused as ever, since only extern kernels and our ops are wrapped.

    mm_1 | y = sin(mm_1) | offload(x) | mm_2      becomes      offload after y, mm_2 after offload
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from tencache_fx import compat
from tencache_fx.ops import (
    OFFLOAD,
    OFFLOAD_GRAD,
    REFRESH_PARAM,
    RELEASE,
    RUNTIME_OPS,
    SYNC_PARAM,
    WAIT,
    arguments_of,
)
from tencache_fx.passes.fixed_layouts import find_fixed, fix_layouts
from tencache_fx.passes.graphs import step_nodes
from tencache_fx.passes.inductor_model import InductorModel, is_lookup
from tencache_fx.passes.op_kinds import base_of, count_flops, is_heavy, is_view, users_through
from tencache_fx.tensors import storage_of, tensors_of

_WRITES: Mapping[object, str] = {RELEASE: "src", SYNC_PARAM: "param", REFRESH_PARAM: "param"}


class PinOrder(CustomGraphPass):
    """Inductor's `post_grad_custom_post_pass`: the last place where the order of FX nodes counts."""

    def __call__(self, graph: fx.Graph) -> None:
        """Add the ordering edges, and have written at once what a release waits for. O(nodes)."""
        graph.eliminate_dead_code()  # what nobody reads is never written: nothing could be held behind it
        follows: dict[fx.Node, OrderedSet[fx.Node]] = {}
        readers = _Readers(graph)
        latest: list[fx.Node] = []  # what comes behind these comes behind all before them
        for node in graph.nodes:
            if is_lookup(node):
                compat.write_at_once(node)
            if node.target in RUNTIME_OPS or is_heavy(node):
                written = readers.written_before(node)
                if before := [*latest, *written]:
                    follows[node] = OrderedSet(before)
                for value in written if node.target is RELEASE else ():
                    if count_flops(value) == 0:  # heavy kernels write at once anyway, and choose their layout
                        compat.write_at_once(value)
                if node.target is not WAIT:  # a wait is held by its reader
                    latest = [_trace_of(node)]
            elif readers.model.is_generated(node):
                # Inductor writes no result over a value that an op is still to follow: so none follows what was read.
                read = readers.model.sources_of(node)
                latest = [*(each for each in latest if each not in read), node]
        names = find_fixed(graph)
        preserve_node_ordering(graph, follows)
        fix_layouts(graph, names)
        _renew_sparse(graph)
        graph.lint()

    def uuid(self) -> Any | None:
        """Return this pass's part in the key of Inductor's graph cache: a hash of the sources behind it."""
        folders = {Path(__file__).parent, Path(compat.__file__).parent}
        return get_hash_for_files(tuple(sorted(str(path) for folder in folders for path in folder.rglob("*.py"))))


class _Readers:
    """Who must have read a storage before it is released.

    Inductor writes down what it computes element by element as late as it can, and until then, what reads that value
    computes it anew from what it was computed from; small reductions and pools are among this. What reads the source
    of a release, and comes before it in the graph, has to be written down first; else its kernel, or one that computes
    it anew, would run behind the release.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.model = InductorModel(step_nodes(graph))
        self._order = {node: index for index, node in enumerate(graph.nodes)}

    def written_before(self, op: fx.Node) -> list[fx.Node]:
        """Return the values that have to be in memory before a runtime op runs.

        What leaves: so that the copy is made of it, and not of a second one that is computed for the copy alone.
        """
        if op.target in (OFFLOAD, OFFLOAD_GRAD):
            return [arguments_of(op)["src"]]
        return self._of(op) if op.target is RELEASE else []

    def _of(self, release: fx.Node) -> list[fx.Node]:
        """Return the materialised values, made before `release`, that are computed from what it releases."""
        registers, order = self.model.registers, self._order
        found = [
            user
            for user in users_through(base_of(arguments_of(release)["src"]), registers)
            if order[user] < order[release] and not (user.target in RUNTIME_OPS or is_view(user) or user in registers)
        ]
        return sorted(found, key=order.__getitem__)


def _renew_sparse(graph: fx.Graph) -> None:
    """Put new nodes in place of those that make sparse tensors: Inductor then works out what they stand for.

    What an old node stands for it would compare with that, by their storages, and a sparse tensor has none (2.13:
    `_inductor/fx_utils.py: _is_fake_tensor_same`).
    """
    for node in step_nodes(graph):
        if any(storage_of(tensor) is None for tensor in tensors_of(node)):
            with graph.inserting_after(node):
                fresh = graph.node_copy(node)
            del fresh.meta["val"]
            node.replace_all_uses_with(fresh)
            graph.erase_node(node)


def _trace_of(node: fx.Node) -> fx.Node:
    """Return the value by which Inductor knows that a node has run.

    Of an op that counts as writing what it takes, that is what it writes: nobody reads the token that it returns, and
    dependencies on what nobody reads are dropped (torch: `_inductor/scheduler.py: prune_weak_deps`).
    """
    written: fx.Node = arguments_of(node)[_WRITES[node.target]] if node.target in _WRITES else node
    return written
