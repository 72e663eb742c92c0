"""The optimizer's state of a parameter: arrays in pinned host memory, within its budget, or on the device."""

import itertools
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tencache_fx.model_state.counted_scalars import CountedScalars
from tencache_fx.model_state.split_master import Remainder, decode_into, drop_changed
from tencache_fx.model_state.stored_form import Stored, StoredForm, by_form, named_parts, parts_of
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.object_buffers import ObjectBuffers
from tencache_fx.runtime.streams import Event, Lane
from tencache_fx.units import round_up

_ALIGN_BYTES = 64
_LEAST_BYTES = 64 << 10  # less is not worth a mapping of its own


class State(Remainder):
    """The arrays of one parameter, of `forms` by name: their 1-D parts are `arrays`, and `tensors` share their memory.

    Parts are in `tensors` by name, those with an item for each element in the parameter's shape.

    They are in host memory, or `on_device`, which is the parameter's. A buffer in host memory goes back with the last
    reference to this, its memory with the last tensor that shares it. Raises `BudgetError` when the host budget has no
    room.
    """

    def __init__(
        self, buffers: ObjectBuffers, parameter: Tensor, forms: Mapping[str, StoredForm], *, on_device: bool
    ) -> None:
        self.layout = parameter.size(), parameter.stride()
        self.forms = dict(forms)
        self.is_elementwise = all(form.is_elementwise for form in forms.values())
        self.made: frozenset[str] = frozenset()  # set by the optimizer: the arrays that its class's steps have made
        self.shown: tuple[frozenset[str], dict[str, Tensor]] | None = None  # what `shown_of` says, and of which `made`
        self.counted = CountedScalars()
        self.directory: Path | None = None  # where what `decode` returns may be
        self.place = Tier.DEVICE if on_device else Tier.HOST
        self.is_zero = False  # whether all arrays were when they were made
        count, parts = parameter.numel(), named_parts(forms)
        starts = _starts_of(forms, count)
        self.nbytes = starts.pop()
        if on_device or self.nbytes < _LEAST_BYTES:
            device = parameter.device if on_device else "cpu"
            self.arrays = tuple(torch.empty(p.count(count), dtype=p.dtype, device=device) for p in parts.values())
        else:
            buffer = buffers.acquire_settled(self.nbytes, Use.STATE)
            weakref.finalize(self, buffers.discard_later, buffer).atexit = False
            self.is_zero = buffer.is_zero
            self.arrays = tuple(
                own_storage(buffer.memory[start : start + part.nbytes(count)], part.dtype)
                for start, part in zip(starts, parts.values(), strict=True)
            )
        self.tensors = {
            name: array.as_strided(parameter.size(), parameter.stride()) if part.per == 1 else array
            for (name, part), array in zip(parts.items(), self.arrays, strict=True)
        }

    def decode(self, name: str) -> Tensor:
        """Return an array as a tensor of the parameter's shape, in ordinary host memory.

        A split master is in a file without a name in `directory`, if there is one: host memory has as much of it as it
        has room for.
        """
        size, stride = self.layout
        stored = self.stored(name)
        parts = [part.cpu() for part in stored.parts]
        if stored.weight is None:
            return stored.form.decode(parts).as_strided(size, stride)
        memory = mapped_memory(torch.float32.itemsize * len(stored.weight), self.directory)
        found = own_storage(memory, torch.float32)
        decode_into(found, [stored.weight, *parts])
        return found.as_strided(size, stride)

    def stored(self, name: str) -> Stored:
        """Return an array as it is kept."""
        all_parts = dict(zip(self.forms, by_form(tuple(self.forms.values()), self.arrays), strict=True))
        form = self.forms[name]
        return Stored(self.layout[0], form, all_parts[name], self.weight if form.reads_weight else None)

    def _drop_changed(self, before: Tensor, now: Tensor) -> None:
        drop_changed(self.arrays[:2], before, now)

    def piece(self, elements: slice) -> tuple[Tensor, ...]:
        """Return the parts of some elements, which begin where a block begins."""
        parts = parts_of(self.forms.values())
        return tuple(part.of(array, elements) for part, array in zip(parts, self.arrays, strict=True))


def buffer_bytes(forms: Mapping[str, StoredForm], count: int) -> int:
    """Return the bytes of the buffer that a `State` in host memory acquires for arrays of so many elements."""
    nbytes = _starts_of(forms, count)[-1]
    return nbytes if nbytes >= _LEAST_BYTES else 0


def _starts_of(forms: Mapping[str, StoredForm], count: int) -> list[int]:
    """Return where each part begins in a buffer, and where the last one ends."""
    sizes = [round_up(part.nbytes(count), _ALIGN_BYTES) for part in parts_of(forms.values())]
    return list(itertools.accumulate(sizes, initial=0))


def own_storage(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes of host memory as an array whose storage is these only.

    `torch.save` refuses storages that tensors of several dtypes share, and writes them whole.
    """
    return torch.frombuffer(part.numpy(), dtype=dtype) if part.numel() else torch.empty(0, dtype=dtype)


def mapped_memory(nbytes: int, directory: Path | None) -> Tensor:
    """Return [nbytes] of a new file without a name there: host memory has as much of it as it has room for.

    Without a directory it is ordinary memory.
    """
    if directory is None or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with tempfile.NamedTemporaryFile(prefix="tencache-", dir=directory) as file:
        file.truncate(max(4, nbytes))
        return torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)


class HeldTensors:
    """The tensors of one parameter's state, each of a shape and dtype of its own, like those given as `like` by name.

    They are in host memory, of which the parts go back with the last reference to this, behind the copies noted, or on
    `device`. Their values are not set. Raises `BudgetError` when the host budget has no room.
    """

    def __init__(self, buffers: ObjectBuffers, like: Mapping[str, Tensor], device: torch.device | None) -> None:
        self.place = Tier.HOST if device is None else Tier.DEVICE
        self._copies: dict[Lane, Event] = {}  # the last one of each lane
        layouts = {name: torch.empty_like(each, device="meta") for name, each in like.items()}  # dense, in any case
        starts = list(itertools.accumulate(map(_aligned_bytes, layouts.values()), initial=0))
        self.nbytes = starts.pop()
        memory = None
        if device is None and self.nbytes >= _LEAST_BYTES:
            buffer = buffers.acquire_settled(self.nbytes, Use.STATE)
            weakref.finalize(self, buffers.discard_later, buffer, self._copies.values()).atexit = False
            memory = buffer.memory
        self.tensors: dict[str, Tensor] = {}
        for (name, each), start in zip(layouts.items(), starts, strict=True):
            if memory is None:
                self.tensors[name] = torch.empty_like(each, device=device or "cpu")
            else:
                array = own_storage(memory[start : start + each.nbytes], each.dtype)
                self.tensors[name] = array.as_strided(each.size(), each.stride())

    def note_copy(self, lane: Lane, event: Event) -> None:
        """Note the last copy of a lane that reads or writes the tensors: their memory stays up to its `event`."""
        self._copies[lane] = event

    def fits(self, like: Mapping[str, Tensor]) -> bool:
        """Return whether these are tensors of the names, sizes and dtypes of others."""
        return self.tensors.keys() == like.keys() and all(
            (held.size(), held.dtype) == (like[name].size(), like[name].dtype) for name, held in self.tensors.items()
        )


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes `HeldTensors` has for such tensors."""
    return sum(map(_aligned_bytes, tensors))


def _aligned_bytes(tensor: Tensor) -> int:
    return round_up(tensor.nbytes, _ALIGN_BYTES)
