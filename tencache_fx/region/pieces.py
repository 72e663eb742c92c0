"""A captured graph as pieces: what equal layers have in common is compiled once, and called for each of them.

Each form of piece is a region as if Dynamo had captured it by itself: `Variants`, planned together with the others of
its step. What runs between the pieces is what Python would do between blocks compiled one by one.
"""

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tencache_fx import compat
from tencache_fx.passes.graph_pieces import take_out, written_inputs
from tencache_fx.passes.graphs import output_args, placeholders, step_nodes
from tencache_fx.passes.repeated_layers import Piece, find_pieces
from tencache_fx.region.ambient_state import unchanged
from tencache_fx.region.compiled_region import Compiled
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.region.variants import Variants
from tencache_fx.tensors import storages_on

log = logging.getLogger("tencache_fx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One piece's turn: its code, and where among the values of a run its arguments and its results are.

    Values `over` are read by nobody behind it.
    """

    run: Compiled
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    over: tuple[int, ...]


class Pieces:
    """The function that torch calls for a graph in pieces."""

    def __init__(self, calls: Sequence[Call], num_values: int, outputs: Sequence[int]) -> None:
        self._calls, self._num_values, self._outputs = tuple(calls), num_values, tuple(outputs)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Run the pieces in turn; raises what they do. A value is let go of when its last reader is over."""
        values = [*args, *[None] * (self._num_values - len(args))]
        for call in self._calls:
            results = call.run(*[values[index] for index in call.arguments])
            for index in call.over:
                values[index] = None
            for index, result in zip(call.results, results, strict=True):
                values[index] = result
            del results
        return tuple([values[index] for index in self._outputs])


def compile_region_or_pieces(source: RegionSource, inputs: Sequence[Any]) -> Compiled:
    """Compile a captured graph: whole, or in pieces where equal layers are to be compiled once and it has some."""
    if source.options.repeated_layers == "once":
        found = _cut(source)
        if isinstance(found, tuple):
            return _compile_pieces(source, inputs, *found)
        log.info("region %d is compiled whole: %s.", source.index, found)
    return Variants(source, inputs)


def _cut(source: RegionSource) -> tuple[tuple[Piece, ...], tuple[fx.GraphModule, ...]] | str:
    """Return a graph's pieces, and a module for each form of them; or why it is not to be cut."""
    pieces = find_pieces(source.graph)
    if isinstance(pieces, str):
        return pieces
    of_form: dict[int, list[Piece]] = {}
    for piece in pieces:
        of_form.setdefault(piece.form, []).append(piece)
    modules = tuple(take_out(source.graph, of_form[form][0]) for form in range(len(of_form)))
    given = {node.name for node in placeholders(source.graph.graph)}
    for form, module in enumerate(modules):
        try:
            with unchanged(source.device):
                written = written_inputs(module)
        except compat.COMPILER_ERRORS as error:
            return f"a piece of it does not run on fakes ({type(error).__name__}: {error})"
        if not written:
            continue
        fakes = [node.meta["example_value"] for node in placeholders(module.graph)]
        shared = Counter(storage._cdata for storage in storages_on(source.device, fakes))
        for piece in of_form[form]:
            if made := {piece.inputs[index] for index in written} - given:
                return f"{min(made)} is made in one piece of it and written to in another one"
        if max(shared.values(), default=0) > 1:
            return f"inputs of {of_form[form][0].ops[0]} share memory, and one is written to"
    return pieces, modules


def _compile_pieces(
    source: RegionSource, inputs: Sequence[Any], pieces: Sequence[Piece], modules: Sequence[fx.GraphModule]
) -> Pieces:
    """Compile each form of piece for the first of its calls, and wire the calls."""
    given = [node.name for node in placeholders(source.graph.graph)]
    arriving = dict(zip(given, inputs, strict=True))
    counts = Counter(piece.form for piece in pieces)
    log.info(
        "region %d: %d ops in %d pieces, of which %d are different; the most frequent one has %d ops and %d calls",
        source.index,
        len(step_nodes(source.graph.graph)),
        len(pieces),
        len(modules),
        len(step_nodes(modules[counts.most_common(1)[0][0]].graph)),
        max(counts.values()),
    )
    places = {name: index for index, name in enumerate((*given, *(name for each in pieces for name in each.outputs)))}
    outputs = [places[node.name] for node in output_args(source.graph.graph) if isinstance(node, fx.Node)]
    last = {places[name]: turn for turn, piece in enumerate(pieces) for name in (*piece.outputs, *piece.inputs)}
    over = [{index for index, at in last.items() if at == turn and index not in outputs} for turn in range(len(pieces))]
    runs: dict[int, Compiled] = {}
    indices = {form: REGIONS.next_index() for form in range(len(modules))}
    for form, count in counts.most_common():  # what its calls need is made ready while the others are compiled
        read = [
            {at for at, name in enumerate(piece.inputs) if places[name] in gone and name not in arriving}
            for piece, gone in zip(pieces, over, strict=True)
            if piece.form == form
        ]
        last_read = frozenset(set.intersection(*read))
        part = replace(source, index=indices[form], graph=modules[form], calls=count, last_read=last_read)
        runs[form] = _compile_form(part, arriving)
    calls = [
        Call(
            run=runs[piece.form],
            arguments=tuple(places[name] for name in piece.inputs),
            results=tuple(places[name] for name in piece.outputs),
            over=tuple(gone),
        )
        for piece, gone in zip(pieces, over, strict=True)
    ]
    return Pieces(calls, len(places), outputs)


def _compile_form(part: RegionSource, arriving: dict[str, Any]) -> Compiled:
    """Compile one form, with a context of its own: torch keeps there what it knows of the one graph of a context."""
    values = [
        arriving[node.name] if node.name in arriving else node.meta["example_value"]
        for node in placeholders(part.graph.graph)
    ]
    context = copy.copy(part.context)
    with torch._guards.tracing(context):
        return Variants(replace(part, context=context), values)
