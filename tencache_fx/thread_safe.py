"""Functions that Inductor compiles for whichever thread calls them, while others compile."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes

from tencache_fx.compat import compile_lock
from tencache_fx.errors import InvariantError

_MOST_ELEMENTS = 1 << 30  # of a tensor in one call: a GPU's kernel counts in 32 bits what is as short as the examples
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
    their sizes. Tensors that the function has besides are read where they are. Runs once, on `examples`, so that no
    later call chooses between kernels by timing them.

    `function` consists of torch's ops on these tensors, which treat each row by itself: very long ones are given to it
    a part at a time. The ops are recorded as they run on fake tensors, without Dynamo, which would take several times
    as long to find them. Raises what the function does, what Inductor does, and `InvariantError` if the function
    depends on the length.
    """
    on_cpu = examples[0].device.type == "cpu"
    settings = {"cpp_wrapper": True, "cpp.threads": threads_beside_others()} if on_cpu else _EXACT_ARITHMETIC
    with compile_lock(), _as_no_caller_has_it(examples[0].device):
        examples = [each.clone() if each.is_inference() else each for each in examples]  # which only such a mode writes
        shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
        fakes = _fakes_of_any_length(examples, mode)
        graph, others = _record(function, fakes, mode)
        if shape_env.guards:
            conditions = ", ".join(str(guard.expr) for guard in shape_env.guards)
            raise InvariantError(f"a function to compile for any length is one for some only: {conditions}.")
        inputs = [*fakes, *(mode.from_tensor(each, static_shapes=True) for each in others)]
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            compiled: Any = compile_fx(graph, inputs, config_patches=settings)
        call = _in_parts(compiled, others, examples)
        call(*examples)
    return call


def _in_parts(
    compiled: Callable[..., object], others: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]
) -> Callable[..., None]:
    """Return what calls `compiled` with the others besides, and with a part of the rows at a time if there are many."""
    by_row = [_has_rows(each, examples) for each in examples]
    most = max(1, _MOST_ELEMENTS // max(each[0].numel() for each in examples if _has_rows(each, examples)))

    def call(*tensors: torch.Tensor) -> None:
        length = len(tensors[0])
        if length <= most:
            compiled(*tensors, *others)
            return
        for start in range(0, length, most):
            some = [each[start : start + most] if cut else each for each, cut in zip(tensors, by_row, strict=True)]
            compiled(*some, *others)

    return call


@contextlib.contextmanager
def _as_no_caller_has_it(device: torch.device) -> Iterator[None]:
    """Set the modes aside that the caller's thread may be in: they would be recorded as a part of a function."""
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch._C._DisableFuncTorch(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _fakes_of_any_length(examples: Sequence[torch.Tensor], mode: FakeTensorMode) -> list[torch.Tensor]:
    """Return fakes of examples, whose rows are one symbol; lists have the length that they have."""
    length = examples[0].shape[0]
    assert length > 1  # of 0 and 1 there is no symbol
    assert all(each.shape[0] == length or each.dim() == 1 for each in examples)

    def fake(example: torch.Tensor) -> torch.Tensor:
        dims = [DimDynamic.STATIC] * example.dim()
        if _has_rows(example, examples):
            dims[0] = DimDynamic.DUCK  # the same symbol for the same length
        return mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))

    return [fake(each) for each in examples]


def _has_rows(example: torch.Tensor, examples: Sequence[torch.Tensor]) -> bool:
    """Return whether one of the examples is of any length; else it is a list, also of as many numbers."""
    return len(example) == len(examples[0]) and example.dim() == examples[0].dim()


def _record(
    function: Callable[..., None], fakes: Sequence[torch.Tensor], mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Return the ops of `function` as a graph, and the tensors that it is to be called with behind the function's own.

    These are what the function has besides, as itself: as constants of the graph, Inductor might copy them.
    """
    with mode, enable_python_dispatcher():  # else some ops take no fakes of any length
        module = make_fx(function, tracing_mode="real")(*fakes)
    graph, others, places = module.graph, list[torch.Tensor](), dict[str, fx.Node]()
    last = list(graph.find_nodes(op="placeholder"))[-1]
    for node in list(graph.find_nodes(op="get_attr")):
        if node.target not in places:
            with graph.inserting_after(last):
                places[node.target] = last = graph.placeholder(f"other{len(others)}")
            others.append(getattr(module, node.target))
        node.replace_all_uses_with(places[node.target])
        graph.erase_node(node)
    graph.output_node().args = ((),)
    for node in graph.nodes:
        node.meta.clear()  # the graph is kept by what is compiled of it, and so would be the fakes
    graph.set_codegen(fx.graph.CodeGen())  # that of `make_fx` knows of the function's own arguments only
    return fx.GraphModule(torch.nn.Module(), graph), others
