"""A whole model, and losses that are compiled functions of their own, which run between the model's graphs."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from harness import Block, faulty_engine
from torch import Tensor, nn

import tencache_fx
from tencache_fx.region.registry import REGIONS

CPU = torch.device("cpu")
WIDTH, ROWS = 64, 256

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def wide_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Take about half as much memory as the model."""
    return nn.functional.cross_entropy(logits.repeat(1, 8).sin(), labels)


@dataclass
class Trained:
    """What came of each step: the loss, the gradients, the peak with parameters, and how often regions compiled."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    compilations: list[int] = field(default_factory=list)

    def equals(self, other: "Trained") -> bool:
        pairs = zip(self.gradients, other.gradients, strict=True)
        same = all(all(map(torch.equal, mine, theirs)) for mine, theirs in pairs)
        return same and all(map(torch.equal, self.losses, other.losses))


def compiled(call: Callable[..., Tensor], budget: int | None, scope: str) -> Callable[..., Tensor]:
    if budget is None:
        return torch.compile(call, backend="aot_eager_decomp_partition")
    given = {"compiler": "eager", "calibrate": False, "host_budget": 1 << 28, "device_budget": budget, "scope": scope}
    return torch.compile(call, backend="tencache", options=given)


def train(budget: int | None, losses: Sequence[Loss], scope: str = "auto") -> Trained:
    """Train a model with one of these losses in each step."""
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(0)
    found, model = Trained(), nn.Sequential(*(Block(WIDTH, 4) for _ in range(6)))
    run, regions = compiled(model, budget, scope), {loss: compiled(loss, budget, scope) for loss in losses}
    for step, loss_of in enumerate(losses):
        draw = torch.Generator().manual_seed(step)
        x, labels = torch.randn(ROWS, WIDTH, generator=draw), torch.randint(0, WIDTH, (ROWS,), generator=draw)

        def run_step(x: Tensor = x, labels: Tensor = labels, loss_of: Loss = loss_of) -> None:
            loss = regions[loss_of](run(x), labels)
            loss.backward()
            found.losses.append(loss.detach())

        done, parameters = REGIONS.compilations, list(model.parameters())
        found.peaks.append(tencache_fx.peak_bytes(run_step, CPU) + sum(each.nbytes for each in parameters))
        found.compilations.append(REGIONS.compilations - done)
        found.gradients.append([each.grad.clone() for each in parameters if each.grad is not None])
        model.zero_grad(set_to_none=True)
    return found


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with faulty_engine(host_budget_bytes=1 << 28):
        yield


@pytest.mark.parametrize(("scope", "again"), [("step", 0), ("auto", 1)])
def test_a_model_is_compiled_again_for_its_loss_unless_it_is_said_to_be_part_of_a_step(scope: str, again: int) -> None:
    losses = [cross_entropy] * 4
    expected = train(None, losses)
    budget = int(0.7 * max(expected.peaks))
    found = train(budget, losses, scope)
    assert found.equals(expected)
    assert found.compilations == [2, again, 0, 0]
    assert max(found.peaks) <= budget


def test_a_loss_without_room_is_within_the_budget_from_the_first_step_if_it_is_said_to_be_part_of_a_step() -> None:
    """A guess has the model keep what fits beside nothing, in the first step."""
    expected = train(None, [wide_loss] * 4)
    budget = int(0.8 * max(expected.peaks))
    found, guessed = train(budget, [wide_loss] * 4, "step"), train(budget, [wide_loss] * 4)
    assert found.equals(expected)
    assert guessed.equals(expected)
    assert max(found.peaks) <= budget < guessed.peaks[0]
    assert max(guessed.peaks[1:]) <= budget


@pytest.mark.parametrize("scope", ["step", "auto"])
def test_the_budget_is_kept_when_a_loss_without_room_runs_first_in_a_later_step(scope: str) -> None:
    """What the model keeps leaves for it, also where all had room before."""
    losses = [cross_entropy] * 3 + [wide_loss] * 2
    expected = train(None, losses)
    budget = int(0.9 * max(expected.peaks))
    found = train(budget, losses, scope)
    assert found.equals(expected)
    assert max(found.peaks) <= budget
