"""Modules with parameters at home as wholes: they are not moved or converted, but saved and loaded as ever."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tencache_fx.errors import UsageError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import find_home


class _Guard:
    """A module's `_apply`, by which torch moves and converts it: parameters at home cannot follow.

    They have no bytes where torch would read them: some of its kernels end the process then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module has this object, and goes with its last user

    def __reduce__(self) -> tuple[type["_Guard"], tuple[nn.Module | None]]:
        """Guard the copy of a module that is copied or pickled."""
        return _Guard, (self._module(),)

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001
        """Apply `fn`, as torch does, if it leaves all parameters at home as they are; raises `UsageError` if not."""
        module = self._module()
        assert module is not None, "it is called by its module"
        for parameter in module.parameters(recurse=recurse):
            if (home := find_home(parameter)) is not None and not _leaves(fn, parameter):
                raise UsageError(
                    f"{home.name} has its home in host memory, and cannot be moved or converted from there; do it "
                    "before tencache_fx.offload(model, device=...)."
                )
        applied: nn.Module = type(module)._apply(module, fn, recurse)
        return applied


def _leaves(fn: Callable[[Tensor], Tensor], parameter: Tensor) -> bool:
    """Say whether `fn` returns such a tensor as it is; tried on a small one of that dtype, device and order."""
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    small = torch.empty_permuted((2,) * parameter.dim(), order, dtype=parameter.dtype, device=parameter.device)
    shared = small.is_shared()
    return fn(small) is small and small.is_shared() == shared


def guard(module: nn.Module) -> None:
    """Have a module refuse to be moved or converted while parameters of it are at home."""
    module._apply = _Guard(module)  # type: ignore[method-assign]


def keep_loadable(module: nn.Module) -> None:
    """Have a module's own parameters saved from where they are at home, and loaded to there."""
    module.register_state_dict_post_hook(_into_state_dict)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)


def _own_homes(module: nn.Module) -> dict[str, OffloadedParameter]:
    found = ((name, find_home(parameter)) for name, parameter in module.named_parameters(recurse=False))
    return {name: home for name, home in found if home is not None}


def _into_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, home in _own_homes(module).items():
        home.settle()
        if prefix + name in state_dict:
            state_dict[prefix + name] = home.host


def _before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: Any,
) -> None:
    homes = _own_homes(module)
    if homes and local_metadata.get("assign_to_params_buffers"):
        raise UsageError("parameters with a home cannot be replaced; load with assign=False.")
    for home in homes.values():
        home.bring()


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    for home in _own_homes(module).values():
        home.take()
        home.put_away()
