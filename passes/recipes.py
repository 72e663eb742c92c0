"""Recipes: what the backward would have to run again to do without a saved value.

From the saved value its producers are followed back to what is there anyway: parameters, inputs, other saved values,
and weights that the backward gathers anew. An op with several results is not there because one of them is. Randomness,
writes, communication and ops of unknown origin are never repeated, nor what somebody has decided about: the user's own
activation checkpointing, or torch itself, which has saved what is computed from an input that the forward writes to
(torch: `torch/utils/checkpoint.py: CheckpointPolicy`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from tencache_fx.passes.graphs import RegionGraphs, output_args
from tencache_fx.passes.lifetimes import StorageNodes
from tencache_fx.passes.op_kinds import draws_numbers
from tencache_fx.planning.collectives import in_between
from tencache_fx.planning.problem import Kind, Problem, Recipe, Step


def with_recipes(
    problem: Problem, capture: RegionGraphs, storages: Sequence[StorageNodes], gathers_earlier: Collection[str]
) -> Problem:
    """Return the problem of these graphs with recipes for what the backward could make again.

    `gathers_earlier` are nodes that the backward may run before it has to: recipes may read what they gather.
    """
    gathered = _gathered_again(capture, storages, frozenset(gathers_earlier))
    held = in_between(problem)
    recipes = (each for each in find_recipes(capture, storages, gathered) if each.name not in held)
    marked = (replace(s, gathered_at=gathered[s.name]) if s.name in gathered else s for s in problem.storages)
    return replace(problem, recipes=tuple(recipes), storages=tuple(marked))


def find_recipes(
    capture: RegionGraphs, storages: Sequence[StorageNodes], gathered: Mapping[str, Step] = MappingProxyType({})
) -> tuple[Recipe, ...]:
    """Return a recipe for every saved activation that the backward reads and could make again.

    The backward gathers the storages `gathered` anew. O(saved values x nodes of their recipe).
    """
    if capture.backward is None:
        return ()
    returned = output_args(capture.forward)
    step_of = {node: Step(step) for step, node in enumerate(capture.nodes[: capture.boundary])}
    stops: dict[fx.Node, int] = {}  # what need not be made again, with the storage it belongs to
    for index, item in enumerate(storages):
        given = item.storage.kind in (Kind.PARAMETER, Kind.INPUT, Kind.FETCHED)
        if item.saved or given or item.storage.name in gathered:
            stops |= {member: index for member in item.members if isinstance(member.meta["val"], torch.Tensor)}
    recipes = []
    for index, item in enumerate(storages):
        if not _is_asked_for(item, capture):
            continue
        ends = [value for position in item.saved if isinstance(value := returned[position], fx.Node)]
        steps = _walk_back(ends, index, stops, step_of)
        if steps and item.storage.birth in steps:
            recipes.append(Recipe(name=item.storage.name, steps=tuple(sorted(steps))))
    return tuple(recipes)


def recomputed_nodes(capture: RegionGraphs, recipes: Sequence[Recipe], names: Sequence[str]) -> frozenset[str]:
    """Return the names of the forward's nodes that have to run again for the storages `names`."""
    chosen = set(names)
    return frozenset(capture.nodes[step].name for recipe in recipes if recipe.name in chosen for step in recipe.steps)


def _gathered_again(
    capture: RegionGraphs, storages: Sequence[StorageNodes], earlier: Collection[str]
) -> Mapping[str, Step]:
    """Return what nodes `earlier` make in the forward and in the backward anew, by storage, with the late step."""
    nodes = capture.nodes
    late = {nodes[k].name: Step(k) for k in range(capture.boundary, len(nodes)) if nodes[k].name in earlier}
    made = (item for item in storages if item.storage.kind is Kind.ACTIVATION and item.storage.birth < capture.boundary)
    found = ((item, late.get(nodes[item.storage.birth].name)) for item in made if not item.saved)
    return {item.storage.name: step for item, step in found if step is not None}


def _is_asked_for(item: StorageNodes, capture: RegionGraphs) -> bool:
    storage = item.storage
    read_late = any(use >= capture.boundary for use in storage.uses)
    return bool(item.saved) and read_late and storage.kind is Kind.ACTIVATION and storage.spillable


def _walk_back(
    ends: Sequence[fx.Node], own: int, stops: Mapping[fx.Node, int], step_of: Mapping[fx.Node, Step]
) -> set[Step]:
    """Return the steps of all that `ends` are computed from; nothing if one of them must not run twice."""
    steps: set[Step] = set()
    pending, seen = list(ends), set(ends)
    while pending:
        node = pending.pop()
        if stops.get(node, own) != own or node.op != "call_function":
            continue
        if not _is_repeatable(node):
            return set()
        steps.add(step_of[node])
        fresh = [argument for argument in node.all_input_nodes if argument not in seen]
        seen.update(fresh)
        pending += fresh
    return steps


def _is_repeatable(node: fx.Node) -> bool:
    """Return whether running a node twice gives the same value twice and does nothing else."""
    if node.meta.get("recompute") is not None or node.meta.get("unbacked_bindings"):  # nor makes a size anew
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return callable(node.target) and getattr(node.target, "__module__", "") == "_operator"
    if node.target.namespace not in ("aten", "prims") or node.target._schema.is_mutable:
        return False
    return not draws_numbers(node)
