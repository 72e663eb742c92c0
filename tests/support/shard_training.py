"""A model that `offload(model, shard=True)` spreads over two ranks: what one of them does, and what came of it."""

import pickle
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from ranks import WORLD, refused
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tencache_fx
from tencache_fx.hardware.collective_rates import group_rates
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import AdamW

STEPS, ROWS, HIDDEN, WIDE, BLOCKS, MOST_NORM = 3, 256, 161, 641, 3, 1e-2  # odd sizes: parts are filled up
OPTIONS = {"device_budget": "7MB", "host_budget": "128MB", "compiler": "eager", "calibrate": False}

Found = dict[str, object]


class Block(nn.Module):
    """Two large parameters, which are spread, and three small ones, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.wide, self.narrow = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def blocks(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def spread(model: nn.Module | None = None, seed: int | None = None) -> nn.Module:
    """Return a model whose ranks began with other values: those of rank 0 count."""
    model = blocks(dist.get_rank() if seed is None else seed) if model is None else model
    return tencache_fx.offload(model, "cpu", shard=True)


def batch(rank: int, part: int = 0) -> Tensor:
    torch.manual_seed(100 + 10 * part + rank)
    return torch.randn(ROWS, HIDDEN)


def loss_of(run: Callable[[Tensor], Tensor], rank: int, part: int = 0) -> Tensor:
    return run(batch(rank, part)).square().mean()


@cache
def wanted(*, clips: bool = False, parts: int = 1, steps: int = STEPS) -> dict[str, Tensor]:
    """Return the parameters that one process has after the same steps on what all ranks see."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model, rank, part) for rank in range(WORLD) for part in range(parts)]
        torch.stack(losses).mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def whole(model: nn.Module) -> dict[str, Tensor]:
    with tencache_fx.summon(model, write=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def off_by(model: nn.Module, want: dict[str, Tensor]) -> float:
    got = whole(model)
    assert got.keys() == want.keys()
    return max((got[name] - want[name]).abs().max().item() for name in want)


def digest(model: nn.Module) -> list[float]:
    """Return numbers that are the same on two ranks only if all values are."""
    return [
        value.double().mul(torch.arange(value.numel()).view_as(value)).sum().item() for value in whole(model).values()
    ]


def compiled(model: nn.Module, *, blockwise: bool = False, **more: object) -> nn.Module:
    for module in model if blockwise else (model,):
        module.compile(backend="tencache", options=OPTIONS | more)
    return model


def train(
    compile_it: Callable[[nn.Module], nn.Module] = compiled,
    *,
    early: bool = False,
    clips: bool = False,
    parts: int = 1,
    model: nn.Module | None = None,
) -> Found:
    before = tencache_fx.regions()  # of earlier cases: Dynamo's guards of an autograd.Function keep them
    model = compile_it(spread(model))
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=early)
    kinds = set()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            (loss_of(model, dist.get_rank(), part) / parts).backward()
        kinds |= {type(p.grad) for p in model.parameters() if find_offloaded(p) is not None}
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
    records = [each for each in (*tencache_fx.regions(), *tencache_fx.steps()) if each not in before]
    return {
        "off by": off_by(model, wanted(clips=clips, parts=parts)),
        "digest": digest(model),
        "gathers in a backward": sum(
            "all_gather" in op.name
            for record in tencache_fx.regions()
            if record not in before
            for op in record.problem.ops[record.problem.boundary :]
        ),
        "transfers": sum(len(record.plan.transfers) for record in records),
        "gradients in host memory": kinds == ({type(None)} if early else {HostGradient}),
        "updated on the device": sum(each.updated_on_device for p in model.parameters() if (each := find_offloaded(p))),
        "host bytes": sum(each.nbytes for p in model.parameters() if (each := find_offloaded(p)) is not None),
        "bytes": sum(p.nbytes for p in blocks().parameters() if p.dim() == 2),
    }


def alone(model: nn.Module) -> nn.Module:
    """Leave a model uncompiled."""
    return model


def unlike(model: nn.Module) -> nn.Module:
    """Compile a model with all the room there is on one rank, and with hardly any on the others."""
    return compiled(model, device_budget="100MB" if dist.get_rank() == 0 else "4.2MB", recompute="auto")


def roomy_blocks(model: nn.Module) -> nn.Module:
    """Compile a model block by block, with room for the optimizer's state of some parameters, on one rank of more."""
    return compiled(model, blockwise=True, scope="step", device_budget="12MB" if dist.get_rank() == 0 else "16MB")


def late(model: nn.Module) -> nn.Module:
    """Compile a model, one rank of which is late for each block and each gradient."""

    def wait(*_: object) -> None:
        time.sleep(0.05 * dist.get_rank())

    for block in model:
        block.register_forward_pre_hook(wait)
        block.norm.weight.register_hook(wait)
    return compiled(model, blockwise=True)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return blocks()


def made_on_meta() -> Found:
    """A model that no rank has whole at any time, whose values are as rank 0 makes them."""
    torch.manual_seed(dist.get_rank())
    model, most = on_meta(), 0
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            was = module.reset_parameters

            def reset(was: Callable[[], None] = was) -> None:
                nonlocal most
                was()
                most = max(most, sum(p.numel() for p in model.parameters() if p.device.type == "cpu"))

            module.reset_parameters = reset
    spread(model)
    torch.manual_seed(0)
    plain = on_meta().to_empty(device="cpu")
    for module in plain.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
    return {
        "off by": off_by(model, dict(plain.named_parameters())),
        "digest": digest(model),
        "most": most,
        "all": sum(p.numel() for p in plain.parameters()),
    }


def summoned() -> Found:
    """What is changed inside summon is changed on all ranks, each its own part."""
    model = spread()
    with torch.no_grad(), tencache_fx.summon(model):
        size = list(model[0].wide.weight.shape)
        model[0].wide.weight.mul_(2)
        model[1].narrow.weight.data = torch.full((HIDDEN, WIDE), 0.5)
    with tencache_fx.summon(model, write=False):
        model[0].wide.weight.data.zero_()
    want = dict(blocks().named_parameters())
    want["0.wide.weight"] = want["0.wide.weight"] * 2
    want["1.narrow.weight"] = torch.full((HIDDEN, WIDE), 0.5)
    return {"size": size, "off by": off_by(model, want), "part": list(model[0].wide._parameters["weight"].shape)}


def tied() -> Found:
    """A parameter of two modules, one of them outside of the model, is spread once, and its gradient is the sum."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(641, HIDDEN), nn.Linear(HIDDEN, 641, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x))

    def loss(run: Callable[[Tensor], Tensor], rank: int) -> Tensor:
        torch.manual_seed(rank)
        return run(torch.randint(641, (64,))).square().mean()

    want, model = Tied(), Tied()
    beside = nn.Linear(HIDDEN, 641, bias=False)
    beside.weight = model.words.weight
    spread(model)
    torch.stack([loss(want, rank) + want.head(torch.ones(HIDDEN)).mean() for rank in range(WORLD)]).mean().backward()
    run = compiled(model, device_budget="4MB")
    (loss(run, dist.get_rank()) + beside(torch.ones(HIDDEN)).mean()).backward()
    parameter = model.words._parameters["weight"]
    part = find_offloaded(parameter).shard.cut(want.words.weight.grad)
    return {"off by": (parameter.grad.clone() - part).abs().max().item(), "parts": len(list(model.parameters()))}


def frozen_integers() -> Found:
    """Frozen parameters of integers, as quantized weights are, are spread, too."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.levels = nn.Parameter(torch.randint(9, (642, HIDDEN)), requires_grad=False)

    want, model = Quantized().levels.detach(), spread(Quantized())
    part = find_offloaded(model._parameters["levels"])
    return {"off by": off_by(model, {"levels": want}), "part": list(part.shard.local_size)}


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, seen: range) -> None:
    """Train a step on what these ranks see."""
    optimizer.zero_grad()
    torch.stack([loss_of(model, rank) for rank in seen]).mean().backward()
    optimizer.step()


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def checkpoints() -> Found:
    """Saved by two ranks or by one, loaded by two or by each alone, with more steps behind that as if nothing were."""
    everyone, own = range(WORLD), range(dist.get_rank(), dist.get_rank() + 1)
    found: Found = {}
    model = spread()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step_once(model, optimizer, own)
    checkpoint.save(saved(model, optimizer), checkpoint_id="by_two")
    at_save = whole(model)
    step_once(model, optimizer, own)
    later = whole(model)

    again = spread(seed=7)
    other = AdamW(again.parameters(), lr=1e-3)
    step_once(again, other, own)  # it has a state to load to
    state = saved(again, other)
    checkpoint.load(state, checkpoint_id="by_two")
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    found["by two, for two"] = differences(whole(again), at_save)
    step_once(again, other, own)
    found["by two, for two, a step later"] = differences(whole(again), later)

    plain = blocks(7)
    state = {"model": plain.state_dict()}
    checkpoint.load(state, checkpoint_id="by_two")
    found["by two, for plain torch"] = differences(state["model"], at_save)

    alone = tencache_fx.offload(blocks(), "cpu")
    single = AdamW(alone.parameters(), lr=1e-3)
    step_once(alone, single, everyone)
    if dist.get_rank() == 0:
        checkpoint.save(saved(alone, single), checkpoint_id="by_one", no_dist=True)
    dist.barrier()
    state = saved(again, other)
    checkpoint.load(state, checkpoint_id="by_one")
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    found["by one, for two"] = differences(whole(again), whole(alone))
    step_once(again, other, own)
    step_once(alone, single, everyone)
    found["by one, for two, a step later"] = differences(whole(again), whole(alone))

    state = saved(alone, single)
    checkpoint.load(state, checkpoint_id="by_two", no_dist=True)
    alone.load_state_dict(state["model"])
    single.load_state_dict(state["optimizer"])
    step_once(alone, single, everyone)
    found["by two, for one, a step later"] = differences(whole(alone), later)

    again.load_state_dict(blocks(3).state_dict())
    found["values of plain torch"] = differences(whole(again), dict(blocks(3).named_parameters()))
    step_once(again, plain_state(other), own)
    found["kinds"] = sorted({type(value).__name__ for value in again.state_dict().values()})
    found["padding"] = max(
        float(part.host[part.shard.own_rows :].abs().sum())
        for p in again.parameters()
        if (part := find_offloaded(p)) is not None
    )
    return found


def scaled() -> Found:
    """A step whose gradients overflow on one rank is taken by none."""
    model = spread()
    run = compiled(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    changed, scales = [], []
    for overflows in (False, True, False):
        before = whole(model)
        loss = loss_of(run, dist.get_rank())
        factor = float("inf") if overflows and dist.get_rank() == 1 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed.append(differences(whole(model), before) > 0)
        scales.append(scaler.get_scale())
    return {"changed": changed, "scales": scales, "digest": digest(model)}


def plain_state(optimizer: AdamW) -> AdamW:
    """Load what an optimizer of torch's own has of the whole parameters, and return the optimizer."""
    model = blocks()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_once(model, plain, range(WORLD))
    optimizer.load_state_dict(plain.state_dict())
    return optimizer


def refusals() -> Found:
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    whole_already, model = tencache_fx.offload(blocks(), "cpu"), spread()
    found = {
        "two dimensions": refused(lambda: tencache_fx.offload(blocks(), "cpu", shard=mesh)),
        "no ranks": refused(lambda: tencache_fx.offload(blocks(), "cpu", shard="all")),
        "whole already": refused(lambda: tencache_fx.offload(whole_already, "cpu", shard=True)),
        "LSTM": refused(lambda: spread(nn.Sequential(nn.LSTM(256, 256)))),
        "max_norm": refused(lambda: spread(nn.Sequential(nn.Embedding(1024, 256, max_norm=1.0)))),
        "read": refused(lambda: model[0].wide.weight),
        "read for a checkpoint": refused(lambda: get_model_state_dict(model))[-136:],
        "pickle": refused(lambda: pickle.dumps(model[0].wide)),
    }

    def inside() -> None:
        with tencache_fx.summon(model):
            loss_of(model, 0).backward()

    found["backward inside summon"] = refused(inside)
    for way, make in (("compiled", compiled), ("uncompiled", alone)):
        loss_of(make(model), 0).backward()
        parameters = list(model.parameters())
        found[f"other norm, {way}"] = refused(lambda: nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=1.0))  # noqa: B023
        model.zero_grad()
    tencache_fx.offload(other := blocks(), "cpu", shard=mesh["shard"])
    found["rows of a mesh of one dimension"] = other[0].wide._parameters["weight"].shape[0]
    return found


def in_the_plan() -> Found:
    """Collectives of new groups, measured where both ranks want that, and what the plan says of them."""
    rates = []
    for calibrates in (True, dist.get_rank() == 0, True):
        tencache_fx.configure(calibrate=calibrates)
        group = dist.new_group()
        model = tencache_fx.offload(blocks(), "cpu", shard=DeviceMesh.from_group(group, "cpu"))
        tencache_fx.configure(calibrate=False)
        agreed = group_rates(group, "cpu")
        rates.append([agreed.latency_ns, agreed.bytes_per_s])
    before = tencache_fx.regions()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(lambda x: model(x), backend="tencache", options=OPTIONS)  # torch 2.11 divides a Sequential
    loss_of(run, dist.get_rank()).backward()
    (record,) = (each for each in tencache_fx.regions() if each not in before)
    optimizer.step()
    collectives, forecast = record.problem.collectives, record.plan.forecast
    return {
        "off by": off_by(model, wanted(steps=1)),
        "rates": rates,
        "kinds": Counter(each.kind.value for each in collectives),
        "ranks": sorted({each.ranks for each in collectives}),
        "rates in the plan": sorted({(each.latency_ns, each.bytes_per_s) for each in collectives}),
        "under way": forecast.collective_ns - sum(each.duration_ns for each in collectives),
        "exposed": [forecast.stall_collective_ns, forecast.collective_ns],
        "report": tencache_fx.report(),
    }


QUICK: dict[str, Callable[[], Found]] = {
    "compiled": train,
    "other budgets, with room for state on one rank": partial(train, unlike, parts=2, clips=True),
    "updated during backward": partial(train, early=True),
    "accumulates and clips, uncompiled": partial(train, alone, parts=2, clips=True),
    "blocks by step, with room for state": partial(train, roomy_blocks, clips=True),
}


def in_eight_bits() -> Found:
    """Go on from a checkpoint of state in blocks, of which each rank has its own."""
    own = range(dist.get_rank(), dist.get_rank() + 1)
    models, optimizers = [spread(), spread(seed=7)], []
    for model in models:
        optimizers.append(AdamW(model.parameters(), lr=1e-3, state_dtype="8bit"))
        step_once(model, optimizers[-1], own)
    checkpoint.save(saved(models[0], optimizers[0]), checkpoint_id="in_8_bits")
    state = saved(models[1], optimizers[1])
    checkpoint.load(state, checkpoint_id="in_8_bits")
    models[1].load_state_dict(state["model"])
    optimizers[1].load_state_dict(state["optimizer"])
    for model, optimizer in zip(models, optimizers, strict=True):
        step_once(model, optimizer, own)
    kept = {each["exp_avg"].dtype for each in optimizers[1].state.values()}
    return {"off by": differences(whole(models[0]), whole(models[1])), "kept in": sorted(map(str, kept))}


def _local(value: Tensor) -> Tensor:
    """Return this rank's rows of a tensor that is spread, or the tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def with_split_masters() -> Found:
    """Go on from a checkpoint of bf16 weights and their masters, read in place or loaded after the masters."""

    def step(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        model(batch(dist.get_rank()).bfloat16()).float().square().mean().backward()
        optimizer.step()

    models = [spread(blocks(seed).bfloat16()) for seed in (0, 7, 8)]
    optimizers = [AdamW(model.parameters(), lr=1e-3) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    checkpoint.save(saved(models[0], optimizers[0]), checkpoint_id="split_masters")
    states = [saved(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    states[2]["model"] = {name: value.clone() for name, value in models[2].state_dict().items()}
    for index in (1, 2):
        checkpoint.load(states[index], checkpoint_id="split_masters")
        optimizers[index].load_state_dict(states[index]["optimizer"])
        models[index].load_state_dict(states[index]["model"])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    masters = [
        {str(key): _local(state["master"]) for key, state in optimizer.state_dict()["state"].items()}
        for optimizer in optimizers
    ]
    return {
        "off by": max(differences(whole(models[0]), whole(model)) for model in models[1:]),
        "masters off by": max(differences(masters[0], other) for other in masters[1:]),
        "split": sum("master_rest" in state for state in optimizers[1].state.values()),
    }


OTHERS: dict[str, Callable[[], Found]] = {
    "meta": made_on_meta,
    "summon": summoned,
    "tied": tied,
    "in the plan": in_the_plan,
    "frozen integers": frozen_integers,
    "checkpoints": checkpoints,
    "8 bits": in_eight_bits,
    "split masters": with_split_masters,
    "scaled": scaled,
    "refusals": refusals,
}

SLOW: dict[str, Callable[[], Found]] = {
    "uncompiled": partial(train, alone),
    "updated during backward, uncompiled": partial(train, alone, early=True),
    "accumulates and clips": partial(train, parts=2, clips=True),
    "Inductor": partial(train, partial(compiled, compiler="inductor"), clips=True),
    "Inductor, updated during backward": partial(train, partial(compiled, compiler="inductor"), early=True),
    "no budget": partial(train, partial(compiled, device_budget=None), clips=True),
    "blocks": partial(train, partial(compiled, blockwise=True), clips=True),
    "blocks by step": partial(train, partial(compiled, blockwise=True, scope="step"), early=True),
    "blocks by step, accumulates": partial(train, partial(compiled, blockwise=True, scope="step"), parts=2, clips=True),
    "a rank is late": partial(train, late, clips=True),
}
