"""The bytes that each step reads and writes, and where a kernel begins: what memory-bound work costs.

Without a compiler each op is a kernel. Inductor computes what stays in registers (`fusion`) inside its reader, and
joins generated ops that run over the same elements into one kernel; a kernel reads each value once, and writes only
what somebody outside it reads (torch: `_inductor/codegen/simd.py: can_fuse`, `_inductor/graph.py: count_bytes`). As in
`fused_groups`, an extern kernel here ends all kernels before it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from tencache_fx.ops import UNPLANNED
from tencache_fx.passes.fusion import Registers, base_of, is_constant, is_loop_body, is_reduction, is_view
from tencache_fx.passes.graphs import RegionGraphs, output_args
from tencache_fx.tensors import byte_hint, tensors_of

_FEW_ROWS = 64  # a reduction to fewer results is split over the device: who reads them starts a new kernel
_INDEXED = frozenset((torch.ops.aten.embedding, torch.ops.aten.gather, torch.ops.aten.index))

_Key = tuple[fx.Node, int, int, int]  # the node that made the bytes, their storage, offset in it, distinct elements


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step moves to and from memory; `launches` if a kernel begins with it."""

    nbytes: int
    launches: bool


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


def measure_traffic(capture: RegionGraphs, registers: Registers | None) -> tuple[Traffic, ...]:
    """Return what each step of `capture` moves; `registers` is None where no compiler fuses. O(nodes + arguments)."""
    reads = _Reads(registers or {})
    if registers is None:
        free = Traffic(0, launches=False)
        return tuple(free if node.target in UNPLANNED else _alone(node, reads) for node in capture.nodes)
    kernels = _find_kernels(capture, registers, reads)
    readers: defaultdict[fx.Node, set[_Kernel | None]] = defaultdict(set)
    for node in capture.nodes:
        for base, *_ in reads.of(node) if not _is_free(node, registers) else ():
            readers[base].add(kernels.get(node))
    for graph in capture.graphs:
        for value in output_args(graph):
            if isinstance(value, fx.Node):
                readers[base_of(value)].add(None)
    traffic, begun = [], set[_Kernel]()
    for node in capture.nodes:
        kernel = kernels.get(node)
        if kernel is None:
            traffic.append(Traffic(0, launches=False) if _is_free(node, registers) else _alone(node, reads))
            continue
        fresh = {
            key: nbytes
            for key, nbytes in reads.of(node).items()
            if key not in kernel.loaded and kernels.get(key[0]) is not kernel
        }
        kernel.loaded.update(fresh)
        written = _nbytes(node) if readers[node] - {kernel} else 0
        traffic.append(Traffic(sum(fresh.values()) + written, launches=kernel not in begun))
        begun.add(kernel)
    return tuple(traffic)


def _find_kernels(capture: RegionGraphs, registers: Registers, reads: "_Reads") -> dict[fx.Node, _Kernel]:
    """Return the kernel of every generated op that writes memory, or would if its readers were elsewhere.

    An op joins the newest kernel that it may: none older than the one that makes what it reads.
    """
    kernel_of: dict[fx.Node, _Kernel] = {}
    order: dict[_Kernel, int] = {}  # since the last extern kernel
    touched: dict[fx.Node, list[_Kernel]] = {}
    for step, node in enumerate(capture.nodes):
        if _is_free(node, registers):
            continue
        if step == capture.boundary or not _is_generated(node):
            order, touched = {}, {}
        if not _is_generated(node):
            continue
        sources = {base for base, *_ in reads.of(node)}
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


class _Reads:
    """What each node reads from memory, looked up through registers and views."""

    def __init__(self, registers: Mapping[fx.Node, object]) -> None:
        self._registers = registers
        self._found: dict[fx.Node, dict[_Key, int]] = {}

    def of(self, node: fx.Node) -> dict[_Key, int]:
        """Return the bytes that `node` reads, by the value that they belong to."""
        if node not in self._found:
            found: dict[_Key, int] = {}
            for argument in node.all_input_nodes:
                found |= self.of(argument) if argument in self._registers else dict(_pieces(argument))
            if getattr(node.target, "overloadpacket", None) in _INDEXED:
                found = {key: min(nbytes, _nbytes(node)) for key, nbytes in found.items()}
            self._found[node] = found
        return self._found[node]


def _pieces(argument: fx.Node) -> Iterator[tuple[_Key, int]]:
    base = base_of(argument)
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


def writes_in_place(node: fx.Node) -> bool:
    """Return whether a node changes bytes that exist already, such as `copy_`."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _alone(node: fx.Node, reads: _Reads) -> Traffic:
    if not tensors_of(node) or (is_view(node) and not writes_in_place(node)):
        return Traffic(0, launches=False)
    return Traffic(sum(reads.of(node).values()) + _nbytes(node), launches=True)


def _is_free(node: fx.Node, registers: Mapping[fx.Node, object]) -> bool:
    if node.target in UNPLANNED:  # what their copies take is the plan's affair
        return True
    return node in registers or not tensors_of(node) or (is_view(node) and not writes_in_place(node))


def _is_generated(node: fx.Node) -> bool:
    return is_loop_body(node) or is_reduction(node) or is_constant(node) or writes_in_place(node)


def _loop(node: fx.Node) -> tuple[int, int | None]:
    """Return the elements that a generated op runs over, and how many results it reduces them to, if it does."""
    results = max(byte_hint(tensor.numel()) for tensor in tensors_of(node))
    if not is_reduction(node):
        return results, None
    operands = [byte_hint(tensor.numel()) for argument in node.all_input_nodes for tensor in tensors_of(argument)]
    return max(operands, default=results), results


def _nbytes(node: fx.Node) -> int:
    return sum(byte_hint(tensor.numel()) * tensor.element_size() for tensor in tensors_of(node))
