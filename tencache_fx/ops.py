"""The four graph ops, their schemas and their fake implementations (design: graph contract).

    handle = offload(src)            issue the copy out behind everything queued so far
    token  = release(handle, src)    compute waits for that copy; `src` is over
    ticket = prefetch(handle)        allocate on the device, issue the copy in; the handle may die
    tensor = wait(ticket, ...)       compute waits for the copy in; exact sizes and strides of `src`

`release` is declared to write `src`: that keeps Inductor from inlining into a later kernel something that reads it,
so what the plan counts as free is free.

Handles, tokens and tickets are one-element int64 CPU tensors: they travel through AOTAutograd as saved tensors, give
Inductor data edges, and their death tells the runtime that a trip was abandoned. `engine` is the registry index of the
runtime that serves the op; it is a literal in the graph, so nothing is looked up by context at run time.

Defined through `torch.library.Library`, not `custom_op`, whose dispatch costs 30 us a call instead of 5.
The kernels are registered by `tencache_fx.runtime.kernels`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

LIBRARY = torch.library.Library("tencache", "DEF")
# What leaves must lie in memory as the graph says, since that is how it is asked back; Inductor would choose freely.
_AS_PLANNED = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define("offload(Tensor src, int engine, str tier, str label) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define("release(Tensor handle, Tensor(a!) src, int engine) -> Tensor", tags=_AS_PLANNED)
LIBRARY.define("prefetch(Tensor handle, int engine) -> Tensor")
LIBRARY.define(
    "wait(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, int engine) -> Tensor"
)

OFFLOAD = torch.ops.tencache.offload.default
RELEASE = torch.ops.tencache.release.default
PREFETCH = torch.ops.tencache.prefetch.default
WAIT = torch.ops.tencache.wait.default
RUNTIME_OPS = (OFFLOAD, RELEASE, PREFETCH, WAIT)


def key_tensor() -> Tensor:
    """Return an empty handle; under a fake mode, the fake of every handle, token and ticket."""
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _offload(src: Tensor, engine: int, tier: str, label: str) -> Tensor:
    return key_tensor()


def _release(handle: Tensor, src: Tensor, engine: int) -> Tensor:
    return key_tensor()


def _prefetch(handle: Tensor, engine: int) -> Tensor:
    return key_tensor()


def _wait(
    ticket: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _op, _fake in ((OFFLOAD, _offload), (RELEASE, _release), (PREFETCH, _prefetch), (WAIT, _wait)):
    torch.library.register_fake(_op, _fake, lib=LIBRARY)

# Neither FX nor Inductor may drop or merge them: what they do to memory is their purpose.
for _op in RUNTIME_OPS:
    fx.node.has_side_effect(_op)
