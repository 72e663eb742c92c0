"""One op may compute the gradients of several offloaded parameters, as fused kernels do: each of them leaves."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state.host_gradient import HostGradient

WIDTH = 128


class Fused(nn.Module):
    """Two products by one op, and their gradients by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.tencache_test.fused(x, self.first, self.second)
        return result


def fused(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return x @ first + (x * x) @ second


def fused_backward(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t() @ gradient, (x * x).t() @ gradient


@pytest.fixture
def ops() -> Iterator[None]:
    with torch.library._scoped_library("tencache_test", "FRAGMENT") as library:
        library.define("fused(Tensor x, Tensor first, Tensor second) -> Tensor")
        library.define("fused_backward(Tensor gradient, Tensor x) -> (Tensor, Tensor)")
        library.impl("fused", fused, "CPU")
        library.impl("fused_backward", fused_backward, "CPU")
        library._register_fake("fused", fused)
        library._register_fake("fused_backward", fused_backward)

        def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return None, *torch.ops.tencache_test.fused_backward(gradient, x)

        torch.library.register_autograd(
            "tencache_test::fused",
            backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
            lib=library,
        )
        yield
        torch.compiler.reset()


@pytest.mark.usefixtures("ops")
def test_each_leaves() -> None:
    torch.manual_seed(0)
    plain, x = Fused(), torch.randn(64, WIDTH)
    model = tencache_fx.offload(copy.deepcopy(plain), "cpu")
    options = {"compiler": "eager", "calibrate": False, "device_budget": 400_000}
    torch.compile(model, backend="tencache", options=options)(x).square().mean().backward()
    plain(x).square().mean().backward()
    for mine, true in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, HostGradient)
        torch.testing.assert_close(mine.grad.clone(), true.grad)
