"""A parameter whose bytes are in host memory or on disk, and on the device only while somebody reads them.

Such a parameter keeps its shape, dtype and device, but its storage there is empty while there is no device copy. Its
other copy, the host copy, is what its `Backing` keeps. `CopyState` says which have its value. These keep a device copy:

    resident   set by pin: a plan keeps the parameter on the device. unpin evicts it
    summoned   set by summon: somebody may read it there, or change it. The end of summon evicts it
    forwards   added by load_for_forward: they run uncompiled. The end of the last one evicts it if no backward follows

`evict` does nothing to a parameter that is resident or summoned.
Whoever reads the host copy waits for the update under way (`wait_update`), and whoever writes to it (`begin_write`)
waits for the last copy that reads it.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tencache_fx import compat
from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.model_state.backing import Backing, HostWrite
from tencache_fx.model_state.copy_refusals import lost_write_to, refusal_of
from tencache_fx.model_state.copy_state import NEXT_STATES, CopyState, HostUpdate, Work, is_on_device
from tencache_fx.model_state.disk_state import DiskState
from tencache_fx.model_state.expected_gradient import ExpectedGradient
from tencache_fx.model_state.host_state import HeldTensors, State
from tencache_fx.model_state.last_read import LastRead
from tencache_fx.model_state.shard import Shard
from tencache_fx.model_state.split_master import weight_set
from tencache_fx.planning.problem import STATE_BYTES, Tier, host_state_bytes
from tencache_fx.runtime.streams import Event, Lane, Streams


class OffloadedParameter:
    """One parameter kept by `backing`. Thread-safe but for the pins, which the thread that runs the model sets."""

    def __init__(self, parameter: Tensor, name: str, backing: Backing, streams: Streams) -> None:
        self.name, self.backing, self.layout = name, backing, backing.layout
        self.shard: Shard | None = None  # what it is a part of, if it is spread over ranks
        self.resident = self.summoned = False
        self.planned_by_step = False  # it is resident by the plans of steps
        self.gradient = ExpectedGradient()
        self.last_read = LastRead(streams)
        self.updated_on_device = False  # it is resident, and so are its gradient and its optimizer's state
        self.state_bytes = STATE_BYTES * parameter.numel()  # of its optimizer's state, as that has told
        self.host_state_bytes = host_state_bytes(parameter.numel(), split=parameter.dtype == torch.bfloat16)
        self.state_buffer_bytes = 0  # of host memory, which an optimizer of ours will acquire for its state
        self.optimizer_state: weakref.ref[State | DiskState | HeldTensors] | None = None
        self.place_state: Callable[[], None] | None = None  # has its optimizer move its state where that belongs
        self.forget: Callable[[], object] = lambda: None  # called when the parameter dies, or is an ordinary one again
        self._parameter = weakref.ref(parameter)
        self._state = CopyState.HOST
        self._update = HostUpdate()
        self._changes = 0  # made on the device, or by another optimizer than the last one, `_optimizer`
        self._optimizer: weakref.ref[object] | None = None
        self._updates = 0  # by which its optimizer has raised the parameter's version
        self._host_version = backing.version  # as the state accounts for it
        self._streams = streams
        self._forwards = weakref.WeakSet[Any]()  # uncompiled ones under way that read it
        self._for_inference = False  # it was loaded for forwards alone that no backward follows
        self._lock = threading.RLock()  # guards the state, and the device copy

    @property
    def nbytes(self) -> int:
        """Return the bytes of the parameter."""
        return self.layout.nbytes

    @property
    def tier(self) -> Tier:
        """Return where its bytes are while they are not on the device."""
        return self.backing.tier

    @property
    def parameter(self) -> Tensor:
        """Return the parameter itself."""
        parameter = self._parameter()
        assert parameter is not None, "this object goes with its parameter"
        return parameter

    @property
    def is_dead(self) -> bool:
        """Whether the parameter is gone."""
        return self._parameter() is None

    @property
    def on_device(self) -> bool:
        """Whether there is a device copy."""
        return is_on_device(self.parameter)

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        work = self._update.work
        return work is not None and not work.done()

    @property
    def blocks(self) -> bool:
        """Whether to copy it in takes the host some time: it waits for an update, or reads a disk."""
        return self.updating or self.tier is Tier.NVME

    @property
    def updates(self) -> int:
        """Return how often its optimizer has begun to update it."""
        return self._updates

    @property
    def version(self) -> int:
        """Return a number that grows when somebody other than its optimizer has written to either copy, or `host`."""
        return self._changes + self.backing.version

    @property
    def device_version(self) -> int:
        """Return a number that grows when somebody other than its optimizer writes to the device copy."""
        parameter = self._parameter()
        return 0 if parameter is None or parameter.is_inference() else parameter._version - self._updates

    @property
    def device_state_bytes(self) -> int:
        """Return the bytes of its optimizer's state that are on the device."""
        state = None if self.optimizer_state is None else self.optimizer_state()
        return state.nbytes if state is not None and state.place is Tier.DEVICE else 0

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the device copy, and of its optimizer's state that is on the device."""
        return 0 if self.is_dead else self.device_state_bytes + (self.nbytes if self.on_device else 0)

    @property
    def host(self) -> Tensor:
        """Return the host copy, in the parameter's shape and strides; of one on disk, a copy of that.

        Blocks if the device copy is newer. Raises `StoreError` if the disk cannot be read.
        """
        self.sync_host()
        return self.backing.value()

    def begin_write(self, *, read: bool) -> HostWrite:
        """Return memory for the next value of the host copy, see `Backing`. Blocks if the device copy is newer."""
        self.sync_host()
        return self.backing.begin_write(read=read)

    def set_host(self, fill: Callable[[Tensor], object]) -> None:
        """Set the host copy by `fill`, given memory in the parameter's shape, before anybody reads it."""
        with self.backing.begin_write(read=False) as write:
            write.wait_readers()
            fill(write.shaped)  # in order with what computed it: a synchronous copy
            write.commit()

    @property
    def is_loaded(self) -> bool:
        """Whether `load` has nothing to do: the caller's compute stream runs behind all that wrote the value there."""
        with self._lock:
            here = self._state is CopyState.SHARED or self._state is CopyState.DEVICE_NEWER
            settled = here and self._update.work is None and self._host_version == self.backing.version
            return settled and self.last_read.is_followed

    def load(self) -> bool:
        """Have a device copy with the value, behind its last update, in order with the caller's compute stream.

        Blocks the host until an update under way is done. Returns whether there was no device copy.
        """
        self.wait_update()
        with self._lock, contextlib.ExitStack() as undo:
            self._notice_host_writes()
            if absent := not self.on_device:
                compat.give_bytes(self.parameter.untyped_storage(), self.nbytes)
                undo.callback(self.free_device_copy)  # without a value, the bytes are nobody's to read
            if absent or self._state is CopyState.HOST_NEWER:
                self.refresh()
            else:
                self.last_read.follow()
            undo.pop_all()
        return absent

    def evict(self) -> None:
        """Free the device copy, unless it is pinned; what runs on the compute stream still reads it."""
        with self._lock:
            if not self.resident and not self.summoned and self.on_device:
                self.sync_host()
                self.last_read.follow()  # the allocator hands it out in that stream's order
                self.free_device_copy()

    def free_device_copy(self) -> None:
        """Free the device copy, whoever may read it; from torch 2.14 on, who does is told."""
        self._for_inference = False
        if self._state is not CopyState.UPDATING:
            self._become(CopyState.HOST)
        compat.take_bytes(self.parameter.untyped_storage(), refusal_of(self.name, self.tier))

    def refresh(self) -> None:
        """Copy the host copy over the device copy, in order with the caller's compute stream."""
        with self._lock:
            after = self._streams.record_compute()
            self.copy_in(self.parameter.detach(), (after,))
            self.last_read.follow()
            self._host_version = self.backing.version
            self._become(CopyState.SHARED)

    def write_back(self) -> None:
        """Copy the device copy to the host: somebody other than its optimizer has changed it. Blocks the host."""
        self.wait_update()
        with weight_set(self.optimizer_state):
            self._copy_out()
        self._changes += 1

    def sync_host(self) -> None:
        """Copy the device copy to the host, if it is newer. Blocks the host.

        Raises `UsageError` if somebody has written to the host copy meanwhile.
        """
        with self._lock:
            self._notice_host_writes()
            if self._state is CopyState.DEVICE_NEWER:
                self._copy_out()

    def mark_device_newer(self) -> None:
        """Note that the optimizer has updated the device copy."""
        with self._lock:
            self._become(CopyState.DEVICE_NEWER)

    def copy_in(self, dst: Tensor, after: tuple[Event, ...]) -> Event:
        """Issue the copy of the host copy to `dst`, device bytes that are there behind `after`. Blocks for a disk."""
        with self._lock:  # so that the last copy noted is the last one issued
            return self.last_read.renew(self.backing.copy_in(dst, after))

    def begin_update(self, work: Work, readers: Event | None) -> None:
        """Note an update of the host copy that is about to be handed in; it ends with `finish_update`.

        The device copy is refreshed behind `readers`; None while more of them may come, up to `set_readers`.
        """
        with self._lock:
            device = self.parameter.detach() if self.on_device else None
            update = HostUpdate(work=work, device=device, readers=readers)
            self._become(CopyState.UPDATING)
            self._update = update  # no interrupt comes between these two lines: nothing is called

    def set_readers(self, readers: Event) -> int:
        """Have the device copy refreshed behind `readers`, now or once the update is done; return bytes copied.

        Does nothing if the readers are known.
        """
        with self._lock:
            if self._update.readers is None:
                self._update.readers = readers
            waits = self._state is CopyState.HOST_NEWER and self._update.device is not None
            return self._refresh_behind_readers() if waits else 0

    def finish_update(self) -> int:
        """End an update that has written the host copy, from any thread; return the bytes copied to the device.

        That is 0 without a device copy, and while the readers are not known, which leaves it to `set_readers`.
        """
        with self._lock:
            if self._state is not CopyState.UPDATING:  # it has ended, and who ended it was interrupted
                return 0
            return self._refresh_behind_readers()

    def join_update(self) -> None:
        """Block the host until no update is under way, however the last one went."""
        if (work := self._update.work) is not None:
            work.exception()

    def wait_update(self) -> None:
        """Block the host until no update is under way; raises what it raised, to whoever asks first."""
        update = self._update
        if (work := update.work) is None:
            return
        error = work.exception()
        with self._lock:
            first, update.work = update.work is work, None
            if error is None or not first:
                return
            if self._state is CopyState.UPDATING:
                self._become(CopyState.HOST_NEWER if self.on_device else CopyState.HOST)
        raise InvariantError(
            f"{self.name} could not be updated: {error!r}; its weight and state may be those of before, or in part "
            "those of after: go back to a checkpoint."
        ) from error

    def count_update(self, optimizer: object) -> None:
        """Note that an optimizer updates the parameter: who has saved it for a backward is told, and another one."""
        increment_version(self.parameter)
        self._updates += 1
        self._changes += self._optimizer is not None and self._optimizer() is not optimizer
        self._optimizer = weakref.ref(optimizer)

    def update_on_host(self) -> None:
        """Have the parameter updated in host memory again; its optimizer's state leaves the device."""
        if self.updated_on_device:
            self.updated_on_device = False
            if self.place_state is not None:
                self.place_state()

    def pin(self) -> None:
        """Keep the parameter on the device, as a plan has it."""
        if not self.resident:
            self.load()
            self.resident = True

    def unpin(self) -> None:
        """Evict a parameter that a plan kept on the device."""
        if self.resident:
            self.wait_update()
            self.resident = False
            self.evict()

    def stay(self, *, updated_here: bool) -> None:
        """Pin the parameter, as steps have it, with its gradient and its optimizer's state if it is `updated_here`."""
        if not updated_here:
            self.update_on_host()
        self.pin()
        self.planned_by_step, self.updated_on_device = True, updated_here

    def leave(self) -> None:
        """End `stay`: evict the parameter, and its optimizer's state, though host memory may have no room for that."""
        self.planned_by_step = False
        if not self.is_dead:
            try:
                self.update_on_host()
            finally:
                self.unpin()

    def load_for_forward(self, forward: object, *, inference: bool) -> bool:
        """Load the parameter for a forward that runs uncompiled, up to `end_forward`; return whether it was absent.

        No backward follows an `inference`.
        """
        with self._lock:
            self._forwards.add(forward)  # from here on, no other forward evicts it
        absent = self.load()
        with self._lock:
            self._for_inference = inference and (absent or self._for_inference)
        return absent

    def end_forward(self, forward: object, *, keep: bool) -> None:
        """Evict the parameter after the last forward that loaded it, but `keep` it for a backward."""
        with self._lock:
            self._forwards.discard(forward)
            self._for_inference = self._for_inference and not keep
            if self._for_inference and not self._forwards and not self.is_dead:
                self.evict()

    def load_for_backward(self) -> bool:
        """Load the parameter for a backward, up to the optimizer's step; return whether it was absent."""
        with self._lock:
            self._for_inference = False
        return self.load()

    def make_ordinary(self, device: torch.device) -> None:
        """Make the parameter an ordinary one, of `device`, with a copy of the host copy."""
        self.parameter.data = self.backing.value().to(device, copy=True)

    def _become(self, state: CopyState) -> None:
        """Change the state, with the lock held."""
        assert state is self._state or state in NEXT_STATES[self._state], (self.name, self._state, state)
        self._state = state

    def _refresh_behind_readers(self) -> int:
        """Copy the host copy to where the last update found the device copy; return the bytes. Lock held."""
        update = self._update
        if update.device is None or not is_on_device(update.device):
            update.device = None
            self._become(CopyState.HOST)
            return 0
        if update.readers is None:
            self._become(CopyState.HOST_NEWER)
            return 0
        self.copy_in(update.device, (update.readers,))  # it outlives the copy, even if the parameter does not
        self._host_version = self.backing.version
        self._become(CopyState.SHARED)
        return self.nbytes

    def _copy_out(self) -> None:
        with self._lock:
            assert self._state is not CopyState.HOST, f"{self.name} has no device copy"
            with self.backing.begin_write(read=False) as write:
                after, source = (self._streams.record_compute(), *write.after), self.parameter.detach()
                write.after = (copied := self._streams.copy(Lane.OUT, write.memory, source, after),)
                copied.synchronize()
                write.commit()
            self._become(CopyState.SHARED)

    def _notice_host_writes(self) -> None:
        """Take account of writes to the host copy by a `state_dict`; raises `UsageError` if the device copy is newer.

        Lock held.
        """
        if self._host_version == self.backing.version:
            return
        self._host_version = self.backing.version
        if self._state is CopyState.DEVICE_NEWER:
            raise UsageError(lost_write_to(self.name))
        if self._state is CopyState.SHARED:
            self._become(CopyState.HOST_NEWER)
