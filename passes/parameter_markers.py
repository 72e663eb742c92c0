"""Offloaded parameters: where each graph wants them on the device, and where their gradients leave.

Before, a parameter `w` that both graphs read:

    forward:  (w, x); y = mm(x, w);                                     return y, x, w
    backward: (x, w, dy); dx = mm(dy, t(w)); dw = mm(t(x), dy);         return dw, dx

After, for the planner: each graph has the parameter's bytes from `load_param` to its last reader, and the gradient's
until `store_grad`, which stands behind its last reader and in its place among the graph's outputs. It stands behind the
`load_param` of its parameter, too: nothing asks for the parameter any more once its update may have begun. A parameter
that a graph reads at its begin and at its end, as it does a tied embedding, is loaded twice.

    forward:  (w, x); a = load_param(w); y = mm(x, a);                      return y, x, w
    backward: (x, w, dy); b = load_param(w); dx = mm(dy, t(b)); dw = mm(t(x), dy); h = store_grad(dw); return h, dx

`write_markers` decides nothing; when the copies run is the plan's affair, and `transfers` writes it down.
"""

import operator
from collections.abc import Mapping

import torch
from torch import fx

from tencache_fx.ops import LOAD_PARAM, STORE_GRAD
from tencache_fx.passes.gaps import fake_like, key_node
from tencache_fx.passes.graphs import RegionGraphs, keep_saved_flag, output_args, placeholders, set_outputs
from tencache_fx.passes.op_kinds import base_of, is_view, readers_of, written_arguments
from tencache_fx.planning.problem import Tier
from tencache_fx.tensors import is_lazy, storage_of, tensors_of

# For so many nodes, as a share of the graph's and at least, a parameter is unread where it is to arrive once more.
_LEAST_SHARE, _LEAST_NODES = 0.25, 50


def write_markers(
    capture: RegionGraphs,
    offloaded: Mapping[int, str],
    state_bytes: Mapping[str, tuple[int, int]],
    shards: Mapping[str, str],
    tiers: Mapping[str, Tier],
) -> frozenset[str]:
    """Write `load_param` and `store_grad` for the parameters in `offloaded`: their names by position among the inputs.

    `state_bytes` are what an optimizer keeps, or may keep, of each, on the device and in host memory, `shards` the
    process groups over which they are spread, and `tiers` where their bytes are.

    Returns the names of those that have to be on the device as they are: that this region writes to, hands out, or
    saves a part of for its backward. O(nodes).
    """
    inputs = placeholders(capture.forward)
    for index in offloaded:
        _save_names_only(capture, inputs[index])
    staying = frozenset(name for index, name in offloaded.items() if not _may_leave(inputs[index], capture))
    for index, name in offloaded.items():
        if name in staying:
            continue
        for graph in capture.graphs:
            twin = next((node for node in placeholders(graph) if node.name == inputs[index].name), None)
            if twin is not None:
                _write_loads(twin, name, tiers[name])
    if capture.backward is not None:
        _write_stores(capture.backward, inputs, offloaded, state_bytes, shards)
    return staying


def is_away(node: fx.Node) -> bool:
    """Return whether a placeholder stands for a parameter of which the graph takes only the name."""
    return node.op == "placeholder" and "tencache_parameter" in node.meta


def _save_names_only(capture: RegionGraphs, parameter: fx.Node) -> None:
    """Let the backward make the views of a parameter that it is handed: by themselves they would keep its bytes."""
    forward, backward = capture.forward, capture.backward
    values = list(output_args(forward))
    views = [view for view in _views(parameter)[1:] if view in values[capture.num_outputs :]]
    if backward is None or any(_base_chain(view, parameter) is None for view in views):
        return
    taken = {node.name: node for node in placeholders(backward)}
    dropped: set[int] = set()
    for view in views:
        if view.name not in taken:
            continue
        given = taken[view.name]
        if parameter.name not in taken:
            with backward.inserting_before(given):
                name = backward.create_node("placeholder", parameter.name, name=parameter.name)
            name.meta.update(parameter.meta)
            taken[parameter.name] = name
            values[values.index(view, capture.num_outputs)] = parameter
            keep_saved_flag(view, parameter)
        else:
            dropped.add(values.index(view, capture.num_outputs))
        made = {parameter: taken[parameter.name]}
        first = next((node for node in backward.nodes if node in given.users), given)
        with backward.inserting_before(first):
            for link in _base_chain(view, parameter) or ():
                made[link] = backward.node_copy(link, made.__getitem__)
        given.replace_all_uses_with(made[view])
        backward.erase_node(given)
    set_outputs(forward, values, dropped)


def _base_chain(view: fx.Node, parameter: fx.Node) -> list[fx.Node] | None:
    """Return the views from `parameter` to `view`, in order; None where they read something else, too."""
    chain: list[fx.Node] = []
    while view is not parameter:
        if len(view.all_input_nodes) != 1:
            return None
        chain.insert(0, view)
        view = view.all_input_nodes[0]
    return chain


def _may_leave(parameter: fx.Node, capture: RegionGraphs) -> bool:
    """Return whether only ordinary readers read a parameter's bytes, and none of them hands a view of it on."""
    for view in _views(parameter):
        for user in view.users:
            if user.op == "output" and view is not parameter:
                return False
            if view in written_arguments(user):
                return False
    if parameter.meta.get("desc") in _written_back(capture.forward):
        return False
    value = parameter.meta["val"]
    handed_out = output_args(capture.forward)[: capture.num_outputs]
    return parameter not in handed_out and bool(torch.ops.aten.is_non_overlapping_and_dense(value))


def _written_back(forward: fx.Graph) -> list[object]:
    """Return the descriptions of inputs that AOTAutograd writes to behind the graph, which returns their new values.

    torch: `_functorch/_aot_autograd/descriptors.py: InputMutationAOTOutput`.
    """
    (output,) = forward.find_nodes(op="output")
    written = (getattr(each, "mutated_input", None) for each in output.meta.get("desc", ()))
    return [each for each in written if each is not None]


def _views(node: fx.Node) -> list[fx.Node]:
    found = [node]
    for view in found:
        found += [user for user in view.users if is_view(user)]
    return found


def _write_loads(parameter: fx.Node, name: str, tier: Tier) -> None:
    """Let every reader read what arrives; what the graph returns of it for the backward is the name still."""
    graph, value = parameter.graph, parameter.meta["val"]
    parameter.meta["tencache_parameter"] = name
    for readers in _readings(parameter):
        with graph.inserting_before(readers[0]):
            load = graph.call_function(LOAD_PARAM, (parameter,), name=f"load_param_{parameter.name}")
        load.meta["tencache_parameter"], load.meta["tencache_tier"] = name, tier
        load.meta["val"] = fake_like(value)
        for reader in readers:
            reader.replace_input_with(parameter, load)


def _readings(parameter: fx.Node) -> list[list[fx.Node]]:
    """Return the readers of a parameter in order, apart where the graph does without it for long."""
    order = {node: index for index, node in enumerate(parameter.graph.nodes)}
    least = max(_LEAST_NODES, len(order) * _LEAST_SHARE)
    readings: list[list[fx.Node]] = []
    last = -least
    for reader in sorted((user for user in parameter.users if user.op != "output"), key=order.__getitem__):
        if order[reader] - last >= least:
            readings.append([])
        readings[-1].append(reader)
        through = readers_of(reader) if is_view(reader) else ()
        last = max(last, *(order[node] for node in (reader, *through) if node.op != "output"))
    return readings


def _write_stores(
    backward: fx.Graph,
    inputs: tuple[fx.Node, ...],
    offloaded: Mapping[int, str],
    state_bytes: Mapping[str, tuple[int, int]],
    shards: Mapping[str, str],
) -> None:
    """Let the gradients of `offloaded` leave, but for those that are not the graph's own, or lie there twice."""
    values = list(output_args(backward))
    order = {node: index for index, node in enumerate(backward.nodes)}
    storages = [_storage(value) for value in values]
    given = {_storage(node) for node in placeholders(backward)}
    for index, name in offloaded.items():
        gradient, storage = (values[index], storages[index]) if index < len(values) else (None, None)
        if not isinstance(gradient, fx.Node) or storage is None or storages.count(storage) > 1 or storage in given:
            continue
        value, parameter = gradient.meta["val"], inputs[index].meta["val"]
        dense = bool(torch.ops.aten.is_non_overlapping_and_dense(value)) and value.storage_offset() == 0
        dense = dense and not is_lazy(value)
        # Autograd would copy one that is laid out in another way, on the device.
        if not dense or value.stride() != parameter.stride() or value.dtype != parameter.dtype:
            continue
        base = base_of(gradient)
        parts = (user for user in base.users if user.target is operator.getitem)  # of an op with several results
        loads = (node for node in order if node.target is LOAD_PARAM and node.meta["tencache_parameter"] == name)
        # A store of another result of the same op reads the op as well: it is no reader of this gradient.
        readers = (reader for reader in readers_of(base) if reader in order and reader.op != "output")
        last = max((base, gradient, *parts, *readers, *loads), key=lambda node: order[node])
        with backward.inserting_after(last):
            store = backward.call_function(STORE_GRAD, (gradient,), name=f"store_grad_{inputs[index].name}")
        store.meta["tencache_parameter"], store.meta["tencache_state_bytes"] = name, state_bytes[name]
        store.meta["tencache_shard"] = shards[name]
        values[index] = key_node(store, value)
    set_outputs(backward, values, ())


def _storage(value: object) -> int | None:
    tensors = tensors_of(value) if isinstance(value, fx.Node) else ()
    storage = storage_of(tensors[0]) if len(tensors) == 1 else None
    return None if storage is None else storage._cdata
