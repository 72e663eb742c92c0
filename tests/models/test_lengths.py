"""Batches of many lengths: as few compilations as torch needs, the bits of its own, within the budget."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import family, text
from matrix import EAGER, tight_budget
from torch import Tensor, nn

import tencache_fx
from tencache_fx.records import RegionRecord

LENGTHS = (64, 48, 16, 64, 24, 40)


def train(
    name: str, wrap: Callable[[nn.Module], Callable[..., Any]]
) -> tuple[Tensor, list[int], tuple[RegionRecord, ...]]:
    """Return losses and sums of gradients, the graphs compiled after each step, and the regions."""
    torch.compiler.reset()
    gc.collect()
    torch._dynamo.utils.counters.clear()
    known = {record.region for record in tencache_fx.regions()}
    torch.manual_seed(0)
    model = family(name).build().model.eval()  # without dropout: its seeds differ from graph to graph
    run = wrap(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    found, graphs = [], []
    for step, length in enumerate(LENGTHS):
        sgd.zero_grad()
        loss = run(**text(step, length=length)).loss
        loss.backward()
        sgd.step()
        norms = [p.grad.abs().sum() for p in model.parameters() if p.grad is not None]
        found += [loss.detach(), torch.stack(norms).sum()]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return torch.stack(found), graphs, tuple(r for r in tencache_fx.regions() if r.region not in known)


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("gpt2", True),  # its loss is a region of its own, whose input is a view
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        pytest.param("llama", None, marks=pytest.mark.slow),
        pytest.param("bert", True, marks=pytest.mark.slow),
        pytest.param("t5", None, marks=pytest.mark.slow),
    ],
)
def test_lengths_from_buckets(name: str, *, dynamic: bool | None) -> None:
    pytest.importorskip("transformers")
    backend = "aot_eager_decomp_partition"
    expected, graphs, _ = train(name, lambda model: torch.compile(model, backend=backend, dynamic=dynamic))

    def within(budget: int) -> Callable[[nn.Module], Callable[..., Any]]:
        return lambda model: torch.compile(
            model, backend="tencache", options={**EAGER, "device_budget": budget}, dynamic=dynamic
        )

    budget = tight_budget(train(name, within(1 << 30))[2], share=0.6)
    ours, our_graphs, records = train(name, within(budget))
    assert torch.equal(ours, expected)
    assert our_graphs == graphs, "compiled as often as without us"
    assert any(record.plan.transfers for record in records)
    assert all(record.plan.forecast.peak_bytes <= budget for record in records)
