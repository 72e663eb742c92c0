"""Symbolic sizes inside a graph: find a node for each symbol, write expressions over them."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from tencache_fx.passes.graphs import RegionGraphs, call_on_fakes, output_args, placeholders, with_bodies
from tencache_fx.tensors import storage_of, tensors_of

Place = tuple[int, int | None]


def symbol_places(values: Sequence[object]) -> dict[sympy.Symbol, Place]:
    """Return where `values` show each symbol as it is: at which position, and for a tensor in which dimension."""
    places: dict[sympy.Symbol, Place] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            places.setdefault(value.node.expr, (index, None))
    for index, value in enumerate(values):
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                places.setdefault(size.node.expr, (index, dim))
    return places


def storage_places(values: Sequence[object]) -> dict[sympy.Expr, int]:
    """Return where `values` have tensors whose storages are symbolic in size, by that size in bytes, expanded.

    What a view leaves out of its storage shows in no shape: rows that are cut off, or the base of a transposed tensor.
    """
    places: dict[sympy.Expr, int] = {}
    for index, value in enumerate(values):
        storage = storage_of(value) if isinstance(value, torch.Tensor) else None
        size = 0 if storage is None else storage.nbytes()
        if isinstance(size, torch.SymInt):
            places.setdefault(sympy.expand(size.node.expr), index)
    return places


def evaluate(expression: sympy.Expr, sizes: Mapping[sympy.Symbol, int]) -> int:
    """Return the value of `expression` in Python's own arithmetic, a tenth of the time sympy takes.

    Raises `KeyError` for a symbol without a value.
    """
    return int(sympy_interp(PythonReferenceAnalysis, dict(sizes), expression))


def unbacked_sizes(capture: RegionGraphs) -> tuple[torch.SymInt, ...]:
    """Return the sizes of the region's tensors and of their storages that are known only when it runs."""
    graphs = (each for graph in capture.graphs for each in with_bodies(graph))
    tensors = (tensor for graph in graphs for node in graph.nodes for tensor in tensors_of(node))
    sizes = (size for tensor in tensors for size in (*tensor.shape, *_storage_size(tensor)))
    return tuple(size for size in sizes if isinstance(size, torch.SymInt) and free_unbacked_symbols(size))


def _storage_size(tensor: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    storage = storage_of(tensor)
    return () if storage is None else (storage.nbytes(),)


class SymbolSource:
    """The symbols that `graph`'s inputs define, other than through the inputs named in `without`."""

    def __init__(self, graph: fx.Graph, without: Collection[str] = ()) -> None:
        self._graph = graph
        inputs = [node for node in placeholders(graph) if node.name not in without]
        places = symbol_places([node.meta.get("val") for node in inputs])
        self._inputs = {symbol: (inputs[index], dim) for symbol, (index, dim) in places.items()}

    def covers(self, sizes: Iterable[int | torch.SymInt]) -> bool:
        """Return whether every symbol in `sizes` can be had here."""
        return all(symbol in self._inputs for size in sizes for symbol in _symbols(size))

    def write(self, before: fx.Node, sizes: Iterable[int | torch.SymInt]) -> list[int | fx.Node]:
        """Return `sizes` as node arguments, with the nodes that compute symbolic ones written before `before`."""
        with self._graph.inserting_before(before):
            return [self._expression(size) if isinstance(size, torch.SymInt) else int(size) for size in sizes]

    def _expression(self, size: torch.SymInt) -> int | fx.Node:
        expression: sympy.Expr = size.node.expr
        if not expression.free_symbols:
            return int(expression)
        tracer = fx.proxy.GraphAppendingTracer(self._graph)  # one for all: the lesser of two sizes is computed of both
        env = {symbol: fx.Proxy(self._symbol(symbol), tracer) for symbol in expression.free_symbols}
        seen = set(self._graph.nodes)
        written: fx.Node = sympy_interp(PythonReferenceAnalysis, env, expression).node
        for node in self._graph.nodes:
            if node not in seen:
                node.meta["val"] = call_on_fakes(node)
        return written

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        node, dim = self._inputs[symbol]
        if dim is None:
            return node
        made = self._graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
        made.meta["val"] = node.meta["val"].shape[dim]
        return made


def symbol_source(capture: RegionGraphs, graph: fx.Graph) -> SymbolSource:
    """Return the symbols `graph` defines through inputs that no plan takes away: not through saved activations."""
    made = {v.name for v in output_args(capture.forward) if isinstance(v, fx.Node) and v.op != "placeholder"}
    symbols = {v.name for v in placeholders(graph) if not isinstance(v.meta.get("val"), torch.Tensor)}
    return SymbolSource(graph, without=made - symbols)


def _symbols(size: int | torch.SymInt) -> Iterable[sympy.Symbol]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
