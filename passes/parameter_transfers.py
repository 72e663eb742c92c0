"""Write the transfers of parameters and gradients, which go one way, into the graphs.

`load_param` becomes `wait`, with a `fetch_param` where its copy is to begin; `store_grad` becomes `offload_grad`, with
a `release` where the plan counts the bytes as free, and `take_grad` at the end, which hands out the gradient.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
    key_tensor,
)
from tencache_fx.passes.collectives import waits_behind
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.fusion import is_view
from tencache_fx.passes.gaps import Gaps
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.planning.plan import Plan, Transfer, TransferKind


@dataclass(frozen=True, kw_only=True)
class Move:
    """A one-way trip of a parameter or a gradient, and the node that stands for it so far."""

    spill: Transfer
    node: fx.Node


def find_moves(plan: Plan, steps: Sequence[fx.Node]) -> list[Move]:
    """Return the one-way trips: a parameter's node is its first step, a gradient's its last."""
    return [
        Move(spill=spill, node=steps[spill.needed_at if spill.kind is TransferKind.LOAD else spill.copy_out_after])
        for spill in plan.spills
        if spill.kind is not TransferKind.SWAP
    ]


def write_fetch(gaps: Gaps, move: Move, engine: int) -> None:
    """Let the copy in be issued where the plan says; what stood for the arrival is the wait for it."""
    node, spill = move.node, move.spill
    if node.target is not LOAD_PARAM:
        raise InvariantError(f"{spill.name}: {node.name} is no load_param of a parameter.")
    home, value = node.args[0], node.meta["val"]

    def make() -> fx.Node:
        return node.graph.call_function(FETCH_PARAM, (home, engine, spill.name), name=_move_name("fetch", spill))

    ticket = gaps.write(node.graph, spill.prefetch_at, make)
    with value.fake_mode:
        ticket.meta["val"] = key_tensor()
    node.target = WAIT
    node.args = (ticket, list(value.shape), list(value.stride()), value.dtype, value.device, engine)


def write_sink(gaps: Gaps, move: Move, engine: int) -> None:
    """Let a gradient leave where its node stands, be released where the plan says, and be handed out at the end."""
    node, spill, graph = move.node, move.spill, move.node.graph
    if node.target is not STORE_GRAD:
        raise InvariantError(f"{spill.name}: {node.name} is no store_grad of a gradient.")
    (gradient,) = node.all_input_nodes
    value = gradient.meta["val"]
    home = "" if _read_behind(node) else node.meta["tencache_home"]
    shard = (True,) if node.meta["tencache_shard"] else ()
    node.target, node.args = OFFLOAD_GRAD, (gradient, engine, spill.name, home, *shard)
    (output,) = graph.find_nodes(op="output")

    def make() -> fx.Node:
        return graph.call_function(RELEASE, (node, gradient, engine), name=_move_name("release", spill))

    token = gaps.write(graph, spill.freed_at, make)
    with graph.inserting_before(output):
        layout = list(value.shape), list(value.stride()), value.dtype, value.device
        homed = graph.call_function(TAKE_GRAD, (node, *layout, engine), name=_move_name("take_grad", spill))
    with value.fake_mode:
        token.meta["val"] = key_tensor()
        homed.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    output.replace_input_with(node, homed)


def _read_behind(node: fx.Node) -> bool:
    """Say whether the parameter whose gradient `node` sends home arrives behind it: before its update, then."""
    following, home = node.next, node.meta["tencache_home"]
    while following.op != "root":
        if following.target is LOAD_PARAM and following.meta["tencache_home"] == home:
            return True
        following = following.next
    return False


def write_settled(capture: RegionGraphs, steps: Sequence[fx.Node], engine: int) -> None:
    """Write what is left of arrivals and departures: those of parameters that stay, or are updated, on the device."""
    settled: set[fx.Node] = set()
    for node in steps:
        if node.target is LOAD_PARAM and node.args[0] in settled:
            _stay(node)
        elif node.target is LOAD_PARAM:
            settled |= {*node.all_input_nodes}
            _settle(node, engine)
        elif node.target is STORE_GRAD:
            _stay(node)
    homes = {node.meta["tencache_home"] for node in settled}
    for graph in capture.graphs:
        for node in graph.find_nodes(op="placeholder"):
            if node.meta.get("tencache_home") in homes:
                del node.meta["tencache_home"]
    repair_view_fakes(capture)


def write_renewals(capture: RegionGraphs, registers: Collection[fx.Node], engine: int) -> None:
    """Let each parameter that stays, and whose update a sink begins, be renewed behind the last that reads it.

    Autograd tells the optimizer only once the whole backward has been issued: all the copies would come at its end.
    What is computed from a parameter in `registers` is not in memory: who reads that reads the parameter.
    """
    if (graph := capture.backward) is None:
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    updated = {node.args[3]: node for node in graph.find_nodes(op="call_function", target=OFFLOAD_GRAD)}
    for settled in graph.find_nodes(op="call_function", target=SYNC_PARAM):
        home, _, name = settled.args
        if (sink := updated.get(name)) is None:
            continue
        last = max(sink, *_readers(home, registers), key=lambda node: order[node])
        with graph.inserting_after(last):
            renewal = graph.call_function(REFRESH_PARAM, settled.args, name=f"refresh_param_{home.name}")
        with settled.meta["val"].fake_mode:
            renewal.meta["val"] = key_tensor()


def _readers(value: fx.Node, registers: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that read a value's bytes, or compute from them without writing them to memory first.

    A collective reads them until it has been waited for.
    """
    found: set[fx.Node] = set()
    for user in value.users:
        if user.op != "output":
            found |= {user, *waits_behind(user)}
            found |= _readers(user, registers) if is_view(user) or user in registers else set()
    return found


def _settle(node: fx.Node, engine: int) -> None:
    """Let a parameter that stays be read as it is, once its last update is done."""
    home = node.args[0]
    assert isinstance(home, fx.Node)
    node.replace_all_uses_with(home)
    with node.meta["val"].fake_mode:
        node.meta["val"] = key_tensor()
    node.target, node.args = SYNC_PARAM, (home, engine, node.meta["tencache_home"])


def _stay(node: fx.Node) -> None:
    """Let a gradient that is used where it is be handed out as it is, a parameter that is settled be read."""
    (value,) = node.all_input_nodes
    node.target = torch.ops.aten.alias.default
    with value.meta["val"].fake_mode:
        node.meta["val"] = torch.ops.aten.alias.default(value.meta["val"])


def _move_name(role: str, spill: Transfer) -> str:
    return f"{role}_{spill.name.replace('#', '_again')}"
