"""A weight that an offloaded module shares with one that is not, and modules that are offloaded more than once."""

import gc
from collections.abc import Callable

import pytest
import torch
from harness import Block, faulty_engine
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.optim import AdamW
from tencache_fx.runtime.engine_registry import engines

WORDS, HIDDEN, ROWS, STEPS = 1024, 64, 64, 4
OPTIONS = {"compiler": "eager", "calibrate": False, "host_budget": 1 << 28}


class Speaker(nn.Module):
    """An embedding, blocks, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Embedding(WORDS, HIDDEN), *(Block(HIDDEN, 4) for _ in range(3)))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.body[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


def words(step: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(words(step)), words(step + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), model(words(step)).square().mean()]
    return losses


def expected() -> list[Tensor]:
    model = Speaker()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def as_it_is(model: Speaker) -> None:
    pass


def whole(model: Speaker) -> None:
    model.compile(backend="tencache", options={**OPTIONS, "device_budget": 3_000_000})


def by_parts(model: Speaker, *, head: bool = True) -> None:
    for part in (*list(model.body)[1:], *([model.head] if head else [])):
        part.compile(backend="tencache", options={**OPTIONS, "device_budget": 3_000_000, "scope": "step"})


def body_by_parts(model: Speaker) -> None:
    by_parts(model, head=False)


@pytest.mark.parametrize("compile_it", [as_it_is, whole, by_parts, body_by_parts])
@pytest.mark.parametrize(
    "which", [("body",), ("head",), ("head", "body"), ("body", "body")], ids=["body", "head", "in turn", "twice"]
)
def test_a_weight_is_shared_with_a_module_that_is_not_offloaded(
    which: tuple[str, ...], compile_it: Callable[[Speaker], None]
) -> None:
    """Whoever reads it has it loaded, compiled or not; both gradients are added up."""
    wanted = expected()
    with faulty_engine(host_budget_bytes=1 << 28):
        model = Speaker()
        for name in which:
            tencache_fx.offload(getattr(model, name), "cpu")
        assert find_offloaded(model.head.weight) is not None
        compile_it(model)
        found = train(model, AdamW(model.parameters(), lr=1e-2))
        with tencache_fx.summon(model):
            found += [parameter.detach().clone() for parameter in model.parameters()]
        worst = max(float((mine - true).abs().max()) for mine, true in zip(found, wanted, strict=True))
        assert worst < 1e-4
        held = parameters_of(engines()[0])
        assert len({each.name for each in held}) == len(list(held))
        del model, found, held
        gc.collect()
