"""What Inductor will make of a region: which values it never writes, which ops share a kernel, what each kernel moves.

All rules about its fusion are here, and other passes ask one `InductorModel`, built once for a region or a graph:

* A pointwise value stays in registers, inside the kernels of its readers, if Inductor generates all of these, and there
  is one, or the value is cheap to compute again, that is, reads few buffers (torch: `_inductor/graph.py: run_node`,
  `_inductor/ir.py: StorageBox.mark_reuse`; `REALIZE_READS` is its `realize_reads_threshold`). Not so what is looked up
  in an offloaded embedding: `barriers.PinOrder` has that written at once, or the embedding, which is larger, would be
  held until the last reader.
* A generated op joins a kernel that makes or reads what it reads, unless an extern kernel runs between them (torch:
  `_inductor/scheduler.py: can_fuse_vertical, can_fuse_horizontal`). Kernels are counted twice, for two questions.
  For time, `traffic` has an op join only a kernel with the same loops (torch: `_inductor/codegen/simd.py: can_fuse`).
  For memory, `kernel_ends` has it join whatever shares a value with it: a kernel holds all that it reads and writes at
  once, so too large a kernel only keeps values for too long.
* A kernel reads each value once, and writes only what is read outside of it (torch: `_inductor/graph.py: count_bytes`).
* A scatter writes into a copy of its first argument, and computes what it writes there (`scatters.py`).
* On a GPU, some `cat`s are computed inside their readers (`fused_cats.py`).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import torch
from torch import fx
from torch._inductor.lowering import lowerings

from tencache_fx.ops import FETCH_PARAM, LOAD_PARAM, UNPLANNED, WAIT
from tencache_fx.passes.fused_cats import is_stored_cat
from tencache_fx.passes.graphs import RegionGraphs, output_args
from tencache_fx.passes.op_kinds import (
    base_of,
    count_flops,
    is_mutating,
    is_pointwise,
    is_view,
    nbytes_of,
    packet_of,
    readers_of,
)
from tencache_fx.passes.scatters import computes
from tencache_fx.planning.problem import Step
from tencache_fx.tensors import byte_hint, tensors_of

REALIZE_READS = 4

_Asked = Callable[[fx.Node], bool]

_aten = torch.ops.aten
_REDUCTIONS = frozenset(
    (_aten.sum, _aten.mean, _aten.prod, _aten.amax, _aten.amin, _aten.max, _aten.min, _aten.any, _aten.all)
    + (_aten.argmax, _aten.argmin, _aten.var, _aten.var_mean, torch.ops.prims.sum, torch.ops.prims.var)
)
_CONSTANTS = frozenset((_aten.full, _aten.arange, _aten.scalar_tensor, torch.ops.prims.iota))
_INDEXED = frozenset((_aten.embedding, _aten.gather, _aten.index, _aten._unsafe_index))
_LOADS = _INDEXED | frozenset(
    (_aten.clone, _aten.copy, _aten._to_copy, _aten.lift_fresh_copy)
    + (_aten.cat, _aten.select_scatter, _aten.slice_scatter, _aten.constant_pad_nd, _aten.flip, _aten.repeat)
)
_COSTLY = frozenset((_aten.exp, _aten.sigmoid))  # not computed again for a second reader
_FEW_ROWS = 64  # a reduction to fewer results is split over the device: who reads them starts a new kernel

_Key = tuple[fx.Node, int, int, int]  # the node that made the bytes, their storage, offset in it, distinct elements


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step moves to and from memory; `launches` if a kernel begins with it."""

    nbytes: int
    launches: bool


_NOTHING = Traffic(0, launches=False)


class InductorModel:
    """What Inductor makes of `nodes`, the steps of one graph or of a region whose backward begins at `boundary`.

    They are for a GPU if they are there, or if `on_gpu` says so. `registers` are the values that it never writes to
    memory, each with the values in memory that it is computed from; views of such values are among them. `views` are
    all nodes that only name bytes. Everything takes O(nodes + arguments) but for `early`.
    """

    def __init__(self, nodes: Iterable[fx.Node], boundary: int | None = None, *, on_gpu: bool = False) -> None:
        self._nodes, self._boundary = tuple(nodes), boundary
        self._is_view = cache(is_view)  # asked of each node by all that read it
        self.views = frozenset(filter(self._is_view, self._nodes))
        found = _find_registers(self._nodes, self._is_view, partial(is_stored_cat, on_gpu=on_gpu))
        self.registers: Mapping[fx.Node, frozenset[fx.Node]] = found
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}

    @staticmethod
    def of(capture: RegionGraphs, *, on_gpu: bool = False) -> "InductorModel":
        """Return the model of a region."""
        return InductorModel(capture.nodes, capture.boundary, on_gpu=on_gpu)

    def is_generated(self, node: fx.Node) -> bool:
        """Return whether Inductor generates a kernel, or a part of one, that writes this value to memory."""
        return node not in self.views and node not in self.registers and is_fusible(node)

    def sources_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return the values in memory that a node reads, by the nodes that made them."""
        if node not in self._sources:
            given = (each for argument in node.all_input_nodes for each in self.registers.get(argument, (argument,)))
            self._sources[node] = frozenset(base_of(each, self._is_view) for each in given if tensors_of(each))
        return self._sources[node]

    @cached_property
    def heavy(self) -> Sequence[int]:
        """The steps of matmul-class ops, in order."""
        return [step for step, node in enumerate(self._nodes) if count_flops(node) > 0]

    @cached_property
    def kernel_ends(self) -> Sequence[int]:
        """For every step the last step of the largest kernel that it may be part of."""
        parent = list(range(len(self._nodes)))

        def root(step: int) -> int:
            while parent[step] != step:
                parent[step] = parent[parent[step]]
                step = parent[step]
            return step

        made: dict[fx.Node, int] = {}  # since the last extern kernel: by value, the step that made it or read it first
        for step, node in enumerate(self._nodes):
            if step == self._boundary:
                made.clear()
            if not self.is_generated(node):
                if not (node in self.views or node in self.registers or is_constant(node)):
                    made.clear()
                continue
            for source in self.sources_of(node):
                first = made.setdefault(source, step)
                older, newer = sorted((root(first), root(step)))
                parent[older] = newer  # the root of a kernel is its last step
            made[node] = step
        return [root(step) for step in range(len(parent))]

    @cached_property
    def early(self) -> Mapping[fx.Node, Step]:
        """The results that may be computed before a heavy op that stands before them, with the earliest step.

        They go into the kernel of an earlier op that reads what they read, in a loop of the same shape, if all that
        they read is there before that kernel has to run; and that is before the next heavy op (`barriers.PinOrder`).
        What only generated kernels read is left out: it mostly stays inside its kernel. O(nodes + arguments x readers).
        """
        made: dict[fx.Node, int] = {}
        readers: dict[fx.Node, list[int]] = {}
        found: dict[fx.Node, Step] = {}
        for step, node in enumerate(self._nodes):
            if step == self._boundary:
                made, readers = {}, {}
            made[node] = step
            if not self.is_generated(node):
                continue
            sources = self.sources_of(node)
            ready = max((made[source] for source in sources if source in made), default=0)
            escapes = not all(map(is_fusible, readers_of(node, self._is_view)))
            for partner in sorted({earlier for source in sources for earlier in readers.get(source, ())}):
                due = bisect_left(self.heavy, partner)
                before_heavy = due < len(self.heavy) and ready < self.heavy[due] < step
                if escapes and before_heavy and _loop(self._nodes[partner]) == _loop(node):
                    found[node] = Step(max(partner, ready))
                    break
            for source in sources:
                readers.setdefault(source, []).append(step)
        return found

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """What each step moves; a read is charged to the first op of the kernel that reads the value."""
        reads, kernels = _Reads(self.registers, self._is_view), self._kernels
        readers: defaultdict[fx.Node, set[_Kernel | None]] = defaultdict(set)
        for node in self._nodes:
            for base, *_ in reads.of(node) if not self._is_free(node) else ():
                readers[base].add(kernels.get(node))
        for graph in dict.fromkeys(node.graph for node in self._nodes):
            for value in output_args(graph):
                if isinstance(value, fx.Node):
                    readers[base_of(value, self._is_view)].add(None)
        found, begun = [], set[_Kernel]()
        for node in self._nodes:
            kernel = kernels.get(node)
            if kernel is None:
                found.append(_NOTHING if self._is_free(node) else _alone(node, reads))
                continue
            fresh = {
                key: nbytes
                for key, nbytes in reads.of(node).items()
                if key not in kernel.loaded and kernels.get(key[0]) is not kernel
            }
            kernel.loaded.update(fresh)
            written = nbytes_of(node) if readers[node] - {kernel} else 0
            found.append(Traffic(sum(fresh.values()) + written, launches=kernel not in begun))
            begun.add(kernel)
        return tuple(found)

    @cached_property
    def _kernels(self) -> Mapping[fx.Node, "_Kernel"]:
        """The kernel of every generated op that writes memory, or would if its readers were elsewhere.

        An op joins the newest kernel that it may: none older than the one that makes what it reads.
        """
        kernel_of: dict[fx.Node, _Kernel] = {}
        order: dict[_Kernel, int] = {}  # since the last extern kernel
        touched: dict[fx.Node, list[_Kernel]] = {}
        for step, node in enumerate(self._nodes):
            if self._is_free(node):
                continue
            generated = is_fusible(node) or is_constant(node) or is_mutating(node)
            if step == self._boundary or not generated:
                order, touched = {}, {}
            if not generated:
                continue
            sources = self.sources_of(node)
            made = [order[k] for source in sources if (k := kernel_of.get(source)) in order and k is not None]
            near = {k for source in sources for k in touched.get(source, ()) if order[k] >= max(made, default=-1)}
            elements, rows = _loop(node)
            joined = [k for k in near if k.takes(elements, rows)]
            kernel = max(joined, key=order.__getitem__) if joined else _Kernel(elements)
            order.setdefault(kernel, len(order))
            if rows is not None:
                kernel.rows, kernel.closed = rows, rows < _FEW_ROWS
            kernel_of[node] = kernel
            for value in (*sources, node):
                touched.setdefault(value, []).append(kernel)
        return kernel_of

    def _is_free(self, node: fx.Node) -> bool:
        return node in self.registers or _moves_nothing(node, only_names=node in self.views)


@dataclass(slots=True, eq=False)
class _Kernel:
    """A kernel of generated ops that run over `elements`, and reduce them to `rows` results if at all."""

    elements: int
    rows: int | None = None
    closed: bool = False
    loaded: set[_Key] = field(default_factory=set)

    def takes(self, elements: int, rows: int | None) -> bool:
        if self.closed:
            return False
        if rows is not None:
            return elements == self.elements and self.rows in (None, rows)
        return elements in (self.elements, self.rows)


def _loop(node: fx.Node) -> tuple[int, int | None]:
    """Return the elements that a generated op runs over, and how many results it reduces them to, if it does."""
    results = max(byte_hint(tensor.numel()) for tensor in tensors_of(node))
    if not is_reduction(node):
        return results, None
    operands = [byte_hint(tensor.numel()) for argument in node.all_input_nodes for tensor in tensors_of(argument)]
    return max(operands, default=results), results


def _find_registers(
    nodes: Sequence[fx.Node], is_view: _Asked, is_stored: Callable[[fx.Node, Collection[fx.Node]], bool]
) -> dict[fx.Node, frozenset[fx.Node]]:
    registers: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in nodes:
        sources = frozenset().union(*(registers.get(argument, {argument}) for argument in node.all_input_nodes))
        if is_constant(node) and _is_inlined(node, 0, is_view):
            registers[node] = frozenset()
        elif is_view(node):
            if node.all_input_nodes and node.all_input_nodes[0] in registers:
                registers[node] = sources
        elif is_loop_body(node) and not is_stored(node, registers) and _is_inlined(node, len(sources), is_view):
            registers[node] = sources
    return registers


def is_lookup(node: fx.Node) -> bool:
    """Return whether a node is what a graph finds in an offloaded parameter that is larger, such as an embedding."""
    if packet_of(node) not in _INDEXED or not isinstance(node.args[0], fx.Node):
        return False
    table = base_of(node.args[0])
    begun = table.args[0] if table.target is WAIT else table
    is_fetched = isinstance(begun, fx.Node) and begun.target in (FETCH_PARAM, LOAD_PARAM)
    return is_fetched and nbytes_of(node) < nbytes_of(table)


def _is_inlined(node: fx.Node, reads: int, is_view: _Asked) -> bool:
    readers = readers_of(node, is_view)
    inside = (is_fusible(reader) or computes(reader, node, is_view) for reader in readers)
    if not readers or not all(inside) or is_lookup(node):
        return False
    return len(readers) == 1 or (reads <= REALIZE_READS and packet_of(node) not in _COSTLY)


def is_fusible(node: fx.Node) -> bool:
    """Return whether Inductor generates the code of a node, so that it can be part of a kernel with others."""
    return is_loop_body(node) or is_reduction(node)


def is_loop_body(node: fx.Node) -> bool:
    """Return whether Inductor computes each element of a node by itself: pointwise, or an indexed load or copy.

    It computes nothing on complex numbers: those go to eager kernels (torch: `_inductor/lowering.py:
    fallback_node_due_to_unsupported_type`).
    """
    if not (is_pointwise(node) or packet_of(node) in _LOADS):
        return False
    return not any(tensor.is_complex() for each in (node, *node.all_input_nodes) for tensor in tensors_of(each))


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node is a reduction that Inductor generates itself, and so can fuse with what it reads."""
    return packet_of(node) in _REDUCTIONS


def calls_library(node: fx.Node) -> bool:
    """Return whether Inductor has torch's own kernels run what a node does, as it does where it knows no code for it.

    Torch: `_inductor/lowering.py: make_fallback, fallback_handler`.
    """
    lowering = lowerings.get(node.target)
    return lowering is None or getattr(lowering, "_is_fallback_handler", False)


def is_constant(node: fx.Node) -> bool:
    """Return whether Inductor computes a node from nothing, wherever it is read."""
    return packet_of(node) in _CONSTANTS


def eager_traffic(nodes: Iterable[fx.Node]) -> tuple[Traffic, ...]:
    """Return what each step moves without a compiler: each op is a kernel."""
    reads = _Reads({}, cache(is_view))
    return tuple(_alone(node, reads) for node in nodes)


def _alone(node: fx.Node, reads: "_Reads") -> Traffic:
    if _moves_nothing(node, only_names=reads.is_view(node)):
        return _NOTHING
    return Traffic(sum(reads.of(node).values()) + nbytes_of(node), launches=True)


def _moves_nothing(node: fx.Node, *, only_names: bool) -> bool:
    """Return whether a node makes no tensor, only names one, or stands for a copy: that is the plan's affair."""
    return node.target in UNPLANNED or (only_names and not is_mutating(node)) or not tensors_of(node)


class _Reads:
    """What each node reads from memory, looked up through registers and views."""

    def __init__(self, registers: Mapping[fx.Node, object], is_view: _Asked) -> None:
        self._registers, self.is_view = registers, is_view
        self._found: dict[fx.Node, dict[_Key, int]] = {}
        self._pieces: dict[fx.Node, dict[_Key, int]] = {}

    def of(self, node: fx.Node) -> dict[_Key, int]:
        """Return the bytes that `node` reads, by the value that they belong to."""
        if node not in self._found:
            found: dict[_Key, int] = {}
            for argument in node.all_input_nodes:
                found |= self.of(argument) if argument in self._registers else self._pieces_of(argument)
            if packet_of(node) in _INDEXED:
                found = {key: min(nbytes, nbytes_of(node)) for key, nbytes in found.items()}
            self._found[node] = found
        return self._found[node]

    def _pieces_of(self, argument: fx.Node) -> dict[_Key, int]:
        if argument not in self._pieces:
            self._pieces[argument] = dict(_pieces(argument, base_of(argument, self.is_view)))
        return self._pieces[argument]


def _pieces(argument: fx.Node, base: fx.Node) -> Iterator[tuple[_Key, int]]:
    for tensor in tensors_of(argument):
        distinct, dense = _distinct(tensor), tensor.layout is torch.strided
        storage, offset = (tensor.untyped_storage()._cdata, byte_hint(tensor.storage_offset())) if dense else (0, 0)
        yield (base, storage, offset, distinct), distinct * tensor.element_size()


def _distinct(tensor: torch.Tensor) -> int:
    """Return how many elements `tensor` has, those of an expanded dimension counted once."""
    if tensor.layout is not torch.strided:
        return byte_hint(tensor.numel())
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= byte_hint(size) if byte_hint(stride) else min(1, byte_hint(size))
    return count
