"""Write the transfers of parameters and gradients, which go one way, into the graphs.

`load_param` becomes `wait`, with a `fetch_param` where its copy is to begin; `store_grad` becomes `offload_grad`, with
a `release` where the plan counts the bytes as free, and `take_grad` at the end, which hands out the gradient.
"""

from collections.abc import Collection, Sequence

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import (
    FETCH_PARAM,
    LOAD_PARAM,
    OFFLOAD_GRAD,
    REFRESH_PARAM,
    RELEASE,
    STORE_GRAD,
    SYNC_PARAM,
    TAKE_GRAD,
    WAIT,
    arguments_of,
    label_of,
)
from tencache_fx.passes.collectives import waits_behind
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.gaps import Gaps, fake_like, key_node, node_name
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.op_kinds import users_through
from tencache_fx.planning.plan import Plan, Transfer, TransferKind


def find_one_way(plan: Plan, steps: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """Return the nodes that stand for loads and stores so far: a load's is its first use, a store's the last."""
    return {
        transfer.name: steps[transfer.needed_at if transfer.kind is TransferKind.LOAD else transfer.copy_out_after]
        for transfer in plan.transfers
        if transfer.kind is not TransferKind.SWAP
    }


def write_load(gaps: Gaps, transfer: Transfer, node: fx.Node, engine: int) -> None:
    """Let the copy in be issued where the plan says; what stood for both is the wait for it."""
    if node.target is not LOAD_PARAM:
        raise InvariantError(f"{transfer.name}: {node.name} is no load_param of a parameter.")
    value = node.meta["val"]
    args, name = (node.args[0], engine, transfer.name), node_name("fetch", transfer)
    ticket = key_node(gaps.write(node.graph, transfer.prefetch_at, FETCH_PARAM, *args, name=name), value)
    node.target = WAIT
    node.args = (ticket, list(value.shape), list(value.stride()), value.dtype, value.device, engine)


def write_store(gaps: Gaps, transfer: Transfer, node: fx.Node, engine: int) -> None:
    """Let a gradient leave where its node stands, be released where the plan says, and be handed out at the end."""
    graph = node.graph
    if node.target is not STORE_GRAD:
        raise InvariantError(f"{transfer.name}: {node.name} is no store_grad of a gradient.")
    (gradient,) = node.all_input_nodes
    value = gradient.meta["val"]
    updated = "" if _read_behind(node) else node.meta["tencache_parameter"]
    shard = (node.meta["tencache_shard"],) if node.meta["tencache_shard"] else ()
    node.target, node.args = OFFLOAD_GRAD, (gradient, engine, transfer.name, updated, *shard)
    release = node_name("release", transfer)
    key_node(gaps.write(graph, transfer.freed_at, RELEASE, node, gradient, engine, name=release), value)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        layout = list(value.shape), list(value.stride()), value.dtype, value.device
        taken = graph.call_function(TAKE_GRAD, (node, *layout, engine), name=node_name("take_grad", transfer))
    taken.meta["val"] = fake_like(value)
    output.replace_input_with(node, taken)


def _read_behind(node: fx.Node) -> bool:
    """Return whether the parameter whose gradient `node` offloads is loaded behind it: before its update, then."""
    following, name = node.next, node.meta["tencache_parameter"]
    while following.op != "root":
        if following.target is LOAD_PARAM and following.meta["tencache_parameter"] == name:
            return True
        following = following.next
    return False


def write_pinned(capture: RegionGraphs, steps: Sequence[fx.Node], engine: int) -> None:
    """Write what is left of the markers: those of parameters that are pinned, or updated, on the device."""
    synced: set[fx.Node] = set()
    for node in steps:
        if node.target is LOAD_PARAM and node.args[0] in synced:
            _stay(node)
        elif node.target is LOAD_PARAM:
            synced |= {*node.all_input_nodes}
            _sync(node, engine)
        elif node.target is STORE_GRAD:
            _stay(node)
    names = {node.meta["tencache_parameter"] for node in synced}
    for graph in capture.graphs:
        for node in graph.find_nodes(op="placeholder"):
            if node.meta.get("tencache_parameter") in names:
                del node.meta["tencache_parameter"]
    repair_view_fakes(capture)


def write_refreshes(capture: RegionGraphs, registers: Collection[fx.Node], engine: int) -> None:
    """Let each parameter that stays, and whose update an offloaded gradient begins, be refreshed behind its readers.

    Autograd tells the optimizer only once the whole backward has been issued: all the copies would come at its end.
    What is computed from a parameter in `registers` is not in memory: who reads that reads the parameter.
    """
    if (graph := capture.backward) is None:
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    updated = {arguments_of(node)["param"]: node for node in graph.find_nodes(op="call_function", target=OFFLOAD_GRAD)}
    for synced in graph.find_nodes(op="call_function", target=SYNC_PARAM):
        parameter: fx.Node = arguments_of(synced)["param"]
        if (store := updated.get(label_of(synced))) is None:
            continue
        readers = [user for user in users_through(parameter, registers) if user.op != "output"]
        waits = (wait for reader in readers for wait in waits_behind(reader))  # until then a collective reads it
        last = max(store, *readers, *waits, key=order.__getitem__)
        with graph.inserting_after(last):
            refresh = graph.call_function(REFRESH_PARAM, synced.args, name=f"refresh_param_{parameter.name}")
        key_node(refresh, synced.meta["val"])


def _sync(node: fx.Node, engine: int) -> None:
    """Let a parameter that stays be read as it is, once its last update is done."""
    parameter = node.args[0]
    assert isinstance(parameter, fx.Node)
    node.replace_all_uses_with(parameter)
    key_node(node, node.meta["val"])
    node.target, node.args = SYNC_PARAM, (parameter, engine, node.meta["tencache_parameter"])


def _stay(node: fx.Node) -> None:
    """Let a gradient that is used where it is be handed out as it is, a parameter that is synced be read."""
    (value,) = node.all_input_nodes
    node.target = torch.ops.aten.alias.default
    with value.meta["val"].fake_mode:
        node.meta["val"] = torch.ops.aten.alias.default(value.meta["val"])
