"""The graph ops, their schemas and their fake implementations (design: graph contract).

    handle = offload(src)            issue the copy out behind everything queued so far
    token  = release(handle, src)    compute waits for that copy; `src` is over (`lent`: it is the caller's alone again)
    ticket = prefetch(handle)        allocate on the device, issue the copy in; the handle may die
    tensor = wait(ticket, ...)       compute waits for the copy in; exact sizes and strides of `src`

and for a parameter whose home is in host memory, of which the graph takes no more than the name:

    ticket = fetch(home)             allocate on the device, issue the copy in of what is at home
    token  = settle(home)            for one that stays on the device: compute waits for its last update
    token  = renew(home)             for the same: nothing behind reads it, so its next update may be written over it
    handle = sink(gradient, home)    as `offload`; what is released is handed out by
    tensor = homed(handle, ...)      the gradient, in host memory

A sink's `home` is the parameter's name where its update may begin at once: nothing behind asks for the parameter.
`release`, `settle` and `renew` are declared to write what they take, so no reader of it changes sides.

`arrive` and `depart` stand for a fetch and its wait, and for a sink and its release, until both have been planned,
and `pause` for what others do between the forward and the backward.

`release` is declared to write `src`: that keeps Inductor from inlining into a later kernel something that reads it,
so what the plan counts as free is free.

Handles, tokens and tickets are one-element int64 CPU tensors: they travel through AOTAutograd as saved tensors, give
Inductor data edges, and their death tells the runtime that a trip was abandoned. `engine` is the registry index of the
runtime that serves the op; it is a literal in the graph, so nothing is looked up by context at run time.

Defined through `torch.library.Library`, not `custom_op`, whose dispatch costs 30 us a call instead of 5.
The kernels are registered by `tencache_fx.runtime.op_kernels` and `tencache_fx.model_state.parameter_ops`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

LIBRARY = torch.library.Library("tencache", "DEF")
# What leaves must lie in memory as the graph says, since that is how it is asked back; Inductor would choose freely.
_AS_PLANNED = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define("offload(Tensor src, int engine, str tier, str label) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define("release(Tensor handle, Tensor(a!) src, int engine, bool lent=False) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define("prefetch(Tensor handle, int engine) -> Tensor")
LIBRARY.define(
    "wait(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, int engine) -> Tensor"
)

LIBRARY.define("fetch(Tensor home, int engine, str label) -> Tensor")
LIBRARY.define("settle(Tensor(a!) home, int engine, str label) -> Tensor")
LIBRARY.define("renew(Tensor(a!) home, int engine, str label) -> Tensor")
LIBRARY.define("sink(Tensor src, int engine, str label, str home, bool shard=False) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define(
    "homed(Tensor handle, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, int engine) -> Tensor"
)
LIBRARY.define("arrive(Tensor home) -> Tensor")
LIBRARY.define("depart(Tensor src) -> Tensor")
LIBRARY.define("pause() -> ()")

OFFLOAD = torch.ops.tencache.offload.default
RELEASE = torch.ops.tencache.release.default
PREFETCH = torch.ops.tencache.prefetch.default
WAIT = torch.ops.tencache.wait.default
FETCH = torch.ops.tencache.fetch.default
SETTLE = torch.ops.tencache.settle.default
RENEW = torch.ops.tencache.renew.default
SINK = torch.ops.tencache.sink.default
HOMED = torch.ops.tencache.homed.default
RUNTIME_OPS = (OFFLOAD, RELEASE, PREFETCH, WAIT, FETCH, SETTLE, RENEW, SINK, HOMED)
ARRIVE = torch.ops.tencache.arrive.default
DEPART = torch.ops.tencache.depart.default
PAUSE = torch.ops.tencache.pause.default
UNPLANNED = (ARRIVE, DEPART, PAUSE)


def key_tensor() -> Tensor:
    """Return an empty handle; under a fake mode, the fake of every handle, token and ticket."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def label_of(node: fx.Node) -> str | None:
    """Return the storage that a runtime op was written for, if the op itself says so."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return str(node.args[names.index("label")]) if "label" in names else None


def _key(*_: object) -> Tensor:
    return key_tensor()


def _tensor(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _same(home: Tensor) -> Tensor:
    return torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=home.device)


for _op in (OFFLOAD, RELEASE, PREFETCH, FETCH, SETTLE, RENEW, SINK, DEPART):
    torch.library.register_fake(_op, _key, lib=LIBRARY)
for _op in (WAIT, HOMED):
    torch.library.register_fake(_op, _tensor, lib=LIBRARY)
torch.library.register_fake(ARRIVE, _same, lib=LIBRARY)

# Neither FX nor Inductor may drop or merge them: what they do to memory is their purpose.
for _op in (*RUNTIME_OPS, *UNPLANNED):
    fx.node.has_side_effect(_op)
