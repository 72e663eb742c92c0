"""Any torch optimizer with its state in host memory: parameters are updated on the device, some at a time.

For optimizers that look at whole matrices, such as Muon and Adafactor. Gradients, weights and states of a chunk of
parameters, which is a large one or many small ones, are copied in while the chunk before is updated, and weights and
states are copied out while the next one is. What updates them is an object of the class itself, made for these
parameters and this step, with their states carried over: so the arithmetic is the class's own. To make an object takes
some 20 us, and one that was kept would have to be told of new weights, which few classes allow.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from tencache_fx.errors import OptionError, UsageError
from tencache_fx.model_state.chunk_queue import ChunkQueue
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.model_state.host_state import HeldTensors, held_bytes
from tencache_fx.model_state.modules import roomy_engine
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.offloading import LEAST_BYTES
from tencache_fx.model_state.optimizer_checks import check_group, check_params, check_whole
from tencache_fx.model_state.parameter_store import find_each, find_offloaded
from tencache_fx.model_state.placement import set_state
from tencache_fx.model_state.random_draws import RandomDraws
from tencache_fx.model_state.state_values import arrays_of, copy_of, is_held, laid_out, renewed, widened
from tencache_fx.model_state.step_kernel import MASTER, check_class
from tencache_fx.model_state.streamed_update import Chunk, Done, StreamedUpdate, UpdateStream
from tencache_fx.model_state.update import unhook, weakly
from tencache_fx.model_state.update_chunks import Wanted, cut_chunks
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import RankStage
from tencache_fx.tensors import ordinary_tensors


class StreamedOptimizer(torch.optim.Optimizer):
    """Any class of `torch.optim`, with fp32 master weights, all state in host memory, and its updates on the device.

        StreamedOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.01)

    `options` are those of `optimizer_class`; they may differ by group. For classes that update each element by itself
    `OffloadedOptimizer` takes less time. `params` are bf16, fp16 or fp32 parameters, offloaded ones and others, as for
    torch; the state of small ones stays on the device. `step` returns when all parameters are updated. Updates under
    way take up to 512 MiB of the device, more for parameters that take over 128 MiB each, and the class takes what it
    needs besides for as many parameters as take 128 MiB.

    `state_dict` is that of the class, with the fp32 master weights of bf16 and fp16 parameters beside it; either loads
    the other's.

    Only what a class keeps in `state` of each parameter is carried from step to step. One that changes an option of its
    groups in `step`, or looks at several parameters at once, is not for this: each object of the class is given some
    parameters of one group, small ones together, in an order of its own; if the class draws random numbers, and in its
    first step, which shows that, in the order of torch. Hooks that torch calls for the steps of all optimizers are
    called for each of these objects, too.

    Raises `OptionError` for options it cannot use, for parameters that are spread over ranks, and for a class whose
    `step` needs a closure.
    """

    updates_on_host = True

    def __init__(self, params: ParamsT, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> None:
        check_params(params)
        check_class(optimizer_class, options)
        self._class, self._options = optimizer_class, options
        self._held: dict[Tensor, HeldTensors] = {}  # the tensors in `state`, where these are kept
        self._versions: dict[Tensor, tuple[weakref.ref[OffloadedParameter], int]] = {}  # as the last step left them
        self._unsettled: set[Tensor] = set()  # those whose weight and state may be of two steps
        self._draws: bool | None = None  # whether the class draws random numbers; None before the first step
        self._reads: bool | None = None  # whether it reads numbers of the device, likewise
        weight = nn.Parameter(torch.zeros(1, 1, device="cpu"))
        super().__init__(params, self._made_for([weight], {}).defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for torch; raises `OptionError` when its options or its parameters cannot be used."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            for parameter in group["params"]:
                check_whole(find_offloaded(parameter))
                self._made_for([nn.Parameter(torch.empty_like(parameter, device="meta"))], group)
        except OptionError:
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            unhook(parameter)  # an earlier optimizer with step_in_backward=True updates it no longer

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @RankStage("an optimizer's step")
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what `closure`, which is called first, returns.

        Raises `UsageError` for a sparse gradient, before anything is updated, and `BudgetError` when the host budget
        has no room for a parameter's state. Each parameter is updated then, or as it was, with the state that it had:
        that one and those not reached are as they were. After an error of the class itself so are all that this object
        of the class was given, but for those whose state stays on the device, which the class may have changed. Where
        there are such, or a copy failed, or an interrupt came as a parameter was written, the next call raises
        `UsageError`, as do `state_dict` and copies of the optimizer, up to `load_state_dict`.
        """
        self._check_settled()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        some = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        found = find_each(parameter for parameter, _ in some)
        todo = [Wanted(parameter, group, each) for (parameter, group), each in zip(some, found, strict=True)]
        for parameter, _, offloaded in todo:
            check_whole(offloaded)
            if not isinstance(parameter.grad, HostGradient) and parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"a gradient of size {tuple(parameter.shape)} is sparse; use Embedding(sparse=False).")
        devices = dict.fromkeys(wanted.parameter.device for wanted in todo)
        draws = RandomDraws(devices, [*self.param_groups, self._options])
        with ordinary_tensors():  # of the state, in any mode of the caller's
            reads = [
                self._update([wanted for wanted in todo if wanted.parameter.device == device], roomy_engine(device))
                for device in devices
            ]
        if todo:
            self._draws = bool(self._draws) or draws.any_since()
            self._reads = bool(self._reads) or any(reads)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as for torch.

        Raises `UsageError` when a step was interrupted, or failed, so that weight and state may be of two steps.
        """
        self._check_settled()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of this class or of torch's own; a master weight that is missing is the weight.

        Raises `OptionError` for a master weight of another size, and `ValueError` as torch does when the groups do not
        match.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        pairs = dict(zip(indices, parameters, strict=False))
        saved = {pairs[index]: dict(each) for index, each in state_dict["state"].items() if index in pairs}
        for parameter, each in saved.items():
            if MASTER in each and each[MASTER].shape != parameter.shape:
                raise OptionError(
                    f"the saved {MASTER} has size {tuple(each[MASTER].shape)}, its parameter {tuple(parameter.shape)}; "
                    "load the state of the same model."
                )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._held, self._versions, self._unsettled = {}, {}, set()
        for parameter, each in saved.items():
            self.state[parameter] = {name: widened(value) for name, value in each.items() if value is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Return what to copy or pickle; raises `UsageError` as `state_dict` does."""
        self._check_settled()
        return {**super().__getstate__(), "_class": self._class, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._held, self._versions, self._unsettled, self._draws, self._reads = {}, {}, set(), None, None

    def _made_for(self, parameters: list[nn.Parameter], group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an object of the class for some parameters; raises `OptionError` if it refuses them or its options."""
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        try:
            made = self._class([{**options, "params": parameters}], **self._options)
        except (RuntimeError, TypeError, ValueError) as error:
            name, said = self._class.__name__, str(error).rstrip(".")
            raise OptionError(f"{name} cannot be made with these options and parameters: {said}.") from error
        made.updates_on_host = True  # type: ignore[attr-defined]  # it may be given memory of an offloaded parameter
        return made

    def _update(self, todo: list[Wanted], engine: Engine) -> bool:
        """Update parameters of one device, until their copies are done; return whether the class read numbers of it."""
        stream = UpdateStream(engine, self, self._unsettled, reads_numbers=self._reads)
        in_order = self._draws is not False
        sized = [(not in_order and _is_here(wanted), wanted, self._work_bytes(wanted)) for wanted in todo]
        copied = cut_chunks([(wanted, nbytes) for apart, wanted, nbytes in sized if not apart], in_order=in_order)
        here = cut_chunks([(wanted, nbytes) for apart, wanted, nbytes in sized if apart])
        queue, rest = ChunkQueue(copied, self._prepared, stream), deque(here)
        stream.reads.work_meanwhile(queue.start_ahead)
        with stream.stepping():
            try:
                try:
                    while queue.moves:
                        if not queue.start():
                            self._finish(queue.take(), stream)
                        while 2 * len(rest) * len(copied) > len(here) * queue.moves:  # evenly: the links are busy then
                            self._update_here(rest.popleft(), stream)
                    while rest:
                        self._update_here(rest.popleft(), stream)
                finally:
                    stream.end()
            finally:
                stream.end()  # an interrupt may have come in the call before; after one more, readers end the step
        return stream.reads.any

    def _work_bytes(self, wanted: Wanted) -> int:
        """Return about how many bytes an update takes on the device: fp32 weight, its state, gradient, and weight."""
        # By the state itself, so that after a checkpoint is loaded they are those of a run that goes on.
        state_bytes = held_bytes(arrays_of(self.state.get(wanted.parameter, {})).values())
        fp32_bytes = 4 * wanted.parameter.numel()
        return max(state_bytes, fp32_bytes) + fp32_bytes + wanted.parameter.nbytes

    def _update_here(self, some: list[Wanted], stream: UpdateStream) -> None:
        """Update parameters whose states are on their device."""
        chunk = self._prepared(some)
        stream.start(chunk)
        self._finish(chunk, stream)

    def _prepared(self, some: list[Wanted]) -> Chunk:
        """Return the updates of parameters of one group, before anything is copied; states are where they belong."""
        updates = []
        for wanted in some:
            parameter, offloaded = wanted.parameter, wanted.offloaded
            if offloaded is not None:
                offloaded.wait_update()
                offloaded.evict()  # loaded by a module that ran by itself, whose backward is over
                if offloaded.on_device or offloaded.tier is Tier.NVME:  # a plan, or `summon`, keeps it there
                    offloaded.load()
                else:
                    offloaded.sync_host()
            self._ready(parameter, offloaded)
            fresh = self._is_fresh(parameter, offloaded)
            updates.append(StreamedUpdate(parameter, offloaded, self._held.get(parameter), fresh))
        return Chunk(some[0].group, updates)

    def _finish(self, chunk: Chunk, stream: UpdateStream) -> None:
        """Update parameters whose copies in have begun, and begin to copy out what came of it."""
        stream.arrive(chunk)
        weights = [nn.Parameter(update.master) for update in chunk.updates]
        for weight, update in zip(weights, chunk.updates, strict=True):
            weight.grad = update.change
        optimizer = self._made_for(weights, chunk.group)
        carried = [self._carried(update) for update in chunk.updates]
        for weight, state in zip(weights, carried, strict=True):
            if state:
                optimizer.state[weight] = dict(state)
        # The class changes in place what is on the device, here and nowhere else.
        self._unsettled.update(each.parameter for each in chunk.updates if each.changes_held)
        with stream.reads.next(len(weights)):
            optimizer.step()
        self._check_group(optimizer, chunk.group)
        done: list[Done] = []
        try:  # there may be no room for a state: those before it are updated, and nothing is written of the others
            for weight, update, before in zip(weights, chunk.updates, carried, strict=True):
                update.take_weight(weight)
                after = optimizer.state[weight]
                arrays = arrays_of(after)
                if update.parameter.dtype != torch.float32:
                    arrays[MASTER] = update.master
                held = update.held
                if held is None or not held.fits(arrays):
                    held = self._hold(update.parameter, update.offloaded, arrays)
                rest = {  # what is a copy already is nobody else's
                    name: value if value is before.get(name) else copy_of(value)
                    for name, value in after.items()
                    if name not in arrays
                }
                done.append(Done(update, held, arrays, rest))
        finally:
            self._keep(done, stream)
            for offloaded in (update.offloaded for update in chunk.updates if update.offloaded is not None):
                if offloaded.tier is Tier.NVME:  # else it went out by itself
                    offloaded.evict()

    def _carried(self, update: StreamedUpdate) -> dict[str, Any]:
        """Return what the class has of a parameter, for it to change."""
        before = self.state.get(update.parameter, {})
        return {
            name: update.arrays[name] if name in update.arrays else copy_of(each)
            for name, each in before.items()
            if name != MASTER
        }

    def _keep(self, done: list[Done], stream: UpdateStream) -> None:
        """Write what has come of updates to where it is kept."""
        departure = stream.depart(done)
        for each in done:
            parameter, offloaded = each.update.parameter, each.update.offloaded
            if each.held is not each.update.held:  # else that is what was told before the copies in
                self._held[parameter] = each.held
                self._tell(parameter, offloaded, each.held)
            before = self.state.get(parameter, {})
            rest = {name: renewed(before.get(name), value) for name, value in each.rest.items()}
            self.state[parameter] = {**rest, **each.held.tensors}
            if offloaded is not None:
                self._versions[parameter] = weakref.ref(offloaded), offloaded.version
        departure.kept = True

    def _check_settled(self) -> None:
        """Raise `UsageError` if there is a parameter whose weight and state may be of two steps."""
        if not self._unsettled:
            return
        sizes = ", ".join(str(tuple(each.shape)) for each in list(self._unsettled)[:3])
        raise UsageError(
            f"a step was interrupted, or failed, while it changed {len(self._unsettled)} parameters, of sizes {sizes}: "
            "their weights and states may be of two steps; go back to a checkpoint, by load_state_dict of the model "
            "and then of this optimizer."
        )

    def _check_group(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a step has changed an option: the object for the next ones would not know of it."""
        for name, value in optimizer.param_groups[0].items():
            before = group.get(name)
            if name in ("params", "param_names") or value is before:
                continue
            if isinstance(value, Tensor) or isinstance(before, Tensor) or value != before:
                raise UsageError(
                    f"{self._class.__name__} changes {name} in its step, which is for all parameters of a group; "
                    "StreamedOptimizer has it update some parameters at a time, and keeps only what it has of each."
                )

    def _place_state(self, parameter: Tensor) -> None:
        """Move a parameter's state to where it is to be now."""
        self._ready(parameter, find_offloaded(parameter))

    def _ready(self, parameter: Tensor, offloaded: OffloadedParameter | None) -> None:
        """Have the tensors of a parameter's state, if there are any, where they belong."""
        state, held = self.state.get(parameter), self._held.get(parameter)
        if not state:
            self._held.pop(parameter, None)
            return
        arrays = arrays_of(state)
        if held is None or held.place != _place_of(parameter, offloaded) or not is_held(parameter, held, arrays):
            held = self._hold(parameter, offloaded, arrays)
            for name, value in arrays.items():
                held.tensors[name].copy_(value)
            self._held[parameter] = held
            self.state[parameter] = {**state, **held.tensors}
        self._tell(parameter, offloaded, held)

    def _hold(
        self, parameter: Tensor, offloaded: OffloadedParameter | None, arrays: Mapping[str, Tensor]
    ) -> HeldTensors:
        """Return memory for these tensors of a parameter's state; raises `BudgetError` where there is none."""
        like = {name: laid_out(each, parameter) for name, each in arrays.items()}
        on_device = _place_of(parameter, offloaded) is Tier.DEVICE
        buffers = roomy_engine(parameter.device).object_buffers
        return HeldTensors(buffers, like, parameter.device if on_device else None)

    def _tell(self, parameter: Tensor, offloaded: OffloadedParameter | None, held: HeldTensors) -> None:
        """Let an offloaded parameter know of its state."""
        if offloaded is not None:
            offloaded.state_bytes = offloaded.host_state_bytes = held.nbytes
            if offloaded.optimizer_state is None or offloaded.optimizer_state() is not held:
                set_state(offloaded, held)
                offloaded.place_state = weakly(self._place_state, parameter)

    def _is_fresh(self, parameter: Tensor, offloaded: OffloadedParameter | None) -> bool:
        """Return whether the weight may have been set since the last step."""
        if offloaded is None:
            return True
        reference, version = self._versions.get(parameter, (None, -1))
        return reference is None or reference() is not offloaded or version != offloaded.version


def _place_of(parameter: Tensor, offloaded: OffloadedParameter | None) -> Tier:
    """Return where a parameter's state belongs: small ones' stays on the device, as does what plans leave there."""
    if offloaded is not None:
        return Tier.DEVICE if offloaded.updated_on_device else Tier.HOST
    return Tier.DEVICE if parameter.nbytes < LEAST_BYTES else Tier.HOST


def _is_here(wanted: Wanted) -> bool:
    """Return whether all that a parameter's update needs is on its device."""
    place = _place_of(wanted.parameter, wanted.offloaded)
    return place is Tier.DEVICE and not isinstance(wanted.parameter.grad, HostGradient)
