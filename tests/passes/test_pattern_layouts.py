"""Attention that is written out, which Inductor replaces with a fused op of other strides."""

import pytest
import torch
from harness import INDUCTOR, capture_of, compiled, faulty_engine
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import tencache_fx
from tencache_fx.ops import IN_ORDER
from tencache_fx.passes import barriers, fixed_layouts
from tencache_fx.passes.fake_aliasing import aliases_inputs, makes_views
from tencache_fx.passes.fixed_layouts import find_fixed, fix_layouts
from tencache_fx.passes.pattern_layouts import settle_pattern_layouts

_aten = torch.ops.aten
LAYERS, BATCH, LENGTH, HEADS, SIZE = 4, 8, 64, 4, 16


class Attention(nn.Module):
    """Layers that save the result of their attention twice: for its backward, and as an input of a product."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for *given, taken in self.layers:
            query, key, value = (each(x).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2) for each in given)
            weights = (query @ key.transpose(-2, -1) / SIZE**0.5).softmax(-1)
            x = x + taken((weights @ value).transpose(1, 2).reshape(BATCH, LENGTH, HEADS * SIZE))
        return x.square().mean()


def train(run, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    given = torch.randn(BATCH, LENGTH, HEADS * SIZE)
    for _ in range(3):
        model.zero_grad()
        run(given).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_attention_that_is_written_out_trains_within_a_budget(recompute: str) -> None:
    torch.manual_seed(0)
    model = Attention()
    plain = [gradient.clone() for gradient in train(model, model)]
    with faulty_engine() as engine:
        run = compiled(model, {**INDUCTOR, "device_budget": "1900KiB", "recompute": recompute, "policy": "joint"})
        ours = train(run, model)
        assert engine.stats.take()["offloads"] > 0
        assert any("scaled_dot_product" in op.name for op in tencache_fx.regions()[-1].problem.ops), "it was replaced"
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def joined(x: Tensor, y: Tensor) -> Tensor:
    """A product whose heads are brought together, by views that only strides of `bmm` make possible, or by a copy."""
    heads = torch.bmm(x, y).view(2, 4, 1, 30)
    return heads.permute(0, 2, 1, 3).reshape(2, 120).square().sum()


def test_what_no_strides_can_view_is_copied() -> None:
    capture = capture_of(joined, torch.randn(8, 1, 16, requires_grad=True), torch.randn(8, 16, 30, requires_grad=True))
    graph = capture.forward
    settle_pattern_layouts(graph)
    assert not graph.find_nodes(op="call_function", target=_aten.clone.default)
    (product,) = graph.find_nodes(op="call_function", target=_aten.bmm.default)
    fake = product.meta["val"]
    with fake.fake_mode:
        product.meta["val"] = torch.empty(8, 1, 32)[..., :30]  # as a pattern leaves it, that pads the last dimension
    settle_pattern_layouts(graph)
    (copied,) = graph.find_nodes(op="call_function", target=_aten.clone.default)
    assert copied.meta["val"].is_contiguous()
    assert list(copied.meta["val"].shape) == [2, 1, 4, 30]
    assert all(aliases_inputs(node) for node in graph.nodes if makes_views(node))
    graph.lint()


def test_a_copy_into_strides_that_are_there_already_goes() -> None:
    def swapped(x: Tensor, y: Tensor) -> Tensor:
        return torch.bmm(x, y).transpose(0, 1).contiguous().sin().square().sum()

    capture = capture_of(swapped, torch.randn(8, 4, 16, requires_grad=True), torch.randn(8, 16, 32, requires_grad=True))
    graph = capture.forward
    settle_pattern_layouts(graph)
    assert len(graph.find_nodes(op="call_function", target=_aten.clone.default)) == 1, "it is wanted"
    (product,) = graph.find_nodes(op="call_function", target=_aten.bmm.default)
    fake = product.meta["val"]
    with fake.fake_mode:
        product.meta["val"] = torch.empty(4, 8, 32).transpose(0, 1)
    settle_pattern_layouts(graph)
    assert not graph.find_nodes(op="call_function", target=_aten.clone.default)


def test_the_gradient_that_cudnn_reads_has_the_strides_of_the_graph() -> None:
    """torch would take what it has built for other strides (`aten/src/ATen/native/cudnn/MHA.cpp`)."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    gradient = graph.call_function(_aten.clone.default, (given,))
    backward = graph.call_function(
        _aten._scaled_dot_product_cudnn_attention_backward.default, (gradient, *[given] * 10, 4, 4, 0.0, False)
    )
    graph.output(backward)
    given.meta["val"] = torch.empty(2, 4, 3, 8, device="meta").transpose(1, 2)
    gradient.meta["val"] = torch.empty(2, 3, 4, 8, device="meta")
    fix_layouts(graph, find_fixed(graph))
    fixed = backward.args[0]
    assert fixed.target is IN_ORDER
    assert fixed.args == (gradient, [3, 2, 1, 0])
    assert backward.args[1] is given


def test_a_gradient_of_any_length_is_fixed_without_a_recompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strides are symbols: to compare them with numbers would be a guard on the length."""
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # in the place of cuDNN's
    monkeypatch.setattr(fixed_layouts, "_CUDNN_BACKWARD", backward)
    fixed: list[str] = []

    def note(graph: fx.Graph, names: list[str]) -> None:
        fix_layouts(graph, names)
        fixed.extend(node.name for node in graph.find_nodes(op="call_function", target=IN_ORDER))

    monkeypatch.setattr(barriers, "fix_layouts", note)
    torch.manual_seed(0)
    weight = torch.randn(64, 192, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        query, key, value = (x @ weight).unflatten(-1, (3, 4, 16)).movedim(-3, 0).transpose(-3, -2)
        return functional.scaled_dot_product_attention(query, key, value).transpose(-3, -2).flatten(-2).cos()

    options = {"device_budget": "64MiB", "scope": "step", "calibrate": False}
    run = torch.compile(attend, backend="tencache", dynamic=True, options=options)
    graphs = counters["stats"]["unique_graphs"]
    for length in (32, 48, 40, 96):
        x = torch.randn(2, length, 64)
        (expected,) = torch.autograd.grad(attend(x).square().sum(), [weight])
        (found,) = torch.autograd.grad(run(x).square().sum(), [weight])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert fixed
    assert counters["stats"]["unique_graphs"] == graphs + 1
