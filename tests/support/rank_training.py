"""Blocks that several ranks train in a tight budget, in each of torch's ways to share the work: what one rank does.

Each case returns how far the parameters are from those of one process that sees what all ranks see, and how many
transfers were planned, of regions or of steps.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import HIDDEN, WORLD, ShardedLinear
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tencache_fx
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.optim import AdamW

STEPS, ROWS, BLOCKS, MOST_NORM = 4, 512, 3, 1e-2
OPTIONS = {"host_budget": "128MB", "compiler": "eager", "calibrate": False}

Found = dict[str, object]
Clip = Callable[[], object]


class Block(nn.Module):
    """Two layers whose activations are what a tight budget has to offload."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def loss_of(run: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    torch.manual_seed(100 + rank)
    return run(torch.randn(ROWS, HIDDEN)).square().mean()


def local_loss(run: Callable[[Tensor], Tensor]) -> Tensor:
    return loss_of(run, dist.get_rank())


def loss_of_all(run: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([loss_of(run, rank) for rank in range(WORLD)]).mean()


@cache
def wanted(*, clips: bool = False) -> dict[str, Tensor]:
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of_all(model).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(
    run: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    loss: Callable[[Callable[[Tensor], Tensor]], Tensor] = local_loss,
    before: Callable[[bool], contextlib.AbstractContextManager[object]] | None = None,
    clip: Clip = lambda: None,
) -> None:
    """Train; with `before`, a step has two backwards, each of them in what that returns for whether it is the last."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        for last in (True,) if before is None else (False, True):
            with contextlib.nullcontext() if before is None else before(last):
                (loss(run) / (1 if before is None else 2)).backward()
        clip()
        optimizer.step()


def outcome(model: nn.Module, *, clips: bool = False, sharded: bool = False) -> Found:
    """Compare what was trained with what was wanted."""
    with contextlib.ExitStack() as ends:
        with contextlib.suppress(tencache_fx.UsageError):  # nothing is offloaded
            ends.enter_context(tencache_fx.summon(model, write=False))
        got = {
            name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for name, p in model.named_parameters()
        }
    want = wanted(clips=clips)
    if sharded:
        want = {name: value.chunk(WORLD)[dist.get_rank()] for name, value in want.items()}
    assert set(got) == set(want)
    records = (*tencache_fx.regions(), *tencache_fx.steps())
    return {
        "off by": max((got[name] - want[name]).abs().max().item() for name in want),
        "transfers": sum(len(record.plan.transfers) for record in records),
    }


def compiled(model: nn.Module, **options: object) -> nn.Module:
    model.compile(backend="tencache", options=OPTIONS | options)
    return model


def blockwise(model: nn.Sequential, **options: object) -> nn.Sequential:
    for block in model:
        compiled(block, **options)
    return model


def clipping(model: nn.Module) -> Clip:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)


def reduced_by_hand(how: str = "in place") -> Found:
    """Gradients that the loop itself reduces; in host memory, some of them, and known as such to no collective."""
    model = compiled(tencache_fx.offload(blocks(), "cpu"), device_budget="15MB")
    parameters, kinds = list(model.parameters()), set()

    def reduce() -> None:
        for parameter in parameters:
            gradient = parameter.grad
            kinds.add(type(gradient))
            if how == "in place":
                dist.all_reduce(gradient)
            elif how == "asynchronous":
                dist.all_reduce(gradient.data, async_op=True).wait()
            else:
                gradient.copy_(functional.all_reduce(gradient, "sum", dist.group.WORLD))
            gradient.div_(WORLD)

    train(model, AdamW(parameters, lr=1e-3), clip=reduce)
    return outcome(model) | {"in host memory": HostGradient in kinds}


def replicated(
    order: str = "wrap compile",
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    early: bool = False,
    offloads: bool = False,
    accumulates: bool = False,
    clips: bool = False,
    optimize_ddp: object = True,
    options: dict[str, object] | None = None,
    **settings: object,
) -> Found:
    """DistributedDataParallel around the blocks, compiled in some order: as a whole, or one by one."""
    options = {"device_budget": "15MB"} | (options or {})
    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        model = blocks()
        if order == "compile wrap":
            compiled(model, **options)
        elif order == "blocks wrap":
            blockwise(model, **options)
        run = top = DistributedDataParallel(model, **settings)
        if offloads:
            top = tencache_fx.offload(top, "cpu")
        if order == "wrap compile":
            run = torch.compile(top, backend="tencache", options=OPTIONS | options)
        elif order == "wrap blocks":
            blockwise(model, **options)
        steps = optimizer(top.parameters(), lr=1e-3, **({"step_in_backward": True} if early else {}))
        before = (lambda last: contextlib.nullcontext() if last else top.no_sync()) if accumulates else None
        train(run, steps, before=before, clip=clipping(top) if clips else lambda: None)
    return outcome(top, clips=clips)


def fully_sharded(
    order: str = "shard blocks",
    *,
    accumulates: bool = False,
    clips: bool = False,
    in_host_memory: bool = False,
    options: dict[str, object] | None = None,
    **settings: object,
) -> Found:
    """`fully_shard` of each block and of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options = {"device_budget": "14MB"} | (options or {})
    if in_host_memory:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    run = model = blocks()
    mesh = init_device_mesh("cpu", (WORLD,))
    if order == "blocks shard":
        blockwise(model, **options)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **settings)
    if order == "shard blocks":
        blockwise(model, **options)
    elif order == "shard compile":
        run = torch.compile(model, backend="tencache", options=OPTIONS | options)

    @contextlib.contextmanager
    def before(last: bool) -> Iterator[None]:  # noqa: FBT001
        model.set_requires_gradient_sync(last)
        yield

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(run, optimizer, before=before if accumulates else None, clip=clipping(model) if clips else lambda: None)
    return outcome(model, clips=clips)


def flattened(optimizer: type[torch.optim.Optimizer], **more: object) -> Found:
    """FullyShardedDataParallel, whose parameters are views of a flat one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    model = wrap(nn.Sequential(*(wrap(block) for block in blocks())))
    run = torch.compile(model, backend="tencache", options=OPTIONS | {"device_budget": "14MB"})
    train(run, optimizer(model.parameters(), lr=1e-3, **more))
    with FullyShardedDataParallel.summon_full_params(model):
        return outcome(model)


class GatheredLinear(nn.Module):
    """A linear layer whose parameters are DTensors that are gathered where they are read."""

    def __init__(self, linear: nn.Linear) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        mesh = init_device_mesh("cpu", (WORLD,))
        for name, p in linear.named_parameters():
            self.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, (Shard(0),))))

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import Partial, Replicate

        whole = [p.redistribute(placements=(Replicate(),)) for p in (self.weight, self.bias)]
        return nn.functional.linear(x, *(each.to_local(grad_placements=(Partial("avg"),)) for each in whole))


def gathered(way: str, layer: type[nn.Module], *, early: bool = False, **options: object) -> Found:
    """Shards that the graph gathers: plain ones in host memory, or DTensors."""
    model, plain = blocks(), layer is ShardedLinear
    for block in model:
        block.wide, block.narrow = layer(block.wide), layer(block.narrow)
    if plain:
        model = tencache_fx.offload(model, "cpu")
    options = {"device_budget": "12MB" if way == "whole" else "16MB"} | options
    run = (compiled if way == "whole" else blockwise)(model, **options)
    if plain:
        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=early)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(run, optimizer)
    return outcome(model, sharded=plain)


def tensor_parallel(way: str, **options: object) -> Found:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = blocks()
    for block in model:
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(block, init_device_mesh("cpu", (WORLD,)), plan)
    run = (compiled if way == "whole" else blockwise)(model, **({"device_budget": "13MB"} | options))
    train(run, torch.optim.AdamW(model.parameters(), lr=1e-3), loss=loss_of_all)
    return outcome(model)


def unequal(case: Callable[..., Found], **more: object) -> Found:
    """Each rank with a budget of its own, and so with a plan of its own."""
    return case(**more, device_budget=("100MB", "16MB")[dist.get_rank()])


Cases = dict[str, Callable[[], Found]]

QUICK: Cases = {
    "reduced by hand": reduced_by_hand,
    "compiled, then wrapped": lambda: replicated("compile wrap"),
    "wrapped, offloaded, blocks by step": lambda: replicated(
        "wrap blocks", optimizer=AdamW, offloads=True, clips=True, options={"scope": "step"}
    ),
    "fully_shard, blocks": fully_sharded,
}

STEP, REGION, ROOMY = {"scope": "step"}, {"scope": "region"}, {"device_budget": "30MB", "scope": "step"}
SMALL_REGION = {"device_budget": "9MB", "scope": "region"}

SLOW: Cases = {
    "reduced by hand, asynchronously": lambda: reduced_by_hand("asynchronous"),
    "reduced by hand, functionally": lambda: reduced_by_hand("functional"),
    "wrapped, then compiled": replicated,
    "wrapped, ours": lambda: replicated(optimizer=AdamW),
    "wrapped, ours, updated during backward": lambda: replicated(optimizer=AdamW, early=True),
    "compiled, then wrapped, region": lambda: replicated("compile wrap", options=REGION),
    "compiled, then wrapped, ours, updated during backward": lambda: replicated(
        "compile wrap", optimizer=AdamW, early=True
    ),
    "wrapped, static graph": lambda: replicated(static_graph=True),
    "wrapped, gradients are views": lambda: replicated(gradient_as_bucket_view=True),
    "wrapped, offloaded, gradients are views": lambda: replicated(
        optimizer=AdamW, offloads=True, gradient_as_bucket_view=True
    ),
    "wrapped, offloaded, static graph": lambda: replicated(optimizer=AdamW, offloads=True, static_graph=True),
    "wrapped, offloaded, finds unused": lambda: replicated(optimizer=AdamW, offloads=True, find_unused_parameters=True),
    "wrapped, offloaded, accumulates": lambda: replicated(optimizer=AdamW, offloads=True, accumulates=True),
    "wrapped, one graph": lambda: replicated(optimize_ddp=False),
    "wrapped, offloaded, one graph": lambda: replicated(optimizer=AdamW, offloads=True, optimize_ddp=False),
    "wrapped, python reducer": lambda: replicated(optimize_ddp="python_reducer"),
    "wrapped, offloaded, python reducer": lambda: replicated(
        optimizer=AdamW, offloads=True, optimize_ddp="python_reducer"
    ),
    "wrapped, Inductor": lambda: replicated(options={"compiler": "inductor"}),
    "blocks, then wrapped": lambda: replicated("blocks wrap"),
    "wrapped, blocks, region": lambda: replicated("wrap blocks", options=SMALL_REGION),
    "wrapped, offloaded, blocks accumulate": lambda: replicated(
        "wrap blocks", optimizer=AdamW, offloads=True, accumulates=True
    ),
    "blocks, then fully_shard": lambda: fully_sharded("blocks shard"),
    "fully_shard, blocks by step, Inductor": lambda: fully_sharded(options=ROOMY | {"compiler": "inductor"}),
    "fully_shard, blocks, region": lambda: fully_sharded(options=SMALL_REGION),
    "fully_shard, whole": lambda: fully_sharded("shard compile"),
    "fully_shard, stays gathered": lambda: fully_sharded(reshard_after_forward=False),
    "fully_shard, in host memory": lambda: fully_sharded(in_host_memory=True),
    "fully_shard, accumulates": lambda: fully_sharded(accumulates=True),
    "fully_shard, clips": lambda: fully_sharded(clips=True),
    "flattened": lambda: flattened(torch.optim.AdamW),
    "flattened, ours, updated during backward": lambda: flattened(AdamW, step_in_backward=True),
    "shards, blocks by step, updated during backward": lambda: gathered("blocks", ShardedLinear, early=True, **STEP),
    "shards, whole, updated during backward": lambda: gathered("whole", ShardedLinear, early=True),
    "shards, whole, by step": lambda: gathered("whole", ShardedLinear, **STEP),
    "shards, blocks, Inductor": lambda: gathered("blocks", ShardedLinear, compiler="inductor"),
    "DTensors, whole": lambda: gathered("whole", GatheredLinear),
    "DTensors, blocks by step": lambda: gathered("blocks", GatheredLinear, **STEP),
    "tensor parallel, whole": lambda: tensor_parallel("whole"),
    "tensor parallel, blocks by step": lambda: tensor_parallel("blocks", **STEP),
    "unequal budgets, shards, whole": lambda: unequal(gathered, way="whole", layer=ShardedLinear),
    "unequal budgets, shards, blocks by step": lambda: unequal(gathered, way="blocks", layer=ShardedLinear, **STEP),
}
