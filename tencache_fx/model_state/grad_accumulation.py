"""Gradients of several backwards, added up in host memory by a thread of their own.

Autograd asks for the sum while it still issues the backward; a host that added at once would wait for the copy out, and
the device for the host. One pass adds and takes the norm of the sum, which clipping may ask for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.worker import Worker


class GradientAccumulator:
    """Additions that have begun, carried out in their order. Thread-safe."""

    def __init__(self, buffers: ObjectBuffers) -> None:
        self.buffers = buffers
        self._thread = Worker("tencache-add")
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, work: Callable[[], Tensor]) -> "Future[Tensor] | None":
        """Have `work` done, behind all that has begun; None once this is stopped."""
        with self._lock:
            if self._closed:
                return None
            begun = self._thread.begin(work)
            self.buffers.expect(begun)  # it gives the second gradient's buffer back
            return begun

    @property
    def closed(self) -> bool:
        """Whether nothing is added any more."""
        return self._closed

    def stop(self) -> None:
        """Finish all that has begun, and join the thread."""
        with self._lock:
            self._closed = True
        self._thread.stop()
