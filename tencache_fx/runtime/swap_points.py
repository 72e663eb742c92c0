"""Serves swap points: graph ops whose deeds a schedule decides, call by call.

The ops are those of `ops.py`; their engine index names a `SwapPoints` instead of an engine:

    offload    kept: note the tensor; else issue the copy out
    release    away: compute waits for the copy out, and the bytes are free; if that is deferred, at a later point
    prefetch   away, and not issued at an earlier point: issue the copy in
    wait       kept: return the tensor itself; else compute waits for the copy in

Offloaded parameters come by `fetch_param` and `wait`, gradients leave by `offload_grad` and `release`: their copies
may be issued at an earlier point, their bytes be freed at a later one (`step_parameters.py`). The gradient of a
parameter that is updated on the device stays, and `take_grad` hands it out.

Which call it is, the region says with `begin`, in the thread that runs the graph. A point (the begin of a graph, each
of its ops, its end) first frees, then prefetches what the schedule lists there, of whatever call.

A storage is held by the first of these that applies: `src` until its bytes are freed, the engine's handle until the
copy in is issued, the engine's ticket until the wait. Handles and tickets of ours own that: what nobody has a handle
of is freed at once.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

from tencache_fx.errors import BudgetError, InvariantError, UsageError
from tencache_fx.hardware.memory_gauge import MemoryGauge, Storages
from tencache_fx.planning.problem import Tier
from tencache_fx.planning.step import FRUGAL, StepSchedule, SwapKey
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.step_parameters import Fetch, Resident, StepParameters
from tencache_fx.runtime.stranded import Stranded
from tencache_fx.runtime.swap import ExtraBytes, GraphRun, State, Swap, is_shared, owner_of, refusal_of
from tencache_fx.runtime.transfers import new_token
from tencache_fx.tensors import storage_of


class SwapPoints:
    """Carries out schedules on one engine. Thread-safe; each thread runs one graph at a time."""

    id: int = -1
    """Index in the registry, a literal in graphs."""
    observer: object | None = None
    """Who decides about the schedule, and lives as long as this."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gauge = MemoryGauge(engine.device)
        self.schedule = FRUGAL
        self.in_known_order = True  # the sizes are those of the plan, and so are the host buffers
        self._lock = threading.RLock()
        self._keys = itertools.count(1)
        self._by_key: weakref.WeakValueDictionary[int, Swap] = weakref.WeakValueDictionary()
        self._live: weakref.WeakValueDictionary[SwapKey, Swap] = weakref.WeakValueDictionary()
        self._extra = ExtraBytes(engine.references)
        self._runs = threading.local()
        self._parameters = StepParameters(engine.release)
        self.stranded = Stranded(self._lock)
        self.on_stranded: Callable[[int, int], None] | None = None  # told the call whose storage has found no room
        self.shared: set[tuple[int, str]] = set()
        """Donated inputs, by region and label, that their caller was seen to keep: nothing is freed if they leave."""

    @property
    def closed(self) -> bool:
        """Whether its engine was closed."""
        return self.engine.closed

    @property
    def extra_bytes(self) -> int:
        """Return the bytes on the device that would not be there if everything left at once."""
        with self._lock:
            nbytes = self._extra.nbytes + self._parameters.gradient_bytes
            if not self.gauge.counts_all:
                return nbytes
            return nbytes + self._parameters.extra_bytes + self._parameters.resident_bytes

    @property
    def resident_bytes(self) -> int:
        """Return the bytes on the device of parameters that stay, and of their optimizers' state."""
        with self._lock:
            return self._parameters.resident_bytes

    def brought_early(self, region: int, call: int, *, backward: bool) -> list[tuple[int, SwapKey, int]]:
        """Return what the schedule brings before its op in the run of a graph: point, name and bytes."""
        with self._lock:
            acts = self.schedule.acts.get((region, call, backward), {})
            return [(at, name, self._bytes_away(name)) for at, (_, names) in acts.items() for name in names]

    def _bytes_away(self, name: SwapKey) -> int:
        if (swap := self._live.get(name)) is None:
            return self._parameters.bytes_to_fetch(name)
        return swap.nbytes if swap.state is State.AWAY else 0

    def owners(self) -> Mapping[SwapKey, Resident]:
        """Return the parameters that calls have fetched last, by the fetch."""
        with self._lock:
            return self._parameters.owners

    def keep_residents(self, residents: Mapping[Resident, bool], leaving: Iterable[Resident] = ()) -> None:
        """Have these parameters stay on the device in all planned steps, with their state if that is true.

        Of others, those `leaving` leave at once.
        """
        with self._lock:
            self._parameters.keep_residents(residents)
            for owner in leaving:
                self._parameters.place(owner)

    def forget(self, regions: Collection[int]) -> None:
        """Forget what was seen of these regions, of which no code is left."""
        with self._lock:
            self.shared = {each for each in self.shared if each[0] not in regions}
            self._parameters.forget(regions)

    def forget_gradients(self) -> None:
        """Count gradients that have stayed as held by others: a round begins."""
        with self._lock:
            self._parameters.forget_gradients()

    def see(self, tensors: Iterable[Tensor]) -> Storages:
        """Show the gauge what a graph takes or returns, and return what it says.

        Parameters that stay are counted apart.
        """
        with self._lock:
            if self._parameters.any_stay and not self.gauge.counts_all:
                tensors = [value for value in tensors if not self._is_resident(value)]
            return self.gauge.see(tensors)

    @property
    def in_use(self) -> int:
        """Return how many storages wait for their backward."""
        return len(self._live)

    def call_of(self, tensors: Iterable[Tensor]) -> tuple[int, int] | None:
        """Return the region and the call that the first handle of ours among `tensors` belongs to."""
        found = (swap.name for tensor in tensors if (swap := self._owned_by(tensor)) is not None)
        return next(((name.region, name.call) for name in found), None)

    def is_here(self, name: SwapKey) -> bool:
        """Return whether a storage that waits for its backward is on the device."""
        swap = self._live.get(name)
        return swap is not None and swap.state is State.HERE

    def holds(self, names: Iterable[SwapKey]) -> bool:
        """Return whether one of these storages waits for its backward."""
        return any(name in self._live for name in names)

    def follow(self, schedule: StepSchedule) -> None:
        """Follow `schedule` from now on; what stays on the device, and would not by it, leaves."""
        with self._lock:
            if schedule is not self.schedule:
                self._parameters.settle()
            self.schedule = schedule
            leaving = [swap for swap in self._live.values() if swap.counted_bytes and swap.name not in schedule.kept]
            for swap in leaving:
                if swap.state is State.HERE:
                    self._free(swap)

    def make_room(self, nbytes: int, call: tuple[int, int]) -> int:
        """Have what stays leave, the oldest first, but for that of `call`; return the bytes: `nbytes`, if possible."""
        left_bytes = 0
        with self._lock:
            for swap in list(self._live.values()):
                counted_bytes = swap.counted_bytes
                if left_bytes >= nbytes:
                    break
                if counted_bytes and swap.state is State.HERE and (swap.name.region, swap.name.call) != call:
                    self._free(swap)
                    left_bytes += counted_bytes - swap.counted_bytes
        return left_bytes

    def begin(self, region: int, call: int, *, backward: bool) -> None:
        """Note that this thread begins to run a graph."""
        self._runs.now = GraphRun(region, call, backward)
        self._pass_point()

    def end(self) -> None:
        """Note that the graph of this thread is over."""
        try:
            self._pass_point()
        finally:
            self._runs.now = None

    def abandon(self) -> None:
        """Note that the graph of this thread has raised, if it had begun."""
        self._runs.now = None
        with self._lock:
            self._parameters.settle()

    def settle(self) -> None:
        """Note that a step is over, be it before its order was: no parameter is on its way to a graph any more."""
        with self._lock:
            self._parameters.settle()

    def offload(self, src: Tensor, tier: Tier, label: str = "") -> Tensor:
        """Issue the copy out, or only note the tensor; return the handle."""
        run = self._pass_point()
        self.gauge.see((src,))
        with self._lock:
            name = SwapKey(run.region, run.call, label)
            alias = src.detach()  # a tensor of our own, so that it shows who else has the storage
            # Where generated code calls this, it may have a version counter of its own, too.
            nbytes = src.numel() * src.itemsize
            swap = Swap(next(self._keys), name, nbytes, alias, alias._version, extra=self._extra)
            leaves = name not in self.schedule.kept and (name.region, label) not in self.shared
            stays = leaves and not self._leave(swap)
            before = self._live.get(name)
            if before is not None:  # of a round that was abandoned: nothing of it leaves any more
                before.forget()
            self._live[name] = self._by_key[swap.key] = swap
            handle = owner_of(swap)
        if stays and self.on_stranded is not None:  # whose lock is taken before ours
            self.on_stranded(run.region, run.call)
        return handle

    def release(self, handle: Tensor, src: Tensor, *, donated: bool = False) -> Tensor:
        """Free the bytes once the copy out is over, if the schedule has that done here."""
        self._pass_point()
        with self._lock:
            if (swap := self._owned_by(handle)) is None:  # a gradient's
                self._parameters.release(handle, src, deferred=self.schedule.deferred.__contains__)
                return new_token()
            swap.donated, swap.released = donated, True
            swap.shared = (swap.name.region, swap.name.label) in self.shared
            swap.count()
            if swap.handle is not None and swap.name not in self.schedule.deferred:
                self._free(swap)
        return new_token()

    def fetch(self, label: str, fetch: Fetch) -> Tensor:
        """Return the ticket of an offloaded parameter, whose copy in may have been issued at an earlier point."""
        run = self._pass_point()
        with self._lock:
            if self.schedule is not FRUGAL:
                self._parameters.place(fetch.owner)
            return self._parameters.fetch(SwapKey(run.region, run.call, label), fetch)

    def pass_by(self, issue: Callable[[], Tensor]) -> Tensor:
        """Run a graph op that no schedule has a say in, at its point."""
        self._pass_point()
        return issue()

    def store(self, label: str, issue: Callable[[], Tensor]) -> Tensor:
        """Have the copy out of a gradient issued; return the engine's handle."""
        run = self._pass_point()
        handle = issue()
        with self._lock:
            self._parameters.note_stored(SwapKey(run.region, run.call, label), handle)
        return handle

    def keep(self, label: str, gradient: Tensor) -> Tensor:
        """Keep a gradient on the device, for `take`; return the handle."""
        run = self._pass_point()
        with self._lock:
            self._parameters.keep_gradient(gradient)
            name = SwapKey(run.region, run.call, label)
            swap = Swap(next(self._keys), name, gradient.numel() * gradient.itemsize, gradient, gradient._version)
            self._by_key[swap.key] = swap
            return owner_of(swap)

    def take(self, handle: Tensor) -> Tensor | None:
        """Return the gradient that was kept by this handle, which ends; None if it was offloaded."""
        with self._lock:
            if (swap := self._owned_by(handle)) is None:
                return None
            gradient, _, _ = swap.end()
        if gradient is None:
            raise UsageError(refusal_of(swap))
        return gradient

    def prefetch(self, handle: Tensor) -> Tensor:
        """Issue the copy in, unless that was done before or the storage is here; return the ticket."""
        self._pass_point()
        with self._lock:
            swap = self._find(handle, "prefetch")
            if swap.asked:
                raise UsageError(refusal_of(swap))
            self._bring(swap)
            swap.asked = True
            swap.count()
            return owner_of(swap)

    def wait(self, ticket: Tensor) -> Tensor:
        """Return the tensor: the very one, if it has stayed and nobody else has it."""
        self._pass_point()
        if (swap := self._owned_by(ticket)) is None:  # a parameter's
            return self.engine.wait(ticket)
        with self._lock:
            if swap.state is State.ENDED:
                raise UsageError(refusal_of(swap))
            src, coming, leaving = swap.end()
            if self._live.get(swap.name) is swap:
                del self._live[swap.name]
        if swap.modified or (src is not None and src._version != swap.version):
            raise UsageError(
                f"{swap.name.label}, which the backward of region {swap.name.region} reads, was modified in place "
                "after the forward; clone it before it is written to."
            )
        if coming is not None:
            return self.engine.wait(coming)
        assert src is not None
        if not (swap.donated and is_shared(src, 1 if leaving is None else 1 + self.engine.references(leaving))):
            return src
        with self._lock:
            if self.in_known_order:  # else it may be so in this step alone
                self.shared.add((swap.name.region, swap.name.label))
        # The code that reads it may write over it, which whoever gave it to the region must not see.
        return torch.empty_strided(src.size(), src.stride(), dtype=src.dtype, device=src.device).copy_(src)

    def _pass_point(self) -> GraphRun:
        """Do what the schedule lists at this point of the graph that this thread runs."""
        run: GraphRun | None = getattr(self._runs, "now", None)
        if run is None:
            raise InvariantError("a swap point ran outside of a call of its region.")
        position, run.position = run.position, run.position + 1
        if run.schedule is not self.schedule:
            run.schedule = self.schedule
            run.acts = run.schedule.acts.get((run.region, run.call, run.backward), {})
        if position in run.acts:
            with self._lock:
                if run.schedule is self.schedule:  # another thread may have left it
                    self._act(*run.acts[position])
        return run

    def _act(self, frees: tuple[SwapKey, ...], prefetches: tuple[SwapKey, ...]) -> None:
        for name in frees:
            swap = self._live.get(name)
            if swap is not None and swap.released and swap.handle is not None and swap.state is State.HERE:
                self._free(swap)
            elif swap is None:
                self._parameters.free(name)
        for name in prefetches:
            swap = self._live.get(name)
            if swap is not None and swap.released:
                self._bring(swap)
            elif swap is None:
                self._parameters.fetch_ahead(name)

    def _leave(self, swap: Swap) -> bool:
        """Issue the copy out: to the tier that the schedule says; without one, to disk if host memory is full.

        Return whether it leaves: where no schedule has reserved buffers, what finds no room stays.
        """
        assert swap.src is not None
        tier = self.schedule.away.get(swap.name, Tier.HOST)
        planned = self.in_known_order and swap.name in self.schedule.away
        try:
            swap.handle = self.engine.offload(swap.src, tier, swap.name.label, or_disk=True, planned=planned)
        except BudgetError as error:
            if planned:
                raise
            self.stranded.add(swap, error, counts=self.engine.store is None)
            return False
        self.stranded.discard(swap)
        return True

    def _free(self, swap: Swap) -> None:
        """Let compute wait for the copy out, which is issued if need be; the bytes are free then. Lock held."""
        if swap.handle is None and not self._leave(swap):
            return
        assert swap.handle is not None
        assert swap.src is not None
        swap.modified = swap.src._version != swap.version
        self.engine.release(swap.handle, swap.src, donated=swap.donated)
        swap.src, swap.state = None, State.AWAY
        swap.count()

    def _bring(self, swap: Swap) -> None:
        """Issue the copy in of what is away; what has not gone yet stays. Lock held."""
        if swap.state is State.HERE:
            swap.leaving, swap.handle = swap.handle, None
        elif swap.state is State.AWAY:
            assert swap.handle is not None
            swap.ticket, swap.handle, swap.state = self.engine.prefetch(swap.handle), None, State.COMING
            if not self.gauge.counts_all and (destination := self.engine.destination(swap.ticket)) is not None:
                self.gauge.see((destination,))
            swap.count()

    def _owned_by(self, tensor: Tensor) -> Swap | None:
        """Return the swap that `tensor` is a handle or ticket of; None for any other tensor, or a copy of one."""
        if tensor.dtype is not torch.int64 or not tensor.is_cpu or tensor.numel() != 1 or not tensor.data_ptr():
            return None  # the last of these where a hook of the caller's has freed its memory
        swap = self._by_key.get(int(tensor.item()))
        return swap if swap is not None and tensor.data_ptr() in swap.owners else None

    def _is_resident(self, tensor: Tensor) -> bool:
        return (storage := storage_of(tensor)) is not None and self._parameters.is_resident(storage._cdata)

    def _find(self, tensor: Tensor, deed: str) -> Swap:
        if (swap := self._owned_by(tensor)) is None:
            raise UsageError(
                f"cannot {deed} a tensor: the handle that autograd saved for it was copied; run the compiled region "
                "outside of saved_tensors_hooks that copy (save_on_cpu, for instance)."
            )
        return swap
