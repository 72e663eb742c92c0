"""Write a plan's trips into the graphs as `offload`, `release`, `prefetch` and `wait` nodes.

Before, a value `x` that the forward saves and the backward reads:

    forward:  x = mm(a, b); y = relu(x);                                          return y, x
    backward: (x, dy); dx = relu_backward(dy, x); ...

After:

    forward:  x = mm(a, b); h = offload(x); y = relu(x); t = release(h, x);       return y, h
    backward: (h, dy); p = prefetch(h); ...; x = wait(p); dx = relu_backward(dy, x); ...

The handle takes the saved tensor's place, at the same position of the forward's output and of the backward's inputs.
When several views of one storage are saved, its carrier travels once and the views are rebuilt behind the wait. A trip
inside one graph is the same, with no handle handed over.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import OFFLOAD, PREFETCH, RELEASE, WAIT, key_tensor
from tencache_fx.passes.fusion import is_view
from tencache_fx.passes.gaps import Gaps
from tencache_fx.passes.graphs import RegionGraphs, output_args, placeholders
from tencache_fx.passes.lifetimes import StorageNodes, find_carrier
from tencache_fx.passes.parameter_transfers import (
    Move,
    find_moves,
    write_fetch,
    write_renewals,
    write_settled,
    write_sink,
)
from tencache_fx.passes.symbols import SymbolSource, symbol_source
from tencache_fx.planning.plan import Plan, Transfer, TransferKind
from tencache_fx.planning.problem import Step


@dataclass(frozen=True, kw_only=True)
class _Trip:
    """One spill with the nodes it concerns, found before any of them is touched."""

    spill: Transfer
    nodes: StorageNodes
    source: fx.Graph
    target: fx.Graph
    carrier: fx.Node


@dataclass(frozen=True, kw_only=True)
class _Return:
    """A storage that came back in the graph that it left from: its members, and what is read instead of each."""

    members: tuple[fx.Node, ...]
    read_instead: Callable[[fx.Node], fx.Node]


def insert_transfers(
    capture: RegionGraphs,
    storages: Iterable[StorageNodes],
    plan: Plan,
    registers: frozenset[fx.Node] = frozenset(),
    *,
    engine: int,
) -> frozenset[fx.Node]:
    """Edit the graphs of `capture` in place to carry out `plan`; decide nothing.

    Ops of one gap are written in the order that `tencache_fx.planning.plan.program` gives. A value in `registers` that
    was computed from a storage before its trip, and is read after it, is computed again from what came back: the
    compiler would have computed it twice anyway, and held across the trip it would cost memory. Returns `registers`
    with those copies.
    O(nodes + trips x nodes).
    """
    by_name = {item.storage.name: item for item in storages}
    steps = capture.nodes
    trips = [_find_trip(capture, by_name[s.name], s, steps) for s in plan.spills if s.kind is TransferKind.SWAP]
    moves = find_moves(plan, steps)
    symbols = {graph: symbol_source(capture, graph) for graph in capture.graphs}  # before values are handles
    gaps = Gaps(capture)
    handles: dict[str, fx.Node] = {}
    for trip in sorted(trips, key=lambda t: (t.spill.copy_out_after, t.spill.freed_at, t.spill.name)):
        handles[trip.spill.name] = _write_offload(gaps, trip, engine)
    for leaving in sorted(_leaving(trips, moves), key=lambda t: (t.spill.freed_at, t.spill.name)):
        if isinstance(leaving, Move):
            write_sink(gaps, leaving, engine)
        else:
            _write_release(gaps, leaving, handles[leaving.spill.name], engine)
    handles |= _hand_over(capture, [trip for trip in trips if trip.source is not trip.target], handles)
    tickets: dict[str, fx.Node] = {}
    for coming in sorted(_coming(trips, moves), key=lambda t: (t.spill.prefetch_at, t.spill.needed_at, t.spill.name)):
        if isinstance(coming, Move):
            write_fetch(gaps, coming, engine)
        else:
            tickets[coming.spill.name] = _write_prefetch(gaps, coming, handles[coming.spill.name], engine)
    write_settled(capture, steps, engine)
    returns: dict[fx.Node, _Return] = {}
    for trip in sorted(trips, key=lambda t: (t.spill.needed_at, t.spill.name)):
        wait, returned = _write_wait(gaps, trip, tickets[trip.spill.name], symbols[trip.target], engine)
        if trip.source is trip.target:
            returns[wait] = _Return(members=trip.nodes.members, read_instead=returned)
    for trip in trips:
        _drop_placeholders(trip)
    for graph in capture.graphs:
        registers |= _copy_registers(graph, returns, registers)
    write_renewals(capture, registers, engine)
    for graph in capture.graphs:
        graph.lint()
    return registers


def _leaving(trips: Sequence[_Trip], moves: Sequence[Move]) -> list[_Trip | Move]:
    return [*trips, *(move for move in moves if move.spill.kind is TransferKind.STORE)]


def _coming(trips: Sequence[_Trip], moves: Sequence[Move]) -> list[_Trip | Move]:
    return [*trips, *(move for move in moves if move.spill.kind is TransferKind.LOAD)]


def _find_trip(capture: RegionGraphs, nodes: StorageNodes, spill: Transfer, steps: Sequence[fx.Node]) -> _Trip:
    source = steps[spill.copy_out_after].graph
    target = steps[spill.needed_at].graph
    if source is not target:
        carrier = find_carrier(nodes.members, source)
    else:
        position = {node: step for step, node in enumerate(steps)}
        carrier = find_carrier((m for m in nodes.members if position.get(m, -1) <= spill.copy_out_after), source)
    if carrier is None:
        raise InvariantError(f"{spill.name}: no node spans the storage where its copy out is issued.")
    return _Trip(
        spill=spill,
        nodes=nodes,
        source=source,
        target=target,
        carrier=carrier,
    )


def _write_offload(gaps: Gaps, trip: _Trip, engine: int) -> fx.Node:
    spill, graph = trip.spill, trip.source

    def make() -> fx.Node:
        return graph.call_function(
            OFFLOAD, (trip.carrier, engine, spill.tier.value, spill.name), name=_name("offload", trip)
        )

    return _key(gaps.write(graph, Step(spill.copy_out_after + 1), make), trip)


def _write_release(gaps: Gaps, trip: _Trip, handle: fx.Node, engine: int) -> None:
    graph = trip.source

    def make() -> fx.Node:
        lent = (True,) if trip.nodes.storage.caller_frees_at else ()
        return graph.call_function(RELEASE, (handle, trip.carrier, engine, *lent), name=_name("release", trip))

    _key(gaps.write(graph, trip.spill.freed_at, make), trip)


def _write_prefetch(gaps: Gaps, trip: _Trip, handle: fx.Node, engine: int) -> fx.Node:
    graph = trip.target

    def make() -> fx.Node:
        return graph.call_function(PREFETCH, (handle, engine), name=_name("prefetch", trip))

    return _key(gaps.write(graph, trip.spill.prefetch_at, make), trip)


def _write_wait(
    gaps: Gaps, trip: _Trip, ticket: fx.Node, symbols: SymbolSource, engine: int
) -> tuple[fx.Node, Callable[[fx.Node], fx.Node]]:
    """Bring the carrier back and let every late reader read it, or a view rebuilt from it, instead.

    Returns the wait, and what to read instead of each member.
    """
    graph, back = trip.target, trip.spill.needed_at
    whole = trip.carrier.meta["val"]

    def make() -> fx.Node:
        return graph.call_function(WAIT, name=_name("wait", trip))

    anchor = gaps.write(graph, back, make)
    size, stride = symbols.write(anchor, whole.shape), symbols.write(anchor, whole.stride())
    anchor.args = (ticket, size, stride, whole.dtype, whole.device, engine)
    anchor.meta["val"] = whole
    if trip.source is trip.target:  # one graph must not show two lives of one storage
        with whole.fake_mode:
            anchor.meta["val"] = torch.empty_strided(
                whole.shape, whole.stride(), dtype=whole.dtype, device=whole.device
            )

    @functools.cache
    def returned(member: fx.Node) -> fx.Node:
        view = _rebuild(gaps, trip, member, anchor, symbols)
        _keep_saved_flag(member, view)
        return view

    late = _late_readers(gaps, trip)
    views = {reader for reader in late if is_view(reader)}
    for reader in late:
        for member in reader.all_input_nodes:
            if member in trip.nodes.members and member not in late:
                reader.replace_input_with(member, returned(member))
        if trip.source is trip.target and reader in views:
            _refresh(reader, trip)
    return anchor, returned


def _late_readers(gaps: Gaps, trip: _Trip) -> tuple[fx.Node, ...]:
    """Return what reads the storage after its wait, in order: copies of register values made so far among it."""
    nodes = list(trip.target.nodes)
    first_late = nodes.index(gaps.anchor(trip.target, trip.spill.needed_at))
    return tuple(node for node in nodes[first_late:] if any(a in trip.nodes.members for a in node.all_input_nodes))


def _copy_registers(graph: fx.Graph, returns: Mapping[fx.Node, _Return], registers: frozenset[fx.Node]) -> set[fx.Node]:
    """Let late readers of what was computed from a storage before its trip read a copy computed after it.

    Each reader gets copies of its own, right before it: there, all that they are computed from is in memory, for it is
    read at the reader's step. `returns` has, for each wait, the members that came back and what to read instead.
    """
    back: dict[fx.Node, _Return] = {}  # by member, for the trips that are over
    stale: set[fx.Node] = set()  # values in registers that were computed from a member before its trip
    copies: set[fx.Node] = set()
    passed: list[fx.Node] = []
    for reader in list(graph.nodes):
        copied: dict[fx.Node, fx.Node] = {}
        for node in _needed(reader, stale):
            instead = copied | {a: back[a].read_instead(a) for a in node.all_input_nodes if a in back}
            copied[node] = _copy(node, reader, instead)
        for node in set(reader.all_input_nodes) & set(copied):
            reader.replace_input_with(node, copied[node])
        copies.update(copied.values())
        passed += copied.values()
        if reader in returns:
            back |= dict.fromkeys(returns[reader].members, returns[reader])
            for node in passed:
                if any(a in back or a in stale for a in node.all_input_nodes):
                    stale.add(node)
        elif reader in registers:
            passed.append(reader)
    return copies


def _copy(node: fx.Node, before: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> fx.Node:
    with before.graph.inserting_before(before):
        return before.graph.node_copy(node, lambda argument: instead.get(argument, argument))


def _needed(reader: fx.Node, stale: set[fx.Node]) -> list[fx.Node]:
    """Return the members of `stale` that `reader` reads, directly or through others of them, sources first."""
    found: list[fx.Node] = []

    def visit(node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if argument in stale and argument not in found:
                visit(argument)
                found.append(argument)

    visit(reader)
    return found


def _rebuild(gaps: Gaps, trip: _Trip, member: fx.Node, whole: fx.Node, symbols: SymbolSource) -> fx.Node:
    """Return `member` as a view of the carrier that came back: itself, if it is the carrier."""
    value, base, view = member.meta["val"], whole.meta["val"], whole

    def write(target: torch._ops.OpOverload, *args: Any) -> fx.Node:
        return gaps.write(trip.target, trip.spill.needed_at, lambda: trip.target.call_function(target, args))

    geometry = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
    if geometry != (tuple(base.shape), tuple(base.stride()), base.storage_offset()):
        view = write(torch.ops.aten.as_strided.default, whole, [], [], 0)
        (offset,) = symbols.write(view, (value.storage_offset(),))
        view.args = (whole, symbols.write(view, value.shape), symbols.write(view, value.stride()), offset)
        _refresh(view, trip)
    for is_so, lazily in ((value.is_conj(), torch.ops.aten._conj), (value.is_neg(), torch.ops.aten._neg_view)):
        if is_so:
            view = write(lazily.default, view)
            _refresh(view, trip)
    return view


def _refresh(view: fx.Node, trip: _Trip) -> None:
    """Let a view's fake alias what the node now reads."""
    args, kwargs = fx.map_arg((view.args, view.kwargs), lambda argument: argument.meta["val"])
    assert callable(view.target)
    with trip.carrier.meta["val"].fake_mode:
        view.meta["val"] = view.target(*args, **kwargs)


def _hand_over(capture: RegionGraphs, trips: Sequence[_Trip], handles: dict[str, fx.Node]) -> dict[str, fx.Node]:
    """Put each handle in the place of its storage's first saved value; the others are not handed over at all.

    Returns the backward's placeholders for the handles, by storage.
    """
    values = list(output_args(capture.forward))
    taken = {trip.nodes.saved[0]: trip for trip in trips}
    dropped = {index for trip in trips for index in trip.nodes.saved[1:]}
    received: dict[str, fx.Node] = {}
    for index, trip in taken.items():
        saved, handle = values[index], handles[trip.spill.name]
        assert isinstance(saved, fx.Node)
        _keep_saved_flag(saved, handle)
        old = next(node for node in placeholders(trip.target) if node.name == saved.name)
        with trip.target.inserting_before(old):
            received[trip.spill.name] = trip.target.create_node("placeholder", handle.name, name=handle.name)
        received[trip.spill.name].meta["val"] = handle.meta["val"]
        values[index] = handle
    (output,) = capture.forward.find_nodes(op="output")
    output.args = (tuple(value for index, value in enumerate(values) if index not in dropped),)
    if "desc" in output.meta:  # torch describes each output; keep the two in step
        output.meta["desc"] = [d for index, d in enumerate(output.meta["desc"]) if index not in dropped]
    return received


def _keep_saved_flag(saved: fx.Node, instead: fx.Node) -> None:
    """AOTAutograd counts the saved values that carry this flag, in what the forward returns."""
    if "saved_tensor_with_no_vc_check" in saved.meta:
        instead.meta["saved_tensor_with_no_vc_check"] = saved.meta["saved_tensor_with_no_vc_check"]


def _drop_placeholders(trip: _Trip) -> None:
    if trip.source is trip.target:
        return
    for member in trip.nodes.members:
        if member.graph is trip.target and member.op == "placeholder":
            if member.users:
                raise InvariantError(f"{trip.spill.name}: {next(iter(member.users))} reads it before it is back.")
            trip.target.erase_node(member)


def _name(role: str, trip: _Trip) -> str:
    return f"{role}_{trip.spill.name.replace('#', '_again')}"


def _key(node: fx.Node, trip: _Trip) -> fx.Node:
    with trip.carrier.meta["val"].fake_mode:
        node.meta["val"] = key_tensor()
    return node
