"""Donated inputs of a region: nobody else holds them between its forward and its backward.

Of models whose blocks are compiled one by one, or that fall into pieces, each region's input is a result of the
region before: its caller drops it once the forward is over, and only the backward still reads it. Such an input can be
offloaded like any activation, though its bytes are free no sooner than the caller drops it. The monitor looks when the
backward begins; an input that is kept, such as an encoder's result, is not offloaded from then on.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_fx.kept_code import Phase
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, Request, WrittenPlan, keep_boxed
from tencache_fx.region.dynamic_shapes import Sizes
from tencache_fx.tensors import storage_of

_REMEMBERED = 1024  # forwards, of which no backward may ever come


class DonatedInputs:
    """The inputs of one region, by position, that its caller is expected to drop.

    At first those that are neither given by the user nor parameters: they require a gradient, and something has made
    them. `last_read` are those of which that is known beforehand. The offloaded ones are watched.
    """

    optional = False

    def __init__(self, inputs: Sequence[object], last_read: frozenset[int] = frozenset()) -> None:
        tensors = ((index, value) for index, value in enumerate(inputs) if isinstance(value, Tensor))
        made = frozenset(index for index, value in tensors if value.requires_grad and not value.is_leaf)
        self._expected = made | last_read
        self._kept: frozenset[int] = frozenset()
        self._watches = True
        self._waiting: deque[Mapping[int, StorageWeakRef]] = deque(maxlen=_REMEMBERED)

    @property
    def positions(self) -> frozenset[int]:
        """The inputs that a plan may take for donated: their caller was not seen to keep them."""
        return self._expected - self._kept

    def review(self, current: CompiledRegion, sizes: Sizes) -> CompiledRegion | str:
        """Return why the region has to be planned again: the caller keeps some."""
        return "its caller keeps inputs that were to be offloaded" if self._kept else current

    def on_compiled(self, request: Request, compiled: CompiledRegion) -> None:
        """Forget those that the region is not planned with any more."""
        self._expected, self._kept = request.donated, self._kept & request.donated
        self._waiting.clear()

    def on_refusal(self, current: CompiledRegion) -> CompiledRegion:
        """Go on with the plan that offloads them, though the caller keeps them: without that nothing fits."""
        self._kept, self._watches = frozenset(), False
        return current

    def instrument(self, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        """Return `run`, the region's forward or backward, with the offloaded inputs watched; boxed if `run` is."""
        offloaded = written.donated
        if not (offloaded and self._watches) or phase == "inference":
            return run
        boxed = getattr(run, "_boxed_call", False)

        def watched_run(*args: Any) -> Any:
            if phase == "backward":
                self._look(offloaded)
                return run(*args)
            given = args[0] if boxed and len(args) == 1 else args
            storages = {index: storage_of(given[index]) for index in offloaded}
            self._waiting.append({index: StorageWeakRef(each) for index, each in storages.items() if each is not None})
            del given, storages
            return run(*args)

        return keep_boxed(run, watched_run)

    def _look(self, offloaded: frozenset[int]) -> None:
        """Note which inputs are still there, of most of the forwards whose backward is to come."""
        waiting = list(self._waiting)  # another thread may run the region, too
        self._waiting.clear()
        for index in self._expected & offloaded:
            held = [not given[index].expired() for given in waiting if index in given]
            if self._watches and 2 * sum(held) > len(held):
                self._kept |= {index}
