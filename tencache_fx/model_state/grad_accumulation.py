"""Gradients of several backwards, added up in host memory by a thread of their own.

Autograd asks for the sum while it still issues the backward; a host that added at once would wait for the copy out, and
the device for the host. One pass adds and takes the norm of the sum, which clipping may ask for.
"""

import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from traceback import clear_frames
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from tencache_fx.model_state.sum_kernel import Addends, SumKernel
from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.worker import Worker

_BATCH_BYTES = 256 << 20  # some milliseconds: longer, and buffers would be given back late


class Addend(Protocol):
    """A gradient in host memory, or on its way there."""

    @property
    def buffer_memory(self) -> Tensor:
        """The bytes of the buffer that it is in, uint8."""

    @property
    def is_copied(self) -> bool:
        """Whether its copy out is over."""

    @property
    def has_landed(self) -> bool:
        """Whether it is in host memory, with all that is added to it, or never will be."""

    def wait_copied(self) -> None:
        """Block until its copy out is over; raises what that has raised."""

    def wait_landed(self) -> None:
        """Block until it is in host memory, with all that is added to it; raises why it never will be."""


@dataclass(slots=True, eq=False, kw_only=True)
class Addition:
    """A gradient, `more`, to be added to another one, `sums`, both of so many bytes, by the kernel of their dtype.

    `before` is what is added to `sums` earlier, if anything. The sum of the squares is the result of `done`.
    """

    kernel: SumKernel
    sums: Addend | None
    more: Addend | None
    nbytes: int
    before: "Addition | None"
    done: Future[float] = field(default_factory=Future[float])

    @property
    def is_ready(self) -> bool:
        """Whether it could be carried out without waiting, behind those that were begun before it."""
        assert self.sums is not None
        assert self.more is not None
        with contextlib.suppress(BaseException):  # of a device that has failed: `prepare` raises it, too, and tells
            return self.sums.is_copied and self.more.has_landed
        return False

    def prepare(self) -> Addends:
        """Return what is to be added. Blocks until it is there; raises why it never will be.

        Of `before`, which is carried out first, this looks only at how it went, if it is over.
        """
        assert self.sums is not None
        assert self.more is not None
        self.sums.wait_copied()
        before, self.before = self.before, None
        if before is not None and before.done.done():
            before.done.result()
        self.more.wait_landed()
        return Addends(self.sums.buffer_memory, self.more.buffer_memory, self.nbytes)

    def norm(self) -> Tensor:
        """Return the sum's norm, fp32, of the CPU. Blocks until it is known; raises why it never will be."""
        return torch.tensor(self.done.result(), dtype=torch.float64, device="cpu").sqrt().float()

    def succeed(self, squares: float) -> None:
        """Give the result to those that wait."""
        self._let_go()
        self.done.set_result(squares)

    def fail(self, error: BaseException) -> None:
        """Give the error to those that wait."""
        self._let_go()
        self.done.set_exception(error)

    def _let_go(self) -> None:
        """Forget the gradients first: the memory of one that nobody else has is free by the time that this is known."""
        self.sums = self.more = self.before = None


class GradientAccumulator:
    """Additions that have begun, carried out in their order. Thread-safe.

    Several that are ready are one call of native code. Between two calls the thread needs Python's lock, for which it
    may wait five milliseconds while the training loop's thread works, as long as the addition of 100 MB takes.
    """

    def __init__(self, buffers: ObjectBuffers) -> None:
        self.buffers = buffers
        self._thread = Worker("tencache-add")
        self._waiting: deque[Addition] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, addition: Addition) -> bool:
        """Have an addition carried out, behind all that have begun; False once this is stopped."""
        with self._lock:
            if self._closed:
                return False
            self._thread.start()
            self._waiting.append(addition)
            self._thread.submit(self._carry_out)
            self.buffers.expect(addition.done)  # it gives the second gradient's buffer back
        return True

    @property
    def closed(self) -> bool:
        """Whether nothing is added any more."""
        return self._closed

    def stop(self) -> None:
        """Finish all that has begun, and join the thread."""
        with self._lock:
            self._closed = True
        self._thread.stop()

    def _carry_out(self) -> None:
        """Carry out all that waits, also what an interrupted `begin` has left behind."""
        while self._waiting:
            _add(self._prepare_some())  # no name here: the next ones may be long in coming, and it holds memory

    def _prepare_some(self) -> list[tuple[Addition, Addends]]:
        """Take the first that waits, once it is ready, and those behind it that are ready and of the same kernel.

        One that cannot be prepared has failed.
        """
        batch: list[tuple[Addition, Addends]] = []
        nbytes = 0
        while self._waiting and nbytes < _BATCH_BYTES:
            addition = self._waiting[0]
            if batch and not (addition.kernel is batch[0][0].kernel and addition.is_ready):
                break
            self._waiting.popleft()
            batch.extend(_prepared(addition))
            nbytes += addition.nbytes
        return batch


def _prepared(addition: Addition) -> list[tuple[Addition, Addends]]:
    """Return the addition with what is to be added; nothing if it has failed."""
    with _Told([addition]):
        return [(addition, addition.prepare())]
    del addition  # which has the error, whose traceback has this frame
    return []


def _add(batch: list[tuple[Addition, Addends]]) -> None:
    if not batch:
        return
    with _Told([addition for addition, _ in batch]):
        results = batch[0][0].kernel([addends for _, addends in batch])
        for (addition, _), squares in zip(batch, results, strict=True):
            addition.succeed(squares)
        return
    batch.clear()  # as in `_prepared`


class _Told:
    """Has those that wait for additions told of an error, and ends it: nobody else hears of it in a thread of its own.

    The frames in its traceback forget what they have, such as gradients, for whoever waits has the error.
    """

    def __init__(self, additions: list[Addition]) -> None:
        self._additions = additions

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Tell them, if there is an error."""
        if error is None:
            return False
        clear_frames(trace)
        for each in self._additions:
            each.fail(error)
        return True
