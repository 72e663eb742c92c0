"""A parameter whose bytes are at home in host memory, and on the device only while somebody reads them.

Such a parameter keeps its shape, dtype and device, but its storage there is empty. What is at home is always right, but
for an update under way: whoever reads waits for that one update, and whoever writes waits for the last copy that reads.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tencache_fx import compat
from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.model_state.disk_state import DiskState
from tencache_fx.model_state.host_gradient import HostGradientBuffer
from tencache_fx.model_state.host_state import State
from tencache_fx.planning.problem import STATE_BYTES, Tier
from tencache_fx.runtime.buffers import Buffer
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.runtime.transfers import Layout, raw_bytes


class OffloadedParameter:
    """Where one parameter is at home.

    `resident` says that it stays on the device, as the region that ran last has planned it, `summoned` that somebody
    may change it there.
    """

    def __init__(self, parameter: Tensor, name: str, buffer: Buffer, streams: Streams) -> None:
        self.name = name
        self.layout = Layout.of(parameter, name)
        self.buffer = buffer
        storage = buffer.memory.untyped_storage()
        with torch.inference_mode(False):  # they count their versions, each its own
            empty = torch.empty(0, dtype=parameter.dtype, device="cpu")
            self._host = empty.clone().set_(storage, 0, parameter.size(), parameter.stride())
            self._elements = empty.set_(storage, 0, (parameter.numel(),), (1,))
        self.state_bytes = STATE_BYTES * parameter.numel()  # what its optimizer keeps of it, once that has told
        self.resident = False
        self.updated_here = False  # it stays on the device, and so do its gradient and its optimizer's state
        self.state: weakref.ref[State | DiskState] | None = None  # as its optimizer keeps it
        self.place_state: Callable[[], None] | None = None  # has its optimizer move that where it belongs
        self.summoned = False
        self.left: Event | None = None  # the last copy that reads `host`
        self.parts: set[Any] = set()  # what a part of its gradient may still come from, see `flights`
        self.early: HostGradientBuffer | None = (
            None  # the gradient by which its update began before autograd told of it
        )
        self.forget: Callable[[], object] = lambda: None  # is called when the parameter dies, or has this home no more
        self.update_now: Callable[[HostGradientBuffer], None] | None = (
            None  # begins its update, if its optimizer wants that
        )
        self._parameter = weakref.ref(parameter)
        self._changes = 0  # made on the device, and not by its optimizer
        self._updates = 0  # by which its optimizer has raised the parameter's version
        self._host_version = self._host._version  # of what is on the device
        self._streams = streams
        self._update: Future[None] | None = None
        self._readers: Event | None = None  # behind it, nobody reads the value before the update on the device
        self._stale = False  # on the device is the value before the update still
        self._newer_here = False  # at home is
        self._forwards = weakref.WeakSet[Any]()  # uncompiled ones under way that read it
        self._passes = False  # it is on the device for forwards alone that no backward follows
        self._here: Tensor | None = None  # the parameter as its last update found it
        self._lock = threading.RLock()  # the bytes on the device come and go under it

    @property
    def nbytes(self) -> int:
        """Return the bytes of the parameter."""
        return self.layout.nbytes

    @property
    def parameter(self) -> Tensor:
        """Return the parameter itself."""
        parameter = self._parameter()
        assert parameter is not None, "a home goes with its parameter"
        return parameter

    @property
    def version(self) -> int:
        """Return what grows when somebody other than its optimizer has written to the parameter, on either side.

        Whoever has `host`, by a `state_dict` say, may write to that.
        """
        return self._changes + self._host._version

    @property
    def written_here(self) -> int:
        """Return what grows when somebody other than its optimizer writes to the parameter on the device."""
        parameter = self._parameter()
        return 0 if parameter is None or parameter.is_inference() else parameter._version - self._updates

    def note_update(self) -> None:
        """Say that its optimizer updates the parameter: whoever has saved it for a backward is told."""
        increment_version(self.parameter)
        self._updates += 1

    @property
    def state_here_bytes(self) -> int:
        """Return the bytes of its optimizer's state that are on the device."""
        state = None if self.state is None else self.state()
        return state.nbytes if state is not None and state.place is Tier.DEVICE else 0

    def update_elsewhere(self) -> None:
        """Have the parameter updated at home again; its optimizer's state leaves the device."""
        if self.updated_here:
            self.updated_here = False
            if self.place_state is not None:
                self.place_state()

    @property
    def host(self) -> Tensor:
        """Return the parameter at home, in its shape and strides: a tensor of the CPU. Blocks if it was out of date."""
        self.come_home()
        return self._host

    @property
    def elements(self) -> Tensor:
        """Return the parameter at home for its optimizer: [n], in the order of memory. Blocks if it was out of date.

        What is written to it is no change by somebody else (`version`).
        """
        self.come_home()
        return self._elements

    @property
    def on_device(self) -> bool:
        """Say whether the parameter's bytes are on the device, too."""
        return is_on_device(self.parameter)

    def has_left(self) -> bool:
        """Return True if no copy reads what is at home any more."""
        return self.left is None or self.left.query()

    @property
    def updating(self) -> bool:
        """Say whether an update is under way."""
        with self._lock:
            return self._update is not None and not self._update.done()

    def begin_update(self, submit: "Callable[[], Future[None]]", readers: Event | None) -> "Future[None]":
        """Have readers wait from now on for the update that `submit` hands in; nothing else may be under way.

        What is on the device is renewed behind `readers`; None while more of them may come, up to `end_readers`.
        """
        with self._lock:  # an update that ends at once finds its readers
            self._readers = readers
            self._here = self.parameter.detach()  # who gives the parameter other bytes meanwhile keeps those
            self._update = submit()
            return self._update

    def end_readers(self, readers: Event) -> int:
        """Have what is on the device renewed behind `readers`, now or once the update is done; return bytes copied.

        Does nothing if the readers are known.
        """
        with self._lock:
            if self._readers is None:
                self._readers = readers
            return self.renew() if self._stale else 0

    def expect(self, part: object) -> None:
        """Note what a part of the gradient may come from; a backward before it is over, or has failed."""
        self.early = None
        self.parts.add(part)

    def end_parts(self) -> None:
        """Say that all parts of a gradient have been added up of which the backward has begun."""
        for part in self.parts.copy():  # others die meanwhile
            if part.started:
                self.parts.discard(part)

    def wait(self) -> None:
        """Block the host until no update is under way, however the last one went."""
        if (update := self._update) is not None:
            update.exception()

    def settle(self) -> None:
        """Block the host until what is at home is right; raises what an update raised, to whoever asks first."""
        update = self._update
        if update is None:
            return
        error = update.exception()
        with self._lock:
            first = self._update is update
            self._update = None if first else self._update
        if error is not None and first:
            raise InvariantError(
                f"{self.name} could not be updated: {error!r}; its weight and state may be those of before, or in part "
                "those of after: go back to a checkpoint."
            ) from error

    def write_after(self) -> None:
        """Block the host until nobody reads what is at home any more: then it may be written to."""
        if self.left is not None:
            self._streams.settle((self.left,))

    def copy_in(self, dst: Tensor, after: tuple[Event, ...]) -> Event:
        """Issue the copy of what is at home to `dst`, device bytes that are there behind `after`."""
        with self._lock:  # so that the last copy noted is the last one issued
            self.left = self._streams.copy(Lane.IN, raw_bytes(dst), self.buffer.memory[: self.nbytes], after)
            return self.left

    def bring(self) -> bool:
        """Have the parameter's bytes on the device, behind its last update, in order with the caller's compute stream.

        Returns whether they were not there.
        """
        self.settle()
        self._refuse_both()
        with self._lock:
            away = not self.on_device
            if away:
                compat.give_bytes(self.parameter.untyped_storage(), self.nbytes)
                self.refresh()
            elif self._stale or self._host_version != self._host._version:
                self.refresh()
            elif self.left is not None:
                self._streams.wait_compute(self.left)
        return away

    def come_for(self, forward: object, *, passes: bool) -> bool:
        """Bring the parameter for a forward that runs uncompiled, up to its `go_from`; `passes` if no backward follows.

        Returns whether its bytes were not there.
        """
        with self._lock:
            self._forwards.add(forward)  # from here on, no other forward puts it away
        away = self.bring()
        with self._lock:
            self._passes = passes and (away or self._passes)
        return away

    def go_from(self, forward: object, *, stays: bool) -> None:
        """Put the parameter away after the last forward for which it came, unless it `stays` for a backward."""
        with self._lock:
            self._forwards.discard(forward)
            self._passes = self._passes and not stays
            if self._passes and not self._forwards and not self.is_over:
                self.put_away()

    def come_for_backward(self) -> bool:
        """Bring the parameter for a backward, up to the optimizer's step; return whether its bytes were not there."""
        with self._lock:
            self._passes = False
        return self.bring()

    @property
    def is_over(self) -> bool:
        """Say whether the parameter is gone."""
        return self._parameter() is None

    def alias(self) -> Tensor:
        """Return the parameter as it is on the device, for `take_back`."""
        with torch.inference_mode(False):
            return self.parameter.detach()

    def take_back(self, own: Tensor) -> Tensor | None:
        """See that the parameter, of which `own` is an alias, has its own bytes; return what it was given instead."""
        given = self.parameter.detach()
        is_own = given.untyped_storage()._cdata == own.untyped_storage()._cdata
        if is_own and (Layout.of(given, self.name), given.storage_offset()) == (self.layout, own.storage_offset()):
            return None
        given = given.clone() if is_own else given  # a view of them, which it is to have as they were
        self.parameter.data = own
        return given

    def stay(self) -> None:
        """Have the parameter stay on the device."""
        if not self.resident:
            self.bring()
            self.resident = True

    def leave(self) -> None:
        """Have a parameter that stayed on the device away again."""
        if self.resident:
            self.settle()
            self.resident = False
            self.put_away()

    def note_update_here(self) -> None:
        """Say that the optimizer has updated what is on the device: what is at home is then out of date."""
        self._newer_here = True

    def refresh(self) -> None:
        """Copy what is at home over what is on the device."""
        after = self._streams.record_compute()
        self._stale, self._host_version = False, self._host._version
        self._streams.wait_compute(self.copy_in(self.parameter.detach(), (after,)))

    def renew(self) -> int:
        """Copy what is at home over what is on the device, if it is there, behind its readers: from any thread.

        Returns the bytes copied; 0 while the readers are not known, which leaves it to `end_readers`.
        """
        with self._lock:
            here = self._here
            if here is None or not is_on_device(here):
                self._stale, self._here = False, None
                return 0
            self._stale = self._readers is None
            if self._readers is None:
                return 0
            self._host_version = self._host._version
            self.copy_in(here, (self._readers,))  # `here` outlives the copy, even if the parameter does not
            return self.nbytes

    def take(self) -> None:
        """Copy what is on the device home: somebody has changed it. Blocks the host."""
        self.settle()
        self._copy_out()
        self._changes += 1

    def _copy_out(self) -> None:
        self.write_after()
        after = (self._streams.record_compute(),)
        memory = self.buffer.memory[: self.nbytes]
        self._streams.copy(Lane.OUT, memory, raw_bytes(self.parameter.detach()), after).synchronize()
        self._newer_here = False

    def come_home(self) -> None:
        """Copy what is on the device home, if it is newer. Blocks the host."""
        self._refuse_both()
        if self._newer_here:
            self._copy_out()

    def fill(self, value: Tensor) -> None:
        """Set what is at home, before anybody reads it."""
        self._host.copy_(value)  # in order with what computed it: a synchronous copy
        self._host_version = self._host._version

    def _refuse_both(self) -> None:
        """Raise `UsageError` if both sides were written to: one by the optimizer, the other by a `state_dict`."""
        if self._newer_here and self._host_version != self._host._version:
            self._host_version = self._host._version
            raise UsageError(
                f"{self.name} was written to by a tensor of a state_dict that is older than its last update, which was "
                "on the device; what was written is dropped: call state_dict() anew after step(), or use summon."
            )

    def put_away(self) -> None:
        """Free the device bytes, unless a plan counts on them; what runs on the compute stream still reads them."""
        with self._lock:
            if not self.resident and not self.summoned and self.on_device:
                self.come_home()
                if self.left is not None:
                    self._streams.wait_compute(self.left)  # the allocator hands them out in that stream's order
                self.take_bytes_away()
                self._stale = False

    def take_bytes_away(self) -> None:
        """Free the device bytes, whoever may read them; from torch 2.14 on, who does is told."""
        self._passes = False
        compat.take_bytes(
            self.parameter.untyped_storage(),
            f"{self.name} is at home, in host memory, and nothing has brought it to the device: read it inside "
            "`with tencache_fx.summon(model):`, in a function compiled with backend='tencache', or in the forward of "
            "the module that has it, as a module also has what its __init__ takes over, by self.weight = other.weight.",
        )

    def move_out(self, device: torch.device) -> None:
        """Make the parameter an ordinary one, of `device`, with a copy of what is at home."""
        self.parameter.data = self._host.to(device, copy=True)


def is_on_device(parameter: Tensor) -> bool:
    """Say whether there are bytes behind a parameter."""
    return compat.has_bytes(parameter.untyped_storage()) or parameter.numel() == 0
