"""Inputs of convolutions that a layer norm has laid out otherwise: stored once, in the layout that they are read in."""

import pytest
import torch
import torch.nn.functional as F
from harness import INDUCTOR, capture_of, compiled, faulty_engine
from torch import Tensor, nn

from tencache_fx.passes.convolution_layouts import copy_for_convolutions

_aten = torch.ops.aten


class Speech(nn.Module):
    """Convolutions over time, a layer norm over channels behind each, in two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.some(x, 0, 3)
        torch._dynamo.graph_break()
        return self.some(x, 3, 6).square().mean()

    def some(self, x: Tensor, first: int, end: int) -> Tensor:
        for i in range(first, end):
            x = F.gelu(self.norms[i](self.convolutions[i](x).transpose(1, 2)).transpose(1, 2))
        return x


def train(run, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    given = torch.randn(4, 16, 2048)
    for _ in range(3):
        model.zero_grad()
        run(given).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_convolutions_behind_layer_norms_train_within_a_budget() -> None:
    torch.manual_seed(0)
    model = Speech()
    plain = [gradient.clone() for gradient in train(model, model)]
    with faulty_engine() as engine:
        run = compiled(model, {**INDUCTOR, "device_budget": "6MiB", "scope": "step"})
        ours = train(run, model)
        assert engine.stats.take()["offloads"] > 0
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def reads(x: Tensor, weight: Tensor) -> Tensor:
    return torch.convolution(x.sin(), weight, None, [1], [0], [1], False, [0], 1).square().sum()


@pytest.mark.parametrize("copied", [True, False])
def test_an_input_in_the_format_of_the_result_is_not_copied(*, copied: bool) -> None:
    x = torch.randn(2, 32, 8).transpose(1, 2) if copied else torch.randn(2, 8, 32)
    capture = capture_of(reads, x.requires_grad_(), torch.randn(8, 8, 3, requires_grad=True))
    graph = capture.forward
    copy_for_convolutions(graph)
    (convolution,) = graph.find_nodes(op="call_function", target=_aten.convolution.default)
    assert (convolution.args[0].target is _aten.clone.default) == copied
    assert convolution.args[0].meta["val"].is_contiguous()
    copy_for_convolutions(graph)  # once is enough
    assert len(graph.find_nodes(op="call_function", target=_aten.clone.default)) == copied


def two_of(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    given = x.sin()
    results = [torch.convolution(given, each, None, [1], [0], [1], False, [0], 1) for each in (weight, other)]
    return torch.cat(results, 1).square().sum()


def test_two_convolutions_share_a_copy() -> None:
    x = torch.randn(2, 32, 8).transpose(1, 2).requires_grad_()
    capture = capture_of(two_of, x, *(torch.randn(8, 8, 3, requires_grad=True) for _ in range(2)))
    copy_for_convolutions(capture.forward)
    (copied,) = capture.forward.find_nodes(op="call_function", target=_aten.clone.default)
    assert [user.target for user in copied.users] == [_aten.convolution.default] * 2


def sliced(x: Tensor, weight: Tensor) -> Tensor:
    half = x.sin().chunk(2, 1)[1]
    return torch.convolution(half, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).square().sum()


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_an_input_whose_strides_are_in_order_is_not_copied(channels: int, memory_format: torch.memory_format) -> None:
    """Neither a part of the channels, nor one that is read into a single channel, which has both formats."""
    x = torch.randn(2, 16, 6, 6).contiguous(memory_format=memory_format).requires_grad_()
    weight = torch.randn(channels, 8, 3, 3).contiguous(memory_format=memory_format).requires_grad_()
    capture = capture_of(sliced, x, weight)
    copy_for_convolutions(capture.forward)
    assert not capture.forward.find_nodes(op="call_function", target=_aten.clone.default)
