"""The independent checker of rewritten graphs: re-derive who lives where from the nodes alone, and compare.

Shares no code with the passes it checks: aliasing is followed here from node to node, and a `wait` begins a new
storage. Every rule raises `InvariantError` under its own name, so that a test can break each one.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import (
    FETCH_PARAM,
    OFFLOAD,
    OFFLOAD_GRAD,
    PREFETCH,
    RELEASE,
    RUNTIME_OPS,
    TAKE_GRAD,
    WAIT,
    arguments_of,
    source_of,
)
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.verify_collectives import check_collectives, late_reads
from tencache_fx.passes.verify_owners import Key, handed, is_tensor, owners_of, strided, under_new_fake
from tencache_fx.passes.verify_parameters import away_names, check_parameters, unread_names
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import Problem, Tier
from tencache_fx.tensors import byte_hint

_Ops = defaultdict[str, list[fx.Node]]  # the runtime ops of one transfer, by role, as found in the graphs
_BEGINS = {OFFLOAD: "offload", OFFLOAD_GRAD: "offload", FETCH_PARAM: "prefetch"}
_GOES_ON = {RELEASE: "release", PREFETCH: "prefetch", WAIT: "wait", TAKE_GRAD: "take_grad"}
_ROLES = {
    TransferKind.SWAP: ("offload", "release", "prefetch", "wait"),
    TransferKind.LOAD: ("prefetch", "wait"),
    TransferKind.STORE: ("offload", "release", "take_grad"),
}


def verify_graphs(
    problem: Problem,
    plan: Plan,
    capture: RegionGraphs,
    registers: frozenset[fx.Node] = frozenset(),
    in_place: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> None:
    """Raise `InvariantError` unless the graphs carry out `plan`, whole and in order, within its memory.

    `registers` are the nodes whose values the compiler keeps out of memory, `in_place` those it writes over another's.
    O(nodes + arguments).
    """
    forward, backward, graphs = capture.forward, capture.backward, capture.graphs
    for graph in graphs:
        graph.lint()
    _check_hand_over(forward, backward, capture.num_outputs)
    by_name = _find_ops(graphs)
    if set(by_name) != {transfer.name for transfer in plan.transfers}:
        raise InvariantError(
            f"transfers: the plan has {sorted(s.name for s in plan.transfers)}, the graphs {sorted(by_name)}."
        )
    reads = {graph: _Reads(graph) for graph in {node.graph for ops in by_name.values() for node in ops["release"]}}
    for transfer in plan.transfers:
        name, ops = transfer.name, by_name[transfer.name]
        _check_pairs(name, ops, transfer.kind)
        if transfer.kind is not TransferKind.LOAD:
            _check_release(name, ops, reads[ops["release"][0].graph])
            _check_owner(name, ops, forward)
        _check_geometry(name, ops)
    check_parameters(problem, graphs)
    check_collectives(graphs, capture.num_outputs)
    _check_places(problem, plan, by_name, graphs)
    _check_memory(problem, plan, capture, registers, in_place)
    _check_buffers(plan, graphs)


def _find_ops(graphs: tuple[fx.Graph, ...]) -> dict[str, _Ops]:
    by_name: defaultdict[str, _Ops] = defaultdict(lambda: defaultdict(list))
    label_of: dict[str, str] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.target in _BEGINS:
                label_of[node.name] = str(arguments_of(node)["label"])
                by_name[label_of[node.name]][_BEGINS[node.target]].append(node)
            elif node.target in _GOES_ON:
                source = source_of(node)
                if not isinstance(source, fx.Node) or source.name not in label_of:
                    raise InvariantError(
                        f"pairs: {node.name} reads {source}, which no offload or prefetch of ours made."
                    )
                label_of[node.name] = label_of[source.name]
                by_name[label_of[node.name]][_GOES_ON[node.target]].append(node)
    return by_name


def _check_pairs(name: str, ops: _Ops, way: TransferKind) -> None:
    for role in ("offload", "release", "prefetch", "wait", "take_grad"):
        found, wanted = ops[role], int(role in _ROLES[way])
        if len(found) != wanted:
            raise InvariantError(f"pairs: {name} has {len(found)} {role} nodes, must have {wanted}.")
    for pair in ((ops["offload"], ops["release"]), (ops["prefetch"], ops["wait"])):
        if len({node.graph for nodes in pair for node in nodes}) > 1:
            raise InvariantError(f"pairs: {name} leaves or comes back across two graphs.")


class _Reads:
    """Which storages the nodes of a graph live in, and which node is the last to read each."""

    def __init__(self, graph: fx.Graph) -> None:
        self.owner = owners_of(graph, {}, frozenset())
        late = late_reads(graph, self.owner)
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.last: dict[Key, fx.Node] = {}
        for node in graph.nodes:
            for argument in (*node.all_input_nodes, *late.get(node, ())):
                self.last |= dict.fromkeys(self.owner[argument].values(), node)


def _check_release(name: str, ops: _Ops, reads: _Reads) -> None:
    """No reader of the source may follow its release, and the graph may not return it."""
    release, source = ops["release"][0], arguments_of(ops["offload"][0])["src"]
    if (released := arguments_of(release)["src"]) is not source:
        raise InvariantError(f"released-last: {name} offloads {source} but releases {released}.")
    for key in reads.owner[source].values():
        if reads.place[last := reads.last[key]] > reads.place[release]:
            raise InvariantError(f"released-last: {last.name} reads {name} after its release.")


def _check_owner(name: str, ops: _Ops, forward: fx.Graph) -> None:
    """What the forward is given is the caller's, who may read it on; nothing else is."""
    (release,) = ops["release"]
    given = arguments_of(release)["src"] in forward.find_nodes(op="placeholder")
    if given != _is_donated(release):
        raise InvariantError(f"owner: {name} is {'' if given else 'not '}the caller's, its release says otherwise.")


def _is_donated(release: fx.Node) -> bool:
    return release.target is RELEASE and arguments_of(release).get("donated") is True


def _check_geometry(name: str, ops: _Ops) -> None:
    source = (ops["offload"] or ops["prefetch"])[0].all_input_nodes[0]
    (wait,) = ops["wait"] or ops["take_grad"]
    want, got = source.meta["val"], wait.meta["val"]
    if want.is_conj() or want.is_neg():
        raise InvariantError(f"geometry: {name} leaves as a lazy conjugate or negative: its bytes do not say so.")
    for what, left, right in (
        ("size", want.shape, got.shape),
        ("stride", want.stride(), got.stride()),
        ("dtype", want.dtype, got.dtype),
        ("device", want.device, got.device),
    ):
        if left != right:
            raise InvariantError(f"geometry: {name} leaves with {what} {left} and comes back with {right}.")
    asked = arguments_of(wait)
    if (dtype := asked["dtype"], device := asked["device"]) != (want.dtype, want.device):
        raise InvariantError(f"geometry: {name} is asked back as {dtype} on {device}, not {want.dtype}.")
    for argument, sizes in ((asked["size"], want.shape), (asked["stride"], want.stride())):
        literal = [item.meta["val"] if isinstance(item, fx.Node) else item for item in argument]
        if literal != list(sizes):
            raise InvariantError(f"geometry: {name} is asked back as {literal}, not {list(sizes)}.")


def _check_hand_over(forward: fx.Graph, backward: fx.Graph | None, num_outputs: int) -> None:
    """What the forward saves must be what the backward takes, by position, behind its symbols.

    Names may differ where one side does not know the other's: the states of random generators are renamed, and a value
    that came back inside the forward is saved under its new name. The two must then look alike.
    """
    if backward is None:
        return
    pairs = handed(forward, backward, num_outputs)
    saved_names, taken_names = {s.name for s, _ in pairs}, {p.name for p in backward.find_nodes(op="placeholder")}
    for index, (value, other) in enumerate(pairs):
        renamed = value.name not in taken_names and other is not None and other.name not in saved_names
        if other is None or not (value.name == other.name or (renamed and _look_alike(value, other))):
            raise InvariantError(f"hand-over: the forward saves {value} at {index}, where the backward takes {other}.")
    paired = {other for _, other in pairs}
    made_names = {node.name for node in forward.nodes}
    late = [p for p in backward.find_nodes(op="placeholder") if is_tensor(p) and p.name in made_names]
    if unpaired := [p.name for p in late if p not in paired]:
        raise InvariantError(f"hand-over: the backward takes {unpaired}, which the forward does not save there.")


def _look_alike(left: fx.Node, right: fx.Node) -> bool:
    one, other = left.meta["val"], right.meta["val"]
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.device == other.device)


def _check_places(problem: Problem, plan: Plan, by_name: dict[str, _Ops], graphs: tuple[fx.Graph, ...]) -> None:
    """Every op stands in the gap that the plan names."""
    gap: dict[fx.Node, int] = {}
    end = 0
    for graph, names in zip(graphs, (problem.ops[: problem.boundary], problem.ops[problem.boundary :]), strict=False):
        waiting = [op.name for op in names]
        step, end = end, end + len(waiting)
        for node in graph.nodes:
            if waiting and node.name == waiting[0]:
                waiting.pop(0)
                step += 1
            gap[node] = step
        if waiting:
            raise InvariantError(f"places: step {waiting[0]} is gone from the graph.")
    for transfer in plan.transfers:
        ops = by_name[transfer.name]
        planned_at: dict[str, int] = {}
        if transfer.out is not None:
            planned_at |= {"offload": transfer.out.after + 1, "release": transfer.out.freed_at}
        if transfer.back is not None:
            loads = transfer.out is None  # the wait is that step
            planned_at |= {"prefetch": transfer.back.prefetch_at, "wait": transfer.back.needed_at + loads}
        for role, planned in planned_at.items():
            found = gap[ops[role][0]]
            if found != planned:
                raise InvariantError(
                    f"places: {role} of {transfer.name} stands before step {found}, planned {planned}."
                )


def _check_memory(
    problem: Problem,
    plan: Plan,
    capture: RegionGraphs,
    registers: frozenset[fx.Node],
    in_place: Mapping[fx.Node, fx.Node],
) -> None:
    """Replay both graphs node by node and compare the most bytes held with the plan's word for it."""
    peak, where = _replay(capture, registers, in_place)
    promised = plan.forecast.peak_bytes - problem.external_bytes
    if peak > promised:
        raise InvariantError(f"peak: the graphs hold {peak} bytes at {where}, the plan promised {promised}.")


def _replay(
    capture: RegionGraphs, registers: frozenset[fx.Node], in_place: Mapping[fx.Node, fx.Node]
) -> tuple[int, str]:
    """Run through the graphs as the allocator would; return the most bytes held and the node that held them.

    A donated input, marked at its release, is the caller's to the end of the forward, and free by the backward.
    """
    donated_inputs = {arguments_of(node)["src"] for node in capture.forward.nodes if _is_donated(node)}
    carried: dict[str, dict[int, Key]] = {}
    held: dict[Key, int] = {}
    everywhere: dict[fx.Node, dict[int, Key]] = {}
    forever: set[Key] = set()
    peak, where = 0, ""
    away = away_names(capture.graphs) | unread_names(capture.graphs, capture.offloaded)
    for graph in capture.graphs:
        owner = owners_of(graph, carried, registers)
        everywhere |= owner
        (output,) = graph.find_nodes(op="output")
        returned = [v for v in output.args[0] if isinstance(v, fx.Node)]
        callers = returned
        if graph is capture.forward:
            callers = [v for v in output.args[0][: capture.num_outputs] if isinstance(v, fx.Node)]
        callers = callers + [
            p for p in graph.find_nodes(op="placeholder") if p.name not in carried and p not in donated_inputs
        ]
        forever |= {key for value in callers for key in owner[value].values()}
        donated = {key for value in donated_inputs if value.graph is graph for key in owner[value].values()} - forever
        kept = forever | donated | {key for value in returned for key in owner[value].values()}
        last = _last_readers(graph, owner)
        for node in graph.nodes:
            if node in in_place:
                taken = everywhere[in_place[node]].values()
                if not forever.isdisjoint(taken):  # bytes of the caller's, by another name from now on
                    forever |= {*owner[node].values()}
                    kept |= forever
                for key in taken:
                    held.pop(key, None)
            made = {} if node.name in away else _bytes_made(node, owner, capture.device)
            for key, nbytes in made.items():
                held.setdefault(key, nbytes)
            runs = node.op not in ("placeholder", "get_attr", "output")  # some graphs only hand on what they are given
            if runs and sum(held.values()) > peak:
                peak, where = sum(held.values()), node.name
            for key in last.get(node, ()):
                if key not in kept:
                    held.pop(key, None)
        for key in donated:
            held.pop(key, None)
        if graph is capture.forward and capture.backward is not None:
            pairs = handed(graph, capture.backward, capture.num_outputs)
            carried = {taken.name: under_new_fake(owner[value], taken) for value, taken in pairs if taken is not None}
    return peak, where


def _last_readers(graph: fx.Graph, owner: dict[fx.Node, dict[int, Key]]) -> dict[fx.Node, list[Key]]:
    last: dict[Key, fx.Node] = {}
    late = late_reads(graph, owner)
    for node in graph.nodes:
        for reads in (node, *node.all_input_nodes, *late.get(node, ())):
            last.update(dict.fromkeys(owner[reads].values(), node))
    readers: dict[fx.Node, list[Key]] = {}
    for key, node in last.items():
        readers.setdefault(node, []).append(key)
    return readers


def _bytes_made(node: fx.Node, owner: dict[fx.Node, dict[int, Key]], device: torch.device) -> dict[Key, int]:
    """Return the device bytes that appear with a node, by storage: those of a `wait` appear with its prefetch."""
    if node.target in (PREFETCH, FETCH_PARAM):
        (wait,) = (user for user in node.users if user.target is WAIT)
        (tensor,) = strided(wait)
        return {(id(node), 0): _storage_bytes(tensor)}
    if node.target in RUNTIME_OPS:  # handles and tokens are bookkeeping of the host
        return {}
    made: dict[Key, int] = {}
    for tensor in strided(node):
        key = owner[node].get(tensor.untyped_storage()._cdata)
        if key is not None and key[0] == id(node) and tensor.device == device:
            made[key] = _storage_bytes(tensor)
    return made


def _storage_bytes(tensor: torch.Tensor) -> int:
    return byte_hint(tensor.untyped_storage().nbytes())


def _check_buffers(plan: Plan, graphs: tuple[fx.Graph, ...]) -> None:
    """Walk the ops as they run and count the host buffers acquired, class by class."""
    size = {transfer.name: transfer.nbytes for transfer in plan.transfers}
    free = {c.nbytes: c.count for c in plan.pool}
    holds: dict[str, int] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.target is OFFLOAD and arguments_of(node)["tier"] == Tier.HOST.value:
                name = str(arguments_of(node)["label"])
                fits = [nbytes for nbytes, count in sorted(free.items()) if nbytes >= size[name] and count > 0]
                if not fits:
                    raise InvariantError(f"buffers: no buffer of {size[name]} bytes is free when {name} leaves.")
                free[fits[0]] -= 1
                holds[node.name] = holds[name] = fits[0]
            elif node.target is WAIT and source_of(node).target is PREFETCH:
                handle = source_of(source_of(node))
                label = str(arguments_of(handle)["label"]) if handle.target is OFFLOAD else handle.name
                if label in holds:
                    free[holds.pop(label)] += 1
