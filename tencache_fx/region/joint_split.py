"""A joint graph's forward and backward, split by torch's own partitioners as this region wants it."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from tencache_fx.passes.graphs import placeholders
from tencache_fx.tensors import storage_of


def split_joint(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    recompute: str,
    again: Collection[str] = (),
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    **_ignored: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward: by min-cut with `recompute="auto"`, saving all that autograd would with "none".

    The nodes named in `again` are computed in the backward once more, as inside activation checkpointing, whatever the
    partitioner would think of it.
    """
    _save_what_is_overwritten(joint.graph)
    for node in joint.graph.nodes:
        if node.name in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    split = min_cut_rematerialization_partition if recompute == "auto" else default_partition
    with _fixed_sizes():
        return split(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )


@contextlib.contextmanager
def _fixed_sizes() -> Iterator[None]:
    """Let what a partitioner adds have plain sizes: else a saved state of random numbers gets a symbol of its own,
    which no input of the region shows (torch: `_functorch/partitioners.py: functionalize_rng_ops`).
    """
    fake_mode = torch._guards.detect_fake_mode()
    if fake_mode is None:
        yield
        return
    before, fake_mode.static_shapes = fake_mode.static_shapes, True
    try:
        yield
    finally:
        fake_mode.static_shapes = before


def _save_what_is_overwritten(joint: fx.Graph) -> None:
    """Have everything saved that is computed straight from an input that is written to: in the forward, or behind it.

    Computed once more it would be computed from the new value, and gradients would be wrong without a word, or where
    AOTAutograd writes the input behind the forward, autograd would refuse it. Torch's min-cut does not see to it (2.14:
    `_functorch/partitioners.py`), nor does Inductor by itself.
    """
    pending = [node.args[0] for node in joint.nodes if node.target is torch.ops.aten.copy_.default]
    written = [node for node in pending if isinstance(node, fx.Node) and node.op == "placeholder"]
    written += _written_behind(joint)
    while written:
        node = written.pop()
        storage = node.meta["val"].untyped_storage()._cdata
        for user in node.users:
            value = user.meta.get("val")
            made = storage_of(value) if isinstance(value, torch.Tensor) else None
            is_view = made is not None and made._cdata == storage
            if is_view and user.target is not torch.ops.aten.copy_.default:
                written.append(user)
            elif user.op == "call_function":
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _written_behind(joint: fx.Graph) -> Iterator[fx.Node]:
    """Yield the inputs that AOTAutograd writes to once the forward is over, because autograd is to see that.

    The forward returns what they become (torch: `_functorch/_aot_autograd/runtime_wrappers.py`,
    `schemas.py: MutationType.MUTATED_OUT_GRAPH`), and says so in its descriptions.
    """
    (output,) = joint.find_nodes(op="output")
    returned = [_whole(description) for description in output.meta["desc"]]
    become = {each.mutated_input for each in returned if isinstance(each, InputMutationAOTOutput)}
    return (node for node in placeholders(joint) if _whole(node.meta.get("desc")) in become)


def _whole(description: AOTInput | AOTOutput | None) -> AOTInput | AOTOutput | None:
    """Return of a part of a tensor subclass the whole."""
    while isinstance(description, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        description = description.base
    return description
