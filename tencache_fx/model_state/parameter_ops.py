"""The graph ops on offloaded parameters and their gradients: what they do, and their kernels.

fetch    allocate on compute; copy in from host memory, behind the allocation and the parameter's last update
settle   have a parameter that stays on the device there, behind its last update
renew    have its next update written over it behind what compute has queued so far
sink     lend a buffer; copy a gradient out, behind what compute queued so far
homed    hand out the gradient in host memory
"""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tencache_fx.errors import UsageError
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer, norm_of
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.ops import LIBRARY
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine, named_range
from tencache_fx.runtime.engine_registry import engine_by_id
from tencache_fx.runtime.streams import Event
from tencache_fx.runtime.transfers import ActiveTransfer, Layout, Stage, new_token


def fetch(engine: Engine, parameter: Tensor, label: str = "") -> Tensor:
    """Allocate a parameter's bytes and issue their copy in from its home; return the ticket.

    Behind an update of it that is under way. One that is on the device is copied there.
    """
    engine.enter()
    label = label or "a parameter"
    trips, streams = engine.trips, engine.streams
    with trips.lock, named_range("fetch", label):
        engine.check_open()
        home = parameters_of(engine).find(parameter)
        layout = Layout.of(parameter, label)
        dst = layout.empty()
        allocated = streams.record_compute()
        slot = ActiveTransfer(trips.slots.next_key(), label, Tier.HOST, layout, allocated, None, None, Stage.COMING)
        if home is None or home.on_device:
            if home is not None:
                home.bring()
            slot.dst = dst.copy_(parameter.detach())
            slot.copied_in = streams.record_compute()
        elif home.updating:
            trips.bring_later(slot, dst, lambda: _copy_in(home, dst, allocated))
        else:
            slot.dst, slot.copied_in = dst, _copy_in(home, dst, allocated)
        ticket = trips.slots.ticket(slot)
    engine.stats.add(prefetches=1, h2d_bytes=layout.nbytes)
    return ticket


def _copy_in(home: OffloadedParameter, dst: Tensor, allocated: Event) -> Event:
    """Issue the copy in of a parameter once its update is done. Blocks until then."""
    home.settle()
    return home.copy_in(dst, (allocated,))


def settle(engine: Engine, parameter: Tensor) -> Tensor:
    """See that a parameter that stays on the device is there, behind its last update; return a token."""
    engine.enter()
    if (home := parameters_of(engine).find(parameter)) is not None:
        watch = engine.streams.watch() if home.updating else None
        home.bring()
        if watch is not None:
            watch.stop()
            engine.stats.add_stall(watch, "stall_in_ns")
    return new_token()


def renew(engine: Engine, parameter: Tensor) -> Tensor:
    """Have a parameter whose update has begun renewed where it stays, behind what compute has; return a token."""
    engine.enter()
    home = parameters_of(engine).find(parameter)
    if home is not None and home.early is not None:
        engine.stats.add(h2d_bytes=home.end_readers(engine.streams.record_compute()))
    return new_token()


def sink(engine: Engine, src: Tensor, label: str = "", home: str = "", *, shard: bool = False) -> Tensor:
    """Issue the copy of a gradient, or a rank's `shard` of it, out; return the handle, for `release` and `homed`.

    If that is all there will be of the gradient of `home`, and its optimizer updates during backward, the update
    begins. Raises `BudgetError`.
    """
    engine.enter()
    label = label or "a gradient"
    layout, store, trips = Layout.of(src, label), parameters_of(engine), engine.trips
    with named_range("sink", label), contextlib.ExitStack() as undo:
        buffer = engine.object_buffers.lend(layout.nbytes, Use.GRADIENT)
        undo.callback(engine.pool.give_back, buffer)
        norm = norm_of(src.detach())
        with trips.lock:
            engine.check_open()
            slot = trips.begin(src, layout, label, Tier.HOST, buffer)
            undo.pop_all()
            lease = HostGradientBuffer(store.additions, buffer, layout, slot.copied_out, norm, shard)
            slot.buffer, slot.payload = None, lease
            handle = trips.slots.add(slot)
    engine.stats.add(offloads=1, d2h_bytes=layout.nbytes)
    whole = store.pending.whole(home) if home else None
    if whole is not None and whole.update_now is not None:
        whole.update_now(lease)
    return handle


def homed(engine: Engine, handle: Tensor) -> HostGradient:
    """Return the gradient that has left by this handle, which is over; raises `UsageError` the second time."""
    engine.enter()
    with engine.trips.lock:
        slot = engine.trips.slots.find(handle, "hand out")
        lease = slot.payload
        if not isinstance(lease, HostGradientBuffer):
            raise UsageError(slot.refusal())
        slot.payload, slot.stage = None, Stage.BACK
    return HostGradient(lease)


def _fetch(home: Tensor, engine: int, label: str) -> Tensor:
    return fetch(engine_by_id(engine), home, label)


def _settle(home: Tensor, engine: int, label: str) -> Tensor:
    return settle(engine_by_id(engine), home)


def _renew(home: Tensor, engine: int, label: str) -> Tensor:
    return renew(engine_by_id(engine), home)


def _sink(src: Tensor, engine: int, label: str, home: str, shard: bool = False) -> Tensor:  # noqa: FBT001
    return sink(engine_by_id(engine), src, label, home, shard=shard)


def _homed(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    return homed(engine_by_id(engine), handle)


_KERNELS = (("fetch", _fetch), ("settle", _settle), ("renew", _renew), ("sink", _sink), ("homed", _homed))
for _name, _kernel in _KERNELS:
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
