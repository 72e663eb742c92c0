"""Device memory that updates of what is in host memory are streamed through, piece by piece."""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tencache_fx.model_state.stored_form import BLOCK, Part
from tencache_fx.runtime.streams import Event, Lane, Streams
from tencache_fx.units import round_up

_NO_PARTS: Mapping[Tensor, Part] = MappingProxyType({})

_DEPTH = 3  # pieces under way on the device: one coming in, one worked on, one going out
_ELEMENT_BYTES = 16  # about what an update of bf16 with fp32 moments copies in
_PIECES_OF_A_PART = 8  # enough that between two parts little stands still
_LEAST_COUNT = 1 << 16  # elements of a piece below which copies take longer to begin than to run
_ALIGN = 128  # elements
_ALIGN_BYTES = 128
_MOST_LAYOUTS = 64  # of pieces, of which views are kept


@dataclass(frozen=True, slots=True)
class Begun:
    """An update under way: `finish` blocks until it is done, and ends it."""

    is_done: Callable[[], bool]
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _AllCopied:
    """The event of several copies of one lane, each of which may have failed, with `last` behind the others."""

    last: Event
    others: Sequence[Event]
    streams: Streams

    def query(self) -> bool:
        """Return whether all of them are over."""
        return self.last.query()

    def synchronize(self) -> None:
        """Block the host until they are; raises what one of them has raised."""
        self.last.synchronize()
        for each in self.others:
            self.streams.check(each)


class _Slot:
    """Memory for one piece, and what there is to wait for before it is overwritten."""

    def __init__(self, memory: Tensor, after: tuple[Event, ...]) -> None:
        self.memory, self.after = memory, after
        self._views: dict[tuple[tuple[int, torch.dtype], ...], list[Tensor]] = {}

    def like(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors like the arrays, one behind the other in the memory.

        Most pieces are of the same sizes, and to make views takes the host some time.
        """
        key = tuple((array.nbytes, array.dtype) for array in arrays)
        if key not in self._views:
            if len(self._views) >= _MOST_LAYOUTS:
                self._views.clear()
            starts = itertools.accumulate((round_up(nbytes, _ALIGN_BYTES) for nbytes, _ in key), initial=0)
            self._views[key] = [
                self.memory[start : start + nbytes].view(dtype)
                for start, (nbytes, dtype) in zip(starts, key, strict=False)
            ]
        return self._views[key]


class Room:
    """Device memory that updates pass through, a few pieces at a time. For one thread.

    `between` is called before each piece: what is done by then need not wait for the rest to be issued.
    """

    @staticmethod
    def is_worth(nbytes: int) -> bool:
        """Return whether pieces that pass through so many bytes are large enough."""
        return nbytes // _DEPTH >= 20 * _LEAST_COUNT

    def __init__(self, streams: Streams, nbytes: int) -> None:
        self.between: Callable[[], None] = lambda: None
        self._streams = streams
        memory = [torch.empty(nbytes // _DEPTH, dtype=torch.uint8, device=streams.device) for _ in range(_DEPTH)]
        allocated = (streams.record_compute(),)  # kernels may still run that had it before
        self._slots = deque(_Slot(each, allocated) for each in memory)
        self._last_copied: tuple[Tensor, Tensor] | None = None  # what was copied in, and its copy

    @property
    def part_elements(self) -> int:
        """Return how much of a large update is to be given to it at once: some pieces, whole blocks of elements."""
        return round_up(self._slots[0].memory.numel() // _ELEMENT_BYTES * _PIECES_OF_A_PART, BLOCK)

    def copy_in(self, small: Tensor) -> Tensor:
        """Return a copy on the device of a few numbers that nobody changes, for the `work` that is streamed next.

        Most updates of a step have the same numbers as the one before.
        """
        if self._streams.device.type != "cuda":
            return small
        if self._last_copied is None or self._last_copied[0] is not small:
            with self._streams.beside():
                self._last_copied = small, small.pin_memory().to(self._streams.device, non_blocking=True)
        return self._last_copied[1]

    def stream(
        self,
        count: int,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        work: Callable[[Sequence[Tensor]], None],
        after: Sequence[Event] = (),
        parts: Mapping[Tensor, Part] = _NO_PARTS,
    ) -> Event:
        """Copy `sources`, 1-D of `count` elements, in piece by piece; let `work` change them; copy `targets` out.

        Those that have an item for several elements are in `parts`.

        `targets` are the last of the sources, or the same with others before them, for which `work` gets memory. They
        are written behind `after`. Returns the event of all copies out. The host waits until a piece can begin: a copy
        engine goes on with the queue it is at, and would let everybody else's copies wait for a long one.
        """
        streams, arrays = self._streams, [*sources, *(t for t in targets if all(t is not s for s in sources))]
        kinds = [parts.get(array, Part("", array.dtype)) for array in arrays]
        unit = BLOCK if any(kind.per > 1 for kind in kinds) else _ALIGN  # compiled code takes whole blocks
        gaps_bytes = _ALIGN_BYTES * sum(kind.per > 1 for kind in kinds)  # behind parts that are not as long as a unit
        slot_bytes = self._slots[0].memory.numel() - gaps_bytes
        most = slot_bytes // sum(kind.nbytes(unit) for kind in kinds) * unit
        places = [next(place for place, array in enumerate(arrays) if array is target) for target in targets]
        last, copied = streams.record_compute(), list[Event]()
        with streams.beside(), self._joined_on_failure():
            for start in range(0, count, most):
                slot = self._slots[0]
                self._slots.rotate(-1)
                streams.wait_host(slot.after)
                self.between()
                some = slice(start, min(start + most, count))
                whole = some.stop - start == count
                cuts = arrays if whole else [kind.of(array, some) for array, kind in zip(arrays, kinds, strict=True)]
                pieces = slot.like(cuts)
                coming = list(zip(pieces, cuts[: len(sources)], strict=False))
                streams.wait_compute(streams.copy_all(Lane.UPDATE_IN, coming, slot.after))
                work(pieces)
                done = (streams.record_compute(), *after)
                going = [(cuts[place], pieces[place]) for place in places]
                last = streams.copy_all(Lane.UPDATE_OUT, going, done)
                slot.after = (last,)
                copied.append(last)
        return _AllCopied(last, copied, streams)

    @contextlib.contextmanager
    def _joined_on_failure(self) -> Iterator[None]:
        """Wait for all copies if something fails: whoever handles that may free or write what they touch.

        The last one in is behind no slot yet, and compute waits for it.
        """
        try:
            yield
        except BaseException:
            copied_out = (event for slot in self._slots for event in slot.after)
            self._streams.wait_host([self._streams.record_compute(), *copied_out])
            raise
