"""Adds one gradient to another in host memory, and takes the norm of the sum in the same pass.

It is native code that builds in a fraction of a second. Inductor's, the first in a process to be made for a CPU, takes
40 s on some machines, in the middle of a backward.
"""

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from tencache_fx.model_state.cpp_prelude import FROM_STORED, PRELUDE, STORED, TO_STORED
from tencache_fx.native_code import BuildError, Library, library_of
from tencache_fx.thread_safe import threads_beside_others

log = logging.getLogger("tencache_fx")

SumKernel = Callable[[Tensor, Tensor], Tensor]
"""Adds the second of two tensors of the CPU, both [n], to the first; returns the sum's Euclidean norm, fp32, []."""

# Squares are added up in double precision, as `norm_of` does on a CPU.
_CODE = """
#include <algorithm>

extern "C" double add(void* const* arrays, std::int64_t count, int threads) {{
  auto* sums = static_cast<{stored}*>(arrays[0]);
  const auto* more = static_cast<const {stored}*>(arrays[1]);
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
"""


@functools.cache
def kernel_of(dtype: torch.dtype) -> SumKernel:
    """Return what adds gradients of `dtype`; its code is being built, and the first call waits for that."""
    if dtype not in STORED:
        return _add_by_torch
    casts = {"to_stored": TO_STORED.get(dtype, ""), "from_stored": FROM_STORED.get(dtype, "")}
    library = library_of(PRELUDE + _CODE.format(stored=STORED[dtype], **casts))
    library.start()
    threads = threads_beside_others()

    @functools.cache
    def built() -> Callable[..., float] | None:
        return _load(library)

    def add(value: Tensor, more: Tensor) -> Tensor:
        function = built()
        if function is None:
            return _add_by_torch(value, more)
        arrays = (ctypes.c_void_p * 2)(value.data_ptr(), more.data_ptr())
        squares = function(arrays, ctypes.c_int64(len(value)), ctypes.c_int(threads))
        return torch.tensor(squares, dtype=torch.float64, device="cpu").sqrt().float()

    return add


def _load(library: Library) -> Callable[..., float] | None:
    """Return the function once it is built; None, with a log line, if it cannot be."""
    try:
        function = library.load().add
    except BuildError as error:
        log.info("gradients in host memory are added up by torch, which takes longer: %s", error)
        return None
    function.restype = ctypes.c_double
    return function


def _add_by_torch(value: Tensor, more: Tensor) -> Tensor:
    value.add_(more)
    norm: Tensor = torch.linalg.vector_norm(value, dtype=torch.float64)
    return norm.float()
