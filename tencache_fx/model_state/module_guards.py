"""Modules with offloaded parameters: they cannot be moved or converted, but are saved and loaded as ever."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.runtime.transfers import Layout


class _Guard:
    """A module's `_apply`, by which torch moves and converts it: offloaded parameters cannot follow.

    They have no bytes where torch would read them: some of its kernels end the process then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module has this object, and goes with its last user

    def __reduce__(self) -> tuple[type["_Guard"], tuple[nn.Module | None]]:
        """Guard the copy of a module that is copied or pickled."""
        return _Guard, (self._module(),)

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001
        """Apply `fn`, as torch does, if it leaves all offloaded parameters as they are; raises `UsageError` if not."""
        module = self._module()
        assert module is not None, "it is called by its module"
        for parameter in module.parameters(recurse=recurse):
            if (offloaded := find_offloaded(parameter)) is not None and not _leaves(fn, parameter):
                raise UsageError(
                    f"{offloaded.name} is offloaded to host memory, and cannot be moved or converted from there; do it "
                    "before tencache_fx.offload(model, device=...)."
                )
        applied: nn.Module = type(module)._apply(module, fn, recurse)
        return applied


def _leaves(fn: Callable[[Tensor], Tensor], parameter: Tensor) -> bool:
    """Return whether `fn` returns such a tensor as it is; tried on a small one of that dtype, device and order."""
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    small = torch.empty_permuted((2,) * parameter.dim(), order, dtype=parameter.dtype, device=parameter.device)
    shared = small.is_shared()
    return fn(small) is small and small.is_shared() == shared


def guard(module: nn.Module) -> None:
    """Let a module refuse to be moved or converted while parameters of it are offloaded."""
    module._apply = _Guard(module)  # type: ignore[method-assign]


def is_guarded(module: nn.Module) -> bool:
    """Return whether it does so already, and is kept loadable."""
    return isinstance(module._apply, _Guard)


def keep_loadable(module: nn.Module) -> None:
    """Let a module's own parameters be saved from their host copies, and loaded to these."""
    module.register_state_dict_post_hook(_into_state_dict)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)


def _own_offloaded(module: nn.Module) -> dict[str, OffloadedParameter]:
    found = ((name, find_offloaded(parameter)) for name, parameter in module.named_parameters(recurse=False))
    return {name: offloaded for name, offloaded in found if offloaded is not None}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _into_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, offloaded in _own_offloaded(module).items():
        offloaded.wait_update()
        if prefix + name in state_dict:
            shard = offloaded.shard
            state_dict[prefix + name] = offloaded.host if shard is None else shard.as_dtensor(offloaded.host)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: Any,
) -> None:
    all_offloaded = _own_offloaded(module)
    if all_offloaded and local_metadata.get("assign_to_params_buffers"):
        raise UsageError("offloaded parameters cannot be replaced; load with assign=False.")
    for name, offloaded in all_offloaded.items():
        saved = state_dict.get(prefix + name)
        if offloaded.shard is not None and isinstance(saved, Tensor):
            part = offloaded.shard.take(saved)
            state_dict[prefix + name] = saved if part is None else part  # torch tells of one of another size
        try:
            offloaded.wait_update()
        except InvariantError as error:
            if saved is None:
                raise
            warnings.warn(str(error), stacklevel=2)  # its user does what it says
        offloaded.load()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    for offloaded in _own_offloaded(module).values():
        if offloaded.on_device:  # else a module below it has the parameter, too, and was loaded before this hook
            offloaded.write_back()
            offloaded.evict()


def alias_of(offloaded: OffloadedParameter) -> Tensor:
    """Return the parameter as it is on the device, for `restore`."""
    with torch.inference_mode(False):
        return offloaded.parameter.detach()


def restore(offloaded: OffloadedParameter, own: Tensor) -> Tensor | None:
    """Give a parameter, of which `own` is an alias, its own bytes again; return what it was given instead."""
    given = offloaded.parameter.detach()
    is_own = given.untyped_storage()._cdata == own.untyped_storage()._cdata
    same_place = given.storage_offset() == own.storage_offset()
    if is_own and same_place and Layout.of(given, offloaded.name) == offloaded.layout:
        return None
    given = given.clone() if is_own else given  # a view of them, which it is to have as they were
    offloaded.parameter.data = own
    return given
