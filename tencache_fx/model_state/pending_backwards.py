"""Whose backward is running, and whether the gradient that it just made is all there will be of a parameter's.

Autograd tells an optimizer of a gradient only once the whole compiled backward has been issued. An update that may
begin during backward begins earlier: where the gradient is offloaded. That is right only if nothing is to be added to
it, so each call of a region whose backward may follow is noted with the parameters it reads.
"""

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tencache_fx import compat
from tencache_fx.model_state.offloaded_parameter import OffloadedParameter

_BACKWARD = "CompiledFunctionBackward"
_DEPTH = 3  # a region's results may be views, which autograd made of them


class PendingBackward:
    """One call of a region, until nobody can run its backward any more. `all_offloaded` have no gradient yet."""

    def __init__(self, all_offloaded: Mapping[str, OffloadedParameter]) -> None:
        self.all_offloaded = dict(all_offloaded)
        self.started = False
        self.node: weakref.ref[Any] | None = None


class PendingBackwards:
    """All pending backwards of one device's regions."""

    def __init__(self) -> None:
        self._running = threading.local()

    def follow(self, results: Any, all_offloaded: Mapping[str, OffloadedParameter]) -> None:
        """Note the call of a region that returned `results` and read `all_offloaded`, if a backward may follow."""
        tensors = [each for each in tree_leaves(results) if isinstance(each, torch.Tensor) and each.requires_grad]
        if not tensors:
            return
        backward = PendingBackward(all_offloaded)
        for offloaded in all_offloaded.values():
            offloaded.gradient.expect(backward)
        node = next((found for each in tensors if (found := _backward_of(each.grad_fn)) is not None), None)
        if node is None:  # its gradients will come unannounced
            backward.started = True
            return

        def over(_: object) -> None:
            for offloaded in all_offloaded.values():
                offloaded.gradient.sources.discard(backward)

        @compat.run_as_is
        def start(_: object) -> None:
            backward.started = True
            self._running.backward = backward

        @compat.run_as_is
        def stop(*_: object) -> None:
            self._running.backward = None

        backward.node = weakref.ref(node, over)
        node.register_prehook(start)
        node.register_hook(stop)

    def find(self, name: str) -> OffloadedParameter | None:
        """Return the parameter that the running backward calls `name`."""
        backward: PendingBackward | None = getattr(self._running, "backward", None)
        return None if backward is None else backward.all_offloaded.get(name)

    def whole(self, name: str) -> OffloadedParameter | None:
        """Return the parameter that the running backward calls `name`, if the gradient it has now is all of it."""
        backward: PendingBackward | None = getattr(self._running, "backward", None)
        offloaded = None if backward is None else backward.all_offloaded.pop(name, None)
        return offloaded if offloaded is not None and offloaded.gradient.sources == {backward} else None


def _backward_of(node: Any) -> Any:
    level = [node]
    for _ in range(_DEPTH):
        for each in level:
            if each is not None and each.name() == _BACKWARD:
                return each
        level = [following for each in level if each is not None for following, _ in each.next_functions]
    return None
