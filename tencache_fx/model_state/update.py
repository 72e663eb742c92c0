"""One offloaded parameter's update: on the host, or streamed through the device, with the same bits either way."""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tencache_fx.model_state.backing import HostWrite
from tencache_fx.model_state.disk_state import DiskState
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer
from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.modules import engine_of
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_ops import send_to_host
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.step_hooks import step_hooks
from tencache_fx.model_state.step_kernel import Step
from tencache_fx.model_state.stored_form import parts_of
from tencache_fx.model_state.update_room import Begun, Room
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event

_CPU = torch.device("cpu")
MASTER_BYTES = 12
"""Taken to compare an element with its master: by three fp32 tensors at most, one of them of the result."""

_MASTERS = 1 << 22  # elements looked at at once: in streamed updates what that takes is in no plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceUpdate:
    """What a piece's update needs: its slice of the state, its parameter's step, and what to do behind it."""

    state: tuple[Tensor, ...]
    step: Step
    done: Callable[[], None] | None


class SharedByUpdates:
    """What updates share that are prepared together: the engine, the threads, and the factors of their gradients.

    All factors are copied to the host at once, by `send`: a copy of each would take the host longer than its update.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.updates = engine, parameters_of(engine).updates
        self._factors: list[Tensor] = []
        self._copied: tuple[Tensor, Event] | None = None
        self._scaled: dict[tuple[Tensor, float], Tensor] = {}

    def scaling(self, factor: Tensor | None) -> "Scaling | None":
        """Return what scales a step's numbers for a gradient with this factor, once all are sent, in any thread."""
        if factor is None:
            return None
        self._factors.append(factor)
        return partial(self._scale, len(self._factors) - 1)

    def send(self) -> Event:
        """Send the factors; return an event that is behind all that the caller's compute stream has been given."""
        device, factors = self.engine.device, self._factors
        if not factors:
            return self.engine.streams.record_compute()
        values = torch.empty(len(factors), dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
        values.copy_(torch.stack([factor.to(device) for factor in factors]), non_blocking=True)
        self._copied = values, self.engine.streams.record_compute()
        return self._copied[1]

    def _scale(self, place: int, numbers: Tensor) -> Tensor:
        """Return numbers for one factor: the same tensor for equal ones, but for two threads that ask at once."""
        assert self._copied is not None, "they are sent before an update begins"
        values, event = self._copied
        event.synchronize()
        key = numbers, values[place].item()
        if key not in self._scaled:
            self._scaled[key] = torch.cat([numbers[:1] * key[1], numbers[1:]])
        return self._scaled[key]


Scaling = Callable[[Tensor], Tensor]
"""Scales a step's numbers; blocks until the factor is in host memory."""


@dataclass(slots=True, eq=False)
class _Opened:
    """What the parts of an update share: the new weight's memory, the gradient [n], and the step's numbers."""

    write: HostWrite
    gradient: Tensor
    numbers: Tensor
    was_on_device: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class ParameterUpdate:
    """A `parameter`'s gradient (`buffer`), `offloaded` weight and optimizer's `state`, and the `step` it takes.

    `scaling` is by the gradient's factor. The first of the state's arrays is the master weight, or the first two are
    what it has besides the weight; `fresh` says that the weight may have been set since it was made from that.
    """

    parameter: Tensor
    offloaded: OffloadedParameter
    buffer: HostGradientBuffer
    state: State | DiskState
    step: Step
    scaling: Scaling | None
    fresh: bool
    count: Callable[[], None]
    shared: SharedByUpdates
    _part_elements: int = field(init=False)  # the same for all parts, whenever others get room on the device
    _opened: "_Opened | None" = field(init=False, default=None)
    _opening: threading.Lock = field(init=False, default_factory=threading.Lock)  # of threads that do parts

    def can_begin(self) -> bool:
        """Return whether its gradient is there."""
        return self.buffer.has_landed

    def note(self, readers: Event | None, work: "Future[None]") -> None:
        """Note this update, `work`, wherever somebody is to wait for it; from then on it will be carried out.

        Nothing reads the parameter on the device behind `readers`.
        """
        try:
            self.offloaded.begin_update(work, readers)
            self.buffer.note_reader(work)
        except BaseException:
            if self.offloaded.updating:  # interrupted behind that: the gradient is going to be read
                self.buffer.note_reader(work)
            raise

    def prepare(self) -> None:
        """Compile the kernels now, in the caller's thread."""
        self._kernel(_CPU)
        if self.shared.updates.streams_through_device:
            self._kernel(self.offloaded.parameter.device)

    def __post_init__(self) -> None:
        most = self.shared.updates.part_elements
        # A weight on disk has one of few buffers until all of it is updated. Parts of others may come in between, which
        # would each wait for another of these.
        if most is None or isinstance(self.state, DiskState) or self.offloaded.tier is Tier.NVME:
            most = max(1, self.parameter.numel())
        self._part_elements = most

    @property
    def parts(self) -> int:
        """Return how many parts it is updated in, wherever each of them is."""
        return max(1, -(-self.parameter.numel() // self._part_elements))

    @torch.no_grad()
    def on_host(self, part: int) -> None:
        """Update a part in host memory."""
        opened = self._open()
        gradient, weight, arrays = self._tensors(opened, part)
        opened.write.wait_readers()
        begin_ns = time.perf_counter_ns()
        self._kernel(_CPU)(gradient, weight, *arrays, opened.numbers)
        self.shared.engine.stats.add(update_ns=time.perf_counter_ns() - begin_ns)

    @torch.no_grad()
    def on_device(self, part: int, room: Room) -> Begun:
        """Issue the pieces of a part."""
        opened = self._open()
        opened.was_on_device = True
        kernel, numbers = self._kernel(self.offloaded.parameter.device), room.copy_in(opened.numbers)
        gradient, weight, arrays = self._tensors(opened, part)

        def work(pieces: Sequence[Tensor]) -> None:
            change, *some, value = pieces
            kernel(change, value, *some, numbers)

        kinds = dict(zip(arrays, parts_of(self.state.forms.values()), strict=True))
        sources = [gradient, *arrays] if self.state.weight is None else [gradient, *arrays, weight]
        last = room.stream(len(weight), sources, [*arrays, weight], work, opened.write.after, kinds)
        return Begun(last.query, last.synchronize)

    @torch.no_grad()
    def on_disk(self) -> Begun:
        """Begin with the first piece of a state that is on disk."""
        assert isinstance(self.state, DiskState)
        opened = self._open()
        kernel, weight, is_stale = self._kernel(_CPU), opened.write.elements, self._is_stale
        gradient, numbers = opened.gradient, opened.numbers
        opened.write.wait_readers()

        @torch.no_grad()
        def work(part: slice, arrays: Sequence[Tensor]) -> None:
            if is_stale:
                set_master(arrays[0], weight[part])
            kernel(gradient[part], weight[part], *arrays, numbers)

        done = self.state.begin(work)
        return Begun(done.done, done.result)

    def end(self, error: BaseException | None) -> None:
        """Let the new weight be the parameter's, once all parts are done; drop it if one of them has failed."""
        opened, self._opened = self._opened, None
        if opened is None:  # not even the first has begun
            return
        with opened.write as write:
            if error is None:
                write.commit()
                self.count()
                h2d_bytes = self.offloaded.finish_update()
                self.shared.engine.stats.add(updates=1, device_updates=opened.was_on_device, h2d_bytes=h2d_bytes)

    def _open(self) -> "_Opened":
        """Return what all parts share: the first of them makes it, in its thread.

        A master that is out of date is set.
        """
        with self._opening:
            if self._opened is None:
                with contextlib.ExitStack() as undo:
                    self.buffer.landed()  # nothing is to wait for a gradient while it has memory that others wait for
                    write = undo.enter_context(self.offloaded.begin_write(read=self.fresh))
                    gradient, numbers = flat(self.buffer.landed()), self.step.numbers
                    if self._is_stale and isinstance(self.state, State) and self.state.arrays:
                        set_master(self.state.arrays[0], write.elements)
                    numbers = numbers if self.scaling is None else self.scaling(numbers)
                    self._opened = _Opened(write, gradient, numbers)
                    undo.pop_all()
            return self._opened

    def _tensors(self, opened: "_Opened", part: int) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Return a part's gradient, weight and arrays."""
        assert isinstance(self.state, State)
        if self.parts == 1:  # views of all of it would be the same, and take the host some time
            return opened.gradient, opened.write.elements, self.state.arrays
        start = part * self._part_elements
        elements = slice(start, min(start + self._part_elements, self.parameter.numel()))
        return opened.gradient[elements], opened.write.elements[elements], self.state.piece(elements)

    @property
    def _is_stale(self) -> bool:
        """Whether the master may be one of another weight: one that is split is always of this one."""
        return self.fresh and self.state.weight is None

    def _kernel(self, device: torch.device) -> Callable[..., None]:
        return self.step.kernel.compiled(self.offloaded.layout.dtype, device)


def flat(dense: Tensor) -> Tensor:
    """Return a dense tensor's elements [n] in the order they have in memory, without a copy."""
    if dense.dim() == 1 and dense.is_contiguous():  # a view of it would be the same, and takes the host some time
        return dense
    return dense.as_strided((dense.numel(),), (1,))


def set_master(master: Tensor, weight: Tensor, most: int = _MASTERS) -> None:
    """Take over a weight that somebody may have set: where its master, rounded, is the same, that has more digits.

    `MASTER_BYTES` are taken for each of at most so many elements at a time.
    """
    for some, values in zip(master.split(most), weight.split(most), strict=True):
        some.copy_(torch.where(some.to(values.dtype) == values, some, values))


def gradient_on_host(parameter: Tensor, gradient: Tensor) -> HostGradient:
    """Return a parameter's gradient in host memory; one of a module that ran by itself is sent there."""
    if isinstance(gradient, HostGradient):
        return gradient
    return send_to_host(engine_of(parameter.device), dense_like(parameter, gradient.to(parameter.dtype)))


def gradient_on_device(gradient: Tensor) -> Tensor:
    """Return a gradient's values on the device; one in host memory is copied there."""
    return gradient.buffer.device() if isinstance(gradient, HostGradient) else gradient


def unhook(parameter: Tensor) -> bool:
    """Let no optimizer be called when a parameter's gradient has come; return whether one would have been."""
    ours = step_hooks(parameter)
    alive = [each for each in ours if not each.is_dead]
    for each in ours:
        each.remove()
    if ours and (offloaded := find_offloaded(parameter)) is not None:
        offloaded.gradient.update_now = None
    return bool(alive)


def weakly(method: Callable[..., object], parameter: Tensor) -> Callable[..., None]:
    """Return `method` of an optimizer for a parameter: an offloaded parameter must not keep either alive."""
    bound, reference = weakref.WeakMethod(method), weakref.ref(parameter)

    def call(*more: Any) -> None:
        called, given = bound(), reference()
        if called is not None and given is not None:
            called(given, *more)

    return call


def accumulates(parameter: Tensor) -> bool:
    """Return whether the backward that runs adds to a parameter's gradient: `torch.autograd.grad` does not."""
    if not parameter.requires_grad:  # any more: its graph is older
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what it asks for is this very gradient
        return False


def dense_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the parameter's strides; a copy where it has others."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def run_piece(update: PieceUpdate, copies: tuple[Tensor, ...]) -> None:
    """Update a piece whose copies, the gradient and the weight, are in host memory."""
    update.step.kernel.staged(copies[0].dtype)(*copies, *update.state, update.step.numbers)
    if update.done is not None:
        update.done()
