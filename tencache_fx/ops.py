"""The graph ops, their schemas and their fake implementations (design: graph contract).

    handle = offload(src)            issue the copy out behind everything queued so far
    token  = release(handle, src)    compute waits for that copy; the bytes of `src` are free (`donated`: its caller's)
    ticket = prefetch(handle)        allocate on the device, issue the copy in; the handle may die
    tensor = wait(ticket, ...)       compute waits for the copy in; exact sizes and strides of `src`

and for an offloaded parameter, of which the graph takes no more than the name:

    ticket = fetch_param(param)             allocate on the device, issue the copy in of the host copy
    token  = sync_param(param)              one that stays on the device: compute waits for its last update
    token  = refresh_param(param)           the same: no later op reads it, so its next update may overwrite it
    handle = offload_grad(gradient, param)  as `offload`; `release` follows, and then
    gradient = take_grad(handle, ...)       the gradient, in host memory

`offload_grad` has the parameter's name where its update may begin at once: no later op asks for the parameter.

`load_param` and `store_grad` stand for a fetch and its wait, and for an offload and its release, until both have been
planned, and `pause` for the time between the forward and the backward. `in_order` has Inductor lay out a value with
strides in that order; there is no kernel.

`release`, `sync_param` and `refresh_param` are declared to write what they take, so no reader of it changes sides.
That also keeps Inductor from inlining into a later kernel something that reads a released `src`: what the plan counts
as free is free.

Handles, tokens and tickets are one-element int64 CPU tensors: they pass through AOTAutograd as saved tensors, give
Inductor data edges, and their death tells the runtime that a transfer was abandoned. `engine` is the registry index of
the runtime that serves the op; it is a literal in the graph, so nothing is looked up by context at run time.

Defined through `torch.library.Library`, not `custom_op`, whose dispatch costs 30 us a call instead of 5.
The kernels are registered by `tencache_fx.runtime.op_kernels` and `tencache_fx.model_state.parameter_ops`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

LIBRARY = torch.library.Library("tencache", "DEF")
# What leaves must lie in memory as the graph says, since that is how it is asked back; Inductor would choose freely.
_AS_PLANNED = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define("offload(Tensor src, int engine, str tier, str label) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define("release(Tensor handle, Tensor(a!) src, int engine, bool donated=False) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define("prefetch(Tensor handle, int engine) -> Tensor")
LIBRARY.define(
    "wait(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, int engine) -> Tensor"
)

LIBRARY.define("fetch_param(Tensor param, int engine, str label) -> Tensor")
LIBRARY.define("sync_param(Tensor(a!) param, int engine, str label) -> Tensor")
LIBRARY.define("refresh_param(Tensor(a!) param, int engine, str label) -> Tensor")
LIBRARY.define('offload_grad(Tensor src, int engine, str label, str param, str shard="") -> Tensor', tags=_AS_PLANNED)
LIBRARY.define(
    "take_grad(Tensor handle, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, int engine) -> Tensor"
)
LIBRARY.define("in_order(Tensor src, int[] order) -> Tensor")
LIBRARY.define("load_param(Tensor param) -> Tensor")
LIBRARY.define("store_grad(Tensor src) -> Tensor")
LIBRARY.define("pause() -> ()")

OFFLOAD = torch.ops.tencache.offload.default
RELEASE = torch.ops.tencache.release.default
PREFETCH = torch.ops.tencache.prefetch.default
WAIT = torch.ops.tencache.wait.default
FETCH_PARAM = torch.ops.tencache.fetch_param.default
SYNC_PARAM = torch.ops.tencache.sync_param.default
REFRESH_PARAM = torch.ops.tencache.refresh_param.default
OFFLOAD_GRAD = torch.ops.tencache.offload_grad.default
TAKE_GRAD = torch.ops.tencache.take_grad.default
RUNTIME_OPS = (OFFLOAD, RELEASE, PREFETCH, WAIT, FETCH_PARAM, SYNC_PARAM, REFRESH_PARAM, OFFLOAD_GRAD, TAKE_GRAD)
IN_ORDER = torch.ops.tencache.in_order.default
LOAD_PARAM = torch.ops.tencache.load_param.default
STORE_GRAD = torch.ops.tencache.store_grad.default
PAUSE = torch.ops.tencache.pause.default
UNPLANNED = (LOAD_PARAM, STORE_GRAD, PAUSE)


def key_tensor() -> Tensor:
    """Return an empty handle; under a fake mode, the fake of every handle, token and ticket."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments that a call of one of torch's ops gives, by the names of its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return by_name(node.target, node.args, node.kwargs)


def by_name(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names that the schema of `op` has for them."""
    return {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}


def source_of(node: fx.Node) -> Any:
    """Return the handle or the ticket with which a runtime op goes on what an earlier one began; None if it begins."""
    given = arguments_of(node)
    return given.get("handle", given.get("ticket"))


def label_of(node: fx.Node) -> str | None:
    """Return the storage that a runtime op was written for, if the op itself says so."""
    return arguments_of(node).get("label")


def _key(*_: object) -> Tensor:
    return key_tensor()


def _tensor(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _same(param: Tensor, order: Sequence[int] = ()) -> Tensor:
    return torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)


for _op in (OFFLOAD, RELEASE, PREFETCH, FETCH_PARAM, SYNC_PARAM, REFRESH_PARAM, OFFLOAD_GRAD, STORE_GRAD):
    torch.library.register_fake(_op, _key, lib=LIBRARY)
for _op in (WAIT, TAKE_GRAD):
    torch.library.register_fake(_op, _tensor, lib=LIBRARY)
for _op in (IN_ORDER, LOAD_PARAM):
    torch.library.register_fake(_op, _same, lib=LIBRARY)

# Neither FX nor Inductor may drop or merge them: what they do to memory is their purpose.
for _op in (*RUNTIME_OPS, *UNPLANNED):
    fx.node.has_side_effect(_op)
