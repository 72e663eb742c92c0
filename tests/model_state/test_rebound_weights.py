"""Classes of optimizers that set weights to other tensors, instead of changing them in place."""

from typing import Any

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.errors import UsageError
from tencache_fx.model_state import offloading, streamed_optimizer
from tencache_fx.model_state.update import gradient_on_host
from tencache_fx.optim import StreamedOptimizer


class Rebinding(torch.optim.Optimizer):
    """It sets weights to new tensors, and keeps the last gradients in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["last"] = [*state.get("last", []), parameter.grad][-2:]
                parameter.data = parameter.data - group["lr"] * sum(state["last"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offloads", [True, False])
def test_a_class_may_set_weights_anew(
    dtype: torch.dtype,
    offloads: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    torch.manual_seed(0)
    weights = [torch.randn(16, 16).to(dtype) for _ in range(6)]
    ours = nn.ParameterList(nn.Parameter(each.clone()) for each in weights)
    if offloads:
        tencache_fx.offload(ours, "cpu")
    theirs = [nn.Parameter(each.float()) for each in weights]
    optimizer, torchs = StreamedOptimizer(ours.parameters(), Rebinding), Rebinding(theirs)
    for _ in range(3):
        for parameter, other in zip(ours, theirs, strict=True):
            gradient = torch.randn(16, 16).to(dtype)
            other.grad = gradient.float()
            parameter.grad = gradient_on_host(parameter, gradient) if offloads else gradient
        optimizer.step()
        torchs.step()
    values = ours.state_dict().values()
    assert all(torch.equal(value, other.to(dtype)) for value, other in zip(values, theirs, strict=True))


class Shrinking(torch.optim.Optimizer):
    """It sets weights to a part of them: to a copy, or to a view, which begins where they do."""

    def __init__(self, params: Any, *, copies: bool) -> None:
        super().__init__(params, {"copies": copies})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            part = parameter.data[:2]
            parameter.data = part.clone() if self.param_groups[0]["copies"] else part


@pytest.mark.parametrize("copies", [True, False])
def test_a_weight_of_another_size_is_refused(copies: bool) -> None:  # noqa: FBT001
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    with pytest.raises(UsageError, match=r"set a weight of size \(4, 4\), torch.float32, to a tensor of size \(2, 4\)"):
        StreamedOptimizer([weight], Shrinking, copies=copies).step()
    assert bool((weight == 1).all())
