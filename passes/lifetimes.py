"""Storages and their lives: who makes, reads and aliases which device memory, over forward and backward.

A storage is found by the identity of its fake storage, which AOTAutograd's fakes keep through views, `getitem`, and
the hand-over from forward to backward (torch: `_inductor/fx_passes/memory_estimator.py` tracks the same way). What
the transfer of a storage needs is decided here, too: a *carrier*, a dense tensor that spans all of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from tencache_fx.ops import LOAD_PARAM, STORE_GRAD
from tencache_fx.passes.addmm_fusion import fused_product
from tencache_fx.passes.collectives import begins_collective, is_collective_wait
from tencache_fx.passes.graphs import RegionGraphs, output_args, placeholders
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.op_kinds import packet_of, written_arguments
from tencache_fx.passes.parameter_markers import is_away
from tencache_fx.passes.symbols import SymbolSource, symbol_source
from tencache_fx.planning.problem import Kind, Step, Storage, Tier
from tencache_fx.tensors import allocated_bytes, byte_hint, is_lazy, tensors_of

_NO_BYTES = torch.ops.aten._efficientzerotensor.default  # of forward-mode derivatives; its fake is an ordinary tensor


@dataclass(frozen=True, kw_only=True)
class StorageNodes:
    """The nodes behind one planned storage.

    `members` are every node, in either graph, whose value aliases it; `saved` the positions in the forward's output
    at which it is handed to the backward.
    """

    storage: Storage
    members: tuple[fx.Node, ...]
    saved: tuple[int, ...]


@dataclass(kw_only=True)
class _Trace:
    """What is seen of one storage while walking the graphs; `members` with the steps at which they appear.

    `shared` says that it may lie inside another, or another inside it, while both are read (torch: `_inductor/ir.py:
    ConcatKernel`): neither can then leave by itself. `under_way` are the collectives that write it and have not been
    waited for so far, each with the step that began it and what it reads; `whole` is the step of the last such wait.
    """

    name: str
    nbytes: int
    formula: str
    kind: Kind
    birth: int
    made_here: bool
    outlives: bool = False
    donated: bool = False
    parameter: str = ""
    state_bytes: int = 0
    state_saved_bytes: int = 0
    tier: Tier = Tier.HOST
    written: bool = False
    shared: bool = False
    under_way: list[tuple[int, "list[_Trace]"]] = field(default_factory=list)
    whole: int = 0
    uses: list[int] = field(default_factory=list)
    members: dict[fx.Node, int] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)


def measure_lifetimes(
    capture: RegionGraphs, model: InductorModel | None = None, mutations: Mapping[fx.Node, fx.Node] | None = None
) -> tuple[StorageNodes, ...]:
    """Return every storage on the region's device with its life, in order of birth.

    Values that Inductor keeps in registers have no storage; what they are computed from is read when their reader runs.
    `model` is None where no compiler fuses. Those in `mutations` have the storage of an input. Raises `TencacheError`
    if a size is known only when the region runs, and nothing bounds it. O(nodes + arguments).
    """
    walk = _Walk(capture, model, mutations or {})
    walk.enter()
    for step, node in enumerate(capture.nodes):
        if step == capture.boundary:
            walk.leave_forward()
        walk.visit(step, node)
    if capture.boundary == len(capture.nodes):  # inference, or a backward that does nothing
        walk.leave_forward()
    walk.finish_backward()
    sources = [symbol_source(capture, graph) for graph in capture.graphs]
    return tuple(_finish(trace, capture, sources) for trace in walk.traces)


class _Walk:
    """One pass over both graphs in step order, collecting a trace per storage."""

    def __init__(
        self, capture: RegionGraphs, model: InductorModel | None, mutations: Mapping[fx.Node, fx.Node]
    ) -> None:
        self.capture = capture
        self._mutations = mutations
        self.traces: list[_Trace] = []
        # By fake storage, in the graph being walked. What the backward recomputes keeps the forward's fakes, though it
        # is memory of its own: so the backward begins with its placeholders' storages only.
        self._known: dict[int, _Trace] = {}
        self._names: set[str] = set()
        self._fuses = model is not None
        self._registers = {} if model is None else model.registers
        # By fake storage of a part, what it was put together to: Inductor lets the part live inside the whole.
        self._wholes: dict[int, list[_Trace]] = {}

    def enter(self) -> None:
        """Meet the forward's placeholders and constants: their bytes are there before the region runs, and after."""
        for index, node in enumerate(placeholders(self.capture.forward)):
            kind = Kind.PARAMETER if index in self.capture.static_inputs else Kind.INPUT
            donated = index in self.capture.donated and kind is Kind.INPUT
            for key, tensor in self._storages(node):
                donated = donated and (key not in self._known or self._known[key].donated)
                trace = self._trace(key, node, tensor, kind, birth=0, made_here=False)
                trace.outlives, trace.donated = True, donated
        self._meet_constants(self.capture.forward)

    def _meet_constants(self, graph: fx.Graph) -> None:
        """Meet the tensors that belong to a graph itself: those a model makes of Python's numbers, for instance."""
        for node in graph.find_nodes(op="get_attr"):
            for key, tensor in self._storages(node):
                self._trace(key, node, tensor, Kind.PARAMETER, birth=0, made_here=False).outlives = True

    def leave_forward(self) -> None:
        """Meet the forward's outputs, then the backward's placeholders if there is one."""
        self._finish_forward()
        if self.capture.backward is not None:
            self._cross(self.capture.backward)

    def _finish_forward(self) -> None:
        """Meet the forward's outputs: what the caller gets outlives the region, what is saved is noted by position."""
        for index, value in enumerate(output_args(self.capture.forward)):
            for key, _ in self._storages(value):
                if index < self.capture.num_outputs:
                    self._hand_over(key, Kind.OUTPUT)
                else:
                    self._known[key].saved.append(index)

    def _cross(self, backward: fx.Graph) -> None:
        """Meet the backward's placeholders: saved values carry the forward's storages, tangents are new."""
        handed = {
            v.name
            for v in (*output_args(self.capture.forward), *placeholders(self.capture.forward))
            if isinstance(v, fx.Node)
        }
        forward, self._known = self._known, {}
        for node in placeholders(backward):
            for key, tensor in self._storages(node):
                if node.name in handed and key in forward:
                    self._known[key] = forward[key]
                    forward[key].members[node] = self.capture.boundary
                else:
                    # A gradient from outside: the autograd engine holds it until the whole backward has run.
                    trace = self._trace(key, node, tensor, Kind.INPUT, birth=self.capture.boundary, made_here=False)
                    trace.outlives = True
        constants = {key: trace for key, trace in forward.items() if _is_constant(trace)}
        self._known = constants | self._known
        self._meet_constants(backward)

    def finish_backward(self) -> None:
        """Meet the backward's outputs: gradients outlive the region, and so does what nobody has waited for."""
        for value in () if self.capture.backward is None else output_args(self.capture.backward):
            for key, _ in self._storages(value):
                self._hand_over(key, Kind.GRADIENT)
        for trace in self.traces:
            if trace.under_way:
                self._land(trace, len(self.capture.nodes) - 1)
                trace.written = trace.outlives = True  # yet to be written, behind the region

    def visit(self, step: int, node: fx.Node) -> None:
        """Meet one step: what it reads, makes, aliases and writes."""
        product = fused_product(node) if self._fuses else None
        arguments = [*node.all_input_nodes, *(product.all_input_nodes if product is not None else ())]
        read = {key for argument in arguments for key in self._read_through(argument)}
        for key in read:
            self._known[key].uses.append(step)
            for whole in self._wholes.get(key, ()):
                whole.shared = self._known[key].shared = True
        if node in self._registers:
            return
        if node.target is STORE_GRAD:
            for key in read:
                self._known[key].kind, self._known[key].parameter = Kind.STORED, node.meta["tencache_parameter"]
                there_bytes, host_bytes = node.meta["tencache_state_bytes"]
                self._known[key].state_bytes = there_bytes
                self._known[key].state_saved_bytes = there_bytes - host_bytes
            return
        if (root := self._mutations.get(node)) is not None:
            ((given, _),) = self._storages(root)
            self._known |= {key: self._known[given] for key, _ in self._storages(node)}
        for key, tensor in self._storages(node):
            twice_made = key in self._known and key not in read
            trace = self._trace(key, node, tensor, Kind.ACTIVATION, birth=step, made_here=True)
            trace.uses.append(step)
            trace.written |= twice_made
            if node.target is LOAD_PARAM:
                trace.kind, trace.parameter = Kind.FETCHED, node.meta["tencache_parameter"]
                trace.tier = node.meta["tencache_tier"]
        if begins_collective(node):
            for key, _ in self._storages(node):
                self._known[key].under_way.append((step, [self._known[each] for each in read]))
        elif is_collective_wait(node):
            for key in read:
                self._land(self._known[key], step)
        for argument in written_arguments(node):
            for key, _ in self._storages(argument):
                self._known[key].written = True
        if self._fuses and packet_of(node) is torch.ops.aten.cat:
            ((joined, _),) = self._storages(node)
            for key in read:
                self._wholes.setdefault(key, []).append(self._known[joined])

    def _land(self, trace: _Trace, step: int) -> None:
        """End the collectives that write a storage: until this step they read what they were given."""
        for began, sources in trace.under_way:
            for source in sources:
                source.uses += range(began, step + 1)
        trace.under_way, trace.whole = [], step

    def _read_through(self, argument: fx.Node) -> set[int]:
        """Return the storages that reading `argument` reads."""
        return {key for source in self._registers.get(argument, {argument}) for key, _ in self._storages(source)}

    def _hand_over(self, key: int, kind: Kind) -> None:
        trace = self._known[key]
        trace.outlives, trace.donated = True, False
        if trace.kind is Kind.ACTIVATION:
            trace.kind = kind

    def _storages(self, value: object) -> Iterator[tuple[int, torch.Tensor]]:
        nothing = not isinstance(value, fx.Node) or is_away(value) or value.target is STORE_GRAD
        for tensor in () if nothing else tensors_of(value):  # type: ignore[arg-type]
            if tensor.device == self.capture.device and tensor.layout is torch.strided:
                yield tensor.untyped_storage()._cdata, tensor

    def _trace(
        self, key: int, node: fx.Node, tensor: torch.Tensor, kind: Kind, *, birth: int, made_here: bool
    ) -> _Trace:
        """Return the storage's trace, begun here if this is its first sight."""
        if key not in self._known:
            size = tensor.untyped_storage().nbytes()
            self._known[key] = _Trace(
                name=self._fresh_name(node.name),
                nbytes=allocated_bytes(byte_hint(size), tensor.device),
                formula=formula_of(size),
                kind=kind,
                birth=birth,
                made_here=made_here,
            )
            self.traces.append(self._known[key])
        trace = self._known[key]
        trace.members[node] = birth
        return trace

    def _fresh_name(self, name: str) -> str:
        """Tell apart the outputs of one node, and a node from its recomputed copy in the backward."""
        fresh, count = name, 1
        while fresh in self._names:
            count += 1
            fresh = f"{name}#{count}"
        self._names.add(fresh)
        return fresh


def _is_constant(trace: _Trace) -> bool:
    return any(node.op == "get_attr" for node in trace.members)


def _hold(trace: _Trace, capture: RegionGraphs, uses: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return `uses`, with every step between those of the backward if that is handed no carrier.

    It is in use there in the sense that it cannot leave: no tensor in that graph spans all of it.
    """
    late = [use for use in uses if use >= capture.boundary]
    handed = [node for node in trace.members if node.op == "placeholder" and node.graph is capture.backward]
    if len(late) < 2 or trace.birth >= capture.boundary or find_carrier(handed) is not None:
        return uses
    return (*(use for use in uses if use < late[0]), *map(Step, range(late[0], late[-1] + 1)))


def _finish(trace: _Trace, capture: RegionGraphs, sources: Sequence[SymbolSource]) -> StorageNodes:
    uses = tuple(Step(step) for step in sorted(set(trace.uses)))
    steps = len(capture.nodes)
    uses = _hold(trace, capture, uses)
    last = max(uses, default=Step(trace.birth))
    if trace.saved:  # it stays until the backward has begun, whether or not that reads it
        last = max(last, capture.boundary)
    carrier = find_carrier(trace.members)
    donated = trace.donated and bool(trace.saved) and last > capture.boundary
    donated = donated and carrier is not None and carrier.op == "placeholder"  # not a view that the region makes
    storage = Storage(
        name=trace.name,
        nbytes=trace.nbytes,
        kind=trace.kind,
        birth=Step(trace.birth),
        death=Step(steps if trace.outlives else min(last + 1, steps)),
        uses=uses,
        spillable=(
            (donated or (trace.made_here and trace.kind is Kind.ACTIVATION))
            and not trace.written
            and not trace.shared
            and carrier is not None
            and all(source.covers(_geometry(member)) for source in sources for member in trace.members)
        ),
        ready=Step(max(trace.whole, trace.birth if carrier is None else trace.members[carrier])),
        caller_frees_at=capture.boundary if donated else Step(0),
        formula=trace.formula,
        parameter=trace.parameter,
        state_bytes=trace.state_bytes,
        state_saved_bytes=trace.state_saved_bytes,
        tier=trace.tier,
    )
    return StorageNodes(storage=storage, members=tuple(trace.members), saved=tuple(trace.saved))


def find_carrier(members: Iterable[fx.Node], graph: fx.Graph | None = None) -> fx.Node | None:
    """Return the first member (of `graph`) that spans its whole storage densely: its copy carries every member.

    None if there is none (the storage then stays), or if a member reads the bytes as another dtype, which cannot be
    rebuilt from the carrier. One whose bytes do not say it all carries nothing (`is_lazy`), nor does what a collective
    still writes: the last wait for one, or what follows it. A node that returns several tensors is represented by its
    `getitem`s.
    """
    single = [node for node in members if isinstance(node.meta["val"], torch.Tensor)]
    if len({node.meta["val"].dtype for node in single}) != 1 or any(node.target is _NO_BYTES for node in single):
        return None
    here = [node for node in single if graph is None or node.graph is graph]
    whole = max((place for place, node in enumerate(here) if is_collective_wait(node)), default=0)
    return next((node for node in here[whole:] if _spans_storage(node.meta["val"])), None)


def _geometry(node: fx.Node) -> Iterator[int | torch.SymInt]:
    for tensor in tensors_of(node):
        yield from (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _spans_storage(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor):
        return False
    whole = tensor.numel() * tensor.element_size()
    if byte_hint(whole) != byte_hint(tensor.untyped_storage().nbytes()) or byte_hint(tensor.storage_offset()) != 0:
        return False
    if not any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride())):
        return is_non_overlapping_and_dense_or_false(tensor)
    # Torch's function, asked about symbols, would guard on the answer: the code would be for these strides only.
    dense: int | torch.SymInt = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), key=lambda pair: byte_hint(pair[0])):
        if not (statically_known_true(size == 1) or statically_known_true(stride == dense)):
            return False
        dense = dense * size
    return True


def formula_of(size: int | torch.SymInt) -> str:
    """Return a symbolic size as text in its symbols; nothing for a plain number, or a size only a run knows."""
    if not isinstance(size, torch.SymInt) or free_unbacked_symbols(size):
        return ""
    expression: sympy.Expr = size.node.expr
    return str(expression) if expression.free_symbols else ""
