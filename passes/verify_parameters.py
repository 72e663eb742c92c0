"""Independent checks of what rewritten graphs do with offloaded parameters."""

from collections.abc import Iterable

import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import FETCH_PARAM, OFFLOAD_GRAD, REFRESH_PARAM, SYNC_PARAM, WAIT, arguments_of, source_of
from tencache_fx.passes.verify_collectives import late_reads
from tencache_fx.passes.verify_owners import owners_of
from tencache_fx.planning.problem import Problem
from tencache_fx.tensors import storage_of


def check_parameters(problem: Problem, graphs: tuple[fx.Graph, ...]) -> None:
    """Raise `InvariantError` if a graph reads what is not on the device, or what an update may be changing."""
    _check_readers(graphs)
    _check_updates(problem, graphs)
    _check_refreshes(graphs)


def _check_readers(graphs: tuple[fx.Graph, ...]) -> None:
    """Of a parameter that is fetched, the graph reads nothing else: there is nothing on the device."""
    away = away_names(graphs)
    for graph in graphs:
        for node in graph.find_nodes(op="placeholder"):
            for user in node.users if node.name in away else ():
                if user.target is not FETCH_PARAM and user.op != "output":
                    raise InvariantError(f"parameters: {user.name} reads {node.name}, which is not on the device.")


def _check_updates(problem: Problem, graphs: tuple[fx.Graph, ...]) -> None:
    """Behind a gradient that lets its parameter's update begin, the parameter is not asked for, nor waited for."""
    parameter_of = {storage.name: storage.parameter for storage in problem.storages}
    for graph in graphs:
        updating: set[str] = set()
        fetched: dict[fx.Node, str] = {}
        for node in graph.nodes:
            asked = ""
            if node.target is OFFLOAD_GRAD and (parameter := arguments_of(node)["param"]):
                if parameter != (own := parameter_of.get(arguments_of(node)["label"])):
                    raise InvariantError(f"updates: {node.name} is a gradient of {own}, not of it.")
                updating.add(parameter)
            elif node.target is FETCH_PARAM:
                asked = fetched[node] = parameter_of.get(arguments_of(node)["label"], "")
            elif node.target is WAIT:
                asked = fetched.get(source_of(node), "")
            elif node.target is SYNC_PARAM:
                asked = arguments_of(node)["label"]
            if asked in updating:
                raise InvariantError(f"updates: {node.name} asks for {asked} behind the beginning of its update.")


def _check_refreshes(graphs: tuple[fx.Graph, ...]) -> None:
    """Behind its refresh, which stands behind the gradient that begins its update, nothing reads a parameter."""
    for graph in graphs:
        late = late_reads(graph, owners_of(graph, {}, frozenset()))
        refreshed: set[int] = set()
        begun: set[object] = set()
        for node in graph.nodes:
            if node.op == "output":
                break
            if node.target is OFFLOAD_GRAD:
                begun.add(arguments_of(node)["param"])
            for argument in (*node.all_input_nodes, *late.get(node, ())):
                if refreshed & _storages(argument):
                    raise InvariantError(f"refreshes: {node.name} reads {argument.name}, which is refreshed before it.")
            if node.target is REFRESH_PARAM:
                if arguments_of(node)["label"] not in begun:
                    raise InvariantError(f"refreshes: {node.name} stands before the beginning of an update.")
                refreshed |= _storages(node.all_input_nodes[0])


def _storages(node: fx.Node) -> set[int]:
    value = node.meta.get("val")
    storage = storage_of(value) if isinstance(value, torch.Tensor) else None
    return set() if storage is None else {storage._cdata}


def away_names(graphs: tuple[fx.Graph, ...]) -> frozenset[str]:
    """Return the names of the inputs that are fetched, in whichever graph."""
    fetches = [node for graph in graphs for node in graph.nodes if node.target is FETCH_PARAM]
    return frozenset(node.all_input_nodes[0].name for node in fetches)


def unread_names(graphs: tuple[fx.Graph, ...], offloaded: Iterable[int]) -> frozenset[str]:
    """Return the names of the offloaded parameters that no graph reads: what a layer returns may be dropped."""
    inputs = graphs[0].find_nodes(op="placeholder")
    read = {value.name for graph in graphs for node in graph.nodes for value in node.all_input_nodes}
    return frozenset(inputs[index].name for index in offloaded) - read
