"""Which inputs of a region nobody else holds between its forward and its backward.

Of models whose blocks are compiled one by one, or that fall into pieces, each region's input is what the region before
has made: its caller drops it once the forward is over, and only the backward still asks for it. Such an input can leave
like any activation, though its bytes are free no sooner than the caller lets go of them. Whether that does is seen when
the backward begins; an input that is kept, such as an encoder's result, is left alone from then on.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tencache_fx.tensors import storage_of

_REMEMBERED = 1024  # forwards, of which no backward may ever come


class DonatedInputs:
    """The inputs of one region, by position, that its caller is expected to give up.

    At first those that are neither given by the user nor parameters: they require a gradient, and something has made
    them. What leaves of them is watched.
    """

    def __init__(self, inputs: Sequence[object]) -> None:
        tensors = ((index, value) for index, value in enumerate(inputs) if isinstance(value, Tensor))
        self.positions = frozenset(index for index, value in tensors if value.requires_grad and not value.is_leaf)
        self._kept: set[int] = set()
        self._watches = True
        self._waiting: deque[Mapping[int, StorageWeakRef]] = deque(maxlen=_REMEMBERED)

    @property
    def wants_fewer(self) -> bool:
        """Say whether the region should be planned anew, because the caller keeps some."""
        return bool(self._kept)

    def settle(self) -> None:
        """Let go of those that are kept: what is planned from now on is without them."""
        self.positions, self._kept = self.positions - self._kept, set()
        self._waiting.clear()

    def insist(self, positions: frozenset[int]) -> None:
        """Have these leave even if the caller keeps them: there is no plan in which they stay."""
        self.positions, self._watches = positions, False

    def watched(self, phase: str, run: Callable[..., Any], leaving: Collection[int]) -> Callable[..., Any]:
        """Return `run`, the region's forward or backward, with the inputs `leaving` watched; boxed if `run` is."""
        if not (leaving and self._watches) or phase not in ("forward", "backward"):
            return run

        def watched_run(*args: Any) -> Any:
            if phase == "backward":
                self._look(leaving)
                return run(*args)
            given = args[0] if boxed and len(args) == 1 else args
            storages = {index: storage_of(given[index]) for index in leaving}
            self._waiting.append({index: StorageWeakRef(each) for index, each in storages.items() if each is not None})
            del given, storages
            return run(*args)

        watched_run._boxed_call = boxed = getattr(run, "_boxed_call", False)  # type: ignore[attr-defined]
        return watched_run

    def _look(self, leaving: Collection[int]) -> None:
        """Note which inputs are still there, of most of the forwards whose backward is to come."""
        waiting = list(self._waiting)  # another thread may run the region, too
        self._waiting.clear()
        for index in self.positions.intersection(leaving):
            held = [not given[index].expired() for given in waiting if index in given]
            if self._watches and 2 * sum(held) > len(held):
                self._kept.add(index)
