"""Offloaded parameters that are fetched before the graph that reads them runs, and gradients that stay behind it.

Which parameter a call reads is known once it has run: blocks that share their code have others in each call. So what
was fetched in one step can be fetched ahead in the next. If another parameter comes, or its value has changed since, it
is fetched anew. Guarded by the lock of the `SwapPoints` that this belongs to.

Some parameters stay on the device, as the plans of all steps have it: graphs then read a copy of what is there. If the
optimizer's state of one is there, too, so does its gradient stay.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, UntypedStorage

from tencache_fx.planning.step import SwapKey

_REMEMBERED = 1 << 16


class Resident(Protocol):
    """An offloaded parameter, which may stay on the device."""

    planned_by_step: bool

    @property
    def is_dead(self) -> bool:
        """Whether the parameter is gone."""

    @property
    def parameter(self) -> Tensor:
        """Return the parameter itself."""

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the parameter, and of its optimizer's state, that are on the device."""

    def stay(self, *, updated_here: bool) -> None:
        """Keep the parameter on the device, and its gradient and its optimizer's state there or in host memory."""

    def leave(self) -> None:
        """Evict the parameter and its optimizer's state."""


class Fetch(Protocol):
    """How to fetch one parameter."""

    @property
    def owner(self) -> Resident | None:
        """Return the parameter; None if it is gone."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the parameter."""

    @property
    def stamp(self) -> object:
        """Return something that is another one as soon as the parameter, or its value, is; None if it is gone."""

    def issue(self) -> Tensor:
        """Issue the copy in; return the engine's ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """A parameter on its way to a graph that does not run yet."""

    ticket: Tensor
    stamp: object
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """A gradient whose copy out is issued, and whose bytes are not free yet."""

    handle: Tensor
    src: Tensor


class StepParameters:
    """The parameters and gradients of all calls; `release` lets compute wait for a copy out, and its bytes be free."""

    def __init__(self, release: Callable[[Tensor, Tensor], object]) -> None:
        self._release = release
        self._known: dict[SwapKey, Fetch] = {}
        self._ahead: dict[SwapKey, _Ahead] = {}
        self._stored: dict[int, SwapKey] = {}  # by the address of a handle
        self._behind: dict[SwapKey, _Behind] = {}
        self._residents: WeakKeyDictionary[Resident, bool] = WeakKeyDictionary()
        self._pinned: WeakSet[Resident] = WeakSet()
        self._gradients: dict[ref[UntypedStorage], int] = {}  # that have stayed, with their bytes

    @property
    def owners(self) -> Mapping[SwapKey, Resident]:
        """The parameters that calls have fetched last, by the fetch."""
        found = {name: fetch.owner for name, fetch in self._known.items()}
        return {name: owner for name, owner in found.items() if owner is not None}

    def keep_residents(self, residents: Mapping[Resident, bool]) -> None:
        """Have these parameters, and no others, stay from their next fetch on; with their state, if that is true."""
        self._residents = WeakKeyDictionary(residents)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes on the device of the parameters that stay, and of their optimizers' state."""
        return sum(owner.device_bytes for owner in self._pinned if owner.planned_by_step)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that have stayed since `forget_gradients`, and live."""
        return sum(list(self._gradients.values())) if self._gradients else 0  # at once: others let storages die

    def forget_gradients(self) -> None:
        """Count the gradients that have stayed as what anybody holds: a step begins that did not make them."""
        self._gradients.clear()

    @property
    def any_stay(self) -> bool:
        """Whether parameters stay now."""
        return bool(self._pinned)

    def is_resident(self, storage: int) -> bool:
        """Return whether this storage, given by its address, is that of a parameter that stays."""
        alive = (owner.parameter for owner in self._pinned if owner.planned_by_step and not owner.is_dead)
        return any(parameter.untyped_storage()._cdata == storage for parameter in alive)

    def place(self, owner: Resident | None) -> None:
        """Have a parameter stay or leave, as the plans have it; blocks the host while it is updated."""
        if owner is None:
            return
        if owner in self._residents:
            owner.stay(updated_here=self._residents[owner])
            self._pinned.add(owner)
        elif owner in self._pinned:
            self._pinned.discard(owner)
            owner.leave()

    def _forget(self, gradient: "ref[UntypedStorage]") -> None:
        self._gradients.pop(gradient, None)

    def keep_gradient(self, gradient: Tensor) -> None:
        """Note a gradient that stays on the device."""
        storage = gradient.untyped_storage()  # its Python object lives as long as it does
        self._gradients[ref(storage, self._forget)] = storage.nbytes()

    @property
    def extra_bytes(self) -> int:
        """Return the bytes on the device that would not be there if everything came and left at its own graph op."""
        ahead = sum(each.nbytes for each in self._ahead.values())
        return ahead + sum(each.src.numel() * each.src.itemsize for each in self._behind.values())

    def bytes_to_fetch(self, name: SwapKey) -> int:
        """Return the bytes of the parameter that `fetch_ahead` would bring for this name."""
        return self._known[name].nbytes if name in self._known and name not in self._ahead else 0

    def fetch_ahead(self, name: SwapKey) -> None:
        """Issue the copy in of what the call read in its last step, unless it is under way."""
        fetch = self._known.get(name)
        if fetch is None or name in self._ahead or (stamp := fetch.stamp) is None:
            return
        self._ahead[name] = _Ahead(ticket=fetch.issue(), stamp=stamp, nbytes=fetch.nbytes)

    def fetch(self, name: SwapKey, fetch: Fetch) -> Tensor:
        """Return the ticket of a parameter that a graph reads now: the one under way, if it still is the right one."""
        self._known.pop(name, None)  # the last one used is the last to be forgotten
        self._known[name] = fetch
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        ahead = self._ahead.pop(name, None)
        if ahead is not None and ahead.stamp == fetch.stamp:
            return ahead.ticket
        return fetch.issue()

    def forget(self, regions: Collection[int]) -> None:
        """Forget what these regions have fetched."""
        self._known = {name: fetch for name, fetch in self._known.items() if name.region not in regions}

    def note_stored(self, name: SwapKey, handle: Tensor) -> None:
        """Note whose gradient was offloaded by `handle`, for its release."""
        self._stored[handle.data_ptr()] = name

    def release(self, handle: Tensor, src: Tensor, *, deferred: Callable[[SwapKey], bool]) -> None:
        """Release a gradient, or keep its bytes up to `free`, if that is `deferred`."""
        name = self._stored.pop(handle.data_ptr(), None)
        if name is not None and deferred(name):
            self._behind[name] = _Behind(handle=handle, src=src.detach())
        else:
            self._release(handle, src)

    def free(self, name: SwapKey) -> bool:
        """Release a gradient that was kept; return whether there was one."""
        behind = self._behind.pop(name, None)
        if behind is not None:
            self._release(behind.handle, behind.src)
        return behind is not None

    def settle(self) -> None:
        """Give up all that is under way: nothing is ahead of its graph op, and nothing is behind it."""
        self._ahead.clear()
        self._stored.clear()
        for name in tuple(self._behind):
            self.free(name)
