"""Which parameters are updated together: those of a group, small ones many at a time, a large one by itself."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from tencache_fx.model_state.offloaded_parameter import OffloadedParameter

CHUNK_BYTES = 128 << 20
"""How much of the device the parameters of a chunk may take together while they are updated."""


class Wanted(NamedTuple):
    """A parameter that is to be updated with the options of its group."""

    parameter: Tensor
    group: dict[str, Any]
    offloaded: OffloadedParameter | None


def cut_chunks(sized: Iterable[tuple[Wanted, int]], *, in_order: bool = False) -> list[list[Wanted]]:
    """Return chunks of parameters that are given with the bytes their updates take.

    A chunk's parameters are of one group, in the order given, and take up to `CHUNK_BYTES`. One that takes more than
    half of that is by itself, and does not end the chunk of the smaller ones around it: these are often a bias and a
    norm's weight behind each matrix. Chunks are in the order of their first parameters.

    With `in_order` it does end that chunk, and so does another group: the parameters of all chunks, one chunk behind
    the other, are in the order given.
    """
    chunks: list[list[Wanted]] = []
    last: dict[int, tuple[list[Wanted], int]] = {}  # by group: its last chunk of small ones, and the bytes of that
    for wanted, nbytes in sized:
        is_large = nbytes > CHUNK_BYTES // 2
        if in_order and (is_large or id(wanted.group) not in last):
            last.clear()
        some, taken_bytes = last.get(id(wanted.group), ([], 0))
        if is_large:
            chunks.append([wanted])
            continue
        if not some or taken_bytes + nbytes > CHUNK_BYTES:
            some, taken_bytes = [], 0
            chunks.append(some)
        some.append(wanted)
        last[id(wanted.group)] = some, taken_bytes + nbytes
    return chunks
