"""Two ranks that have to agree on what runs again behind gathers: what one of them does, and what came of it."""

import copy
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rates import pretend_slow_links
from shard_training import HIDDEN, OPTIONS, ROWS, Found, blocks, digest, off_by, spread
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tencache_fx
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import AdamW
from tencache_fx.records import RegionRecord
from tencache_fx.region.rank_agreement import RankAgreement

ROOMY, TIGHT = "100MB", "4MB"
Rows = tuple[tuple[int, ...], tuple[int, ...]]
SAME = ((ROWS, ROWS), (ROWS, ROWS))
HEAD_START_S = 2
READ = RankAgreement.read
JOINT = {"calibrate": True, "recompute": "auto", "policy": "joint"}


def data(rank: int, rows: int = ROWS) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(rows, HIDDEN)


def wanted(rows: Rows) -> dict[str, Tensor]:
    """Return the parameters that one process has after the same steps on what both ranks see."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seen in zip(*rows, strict=True):
        optimizer.zero_grad()
        torch.stack([model(data(rank, each)).square().mean() for rank, each in enumerate(seen)]).mean().backward()
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
    rows: Rows = SAME,
    change: Callable[[nn.Module], nn.Module] | None = None,
    compiler: str = "eager",
    at_once: bool = False,
    fails_before: bool = False,
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
    refusal = ""
    if fails_before:
        try:
            run(data(rank, 5 * ROWS))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            refusal = str(error)
        torch._dynamo.reset()  # else the next region is for any number of rows
    if rank != first:
        time.sleep(HEAD_START_S)
        if at_once:
            RankAgreement.read = lambda self: None
    for count in rows[rank]:
        optimizer.zero_grad()
        run(data(rank, count)).square().mean().backward()
        optimizer.step()
    RankAgreement.read = READ
    records = [each for each in tencache_fx.regions() if each not in before]
    return {
        "off by": off_by(model, wanted(rows)),
        "digest": digest(model),
        "order": [each.name for each in records[-1].problem.collectives],
        "runs again": sorted(records[-1].plan.recomputed),
        "products again": products_again(records[-1]),
        "peak": records[-1].plan.forecast.peak_bytes,
        "refusal": refusal,
        "compilations": len(records),
    }


def products_again(record: RegionRecord) -> int:
    """Return how many matrix products of the forward the backward runs again."""
    names = [op.name for op in record.problem.ops]
    early, late = names[: record.problem.boundary], names[record.problem.boundary :]
    return sum(name in early and name.startswith(("mm", "addmm")) for name in late)


class Gathered(torch.autograd.Function):
    """Gather what the two ranks have, and scatter the sum of gradients: somebody's own sharding."""

    @staticmethod
    def forward(ctx: object, part: Tensor) -> Tensor:
        work = torch.ops._c10d_functional.all_gather_into_tensor(part, 2, dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(work)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        group = dist.group.WORLD.group_name
        work = torch.ops._c10d_functional.reduce_scatter_tensor(gradient.contiguous(), "sum", 2, group)
        return torch.ops._c10d_functional.wait_tensor(work)


class OwnGather(nn.Module):
    """A linear layer of which each rank has half, gathered anew in the backward by a checkpoint's policy."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(outputs // 2, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        again = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
        return x @ checkpoint(Gathered.apply, self.part, use_reentrant=False, context_fn=again).t()


def own_gathers() -> Found:
    """Other sizes and budgets on two ranks whose model is not spread by `offload`: nobody agrees on anything there."""
    before, rank = tencache_fx.regions(), dist.get_rank()
    pretend_slow_links()
    torch.manual_seed(rank)
    layers = [(nn.LayerNorm(160), OwnGather(160, 640), nn.GELU(), OwnGather(640, 160)) for _ in range(4)]
    model = nn.Sequential(*(layer for each in layers for layer in each))
    plain = copy.deepcopy(model)
    options = {**OPTIONS, "device_budget": ("100MB", "7MB")[rank], **JOINT}
    run = torch.compile(lambda x: model(x), backend="tencache", options=options)
    torch.manual_seed(10 + rank)
    x = torch.randn((256, 250)[rank], 160)
    run(x).square().mean().backward()
    plain(x).square().mean().backward()
    (record,) = (each for each in tencache_fx.regions() if each not in before)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "off by": max(((one.grad - other.grad).abs().max() / other.grad.abs().max()).item() for one, other in pairs),
        "order": [each.name for each in record.problem.collectives],
        "runs again": sorted(record.plan.recomputed),
    }


def gradient_of_input() -> Found:
    """The second call asks for the gradient of its input, for which the backward gathers one parameter more."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(161, 641), nn.GELU(), nn.Linear(641, 161))
    model = spread(copy.deepcopy(plain))
    before = tencache_fx.regions()
    run = torch.compile(lambda x: model(x), backend="tencache", options={**OPTIONS, "recompute": "auto"})
    x = data(dist.get_rank())
    run(x).square().mean().backward()
    x.requires_grad_()
    run(x).square().mean().backward()
    other = x.detach().requires_grad_()
    plain(other).square().mean().backward()
    records = [each for each in tencache_fx.regions() if each not in before]
    return {
        "off by": ((x.grad - other.grad).abs().max() / other.grad.abs().max()).item(),
        "gathers": [sum("gather" in each.name for each in record.problem.collectives) for record in records],
    }


class Indexed(nn.Module):
    """An embedding whose result torch saves if it is small, and computes again if it is more than a quarter of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(1600, 161), nn.LayerNorm(161), nn.Linear(161, 641)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.words.weight[words]))


def indexed() -> Found:
    """One rank has a batch for which torch computes again what it reads of a gathered weight, the other one has not."""
    torch.manual_seed(0)
    plain = Indexed()
    model = spread(copy.deepcopy(plain))
    before = tencache_fx.regions()
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": "40MB", "recompute": "auto"})
    torch.manual_seed(0)
    batches = [torch.randint(1600, (count,)) for count in (100, 1000)]
    run(batches[dist.get_rank()]).square().mean().backward()
    torch.stack([plain(words).square().mean() for words in batches]).mean().backward()
    (record,) = (each for each in tencache_fx.regions() if each not in before)
    parameter = model.words._parameters["weight"]
    want = find_offloaded(parameter).shard.cut(plain.words.weight.grad)
    return {
        "off by": ((parameter.grad.clone() - want).abs().max() / want.abs().max()).item(),
        "order": [each.name for each in record.problem.collectives],
    }


QUICK: dict[str, Callable[[], Found]] = {
    "roomy first": partial(train, (ROOMY, TIGHT), at_once=True),
    "tight first": partial(train, (ROOMY, TIGHT), first=1),
    "other sizes": partial(train, (TIGHT, TIGHT), rows=((ROWS, ROWS - 26), (ROWS - 50, ROWS))),
    "other nodes": partial(train, (TIGHT, "5MB"), change=divide),
}
OTHERS: dict[str, Callable[[], Found]] = {
    "own gathers": own_gathers,
    "gradient of the input": gradient_of_input,
    "indexed": indexed,
}
SLOW: dict[str, Callable[[], Found]] = {
    "Inductor": partial(train, (TIGHT, TIGHT), compiler="inductor"),
    "Inductor, roomy first": partial(train, (ROOMY, TIGHT), compiler="inductor"),
    "both tight": partial(train, (TIGHT, TIGHT)),
    "other nodes first": partial(train, (TIGHT, "3.5MB"), change=divide, first=1),
    "after a failure": partial(train, (TIGHT, TIGHT), fails_before=True),
}
