"""What ops hold within them that run graphs of their own, such as `torch.cond` and `map`: no storage shows it.

A body has its inputs from the region, and what it returns leaves as the op's results. What it makes in between is there
as long as it runs: a plan counts it as scratch of the op.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import fx

from tencache_fx.passes.buffer_reuse import hold_fused_operands, reuse_in_place
from tencache_fx.passes.graphs import RegionGraphs, bodies_of, output_args
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.lifetimes import StorageNodes, measure_lifetimes
from tencache_fx.passes.op_kinds import nbytes_of, storages_of
from tencache_fx.planning.problem import Kind
from tencache_fx.tensors import allocated_bytes, byte_hint, tensors_of

_LOOPS = ("map_impl", "scan", "while_loop", "while_loop_stack_output")
_STACKING = ("map_impl", "while_loop_stack_output")
_INDEX_BYTES = 8


def held_inside(node: fx.Node, device: torch.device, scratch_of: Callable[[fx.Node], int], *, fuses: bool) -> int:
    """Return the most bytes that an op's bodies hold while it runs, beyond the op's inputs and results.

    `scratch_of` says what a kernel allocates for itself. `fuses` says that a compiler generates the bodies' code: what
    that keeps in registers takes no bytes. What the code then holds is read from it (`passes/code_memory.py`).
    """
    bodies = bodies_of(node)
    if not bodies:
        return 0
    assert isinstance(node.target, torch._ops.HigherOrderOperator)
    most_bytes = max(_most_held(body, device, scratch_of, fuses=fuses) for body in bodies)
    name, made_bytes = node.target.name(), _made_bytes(node, device)
    if name not in _LOOPS:
        return max(0, most_bytes - made_bytes)
    # The results of all turns, or of the last one, are the op's; those of the turn at hand are there beside them.
    if fuses:
        return most_bytes
    if name in _STACKING:  # what the turns returned, beside what it is put together to
        return max(most_bytes - sum(map(nbytes_of, _returned(bodies[0]))), made_bytes)
    return most_bytes + (_kept_by_scan(node, bodies[0]) if name == "scan" else 0)


def _most_held(body: fx.Graph, device: torch.device, scratch_of: Callable[[fx.Node], int], *, fuses: bool) -> int:
    """Return the most bytes that a body holds of what it makes, its results included."""
    capture = RegionGraphs(
        forward=body, backward=None, num_outputs=len(output_args(body)), static_inputs=frozenset(), device=device
    )
    model = InductorModel.of(capture) if fuses else None
    changes = [0] * (len(capture.nodes) + 1)
    storages: Sequence[StorageNodes] = measure_lifetimes(capture, model)
    if model is not None:
        storages, _ = reuse_in_place(capture, model, storages)
        storages = hold_fused_operands(model, storages)
    for storage in (item.storage for item in storages):
        if storage.kind not in (Kind.INPUT, Kind.PARAMETER):
            changes[storage.birth] += storage.nbytes
            changes[storage.death] -= storage.nbytes
    return max(
        (
            held_bytes + scratch_of(node) + held_inside(node, device, scratch_of, fuses=fuses)
            for node, held_bytes in zip(capture.nodes, accumulate(changes[:-1]), strict=True)
        ),
        default=0,
    )


def _made_bytes(node: fx.Node, device: torch.device) -> int:
    """Return the bytes of the storages that an op makes."""
    given = {key for each in node.all_input_nodes for key in storages_of(each)}
    made = {
        tensor.untyped_storage()._cdata: allocated_bytes(byte_hint(tensor.untyped_storage().nbytes()), device)
        for tensor in tensors_of(node)
        if tensor.device == device and tensor.layout is torch.strided
    }
    return sum(nbytes for key, nbytes in made.items() if key not in given)


def _kept_by_scan(node: fx.Node, body: fx.Graph) -> int:
    """Return what torch's own loop of a `scan` keeps: the first turn's inputs and results, and two indices for these.

    Source: `_higher_order_ops/scan.py: generic_scan`.
    """
    _, carried, stacked, *_ = node.args
    assert isinstance(carried, (list, tuple))
    assert isinstance(stacked, (list, tuple))
    turns = [byte_hint(tensor.shape[0]) for each in stacked if isinstance(each, fx.Node) for tensor in tensors_of(each)]
    sliced_bytes = sum(nbytes_of(each) // max(1, *turns) for each in stacked if isinstance(each, fx.Node))
    returned = _returned(body)[len(carried) :]
    elements = sum(byte_hint(tensor.numel()) for each in returned for tensor in tensors_of(each))
    return sliced_bytes + sum(map(nbytes_of, returned)) + 2 * _INDEX_BYTES * elements


def _returned(body: fx.Graph) -> list[fx.Node]:
    return [each for each in output_args(body) if isinstance(each, fx.Node)]
