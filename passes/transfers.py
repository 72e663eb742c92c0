"""Write a plan's swaps into the graphs as `offload`, `release`, `prefetch` and `wait` nodes.

Before, a value `x` that the forward saves and the backward reads:

    forward:  x = mm(a, b); y = relu(x);                                          return y, x
    backward: (x, dy); dx = relu_backward(dy, x); ...

After:

    forward:  x = mm(a, b); h = offload(x); y = relu(x); t = release(h, x);       return y, h
    backward: (h, dy); p = prefetch(h); ...; x = wait(p); dx = relu_backward(dy, x); ...

The handle takes the saved tensor's place, at the same position of the forward's output and of the backward's inputs.
When several views of one storage are saved, its carrier is transferred once and the views are rebuilt behind the wait.
A swap inside one graph is the same, with no handle handed over.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import OFFLOAD, PREFETCH, RELEASE, WAIT
from tencache_fx.passes.gaps import Gaps, fake_like, key_node, node_name
from tencache_fx.passes.graphs import (
    RegionGraphs,
    call_on_fakes,
    keep_saved_flag,
    output_args,
    placeholders,
    set_outputs,
)
from tencache_fx.passes.lifetimes import StorageNodes, find_carrier
from tencache_fx.passes.op_kinds import is_view
from tencache_fx.passes.parameter_transfers import find_one_way, write_load, write_pinned, write_refreshes, write_store
from tencache_fx.passes.symbols import SymbolSource, symbol_source
from tencache_fx.planning.plan import Plan, Transfer, TransferKind
from tencache_fx.planning.problem import Step


@dataclass(frozen=True, kw_only=True)
class _Swap:
    """One swap with the nodes it concerns, found before any of them is touched."""

    transfer: Transfer
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
    was computed from a storage before its swap, and is read after it, is computed again from what came back: the
    compiler would have computed it twice anyway, and held across the swap it would cost memory. Returns `registers`
    with those copies.
    O(nodes + swaps x nodes).
    """
    by_name = {item.storage.name: item for item in storages}
    steps = capture.nodes
    swaps = {
        transfer.name: _find_swap(capture, by_name[transfer.name], transfer, steps)
        for transfer in plan.transfers
        if transfer.kind is TransferKind.SWAP
    }
    one_way = find_one_way(plan, steps)
    symbols = {graph: symbol_source(capture, graph) for graph in capture.graphs}  # before values are handles
    gaps = Gaps(capture)
    handles: dict[str, fx.Node] = {}
    for swap in sorted(swaps.values(), key=lambda t: (t.transfer.copy_out_after, t.transfer.freed_at, t.transfer.name)):
        handles[swap.transfer.name] = _write_offload(gaps, swap, engine)
    for leaving in sorted((t for t in plan.transfers if t.out), key=lambda t: (t.freed_at, t.name)):
        if leaving.name in swaps:
            _write_release(gaps, swaps[leaving.name], handles[leaving.name], engine)
        else:
            write_store(gaps, leaving, one_way[leaving.name], engine)
    handles |= _hand_over(capture, [swap for swap in swaps.values() if swap.source is not swap.target], handles)
    tickets: dict[str, fx.Node] = {}
    for coming in sorted((t for t in plan.transfers if t.back), key=lambda t: (t.prefetch_at, t.needed_at, t.name)):
        if coming.name in swaps:
            tickets[coming.name] = _write_prefetch(gaps, swaps[coming.name], handles[coming.name], engine)
        else:
            write_load(gaps, coming, one_way[coming.name], engine)
    write_pinned(capture, steps, engine)
    returns: dict[fx.Node, _Return] = {}
    for swap in sorted(swaps.values(), key=lambda t: (t.transfer.needed_at, t.transfer.name)):
        wait, returned = _write_wait(gaps, swap, tickets[swap.transfer.name], symbols[swap.target], engine)
        if swap.source is swap.target:
            returns[wait] = _Return(members=swap.nodes.members, read_instead=returned)
    for swap in swaps.values():
        _drop_placeholders(swap)
    for graph in capture.graphs:
        registers |= _copy_registers(graph, returns, registers)
    write_refreshes(capture, registers, engine)
    for graph in capture.graphs:
        graph.lint()
    return registers


def _find_swap(capture: RegionGraphs, nodes: StorageNodes, transfer: Transfer, steps: Sequence[fx.Node]) -> _Swap:
    source = steps[transfer.copy_out_after].graph
    target = steps[transfer.needed_at].graph
    if source is not target:
        carrier = find_carrier(nodes.members, source)
    else:
        position = {node: step for step, node in enumerate(steps)}
        carrier = find_carrier((m for m in nodes.members if position.get(m, -1) <= transfer.copy_out_after), source)
    if carrier is None:
        raise InvariantError(f"{transfer.name}: no node spans the storage where its copy out is issued.")
    return _Swap(transfer=transfer, nodes=nodes, source=source, target=target, carrier=carrier)


def _write_offload(gaps: Gaps, swap: _Swap, engine: int) -> fx.Node:
    transfer, step = swap.transfer, Step(swap.transfer.copy_out_after + 1)
    args = swap.carrier, engine, transfer.tier.value, transfer.name
    node = gaps.write(swap.source, step, OFFLOAD, *args, name=node_name("offload", transfer))
    return key_node(node, swap.carrier.meta["val"])


def _write_release(gaps: Gaps, swap: _Swap, handle: fx.Node, engine: int) -> None:
    donated = (True,) if swap.nodes.storage.caller_frees_at else ()
    args, name = (handle, swap.carrier, engine, *donated), node_name("release", swap.transfer)
    key_node(gaps.write(swap.source, swap.transfer.freed_at, RELEASE, *args, name=name), swap.carrier.meta["val"])


def _write_prefetch(gaps: Gaps, swap: _Swap, handle: fx.Node, engine: int) -> fx.Node:
    name = node_name("prefetch", swap.transfer)
    node = gaps.write(swap.target, swap.transfer.prefetch_at, PREFETCH, handle, engine, name=name)
    return key_node(node, swap.carrier.meta["val"])


def _write_wait(
    gaps: Gaps, swap: _Swap, ticket: fx.Node, symbols: SymbolSource, engine: int
) -> tuple[fx.Node, Callable[[fx.Node], fx.Node]]:
    """Bring the carrier back and let every late reader read it, or a view rebuilt from it, instead.

    Returns the wait, and what to read instead of each member.
    """
    whole = swap.carrier.meta["val"]
    anchor = gaps.write(swap.target, swap.transfer.needed_at, WAIT, name=node_name("wait", swap.transfer))
    size, stride = symbols.write(anchor, whole.shape), symbols.write(anchor, whole.stride())
    anchor.args = (ticket, size, stride, whole.dtype, whole.device, engine)
    anchor.meta["val"] = fake_like(whole) if swap.source is swap.target else whole  # no two lives in one graph

    @functools.cache
    def returned(member: fx.Node) -> fx.Node:
        view = _rebuild(gaps, swap, member, anchor, symbols)
        keep_saved_flag(member, view)
        return view

    late = _late_readers(gaps, swap)
    views = {reader for reader in late if is_view(reader)}
    for reader in late:
        for member in reader.all_input_nodes:
            if member in swap.nodes.members and member not in late:
                reader.replace_input_with(member, returned(member))
        if swap.source is swap.target and reader in views:
            _refresh(reader, swap)
    return anchor, returned


def _late_readers(gaps: Gaps, swap: _Swap) -> tuple[fx.Node, ...]:
    """Return what reads the storage after its wait, in order: copies of register values made so far among it."""
    anchor = gaps.anchor(swap.target, swap.transfer.needed_at)
    readers = {user for member in swap.nodes.members if member.graph is swap.target for user in member.users}
    return tuple(sorted(reader for reader in readers if not reader < anchor))  # nodes compare by their places


def _copy_registers(graph: fx.Graph, returns: Mapping[fx.Node, _Return], registers: frozenset[fx.Node]) -> set[fx.Node]:
    """Let late readers of what was computed from a storage before its swap read a copy computed after it.

    Each reader gets copies of its own, right before it: there, all that they are computed from is in memory, for it is
    read at the reader's step. `returns` has, for each wait, the members that came back and what to read instead.
    """
    back: dict[fx.Node, _Return] = {}  # by member, for the swaps that are over
    stale: set[fx.Node] = set()  # values in registers that were computed from a member before its swap
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


def _rebuild(gaps: Gaps, swap: _Swap, member: fx.Node, whole: fx.Node, symbols: SymbolSource) -> fx.Node:
    """Return `member` as a view of the carrier that came back: itself, if it is the carrier."""
    value, base, view = member.meta["val"], whole.meta["val"], whole

    write = partial(gaps.write, swap.target, swap.transfer.needed_at)

    geometry = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
    if geometry != (tuple(base.shape), tuple(base.stride()), base.storage_offset()):
        view = write(torch.ops.aten.as_strided.default, whole, [], [], 0)
        (offset,) = symbols.write(view, (value.storage_offset(),))
        view.args = (whole, symbols.write(view, value.shape), symbols.write(view, value.stride()), offset)
        _refresh(view, swap)
    for is_so, lazily in ((value.is_conj(), torch.ops.aten._conj), (value.is_neg(), torch.ops.aten._neg_view)):
        if is_so:
            view = write(lazily.default, view)
            _refresh(view, swap)
    return view


def _refresh(view: fx.Node, swap: _Swap) -> None:
    """Let a view's fake alias what the node now reads."""
    with swap.carrier.meta["val"].fake_mode:
        view.meta["val"] = call_on_fakes(view)


def _hand_over(capture: RegionGraphs, swaps: Sequence[_Swap], handles: dict[str, fx.Node]) -> dict[str, fx.Node]:
    """Put each handle in the place of its storage's first saved value; the others are not handed over at all.

    Returns the backward's placeholders for the handles, by storage.
    """
    values = list(output_args(capture.forward))
    taken = {swap.nodes.saved[0]: swap for swap in swaps}
    dropped = {index for swap in swaps for index in swap.nodes.saved[1:]}
    received: dict[str, fx.Node] = {}
    for index, swap in taken.items():
        saved, handle = values[index], handles[swap.transfer.name]
        assert isinstance(saved, fx.Node)
        keep_saved_flag(saved, handle)
        old = next(node for node in placeholders(swap.target) if node.name == saved.name)
        with swap.target.inserting_before(old):
            received[swap.transfer.name] = swap.target.create_node("placeholder", handle.name, name=handle.name)
        received[swap.transfer.name].meta["val"] = handle.meta["val"]
        values[index] = handle
    set_outputs(capture.forward, values, dropped)
    return received


def _drop_placeholders(swap: _Swap) -> None:
    if swap.source is swap.target:
        return
    for member in swap.nodes.members:
        if member.graph is swap.target and member.op == "placeholder":
            if member.users:
                raise InvariantError(f"{swap.transfer.name}: {next(iter(member.users))} reads it before it is back.")
            swap.target.erase_node(member)
