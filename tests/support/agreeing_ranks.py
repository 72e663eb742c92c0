"""Two ranks that have to agree on what runs again behind gathers: what one of them does, and what came of it."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rates import pretend_slow_links
from shard_training import HIDDEN, OPTIONS, ROWS, Found, blocks, digest, off_by, spread
from torch import Tensor, nn

import tencache_fx
from tencache_fx.optim import AdamW
from tencache_fx.records import RegionRecord
from tencache_fx.region.rank_agreement import RankAgreement

STEPS, ROOMY, TIGHT = 2, "100MB", "4.4MB"
HEAD_START_S = 2
READ = RankAgreement.read
JOINT = {"calibrate": True, "recompute": "auto", "policy": "joint"}


def data(rank: int, rows: int = ROWS) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(rows, HIDDEN)


def wanted(rows: tuple[int, int]) -> dict[str, Tensor]:
    """Return the parameters that one process has after the same steps on what both ranks see."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(data(rank, each)).square().mean() for rank, each in enumerate(rows)]).mean().backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def divide(model: nn.Module) -> nn.Module:
    """Return the same model in other ops, whose graph has other nodes."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                wide, narrow = block.wide, block.narrow
                y = nn.functional.gelu(torch.matmul(block.norm(x), wide.weight.t()) + wide.bias)
                x = x + (torch.matmul(y, narrow.weight.t()) + narrow.bias)
            return x

    return Other()


def train(
    budgets: tuple[str, str],
    *,
    first: int = 0,
    rows: tuple[int, int] = (ROWS, ROWS),
    change: Callable[[nn.Module], nn.Module] | None = None,
    compiler: str = "eager",
    at_once: bool = False,
) -> Found:
    """Train with a device budget for each rank; rank `first` compiles before the other one does.

    As if they compiled `at_once`, that one finds nothing agreed on until it has planned.
    """
    before, rank = tencache_fx.regions(), dist.get_rank()
    pretend_slow_links()
    model = spread()
    whole = model if change is None or rank == 0 else change(model)
    options = {**OPTIONS, "device_budget": budgets[rank], "compiler": compiler, **JOINT}
    run = torch.compile(lambda x: whole(x), backend="tencache", options=options)  # torch 2.11 divides a Sequential
    optimizer = AdamW(model.parameters(), lr=1e-3)
    if rank != first:
        time.sleep(HEAD_START_S)
        if at_once:
            RankAgreement.read = lambda self: None
    for _ in range(STEPS):
        optimizer.zero_grad()
        run(data(rank, rows[rank])).square().mean().backward()
        optimizer.step()
    RankAgreement.read = READ
    (record,) = (each for each in tencache_fx.regions() if each not in before)
    return {
        "off by": off_by(model, wanted(rows)),
        "digest": digest(model),
        "order": [each.name for each in record.problem.collectives],
        "runs again": sorted(record.plan.recomputed),
        "products again": products_again(record),
        "peak": record.plan.forecast.peak_bytes,
    }


def products_again(record: RegionRecord) -> int:
    """Return how many matrix products of the forward the backward runs again."""
    names = [op.name for op in record.problem.ops]
    early, late = names[: record.problem.boundary], names[record.problem.boundary :]
    return sum(name in early and name.startswith(("mm", "addmm")) for name in late)


QUICK: dict[str, Callable[[], Found]] = {
    "roomy first": partial(train, (ROOMY, TIGHT), at_once=True),
    "tight first": partial(train, (ROOMY, TIGHT), first=1),
    "other sizes": partial(train, (TIGHT, TIGHT), rows=(ROWS, ROWS - 50)),
    "other nodes": partial(train, (TIGHT, "5MB"), change=divide),
}
SLOW: dict[str, Callable[[], Found]] = {
    "Inductor": partial(train, (TIGHT, TIGHT), compiler="inductor"),
    "Inductor, roomy first": partial(train, (ROOMY, TIGHT), compiler="inductor"),
    "both tight": partial(train, (TIGHT, TIGHT)),
    "other nodes first": partial(train, (TIGHT, TIGHT), change=divide, first=1),
}
