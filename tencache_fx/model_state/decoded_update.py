"""An update of fp32 arrays as one of the parts that they are kept in, by torch's ops or compiled by Inductor.

Native kernels decode and encode by themselves (`kernel_source`).
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from tencache_fx.model_state.stored_form import FP32, StoredForm, by_form, parts_of

_PIECE = 1 << 20  # elements: what is decoded of a parameter at once is in no plan

Update = Callable[..., None]


def on_parts(update: Update, forms: Sequence[StoredForm], before: int) -> Update:
    """Return `update`, which is called with fp32 arrays behind `before` others, as a function of parts in `forms`.

    Numbers are behind the arrays, and the first array is the master, which is kept as it is.
    """

    def call(*tensors: Tensor) -> None:
        others, (*rest, numbers) = tensors[:before], tensors[before:]
        parts = by_form(forms, rest)
        arrays = [form.decode(each) for form, each in zip(forms, parts, strict=True)]
        update(*others, *arrays, numbers)
        for form, array, each in zip(forms, arrays, parts, strict=True):
            form.encode(array, arrays[0], each)

    return call


def compile_on_parts(
    update: Update, forms: Sequence[StoredForm], before: int, compiler: Callable[[Update, Sequence[StoredForm]], Update]
) -> Update:
    """Return `on_parts` of an update, compiled by `compiler`, which is also told in which forms that has the arrays.

    What is kept by element is decoded within the compiled code, blocks by torch's ops outside of it, piece by piece.
    """
    inner = [form if form.is_elementwise else FP32 for form in forms]
    compiled = compiler(on_parts(update, inner, before), inner)
    if all(form.is_elementwise for form in forms):
        return compiled
    outer = on_parts(compiled, [FP32 if form.is_elementwise else form for form in forms], before)
    parts = parts_of(forms)

    def call(*tensors: Tensor) -> None:
        others, (*arrays, numbers) = tensors[:before], tensors[before:]
        for start in range(0, len(others[0]), _PIECE):
            some = slice(start, min(start + _PIECE, len(others[0])))
            pieces = [part.of(array, some) for part, array in zip(parts, arrays, strict=True)]
            outer(*(each[some] for each in others), *pieces, numbers)

    return call
