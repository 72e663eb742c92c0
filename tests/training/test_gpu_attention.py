"""Attention on a CUDA device: written out, where Inductor puts cuDNN's in its place, and with dropout."""

from pathlib import Path

import pytest
import torch
from conftest import MIB
from harness import INDUCTOR, compiled, faulty_cuda_engine
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import tencache_fx

pytestmark = pytest.mark.gpu

LAYERS, BATCH, LENGTH, HEADS, SIZE = 6, 16, 512, 8, 64

KEY_BIASES = [f"layers.{layer}.1.bias" for layer in range(LAYERS)]  # a softmax does not see them: only noise


class Attention(nn.Module):
    """Layers of attention with a mask, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for norm, (*given, taken) in zip(self.norms, self.layers, strict=True):
            query, key, value = (each(norm(x)).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2) for each in given)
            weights = (query @ key.transpose(-2, -1) / SIZE**0.5 + mask).softmax(-1)
            x = x + taken((weights @ value).transpose(1, 2).reshape(BATCH, LENGTH, HEADS * SIZE))
        return x.float().square().mean()


def gradients(model: nn.Module, run) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(BATCH, LENGTH, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bfloat16)
    mask[..., -7:] = -30000.0
    for _ in range(2):
        model.zero_grad()
        run(x, mask).backward()
    return [parameter.grad.float() for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_gradients_of_attention_are_right_whatever_is_offloaded(recompute: str) -> None:
    torch.manual_seed(0)
    model = Attention().cuda().bfloat16()
    exact = [gradient.clone() for gradient in gradients(model, model)]
    options = {**INDUCTOR, "policy": "joint", "recompute": recompute, "host_budget": 1024 * MIB}
    gradients(model, compiled(model, {**options, "device_budget": "60GiB"}))
    free = tencache_fx.regions()[-1]  # regions of other tests may live
    if not any("cudnn_attention" in op.name for op in free.problem.ops):
        pytest.skip("torch has not chosen cuDNN's attention for this device")
    forecast = free.plan.forecast
    moved = 0
    for share in (0.05, 0.15, 0.3, 0.45):  # each leaves what other layers read on the device
        torch.compiler.reset()
        budget = forecast.floor_bytes + int(share * (forecast.peak_bytes - forecast.floor_bytes)) + 16 * MIB
        with faulty_cuda_engine() as engine:
            ours = gradients(model, compiled(model, {**options, "device_budget": budget}))
            moved += bool(engine.stats.take()["offloads"] or tencache_fx.regions()[-1].plan.recomputed)
        far = [float((mine - other).norm() / other.norm()) for mine, other in zip(ours, exact, strict=True)]
        names = [name for name, _ in model.named_parameters()]
        wrong = {name: each for name, each in zip(names, far, strict=True) if each > 0.1}
        assert [name for name in wrong if name not in KEY_BIASES] == [], wrong
    assert moved >= 3  # the code of a region without transfers may hold less than the forecast without a budget


def test_attention_of_any_length_is_compiled_once() -> None:
    """No layout that is asked for may say how long it is."""
    torch.manual_seed(0)
    weight = (torch.randn(256, 768, device="cuda") / 16).bfloat16().requires_grad_()

    def attend(x: Tensor) -> Tensor:
        query, key, value = (x @ weight).unflatten(-1, (3, 4, 64)).movedim(-3, 0).transpose(-3, -2)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return found.transpose(-3, -2).flatten(-2).float()

    options = {"device_budget": "4GiB", "scope": "step", "calibrate": False, "host_budget": 1024 * MIB}
    run = torch.compile(attend, backend="tencache", dynamic=True, options=options)
    graphs = counters["stats"]["unique_graphs"]
    for length in (512, 384, 448, 640):
        x = torch.randn(4, length, 256, device="cuda", dtype=torch.bfloat16)
        (expected,) = torch.autograd.grad(attend(x).square().sum(), [weight])
        (found,) = torch.autograd.grad(run(x).square().sum(), [weight])
        assert float((found - expected).norm() / expected.norm()) < 0.05
    assert counters["stats"]["unique_graphs"] == graphs + 1


class Dropping(nn.Module):
    """Attention with a mask and dropout, in float32: a kernel that reads its seed on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 3 * 256) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            query, key, value = layer(x).unflatten(-1, (3, 4, 64)).movedim(-3, 0).transpose(-3, -2)
            found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.1)
            x = x + found.transpose(-3, -2).flatten(-2)
        return x.square().mean()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_attention_with_dropout_is_timed_and_trains(compiler: str, cache_folder: Path) -> None:
    model = Dropping().cuda()
    x, mask = torch.randn(64, 512, 256, device="cuda"), torch.zeros(64, 1, 512, 512, device="cuda")
    options = {"compiler": compiler, "device_budget": "4GiB", "calibrate": True, "host_budget": 1024 * MIB}
    loss = compiled(model, options)(x, mask)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    ops = [op.name for op in tencache_fx.regions()[-1].problem.ops]
    assert any("attention_backward" in name for name in ops), ops
