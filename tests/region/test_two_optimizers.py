"""Two models with an optimizer each, trained in turns on one device: a GAN, one of which learns through the other."""

from collections.abc import Callable, Iterator

import pytest
import torch
from combinations import each_in_a_quick_case
from harness import Block, faulty_engine
from meter import Meter
from test_step_parameters import readable
from test_step_plans import inputs, meter, recorder
from torch import Tensor, nn

import tencache_fx
from tencache_fx.optim import AdamW
from tencache_fx.planning.step import FRUGAL
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_planner import StepPlanner
from tencache_fx.runtime.engine import Engine

__all__ = ["meter"]

WIDTH, DEPTH, CYCLES = 64, 3, 7
OPTIONS = {"compiler": "eager", "calibrate": False, "scope": "step", "host_budget": 1 << 28}
BUDGETS = {"large": 100_000_000, "roomy": 6_000_000, "tight": 4_200_000}

Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28, delay_s=0.001) as found:
        yield found


class Gan:
    """A generator and a discriminator of compiled blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))
        self.discriminator = nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)), nn.Linear(WIDTH, 1))

    def compile(self, **how: object) -> None:
        for block in (*self.generator, *list(self.discriminator)[:DEPTH]):
            block.compile(**how)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.generator.parameters(), *self.discriminator.parameters()]

    def cycle(self, optimizers: Optimizers, number: int) -> list[Tensor]:
        """Update the discriminator, and then the generator; return both losses."""
        of_generator, of_discriminator = optimizers
        real, noise = inputs(2 * number), inputs(2 * number + 1)
        fake = self.generator(noise)
        told = self.discriminator(fake.detach()).square().mean() - self.discriminator(real).mean()
        told.backward()
        of_discriminator.step()
        of_discriminator.zero_grad()
        fooled = -self.discriminator(fake).mean()
        del fake
        fooled.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        return [told.detach(), fooled.detach()]


def ours(module: nn.Module) -> torch.optim.Optimizer:
    tencache_fx.offload(module, "cpu")
    return AdamW(module.parameters(), lr=1e-3)


def theirs(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def expected() -> list[Tensor]:
    gan = Gan()
    gan.compile(backend="aot_eager_decomp_partition")
    optimizers = theirs(gan.generator), theirs(gan.discriminator)
    losses = [loss for number in range(CYCLES) for loss in gan.cycle(optimizers, number)]
    torch.compiler.reset()
    return [*losses, *(parameter.detach().clone() for parameter in gan.parameters)]


@each_in_a_quick_case(
    makers=[
        pytest.param((ours, ours), id="both"),
        pytest.param((ours, theirs), id="first"),
        pytest.param((theirs, ours), id="second"),
    ],
    budget=tuple(BUDGETS),
)
def test_both_learn_as_without_us_within_the_budget(
    makers: tuple[Make, Make],
    budget: str,
    engine: Engine,
    meter: Meter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Orders recur, and after the third cycle nothing is compiled or planned any more."""
    wanted = expected()
    planned, plan = [], StepPlanner._plan

    def noted(self: StepPlanner, *arguments: object) -> object:
        planned.append(arguments)
        return plan(self, *arguments)

    monkeypatch.setattr(StepPlanner, "_plan", noted)
    gan, limit = Gan(), BUDGETS[budget]
    of_generator, of_discriminator = makers
    optimizers = of_generator(gan.generator), of_discriminator(gan.discriminator)
    gan.compile(backend="tencache", options={**OPTIONS, "device_budget": limit})
    points = recorder(engine).points
    losses, work = [], []
    for number in range(CYCLES):
        meter.peak = meter.held
        losses += gan.cycle(optimizers, number)
        assert meter.peak <= limit, f"cycle {number}"
        assert points.resident_bytes <= limit, f"cycle {number}"
        work.append((REGIONS.compilations, len(planned)))
    with readable(gan.generator, optimizers[0]), readable(gan.discriminator, optimizers[1]):
        found = [*losses, *(parameter.detach().clone() for parameter in gan.parameters)]
    worst = max(float((mine - true).abs().max()) for mine, true in zip(found, wanted, strict=True))
    assert worst < 1e-5, "the two optimizers differ in rounding"
    assert work[3] == work[-1], work
    assert points.schedule is not FRUGAL
    assert points.extra_bytes == points.in_use == 0
    assert all(record.plan.forecast.peak_bytes <= limit for record in tencache_fx.steps())
