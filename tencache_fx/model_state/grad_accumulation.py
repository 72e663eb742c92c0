"""Gradients of several backwards, added up in host memory by a thread of their own.

Autograd asks for the sum while it still issues the backward; a host that added at once would wait for the copy out, and
the device for the host. One pass adds and takes the norm of the sum, which clipping may ask for.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.thread_safe import compile_for_threads

_EXAMPLE_LENGTH = 1 << 20  # so many elements that a kernel is compiled for all threads
_LEAST_INFINITE = {torch.float16: 65520.0}  # what is rounded to infinity, where an fp32 sum does not overflow first


class GradientAccumulator:
    """Additions that have begun, carried out in their order. Thread-safe."""

    def __init__(self, buffers: ObjectBuffers) -> None:
        self.buffers = buffers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tencache-add")
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, work: Callable[[], Tensor]) -> "Future[Tensor] | None":
        """Have `work` done, behind all that has begun; None once this is stopped."""
        with self._lock:
            if self._closed:
                return None
            begun = self._thread.submit(work)
            self.buffers.expect(begun)  # it gives the second gradient's buffer back
            return begun

    def stop(self) -> None:
        """Finish all that has begun, and join the thread."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)


@functools.cache
def kernel_of(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what adds the second of two tensors of the CPU, both [n], to the first and returns the norm of the sum.

    It is compiled here, at the first call. The norm is Euclidean, fp32, of no dimension.
    """
    least_infinite = _LEAST_INFINITE.get(dtype)

    def add(value: Tensor, more: Tensor, squares: Tensor) -> None:
        total = value + more
        wide = total.to(squares.dtype)
        if least_infinite is not None:
            wide = torch.where(wide.abs() >= least_infinite, float("inf"), wide)
        value.copy_(total)
        squares.copy_(wide.square().sum().reshape(1))

    def made(count: int, kind: torch.dtype) -> Tensor:  # whatever the caller's defaults are
        return torch.zeros(count, dtype=kind, device="cpu")

    wider = torch.promote_types(dtype, torch.float32)
    examples = [made(_EXAMPLE_LENGTH, dtype), made(_EXAMPLE_LENGTH, dtype), made(1, wider)]
    compiled = compile_for_threads(add, examples)

    def call(value: Tensor, more: Tensor) -> Tensor:
        squares = made(1, wider)
        compiled(value, more, squares)
        return squares.sqrt().float().reshape(())

    return call
