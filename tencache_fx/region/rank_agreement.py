"""What ranks agree on before they compile a region whose parameters are gathered: what runs again behind the gathers.

A matrix product that runs again in the backward needs its weight there, and the backward gathers that earlier then.
So ranks that recompute different products gather in different orders, and hang or mix up their weights. The same holds
where one rank alone begins gathers before sums, so that products run beside them. Each rank plans for itself, for its
own sizes and free memory. The first one that has a plan for a region writes to the store of the default process group
which nodes run again behind gathers, and the order of its collectives. Whoever compiles the region later keeps to the
order (`passes/gather_order.py`), and runs the same nodes again, if its graph has them: torch may trace other ones for
other sizes. Nobody waits for anybody.

What runs again without a gather, and all transfers, stay a rank's own. A region that is planned by step chooses nothing
to run again behind gathers, and keeps to what was agreed on.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from tencache_fx.passes.gather_order import begun_in
from tencache_fx.region.source import RegionSource
from tencache_fx.runtime.process_groups import several_ranks
from tencache_fx.serialization import from_json, to_json

_Halves = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What runs again behind gathers, by label, and what begins collectives in forward and backward, in order."""

    again: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    @classmethod
    def of(cls, halves: _Halves, gathers: Collection[str], names: Mapping[str, str]) -> "Agreed":
        """Return what forward and backward have; `names` are those of nodes, by label.

        The nodes `gathers` run again whatever the ranks agree on.
        """
        forward, backward = (half.graph for half in halves)
        behind = _behind(gathers, forward, backward)
        again = tuple(label for label, name in names.items() if name in behind)
        return cls(again=again, forward=begun_in(forward), backward=begun_in(backward))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAgreement:
    """Where the ranks look up what was agreed on for one region."""

    key: str

    @classmethod
    def find(
        cls,
        source: RegionSource,
        halves: _Halves,
        gathers: Collection[str],
        names: Iterable[str],
        models: Sequence[str],
    ) -> "RankAgreement | None":
        """Return the agreement on a region of these offloaded parameters; None if there is nothing to agree on.

        It is the same region, whatever the sizes of its inputs, if its halves run the same collectives, in any order,
        as long as nothing is chosen to run again; so do all ranks at a time, or they wait for one another in any case.
        Only ranks that share the `models` agree (`RankGroup.model`).
        """
        if not gathers or not several_ranks():
            return None
        options, begun = source.options, [sorted(begun_in(half.graph)) for half in halves]
        facts = begun, sorted(names), models, (options.recompute, options.compiler, options.policy)
        return cls(key=f"tencache/agreed/{hashlib.sha256(repr(facts).encode()).hexdigest()}")

    def read(self) -> Agreed | None:
        """Return what was agreed on; None if no rank has a plan for the region yet."""
        store = dist.distributed_c10d._get_default_store()
        return from_json(Agreed, store.get(self.key).decode()) if store.check([self.key]) else None

    def settle(self, mine: Agreed) -> Agreed:
        """Return what was agreed on: `mine`, if nothing was."""
        store = dist.distributed_c10d._get_default_store()
        return from_json(Agreed, store.compare_set(self.key, "", to_json(mine)).decode())


def nodes_by_label(joint: fx.Graph) -> Mapping[str, str]:
    """Return the names of the ops of a joint graph by labels that other ranks, with other sizes, have for them, too.

    A label has the op, which one of its kind it is, and how many there are. Names also count what computes with sizes.
    """
    ops = [node for node in joint.nodes if node.op == "call_function" and not _is_of_sizes(node)]
    counts = Counter(str(node.target) for node in ops)
    seen = Counter[str]()
    found = {}
    for node in ops:
        seen[kind := str(node.target)] += 1
        found[f"{kind} {seen[kind]} of {counts[kind]}"] = node.name
    return found


def _is_of_sizes(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def _behind(gathers: Collection[str], forward: fx.Graph, backward: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes that run in both graphs, and read in the backward what is gathered there."""
    early = {node.name for node in forward.nodes if node.op == "call_function"}
    behind: set[fx.Node] = set()
    again: set[str] = set()
    for node in backward.nodes:
        if node.op != "call_function":
            continue
        if node.name in gathers:
            behind.add(node)
        elif node.name in early and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            again.add(node.name)
    return frozenset(again)
