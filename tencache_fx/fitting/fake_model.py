"""Models and inputs that take no memory: what a factory makes, and what a model becomes, under fake tensors.

A fake tensor (torch: `_subclasses/fake_tensor.py`) has a size, a dtype and a device, and no bytes.
"""

import copy
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tencache_fx.errors import OptionError, TencacheError
from tencache_fx.fitting.model_figures import ModelFigures, ParameterFigures
from tencache_fx.fitting.user_code import users_code
from tencache_fx.model_state.offloading import is_adapted, should_offload
from tencache_fx.option_values import nearest


@dataclass(frozen=True, kw_only=True)
class FactoryResult:
    """A model, what it is called with, and what, if anything, turns its output into a loss."""

    model: nn.Module
    inputs: Sequence[Any]
    named_inputs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None


class MetaDeviceMode(TorchFunctionMode):
    """Inside, tensors that are made for an accelerator, or moved to one, are on "meta" instead, without memory.

    Tensors made for the CPU by name are there: factories ask for it where they need values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with another device, if it is given one."""
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to("meta")
        if kwargs.get("device") is not None:
            kwargs["device"] = _elsewhere(kwargs["device"])
        if func is Tensor.to:
            args = (
                args[0],
                *(_elsewhere(value) if isinstance(value, str | torch.device) else value for value in args[1:]),
            )
        return func(*args, **kwargs)


def _elsewhere(device: Any) -> Any:
    is_cpu = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
    return device if is_cpu else torch.device("meta")


def call_factory(name: str, settings: Mapping[str, object] | None = None, inputs: Sequence[str] = ()) -> FactoryResult:
    """Return what the factory `name`, "package.module:function" or "file.py:function", makes on "meta".

    `settings` are its arguments, by name. Instead of a factory a module's class may be named; its instance is called
    with `inputs`, such as "8x512:int64" or "mask=8x512:bool".

    Only tensors that are made for the CPU by name take memory. Raises `OptionError` for a factory that is not there,
    that fails, or that returns something else than a model, its inputs and maybe a loss function.
    """
    factory = _find(name)
    _check_arguments(name, factory, settings or {})
    with users_code(f"{name} fails", _advise_factory), MetaDeviceMode(), torch.device("meta"):
        made = factory(**(settings or {}))
    if isinstance(factory, type) and isinstance(made, nn.Module):
        return _with_inputs(name, made, inputs)
    if inputs:
        raise OptionError(f"--input is for a module's class, and {name} is none; have it return its inputs.")
    return _read(name, made)


def _check_arguments(name: str, factory: Callable[..., Any], settings: Mapping[str, object]) -> None:
    """Raise `OptionError` if a factory does not take these arguments, as far as it says what it takes."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # built in
        return
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise OptionError(
            f"{name}{signature} cannot be called with {', '.join(settings) or 'no arguments'}, {error}; give what it "
            "takes with --set NAME=VALUE."
        ) from error


def _advise_factory(error: BaseException) -> str:
    """Return what to do about a factory that fails, maybe for want of values."""
    if isinstance(error, TencacheError):
        return "return the model as it is before it is offloaded or trained: it is planned as if it were"
    if "meta" in str(error):
        return (
            'tensors have no values here: make those whose values are asked for with device="cpu", or all of them '
            'under torch.device("cpu")'
        )
    return "mend it there, or give it other arguments with --set NAME=VALUE"


def _with_inputs(name: str, model: nn.Module, texts: Sequence[str]) -> FactoryResult:
    """Return a module with what it is called with; without a dtype it is that of the first parameter."""
    if not texts:
        raise OptionError(f"{name} is a module; say what it is called with, such as --input 8x512:int64.")
    plain: list[Tensor] = []
    named: dict[str, Tensor] = {}
    default = next((p.dtype for p in model.parameters()), torch.float32)
    for text in texts:
        keyword, _, described = text.rpartition("=")
        shape, _, kind = described.partition(":")
        dtype = getattr(torch, kind, None) if kind else default
        if not isinstance(dtype, torch.dtype) or not all(size.isdecimal() for size in shape.split("x")):
            raise OptionError(
                f"--input {text} is no tensor; give SHAPE:DTYPE or NAME=SHAPE:DTYPE, such as 8x512:int64."
            )
        with users_code(f"--input {text} cannot be made", lambda _: "give sizes that a tensor can have"):
            tensor = torch.empty(*map(int, shape.split("x")), dtype=dtype, device="meta")
        if keyword:
            named[keyword] = tensor
        else:
            plain.append(tensor)
    return FactoryResult(model=model, inputs=plain, named_inputs=named)


def fake_model(made: FactoryResult, device: torch.device, mode: FakeTensorMode) -> FactoryResult:
    """Return a copy of what was made in which every tensor is a fake; parameters, buffers and inputs are on `device`.

    Nothing is copied but the modules themselves; the originals stay as they are. Other tensors, which modules have as
    attributes or the loss function in its closure, keep their device, unless that is "meta". Raises `OptionError` for
    tensors that are no plain ones.
    """
    fakes: dict[int, Any] = {}

    def faked(tensor: Tensor, where: torch.device) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake(tensor, where, mode)
        return fakes[id(tensor)]  # type: ignore[no-any-return]

    def placed(tensor: Tensor) -> Tensor:
        return faked(tensor, device if tensor.device.type == "meta" else tensor.device)

    def copied(module: nn.Module) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            faked(tensor, device)
        for part in module.modules():
            for tensor in filter(torch.is_tensor, tree_leaves(vars(part))):
                placed(tensor)
        with users_code("the model cannot be copied", lambda _: "it must work with copy.deepcopy"):
            return copy.deepcopy(module, dict(fakes))

    def held(values: Any) -> Any:
        return tree_map_only(nn.Module, copied, tree_map_only(Tensor, placed, values))

    loss_fn = made.loss_fn
    if isinstance(loss_fn, nn.Module):
        loss_fn = copied(loss_fn)
    elif isinstance(loss_fn, functools.partial):
        loss_fn = _applied(loss_fn.func, held(loss_fn.args), held(loss_fn.keywords))
    elif isinstance(loss_fn, FunctionType):
        cells = tuple(CellType(held(cell.cell_contents)) for cell in loss_fn.__closure__ or ())
        kept = loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, held(loss_fn.__defaults__)
        keywords = held(loss_fn.__kwdefaults__)
        loss_fn = FunctionType(*kept, cells or None)
        loss_fn.__kwdefaults__ = keywords
    model = made.model
    if isinstance(model, OptimizedModule):  # it is compiled here anyway
        model = model._orig_mod
    inputs, named_inputs = tree_map_only(
        Tensor, lambda tensor: faked(tensor, device), (tuple(made.inputs), dict(made.named_inputs))
    )
    return FactoryResult(model=copied(model), inputs=inputs, named_inputs=named_inputs, loss_fn=loss_fn)


def _applied(function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return what functools.partial does, as a function: torch 2.11 does not trace one that has tensors."""

    def call(output: Any) -> Any:
        return function(*given, output, **named)

    return call


def _fake(tensor: Tensor, device: torch.device, mode: FakeTensorMode) -> Tensor:
    if is_lazy(tensor):
        raise OptionError(
            "a parameter of the model has no size before a first call; call the model once in the factory, or name "
            "sizes instead of making it lazy."
        )
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) or tensor.layout is not torch.strided:
        kind = type(tensor).__name__ if type(tensor) is not Tensor else tensor.layout
        raise OptionError(
            f"a tensor of size {tuple(tensor.shape)} is a {kind}, which cannot be planned for; use ordinary tensors."
        )
    with mode, torch.no_grad():
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def figures_of(made: FactoryResult, workspace_bytes: int) -> ModelFigures:
    """Return what a model takes, real or fake; of parameters that are tied, the first name counts.

    `workspace_bytes` are what libraries keep on the device.
    Raises `OptionError` where it is made for parameters that cannot be offloaded.
    """
    model, adapts = made.model, is_adapted(made.model)
    beside = (*model.buffers(), *tree_leaves((made.inputs, made.named_inputs)))
    tensors = {id(value): value for value in beside if isinstance(value, Tensor)}
    return ModelFigures(
        parameters=tuple(
            ParameterFigures(
                name=name,
                numbers=parameter.numel(),
                nbytes=_bytes(parameter),
                trained=parameter.requires_grad,
                offloaded=should_offload(parameter, name, adapts=adapts),
                in_float32=parameter.dtype is torch.float32,
                in_bfloat16=parameter.dtype is torch.bfloat16,
            )
            for name, parameter in model.named_parameters()
        ),
        beside_bytes=sum(map(_bytes, tensors.values())) + workspace_bytes,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _find(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise OptionError(f"{name!r} names no factory; give package.module:function, or file.py:function.")
    module = _import(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(f"{module_name} has no {attribute};{nearest(part, dict.fromkeys(dir(found)))}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        raise OptionError(
            f"{name} is no function, but a {type(found).__name__}; name one that returns (model, inputs)."
        )
    return found  # type: ignore[no-any-return]


def _import(name: str) -> Any:
    """Import a module by its name, found from the working directory, too, or by its file."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    with users_code(f"{name} cannot be imported", lambda _: "mend it, or name another module"):
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # as an import does; pickle and dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # as an import does
        if before is not None:
            sys.modules[path.stem] = before
        raise
    return module


def _read(name: str, made: Any) -> FactoryResult:
    """Return the result of a factory, checked."""
    parts = tuple(made) if isinstance(made, tuple | list) else (made,)
    wanted = "return (model, inputs) or (model, inputs, loss_fn), a torch.nn.Module first"
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise OptionError(f"{name} returned ({kinds}); {wanted}.")
    model, inputs, loss_fn = (*parts, None)[:3]
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"{name} returned a {type(loss_fn).__name__} for a loss function; {wanted}.")
    if isinstance(inputs, Mapping):
        return FactoryResult(model=model, inputs=(), named_inputs=inputs, loss_fn=loss_fn)
    return FactoryResult(model=model, inputs=inputs if isinstance(inputs, tuple | list) else (inputs,), loss_fn=loss_fn)
