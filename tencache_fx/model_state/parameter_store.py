"""All parameters of a device that are at home in host memory, and who works on them.

A home is found by its parameter's storage, which every alias of the parameter shares.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tencache_fx.errors import UsageError
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter
from tencache_fx.model_state.update_queue import Updates
from tencache_fx.runtime.buffers import Buffer, Use
from tencache_fx.runtime.pool import Pool
from tencache_fx.runtime.streams import Streams


class ParameterStore:
    """All homes of one device, and the thread that works on them (`updates`)."""

    def __init__(self, pool: Pool, streams: Streams) -> None:
        self.updates = Updates(streams)
        self.kept = WeakTensorKeyDictionary()  # trained parameters without a home, which stay with all that is theirs
        self._pool = pool
        self._streams = streams
        self._by_storage: dict[int, OffloadedParameter] = {}
        self._gone: deque[Buffer] = deque()
        self._discarded: deque[Buffer] = deque()
        self._left_behind: deque[OffloadedParameter] = deque()
        self._guards: list[Any] = []  # hooks of torch's, while there are homes
        self._draining = threading.Lock()  # threads take turns; finalizers only append
        pool.keep_free(self._state_to_come)

    def __iter__(self) -> Iterator[OffloadedParameter]:
        for key, home in tuple(self._by_storage.items()):
            parameter = home._parameter()
            if parameter is not None and parameter.untyped_storage()._cdata == key:  # else it has another storage now
                yield home

    def __len__(self) -> int:
        return len(self._by_storage)

    def find(self, tensor: Tensor) -> OffloadedParameter | None:
        """Return the home of a parameter, or of an alias of it; None if it has none here."""
        if not self._by_storage:
            return None
        key = tensor.untyped_storage()._cdata
        home = self._by_storage.get(key)
        if home is None or home.parameter.untyped_storage()._cdata == key:
            return home
        del self._by_storage[key]  # somebody has given the parameter another storage
        return None

    def settle_in(self, parameter: Tensor, name: str, device: torch.device) -> OffloadedParameter:
        """Give a parameter, of any device, a home; afterwards it is one of `device`, with nothing there.

        Raises `BudgetError` when the host budget has no room for it; then, as after any error, it is as it was.
        """
        self.drain()
        value = parameter.detach()
        buffer = self._pool.lend(value.numel() * value.itemsize, Use.HOME)
        with contextlib.ExitStack() as undo:
            undo.callback(self._pool.discard, buffer)
            undo.callback(setattr, parameter, "data", value)
            empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
            home = OffloadedParameter(empty, name, buffer, self._streams)
            self._streams.settle(buffer.after)
            buffer.after = ()
            home.fill(value)
            parameter.data = empty
            home._parameter = weakref.ref(parameter)
            home.take_bytes_away()
            storage = parameter.untyped_storage()
            self._by_storage[storage._cdata] = home
            home.forget = weakref.finalize(parameter, self._forget, storage._cdata, home)
            home.forget.atexit = False
            undo.pop_all()
        if not self._guards:
            self._guards.append(register_optimizer_step_pre_hook(self._refuse))
            self._guards.append(register_module_module_registration_hook(self._refuse_wrapper))
        return home

    def lend(self, nbytes: int, use: Use) -> Buffer:
        """Lend a buffer, rather when an addition under way is done than a new one before; raises `BudgetError`."""
        self.drain()
        while (buffer := self._pool.lend_at_hand(nbytes, use)) is None and self.updates.additions.wait_for_one():
            self.drain()
        return self._pool.lend(nbytes, use) if buffer is None else buffer

    def lend_state(self, nbytes: int) -> Buffer:
        """Lend a buffer for an optimizer's state, as it comes: clean or not; raises `BudgetError`."""
        buffer = self.lend(nbytes, Use.STATE)
        self._streams.settle(buffer.after)
        buffer.after = ()
        return buffer

    def discard_later(self, buffer: Buffer) -> None:
        """Have a buffer's memory given back to the system by the next call of ours: safe to call from a finalizer."""
        self._discarded.append(buffer)

    def give_back_later(self, buffer: Buffer) -> None:
        """Have a buffer given back by the next call of ours: safe to call from a finalizer."""
        self._gone.append(buffer)

    def drain(self) -> None:
        """Give back the buffers of what has died; those of homes once no copy reads them.

        The memory of a home goes with the last tensor that shares it, such as one of a `state_dict`.
        """
        with self._draining:
            while self._gone:
                self._pool.give_back(self._gone.popleft())
            while self._discarded:
                self._pool.discard(self._discarded.popleft())
            for _ in range(len(self._left_behind)):
                home = self._left_behind.popleft()
                if home.left is None or home.left.query():
                    self._pool.discard(home.buffer)
                else:
                    self._left_behind.append(home)

    def forget_all(self) -> None:
        """Let go of all homes; parameters that are not on the device are lost."""
        self._by_storage.clear()
        self._gone.clear()
        self._discarded.clear()
        self._left_behind.clear()
        while self._guards:
            self._guards.pop().remove()

    def _state_to_come(self) -> int:
        """Return the bytes of host memory that optimizers may yet take for state that they have not made so far."""
        waiting = (home for home in self if not home.updated_here and (home.state is None or home.state() is None))
        trained = ((home, home._parameter()) for home in waiting)
        return sum(home.state_bytes for home, p in trained if p is not None and p.requires_grad)

    def _forget(self, key: int, home: OffloadedParameter) -> None:
        if self._by_storage.get(key) is home:
            del self._by_storage[key]
        self._left_behind.append(home)

    def _refuse(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Stop an optimizer that would change parameters whose bytes are not where it looks for them."""
        if getattr(optimizer, "updates_at_home", False):
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            home = self.find(parameter)
            if home is not None and not home.summoned:
                raise UsageError(
                    f"{type(optimizer).__name__} would update {home.name}, whose home is in host memory; use "
                    "tencache_fx.optim.AdamW, or call step() inside `with tencache_fx.summon(model):`."
                )

    def _refuse_wrapper(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Stop DistributedDataParallel, which sends parameters to all ranks, where it takes a module over.

        Nothing is changed by then, and it sees all that the module contains, however it was put together.
        """
        if child is None or not isinstance(module, DistributedDataParallel):
            return
        for parameter in child.parameters():
            if (home := self.find(parameter)) is not None and not home.summoned:
                raise UsageError(
                    f"{home.name} has its home in host memory, where DistributedDataParallel does not find it; wrap "
                    "the model first and call tencache_fx.offload then, or wrap it inside "
                    "`with tencache_fx.summon(model):`."
                )
