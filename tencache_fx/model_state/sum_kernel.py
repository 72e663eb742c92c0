"""Adds gradients to others in host memory, and takes the norm of each sum in the same pass.

It is native code that builds in a fraction of a second. Inductor's, the first in a process to be made for a CPU, takes
40 s on some machines, in the middle of a backward.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tencache_fx.model_state.cpp_prelude import FROM_STORED, PRELUDE, STORED, TO_STORED
from tencache_fx.native_code import BuildError, Library, library_of
from tencache_fx.tensors import ordinary_tensors
from tencache_fx.thread_safe import threads_beside_others

log = logging.getLogger("tencache_fx")


@dataclass(frozen=True, slots=True)
class Addends:
    """Two arrays of numbers, each the first `nbytes` of some bytes of host memory, uint8, [at least `nbytes`]."""

    sums: Tensor
    more: Tensor
    nbytes: int


SumKernel = Callable[[Sequence[Addends]], list[float]]
"""Adds `more` to `sums` of each pair, in this order; returns the sum of the squares of each of the sums."""

# Squares are added up in double precision, as `gradient_norm.py` does on a CPU.
_CODE = """
#include <algorithm>

static double add_one({stored}* sums, const {stored}* more, std::int64_t count, int threads) {{
  constexpr std::int64_t most = 1 << 13;
  const std::int64_t blocks = (count + most - 1) / most;
  double squares = 0;
  #pragma omp parallel for schedule(static) num_threads(threads) reduction(+:squares) if(blocks > 1)
  for (std::int64_t block = 0; block < blocks; ++block) {{
    const std::int64_t end = std::min(count, (block + 1) * most);
    double part = 0;
    #pragma omp simd reduction(+:part)
    for (std::int64_t i = block * most; i < end; ++i) {{
      sums[i] = {to_stored}({from_stored}(sums[i]) + {from_stored}(more[i]));
      const double wide = {from_stored}(sums[i]);
      part += wide * wide;
    }}
    squares += part;
  }}
  return squares;
}}

extern "C" void add(void* const* sums, void* const* more, const std::int64_t* counts, double* squares, int pairs,
                    int threads) {{
  for (int pair = 0; pair < pairs; ++pair)
    squares[pair] = add_one(static_cast<{stored}*>(sums[pair]), static_cast<const {stored}*>(more[pair]), counts[pair],
                            threads);
}}
"""


@functools.cache
def kernel_of(dtype: torch.dtype) -> SumKernel:
    """Return what adds gradients of `dtype`; its code is being built, and the first call waits for that."""
    by_torch = partial(_add_by_torch, dtype)
    if dtype not in STORED:
        return by_torch
    casts = {"to_stored": TO_STORED.get(dtype, ""), "from_stored": FROM_STORED.get(dtype, "")}
    library = library_of(PRELUDE + _CODE.format(stored=STORED[dtype], **casts))
    library.start()
    threads = threads_beside_others()

    @functools.cache
    def built() -> Callable[..., None] | None:
        return _load(library)

    def add(pairs: Sequence[Addends]) -> list[float]:
        function = built()
        if function is None:
            return by_torch(pairs)
        count = len(pairs)
        squares = (ctypes.c_double * count)()
        function(
            (ctypes.c_void_p * count)(*[each.sums.data_ptr() for each in pairs]),
            (ctypes.c_void_p * count)(*[each.more.data_ptr() for each in pairs]),
            (ctypes.c_int64 * count)(*[each.nbytes // dtype.itemsize for each in pairs]),
            squares,
            ctypes.c_int(count),
            ctypes.c_int(threads),
        )
        return list(squares)

    return add


def _load(library: Library) -> Callable[..., None] | None:
    """Return the function once it is built; None, with a log line, if it cannot be."""
    try:
        function = library.load().add
    except BuildError as error:
        log.info("gradients in host memory are added up by torch, which takes longer: %s", error)
        return None
    function.restype = None
    return function


def _add_by_torch(dtype: torch.dtype, pairs: Sequence[Addends]) -> list[float]:
    squares = []
    with ordinary_tensors():
        for each in pairs:
            value = each.sums[: each.nbytes].view(dtype)
            value.add_(each.more[: each.nbytes].view(dtype))
            squares.append(torch.linalg.vector_norm(value, dtype=torch.float64).item() ** 2)
    return squares
