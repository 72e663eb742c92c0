"""An update of fp32 arrays as one of the parts that they are kept in, by torch's ops or compiled by Inductor.

Native kernels decode and encode by themselves (`kernel_source`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tencache_fx.model_state.stored_form import BLOCK, Part, StoredForm, by_form, parts_of

_PIECE = 1 << 22  # elements, whole blocks: what compiled code has besides, a few times as many numbers, is in no plan

Update = Callable[..., None]
Arrange = Callable[[Sequence[Tensor]], list[Tensor]]


def on_parts(update: Update, forms: Sequence[StoredForm], before: int) -> Update:
    """Return `update`, which is called with fp32 arrays behind `before` others, as a function of parts in `forms`.

    Numbers are behind the arrays. The first array is the master, and the last of the others its weight.
    """

    def call(*tensors: Tensor) -> None:
        others, (*rest, numbers) = tensors[:before], tensors[before:]
        parts = by_form(forms, rest)
        arrays = [
            form.decode([others[-1], *each] if form.reads_weight else each)
            for form, each in zip(forms, parts, strict=True)
        ]
        update(*others, *arrays, numbers)
        for form, array, each in zip(forms, arrays, parts, strict=True):
            form.encode(array, arrays[0], each)

    return call


def compile_on_parts(
    update: Update,
    forms: Sequence[StoredForm],
    before: int,
    read: int,
    device: torch.device,
    compiler: Callable[[Update, Arrange], Update],
) -> Update:
    """Return `on_parts` of an update, compiled by `compiler` for `device`, where all arrays are.

    `compiler` gets a function, and what makes the function's arguments of the result's: these as they are, or, where
    an array is kept by blocks, whole blocks in rows, some at a time. Inductor encodes these by a reduction over rows.
    The tensor in place `read`, of those before the arrays, is not written to: it may be the caller's gradient.
    """
    found = on_parts(update, [form.on(device) for form in forms], before)
    if all(form.is_elementwise for form in forms):
        return compiler(found, lambda tensors: list(tensors))
    parts = [*(Part("", torch.float32) for _ in range(before)), *parts_of(forms)]

    def in_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
        *arrays, numbers = tensors
        return [*(array.view(-1, BLOCK // part.per) for array, part in zip(arrays, parts, strict=True)), numbers]

    compiled = compiler(found, in_rows)

    def call(*tensors: Tensor) -> None:
        *arrays, numbers = tensors
        count = len(arrays[0])
        whole = count // BLOCK * BLOCK
        if 0 < count == whole <= _PIECE:
            compiled(*in_rows(tensors))
            return
        for start in range(0, whole, _PIECE):
            some = slice(start, min(start + _PIECE, whole))
            pieces = [part.of(array, some) for part, array in zip(parts, arrays, strict=True)]
            compiled(*in_rows([*pieces, numbers]))
        if whole < count:
            ends = [part.of(array, slice(whole, count)) for part, array in zip(parts, arrays, strict=True)]
            filled = [_filled(end, BLOCK // part.per) for end, part in zip(ends, parts, strict=True)]
            compiled(*in_rows([*filled, numbers]))
            for place, (end, block) in enumerate(zip(ends, filled, strict=True)):
                if place != read:
                    end.copy_(block[: len(end)])

    return call


def _filled(end: Tensor, count: int) -> Tensor:
    """Return the items of a part of a block as those of a whole one.

    It goes on with its last element, which has the same bits as many times: no scale becomes another.
    """
    return torch.cat([end, end[-1:].expand(count - len(end))])
