"""Updates on the device by whole gradients, weights and states that are copied there and back, some at a time."""

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tencache_fx.errors import InvariantError, TencacheError, UsageError
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.model_state.host_state import HeldTensors
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.scalar_reads import StepReads
from tencache_fx.model_state.step_kernel import MASTER
from tencache_fx.model_state.step_writes import Departure, Write
from tencache_fx.model_state.update import dense_like, flat, set_master
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event, Lane

ROOM_BYTES = 512 << 20
"""How much of the device updates under way may take together; a parameter that takes more than its part adds to that.

Half of it is for copies in, a quarter for what is updated, and a quarter for copies out.
"""

_DEPTH = 4  # chunks whose copies in have begun: the host waits within the `step` of some classes

_COPY_ERRORS = (RuntimeError, TencacheError)  # those of a device, and those that copies on the CPU raise

_Pairs = list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class StreamedUpdate:
    """A parameter's update: what it needs, where that is, and, once its copies in have begun, what is on the device.

    `master` is the fp32 weight and `change` the fp32 gradient, both of the parameter's shape; `arrays` are the tensors
    of its state by name. `fresh` says that the weight may have been set since its master was made. A weight that
    `is_on_host` is copied in and out; of an offloaded one that is on the device, because a plan keeps it there, or
    because its other copy is on disk, that copy is updated.
    """

    parameter: Tensor
    offloaded: OffloadedParameter | None
    held: HeldTensors | None
    fresh: bool
    is_on_host: bool = field(init=False)
    arrays: dict[str, Tensor] = field(default_factory=dict)
    master: Tensor = field(init=False)
    change: Tensor = field(init=False)
    gradient: Tensor | None = None
    factor: Tensor | None = None
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        self.is_on_host = self.offloaded is not None and not self.offloaded.on_device
        if self.held is not None:
            self.arrays = dict(self.held.tensors)

    @property
    def host_state(self) -> Mapping[str, Tensor]:
        """The tensors of the state that are copied in."""
        return {} if self.held is None or self.held.place is Tier.DEVICE else self.held.tensors

    @property
    def changes_held(self) -> bool:
        """Whether a step changes the state where it is kept."""
        return self.held is not None and self.held.place is Tier.DEVICE

    @property
    def reads_weight(self) -> bool:
        """Whether the weight is copied in: its master says what it is, once there is one that is up to date."""
        return self.is_on_host and (self.fresh or MASTER not in self.arrays)

    def take_weight(self, weight: Tensor) -> None:
        """Take over what a class has set the `weight` that it was given to, if it has not changed that in place."""
        is_alike = (weight.dtype, weight.device) == (self.master.dtype, self.master.device)
        if is_alike and weight.is_set_to(self.master):  # of the same memory, size and strides
            return
        if (weight.size(), weight.dtype) != (self.master.size(), self.master.dtype):
            raise UsageError(
                f"a step has set a weight of size {tuple(self.master.size())}, {self.master.dtype}, to a tensor of "
                f"size {tuple(weight.size())}, {weight.dtype}; have it keep both."
            )
        self.master = dense_like(self.parameter, weight.detach())


@dataclass(eq=False)
class Chunk:
    """Updates of parameters of one group, all by one `step`; their copies are queued together, with one event."""

    group: dict[str, Any]
    updates: list[StreamedUpdate]
    arrived: Event | None = None
    in_bytes: int = field(init=False)  # of the device, about, which its copies in take

    def __post_init__(self) -> None:
        total = 0
        for update in self.updates:
            if isinstance(update.parameter.grad, HostGradient):
                total += update.parameter.nbytes
            if update.reads_weight:
                total += update.parameter.nbytes
            total += 0 if update.held is None or update.held.place is Tier.DEVICE else update.held.nbytes
        self.in_bytes = total


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """An update that is computed: the tensors of the state, `arrays`, where they are `held`, and the `rest` of it."""

    update: StreamedUpdate
    held: HeldTensors
    arrays: Mapping[str, Tensor]
    rest: Mapping[str, Any]


class UpdateStream:
    """The copies of updates, to the device and back, in order with the compute stream of the thread that makes it.

    What a copy in writes is allocated in the order of the compute stream, and the copy waits for that. What a copy out
    reads is kept until the compute stream waits for the copy, or until it is known to be done.

    A parameter of the `optimizer` is `unsettled` from before its weight or its state changes until both are known to be
    of this step. Steps of its class take place in the contexts of `reads`; see `StepReads` for `reads_numbers`.
    """

    def __init__(
        self, engine: Engine, optimizer: object, unsettled: set[Tensor], *, reads_numbers: bool | None = None
    ) -> None:
        self._engine, self._streams = engine, engine.streams
        self._optimizer, self._unsettled = optimizer, unsettled
        self.reads = StepReads(engine.streams.device, expected=reads_numbers)
        self._coming: dict[Chunk, int] = {}  # with the bytes of their copies in
        self._going: deque[tuple[Event, list[Tensor], int]] = deque()  # the device memory that copies out read
        self._departures: deque[Departure] = deque()  # that have yet to be ended
        self._is_idle = True
        self._lock = threading.RLock()  # held while a step goes on, and by who ends it
        self._owned = threading.Condition(self._lock)  # only to ask which thread holds it

    def stepping(self) -> contextlib.AbstractContextManager[object]:
        """Return what a step is to be within: readers of its weights wait for the end of that, however it ends."""
        return self._lock

    def settle(self) -> None:
        """Wait for the end of the step; end what it has begun, if it was interrupted. For readers, from any thread.

        Raises `UsageError` in the midst of a step of this very thread, which a signal's handler interrupts.
        """
        if self._is_held_here():
            raise UsageError(
                "a weight is read in the midst of the step that writes it, by the thread that takes the step, as a "
                "signal handler may; have the handler note the signal, and read weights once step() has returned."
            )
        with self._lock, contextlib.suppress(*_COPY_ERRORS):  # which each weight that they are of has
            self.end()

    def _is_held_here(self) -> bool:
        try:
            self._owned.notify()
        except RuntimeError:  # this thread does not hold the lock
            return False
        return True

    def has_room(self, chunk: Chunk) -> bool:
        """Return whether the copies in of a chunk can begin beside those that are under way."""
        coming_bytes = sum(self._coming.values())
        return not self._coming or (len(self._coming) < _DEPTH and coming_bytes + chunk.in_bytes <= ROOM_BYTES // 2)

    def start(self, chunk: Chunk) -> None:
        """Begin to copy in what the chunk needs."""
        self._drop_landed()
        pairs: _Pairs = []
        for update in chunk.updates:
            self._take(update, pairs)
        if pairs:
            self._is_idle = False
            chunk.arrived = self._streams.copy_all(Lane.UPDATE_IN, pairs, (self._streams.record_compute(),))
            for update in chunk.updates:
                if update.held is not None:
                    update.held.note_copy(Lane.UPDATE_IN, chunk.arrived)
            self._engine.stats.add(h2d_bytes=sum(source.nbytes for _, source in pairs))
        self._coming[chunk] = chunk.in_bytes

    def arrive(self, chunk: Chunk) -> None:
        """Have the compute stream wait for the copies in; make the fp32 weights and gradients."""
        del self._coming[chunk]
        if chunk.arrived is not None:
            self._streams.wait_compute(chunk.arrived)
        for update in chunk.updates:
            _widen(update)

    def depart(self, done: Sequence[Done]) -> Departure:
        """Write the weights and the states to where they are kept; copies out begin."""
        departure = Departure([each.update.parameter for each in done], self.settle)
        self._departures.append(departure)
        self._unsettled.update(departure.parameters)
        pairs: _Pairs = []
        out_bytes = 0
        written: list[OffloadedParameter] = []
        for each in done:
            for name, target in each.held.tensors.items():
                if each.held.place is Tier.HOST:
                    pairs.append((target, dense_like(target, each.arrays[name])))
                elif target is not each.arrays[name]:
                    target.copy_(each.arrays[name])
            update, parameter = each.update, each.update.parameter
            if update.is_on_host:
                assert update.offloaded is not None
                write = update.offloaded.begin_write(read=False)
                pairs.append((write.memory, update.master.to(parameter.dtype)))
                written.append(update.offloaded)
            elif update.master.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(update.master)  # whose version counts by itself
        if pairs:
            event, sources = self._write_out(departure, written, pairs), [source for _, source in pairs]
            out_bytes = sum(source.nbytes for source in sources)
            self._going.append((event, sources, out_bytes))
            for each in done:
                each.held.note_copy(Lane.UPDATE_OUT, event)
        for each in done:
            _count(each.update, self._optimizer)
        self._engine.stats.add(updates=len(done), device_updates=len(done), d2h_bytes=out_bytes)
        self._free()
        return departure

    def end(self) -> None:
        """Wait for all copies, and end the updates, even if one has failed; raises what a copy raised.

        A call that was interrupted is to be made again: it goes on there.
        """
        failed: BaseException | None = None
        while self._departures:
            failed = self._end(self._departures[0]) or failed
            self._departures.popleft()
        if not self._is_idle:  # host memory may be released behind this, whatever is known of the copies that touch it
            self._streams.wait_host([self._streams.record(lane) for lane in (Lane.UPDATE_IN, Lane.UPDATE_OUT)])
            self._is_idle = True
        if failed is not None:
            raise failed

    def _take(self, update: StreamedUpdate, pairs: _Pairs) -> None:
        """Give an update device memory for what is on the host, and add the copies to `pairs`."""
        parameter, device = update.parameter, self._streams.device
        gradient = parameter.grad
        assert gradient is not None  # each tensor is dense, and its copy has the same order in memory
        if isinstance(gradient, HostGradient) and gradient.buffer.changes:
            gradient = gradient.buffer.device()
        elif isinstance(gradient, HostGradient):
            update.factor = gradient.buffer.factor
            landed = gradient.buffer.landed()
            gradient = torch.empty_like(landed, device=device)
            pairs.append((gradient, landed))
        update.gradient = gradient
        for name, tensor in update.host_state.items():
            update.arrays[name] = array = torch.empty_like(tensor, device=device)
            pairs.append((array, tensor))
        if not update.is_on_host:
            update.weight = parameter.detach()
        elif update.reads_weight:
            assert update.offloaded is not None
            update.weight = torch.empty_like(parameter)
            pairs.append((update.weight, update.offloaded.begin_write(read=True).memory))

    def _end(self, departure: Departure) -> BaseException | None:
        """Wait for copies out, and end the updates of weights; return the first error of either."""
        try:
            if departure.event is not None:
                departure.event.synchronize()
        except _COPY_ERRORS as error:
            departure.fail(error)
            return error
        if departure.event is None:  # there are none, or somebody interrupted the step
            departure.fail(InvariantError("the step was interrupted"))
        failed: BaseException | None = None
        for offloaded, write in departure.writes:
            if not write.done():
                failed = self._end_update(offloaded, write) or failed
        if departure.kept and failed is None:
            self._unsettled.difference_update(departure.parameters)
        return failed

    def _end_update(self, offloaded: OffloadedParameter, write: Write) -> BaseException | None:
        """End the update of a weight whose copy is done; return an error."""
        try:
            if refreshed_bytes := offloaded.finish_update():
                self._engine.stats.add(h2d_bytes=refreshed_bytes)
            write.end()
        except BaseException as error:  # raised by the next reader of the parameter, too
            if not write.done():
                write.end(error)
            if not isinstance(error, _COPY_ERRORS):
                raise
            return error
        return None

    def _write_out(self, departure: Departure, written: Sequence[OffloadedParameter], pairs: _Pairs) -> Event:
        """Begin to copy out weights and states, once nothing reads the host copies of the parameters written."""
        self._is_idle = False
        computed = self._streams.record_compute()
        try:
            for offloaded in written:
                offloaded.begin_update(departure.begin_write(offloaded), computed)
            reading = [event for each in written if (event := each.last_read.event) is not None]
            departure.event = event = self._streams.copy_all(Lane.UPDATE_OUT, pairs, (computed, *reading))
        except BaseException as error:
            if departure.event is None:
                departure.fail(error)
            raise
        return event

    def _free(self) -> None:
        """Let the compute stream have the memory of the oldest copies out, behind these, where all take too much."""
        self._drop_landed()
        while len(self._going) > 1 and sum(nbytes for _, _, nbytes in self._going) > ROOM_BYTES // 4:
            self._release()

    def _drop_landed(self) -> None:
        """Release what copies out have read, if the host knows that they are done."""
        while self._going and self._going[0][0].query():
            self._release()

    def _release(self) -> None:
        event, sources, _ = self._going.popleft()
        self._streams.wait_compute(event)  # raises what the copy raised
        for source in sources:
            self._streams.after_release(source)


def _widen(update: StreamedUpdate) -> None:
    """Make the fp32 weight and gradient of an update whose copies in are done."""
    parameter, weight, gradient = update.parameter, update.weight, update.gradient
    assert gradient is not None
    if MASTER in update.arrays:
        update.master = update.arrays[MASTER]
        if weight is not None and update.fresh:
            set_master(flat(update.master), flat(weight))
    else:
        assert weight is not None
        # A weight that is read where it is must not change before its state is known to have room.
        update.master = weight.to(torch.float32, copy=not update.is_on_host)
    change = gradient.to(torch.float32)
    if update.factor is not None:
        change = change * update.factor.to(change.device)
    update.change = dense_like(parameter, change)
    update.weight = update.gradient = None


def _count(update: StreamedUpdate, optimizer: object) -> None:
    """Note that an optimizer has updated a parameter, where others look."""
    if update.offloaded is None:
        increment_version(update.parameter)
        return
    if not update.is_on_host:
        update.offloaded.mark_device_newer()
    update.offloaded.count_update(optimizer)
