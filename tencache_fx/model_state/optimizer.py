"""An optimizer whose state is in host memory: the device holds weights and gradients only.

A step takes gradients out and weights in, piece by piece, beside the update: one pass of a kernel generated for the CPU
(bf16 gradient in, fp32 state updated, bf16 weight out; ZeRO-Offload, arXiv 2101.06840, does this with kernels of its
own, and casts apart from them). Of an offloaded parameter (`tencache_fx.offload`) the gradient is
there already, and the update runs by itself: `step` returns at once, and the next reader waits for that update only.
"""

import contextlib
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from tencache_fx import compat
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.model_state.device_updates import DeviceUpdate, update_on_device
from tencache_fx.model_state.group_rule import GroupRule, KindRule
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer
from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.modules import engine_of, roomy_engine
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.optimizer_checks import check_group, check_params
from tencache_fx.model_state.optimizer_state import OptimizerState, count_steps
from tencache_fx.model_state.parameter_store import find_each, find_offloaded
from tencache_fx.model_state.staged_update import PIECE_BYTES, Piece, Round, open_round, work_on_host
from tencache_fx.model_state.step_hooks import check_last, check_node, hook, is_hooked_once, is_watched_in_graph
from tencache_fx.model_state.step_kernel import StateDtype, find_rule
from tencache_fx.model_state.update import (
    ParameterUpdate,
    PieceUpdate,
    SharedByUpdates,
    accumulates,
    dense_like,
    flat,
    gradient_on_host,
    run_piece,
    unhook,
    weakly,
)
from tencache_fx.model_state.update_protocol import Submit
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import RankStage
from tencache_fx.runtime.streams import Event
from tencache_fx.tensors import ordinary_tensors


@dataclass(slots=True, eq=False)
class _Wanted:
    """A parameter that is to be updated by a `gradient`, by the `rule` of its group; its record if it is offloaded.

    The gradient of an update that begins in the backward is not here yet.
    """

    parameter: Tensor
    gradient: Tensor | None
    offloaded: OffloadedParameter | None
    rule: KindRule


_Rounds = list[tuple[Engine, Round, list[_Wanted]]]


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        self._group_of = {}  # groups may have been replaced
        with ordinary_tensors():  # of the state, in any mode of the caller's
            self._make_states(todo := self._wanted())
            here = [each for each in todo if self._is_updated_here(each)]
            away = [each for each in todo if each.offloaded is not None and not each.offloaded.updated_on_device]
            large = [each for each in todo if each.offloaded is None and not self._is_updated_here(each)]
            shared = {device: SharedByUpdates(engine_of(device)) for device in {each.parameter.device for each in away}}
            on_host = deque(self._prepare_last(each, shared[each.parameter.device]) for each in away)
            with self._open_rounds(large) as rounds:
                updated: list[Tensor] = []
                on_device = [self._device_update(each) for each in here]
                # The threads that do these take turns with this one from here on, so what can be done before is done.
                self._begin_last(on_host)
                for frozen in find_each([p for p in self._urgency if p.grad is None]):
                    if frozen is not None:
                        frozen.evict()
                self._update_now(on_device, rounds, updated)
        return loss

    def _wanted(self) -> list[_Wanted]:
        """Return the parameters that have a gradient; raises `UsageError` for a sparse one."""
        rules: dict[Tensor, KindRule] = {}
        for group in self.param_groups:
            rule = GroupRule(self._rule, group)
            rules.update((parameter, rule.of(parameter)) for parameter in group["params"] if parameter.grad is not None)
        for parameter in rules:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(f"a gradient of size {tuple(parameter.shape)} is sparse; use Embedding(sparse=False).")
        return [
            _Wanted(parameter, gradient, offloaded, rule)
            for (parameter, rule), offloaded in zip(rules.items(), find_each(rules), strict=True)
            if (gradient := parameter.grad) is not None
        ]

    def _make_states(self, todo: Iterable[_Wanted]) -> None:
        """Make the state of those that have none, before anything is updated: there may be no room for it."""
        for each in todo:
            if each.parameter not in self._states:
                if each.offloaded is not None:
                    each.offloaded.wait_update()
                self._ready(each.parameter, each.offloaded, each.rule)

    def _is_updated_here(self, wanted: _Wanted) -> bool:
        """Return whether all that a parameter's update needs is on its device."""
        if wanted.offloaded is not None:
            return wanted.offloaded.updated_on_device
        return self._places.of(wanted.parameter, None, None) is Tier.DEVICE

    @contextlib.contextmanager
    def _open_rounds(self, large: Collection[_Wanted]) -> Iterator[_Rounds]:
        """Acquire the buffers for parameters that are not offloaded, but whose state is, for each device."""
        with contextlib.ExitStack() as undo:
            rounds: _Rounds = []
            for device in dict.fromkeys(each.parameter.device for each in large):
                here = [each for each in large if each.parameter.device == device]
                engine = roomy_engine(device)
                opened = undo.enter_context(open_round(engine, [each.parameter.nbytes for each in here]))
                rounds.append((engine, opened, here))
            yield rounds

    def _update_now(self, on_device: Sequence[DeviceUpdate], rounds: _Rounds, updated: list[Tensor]) -> None:
        """Update parameters whose state is on their device, and then those of the rounds; returns when done.

        The parameters are added to `updated`.
        """
        try:
            self._update_here(on_device, updated)
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
            wanted = _Wanted(parameter, gradient, offloaded, self._rule_of(parameter))
            if offloaded.updated_on_device:
                self._update_here([self._device_update(wanted)], [])
            else:
                shared = SharedByUpdates(engine_of(parameter.device))
                self._begin_last(deque([self._prepare_last(wanted, shared)]))
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
            wanted = _Wanted(parameter, None, offloaded, self._rule_of(parameter))
            shared = SharedByUpdates(engine_of(parameter.device))
            update = self._prepare_update(wanted, buffer, shared)
            if update.scaling is not None:
                shared.send()
            offloaded.gradient.begun_by = buffer  # first: an interrupt ends this backward, and the next one forgets it
            self._begin_update(update, shared.updates.submit, None)

    def _device_update(self, wanted: _Wanted) -> DeviceUpdate:
        """Return the update of a parameter whose state is on its device."""
        parameter, offloaded, gradient = wanted.parameter, wanted.offloaded, wanted.gradient
        assert gradient is not None
        if offloaded is not None:
            offloaded.load()
        held, entry = self._ready(parameter, offloaded, wanted.rule)
        assert isinstance(held, State)
        return DeviceUpdate(
            parameter=parameter,
            gradient=gradient,
            offloaded=offloaded,
            state=held,
            entry=entry,
            step=wanted.rule.next(held, entry),
            weight=flat(parameter.data),
            fresh=offloaded is None or self._is_fresh(parameter, offloaded),
        )

    def _update_here(self, updates: Iterable[DeviceUpdate], updated: list[Tensor]) -> None:
        """Update parameters whose state is on their device; those for which that has been issued go to `updated`."""
        issued: list[DeviceUpdate] = []
        try:
            update_on_device(updates, issued)
        finally:
            for each in issued:
                if (offloaded := each.offloaded) is not None:
                    self._take_weight(each.parameter, offloaded)
                    offloaded.mark_device_newer()
                    offloaded.count_update(self)
                    offloaded.gradient.end_started()
            count_steps((each.state, each.entry, each.step) for each in issued)
            increment_version([each.parameter for each in issued if each.offloaded is None])
            for device, count in Counter(each.parameter.device for each in issued).items():
                engine_of(device).stats.add(updates=count, device_updates=count)
            updated += [each.parameter for each in issued]

    def _prepare_last(self, wanted: _Wanted, shared: SharedByUpdates) -> ParameterUpdate:
        """Return an offloaded parameter's update by all of its gradient, once all is done that may fail."""
        assert wanted.gradient is not None
        return self._prepare_update(wanted, gradient_on_host(wanted.parameter, wanted.gradient).buffer, shared)

    def _prepare_update(self, wanted: _Wanted, buffer: HostGradientBuffer, shared: SharedByUpdates) -> ParameterUpdate:
        """Return an offloaded parameter's update by a gradient in host memory, once all is done that may fail."""
        parameter, offloaded = wanted.parameter, wanted.offloaded
        assert offloaded is not None
        if buffer.changes:
            buffer.host()
        scaling = shared.scaling(buffer.factor)
        offloaded.wait_update()
        offloaded.evict()  # loaded by a module that ran by itself, whose backward is over
        held, entry = self._ready(parameter, offloaded, wanted.rule)
        step = wanted.rule.next(held, entry)
        update = ParameterUpdate(
            parameter=parameter,
            offloaded=offloaded,
            buffer=buffer,
            state=held,
            step=step,
            scaling=scaling,
            fresh=self._is_fresh(parameter, offloaded),
            count=partial(count_steps, [(held, entry, step)]),
            shared=shared,
        )
        update.prepare()
        offloaded.sync_host()
        return update

    def _begin_last(self, updates: deque[ParameterUpdate]) -> None:
        """Begin updates in host memory of parameters that have no later readers; all of them are taken from `updates`.

        One event of a device is behind the readers of each: it is recorded once all of them are prepared.
        """
        with contextlib.ExitStack() as together:
            begins: dict[SharedByUpdates, tuple[Submit, Event]] = {}
            for shared in dict.fromkeys(update.shared for update in updates):
                submit = together.enter_context(shared.updates.together())
                begins[shared] = submit, shared.send()
            while updates:  # none is kept, nor its gradient, while others are updated
                self._begin_update(updates[0], *begins[updates[0].shared])
                updates.popleft().offloaded.gradient.end_started()

    def _begin_update(self, update: ParameterUpdate, submit: Submit, readers: Event | None) -> None:
        """Begin a parameter's update; nothing reads the parameter on the device behind `readers`."""
        parameter, offloaded = update.parameter, update.offloaded
        urgency, on_disk = self._urgency[parameter], update.state.place is Tier.NVME
        submit(update, urgency, update.can_begin, on_disk=on_disk, note=partial(update.note, readers))
        self._take_weight(parameter, offloaded)  # behind an interrupt before this the master is compared with it
        offloaded.count_update(self)

    def _pieces(self, todo: Iterable[_Wanted], updated: list[Tensor]) -> Iterator[Piece[PieceUpdate]]:
        """Yield the pieces, parameter by parameter; `updated` has the parameters whose last piece is done."""
        for wanted in todo:
            parameter = wanted.parameter
            held, entry = self._ready(parameter, None, wanted.rule)
            assert parameter.grad is not None
            gradient = flat(dense_like(parameter, parameter.grad.to(parameter.dtype)))
            weight = flat(parameter.data)  # whose version is its own: pieces arrive whenever they do
            assert isinstance(held, State)
            written = flat(self._written[parameter]) if held.weight is None else held.weight
            step, most = wanted.rule.next(held, entry), PIECE_BYTES // parameter.element_size()
            count = partial(_count_there, parameter, partial(count_steps, [(held, entry, step)]), updated)
            if not weight.numel():
                count()
            for start in range(0, weight.numel(), most):
                part = slice(start, start + most)
                done = count if part.stop >= weight.numel() else None
                update = PieceUpdate(state=(written[part], *held.piece(part)), step=step, done=done)
                yield Piece(sources=(gradient[part], weight[part]), target=weight[part], about=update)


def _count_there(parameter: Tensor, count: Callable[[], None], updated: list[Tensor]) -> None:
    count()
    increment_version(parameter)
    updated.append(parameter)
