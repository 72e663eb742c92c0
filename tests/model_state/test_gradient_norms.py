"""Norms of gradients in host memory: taken on the device where they may be of use, and the same wherever they are."""

import pytest
import torch
from tied_model import batch, compiled, network
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state import parameter_ops
from tencache_fx.model_state.gradient_norm import norm_of
from tencache_fx.model_state.host_gradient import HostGradient


def backward(run: nn.Module, part: int) -> None:
    tokens = batch(part)
    nn.functional.cross_entropy(run(tokens).float(), (tokens * 7 + 3) % 128).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_taken_of_what_is_not_added(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of one, two and four backwards, whatever came before; those that add take none on the device."""
    taken: list[Tensor] = []
    monkeypatch.setattr(parameter_ops, "norm_of", lambda value: taken.append(value.clone()) or norm_of(value))
    plain = network(dtype)
    model = tencache_fx.offload(network(dtype))
    run, runs_plain = compiled(model), compiled(plain, None)
    for parts in (4, 1, 2, 1):
        taken.clear()
        backward(run, 0)
        once = len(taken)
        in_host_memory = [each.grad for each in model.parameters() if isinstance(each.grad, HostGradient)]
        assert 0 < once == len(in_host_memory)
        for part in range(1, parts):
            backward(run, part)
        assert len(taken) == once
        for part in range(parts):
            backward(runs_plain, part)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=1e-4 if dtype is torch.float32 else 2e-2, atol=0
        )
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad.clone(), other.grad, rtol=2e-2, atol=1e-4)
        model.zero_grad()
        plain.zero_grad()
    tencache_fx.close()


def test_a_gradient_that_was_not_added_after_all_has_the_same_norm() -> None:
    model = tencache_fx.offload(network())
    run = compiled(model)
    backward(run, 0)
    trained = [each for each in model.parameters() if isinstance(each.grad, HostGradient)]
    expected = [each.grad.norm() for each in trained]
    tokens = batch(0)
    loss = nn.functional.cross_entropy(run(tokens).float(), (tokens * 7 + 3) % 128)
    alone = torch.autograd.grad(loss, trained)
    torch.testing.assert_close([each.norm() for each in alone], expected)
    tencache_fx.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_norm_is_that_of_torch_in_single_precision(dtype: torch.dtype) -> None:
    value = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    found = norm_of(value)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, torch.linalg.vector_norm(value.to(wide)).float())
