"""Graphs as plain values, for reports and dumps."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._dtype_abbrs import dtype_abbrs

from tencache_fx.ops import (
    FETCH_PARAM,
    OFFLOAD,
    OFFLOAD_GRAD,
    REFRESH_PARAM,
    RUNTIME_OPS,
    SYNC_PARAM,
    arguments_of,
    label_of,
)
from tencache_fx.records import Listing, NodeRow


def list_graph(graph: fx.Graph, phase: str) -> Listing:
    """Return every node of `graph` as a row; runtime ops are marked and say which storage they move, and where to."""
    return Listing(phase=phase, nodes=tuple(_row(node) for node in graph.nodes))


def _row(node: fx.Node) -> NodeRow:
    ours = node.target in RUNTIME_OPS
    return NodeRow(
        name=node.name,
        op=node.op,
        target=str(node.target),
        inputs=tuple(argument.name for argument in node.all_input_nodes),
        type=_describe(node.meta.get("val")),
        runtime=ours,
        note=_note(node) if ours else "",
        layer=_layer(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}),
    )


def _layer(stack: Mapping[str, tuple[str, object]]) -> str:
    """Return the innermost of the modules that Dynamo notes for a node, by its path below the compiled one."""
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
    return f"{path} ({name})" if path else name


def _note(node: fx.Node) -> str:
    """Say what a runtime op moves, and where to."""
    label = label_of(node)
    if label is None:
        return ""
    where = {
        OFFLOAD: f" to {arguments_of(node).get('tier')}",
        FETCH_PARAM: " from host memory",
        OFFLOAD_GRAD: " to host memory",
        SYNC_PARAM: " stays on the device",
        REFRESH_PARAM: " refreshed",
    }
    assert isinstance(node.target, torch._ops.OpOverload)
    return label + where.get(node.target, "")


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_describe(item) for item in value)})"
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"
    return "" if value is None else str(value)
