"""Models larger than the device: `offload(model)` gives parameters a home in host memory.

    model = tencache_fx.offload(model, device="cuda")
    optimizer = tencache_fx.optim.AdamW(model.parameters())
    model = torch.compile(model, backend="tencache", options={"device_budget": "12GiB"})

Parameters keep their names, shapes, dtypes and device, but their storage on the device is empty; compiled regions fetch
what they read, ahead of time. Where no compiled region runs (evaluation without `torch.compile`, loading weights), a
module's own parameters come to the device before its forward, by hooks; `summon` brings them for anything else.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from tencache_fx import compat
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state.arguments import find_device, need_model
from tencache_fx.model_state.module_guards import guard, keep_loadable
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.offloading import Offloading, wants_home
from tencache_fx.model_state.parameter_store import find_home, parameters_of
from tencache_fx.model_state.sharding import guard_from_sharding, refuse_shards
from tencache_fx.model_state.step_hooks import check_updates_in_backward
from tencache_fx.options import Options
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import find_engine, open_engine, usage

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
    on "meta" that cannot make its parameters, or a parameter that is sharded or whose elements share memory;
    `BudgetError` when host_budget is too low: raise it by `tencache_fx.configure`, and call this again. Whatever it
    raises, the model is as it was.
    """
    first = next((p for p in need_model(model).parameters() if p.device.type != "meta"), None)
    if device is None and first is None:
        raise OptionError("the model has no parameters on any device; say which device to train on: device='cuda'.")
    assert device is not None or first is not None
    target = resolve_device(find_device(device) if device is not None else first.device)  # type: ignore[union-attr]
    refuse_shards(model)
    departure = Offloading(roomy_engine(target), model, target)
    with _open_bar(departure.nbytes, progress=progress) as bar, departure:
        for name, module in model.named_modules():
            departure.make(module)
            own = list(module.named_parameters(prefix=name, recurse=False))
            for full_name, parameter in own:
                bar.update(departure.move(parameter, full_name))
            departure.move_buffers(module)
        for module in model.modules():
            if _homes_read_by(module):
                watch(module)
        guard(model)
        guard_from_sharding(model)
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
def _summoned(home: OffloadedParameter, *, write: bool) -> Iterator[None]:
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


def _take_over(home: OffloadedParameter, given: Tensor) -> bool:
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
        parameters_of(engine).settle_in(parameter, home.name, engine.device)
    return False


def engine_of(device: torch.device) -> Engine:
    """Return the device's engine."""
    return find_engine(device) or roomy_engine(device)


def roomy_engine(device: torch.device) -> Engine:
    """Return the device's engine, for what is at home there whichever regions run: with the budgets of the process.

    What regions were given for themselves may be less, and limits their plans only.
    """
    engine = find_engine(device)
    if engine is None or not engine.serves_all:
        chosen = options_of_process(device)
        engine = open_engine(
            device,
            host_budget_bytes=chosen.host_budget,
            spill_dirs=() if engine is not None and engine.store is not None else chosen.spill_dir,
            spill_budget_bytes=chosen.spill_budget,
            checksum=chosen.checksum,
        )
        engine.serves_all = True
    return engine


def options_of_process(device: torch.device, **given: object) -> Options:
    """Return the options of whatever is no compilation: those that are `given`, over those set for the process."""
    own, given = usage(device), {"device_budget": None, "dump_dir": None, **given}
    return Options.resolve(given, device=device, own_host_bytes=own.host_bytes, own_disk_bytes=own.disk_bytes)


def _open_bar(nbytes: int, *, progress: bool | None) -> "tqdm[Any]":
    """Return a bar over the bytes of all parameters that are to get a home."""
    return tqdm(
        total=nbytes,
        desc="parameters to host memory",
        unit="B",
        unit_scale=True,
        delay=_BAR_DELAY_S,
        leave=False,
        disable=None if progress is None else not progress,
    )


class _Part:
    """A part of a gradient that comes from a module that runs by itself, and so unannounced."""

    started = True


_ALONE = _Part()


class _Calls(threading.local):
    """A module's forwards under way outside of compiled regions, innermost last: each thread has its own."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []

    def __reduce__(self) -> tuple[type["_Calls"], tuple[()]]:
        """Have the copy of a module that is copied or pickled begin with none."""
        return _Calls, ()


def watch(module: nn.Module) -> None:
    """Let the parameters that a module reads come to the device whenever it runs outside of a compiled region."""
    if hasattr(module, "_tencache_calls"):
        return
    module._tencache_calls = _Calls()  # type: ignore[assignment]
    guard(module)
    keep_loadable(module)
    module.register_forward_pre_hook(_before_forward, prepend=True)  # other hooks may read them, too
    module.register_forward_hook(_after_forward, always_call=True, with_kwargs=True)


def parameters_read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a module's forward reads: its own, and those of children that have no forward.

    Such are `ParameterList` and `ParameterDict`. A few of torch's modules read all that is below them.
    """
    yield from module.parameters(recurse=isinstance(module, _READ_THEIR_CHILDRENS))
    for child in module.children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from parameters_read_by(child)


def _homes_read_by(module: nn.Module) -> list[OffloadedParameter]:
    found = map(find_home, parameters_read_by(module))
    return list({home: None for home in found if home is not None})


class _Bring:
    """Has a module's parameters on the device when its backward begins: an optimizer's step may have come between."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def __call__(self, *_: object) -> None:
        for parameter in self._parameters:
            if (home := find_home(parameter)) is not None and home.come_for_backward():
                engine_of(parameter.device).stats.add(h2d_bytes=home.nbytes)


class _Forward:
    """A forward under way, with what it reads: that comes when it begins, and goes when it ends."""

    def __init__(self) -> None:
        self._trains = torch.is_grad_enabled()
        self._homes: list[OffloadedParameter] = []
        self._came: dict[OffloadedParameter, tuple[Tensor, int]] = {}  # with the parameter as it came, and its version

    def begin(self, homes: list[OffloadedParameter]) -> None:
        for home in homes:
            if self._trains:
                home.expect(_ALONE)
            self._homes.append(home)
            if home.come_for(self, passes=not self._trains):
                engine_of(home.layout.device).stats.add(h2d_bytes=home.nbytes)
            self._came[home] = home.alias(), home.written_here

    def end(self, made: set[Any]) -> None:
        """Take over what the forward has changed; a backward by the nodes `made` may follow."""
        stays = self._trains or bool(made)  # until the optimizer's step
        parameters: list[Tensor] = []
        with contextlib.ExitStack() as undo:  # whatever one of them raises, the others go
            for home in self._homes:
                undo.callback(home.go_from, self, stays=stays)
                undo.callback(self._take_change, home, parameters)
        for node in made:
            node.register_prehook(_Bring(parameters))

    def _take_change(self, home: OffloadedParameter, parameters: list[Tensor]) -> None:
        """Take over what the forward has done to its own parameter, as one of Embedding does with max_norm."""
        if home.is_over or home not in self._came:
            return
        own, written = self._came[home]
        given = home.take_back(own)
        if given is not None and not _take_over(home, given):
            home.go_from(self, stays=True)  # the parameter has nothing to do with that home any more
            return
        parameters.append(home.parameter)
        if given is not None or (home.on_device and home.written_here != written):
            home.take()


# In each of them Dynamo takes `is_dynamo_compiling` for true where it traces a call: a compiled region fetches what it
# reads. Elsewhere it is false, whatever other threads compile meanwhile, unlike `is_compiling`.


@compat.run_as_is
def _before_forward(module: Any, args: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    forward = _Forward()
    module._tencache_calls.forwards.append(forward)  # first: its end comes even if it cannot begin
    homes = _homes_read_by(module)
    if torch.is_grad_enabled():
        check_updates_in_backward(homes)
    forward.begin(homes)


@compat.run_as_is
def _after_forward(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    forwards = module._tencache_calls.forwards
    if forwards:
        forwards.pop().end(_nodes_of(output) - _nodes_of((args, kwargs)))


def _nodes_of(values: Any) -> set[Any]:
    nodes = {each.grad_fn for each in tree_leaves(values) if isinstance(each, Tensor)}
    return nodes - {None}
