"""Independent checks of what rewritten graphs do while collectives are under way: who reads until when, what leaves."""

from collections.abc import Mapping, Sequence

from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import OFFLOAD, OFFLOAD_GRAD, RELEASE, arguments_of
from tencache_fx.passes.verify_owners import Key, handed, owners_of


def late_reads(graph: fx.Graph, owner: Mapping[fx.Node, Mapping[int, Key]]) -> Mapping[fx.Node, Sequence[fx.Node]]:
    """Return what each wait for a collective reads beside its argument: what the collective was given to read.

    What nobody in the graph waits for reads to the end of it.
    """
    under_way: dict[Key, list[fx.Node]] = {}
    late: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if _begins(node):
            for key in owner[node].values():
                under_way.setdefault(key, []).extend(node.all_input_nodes)
        elif _waits(node):
            late[node] = [given for key in owner[node].values() for given in under_way.pop(key, ())]
        elif node.op == "output":
            late[node] = [given for each in under_way.values() for given in each]
    return late


def check_collectives(graphs: Sequence[fx.Graph], num_outputs: int) -> None:
    """Raise `InvariantError` if something leaves that a collective still writes, one of the forward's in the backward.

    What one still reads is the matter of `late_reads`.
    """
    written: set[str] = set()  # inputs of the backward
    for graph in graphs:
        owner = owners_of(graph, {}, frozenset())
        given = (node for node in graph.find_nodes(op="placeholder") if graph is not graphs[0] and node.name in written)
        by = {key: node for node in given for key in owner[node].values()}
        for node in graph.nodes:
            if _begins(node):
                by |= dict.fromkeys(owner[node].values(), node)
            elif _waits(node):
                for key in owner[node].values():
                    by.pop(key, None)
            elif node.target in (OFFLOAD, OFFLOAD_GRAD, RELEASE):
                source = arguments_of(node)["src"]
                if writers := [by[key].name for key in owner[source].values() if key in by]:
                    raise InvariantError(
                        f"under-way: {node.name} takes {source.name}, which {writers[0]} still writes."
                    )
        if graph is not graphs[-1]:
            pairs = handed(graph, graphs[-1], num_outputs)
            written = {b.name for a, b in pairs if b is not None and not by.keys().isdisjoint(owner[a].values())}


def _begins(node: fx.Node) -> bool:
    name = _name(node)
    return name.startswith("_c10d_functional::") and "wait_tensor" not in name and "_wrap" not in name


def _waits(node: fx.Node) -> bool:
    return _name(node) == "_c10d_functional::wait_tensor"


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)
