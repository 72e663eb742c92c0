"""What ranks agree on before they compile a region whose parameters are gathered: what runs again behind the gathers.

A matrix product that runs again in the backward needs its weight there, and the backward gathers that earlier then.
So ranks that recompute different products gather in different orders, and hang or mix up their weights. Each rank plans
for itself, for its own sizes and free memory. The first one that has planned a region writes to the store of the
default process group which nodes run again behind gathers, and the order of its collectives. Whoever compiles it later,
for other sizes too, keeps to that (`passes/gather_order.py`). Nobody waits for anybody.

What runs again without a gather, and all transfers, stay a rank's own. So do regions that are planned by step: they run
nothing again behind gathers, but they keep to the order as well.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import fx

from tencache_fx.passes.gather_order import begun_in
from tencache_fx.region.source import RegionSource
from tencache_fx.runtime.process_groups import several_ranks
from tencache_fx.serialization import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The nodes that run again behind gathers, and those that begin collectives in forward and backward, in order."""

    again: tuple[str, ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    @classmethod
    def of(cls, forward: fx.Graph, backward: fx.Graph, gathers: Collection[str]) -> "Agreed":
        """Return what these graphs have; the nodes `gathers` run again whatever the ranks agree on."""
        return cls(again=_behind(gathers, forward, backward), forward=begun_in(forward), backward=begun_in(backward))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAgreement:
    """Where the ranks look up what was agreed on for one region, named in `region`, of these of their models."""

    region: str
    models: tuple[int, ...]

    @classmethod
    def find(
        cls,
        source: RegionSource,
        joint: fx.Graph,
        gathers: Collection[str],
        names: Iterable[str],
        models: tuple[int, ...],
    ) -> "RankAgreement | None":
        """Return the agreement on a region of these offloaded parameters; None if there is nothing to agree on.

        It is the same region on all ranks, and in all its compilations, whatever the sizes of its inputs.
        """
        if not gathers or not several_ranks():
            return None
        asked = source.options.recompute, source.options.compiler, source.options.policy
        facts = sorted(names), sorted(begun_in(joint)), asked
        return cls(region=hashlib.sha256(repr(facts).encode()).hexdigest(), models=models)

    def read(self) -> Agreed | None:
        """Return what was agreed on; None if no rank has planned the region yet."""
        store = dist.distributed_c10d._get_default_store()
        return from_json(Agreed, store.get(self._key).decode()) if store.check([self._key]) else None

    def settle(self, mine: Agreed) -> Agreed:
        """Return what was agreed on: `mine`, if nothing was."""
        store = dist.distributed_c10d._get_default_store()
        return from_json(Agreed, store.compare_set(self._key, "", to_json(mine)).decode())

    @property
    def _key(self) -> str:
        return f"tencache/agreed/{self.models}/{self.region}"


def _behind(gathers: Collection[str], forward: fx.Graph, backward: fx.Graph) -> tuple[str, ...]:
    """Return the names of the nodes that run in both graphs, and read in the backward what is gathered there."""
    early = {node.name for node in forward.nodes if node.op == "call_function"}
    behind: set[fx.Node] = set()
    again: list[str] = []
    for node in backward.nodes:
        if node.op != "call_function":
            continue
        if node.name in gathers:
            behind.add(node)
        elif node.name in early and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            again.append(node.name)
    return tuple(again)
