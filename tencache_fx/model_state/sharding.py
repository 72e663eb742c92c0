"""Torch's ways to spread a model over several ranks, which do not find offloaded parameters.

Each is refused before it has changed anything. `refuse_shards` refuses to offload sharded parameters; `ShardingGuard`
lets `fully_shard` refuse modules with offloaded ones. `ParameterStore` stops DistributedDataParallel where it takes the
module over.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tencache_fx.errors import OptionError, UsageError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.runtime.engine_registry import engines


def refuse_shards(model: nn.Module) -> None:
    """Raise `OptionError` if a parameter is made of other tensors, as a DTensor is: it has no bytes of its own."""
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise OptionError(
                f"{name} is a {type(parameter).__name__}, as fully_shard and tensor parallelism make it, and "
                "tencache_fx.offload takes parameters that are ordinary tensors; use one or the other."
            )


class ShardingGuard(OrderedDict[str, object]):
    """What of torch's composable wrappers has been applied to a module: each asks here before it changes the module.

    torch keeps it with the module (`distributed/_composable/contract.py`). `fully_shard` asks the modules below the one
    it is given as well (`distributed/fsdp/_fully_shard/_fsdp_common.py: _is_composable_with_fsdp`).
    """

    def __init__(self, module: nn.Module | None, applied: Iterable[tuple[str, object]] = ()) -> None:
        super().__init__(applied)
        self._module = module if module is None else weakref.ref(module)  # the module has this, and goes with its user

    def __contains__(self, name: object) -> bool:
        """Return whether a wrapper was applied; raises `UsageError` for one that shards offloaded parameters."""
        module = self._module if self._module is None else self._module()
        offloaded = None if module is None or name not in _SHARDING else _first_offloaded(module)
        if offloaded is not None:
            raise UsageError(
                f"{offloaded.name} is offloaded to host memory, where fully_shard, or replicate, does not find it; use "
                "one of these or tencache_fx.offload, not both."
            )
        return super().__contains__(name)

    def __reduce__(self) -> tuple[object, ...]:
        """Guard the copy of a module that is copied or pickled."""
        return ShardingGuard, (None if self._module is None else self._module(), tuple(self.items()))


_SHARDING = ("fully_shard", "replicate")


def guard_from_sharding(model: nn.Module) -> None:
    """Let every module of `model` that has an offloaded parameter, itself or below it, refuse to be sharded."""
    if not torch.distributed.is_available():
        return
    from torch.distributed._composable.contract import REGISTRY_KEY

    for module in model.modules():
        applied = module.__dict__.get(REGISTRY_KEY, {})
        if not isinstance(applied, ShardingGuard) and _first_offloaded(module) is not None:
            module.__dict__[REGISTRY_KEY] = ShardingGuard(module, applied.items())


def _first_offloaded(module: nn.Module) -> OffloadedParameter | None:
    return next((offloaded for parameter in module.parameters() if (offloaded := _find(parameter)) is not None), None)


def _find(parameter: Tensor) -> OffloadedParameter | None:
    return next(
        (offloaded for engine in engines() if (offloaded := parameters_of(engine).find(parameter)) is not None), None
    )
