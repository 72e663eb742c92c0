"""A CUDA device whose allocator may take no more than the device budget, and what earlier work leaves behind there."""

from collections.abc import Callable, Iterator

import pytest
import torch
from harness import Block
from torch import Tensor, nn

import tencache_fx

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, BATCH = 8, 4096, 16384
SHARES = {"whole": 0.6, "blocks": 0.7, "offloaded": 0.5}  # of plain's peak


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.compiler.reset()
    tencache_fx.close()
    torch.cuda.empty_cache()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 2) for _ in range(LAYERS))).bfloat16().cuda()


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, step: int) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(BATCH, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
    run(x).square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def plain_step() -> tuple[list[Tensor], int]:
    """Return the gradients of a step without a plan, and its peak."""
    torch.cuda.reset_peak_memory_stats()
    model = build()
    found = gradients(torch.compile(model), model, 3)
    peak_bytes = torch.cuda.max_memory_allocated()
    del model
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return found, peak_bytes


@pytest.mark.parametrize("way", SHARES)
def test_a_budget_of_all_that_torch_may_take(way: str) -> None:
    """Gaps between tensors count then, too: the budget is the limit of the allocator, which raises beyond it."""
    expected, peak_bytes = plain_step()
    budget_bytes = int(SHARES[way] * peak_bytes)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((budget_bytes + 1) / total_bytes)
    torch.cuda.reset_peak_memory_stats()
    model = build()
    options = {"device_budget": budget_bytes - 1, "scope": "step" if way == "blocks" else "auto"}
    if way == "offloaded":
        tencache_fx.offload(model, "cuda")
    if way == "blocks":
        for block in model:
            block.compile(backend="tencache", options=options)
    run = model if way == "blocks" else torch.compile(model, backend="tencache", options=options)
    for step in range(3):
        gradients(run, model, step)
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    found = gradients(run, model, 3)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=2e-2, atol=1e-4)
    assert torch.cuda.max_memory_reserved() <= budget_bytes
    assert torch.cuda.memory_stats()["num_alloc_retries"] - before <= 2
    assert tencache_fx.stats()["d2h_bytes"] or any(record.plan.recomputed for record in tencache_fx.regions())


def test_a_peak_of_earlier_work_is_no_part_of_a_step() -> None:
    """It hides what is held between the runs of a step; nobody has reset torch's statistics."""
    _, peak_bytes = plain_step()
    plans = []
    for earlier_bytes in (0, 2 * peak_bytes):
        torch.cuda.reset_peak_memory_stats()
        torch.empty(earlier_bytes, dtype=torch.uint8, device="cuda")
        model = build()
        for block in model:
            block.compile(backend="tencache", options={"device_budget": int(0.7 * peak_bytes), "scope": "step"})
        for step in range(4):
            gradients(model, model, step)
        plans.append(tencache_fx.steps()[-1].plan.forecast)
        del model
        torch.compiler.reset()
        tencache_fx.close()
    assert plans[1].makespan_ns <= 1.2 * plans[0].makespan_ns
