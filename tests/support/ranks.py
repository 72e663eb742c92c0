"""What one of several ranks does, and what came of it: above all, what is refused."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tencache_fx
from tencache_fx.hardware.capacity import ranks_here
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.optim import AdamW

WORLD, HIDDEN, BLOCKS, STEPS, MOST_NORM = 2, 192, 2, 2, 1e-3
OPTIONS = {"device_budget": "1MB", "host_budget": "64MB", "compiler": "eager", "calibrate": False}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(BLOCKS)))


def batch(rank: int) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(32, HIDDEN)


def loss_of(run: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    return run(batch(rank)).square().mean()


def compiled(model: nn.Module, **more: object) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="tencache", options={**OPTIONS, **more})


def trained(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, dist.get_rank()).backward()
        clip()
        optimizer.step()


def wanted(*, clips: bool = False) -> dict[str, Tensor]:
    """Return the parameters that one process would have after the same steps on what all ranks see."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, rank) for rank in range(WORLD)) / WORLD).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    with tencache_fx.summon(model, write=False):
        return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}


def off_by(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max((got[name] - want[name]).abs().max().item() for name in want)


def refused(act: Callable[[], object]) -> str:
    """Return the error that `act` ends with."""
    try:
        act()
    except tencache_fx.TencacheError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextlib.contextmanager
def wrapped(order: str) -> Iterator[tuple[nn.Module, AdamW]]:
    """Yield a wrapped offloaded model and an optimizer with `step_in_backward`, made in this order."""
    model: nn.Module = net()
    optimizer = None
    for act in order.split():
        if act == "optimizer":
            optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
        elif act == "offload":
            model = tencache_fx.offload(model, "cpu")
        else:
            with tencache_fx.summon(model) if "offload" in order.partition("wrap")[0] else contextlib.nullcontext():
                model = DistributedDataParallel(model)
    yield model, optimizer


ORDERS = ("wrap offload optimizer", "optimizer wrap offload", "offload wrap optimizer", "optimizer offload wrap")


def early_updates() -> dict[str, object]:
    found = {}
    for order in ORDERS:
        with wrapped(order) as (model, _):
            before = weights(model)
            found[f"{order}, compiled"] = refused(lambda: loss_of(compiled(model), 0))
            found[f"{order}, uncompiled"] = refused(lambda: loss_of(model, 0))
            found[f"{order}, changed by"] = off_by(weights(model), before)
        fresh()
    return found


def early_update_of_what_is_ignored() -> dict[str, object]:
    """The reducer is told to leave the weights alone: then they may be updated during backward."""
    model = net()
    names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    model = tencache_fx.offload(DistributedDataParallel(model), "cpu")
    optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
    before = weights(model)
    trained(compiled(model), optimizer, lambda: None)
    return {"changed by": min((weights(model)[name] - before[name]).abs().max().item() for name in names)}


def update_after_backward() -> dict[str, object]:
    """Wrapped before or, with weights that differ from rank to rank, after: right, as long as `step` updates."""
    found = {}
    model = tencache_fx.offload(DistributedDataParallel(net()), "cpu")
    trained(compiled(model), AdamW(model.parameters(), lr=1e-2), lambda: None)
    found["wrapped first"] = off_by(weights(model), wanted())
    fresh()
    model = tencache_fx.offload(net(dist.get_rank()), "cpu")
    with tencache_fx.summon(model):
        model = DistributedDataParallel(model)
    trained(compiled(model), AdamW(model.parameters(), lr=1e-2), lambda: None)
    return {**found, "wrapped inside summon": off_by(weights(model), wanted())}


class Around(nn.Module):
    """A module that contains another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": inner})
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner["a"](x))


def wrap_what_is_offloaded() -> dict[str, object]:
    model, found = net(), {}
    around = Around(model)
    tencache_fx.offload(model, "cpu")
    before = weights(model)
    for name, each in (
        ("itself", model),
        ("a part", model[1]),
        ("what contains it", around),
        ("a later one", Around(model)),
    ):
        found[name] = refused(lambda: DistributedDataParallel(each))  # noqa: B023
    found["changed by"] = off_by(weights(model), before)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    loss_of(compiled(model), 0).backward()
    optimizer.step()
    return {**found, "then trained by": off_by(weights(model), before)}


class TakesOver(nn.Module):
    """A module with a parameter of another one."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.weight = other.weight


def shard_what_is_offloaded() -> dict[str, object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, model, found = init_device_mesh("cpu", (WORLD,)), net(), {}
    around = Around(model)
    tencache_fx.offload(model, "cpu")
    before, kept = weights(model), around.head.weight
    modules = {
        "itself": model,
        "a part": model[1][0],
        "what contains it": around,
        "a later one": Around(model),
        "what takes over": TakesOver(model[1][0]),
    }
    ways: dict[str, Callable[[nn.Module], object]] = {
        "fully_shard": lambda module: fully_shard(module, mesh=mesh),
        "FullyShardedDataParallel": FullyShardedDataParallel,
        "replicated": lambda module: distribute_module(module, mesh),
    }
    for (way, spread), (name, module) in itertools.product(ways.items(), modules.items()):
        # `distribute_module` asks nobody below, and what contained the model before its offload does not know of it.
        if (way, name) != ("replicated", "what contains it"):
            found[f"{way}, {name}"] = refused(lambda: spread(module))  # noqa: B023
    for name, path in (("itself", "1.0"), ("what contains it", "inner.a.1.0")):
        plan = {path: RowwiseParallel()}
        found[f"by rows, {name}"] = refused(lambda: parallelize_module(modules[name], mesh, plan))  # noqa: B023
    for name in ("a part", "what takes over"):
        module = modules[name] if name == "a part" else nn.Linear(HIDDEN, HIDDEN)
        module.weight = model[1][0].weight
        found[f"by columns, {name}"] = refused(lambda: parallelize_module(module, mesh, ColwiseParallel()))  # noqa: B023
    found["fully_shard, several"] = refused(lambda: fully_shard([*model], mesh=mesh))
    found["left as they are"] = around.head.weight is kept and all(
        type(parameter) is nn.Parameter for module in modules.values() for parameter in module.parameters()
    )
    found["changed by"] = off_by(weights(model), before)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    loss_of(compiled(model), 0).backward()
    optimizer.step()
    loss_of(around, 0).backward()
    return {**found, "then trained by": off_by(weights(model), before)}


def offload_what_is_sharded() -> dict[str, object]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, found = init_device_mesh("cpu", (WORLD,)), {}
    models = {"fully_shard": net(), "tensor parallel": net(), "DTensor": net()}
    fully_shard(models["fully_shard"], mesh=mesh)
    parallelize_module(models["tensor parallel"], mesh, {"0.0": ColwiseParallel(use_local_output=False)})
    models["DTensor"][1][0].weight = nn.Parameter(distribute_tensor(models["DTensor"][1][0].weight, mesh, (Shard(0),)))
    for name, model in models.items():
        before = {n: (p, p.full_tensor() if isinstance(p, DTensor) else p.clone()) for n, p in model.named_parameters()}
        found[name] = refused(lambda: tencache_fx.offload(model, "cpu"))  # noqa: B023
        found[f"optimizer of {name}"] = refused(lambda: AdamW(model.parameters(), lr=1e-2))  # noqa: B023
        found[f"{name} is as it was"] = all(
            p is before[n][0] and torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, before[n][1])
            for n, p in model.named_parameters()
        )
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    flat, views, copied = wrap(net()), wrap(net(), use_orig_params=True), net()
    replicate(copied)
    for name, model in (
        ("FullyShardedDataParallel", flat),
        ("its module", flat.module),
        ("FullyShardedDataParallel with views", views),
        ("replicate", copied),
    ):
        found[name] = refused(lambda: tencache_fx.offload(model, "cpu"))  # noqa: B023
    found["homes"] = len(tencache_fx.runtime.engine_registry.engines())
    return found


class Gather(torch.autograd.Function):
    """A parameter of its shards, whose gradient is reduced and scattered: nodes of the graph."""

    @staticmethod
    def forward(ctx: object, shard: Tensor) -> Tensor:
        return functional.all_gather_tensor(shard, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(gradient.contiguous(), "sum", 0, dist.group.WORLD) / WORLD


class ShardedLinear(nn.Module):
    """A linear layer of which each rank has its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(p.detach().chunk(WORLD)[dist.get_rank()].clone()) for p in linear.parameters()
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Gather.apply(self.weight), Gather.apply(self.bias))


def sharded() -> nn.Module:
    model = net()
    for block in model:
        block[0] = ShardedLinear(block[0])
    return tencache_fx.offload(model, "cpu")


def clip_shards(options: dict[str, object]) -> dict[str, object]:
    model = sharded()
    run = compiled(model, **options)
    loss_of(run, dist.get_rank()).backward()
    parameters = list(model.parameters())
    found = {
        "gradients in host memory": sum(isinstance(p.grad, HostGradient) for p in parameters),
        "clip_grad_norm_": refused(lambda: nn.utils.clip_grad_norm_(parameters, MOST_NORM)),
        "by maximum": refused(lambda: nn.utils.clip_grad_norm_(parameters, MOST_NORM, norm_type=torch.inf)),
        "foreach": refused(lambda: nn.utils.clip_grad_norm_([parameters[0]], MOST_NORM, foreach=True)),
        "norm": refused(lambda: parameters[0].grad.norm()),
    }
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    found["GradScaler"] = refused(lambda: scaler.unscale_(torch.optim.SGD([parameters[0]])))
    loss_of(run, dist.get_rank()).backward()
    return {**found, "after two backwards": refused(lambda: nn.utils.clip_grad_norm_(parameters, MOST_NORM))}


def train_shards() -> dict[str, object]:
    """Without clipping, and clipped as the error says: by hand."""
    found = {}
    for clips in (False, True):
        model = sharded()

        def clip() -> None:
            gradients = [parameter.grad for parameter in model.parameters()]  # noqa: B023
            total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
            dist.all_reduce(total)
            for gradient in gradients:
                gradient.mul_((MOST_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))

        trained(compiled(model), AdamW(model.parameters(), lr=1e-2), clip if clips else lambda: None)
        want = {name: p.chunk(WORLD)[dist.get_rank()] for name, p in wanted(clips=clips).items()}
        found["clipped by hand" if clips else "not clipped"] = off_by(weights(model), want)
        fresh()
    return found


def fresh() -> None:
    torch.compiler.reset()
    tencache_fx.close()
    gc.collect()  # regions that nobody has are in no report


GROUPS: dict[str, dict[str, Callable[[], dict[str, object]]]] = {
    "reducers": {
        "early": early_updates,
        "ignored": early_update_of_what_is_ignored,
        "late": update_after_backward,
        "wrap": wrap_what_is_offloaded,
    },
    "dtensors": {"offloaded": shard_what_is_offloaded, "sharded": offload_what_is_sharded},
    "shards": {
        "budget": lambda: clip_shards({}),
        "no budget": lambda: clip_shards({"device_budget": None}),
        "train": train_shards,
    },
    "budgets": {"shares": lambda: {"ranks here": ranks_here()}},
}
