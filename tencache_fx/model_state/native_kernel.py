"""A kernel's update of parameters of one dtype on the CPU, as native code."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tencache_fx.model_state.cpp_prelude import PRELUDE
from tencache_fx.model_state.kernel_source import write_function
from tencache_fx.model_state.stored_form import StoredForm
from tencache_fx.native_code import library_of
from tencache_fx.thread_safe import threads_beside_others


@dataclass(frozen=True, slots=True)
class NativeFunctions:
    """What a kernel has for the CPU: `update` beside a model that runs, and `staged` while nothing else does.

    They may be called in any thread, and let other threads run meanwhile. They check nothing: tensors are 1-D and
    contiguous, and begin where a block of their form does.
    """

    update: Callable[..., None]
    staged: Callable[..., None]


class NativeKernel:
    """Two functions of a gradient, a weight and more arrays, and `numbers` behind them; their build has begun.

    The arrays are kept in `forms`, the first of them as it is: it is the master. Functions that are built are called
    with the forms' parts. Raises `UncoveredError` for functions that are not written as native code.
    """

    def __init__(
        self,
        update: Callable[..., None],
        staged: Callable[..., None],
        dtype: torch.dtype,
        forms: Sequence[StoredForm],
        numbers: int,
    ) -> None:
        of_update = write_function("update", update, (dtype, dtype, *forms), numbers, other=2)
        of_staged = write_function("staged", staged, (dtype, dtype, dtype, *forms), numbers, other=3)
        codes = dict.fromkeys(form.code for form in forms)
        self._library = library_of("\n".join((PRELUDE, *codes, of_update, of_staged)))
        self._library.start()

    def load(self) -> NativeFunctions:
        """Return the functions once they are built; raises `BuildError` if they cannot be."""
        library, threads = self._library.load(), threads_beside_others()
        return NativeFunctions(
            _callable(library.update, lambda: threads), _callable(library.staged, torch.get_num_threads)
        )


def _callable(function: Callable[..., object], threads: Callable[[], int]) -> Callable[..., None]:
    def call(*tensors: Tensor) -> None:
        arrays = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
        function(arrays, ctypes.c_int64(len(tensors[0])), ctypes.c_int(threads()))

    return call
