"""Decides whether a region is planned by itself or with the others of its step, and changes that where it is wrong.

A region that is a whole model is best planned by itself: storages may be away within one graph. Regions that run
between each other's forward and backward share the budget, and are planned together.

With `scope="auto"` a region begins with a guess. From then on the runs tell. A forward that begins while another one
waits for its backward shows that a step has several. A step planned as a whole that has one region and one call shows
that this region is alone; it is planned by itself then, once at most.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_fx import compat
from tencache_fx.hardware.device_memory import held_bytes
from tencache_fx.hardware.memory_gauge import Storages, counts_all
from tencache_fx.kept_code import Phase
from tencache_fx.model_state.parameter_store import find_all_offloaded, total_offloaded_bytes
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan, keep_boxed
from tencache_fx.region.dynamic_shapes import Sizes
from tencache_fx.region.external_memory import ExternalMemory
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.source import RegionSource
from tencache_fx.region.step_monitor import StepMonitor
from tencache_fx.tensors import last_made, storages_on, tensors_in

log = logging.getLogger("tencache_fx")

_SMALL = 4  # a region whose inputs are less than one part in so many of what the device holds is not a whole model
_LIBRARIES_BYTES = 128 << 20  # what cuBLAS and the like may hold on a device beside any model
_EXCUSED = 3  # turns in a row in which a region may run beside more than it is planned for
_FORWARDS = 64  # remembered, if so many do not wait any more
_TURNS = 2  # a forward that still waits when its region has begun so many times after a backward is not waited for


@dataclass(slots=True, eq=False)
class _Forward:
    """A forward that has ended, and whose backward has not begun; `residual` is something that only that keeps."""

    thread: int
    residual: StorageWeakRef | None
    inputs: Storages = frozenset()
    turns: int = 0

    @property
    def waits(self) -> bool:
        return self.turns <= _TURNS and self.residual is not None and not self.residual.expired()


class Scope:
    """The monitor of one region's scope; `by_step` says whether its next compilation is planned with the others'."""

    def __init__(self, source: RegionSource, inputs: Sequence[object], step: StepMonitor) -> None:
        self._source, self._step = source, step
        self._planned = source.options.device_budget is not None
        self._watches = self._planned and source.options.scope == "auto"
        self._forwards: list[_Forward] = []
        self._backwards = 0
        self._joined = self._was_alone = False
        self._left_bytes: int | None = None  # the budget that its step was over when it left
        self._own_bytes = 0  # that a plan by itself takes
        self._excused, self._excused_turn = 0, -2
        self.by_step = self._planned and source.options.scope == "step"
        if self._watches:
            self.by_step = self._seems_part(inputs)

    @property
    def optional(self) -> bool:
        """Whether planning again is only for speed: a region joins the others of its step for the budget's sake."""
        return not (self.by_step and self._joined)

    def waits(self, thread: int) -> bool:
        """Return whether a forward of this thread waits for its backward."""
        return any(each.thread == thread and each.waits for each in self._forwards)

    def meet(self, thread: int) -> None:
        """Note that a forward begins in this thread, be it of this region or of another one."""
        self._joined = self._joined or self.waits(thread)

    def plan_alone(self) -> bool:
        """Have the region planned by itself from now on, for it cannot be planned with others; return if that is new.

        Where the scope was asked for, it stays.
        """
        changes = self._watches and self.by_step
        if self._watches:
            self.by_step = self._watches = False
        if changes:
            self._left_bytes = self._step.device_budget
        return changes

    @property
    def ran_backward(self) -> bool:
        """Whether a backward has run since the region was reviewed last."""
        return self._backwards > 0

    @property
    def external_bytes(self) -> int | None:
        """The external memory that a region which has left its step is planned for; None where an allocator counts."""
        external = self._external
        return None if external is None else external.most_bytes(self._source.index)

    @property
    def last_external_bytes(self) -> int | None:
        """That of its last turn."""
        external = self._external
        return None if external is None else external.last_bytes(self._source.index)

    def collect_garbage(self) -> None:
        """Have garbage collected, and forget it where it counted as external memory."""
        if (external := self._external) is not None:
            external.collect_garbage()

    def forget_turn_before(self) -> None:
        """Plan for the external memory of the last turn alone."""
        if (external := self._external) is not None:
            external.forget_turn_before(self._source.index)

    def excuses(self) -> bool:
        """Return whether the region may run although it does not fit beside its external memory.

        It may for three turns in a row: that memory, such as an output that was kept, may be gone in the next. After a
        refusal it is measured anew.
        """
        external = self._external
        assert external is not None
        turn = external.turn(self._source.index)
        if turn - self._excused_turn > 1:
            self._excused = 0
        self._excused += turn != self._excused_turn
        self._excused_turn = turn
        if self._excused <= _EXCUSED:
            return True
        external.forget((self._source.index,))
        self._excused, self._excused_turn = 0, -2
        return False

    @property
    def is_excused(self) -> bool:
        """Whether it was allowed to run over its budget in this turn: what it sees beside it in a turn only grows."""
        external = self._external
        return external is not None and self._excused_turn == external.turn(self._source.index)

    @property
    def _external(self) -> ExternalMemory | None:
        return None if self._left_bytes is None else self._step.external

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, the region's forward or backward, watched; boxed if `run` is."""
        if not self._planned or phase == "inference":
            return run

        external = None if written.recorder is not None else self._external

        def watched_run(*args: Any) -> Any:
            forward = None
            if phase == "backward":
                waiting = [each for each in self._forwards if each.waits]
                forward, self._forwards = waiting[-1] if waiting else None, waiting[:-1]
                self._backwards += 1
            elif compat.in_backward():  # of a checkpoint; `review` is not asked there
                self._meet_others()
            inputs: Storages = frozenset()
            if external is not None:
                begins_turn = phase == "forward" and not any(each.waits for each in self._forwards)
                inputs = self._show(external, tensors_in(args), forward, begins_turn=begins_turn)
            given = {storage._cdata for storage in storages_on(self._source.device, args)} if phase == "forward" else ()
            results = run(*args)
            if external is not None:
                external.end_alone(tensors_in(results))
            if phase == "backward":
                return results
            made = last_made(self._source.device, results, given)
            residual = None if made is None else StorageWeakRef(made)
            if len(self._forwards) >= _FORWARDS:  # no backward comes
                self._forwards = [each for each in self._forwards if each.waits]
            self._forwards.append(_Forward(threading.get_ident(), residual, inputs))
            return results

        return keep_boxed(run, watched_run)

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return the reason why the region has to be planned again, if the runs show that its scope is wrong."""
        if not torch.is_grad_enabled():
            return current
        if self._backwards:
            self._backwards = 0
            for each in self._forwards:
                each.turns += 1
            self._forwards = [each for each in self._forwards if each.waits]
        self._meet_others()
        if self._left_bytes is not None and (budget := self._step.device_budget) != self._left_bytes:
            self.by_step, self._watches = True, budget is None or budget > self._left_bytes
            if not self._watches:  # it was compiled for more, and can only be planned again with its step
                self._step.note_stuck()
            return "the budget of its step is another one"
        if not self._watches:
            return current
        if not self.by_step and self._joined:
            self.by_step = True
            return "other forwards run between its forward and its backward"
        if self.by_step and not self._was_alone and self._step.is_alone:
            self.by_step, self._was_alone, self._joined = False, True, False
            return "it is the only region of its step"
        return current

    def leaves_step(self) -> bool:
        """Return whether the region is to be planned by itself, where storages may be away within a graph, to fit."""
        if not (self._watches and self.by_step and self._step.is_too_large):
            return False
        budget, compiled_for = self._step.device_budget, self._source.options.device_budget
        if budget is not None and compiled_for is not None and budget < compiled_for:
            self._step.note_stuck()  # by itself it would be planned for what it was compiled for
            return False
        return self.plan_alone()

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Note what a plan by itself takes, or that it is planned with its step again."""
        if request.by_step:
            self._left_bytes = None
        if (record := compiled.record) is not None and not request.by_step:
            self._own_bytes = record.plan.forecast.peak_bytes - record.problem.external_bytes

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Go on in the scope that it was compiled in, for good."""
        self.by_step, self._watches = current.swap_region is not None, False
        if self._left_bytes is not None:
            self._left_bytes = None if self.by_step else self._step.device_budget
        elif self._joined and not self.by_step and not counts_all(self._source.device):
            log.warning(
                "region %d is planned as if it ran alone: beside the others of its step, the device may hold more than "
                "device_budget.",
                self._source.index,
            )
        return current

    def _meet_others(self) -> None:
        for scope in REGIONS.scopes(self._source.device):
            if not scope.by_step:
                scope.meet(threading.get_ident())

    def _show(
        self, external: ExternalMemory, tensors: Sequence[Tensor], forward: _Forward | None, *, begins_turn: bool
    ) -> Storages:
        """Tell the others of the step that a graph of a region that has left it begins; return its inputs."""
        limit = self._source.options.device_budget
        assert limit is not None
        return external.begin_alone(
            self._source.index,
            tensors,
            frozenset() if forward is None else forward.inputs,
            own_bytes=self._own_bytes,
            limit_bytes=limit,
            begins_turn=begins_turn,
        )

    def _seems_part(self, inputs: Sequence[object]) -> bool:
        """Return whether other regions are likely to run between its forward and its backward."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if not torch.is_grad_enabled() or not any(value.requires_grad for value in tensors):
            return False
        device, thread = self._source.device, threading.get_ident()
        if self._source.breaks_off or any(scope.waits(thread) for scope in REGIONS.scopes(device)):
            return True
        given = {storage._cdata: storage.nbytes() for storage in storages_on(device, tensors)}
        # Offloaded parameters count as if they were there.
        offloaded_bytes = sum(each.nbytes for each in find_all_offloaded(inputs, device).values())
        all_bytes = held_bytes(device) - _LIBRARIES_BYTES + total_offloaded_bytes(device)
        return (sum(given.values()) + offloaded_bytes) * _SMALL < all_bytes
