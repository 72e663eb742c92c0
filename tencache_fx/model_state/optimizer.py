"""An optimizer whose state is in host memory: the device holds weights and gradients only.

A step takes gradients out and weights in, piece by piece, beside the update: one pass of a kernel generated for the CPU
(bf16 gradient in, fp32 state updated, bf16 weight out; ZeRO-Offload, arXiv 2101.06840, does this with kernels of its
own, and casts apart from them). Of an offloaded parameter (`tencache_fx.offload`) the gradient is
there already, and the update runs by itself: `step` returns at once, and the next reader waits for that update only.
"""

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from tencache_fx import compat
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.model_state.device_updates import DeviceUpdate, update_on_device
from tencache_fx.model_state.group_options import GroupOptions
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer
from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.modules import engine_of, roomy_engine
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.optimizer_checks import check_group, check_params
from tencache_fx.model_state.optimizer_state import OptimizerState
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.staged_update import PIECE_BYTES, Piece, Round, open_round, work_on_host
from tencache_fx.model_state.step_hooks import check_last, check_node, hook, is_hooked_once, is_watched_in_graph
from tencache_fx.model_state.step_kernel import StateDtype, Step, find_rule
from tencache_fx.model_state.update import (
    ParameterUpdate,
    PieceUpdate,
    accumulates,
    dense_like,
    flat,
    gradient_on_device,
    gradient_on_host,
    read_later,
    run_piece,
    unhook,
    weakly,
)
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import RankStage
from tencache_fx.runtime.streams import Event
from tencache_fx.tensors import ordinary_tensors

_Rounds = list[tuple[Engine, Round, list[Tensor]]]


class OffloadedOptimizer(OptimizerState):
    """Any torch optimizer class that updates each element by itself, with fp32 master weights, all state on the host.

        OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    `options` are those of `optimizer_class`; they may differ by group. `params` are bf16, fp16 or fp32 parameters on
    one or more cuda or cpu devices, as for torch. A parameter that is changed from outside between two steps, by
    loading weights for instance, is taken as it is then. `state_dict` is the class's own with the master weights beside
    what that has; either loads the other's.

    `state_dtype` is that of the state besides the master: float32, bfloat16 (rounded stochastically), or "8bit", in
    blocks (`eight_bit_form`).

    `step_in_backward` updates an offloaded parameter as soon as its gradient is there, once for each backward, with
    the learning rate of that moment, and leaves its `.grad` None: nothing that looks at all gradients first, such as
    clipping by their norm, or that adds up several backwards, can be had with it, nor can a reducer of gradients, such
    as DistributedDataParallel: the forward, or else the backward, then raises `UsageError`. Other parameters, small
    ones and a frozen model's adapters, wait for `step` as ever. Parameters do not keep an optimizer.

    Raises `OptionError` for options it cannot use, and for a class that does more than arithmetic on single elements.
    What the class does is traced: its `step` runs on a few elements (see `step_tracing`).
    """

    updates_on_host = True

    _in_backward = False  # nor does a copy

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        step_in_backward: bool = False,
        state_dtype: StateDtype = torch.float32,
        **options: Any,
    ) -> None:
        self._in_backward = step_in_backward
        check_params(params)
        rule, defaults = find_rule(optimizer_class, state_dtype, options)
        super().__init__(params, rule, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for torch; raises `OptionError` when its options or its parameters cannot be used."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            self._place(group)
        except OptionError:
            self.param_groups.pop()
            raise
        taken_over = sum(map(unhook, group["params"]))
        for parameter in group["params"]:
            if self._in_backward and parameter.requires_grad:
                hook(parameter, self._step_now)
        if taken_over:
            warnings.warn(
                f"this optimizer takes over {taken_over} parameters: an earlier one with step_in_backward=True, which "
                "is still alive, updates them no longer.",
                stacklevel=2,
            )

    @overload
    def step(self, closure: None = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @RankStage("an optimizer's step")
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return what `closure`, which is called first, returns.

        Returns when the host is done; the device goes on with whatever comes next once the last weight is in. Updates
        of offloaded parameters are only begun; the error of one is raised by the next reader of its parameter.
        Raises, before anything is updated, `UsageError` for a sparse gradient, and `BudgetError` when the host budget
        has no room for state, for gradients to be offloaded, or for a few buffers of 32 MiB at most: then it can be
        raised by `tencache_fx.configure`, and the step taken again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._group_of = {}  # groups may have been replaced
        for parameter in todo:
            if parameter.grad.is_sparse:
                raise UsageError(f"a gradient of size {tuple(parameter.shape)} is sparse; use Embedding(sparse=False).")
        with ordinary_tensors(), self._same_options():  # of the state, in any mode of the caller's
            found = {p: find_offloaded(p) for p in todo}
            self._make_states(found)
            here = {p: each for p, each in found.items() if self._is_updated_here(p, each)}
            on_host = deque(
                self._prepare(p, each, gradient_on_host(p, p.grad))
                for p, each in found.items()
                if each is not None and p not in here and p.grad is not None
            )
            large = [p for p, each in found.items() if each is None and p not in here]
            with self._open_rounds(large) as rounds:
                updated: list[Tensor] = []
                on_device = [self._device_update(p, offloaded, p.grad, updated) for p, offloaded in here.items()]
                # The threads that do these take turns with this one from here on, so what can be done before is done.
                while on_host:  # none is kept, nor its gradient, while others are updated
                    on_host.popleft()()
                for parameter in (p for p in self._urgency if p.grad is None):
                    if (frozen := find_offloaded(parameter)) is not None:
                        frozen.evict()
                self._update_now(on_device, rounds, updated)
        self._group_of = {}
        return loss

    @contextlib.contextmanager
    def _same_options(self) -> Iterator[None]:
        """Take the options of groups as they are now for as long as this lasts: their texts are made once."""
        taken = [(GroupOptions.of(group), group["params"]) for group in self.param_groups]
        self._taken = {parameter: options for options, parameters in taken for parameter in parameters}
        try:
            yield
        finally:
            self._taken, self._nexts = {}, {}

    def _make_states(self, todo: Mapping[Tensor, OffloadedParameter | None]) -> None:
        """Make the state of those that have none, before anything is updated: there may be no room for it."""
        for parameter, offloaded in todo.items():
            if parameter not in self._states:
                if offloaded is not None:
                    offloaded.wait_update()
                self._ready(parameter, offloaded)

    def _is_updated_here(self, parameter: Tensor, offloaded: OffloadedParameter | None) -> bool:
        """Return whether all that a parameter's update needs is on its device."""
        if offloaded is not None:
            return offloaded.updated_on_device
        return self._places.of(parameter, None, None) is Tier.DEVICE

    @contextlib.contextmanager
    def _open_rounds(self, large: Collection[Tensor]) -> Iterator[_Rounds]:
        """Acquire the buffers for parameters that are not offloaded, but whose state is, for each device."""
        with contextlib.ExitStack() as undo:
            rounds: _Rounds = []
            for device in dict.fromkeys(p.device for p in large):
                here = [p for p in large if p.device == device]
                engine = roomy_engine(device)
                opened = undo.enter_context(open_round(engine, [p.nbytes for p in here]))
                rounds.append((engine, opened, here))
            yield rounds

    def _update_now(self, on_device: Sequence[DeviceUpdate], rounds: _Rounds, updated: list[Tensor]) -> None:
        """Update parameters whose state is on their device, and then those of the rounds; returns when done.

        The parameters are added to `updated`.
        """
        try:
            update_on_device(on_device)
            for engine, opened, some in rounds:
                with compat.any_number_of_compilations():  # for dtypes, lengths of 1, numbers of threads, ...
                    work_on_host(engine, opened, self._pieces(some, updated), run_piece)
        except BaseException as error:
            count = len(on_device) + sum(len(some) for *_, some in rounds)
            error.add_note(
                f"Of {count} parameters {len(updated)} have been updated, those on the device first, and their state "
                "counts one step more; the next one may be updated in part, the others are as they were."
            )
            raise

    @torch.no_grad()
    def _step_now(self, parameter: Tensor) -> None:
        """Update a parameter whose gradient has just come, if it is offloaded, and its update has not begun already."""
        offloaded = find_offloaded(parameter)
        if offloaded is None or parameter.grad is None:  # another optimizer may have taken it
            return
        if not self._is_in_a_group(parameter):  # any more
            return
        check_last(parameter, offloaded.name)
        if offloaded.gradient.begun_by is None:
            check_node(parameter, offloaded.name)
        offloaded.gradient.update_now = weakly(self._step_early, parameter)
        offloaded.gradient.end_started()
        gradient, begun = parameter.grad, offloaded.gradient.begun_by
        parameter.grad = offloaded.gradient.begun_by = None
        assert gradient is not None
        if begun is not None:
            engine = engine_of(parameter.device)
            engine.stats.add(h2d_bytes=offloaded.set_readers(engine.streams.record_compute()))
        if begun is None:
            if offloaded.updated_on_device:
                update_on_device([self._device_update(parameter, offloaded, gradient, [])])
            else:
                self._prepare(parameter, offloaded, gradient_on_host(parameter, gradient))()
        elif not isinstance(gradient, HostGradient) or gradient.buffer is not begun:
            raise UsageError(
                f"{offloaded.name} was updated by a gradient that is a part of it only: it is read in a compiled "
                "region and where nothing is known of it; leave step_in_backward out, or read it in modules only."
            )

    @torch.no_grad()
    def _step_early(self, parameter: Tensor, buffer: HostGradientBuffer) -> None:
        """Update a parameter by a gradient that has just been offloaded, if nobody else wants it first."""
        if parameter.grad is not None or not is_hooked_once(parameter) or not accumulates(parameter):
            return
        if not self._is_in_a_group(parameter) or is_watched_in_graph(parameter):
            return
        if (offloaded := find_offloaded(parameter)) is not None and not offloaded.updated_on_device:
            self._prepare_update(parameter, offloaded, buffer, None)()
            offloaded.gradient.begun_by = buffer

    def _prepare(self, parameter: Tensor, offloaded: OffloadedParameter, gradient: HostGradient) -> Callable[[], None]:
        """Return what begins the update of an offloaded parameter in host memory; it has no later readers."""
        readers = engine_of(parameter.device).streams.record_compute()
        begin = self._prepare_update(parameter, offloaded, gradient.buffer, readers)

        def begin_last() -> None:
            begin()
            offloaded.gradient.end_started()

        return begin_last

    def _device_update(
        self,
        parameter: Tensor,
        offloaded: OffloadedParameter | None,
        gradient: Tensor | None,
        updated: list[Tensor],
    ) -> DeviceUpdate:
        """Return the update of a parameter whose state is on its device; it is added to `updated` once that is done."""
        assert gradient is not None
        if offloaded is not None:
            offloaded.load()
        self._ready(parameter, offloaded)
        held, step = self._states[parameter], self._next(parameter)
        assert isinstance(held, State)
        stats = engine_of(parameter.device).stats

        def done() -> None:
            self._count(parameter, step)
            if offloaded is None:
                increment_version(parameter)
            else:
                self._take_weight(parameter, offloaded)
                offloaded.mark_device_newer()
                offloaded.count_update(self)
                offloaded.gradient.end_started()
            stats.add(updates=1, device_updates=1)
            updated.append(parameter)

        return DeviceUpdate(
            change=lambda: flat(dense_like(parameter, gradient_on_device(gradient).to(parameter.dtype))),
            weight=flat(parameter.data),
            state=held,
            step=step,
            fresh=offloaded is None or self._is_fresh(parameter, offloaded),
            done=done,
        )

    def _prepare_update(
        self, parameter: Tensor, offloaded: OffloadedParameter, buffer: HostGradientBuffer, readers: Event | None
    ) -> Callable[[], None]:
        """Return what begins a parameter's update by a gradient in host memory, once all is done that may fail.

        Nothing reads the parameter on the device behind `readers`.
        """
        engine = engine_of(parameter.device)
        if buffer.changes:
            buffer.host()
        factor = None if buffer.factor is None else read_later(engine, buffer.factor)
        offloaded.wait_update()
        offloaded.evict()  # loaded by a module that ran by itself, whose backward is over
        self._ready(parameter, offloaded)
        held, step = self._states[parameter], self._next(parameter)
        update = ParameterUpdate(
            offloaded=offloaded,
            buffer=buffer,
            state=held,
            step=step,
            factor=factor,
            fresh=self._is_fresh(parameter, offloaded),
            count=partial(self._count, parameter, step),
            stats=engine.stats,
        )
        updates = parameters_of(engine).updates
        update.prepare(updates)
        offloaded.sync_host()

        def submit() -> "Future[None]":
            on_disk = held.place is Tier.NVME
            return updates.submit(update, self._urgency[parameter], lambda: buffer.has_landed, on_disk=on_disk)

        def begin() -> None:
            self._take_weight(parameter, offloaded)
            buffer.note_reader(offloaded.begin_update(submit, readers))
            offloaded.count_update(self)

        return begin

    def _pieces(self, todo: Iterable[Tensor], updated: list[Tensor]) -> Iterator[Piece[PieceUpdate]]:
        """Yield the pieces, parameter by parameter; `updated` has the parameters whose last piece is done."""
        for parameter in todo:
            self._ready(parameter, None)
            assert parameter.grad is not None
            gradient = flat(dense_like(parameter, parameter.grad.to(parameter.dtype)))
            weight = flat(parameter.data)  # whose version is its own: pieces arrive whenever they do
            held = self._states[parameter]
            assert isinstance(held, State)
            written = flat(self._written[parameter]) if held.weight is None else held.weight
            step, most = self._next(parameter), PIECE_BYTES // parameter.element_size()
            count = partial(self._count_all, parameter, step, updated)
            if not weight.numel():
                count()
            for start in range(0, weight.numel(), most):
                part = slice(start, start + most)
                done = count if part.stop >= weight.numel() else None
                update = PieceUpdate(state=(written[part], *held.piece(part)), step=step, done=done)
                yield Piece(sources=(gradient[part], weight[part]), target=weight[part], about=update)

    def _count_all(self, parameter: Tensor, step: Step, updated: list[Tensor]) -> None:
        self._count(parameter, step)
        increment_version(parameter)
        updated.append(parameter)
