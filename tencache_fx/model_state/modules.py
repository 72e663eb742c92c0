"""Models larger than the device: `offload(model)` keeps parameters in host memory.

    model = tencache_fx.offload(model, device="cuda")
    optimizer = tencache_fx.optim.AdamW(model.parameters())
    model = torch.compile(model, backend="tencache", options={"device_budget": "12GiB"})

Parameters keep their names, shapes, dtypes and device, but their storage on the device is empty; compiled regions fetch
what they read, ahead of time. Where no compiled region runs (evaluation without `torch.compile`, loading weights), a
module's own parameters are loaded whenever it is called; `summon` loads them for anything else.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _DisableFuncTorch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from tencache_fx import compat
from tencache_fx.errors import OptionError
from tencache_fx.garbage import seldom_collected
from tencache_fx.hardware.collective_rates import agree_on_rates
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state.arguments import find_device, need_model
from tencache_fx.model_state.model_weights import ModelWeights
from tencache_fx.model_state.module_guards import alias_of, guard, is_guarded, keep_loadable, restore
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.offloading import Offloading, should_offload
from tencache_fx.model_state.parameter_readers import modules_beside, offloaded_read_by
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.shard import find_group
from tencache_fx.model_state.sharded_modules import ShardedClasses
from tencache_fx.model_state.sharding import guard_from_sharding, refuse_shards
from tencache_fx.model_state.step_hooks import check_updates_in_backward
from tencache_fx.model_state.weight_files import WeightFiles, Weights
from tencache_fx.options import Options
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import RankStage, find_engine, open_engine, usage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BAR_DELAY_S = 1.0  # what is done sooner needs no progress bar


@RankStage("offload")
@seldom_collected()
def offload(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    shard: "bool | DeviceMesh" = False,
    weights: Weights | None = None,
    progress: bool | None = None,
) -> nn.Module:
    """Offload every large parameter of `model` to host memory, and move all else to `device`; return the model.

    With a `spill_dir` those go to disk that `host_budget` has no room for, with the gradients that they will need.

    Of a model that is all but frozen, trained parameters, a 32nd of its bytes at most, stay on the device with their
    optimizer's state, whatever their size: adapters, or a new head.

    `device` is that of the first parameter by default. Parameters are moved one at a time, from wherever they are:
    from a device, from the CPU, or from "meta", where each module's `reset_parameters` makes them first, and its
    buffers.

    With `shard`, True for all ranks or a DeviceMesh of one dimension, each rank keeps its rows of each parameter, of
    its gradient and of its optimizer's state. Whoever reads a parameter gathers it; gradients are the means over ranks.
    Values, and buffers, are those of rank 0. Parameters whose part would be smaller than 64 KiB, or that have fewer
    rows than there are ranks, are whole on every device, with gradients averaged. All ranks call this, with the same
    model.

    `weights`, a safetensors file, a folder of some, or a list of files, has the values of all parameters, and of the
    buffers of `state_dict`; names that the model lacks are left alone. A model on "meta" then needs no
    `reset_parameters`. Frozen parameters for which `host_budget` has no room are read from there in place, whenever
    they are needed, and take no room of the spill store.

    `model.state_dict()` then has the parameters as tensors of the CPU that share memory with the host copies, but
    copies of those on disk, and `load_state_dict` works as ever. Idempotent. What takes longer than a second shows a
    progress bar on stderr, unless `progress` is False; by default if that is a terminal. Raises `OptionError` for a
    device that is not there, a module on "meta" that cannot make its parameters, a parameter that is sharded or whose
    elements share memory, or weights that are missing, or of another size or dtype; `BudgetError` when host_budget, and
    the disk, are too small: raise one by `tencache_fx.configure`, and call this again; `StoreError` when a disk cannot
    be read or written. Whatever it raises, the model is as it was; but a rank that is lost while parameters are sent
    leaves them in parts.
    """
    first = next((p for p in need_model(model).parameters() if p.device.type != "meta"), None)
    if device is None and first is None:
        raise OptionError("the model has no parameters on any device; say which device to train on: device='cuda'.")
    assert device is not None or first is not None
    target = resolve_device(find_device(device) if device is not None else first.device)  # type: ignore[union-attr]
    refuse_shards(model)
    if weights is not None and shard is not False:
        raise OptionError("weights= reads whole parameters, and shard= spreads them; load the weights before offload.")
    group = find_group(shard, target)
    values = None if weights is None else ModelWeights(model, WeightFiles(weights))
    departure = Offloading(roomy_engine(target), model, target, group, values)
    classes = None
    if group is not None:
        agree_on_rates(group.process_group, target, calibrate=options_of_process(target).calibrate)
        classes = ShardedClasses(group)
    with _open_bar(departure.nbytes, progress=progress) as bar, departure:
        for name, module in model.named_modules():
            departure.make(module)
            own = list(module.named_parameters(prefix=name, recurse=False))
            for full_name, parameter in own:
                bar.update(departure.move(parameter, full_name))
            departure.move_buffers(module)
        for module in (*model.modules(), *modules_beside(model)):
            if offloaded_read_by(module):
                watch(module)
            if classes is not None:
                classes.change(module, departure.shards)
        guard(model)
        parameters_of(engine_of(target)).watch(register_module_parameter_registration_hook, _take_in)
        guard_from_sharding(model, parameters_of(engine_of(target)))
    return model


def take_over(offloaded: OffloadedParameter, given: Tensor) -> bool:
    """Set a parameter on the device to the tensor it was `given`; False if it is offloaded anew then, or not at all.

    That is where it has another size or dtype now.
    """
    parameter, engine = offloaded.parameter, engine_of(offloaded.layout.device)
    if (given.size(), given.dtype) == (parameter.size(), parameter.dtype):
        offloaded.load()
        parameter.detach().copy_(given)
        return True
    offloaded.forget()
    parameter.data = given
    if should_offload(parameter, offloaded.name, adapts=False):
        parameters_of(engine).offload(parameter, offloaded.name, engine.device)
    return False


def engine_of(device: torch.device) -> Engine:
    """Return the device's engine."""
    return find_engine(device) or roomy_engine(device)


def roomy_engine(device: torch.device) -> Engine:
    """Return the device's engine with the budgets of the process, for all that is offloaded, whichever regions run.

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
            spill_write_bytes_per_day=chosen.spill_write_budget,
            checksum=chosen.checksum,
        )
        engine.serves_all = True
    return engine


def options_of_process(device: torch.device, **given: object) -> Options:
    """Return the options of whatever is no compilation: those that are `given`, over those set for the process."""
    own, given = usage(device), {"device_budget": None, "dump_dir": None, **given}
    return Options.resolve(given, device=device, own_host_bytes=own.host_bytes, own_disk_bytes=own.disk_bytes)


def _open_bar(nbytes: int, *, progress: bool | None) -> "tqdm[Any]":
    """Return a bar over the bytes of all parameters to be offloaded."""
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


ALONE = _Part()


class _OfModule:
    """A part of a module that knows it: `module` has this object, and goes with its last user."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)

    def __reduce__(self) -> tuple[type["_OfModule"], tuple[nn.Module]]:
        """Let the copy of a module that is copied or pickled have its own, of which nothing is compiled."""
        return type(self), (self.module,)

    @property
    def module(self) -> nn.Module:
        module = self._reference()
        assert module is not None, "it is called by its module"
        return module

    def is_of(self, module: nn.Module) -> bool:
        """Return whether that is its module: one that is copied shallowly has the parts of the other."""
        return self._reference() is module


class _Call(_OfModule):
    """What calling a module runs: the module, for which the parameters that it reads are loaded meanwhile.

    Torch keeps here what `Module.compile` makes, `run`. A compiled region fetches what it reads: Dynamo passes this by
    where it traces a call. Hooks it would trace and guard in each module, for a fifth of the time that tracing takes.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any] | None = None) -> None:
        super().__init__(module)
        self._run = run

    def __bool__(self) -> bool:
        """Return whether anything is compiled, which others tell by this (PEFT: `utils/hotswap.py`)."""
        return self._run is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, or what has been compiled of it."""
        module = self.module
        # True where Dynamo traces this, as it does in a module with hooks; not while other threads compile.
        if torch.compiler.is_dynamo_compiling():
            return module._call_impl(*args, **kwargs)
        forward = _begin_forward(module)
        try:
            output = (self._run or module._call_impl)(*args, **kwargs)
        except BaseException:
            _end_forward(forward)
            raise
        _end_forward(forward, (args, kwargs), output)
        return output


compat.run_as_is(_Call.__call__, with_callees=False)


class _Compile(_OfModule):
    """A module's `compile`, by which torch replaces its `_Call`: what it makes becomes a part of that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the module, as torch or its class does."""
        module = self.module
        result = type(module).compile(module, *args, **kwargs)
        watch(module)
        return result


def watch(module: nn.Module) -> None:
    """Let the parameters that a module reads come to the device whenever it runs outside of a compiled region."""
    run, known = module._compiled_call_impl, vars(module).get("compile")
    if not isinstance(run, _Call):
        module._compiled_call_impl = _Call(module, run)
    elif not run.is_of(module):
        module._compiled_call_impl = _Call(module)
    is_method = known is None and getattr(module.compile, "__self__", None) is module  # else it is something else
    if is_method or (isinstance(known, _Compile) and not known.is_of(module)):
        module.compile = _Compile(module)  # type: ignore[method-assign]
    if not is_guarded(module):
        guard(module)
        keep_loadable(module)


def watch_readers(model: nn.Module) -> None:
    """Watch all modules of `model` that have got offloaded parameters of others meanwhile."""
    for module in model.modules():
        if any(map(_may_move, offloaded_read_by(module))):
            watch(module)


def _take_in(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """Watch a module that gets an offloaded parameter of another one, such as one that parametrizes it."""
    if torch.compiler.is_dynamo_compiling() or parameter is None or is_lazy(parameter):
        return
    if (offloaded := find_offloaded(parameter)) is not None and _may_move(offloaded):
        watch(module)


def _may_move(offloaded: OffloadedParameter) -> bool:
    return offloaded.shard is None  # only classes that `offload` has changed gather one that is spread


class _LoadForBackward:
    """Loads a module's parameters when its backward begins: an optimizer's step may have evicted them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    @compat.run_as_is
    def __call__(self, *_: object) -> None:
        with _DisableFuncTorch():
            for parameter in self._parameters:
                if (offloaded := find_offloaded(parameter)) is not None and offloaded.load_for_backward():
                    engine_of(parameter.device).stats.add(h2d_bytes=offloaded.nbytes)


class _Forward:
    """A forward under way, with the parameters it reads: loaded when it begins, and evicted when it ends."""

    def __init__(self) -> None:
        self._trains = torch.is_grad_enabled()
        self._all_offloaded: list[OffloadedParameter] = []
        self._came: dict[OffloadedParameter, tuple[Tensor, int]] = {}  # with the parameter as it came, and its version

    def begin(self, all_offloaded: list[OffloadedParameter]) -> None:
        for offloaded in all_offloaded:
            if self._trains:
                offloaded.gradient.expect(ALONE)
            self._all_offloaded.append(offloaded)
            if offloaded.load_for_forward(self, inference=not self._trains):
                engine_of(offloaded.layout.device).stats.add(h2d_bytes=offloaded.nbytes)
            self._came[offloaded] = alias_of(offloaded), offloaded.device_version

    def end(self, made: set[Any]) -> None:
        """Take over what the forward has changed; a backward by the nodes `made` may follow."""
        keep = self._trains or bool(made)  # until the optimizer's step
        parameters: list[Tensor] = []
        with contextlib.ExitStack() as undo:  # whatever one of them raises, the others go
            for offloaded in self._all_offloaded:
                undo.callback(offloaded.end_forward, self, keep=keep)
                undo.callback(self._take_change, offloaded, parameters)
        for node in made:
            node.register_prehook(_LoadForBackward(parameters))

    def _take_change(self, offloaded: OffloadedParameter, parameters: list[Tensor]) -> None:
        """Take over what the forward has done to its own parameter, as one of Embedding does with max_norm."""
        if offloaded.is_dead or offloaded not in self._came:
            return
        own, written = self._came[offloaded]
        given = restore(offloaded, own)
        if given is not None and not take_over(offloaded, given):
            offloaded.end_forward(self, keep=True)  # the parameter has nothing to do with this record any more
            return
        parameters.append(offloaded.parameter)
        if given is not None or (offloaded.on_device and offloaded.device_version != written):
            offloaded.write_back()


@compat.run_as_is
def _begin_forward(module: nn.Module) -> _Forward:
    forward, all_offloaded = _Forward(), offloaded_read_by(module)
    if torch.is_grad_enabled():
        check_updates_in_backward(all_offloaded)
    with _DisableFuncTorch():  # as if no transform were under way, of which the copies made here would be a part
        try:
            forward.begin(all_offloaded)
        except BaseException:
            forward.end(set())
            raise
    return forward


@compat.run_as_is
def _end_forward(forward: _Forward, inputs: object = None, output: object = None) -> None:
    made = _nodes_of(output) - _nodes_of(inputs)
    with _DisableFuncTorch():
        forward.end(made)


def _nodes_of(values: Any) -> set[Any]:
    nodes = {each.grad_fn for each in tree_leaves(values) if isinstance(each, Tensor)}
    return nodes - {None}
