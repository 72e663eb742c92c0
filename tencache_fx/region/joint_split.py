"""A joint graph's forward and backward, split by torch's own partitioners as this region wants it."""

import contextlib
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils.checkpoint import CheckpointPolicy

from tencache_fx.compat import may_take_out
from tencache_fx.passes.collectives import begins_gathering, is_collective_wait
from tencache_fx.passes.early_results import compute_early
from tencache_fx.passes.fake_aliasing import makes_views
from tencache_fx.passes.graphs import placeholders
from tencache_fx.passes.op_kinds import draws_numbers, is_pointwise, is_view, written_arguments
from tencache_fx.tensors import storage_of, tensors_of

_aten = torch.ops.aten


@dataclass(kw_only=True)
class Joint:
    """A joint graph that is split several times: torch's partitioners copy its nodes, `split_joint` renews its marks.

    It is split by min-cut with `recompute="auto"`, saving all that autograd would with "none". `decided` says of nodes,
    by their names, what somebody else has decided: whether the backward computes them again. `overwritten` are nodes
    that it must not compute again, as what they read is written to. `is_simplified` says that a partitioner has been
    there, and computes once now what stood there twice.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    recompute: str
    num_outputs: int
    static_inputs: Sequence[int]
    decided: Mapping[str, CheckpointPolicy]
    overwritten: frozenset[str]
    is_simplified: bool = False

    @staticmethod
    def prepare(
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        recompute: str,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_ignored: Any,
    ) -> "Joint":
        """Return what AOTAutograd hands to a partitioner, and what that is told of it; changes the graph."""
        overwritten = _save_what_is_overwritten(graph.graph, num_fwd_outputs)
        if recompute != "auto":
            _draw_once(graph.graph, overwritten)
        return Joint(
            graph=graph,
            inputs=inputs,
            recompute=recompute,
            num_outputs=num_fwd_outputs,
            static_inputs=tuple(static_lifetime_input_indices or ()),
            decided={node.name: node.meta["recompute"] for node in graph.graph.nodes if "recompute" in node.meta},
            overwritten=overwritten,
        )


def split_joint(
    joint: Joint, *, again: Collection[str] = (), kept: Collection[str] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward.

    The nodes named in `again` are computed in the backward once more, as inside activation checkpointing, whatever the
    partitioner would think of it; those named in `kept`, and not in `again`, are not.
    """
    marks = dict(joint.decided)
    marked = {name for name in kept if name not in again and name not in marks} if joint.recompute == "auto" else set()
    marks |= dict.fromkeys(again, CheckpointPolicy.MUST_RECOMPUTE)
    marks |= dict.fromkeys(marked | joint.overwritten, CheckpointPolicy.MUST_SAVE)
    for node in joint.graph.graph.nodes:
        node.meta.pop("recompute", None)  # an earlier split has left its own
        if node.name in marks:
            node.meta["recompute"] = marks[node.name]
    split = min_cut_rematerialization_partition if joint.recompute == "auto" else default_partition
    simplifies = {"cse": functorch_config.cse and not joint.is_simplified}
    with _fixed_sizes(), functorch_config.patch(simplifies):
        halves = split(
            joint.graph,
            joint.inputs,
            num_fwd_outputs=joint.num_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )
    joint.is_simplified = joint.recompute == "auto"
    for node in (node for half in halves for node in half.graph.nodes if node.name in marked):
        node.meta.pop("recompute", None)  # a plan may compute it again all the same
    for node in (node for half in halves for node in half.graph.find_nodes(op="placeholder")):
        node.meta = dict(node.meta)  # torch hands on the joint graph's own, which the next split has, too
    compute_early(halves[0].graph, joint.num_outputs)
    return halves


def gathering_nodes(joint: fx.Graph, offloaded: Collection[int]) -> frozenset[str]:
    """Return the names of the nodes that gather these inputs; if they run again, no rank keeps parameters whole.

    As in FSDP's `reshard_after_forward=True`; a rank's part is loaded from host memory for that once more. Views of
    what is gathered are among them, and the same in another dtype: one that is saved would keep all of it.
    """
    inputs = placeholders(joint)
    reached = [inputs[index] for index in offloaded if index < len(inputs)]
    gathered: set[fx.Node] = set()
    for node in reached:
        if begins_gathering(node) or not gathered.isdisjoint(node.all_input_nodes):
            gathered.add(node)
        reached.extend(
            user
            for user in node.users
            if is_view(user) or begins_gathering(user) or is_collective_wait(user) or _follows_from_one(user)
        )
    return frozenset(node.name for node in gathered)


def reading_nodes(joint: fx.Graph, gathers: Collection[str], num_outputs: int) -> frozenset[str]:
    """Return the names of the forward's ops that read what the nodes `gathers` make.

    Whether a partitioner computes their results again may depend on sizes, and then so does what the backward gathers.
    """
    early = _computed_early(joint, num_outputs)
    return frozenset(
        node.name
        for node in early
        if node.op == "call_function"
        and node.name not in gathers
        and any(i.name in gathers for i in node.all_input_nodes)
    )


def _follows_from_one(node: fx.Node) -> bool:
    """Return whether a node is elementwise, of one tensor and nothing else, such as a cast."""
    copies = is_pointwise(node) or node.target is _aten._to_copy.default
    return copies and len(node.all_input_nodes) == 1 and not draws_numbers(node)


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


def _draw_once(joint: fx.Graph, saved: Collection[str]) -> None:
    """Have random numbers of the forward drawn in the forward only, unless they are to be recomputed.

    Torch's default partitioner leaves a copy of each such op in the backward where it has the op's arguments, and
    refuses one with several results that nobody reads: a dropout that is overwritten
    (2.14: `_functorch/partitioners.py: default_partition, is_multi_output`).
    """
    for node in joint.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or "recompute" in node.meta or node.name in saved:
            continue
        if draws_numbers(node) and node.meta.get("partitioner_tag") != "is_backward":
            node.meta["partitioner_tag"] = "must_be_in_forward"
            if not node.users and isinstance(value := node.meta["val"], (tuple, list)):
                with joint.inserting_after(node):
                    reader = joint.call_function(operator.getitem, (node, 0))
                reader.meta["val"] = value[0]


def _save_what_is_overwritten(joint: fx.Graph, num_outputs: int) -> frozenset[str]:
    """Return the names of what has to be saved: all that is computed straight from an input that is written to.

    It is written to in the forward, or behind it.
    Computed in the backward, it would be computed from the new value: gradients would be wrong without a word, or where
    AOTAutograd writes the input behind the forward, autograd would refuse it. Torch's partitioners do not see to it
    (2.14: `_functorch/partitioners.py`), nor does Inductor by itself. Where the backward itself computes something from
    the input, or Inductor would take the computation out, as one that changes nothing, a copy of the input is saved:

        mul = multiply(given, x); ... copy_(given, mul)         | ... multiply(tangent, given)
        copy = lift_fresh_copy(given); mul = multiply(copy, x)  | ... multiply(tangent, copy)
    """
    early = _computed_early(joint, num_outputs)
    found: set[str] = set()
    for given in dict.fromkeys((*_written_within(joint), *_written_behind(joint))):
        readers = tuple(_readers(given))
        for reader in readers:
            if reader.target is _aten.clone.default and not reader.kwargs:
                reader.target = _aten.lift_fresh_copy.default
        if not all(reader in early and not may_take_out(reader) for reader in readers):
            readers = (_copy(joint, given),)
        found.update(reader.name for reader in readers)
    return frozenset(found)


def _computed_early(joint: fx.Graph, num_outputs: int) -> set[fx.Node]:
    """Return the nodes that the forward's outputs, and all that is written to inputs, are computed from."""
    (output,) = joint.find_nodes(op="output")
    pending = [node for node in output.args[0][:num_outputs] if isinstance(node, fx.Node)]
    pending += joint.find_nodes(op="call_function", target=_aten.copy_.default)
    early = set()
    while pending:
        node = pending.pop()
        if node not in early:
            early.add(node)
            pending += node.all_input_nodes
    return early


def _readers(given: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that compute something from the values of `given`, by itself or by its views."""
    own = _storages(given)
    for user in given.users:
        if user.op != "call_function" or user.target is _aten.copy_.default or is_sym_node(user):
            continue
        made = _storages(user)
        if makes_views(user) or (made and made <= own):  # Inductor may leave fakes that are views of what is gone
            yield from _readers(user)
        else:
            yield user


def _storages(node: fx.Node) -> set[int]:
    return {storage._cdata for tensor in tensors_of(node) if (storage := storage_of(tensor)) is not None}


def _copy(joint: fx.Graph, given: fx.Node) -> fx.Node:
    """Return a copy of an input for all that read it; Inductor does not take this one out."""
    readers = [user for user in given.users if user.op == "call_function" and user.target is not _aten.copy_.default]
    with joint.inserting_before(next(node for node in joint.nodes if node in readers)):
        copy = joint.call_function(_aten.lift_fresh_copy.default, (given,))
    with given.meta["val"].fake_mode:
        copy.meta["val"] = given.meta["val"].clone()
    for reader in readers:
        reader.replace_input_with(given, copy)
    return copy


def _written_within(joint: fx.Graph) -> Iterator[fx.Node]:
    """Yield the inputs that the joint graph itself writes to."""
    copies = joint.find_nodes(op="call_function", target=_aten.copy_.default)
    return (node for copy in copies for node in written_arguments(copy) if node.op == "placeholder")


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
