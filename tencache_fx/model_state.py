"""Models larger than the device: `offload(model)` gives parameters a home in host memory.

    model = tencache_fx.offload(model, device="cuda")
    optimizer = tencache_fx.optim.AdamW(model.parameters())
    model = torch.compile(model, backend="tencache", options={"device_budget": "12GiB"})

Parameters keep their names, shapes, dtypes and device, but their storage on the device is empty; compiled regions fetch
what they read, ahead of time. Where no compiled region runs (evaluation without `torch.compile`, loading weights), a
module's own parameters come to the device before its forward, by hooks; `summon` brings them for anything else.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from tencache_fx import compat
from tencache_fx.arguments import find_device, need_model
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.options import Options
from tencache_fx.runtime.engine import Engine, resolve_device
from tencache_fx.runtime.home import Home
from tencache_fx.runtime.registry import find_engine, open_engine

LEAST_BYTES = 64 << 10
"""Smaller parameters stay on the device: their copies would cost more in time than they save in memory."""

_FEW = 32  # one part in so many: with gradients, and masters and moments in fp32, that is up to eight times as much

_READ_THEIR_CHILDRENS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # parameters, without calling these

_BAR_DELAY_S = 1.0  # what is done sooner needs no progress bar


def offload(model: nn.Module, device: torch.device | str | None = None, *, progress: bool | None = None) -> nn.Module:
    """Give every large parameter of `model` a home in host memory, and move all else to `device`; return the model.

    Of a model that is all but frozen, what is trained, a 32nd of its bytes at most, stays on the device, whatever its
    size, and so does its optimizer's state: adapters, or a new head.

    `device` is that of the first parameter by default. Parameters are moved one at a time, from wherever they are:
    from a device, from the CPU, or from "meta", where each module's `reset_parameters` makes them first, and its
    buffers.
    `model.state_dict()` then has the parameters as tensors of the CPU that share memory with their homes, and
    `load_state_dict` works as ever. Idempotent. What takes longer than a second shows a progress bar on stderr, unless
    `progress` is False; by default if that is a terminal. Raises `OptionError` for a device that is not there, a module
    on "meta" that cannot make its parameters, or a parameter whose elements share memory; `BudgetError` when
    host_budget is too low.
    """
    first = next((p for p in need_model(model).parameters() if p.device.type != "meta"), None)
    if device is None and first is None:
        raise OptionError("the model has no parameters on any device; say which device to train on: device='cuda'.")
    assert device is not None or first is not None
    target = resolve_device(find_device(device) if device is not None else first.device)  # type: ignore[union-attr]
    _check_ties(model)
    engine, adapts = engine_of(target), is_adapted(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    with _open_bar(engine, model, adapts=adapts, progress=progress) as bar:
        for name, module in model.named_modules():
            _materialize(module, name, target, made)
            own = list(module.named_parameters(prefix=name, recurse=False))
            for full_name, parameter in own:
                bar.update(_move(engine, parameter, full_name, target, adapts=adapts))
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = buffer.to(target)
    for module in model.modules():
        if _homes_read_by(module):
            watch(module)
    guard(model)
    return model


@contextlib.contextmanager
def summon(model: nn.Module, *, write: bool = True) -> Iterator[nn.Module]:
    """Have all parameters of `model` on the device meanwhile, to read and to change; all at once, so budget or not.

    With `write=False` changes are dropped. What is given to a parameter's `data` is taken over as any other change, by
    a copy. Of parameters that are summoned already, whoever did so first decides what becomes of changes. Raises
    `UsageError` when none has a home.
    """
    homes = [home for parameter in need_model(model).parameters() if (home := find_home(parameter)) is not None]
    if not homes:
        raise UsageError("no parameter of this model has a home; call tencache_fx.offload(model) first.")
    with contextlib.ExitStack() as undo:
        for home in homes:
            if not home.summoned:
                undo.enter_context(_summoned(home, write=write))
        yield model


@contextlib.contextmanager
def _summoned(home: Home, *, write: bool) -> Iterator[None]:
    """Have one parameter on the device meanwhile."""
    home.settle()
    home.come_home()  # so that what is done to it here can be dropped
    brought, home.summoned = home.bring(), True
    own = home.alias()
    if torch.is_grad_enabled():
        home.expect(_ALONE)
    try:
        yield
    finally:
        home.summoned = False
        given = home.take_back(own)
        if not write or given is None or _take_over(home, given):
            try:
                if write:
                    home.take()
            finally:
                if brought:
                    home.put_away()
                if not write and home.on_device:
                    home.refresh()


def _take_over(home: Home, given: Tensor) -> bool:
    """Have a parameter on the device as it was `given`; False if that has another home then, or none.

    That is where it has another size or dtype now.
    """
    parameter, engine = home.parameter, engine_of(home.layout.device)
    if (given.size(), given.dtype) == (parameter.size(), parameter.dtype):
        home.bring()
        parameter.detach().copy_(given)
        return True
    home.forget()
    parameter.data = given
    if wants_home(parameter, home.name, adapts=False):
        engine.homes.settle_in(parameter, home.name, engine.device)
    return False


def find_home(parameter: Tensor) -> Home | None:
    """Return a parameter's home; None if it has none."""
    if parameter.device.type not in ("cpu", "cuda") or is_functorch_wrapped_tensor(parameter):
        return None
    engine = find_engine(parameter.device)
    return None if engine is None else engine.homes.find(parameter)


def engine_of(device: torch.device) -> Engine:
    """Return the device's engine; where no compiled region has opened it, with the host budget set for the process."""
    if (engine := find_engine(device)) is not None:
        return engine
    return open_engine(device, host_budget_bytes=Options.resolve(None, device=device).host_budget)


def _check_ties(model: nn.Module) -> None:
    """Refuse parameters that share memory; called while all of them have theirs, which tells them apart."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if (other := names.setdefault(parameter.untyped_storage()._cdata, name)) != name:
            raise OptionError(f"{name} shares memory with {other}; tie them by using one Parameter in both places.")


def _materialize(module: nn.Module, name: str, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make what a module has on "meta", by itself, on the device; tied parameters, in `made`, only once."""
    on_meta = {key: p for key, p in module.named_parameters(recurse=False) if p.is_meta}
    for key, parameter in on_meta.items():
        if parameter in made:
            module.register_parameter(key, made[parameter])
    has_buffers = any(buffer.is_meta for buffer in module.buffers(recurse=False))
    if all(parameter in made for parameter in on_meta.values()) and not has_buffers:
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset) or any(parameter in made for parameter in on_meta.values()):
        raise OptionError(
            f"module {name or 'the model'} ({type(module).__name__}) is on the meta device and has no "
            "reset_parameters() to make its parameters and buffers with, or shares some of them; build it on the CPU."
        )
    parameters = {key: p for key, p in module.named_parameters(recurse=False) if not p.is_meta}
    buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if not buffer.is_meta}
    module._parameters |= {key: nn.Parameter(torch.empty_like(p), p.requires_grad) for key, p in parameters.items()}
    module._buffers |= {key: torch.empty_like(buffer) for key, buffer in buffers.items()}
    module.to_empty(device=device, recurse=False)
    reset()
    module._parameters |= parameters  # what was there already is kept: only stand-ins were reset
    module._buffers |= buffers
    made |= {parameter: getattr(module, key) for key, parameter in on_meta.items()}


def _open_bar(engine: Engine, model: nn.Module, *, adapts: bool, progress: bool | None) -> "tqdm[Any]":
    """Return a bar over the bytes of all parameters that are to get a home."""
    moving = (p for p in model.parameters() if _may_leave(p, adapts=adapts) and engine.homes.find(p) is None)
    return tqdm(
        total=sum(parameter.nbytes for parameter in moving),
        desc="parameters to host memory",
        unit="B",
        unit_scale=True,
        delay=_BAR_DELAY_S,
        leave=False,
        disable=None if progress is None else not progress,
    )


def is_adapted(model: nn.Module) -> bool:
    """Say whether a model is frozen but for a few parameters."""
    parameters = list(model.parameters())
    trained_bytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return trained_bytes * _FEW <= sum(parameter.nbytes for parameter in parameters)


def _may_leave(parameter: Tensor, *, adapts: bool) -> bool:
    return parameter.nbytes >= LEAST_BYTES and not (adapts and parameter.requires_grad)


def wants_home(parameter: Tensor, name: str, *, adapts: bool) -> bool:
    """Say whether a parameter is large enough for a home, and not one of the few that are trained where it `adapts`.

    Raises `OptionError` for one that is, but has gaps between its elements, or the same memory for several.
    """
    if not _may_leave(parameter, adapts=adapts):
        return False
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()):
        raise OptionError(
            f"{name} of size {tuple(parameter.shape)} has strides {parameter.stride()}, with gaps between its elements "
            "or the same memory for several; make it contiguous."
        )
    return True


def _move(engine: Engine, parameter: nn.Parameter, name: str, device: torch.device, *, adapts: bool) -> int:
    """Give a parameter a home, if it wants one and has none; return the bytes moved there."""
    if engine.homes.find(parameter) is not None:
        return 0
    if wants_home(parameter, name, adapts=adapts):
        return engine.homes.settle_in(parameter, name, device).nbytes
    parameter.data = parameter.data.to(device)
    if parameter.requires_grad:
        engine.homes.kept[parameter] = True
    return 0


class _Part:
    """A part of a gradient that comes from a module that runs by itself, and so unannounced."""

    started = True


_ALONE = _Part()


def watch(module: nn.Module) -> None:
    """Let a module's own parameters come to the device whenever it runs outside of a compiled region."""
    if hasattr(module, "_tencache_brought"):
        return
    module._tencache_brought = []  # type: ignore[assignment]  # by each forward under way
    guard(module)
    module.register_forward_pre_hook(_before_forward)
    module.register_forward_hook(_after_forward, always_call=True, with_kwargs=True)
    module.register_state_dict_post_hook(_into_state_dict)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)


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


def _own_homes(module: nn.Module) -> dict[str, Home]:
    found = ((name, find_home(parameter)) for name, parameter in module.named_parameters(recurse=False))
    return {name: home for name, home in found if home is not None}


def _homes_read_by(module: nn.Module) -> list[Home]:
    """Return the homes of the parameters that a module reads itself: its own, and for some those of its children."""
    found = map(find_home, module.parameters(recurse=isinstance(module, _READ_THEIR_CHILDRENS)))
    return [home for home in found if home is not None]


class _Bring:
    """Has a module's parameters on the device when its backward begins: an optimizer's step may have come between."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def __call__(self, *_: object) -> None:
        for parameter in self._parameters:
            if (home := find_home(parameter)) is not None and home.bring():
                engine_of(parameter.device).stats.add(h2d_bytes=home.nbytes)


@compat.run_as_is
def _before_forward(module: Any, args: Any) -> None:
    if torch.compiler.is_compiling():  # the compiled region fetches what it reads
        return
    homes = _homes_read_by(module)
    if torch.is_grad_enabled():
        for home in homes:
            home.expect(_ALONE)
    brought = {home for home in homes if home.bring()}
    for home in brought:
        engine_of(home.layout.device).stats.add(h2d_bytes=home.nbytes)
    module._tencache_brought.append([(home, home.alias(), home.written_here, home in brought) for home in homes])


@compat.run_as_is
def _after_forward(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not module._tencache_brought:
        return
    parameters: list[Tensor] = []
    for home, own, written, brought in module._tencache_brought.pop():
        if home.is_over:
            continue
        # A forward may change its own parameters, as one of Embedding with max_norm does.
        given = home.take_back(own)
        if given is not None and not _take_over(home, given):
            continue
        if given is not None or (home.on_device and home.written_here != written):
            home.take()
        if brought and not torch.is_grad_enabled():  # else a backward may follow: until the optimizer's step
            home.put_away()
        parameters.append(home.parameter)
    if torch.is_grad_enabled():
        for node in _nodes_of(output) - _nodes_of((args, kwargs)):
            node.register_prehook(_Bring(parameters))


def _nodes_of(values: Any) -> set[Any]:
    nodes = {each.grad_fn for each in tree_leaves(values) if isinstance(each, Tensor)}
    return nodes - {None}


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
