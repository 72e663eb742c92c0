"""The graph ops on offloaded parameters and their gradients: what they do, and their kernels.

fetch_param    allocate on compute; copy in, behind the allocation and the parameter's last update
sync_param     load a parameter that stays on the device, behind its last update
refresh_param  let its next update overwrite it behind what compute has queued so far
offload_grad   acquire a buffer; copy a gradient out, behind what compute has queued so far
take_grad      hand out the gradient in host memory
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tencache_fx.errors import UsageError
from tencache_fx.model_state.gradient_norm import norm_of
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.model_state.shard import UNKNOWN
from tencache_fx.ops import LIBRARY
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine, named_range
from tencache_fx.runtime.engine_registry import engine_by_id, server_by_id
from tencache_fx.runtime.streams import Event
from tencache_fx.runtime.swap_points import SwapPoints
from tencache_fx.runtime.transfers import ActiveTransfer, Layout, Stage, new_token


def fetch_param(engine: Engine, parameter: Tensor, label: str = "") -> Tensor:
    """Allocate a parameter's bytes and issue the copy in of its host copy; return the ticket.

    The copy runs behind an update under way, and behind the read of one that is on disk. A parameter that is on the
    device is copied there.
    """
    engine.enter()
    label = label or "a parameter"
    lifecycle, streams = engine.transfers, engine.streams
    with lifecycle.lock, named_range("fetch", label):
        engine.check_open()
        offloaded = parameters_of(engine).find(parameter)
        kept = None if offloaded is None else offloaded.layout
        layout = kept if kept is not None and kept.is_of(parameter) else Layout.of(parameter, label)
        dst = layout.empty()
        allocated = streams.record_compute()
        transfer = ActiveTransfer(
            lifecycle.table.next_key(), label, Tier.HOST, layout, allocated, None, None, Stage.PREFETCHING
        )
        if stays := offloaded is None or offloaded.on_device:
            if offloaded is not None:
                _load(engine, offloaded)
            transfer.dst = dst.copy_(parameter.detach())
            transfer.copied_in = streams.record_compute()
        elif offloaded.blocks:
            lifecycle.start_copy_in_later(transfer, dst, partial(_copy_in, offloaded, dst, allocated))
        else:
            transfer.dst, transfer.copied_in = dst, _copy_in(offloaded, dst, allocated)
        ticket = lifecycle.table.ticket(transfer)
    engine.stats.add_copy("prefetches", "h2d_bytes", 0 if stays else layout.nbytes)
    return ticket


def _copy_in(offloaded: OffloadedParameter, dst: Tensor, allocated: Event) -> Event:
    """Issue the copy in of a parameter once its update is done, and once it is read. Blocks until then."""
    offloaded.wait_update()
    return offloaded.copy_in(dst, (allocated,))


def sync_param(engine: Engine, parameter: Tensor) -> Tensor:
    """Load a parameter that stays on the device, behind its last update; return a token."""
    engine.enter()
    offloaded = parameters_of(engine).find(parameter)
    if offloaded is not None and not offloaded.is_loaded:
        _load(engine, offloaded)
    return new_token()


def _load(engine: Engine, offloaded: OffloadedParameter) -> None:
    """Load a parameter, and note how long the host has waited for its update, or for the disk."""
    waits = offloaded.updating or (offloaded.blocks and not offloaded.on_device)
    watch = engine.streams.watch() if waits else None
    offloaded.load()
    if watch is not None:
        watch.stop()
        engine.stats.add_stall(watch, "stall_in_ns")


def refresh_param(engine: Engine, parameter: Tensor) -> Tensor:
    """Let a begun update refresh the device copy behind what compute has queued so far; return a token."""
    engine.enter()
    offloaded = parameters_of(engine).find(parameter)
    if offloaded is not None and offloaded.gradient.begun_by is not None:
        engine.stats.add(h2d_bytes=offloaded.set_readers(engine.streams.record_compute()))
    return new_token()


def offload_grad(engine: Engine, src: Tensor, label: str = "", param: str = "", shard: str = "") -> Tensor:
    """Issue the copy of a gradient out; return the handle, for `release` and `take_grad`.

    It may be a part of one that is spread over the process group named `shard`.

    If that is all there will be of the gradient of `param`, and its optimizer updates during backward, the update
    begins. Raises `BudgetError`.
    """
    engine.enter()
    label = label or "a gradient"
    layout, store, lifecycle = Layout.of(src, label), parameters_of(engine), engine.transfers
    host_buffer = None
    with named_range("offload", label):
        buffer = engine.object_buffers.acquire(layout.nbytes, Use.GRADIENT)
        try:
            norm = None if param and _is_added(store.pending.find(param)) else norm_of(src.detach())
            with lifecycle.lock:
                engine.check_open()
                transfer = lifecycle.begin(src, layout, label, Tier.HOST, buffer)
                host_buffer = HostGradientBuffer(store.additions, layout, shard)
                host_buffer.hold(buffer, transfer.copied_out, norm)
                transfer.buffer, transfer.payload = None, host_buffer
                handle = lifecycle.table.add(transfer)
        except BaseException:
            if host_buffer is None or not host_buffer.holds:
                engine.pool.release(buffer)
            raise
    engine.stats.add_copy("offloads", "d2h_bytes", layout.nbytes)
    whole = store.pending.whole(param) if param else None
    if whole is not None and whole.gradient.update_now is not None:
        whole.gradient.update_now(host_buffer)
    return handle


def _is_added(owner: OffloadedParameter | None) -> bool:
    """Return whether a parameter's new gradient is added to one it has, so that only the norm of the sum is of use."""
    return owner is not None and not owner.is_dead and owner.parameter.grad is not None


def take_grad(engine: Engine, handle: Tensor) -> HostGradient:
    """Return the gradient that was offloaded by this handle, which ends; raises `UsageError` the second time."""
    engine.enter()
    with engine.transfers.lock:
        transfer = engine.transfers.table.find(handle, "hand out")
        buffer = transfer.payload
        if not isinstance(buffer, HostGradientBuffer):
            raise UsageError(transfer.refusal())
        transfer.payload, transfer.stage = None, Stage.ENDED
    return HostGradient(buffer)


def send_to_host(engine: Engine, gradient: Tensor) -> HostGradient:
    """Return a gradient in host memory for one on the device, which stays its caller's."""
    handle = offload_grad(engine, gradient)
    engine.release(handle, gradient, donated=True)
    return take_grad(engine, handle)


@dataclass(frozen=True, slots=True)
class ParameterFetch:
    """How to fetch an offloaded parameter, now or before its graph runs the next time; it does not keep it alive."""

    engine: Engine
    offloaded: weakref.ref[OffloadedParameter]
    label: str
    nbytes: int

    @property
    def owner(self) -> OffloadedParameter | None:
        """The parameter; None if it is gone."""
        offloaded = self.offloaded()
        return None if offloaded is None or offloaded.is_dead else offloaded

    @property
    def stamp(self) -> object:
        """Something that is another one as soon as the parameter, or its value, is; None if it is gone."""
        if (offloaded := self.owner) is None:
            return None
        return id(offloaded), offloaded.updates, offloaded.version

    def issue(self) -> Tensor:
        """Issue the copy in; return the ticket."""
        offloaded = self.offloaded()
        assert offloaded is not None
        return fetch_param(self.engine, offloaded.parameter, self.label)


def _fetch_param(param: Tensor, engine: int, label: str) -> Tensor:
    server = server_by_id(engine)
    if not isinstance(server, SwapPoints):
        return fetch_param(server, param, label)
    offloaded = parameters_of(server.engine).find(param)
    if offloaded is None:  # it was offloaded when the region was compiled
        return server.pass_by(partial(fetch_param, server.engine, param, label))
    return server.fetch(label, ParameterFetch(server.engine, weakref.ref(offloaded), label, offloaded.nbytes))


def _sync_param(param: Tensor, engine: int, label: str) -> Tensor:
    return sync_param(engine_by_id(engine), param)


def _refresh_param(param: Tensor, engine: int, label: str) -> Tensor:
    return refresh_param(engine_by_id(engine), param)


def _offload_grad(src: Tensor, engine: int, label: str, param: str, shard: str = "") -> Tensor:
    server = server_by_id(engine)
    if not isinstance(server, SwapPoints):
        return offload_grad(server, src, label, param, shard)
    owner = parameters_of(server.engine).pending.find(param)
    if owner is not None and owner.updated_on_device and shard != UNKNOWN:
        return server.keep(label, src)
    return server.store(label, partial(offload_grad, server.engine, src, label, param, shard))


def _take_grad(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, engine: int
) -> Tensor:
    server = server_by_id(engine)
    if not isinstance(server, SwapPoints):
        return take_grad(server, handle)
    gradient = server.take(handle)
    return take_grad(server.engine, handle) if gradient is None else gradient


_KERNELS = (
    ("fetch_param", _fetch_param),
    ("sync_param", _sync_param),
    ("refresh_param", _refresh_param),
    ("offload_grad", _offload_grad),
    ("take_grad", _take_grad),
)
for _name, _kernel in _KERNELS:
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
