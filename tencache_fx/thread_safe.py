"""Functions that Inductor compiles for whichever thread calls them, while others compile."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx

from tencache_fx.compat import any_number_of_compilations

_EXACT_ARITHMETIC = {
    "emulate_precision_casts": True,  # no fused multiply-add
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


def threads_beside_others() -> int:
    """Return how many threads a kernel gets that runs while the model does, whose two threads take a core each."""
    cores = torch.get_num_threads()
    return cores - 2 if cores >= 8 else cores


def compile_for_threads(function: Callable[..., None], examples: Sequence[torch.Tensor]) -> Callable[..., None]:
    """Return `function` of tensors compiled by Inductor, for any length of all that have as many rows as the first.

    Other examples are lists, of the length that they have.

    Unlike what `torch.compile` returns, it may be called in one thread while another compiles, and lets other threads
    run meanwhile: nothing of Dynamo is asked at a call, and generated code calls its kernels from C++. On the CPU some
    cores are left to these threads. Its arithmetic is IEEE's, as it is written down, so it gives the same bits on any
    device. It checks nothing, and is called with contiguous tensors of the examples' dtypes and, but for the length, of
    their sizes. Tensors that the function has besides are read where they are. Runs once, on `examples`.
    """
    length = len(examples[0])
    assert all(len(each) == length or each.dim() == 1 for each in examples)
    on_cpu = examples[0].device.type == "cpu"
    settings = {"cpp_wrapper": True, "cpp.threads": threads_beside_others()} if on_cpu else _EXACT_ARITHMETIC
    found: list[tuple[Callable[..., Any], list[Callable[[Sequence[torch.Tensor]], Any]]]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Any = compile_fx(gm, inputs, config_patches=settings)
        assert sum(not isinstance(given, torch.Tensor) for given in inputs) <= 1
        order = [_place(examples, given) for given in inputs]
        found.append((compiled, order))
        return compiled  # type: ignore[no-any-return]

    for each in examples:
        if len(each) == length and each.dim() == examples[0].dim():  # else it is a list of as many numbers
            torch._dynamo.mark_dynamic(each, 0)
    # Several functions have the same code. Where theirs differ, Dynamo would have it take other sizes and numbers, too.
    constant = torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)
    with constant, any_number_of_compilations(), torch.compiler.set_stance("default"):
        torch.compile(function, backend=backend, fullgraph=True)(*examples)
    ((compiled, order),) = found  # inputs that are no tensors are the length

    def call(*tensors: torch.Tensor) -> None:
        compiled(*(place(tensors) for place in order))

    return call


def _place(examples: Sequence[torch.Tensor], given: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return what gives an input of compiled code at a call: an argument, the length, or always the same tensor."""
    if not isinstance(given, torch.Tensor):
        return lambda tensors: len(tensors[0])
    for place, each in enumerate(examples):
        if each is given:
            return operator.itemgetter(place)
    return lambda tensors: given
