"""Modules whose parameters are spread over ranks: who reads `module.weight` gets the whole of it.

The module keeps this rank's part as its parameter. Its class becomes a subclass with a property in the parameter's
name, which gathers (SimpleFSDP, arXiv 2411.00284); modules of one kind share it, so that they share compiled code.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tencache_fx import compat
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.model_state.module_guards import alias_of
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_ops import send_to_host
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.model_state.shard import Averaged, Gathered, RankGroup, Shard, scatter_mean
from tencache_fx.model_state.sharding import FOR_CHECKPOINTS
from tencache_fx.runtime.engine_registry import find_engine

_Read = tuple[str, RankGroup, torch.Size | None]
"""A parameter's name in its module, who reduces its gradient, and its size, if it is spread."""


class ShardedClasses:
    """The classes that the modules of one model get."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._made: dict[tuple[type[nn.Module], tuple[_Read, ...]], type[nn.Module]] = {}

    def change(self, module: nn.Module, shards: Mapping[Tensor, Shard | None]) -> None:
        """Let a module gather its own parameters where it reads them; those of None, which are whole, are averaged."""
        own = {key: p for key, p in module._parameters.items() if p is not None and p in shards}
        kind = type(module)
        reads = tuple((key, self._group, None if (s := shards[p]) is None else s.size) for key, p in own.items())
        reads = tuple(read for read in reads if not isinstance(getattr(kind, read[0], None), _Property))
        if not reads:
            return
        if (kind, reads) not in self._made:
            properties = {key: _Property(_reader(key, group, size)) for key, group, size in reads}
            body = {**properties, "__module__": kind.__module__, "__reduce_ex__": _refuse_pickling}
            self._made[kind, reads] = type(kind.__name__, (kind,), body)
        module.__class__ = self._made[kind, reads]


class _Property(property):
    """A property that reads a parameter for all ranks."""


def check_readers(model: nn.Module) -> None:
    """Raise `OptionError` for modules that read, or write, their parameters past their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            why = "passes its parameters to its kernels in a list"
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            why = "writes to its parameter in the forward (max_norm)"
        else:
            continue
        raise OptionError(
            f"module {name or 'the model'} ({type(module).__name__}) {why}, which shard= does not support; leave "
            "shard= out, or use another module."
        )


def _reader(key: str, group: RankGroup, size: torch.Size | None) -> Callable[[nn.Module], Any]:
    count, name = group.size, group.name
    shard = None if size is None else Shard(group, size)
    rows, local = (0, None) if shard is None else (shard.size[0], shard.local_size)

    def read_averaged(module: nn.Module) -> Any:
        parameter = _entry(module, key)
        if parameter is None or not parameter.requires_grad or not torch.is_grad_enabled():
            return parameter
        return Averaged.apply(parameter, count, name)

    def read_gathered(module: nn.Module) -> Any:
        parameter = _entry(module, key)
        if parameter is None or parameter.size() != local:  # it is the whole, inside summon
            return parameter
        if not torch.compiler.is_dynamo_compiling():
            return _read_alone(parameter, shard)
        whole = Gathered.apply(parameter, count, name)
        return whole if whole.size(0) == rows else whole[:rows]

    return read_averaged if shard is None else read_gathered


def _entry(module: nn.Module, key: str) -> nn.Parameter | None:
    if key not in module._parameters:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {key!r}")
    return module._parameters[key]


class _GatheredAlone(Gathered):
    """The same outside of compiled regions: this rank's gradient goes to host memory at once, known as a part."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Reduce and scatter."""
        part = scatter_mean(gradient, ctx.count, ctx.group)
        engine = find_engine(part.device)
        assert engine is not None, "a parameter is offloaded"
        on_host = send_to_host(engine, part)
        on_host.buffer.shard = ctx.group
        return on_host, None, None


@compat.run_as_is
def _read_alone(parameter: nn.Parameter, shard: Shard) -> Tensor:
    offloaded = find_offloaded(parameter)
    if offloaded is None:
        raise UsageError(
            f"a parameter of size {tuple(shard.size)} is spread over {shard.group.size} ranks, and this rank's part is "
            "not offloaded any more; make the model anew, and call tencache_fx.offload(model, shard=...)."
        )
    if not offloaded.on_device:
        raise UsageError(
            f"{offloaded.name} is spread over {shard.group.size} ranks, and nothing has loaded this rank's part: read "
            "it inside `with tencache_fx.summon(model):`, which all ranks enter, in a function compiled with "
            f"backend='tencache', or in the forward of the module that has it.{FOR_CHECKPOINTS}"
        )
    whole: Tensor = _GatheredAlone.apply(parameter, shard.group.size, shard.group.name)
    return whole[: shard.size[0]]


@contextlib.contextmanager
def whole(offloaded: OffloadedParameter, *, write: bool) -> Iterator[None]:
    """Let a parameter that is on the device be the whole for the time of the context; a collective.

    Raises `UsageError` at the end if a backward has run meanwhile, whose gradient nobody has reduced.
    """
    if (shard := offloaded.shard) is None:
        yield
        return
    parameter, own, gradient = offloaded.parameter, alias_of(offloaded), offloaded.parameter.grad
    parameter.grad = None
    parameter.data = shard.gather(own)
    try:
        yield
    finally:
        given, made = parameter.data, parameter.grad
        parameter.grad = None
        parameter.data = own
        parameter.grad = gradient
        if write and given.size() == shard.size:
            own.copy_(shard.cut(given))
    if made is not None:
        raise UsageError(
            f"{offloaded.name} got a gradient inside summon, where it is whole and no rank knows of the others' "
            "gradients; run the backward outside of summon."
        )
    if given.size() != shard.size:
        raise UsageError(
            f"{offloaded.name} was given a tensor of size {tuple(given.size())} inside summon; one that is spread over "
            f"ranks keeps its size of {tuple(shard.size)}."
        )


def _refuse_pickling(module: nn.Module, protocol: Any) -> Any:
    raise UsageError(
        f"a {type(module).__name__} whose parameters are spread over ranks cannot be copied or pickled; save "
        "model.state_dict() by torch.distributed.checkpoint."
    )
