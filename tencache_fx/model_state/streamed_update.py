"""One parameter's update on the device by a whole gradient, weight and state that are copied there and back."""

import contextlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.model_state.host_state import HeldTensors
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.step_kernel import MASTER
from tencache_fx.model_state.update import dense_like, flat, set_master
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event, Lane

ROOM_BYTES = 512 << 20
"""How much of the device copies under way may take together; one parameter alone may take more."""

_Pairs = list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class StreamedUpdate:
    """A parameter's update: what it needs, where that is, and, once its copies in have begun, what is on the device.

    `master` is the fp32 weight and `change` the fp32 gradient, both of the parameter's shape; `arrays` are the tensors
    of its state by name. `fresh` says that the weight may have been set since its master was made. A weight that
    `is_on_host` is copied in and out; of an offloaded one that a plan keeps on the device, that copy is updated.
    """

    parameter: Tensor
    group: dict[str, Any]
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
    arrived: Event | None = None

    def __post_init__(self) -> None:
        self.is_on_host = self.offloaded is not None and not self.offloaded.on_device

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes on the device: gradient, weight, both in fp32 again, and the state."""
        parameter, state_bytes = self.parameter, 0 if self.held is None else self.held.nbytes
        return 2 * parameter.nbytes + 8 * parameter.numel() + max(state_bytes, 4 * parameter.numel())


class UpdateStream:
    """The copies of updates, to the device and back, in order with the compute stream of the thread that makes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._streams = engine, engine.streams
        self._coming: deque[StreamedUpdate] = deque()
        self._arrivals: list[Event] = []
        self._going: deque[tuple[Event, list[Tensor]]] = deque()  # the device memory that copies out read
        self._ending: list[tuple[Event, OffloadedParameter, Future[None]]] = []

    @property
    def held_bytes(self) -> int:
        """About how many bytes are on the device for copies in that have begun."""
        return sum(update.nbytes for update in self._coming)

    def start(self, update: StreamedUpdate) -> None:
        """Begin to copy in what the update needs."""
        parameter, device = update.parameter, self._streams.device
        pairs: _Pairs = []
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, HostGradient) and gradient.buffer.changes:
            gradient = gradient.buffer.device()
        elif isinstance(gradient, HostGradient):
            update.factor = gradient.buffer.factor
            landed = gradient.buffer.landed()
            gradient = torch.empty_like(landed, device=device)
            pairs.append((flat(gradient), flat(landed)))
        update.gradient = gradient
        on_host = {} if update.held is None or update.held.place is Tier.DEVICE else update.held.tensors
        update.arrays = {} if update.held is None else dict(update.held.tensors)
        for name, tensor in on_host.items():
            update.arrays[name] = torch.empty_like(tensor, device=device)
            pairs.append((flat(update.arrays[name]), flat(tensor)))
        if not update.is_on_host:
            update.weight = parameter.detach()
        elif update.fresh or MASTER not in update.arrays:
            assert update.offloaded is not None
            update.weight = torch.empty_like(parameter)
            pairs.append((flat(update.weight), update.offloaded.elements))
        after = (self._streams.record_compute(),)
        if pairs:
            update.arrived = self._streams.copy_all(Lane.UPDATE_IN, pairs, after)
            self._arrivals.append(update.arrived)
        self._coming.append(update)
        self._engine.stats.add(h2d_bytes=sum(source.nbytes for _, source in pairs))

    def arrive(self, update: StreamedUpdate) -> None:
        """Have the compute stream wait for the copies in; make the fp32 weight and gradient."""
        self._coming.remove(update)
        if update.arrived is not None:
            self._streams.wait_compute(update.arrived)
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

    def depart(self, update: StreamedUpdate, held: HeldTensors, arrays: Mapping[str, Tensor]) -> None:
        """Write the weight and the state to where they are kept; copies out begin."""
        parameter, offloaded, pairs = update.parameter, update.offloaded, []
        for name, target in held.tensors.items():
            if held.place is Tier.HOST:
                pairs.append((flat(target), flat(dense_like(target, arrays[name]))))
            elif target is not arrays[name]:
                target.copy_(arrays[name])
        if offloaded is not None and update.is_on_host:
            pairs.append((offloaded.elements, flat(update.master.to(parameter.dtype))))
        elif update.master.data_ptr() != parameter.data_ptr():
            parameter.data.copy_(update.master)  # whose version counts by itself
        self._free(0 if update.nbytes > ROOM_BYTES // 2 else 1)
        written = self._streams.record_compute()
        if offloaded is not None and update.is_on_host:
            event = self._write_home(offloaded, pairs, written)
            offloaded.count_update()
        else:
            event = self._streams.copy_all(Lane.UPDATE_OUT, pairs, (written,)) if pairs else written
            if offloaded is None:
                increment_version(parameter)
            else:
                offloaded.mark_device_newer()
                offloaded.count_update()
        self._going.append((event, [source for _, source in pairs]))
        out_bytes = sum(target.nbytes for target, _ in pairs)
        self._engine.stats.add(updates=1, device_updates=1, d2h_bytes=out_bytes)

    def end(self) -> None:
        """Wait for all copies, and end the updates, even if one has failed; raises what a copy raised."""
        with contextlib.ExitStack() as steps:
            steps.callback(self._streams.wait_host, self._arrivals)  # sources may be released behind this
            for event, _ in self._going:
                steps.callback(event.synchronize)
            for event, offloaded, future in reversed(self._ending):  # the last one first: it ends them in their order
                steps.callback(self._end_update, event, offloaded, future)

    def _end_update(self, event: Event, offloaded: OffloadedParameter, future: "Future[None]") -> None:
        try:
            event.synchronize()
            self._engine.stats.add(h2d_bytes=offloaded.finish_update())
        except BaseException as error:  # raised by the next reader of the parameter, too
            future.set_exception(error)
            raise
        future.set_result(None)

    def _write_home(self, offloaded: OffloadedParameter, pairs: _Pairs, written: Event) -> Event:
        """Begin to copy out an offloaded parameter's weight and state, once nothing reads its host copy."""
        future: Future[None] = Future()
        offloaded.begin_update(lambda: future, written)
        reading = () if offloaded.last_read is None else (offloaded.last_read,)
        try:
            event = self._streams.copy_all(Lane.UPDATE_OUT, pairs, (written, *reading))
        except BaseException as error:
            future.set_exception(error)
            raise
        self._ending.append((event, offloaded, future))
        return event

    def _free(self, rest: int) -> None:
        """Let the compute stream have the memory of all copies out but the last `rest` ones, behind these."""
        while len(self._going) > rest:
            event, _ = self._going.popleft()
            self._streams.wait_compute(event)
