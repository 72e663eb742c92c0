"""A small model with tied, frozen and large parameters, and its training, with homes and without."""

import functools
from collections.abc import Callable

import torch
from harness import Block
from torch import Tensor, nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.optim import AdamW
from tencache_fx.planning.plan import Plan

HIDDEN = 192
TIGHT, TIGHT_BF16, ROOMY = "700kB", "450kB", "8MB"


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Embedding, blocks, one of them frozen, and a head that is tied to the embedding."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, HIDDEN), *(Block(HIDDEN) for _ in range(3)), nn.Linear(HIDDEN, 128, bias=False)
    )
    model[-1].weight = model[0].weight
    model[2].requires_grad_(requires_grad=False)
    return model.to(dtype)


def batch(step: int, rows: int = 64) -> Tensor:
    return torch.randint(0, 128, (rows,), generator=torch.Generator().manual_seed(step))


def compiled(model: nn.Module, budget: str | None = TIGHT, **options: object) -> Callable[[Tensor], Tensor]:
    chosen = {"compiler": "eager", "calibrate": False, "recompute": "none", **options}
    return torch.compile(model, backend="tencache", options={"device_budget": budget, **chosen})


def train(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    parts: int = 1,
    clip: float | None = None,
) -> list[float]:
    losses = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + step % 7)
        for part in range(parts):
            tokens = batch(step * parts + part)
            loss = torch.nn.functional.cross_entropy(run(tokens).float(), (tokens * 7 + 3) % 128)
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained(
    *, home: bool, dtype: torch.dtype, budget: str | None = TIGHT, steps: int = 12, now: bool = False, **how: object
) -> tuple[list[float], dict[str, Tensor]]:
    model = network(dtype)
    if home:
        assert tencache_fx.offload(model) is model
    run = compiled(model, budget if home else None)
    optimizer = AdamW(model.parameters(), weight_decay=0.1, step_in_backward=now)
    losses = train(model, run, optimizer, range(steps), **how)
    found = losses, weights(model)
    torch.compiler.reset()
    tencache_fx.close()
    return found


@functools.cache
def small_plan() -> tuple[object, Plan]:
    """Return a problem and its plan, with offloaded parameters; both are frozen values."""
    model = tencache_fx.offload(network())
    train(model, compiled(model), AdamW(model.parameters()), range(1))
    record = regions()[-1]
    return record.problem, record.plan
