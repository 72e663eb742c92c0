"""Copies of what torch hands over: the compilers below take ownership of what they are given, and change it."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


def _tensor_dicts(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._buffers


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a module that Dynamo made, with its own tensors, and with two attributes that copies lack.

    By them AOTAutograd knows the parameters among the inputs (torch: `_aot_autograd/frontend_utils.py`). An
    optimizer's step writes to tensors of the module itself, not to inputs: copies would be updated in their stead.
    """
    held = (each for module in gm.modules() for among in _tensor_dicts(module) for each in among.values())
    copied = copy.deepcopy(gm, {id(each): each for each in held if isinstance(each, torch.Tensor)})
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    for node, twin in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied


def keep_numbers(fakes: Sequence[Any], context: torch._guards.TracingContext | None) -> list[Any]:
    """Return fakes; those of a Python float that Dynamo has made a tensor of know which number it is.

    AOTAutograd copies fakes into its own mode (torch: `_aot_autograd/frontend_utils.py`), and copies do not know it:
    here such a one is copied with it.
    """
    mode = None if context is None else context.fake_mode
    found = list(fakes)
    for index, fake in enumerate(fakes):
        if mode is None or not isinstance(fake, FakeTensor) or fake.fake_mode is mode:
            continue
        if fake.item_memo is not None:
            found[index] = mode.from_tensor(fake)
            found[index].item_memo = fake.item_memo
    return found


def copy_joint(joint: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a joint graph, which partitioners change, with the same fakes and the same constants."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(joint.graph, {}), type_expr=None)
    (old,), (new,) = joint.graph.find_nodes(op="output"), copied.find_nodes(op="output")
    new.meta = dict(old.meta)
    return fx.GraphModule(joint, copied)
