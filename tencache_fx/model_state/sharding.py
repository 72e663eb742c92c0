"""Torch's ways to spread a model over several ranks, which do not find offloaded parameters.

Each is refused before it has changed anything. `refuse_shards` refuses to offload sharded parameters. The other way
round, whatever spreads a module looks at it first: at what has been applied to it, where it meets `ComposableGuard` or
`TensorParallelGuard`, or, in DistributedDataParallel, at the module when it takes it over. Every module has these
guards that contains offloaded parameters, from its `offload` on, or from when it takes them in.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tencache_fx.errors import OptionError, UsageError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import ParameterStore, find_offloaded


def refuse_shards(model: nn.Module) -> None:
    """Raise `OptionError` for a model that has been spread already, but by DistributedDataParallel.

    A parameter that is made of other tensors, as a DTensor is, has no bytes of its own; one of
    FullyShardedDataParallel is a view of a flat one, or is that; `replicate` looks at its module in the first forward.
    """
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise OptionError(
                f"{name} is a {type(parameter).__name__}, as fully_shard and tensor parallelism make it, and "
                "tencache_fx.offload takes parameters that are ordinary tensors; use one or the other."
            )
        if getattr(parameter, "_fsdp_flattened", False):  # torch/distributed/fsdp/_common_utils.py
            raise OptionError(
                f"{name} is this rank's part of what FullyShardedDataParallel has spread over ranks, and "
                "tencache_fx.offload takes parameters that are ordinary tensors; use one or the other."
            )
    for name, module in model.named_modules():
        if any(applied == "replicate" for applied in _applied_to(module)):
            raise OptionError(
                f"replicate has been applied to {name or 'the model'}, and does not find offloaded parameters; wrap "
                "the model in DistributedDataParallel instead, and call tencache_fx.offload then."
            )


class ComposableGuard(OrderedDict[str, object]):
    """What of torch's composable wrappers has been applied to a module: each asks here before it changes the module.

    torch keeps it with the module (`distributed/_composable/contract.py`). `fully_shard` and FullyShardedDataParallel
    ask the modules below the one they are given as well (`distributed/fsdp/_fully_shard/_fsdp_common.py:
    _is_composable_with_fsdp`, `distributed/fsdp/_init_utils.py: _get_ignored_modules`).
    """

    def __init__(self, module: nn.Module | None, applied: Iterable[tuple[str, object]] = ()) -> None:
        super().__init__(applied)
        self._module = module if module is None else weakref.ref(module)  # the module has this, and goes with its user

    def __contains__(self, name: object) -> bool:
        """Return whether a wrapper was applied; raises `UsageError` for one that shards offloaded parameters."""
        if name in ("fully_shard", "replicate"):
            _refuse(self._module, "fully_shard, FullyShardedDataParallel and replicate do", FOR_CHECKPOINTS)
        return super().__contains__(name)

    def __reduce__(self) -> tuple[object, ...]:
        """Guard the copy of a module that is copied or pickled."""
        return ComposableGuard, (None if self._module is None else self._module(), tuple(self.items()))


class TensorParallelGuard:
    """Whether `distribute_module`, by which all tensor parallelism replaces parameters, has been applied to a module.

    torch keeps it with the module, and asks before it does (`distributed/tensor/_api.py`).
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module if module is None else weakref.ref(module)

    def __bool__(self) -> bool:
        """Return False; raises `UsageError` while the module contains offloaded parameters."""
        _refuse(self._module, "parallelize_module and distribute_module do")
        return False

    def __reduce__(self) -> tuple[object, ...]:
        """Guard the copy of a module that is copied or pickled."""
        return TensorParallelGuard, (None if self._module is None else self._module(),)


# `torch.distributed.checkpoint.state_dict` looks at a module as FullyShardedDataParallel does, and reads parameters.
FOR_CHECKPOINTS = (
    " For a checkpoint take model.state_dict() and optimizer.state_dict(); get_model_state_dict and the like do not "
    "know offloaded parameters."
)
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


def guard_from_sharding(model: nn.Module, store: ParameterStore) -> None:
    """Let every module that contains offloaded parameters refuse to be spread: those of `model`, and later ones."""
    if not torch.distributed.is_available():
        return
    store.watch(register_module_module_registration_hook, _take_in_module)
    store.watch(register_module_parameter_registration_hook, _take_in_parameter)
    for module in model.modules():
        if any(_offloaded_in(module)):
            _guard(module)


def _applied_to(module: nn.Module) -> Mapping[str, object]:
    """Return what of torch's composable wrappers has been applied to a module."""
    if not torch.distributed.is_available():
        return {}
    from torch.distributed._composable.contract import REGISTRY_KEY

    applied: Mapping[str, object] = module.__dict__.get(REGISTRY_KEY, {})
    return applied


def _guard(module: nn.Module) -> None:
    from torch.distributed._composable.contract import REGISTRY_KEY

    applied = _applied_to(module)
    if not isinstance(applied, ComposableGuard):
        module.__dict__[REGISTRY_KEY] = ComposableGuard(module, applied.items())
    module.__dict__.setdefault("_distribute_module_applied", TensorParallelGuard(module))


def _take_in_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Guard a module that takes in another one, with offloaded parameters; raises `UsageError` if it spreads them.

    That is DistributedDataParallel, which has changed nothing by then.
    """
    if _is_traced_list(module):
        return
    all_offloaded = [] if child is None else list(_offloaded_in(child))
    away = next((offloaded for offloaded in all_offloaded if not offloaded.summoned), None)
    if away is not None and isinstance(module, DistributedDataParallel):
        raise UsageError(
            f"{away.name} is offloaded to host memory, where DistributedDataParallel does not find it; wrap the model "
            "first and call tencache_fx.offload then, or wrap it inside `with tencache_fx.summon(model):`."
        )
    if all_offloaded:
        _guard(module)


def _take_in_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Guard a module that takes in an offloaded parameter of another one."""
    if parameter is not None and not _is_traced_list(module) and _find(parameter) is not None:
        _guard(module)


def _is_traced_list(module: nn.Module) -> bool:
    """Return whether traced code makes a list of modules or parameters, such as `self.layers[:n]`, to run through it.

    To look into it for offloaded parameters would break the graph.
    """
    return torch.compiler.is_dynamo_compiling() and isinstance(module, _LISTS)


def _refuse(module: "weakref.ref[nn.Module] | None", who: str, hint: str = "") -> None:
    """Raise `UsageError`, which says `who` asks and ends with `hint`, if the module contains an offloaded parameter."""
    found = None if module is None else module()
    offloaded = None if found is None else next(_offloaded_in(found), None)
    if offloaded is not None:
        raise UsageError(
            f"{offloaded.name} is offloaded to host memory, where {who} not find it; use one of these or "
            f"tencache_fx.offload, not both.{hint}"
        )


def _offloaded_in(module: nn.Module) -> Iterator[OffloadedParameter]:
    """Yield the offloaded parameters of a module and of those below it."""
    return (offloaded for parameter in module.parameters() if (offloaded := _find(parameter)) is not None)


def _find(parameter: Tensor) -> OffloadedParameter | None:
    return None if is_lazy(parameter) else find_offloaded(parameter)
