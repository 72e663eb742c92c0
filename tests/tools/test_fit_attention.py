"""Which kernels of attention a forecast for a GPU counts, traced on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.fitting.gpu_attention import choose_as_a_gpu

TOKENS, HEADS, WIDTH = 16, 2, 8

Mask = Callable[[], Tensor | None]


def of_rows() -> Tensor:
    """Return a mask whose last dimension is expanded: what is not masked is so for a whole row."""
    return torch.ones(1, 1, TOKENS, 1, dtype=torch.bool).expand(2, 1, TOKENS, TOKENS)


def of_columns() -> Tensor:
    return torch.ones(2, 1, 1, TOKENS, dtype=torch.bool).expand(2, 1, TOKENS, TOKENS)


class Attention(nn.Module):
    """It projects, and attends to itself, with `mask` and `dropout`."""

    def __init__(self, mask: Mask, dropout: float, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.mask, self.dropout, self.checkpoints = mask, dropout, checkpoints

    def attend(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, HEADS, WIDTH)).movedim(2, 0).transpose(2, 3)
        return scaled_dot_product_attention(*parts, self.mask(), self.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False) if self.checkpoints else self.attend(x)


def traced(model: nn.Module, x: Tensor) -> tuple[Tensor, str]:
    """Return what a model's graph returns once it is as on a GPU, and the text of its forward."""
    found: list[str] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.append(str(gm.graph))
        return gm.forward

    def as_a_gpu(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        choose_as_a_gpu(gm)
        return aot_autograd(fw_compiler=look)(gm, inputs)

    torch.compiler.reset()
    result: Tensor = torch.compile(model, backend=as_a_gpu)(x)
    (text,) = found
    return result, text


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("mask", "has_kernel"), [(lambda: None, True), (of_columns, True), (of_rows, False)])
def test_a_kernel_is_counted_where_a_gpu_has_one(
    mask: Mask, *, has_kernel: bool, dropout: float, checkpoints: bool
) -> None:
    model, x = Attention(mask, dropout, checkpoints=checkpoints), torch.randn(2, TOKENS, HEADS * WIDTH)
    result, text = traced(model, x)
    assert ("_scaled_dot_product_flash_attention_for_cpu" in text) is has_kernel
    assert ("aten.bmm" in text) is not has_kernel
    model.dropout = 0.0
    drops = dropout > 0 and not has_kernel
    assert torch.allclose(result, model(x), atol=1e-5) is not drops


def test_fit_counts_what_attention_without_a_kernel_takes() -> None:
    def fit(mask: Mask, **target: Any) -> Any:
        torch.compiler.reset()
        x = torch.randn(2, TOKENS, HEADS * WIDTH)
        return tencache_fx.fit(Attention(mask, 0.1), x, compiler="eager", calibrate=False, recompute="none", **target)

    steps = [fit(mask, device_profile="h200").regions[0].steps for mask in (of_columns, of_rows)]
    assert steps[1] > steps[0] + 10
    on_cpu = [fit(mask, device="cpu").regions[0].steps for mask in (of_columns, of_rows)]
    assert on_cpu[0] == on_cpu[1]  # neither has a kernel there, for the dropout
