"""The collectives of a region as planning knows them: what begins and awaits each, what it moves, and how fast."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from tencache_fx.hardware.collective_rates import GroupRates
from tencache_fx.ops import arguments_of
from tencache_fx.passes.collectives import begins_collective, is_collective_wait, waits_behind
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.lifetimes import StorageNodes
from tencache_fx.passes.op_kinds import nbytes_of
from tencache_fx.planning.problem import Collective, CollectiveKind, Step

_KINDS = {
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "all_reduce": CollectiveKind.ALL_REDUCE,
}


class Group(NamedTuple):
    """A process group: how many ranks it has, and how fast they are."""

    ranks: int
    rates: GroupRates


def find_collectives(
    capture: RegionGraphs, storages: Sequence[StorageNodes], groups: Mapping[str, Group]
) -> tuple[Collective, ...]:
    """Return the collectives of both graphs, in the order in which they begin; `groups` has theirs by name.

    What none of the graphs waits for is waited for behind the last step. O(nodes + arguments).
    """
    owners: dict[fx.Node, list[str]] = {}
    for item in storages:
        for member in item.members:
            owners.setdefault(member, []).append(item.storage.name)
    waits: dict[str, list[int]] = {}  # by storage
    step_of = {node: step for step, node in enumerate(capture.nodes)}
    for node, step in step_of.items():
        for name in owners.get(node, ()) if is_collective_wait(node) else ():
            waits.setdefault(name, []).append(step)
    found: list[Collective] = []
    begun = Counter[str]()
    for node, step in step_of.items():
        if not begins_collective(node):
            continue
        writes = owners.get(node, [])
        ends = [*(step_of[wait] for wait in waits_behind(node)), *(at for name in writes for at in waits.get(name, ()))]
        group = groups[arguments_of(node)["group_name"]]
        kind, name = kind_of(node), node.name
        begun[name] += 1
        found.append(
            Collective(
                name=name if begun[name] == 1 else f"{name}#{begun[name]}",  # a backward may have it again
                kind=kind,
                nbytes=_whole_bytes(node, kind),
                ranks=group.ranks,
                begin=Step(step),
                needed_at=Step(min((at for at in ends if at > step), default=len(capture.nodes))),
                latency_ns=group.rates.latency_ns,
                bytes_per_s=group.rates.bytes_per_s,
                reads=tuple(dict.fromkeys(name for given in node.all_input_nodes for name in owners.get(given, ()))),
                writes=tuple(writes),
            )
        )
    return tuple(found)


def kind_of(node: fx.Node) -> CollectiveKind:
    """Return the kind of collective that a node begins; those with several tensors have names that end otherwise."""
    name = node.target.__name__  # type: ignore[union-attr]
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), CollectiveKind.OTHER)


def _whole_bytes(node: fx.Node, kind: CollectiveKind) -> int:
    """Return the bytes of what is whole: of the results of a gather, of what is scattered."""
    given, made = sum(map(nbytes_of, node.all_input_nodes)), nbytes_of(node)
    if kind is CollectiveKind.REDUCE_SCATTER:
        return given
    return made if kind is CollectiveKind.ALL_GATHER else max(given, made)
