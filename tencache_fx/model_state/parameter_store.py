"""All offloaded parameters of a device, and the threads that work on them.

They are found by the parameter's storage, which every alias of the parameter shares.
"""

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.model_state.backing import Backing, HostBacking
from tencache_fx.model_state.disk_backing import DiskBacking, Place
from tencache_fx.model_state.disk_state import DiskLine
from tencache_fx.model_state.grad_accumulation import GradientAccumulator
from tencache_fx.model_state.mapped_state import keep_sizes, kept_sizes
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.passing_buffers import PassingBuffers
from tencache_fx.model_state.pending_backwards import PendingBackwards
from tencache_fx.model_state.step_hooks import is_updated_in_backward
from tencache_fx.model_state.update_queue import Updates
from tencache_fx.model_state.weight_files import WeightFile, WeightSlice
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import find_engine, inherited_engines
from tencache_fx.runtime.swap_buffers import BytesToCome
from tencache_fx.runtime.transfers import Layout
from tencache_fx.units import PAGE_BYTES, round_up

_LEAST_AHEAD_BYTES = 1 << 20  # less is mapped at once
_MOST_ROOM_BYTES = 192 << 20
_IN_HOST_MEMORY = Place()


class ParameterStore:
    """All offloaded parameters of one device, with the threads that update them and add up their gradients.

    Those on disk pass through the buffers of `passing`.

    It is the attachment of the device's engine, made when the first parameter is offloaded (`parameters_of`).
    """

    def __init__(self, engine: Engine) -> None:
        self.updates = Updates(engine.streams)
        self.additions = GradientAccumulator(engine.object_buffers)
        self.pending = PendingBackwards()
        self.kept = WeakTensorKeyDictionary()  # trained parameters that `offload` left on the device
        self._engine, self._buffers = engine, engine.object_buffers
        self.passing = PassingBuffers(engine.pool, engine.streams)
        self._disk_line: DiskLine | None = None
        self._files: weakref.WeakSet[WeightFile] = weakref.WeakSet()  # that parameters are read from
        self._by_storage: dict[int, OffloadedParameter] = {}
        self._hooks: dict[Any, Any] = {}  # of torch's, by how and what was registered
        engine.pool.keep_free(self.state_to_come)

    def __iter__(self) -> Iterator[OffloadedParameter]:
        # A copy: the collector may run as the pairs of `items` are allocated, and remove parameters.
        for key, offloaded in self._by_storage.copy().items():
            parameter = offloaded._parameter()
            if parameter is not None and parameter.untyped_storage()._cdata == key:  # else it has another storage now
                yield offloaded

    def __len__(self) -> int:
        return len(self._by_storage)

    @property
    def disk_line(self) -> DiskLine:
        """Return what keeps optimizers' state in the store; raises `OptionError` when there is no store."""
        if self._disk_line is None:
            engine = self._engine
            self._disk_line = DiskLine(self._buffers, engine.pool, engine.transfers.need_store(), engine.stats.add)
        return self._disk_line

    def find(self, tensor: Tensor) -> OffloadedParameter | None:
        """Return the record of an offloaded parameter, or of an alias of it; None if it is not offloaded here."""
        if not self._by_storage:
            return None
        key = tensor.untyped_storage()._cdata
        offloaded = self._by_storage.get(key)
        if offloaded is None:
            return None
        parameter = offloaded._parameter()
        assert parameter is not None, "its end removes it"
        if parameter is tensor or parameter.untyped_storage()._cdata == key:
            return offloaded
        del self._by_storage[key]  # somebody has given the parameter another storage
        return None

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of the parameters that are on disk."""
        return sum(offloaded.nbytes for offloaded in self if offloaded.tier is Tier.NVME)

    def bytes_to_come(self) -> BytesToCome:
        """Return the host memory that a backward will acquire for gradients, and for state of what is updated then.

        Gradients are all that a step has at once, but for those there already. What is added to gradients is beside
        them, as many as one backward makes. Of parameters that are updated during backward it is the largest gradient:
        the others wait for its update.
        """
        kept_bytes = added_bytes = largest_bytes = largest_early_bytes = state_bytes = 0
        for offloaded in self:
            parameter = offloaded.parameter
            if offloaded.updated_on_device or not parameter.requires_grad:
                continue
            nbytes = round_up(offloaded.layout.nbytes, PAGE_BYTES)
            largest_bytes = max(largest_bytes, nbytes)
            if is_updated_in_backward(offloaded):
                largest_early_bytes = max(largest_early_bytes, nbytes)
                state_bytes += 0 if has_state(offloaded) else round_up(offloaded.host_state_bytes, PAGE_BYTES)
            else:
                kept_bytes += nbytes
                added_bytes += 0 if parameter.grad is None else nbytes
        there_bytes = self._engine.pool.acquired_for(Use.GRADIENT)
        set_bytes = max(largest_bytes, self._engine.gradient_set_bytes)
        gradient_bytes = max(0, kept_bytes + min(added_bytes, set_bytes) - there_bytes) + largest_early_bytes
        return BytesToCome(gradient_bytes=gradient_bytes, state_bytes=state_bytes)

    def offload(
        self, parameter: Tensor, name: str, device: torch.device, place: Place = _IN_HOST_MEMORY
    ) -> OffloadedParameter:
        """Offload a parameter, of any device, to its place; afterwards it is one of `device`, with nothing there.

        Raises `BudgetError` when the host budget has no room for it, or `StoreError` when the disk has none; then, as
        after any error, it is as it was.
        """
        self._buffers.drain()
        value = parameter.detach()
        empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        backing = self._backing(Layout.of(empty, name), name, place)
        with contextlib.ExitStack() as undo:
            undo.callback(backing.free)
            undo.callback(setattr, parameter, "data", value)
            offloaded = OffloadedParameter(empty, name, backing, self._engine.streams)
            if not place.in_file:
                offloaded.set_host(value_of(place.weights, value))
            parameter.data = empty
            offloaded._parameter = weakref.ref(parameter)
            offloaded.free_device_copy()
            storage = parameter.untyped_storage()
            self._by_storage[storage._cdata] = offloaded
            offloaded.forget = weakref.finalize(parameter, self._forget, storage._cdata, offloaded)
            offloaded.forget.atexit = False
            undo.pop_all()
        self.watch(register_optimizer_step_pre_hook, self._refuse)
        return offloaded

    def _backing(self, layout: Layout, name: str, place: Place) -> Backing:
        engine = self._engine
        if place.on_disk:
            weights = place.weights if place.in_file else None
            if weights is not None:
                self._files.add(weights.file)
            return DiskBacking(engine, self.passing, layout, name, weights)
        buffer = engine.pool.acquire(layout.nbytes, Use.PARAMETER)
        engine.streams.wait_host(buffer.after)
        buffer.after = ()
        return HostBacking(layout, buffer, engine.pool, engine.streams)

    def watch(self, register: Callable[[Any], Any], hook: Callable[..., Any]) -> None:
        """Register one of torch's hooks for all modules or optimizers, up to `forget`, if it is not there yet."""
        if (register, hook) not in self._hooks:
            self._hooks[register, hook] = register(hook)

    def stop(self, *, at_exit: bool) -> None:
        """Finish all work on parameters and their state; load all to the device, but for `at_exit`."""
        with contextlib.ExitStack() as steps:  # runs last first, and every step even if one raises
            if not at_exit:
                steps.callback(self._load_all)
            if self._disk_line is not None:
                steps.callback(self._disk_line.stop)
                if not at_exit:
                    steps.callback(self._disk_line.leave_store)
            steps.callback(self.additions.stop)
            steps.callback(self.updates.stop)
            for offloaded in self:  # an interrupt may have left an update that nobody has handed in
                steps.callback(offloaded.join_update)

    def forget(self) -> None:
        """Forget all parameters; those that are not on the device are lost."""
        self._by_storage.clear()
        for file in self._files:
            file.close()
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def _load_all(self) -> None:
        for offloaded in self:
            try:
                offloaded.wait_update()
            except InvariantError as error:
                warnings.warn(str(error), stacklevel=2)
            try:
                offloaded.load()
            except UsageError as error:
                warnings.warn(str(error), stacklevel=2)
            except torch.OutOfMemoryError:
                offloaded.make_ordinary(torch.device("cpu"))
                warnings.warn(
                    f"{offloaded.name} is on the CPU now: {self._engine.device} has no room for it.", stacklevel=2
                )

    def map_state_ahead(self, on_device: Container[OffloadedParameter] = (), *, compiles: bool = True) -> None:
        """Begin to map host memory for the state that optimizers will make of all parameters but those `on_device`.

        The next start of the same program begins with that as soon as it has the optimizers. If nothing `compiles`
        meanwhile, it takes more of the CPU.
        """
        stateless = list(self._without_state())
        wanted = (each.state_buffer_bytes for each in stateless if each not in on_device)
        sizes = [nbytes for nbytes in wanted if nbytes >= _LEAST_AHEAD_BYTES]
        self._engine.map_ahead(sizes, Use.STATE, compiles=compiles)
        keep_sizes(self._engine.device, stateless, sizes)

    def map_state_as_before(self) -> None:
        """Begin to map what the last start of the same program has mapped of state; `map_state_ahead` corrects it."""
        if sizes := kept_sizes(self._engine.device, self._without_state()):
            self._engine.map_ahead(sizes, Use.STATE, compiles=False)

    def state_to_come(self) -> int:
        """Return the bytes of host memory that optimizers may yet acquire for state that they have not made."""
        return sum(offloaded.host_state_bytes for offloaded in self._without_state())

    def _without_state(self) -> Iterator[OffloadedParameter]:
        """Yield the parameters that are trained and have no state yet, which would be in host memory."""
        for key, offloaded in self._by_storage.copy().items():  # for each gradient: in most steps all have their state
            if offloaded.updated_on_device or (
                (state := offloaded.optimizer_state) is not None and state() is not None
            ):
                continue
            parameter = offloaded._parameter()
            if parameter is not None and parameter.requires_grad and parameter.untyped_storage()._cdata == key:
                yield offloaded

    def _forget(self, key: int, offloaded: OffloadedParameter) -> None:
        if self._by_storage.get(key) is offloaded:
            del self._by_storage[key]
        self._buffers.free_later(offloaded.backing.free, offloaded.backing.is_unused)

    def _refuse(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Stop an optimizer that would change parameters whose bytes are not where it looks for them."""
        if getattr(optimizer, "updates_on_host", False):
            return
        given = *args[1:], kwargs.get("closure")  # the first argument is the optimizer
        makes_gradients = any(map(callable, given))
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is None and not (makes_gradients and parameter.requires_grad):
                continue
            offloaded = self.find(parameter)
            if offloaded is not None and not offloaded.summoned:
                raise UsageError(
                    f"{type(optimizer).__name__} would update {offloaded.name}, which is offloaded to host memory; use "
                    "AdamW, OffloadedOptimizer or StreamedOptimizer of tencache_fx.optim, or call step() inside "
                    "`with tencache_fx.summon(model):`."
                )


def has_state(offloaded: OffloadedParameter) -> bool:
    """Return whether an optimizer has state of a parameter."""
    state = offloaded.optimizer_state
    return state is not None and state() is not None


def value_of(weights: WeightSlice | None, value: Tensor) -> Callable[[Tensor], object]:
    """Return what copies a value to a tensor: that of a file if there is one, else `value`."""
    return (lambda target: target.copy_(value)) if weights is None else weights.fill


def parameters_of(engine: Engine) -> ParameterStore:
    """Return the offloaded parameters of an engine; the first call attaches an empty store."""
    found = engine.attachment
    if isinstance(found, ParameterStore):
        return found
    with engine.transfers.lock:
        if (found := _attached_to(engine)) is None:
            engine.attachment = found = ParameterStore(engine)
        return found


def _attached_to(engine: Engine) -> ParameterStore | None:
    """Return the offloaded parameters of an engine, if it ever had some. Takes no lock: a fork may leave one held."""
    assert engine.attachment is None or isinstance(engine.attachment, ParameterStore)
    return engine.attachment


def find_offloaded(parameter: Tensor) -> OffloadedParameter | None:
    """Return the record of an offloaded parameter; None for any other.

    Raises `UsageError` in a forked process, which has none of the parent's host memory.
    """
    return find_each((parameter,))[0]


def find_each(parameters: Iterable[Tensor]) -> list[OffloadedParameter | None]:
    """Return what `find_offloaded` does, of each: devices are looked up once, for an optimizer asks for a whole model.

    Raises what that does.
    """
    stores: dict[torch.device, ParameterStore | None] = {}
    found: list[OffloadedParameter | None] = []
    others: list[Tensor] = []
    for parameter in parameters:
        offloaded, device = None, parameter.device
        if device.type in ("cpu", "cuda") and not is_functorch_wrapped_tensor(parameter):
            if device not in stores:
                engine = find_engine(device)
                stores[device] = None if engine is None else _attached_to(engine)
            if (store := stores[device]) is not None:
                offloaded = store.find(parameter)
            if offloaded is None:
                others.append(parameter)
        found.append(offloaded)
    _refuse_inherited(others)
    return found


def _refuse_inherited(parameters: Sequence[Tensor]) -> None:
    """Raise `UsageError` if the process from which this one was forked has offloaded one of these parameters."""
    stores = [_attached_to(engine) for engine in inherited_engines()] if parameters else []
    for store, parameter in ((store, parameter) for store in stores if store is not None for parameter in parameters):
        offloaded = store.find(parameter)
        if offloaded is not None and not offloaded.on_device:
            raise UsageError(
                f"{offloaded.name} is offloaded to the memory of the process from which process {os.getpid()} was "
                "forked, which has none of it; start the process by spawn, with a model and a state_dict() of its own."
            )


def find_all_offloaded(values: Sequence[object], device: torch.device) -> dict[int, OffloadedParameter]:
    """Return the offloaded parameters among `values`, by position, without tensors that share memory with one."""
    engine = find_engine(device) if device.type in ("cpu", "cuda") else None
    store = None if engine is None else _attached_to(engine)
    if not store:
        return {}
    found: dict[int, OffloadedParameter] = {}
    for index, value in enumerate(values):  # in each call of a region
        if isinstance(value, torch.Tensor) and value.device == device:
            offloaded = store.find(value)
            if offloaded is not None and offloaded.parameter is value:
                found[index] = offloaded
    return found


def total_offloaded_bytes(device: torch.device) -> int:
    """Return the bytes of all parameters of `device` that are offloaded, wherever they are now."""
    engine = find_engine(device) if device.type in ("cpu", "cuda") else None
    store = None if engine is None else _attached_to(engine)
    return sum(offloaded.nbytes for offloaded in store or ())


def has_parameters_on_disk(device: torch.device) -> bool:
    """Return whether any offloaded parameter of `device` is on disk."""
    engine = find_engine(device) if device.type in ("cpu", "cuda") else None
    store = None if engine is None else _attached_to(engine)
    return any(offloaded.tier is Tier.NVME for offloaded in store or ())


def evict_residents(device: torch.device) -> bool:
    """Evict the parameters that stay by the plans of steps, up to the next planned step; return whether there are any.

    Blocks the host while they are updated. Raises `BudgetError` if host memory has no room for their state.
    """
    engine = find_engine(device) if device.type in ("cpu", "cuda") else None
    store = None if engine is None else _attached_to(engine)
    found = [offloaded for offloaded in store or () if offloaded.planned_by_step]
    for offloaded in found:
        offloaded.leave()
    return bool(found)


def follow(device: torch.device, results: object, all_offloaded: Mapping[str, OffloadedParameter]) -> None:
    """Note a region's call, whose backward may come; see `PendingBackwards`."""
    if (engine := find_engine(device)) is not None:
        parameters_of(engine).pending.follow(results, all_offloaded)


def open_update_room(device: torch.device, device_budget_bytes: int | None) -> None:
    """Let updates of offloaded parameters run on a GPU, too, in a fiftieth of its budget, 192 MiB at most."""
    engine = find_engine(device)
    if engine is not None and device.type == "cuda":
        most = _MOST_ROOM_BYTES
        parameters_of(engine).updates.open_room(
            most if device_budget_bytes is None else min(most, device_budget_bytes // 50)
        )
