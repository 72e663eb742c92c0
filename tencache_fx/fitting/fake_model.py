"""Models and inputs that take no memory: what a factory makes, and what a model becomes, under fake tensors.

A fake tensor (torch: `_subclasses/fake_tensor.py`) has a size, a dtype and a device, and no bytes.
"""

import copy
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tencache_fx import compat
from tencache_fx.errors import OptionError
from tencache_fx.fitting.model_figures import ModelFigures, ParameterFigures
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
    try:
        with MetaDeviceMode(), torch.device("meta"):
            made = factory(**(settings or {}))
            if isinstance(factory, type) and isinstance(made, nn.Module):
                return _with_inputs(name, made, inputs)
    except OptionError:
        raise
    except compat.COMPILER_ERRORS as error:
        raise OptionError(
            f"{name} fails where tensors have no values, {reason_of(error)}; if it asks for those of a tensor, make "
            'that one with device="cpu".'
        ) from error
    return _read(name, made)


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
        tensor = torch.empty(*map(int, shape.split("x")), dtype=dtype)
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
        try:
            return copy.deepcopy(module, dict(fakes))
        except compat.COMPILER_ERRORS as error:
            raise OptionError(
                f"the model cannot be copied, {reason_of(error)}; it must work with copy.deepcopy."
            ) from error

    loss_fn = made.loss_fn
    if isinstance(loss_fn, nn.Module):
        loss_fn = copied(loss_fn)
    elif isinstance(loss_fn, FunctionType) and loss_fn.__closure__:
        cells = (CellType(tree_map_only(Tensor, placed, cell.cell_contents)) for cell in loss_fn.__closure__)
        kept = loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, loss_fn.__defaults__
        loss_fn = FunctionType(*kept, tuple(cells))
    inputs, named_inputs = tree_map_only(
        Tensor, lambda tensor: faked(tensor, device), (tuple(made.inputs), dict(made.named_inputs))
    )
    return FactoryResult(model=copied(made.model), inputs=inputs, named_inputs=named_inputs, loss_fn=loss_fn)


def _fake(tensor: Tensor, device: torch.device, mode: FakeTensorMode) -> Tensor:
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
            raise OptionError(f"{module_name} has no {attribute};{nearest(part, dict.fromkeys(vars(module)))}")
        found = getattr(found, part)
    if not callable(found):
        raise OptionError(f"{name} is a {type(found).__name__}; name a function that takes no arguments.")
    return found  # type: ignore[no-any-return]


def _import(name: str) -> Any:
    """Import a module by its name, found from the working directory, too, or by its file."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except (*compat.COMPILER_ERRORS, ImportError, SyntaxError) as error:
        raise OptionError(f"{name} cannot be imported, {reason_of(error)}; mend it, or name another module.") from error


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


def reason_of(error: BaseException) -> str:
    """Return what an error is, and the first line of what it says."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
