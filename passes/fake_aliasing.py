"""Make fakes tell the truth about aliasing: a view's fake must share the fake storage of what it views.

AOTAutograd merges equal nodes (torch: `_functorch/compile_utils.py: fx_graph_cse`): the readers of the one that goes
are given the other, but views among them keep a fake that aliases the lost one's storage. Lives that are measured by
fake storage would then end too early. Here such views get fakes anew, in order, in both graphs. The backward computes
values again under the forward's fakes, which saved views may share, though it is other memory: such a value gets a
storage of its own. Nodes that draw random numbers again in the backward have no fakes at all, nor have those that draw
them in the forward, and save a state for that (torch: `_functorch/partitioners.py: functionalize_rng_ops`): they get
some.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from tencache_fx.passes.collectives import is_collective_wait
from tencache_fx.passes.graphs import RegionGraphs, call_on_fakes, placeholders
from tencache_fx.passes.op_kinds import storages_of
from tencache_fx.tensors import storage_of, tensors_of

# On a CUDA device a generator is handed in, in both graphs; on others a state that the forward has saved.
_DRAWN_BY_STATE = (torch.ops.higher_order.run_with_rng_state, torch.ops.higher_order.graphsafe_run_with_rng_state)


def repair_view_fakes(capture: RegionGraphs) -> None:
    """Replace, in place, the fakes of views that do not alias what they view, and add those that are missing.

    O(nodes + arguments).
    """
    mended: dict[str, object] = {}
    for graph in capture.graphs:
        for node in placeholders(graph):
            if graph is not capture.forward and node.name in mended:
                node.meta["val"] = mended[node.name]
        saved = set().union(*map(storages_of, placeholders(graph)))
        for node in graph.nodes:
            if node.target in _DRAWN_BY_STATE and "val" not in node.meta:
                _add(node)
            if node.target is torch.ops.higher_order.run_and_save_rng_state and "val" not in node.meta:
                node.meta["val"] = _parts(node)
            if graph is not capture.forward and node.op == "call_function" and _computes_again(node, saved):
                node.meta["val"] = tree_map(_apart, node.meta["val"])
            if makes_views(node) and not aliases_inputs(node):
                _refresh(node)
                mended[node.name] = node.meta["val"]


def refresh_views(graph: fx.Graph) -> None:
    """Replace, in place, the fakes of views that do not alias what they view. O(nodes + arguments)."""
    for node in graph.nodes:
        if makes_views(node) and not aliases_inputs(node):
            _refresh(node)


def makes_views(node: fx.Node) -> bool:
    """Return whether a node returns views, or parts, of what it is given, by its schema.

    A `getitem` does. So does a wait for a collective, whatever its schema says.
    """
    if is_collective_wait(node) or node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    infos = [returned.alias_info for returned in node.target._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def aliases_inputs(node: fx.Node) -> bool:
    """Return whether a node's fakes are of the storages of those that it reads."""
    return storages_of(node) <= set().union(*map(storages_of, node.all_input_nodes))


def _computes_again(node: fx.Node, saved: set[int]) -> bool:
    """Return whether a node's fake is of a storage that the graph is given, though it is no view and reads none of it.

    A storage that it writes to is among those it reads.
    """
    made = storages_of(node) & saved
    if not made or makes_views(node):
        return False
    return made.isdisjoint(set().union(*map(storages_of, node.all_input_nodes)))


def _apart(value: Any) -> Any:
    """Return a fake as this one, with a storage of its own."""
    if not isinstance(value, torch.Tensor) or storage_of(value) is None:
        return value
    fake: Any = value
    with fake.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _add(drawing: fx.Node) -> None:
    draw: Any
    if drawing.target is torch.ops.higher_order.run_with_rng_state:
        _, draw, *given = drawing.args  # behind the state to draw by
    else:
        draw, *given = drawing.args
    others = {name: value for name, value in drawing.kwargs.items() if name != "rng_state"}
    args, kwargs = fx.map_arg((given, others), lambda argument: argument.meta["val"])
    fake: Any = next(tensor for node in placeholders(drawing.graph) for tensor in tensors_of(node))
    with fake.fake_mode:
        drawing.meta["val"] = draw(*args, **kwargs)


def _parts(saving: fx.Node) -> tuple[Any, ...]:
    """Return the state that is saved, and what is drawn: a tensor, or several."""
    parts = {part.args[1]: part.meta["val"] for part in saving.users}
    return parts[0], parts[1]


def _refresh(node: fx.Node) -> None:
    target: Any = None
    if is_collective_wait(node):
        # Its fake kernel makes another tensor than the one it is given (torch: `_functional_collectives.py`).
        target = torch.ops.aten.alias.default
    elif node.target is torch.ops.aten.view.default:
        # One of Inductor's patterns may have put in what no strides can view (`pattern_layouts.py`): a copy is viewed.
        target = torch.ops.aten.reshape.default
    fake: Any = tensors_of(node)[0]
    with fake.fake_mode:
        node.meta["val"] = call_on_fakes(node, target)
