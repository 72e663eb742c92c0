"""Products that Inductor computes with the sum that takes them up: moved to it, and counted as heavy there."""

import pytest
import torch
from harness import capture_of
from torch import Tensor, fx
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from tencache_fx.passes.addmm_fusion import fused_product, runs_heavy, sink_products


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def late_sum(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    product = x @ w
    for _ in range(3):
        other = (other @ w).tanh()
    return product + other


def names(function: object, *inputs: Tensor) -> tuple[list[str], list[str]]:
    """Return the forward's steps in order once products are sunk, and those at which a heavy kernel runs."""
    capture = capture_of(function, *inputs)  # type: ignore[arg-type]
    sink_products(capture)
    steps = capture.nodes[: capture.boundary]
    return [node.name for node in steps], [node.name for node in steps if runs_heavy(node)]


def test_a_product_goes_to_its_sum_and_is_heavy_there() -> None:
    steps, heavy = names(late_sum, leaf(8, 8), leaf(8, 8), leaf(8, 8))
    assert steps.index("mm") == steps.index("add") - 1
    assert heavy == ["mm_1", "mm_2", "mm_3", "add"]


def test_of_two_products_the_second_goes_with_the_sum() -> None:
    steps, heavy = names(lambda x, w, y: x @ w + y @ w, leaf(8, 8), leaf(8, 8), leaf(8, 8))
    assert steps[-2:] == ["mm_1", "add"]
    assert heavy == ["mm", "add"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, y: (x @ w).tanh() + y.sin(),  # no product is summed
        lambda x, w, y: torch.add(x @ w, y.sin(), alpha=2),  # a scaled sum is not fused
        lambda x, w, y: (x @ w) + y.double(),  # nor one of two dtypes
        lambda x, w, y: (lambda product: (product + y.sin()) * product)(x @ w),  # nor a product with other readers
    ],
)
def test_other_products_stay(function: object) -> None:
    steps, heavy = names(function, leaf(8, 8), leaf(8, 8), leaf(8, 8))
    assert steps[0] == "mm"
    assert heavy == ["mm"]


@pytest.mark.parametrize("addend_is", ["input", "computed"])
def test_on_a_gpu_products_fuse_as_the_patterns_of_this_torch_have_it(addend_is: str) -> None:
    """A sum with only pointwise readers: what it adds decides, and which torch this is."""
    aten, graph = torch.ops.aten, fx.Graph()

    def call(op: object, *sources: fx.Node) -> fx.Node:
        node = graph.call_function(op, sources)  # type: ignore[arg-type]
        node.meta["val"] = op(*(source.meta["val"] for source in sources))  # type: ignore[operator]
        return node

    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        x, w, addend = (graph.placeholder(name) for name in ("x", "w", "addend"))
        for node in (x, w, addend):
            node.meta["val"] = torch.empty(64, 64, device="cuda")
        added = addend if addend_is == "input" else call(aten.sin.default, addend)
        total = call(aten.add.Tensor, added, call(aten.mm.default, x, w))
        graph.output(call(aten.tanh.default, total))
        said = fused_product(total) is not None
        post_grad.lazy_init()
        post_grad.pass_patterns[2].apply(fx.GraphModule({}, graph).graph)
    assert said == bool(graph.find_nodes(op="call_function", target=aten.addmm.default))
