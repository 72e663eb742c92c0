"""What generated code does not tell by itself, noted of a graph before the compiler takes it over."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tencache_fx.passes.graphs import output_args, placeholders, with_bodies
from tencache_fx.passes.parameter_markers import is_away
from tencache_fx.passes.symbols import evaluate
from tencache_fx.tensors import allocated_bytes, byte_hint, storage_of, tensors_of, upper_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor's shape and its storage: which one, by an identity that holds inside one graph, and its bytes.

    `fresh` is false for what an operation returns of the storages that it was given.
    """

    key: int
    nbytes: int
    shape: tuple[int, ...]
    fresh: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What code alone does not tell of one graph, noted before the compiler takes the graph over.

    `takes` are the inputs on the region's device by name, `returns` the outputs' names, and `made` what each operation
    returns, by its name ("sort"), once for each node that calls it; None for what is not on the device. `scratch` are
    the bytes that an operation allocates for itself while it runs, the most there is of its name.
    `item_bytes` are those of the graph's tensors by their shape, the most if there are several.
    """

    takes: Mapping[str, Part]
    inputs: tuple[str, ...]
    returns: tuple[str | None, ...]
    made: Mapping[str, Sequence[tuple[Part | None, ...]]]
    scratch: Mapping[str, int]
    item_bytes: Mapping[tuple[int, ...], int]
    sizes: Mapping[str, int]
    device: torch.device


def read_interface(
    graph: fx.Graph, device: torch.device, sizes: Mapping[str, int], node_scratch: Mapping[str, int]
) -> Interface:
    """Return what `graph` takes, returns and calls; symbols have the values in `sizes`, else those seen in tracing.

    Symbols that only a run gives a value to have the most that they can be.
    `node_scratch` are the bytes that kernels allocate for themselves, by the names of nodes; others are taken for none.
    """
    inputs = placeholders(graph)
    sizes = {**_bounds(graph), **_hints(inputs), **sizes}

    def part(value: object, given: Collection[int] = ()) -> Part | None:
        if not isinstance(value, torch.Tensor) or value.device.type != device.type:
            return None
        if (storage := storage_of(value)) is None:
            return None
        key, nbytes = storage._cdata, _number(storage.nbytes(), sizes)
        shape = tuple(_number(size, sizes) for size in value.shape)
        return Part(key=key, nbytes=allocated_bytes(nbytes, device), shape=shape, fresh=key not in given)

    made: dict[str, list[tuple[Part | None, ...]]] = {}
    item_bytes: dict[tuple[int, ...], int] = {}
    scratch: dict[str, int] = {}
    for node in (node for each in with_bodies(graph) for node in each.nodes):
        for tensor in tensors_of(node):
            shape = tuple(_number(size, sizes) for size in tensor.shape)
            item_bytes[shape] = max(item_bytes.get(shape, 0), tensor.element_size())
        if node.op == "call_function" and "val" in node.meta:
            value = node.meta["val"]
            values = value if isinstance(value, (tuple, list)) else (value,)
            taken = (storage_of(tensor) for each in node.all_input_nodes for tensor in tensors_of(each))
            given = {storage._cdata for storage in taken if storage is not None}
            operation = operation_name(str(node.target))
            made.setdefault(operation, []).append(tuple(part(each, given) for each in values))
            scratch[operation] = max(scratch.get(operation, 0), node_scratch.get(node.name, 0))
    parts = {node.name: None if is_away(node) else part(node.meta.get("val")) for node in inputs}
    return Interface(
        takes={name: found for name, found in parts.items() if found is not None},
        inputs=tuple(node.name for node in inputs),
        returns=tuple(value.name if isinstance(value, fx.Node) else None for value in output_args(graph)),
        made=made,
        scratch=scratch,
        item_bytes=item_bytes,
        sizes=sizes,
        device=device,
    )


def operation_name(function: str) -> str:
    """Return the bare name of an operation: code says "torch.ops.aten.sort.stable" or "extern_kernels.mm"."""
    parts = function.removeprefix("torch.ops.").split(".")
    return parts[0] if len(parts) == 1 else parts[1]


def _number(size: "int | torch.SymInt", sizes: Mapping[str, int]) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    if (formula := str(expression)) in sizes:  # of a storage behind a view
        return sizes[formula]
    known = {symbol: sizes[str(symbol)] for symbol in expression.free_symbols if str(symbol) in sizes}
    return evaluate(expression, known) if len(known) == len(expression.free_symbols) else byte_hint(size)


def _bounds(graph: fx.Graph) -> dict[str, int]:
    """Return the most that symbols of lengths can be that only a run knows, as far as there is a bound."""
    tensors = (tensor for each in with_bodies(graph) for node in each.nodes for tensor in tensors_of(node))
    lengths: Iterable[object] = itertools.chain.from_iterable(tensor.shape for tensor in tensors)
    symbols = {str(n.node.expr): n for n in lengths if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol}
    bounds = {name: upper_bound(size) for name, size in symbols.items() if free_unbacked_symbols(size)}
    return {name: most for name, most in bounds.items() if most is not None}


def _hints(inputs: Iterable[fx.Node]) -> dict[str, int]:
    """Return the value that each symbol had in tracing."""
    values = [node.meta.get("val") for node in inputs]
    numbers = [*values, *(size for value in values if isinstance(value, torch.Tensor) for size in value.shape)]
    symbolic = (n for n in numbers if isinstance(n, torch.SymInt) and not isinstance(n.node.hint, torch.SymInt))
    return {str(n.node.expr): byte_hint(n) for n in symbolic}  # the length of a nested tensor's rows is no number
