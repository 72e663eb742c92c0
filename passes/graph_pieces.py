"""Takes a piece of a Dynamo graph out, as a graph of its own, and finds which of its inputs it writes to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tencache_fx.passes.graphs import placeholders
from tencache_fx.passes.repeated_layers import Piece


def take_out(gm: fx.GraphModule, piece: Piece) -> fx.GraphModule:
    """Return a piece as a module that looks as if Dynamo had captured it behind a graph break; `gm` stays as it is.

    What another piece makes is an input like any other, with a fake of its own that no backward reaches beyond.
    Source of the attributes that it needs: torch, `_functorch/_aot_autograd/frontend_utils.py`, Note [Assumption on
    Dynamo Metadata].
    """
    by_name = {node.name: node for node in gm.graph.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (by_name[name] for name in piece.inputs):
        copies[node] = made = graph.placeholder(node.name)
        if node.op == "placeholder":
            made.meta = dict(node.meta)
        else:
            made.meta = {"example_value": _arriving(node.meta["example_value"])}
        made._dynamo_source = getattr(node, "_dynamo_source", None)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a graph that an op calls
            assert node.op == "get_attr", node
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in (by_name[name] for name in piece.ops):
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[by_name[name]] for name in piece.outputs))
    taken = fx.GraphModule(gm, graph)
    taken.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        taken._param_name_to_source = gm._param_name_to_source
    return taken


def _arriving(value: Any) -> Any:
    """Return the fake of an input that stands for a value made before: the same storage, size for size."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def written_inputs(piece: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of the inputs that a piece writes to; it is run on fakes for that."""
    values = [node.meta["example_value"] for node in placeholders(piece.graph)]
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if not modes:
        return ()
    with modes[0], torch.inference_mode(False), torch.no_grad():
        fresh = [_unshared(value) for value in values]
        before = _versions(fresh)
        piece(*fresh)
    return tuple(index for index, (old, new) in enumerate(zip(before, _versions(fresh), strict=True)) if old != new)


def _unshared(value: Any) -> Any:
    """Return a fake like another one, in memory of its own: one that is written to has no aliases here."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _versions(values: Sequence[Any]) -> list[int]:
    return [value._version if isinstance(value, torch.Tensor) else 0 for value in values]
