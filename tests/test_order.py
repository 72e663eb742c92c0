"""Whatever a plan asks for, Inductor's code does it where the plan says.

Runtime ops stay in their place, what leaves is what was computed, and nobody reads it afterwards. The plans are random
and senseless; the check of the generated code (`verify_code`) is what judges.
"""

import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from harness import compiled
from problems import legal_trip
from torch import Tensor, nn

from tencache_fx import drafts
from tencache_fx.passes.planner import build_plan
from tencache_fx.plan import Plan, Problem, Spill, Storage, fence_in, inactive_intervals, is_candidate


class Residual(nn.Module):
    """A stream that each layer adds to and normalises: sums of sums, which Inductor computes as late as it can."""

    def __init__(self, layers: int = 5, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner in zip(self.norms, self.inner, strict=True):
            x = x + inner(norm(x))
        return torch.mean(x.square())


class Convolutions(nn.Module):
    """Convolutions in torch's default memory format, which Inductor would rather have with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.body(x))


class Recurrent(nn.Module):
    """One weight used again and again: its gradient is a sum of products, and products wait for their turn."""

    def __init__(self, steps: int = 6, width: int = 32) -> None:
        super().__init__()
        self.inner, self.steps = nn.Linear(width, width), steps

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(self.steps):
            state = torch.tanh(self.inner(state)) * torch.sigmoid(state) + x
        return torch.mean(state)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (64, 32)),
    "convolutions": (Convolutions, (8, 3, 32, 32)),
    "recurrent": (Recurrent, (64, 32)),
}


def random_trip(problem: Problem, storage: Storage, draw: random.Random) -> Spill | None:
    """Draw a trip, with every freedom that a policy has; long ones are likelier."""
    intervals = inactive_intervals(storage)
    (interval,) = draw.choices(intervals, weights=[v - u for u, v in intervals])
    return fence_in(problem, legal_trip(problem, storage, interval, draw.randint))


def random_plan(problem: Problem, draw: random.Random) -> Plan:
    """Draw a plan in which about half of what may travel does, and something does if that is possible at all."""
    able = [s for s in problem.storages if is_candidate(problem, s) and inactive_intervals(s)]
    trips: dict[str, Spill] = {}
    for storage in draw.choices(able, k=4 * len(able)) if able else ():
        if storage.name not in trips and (trip := random_trip(problem, storage, draw)) is not None:
            trips[storage.name] = trip
        if 2 * len(trips) > len(able):
            break
    return build_plan(problem, "teraio", tuple(trips.values()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_code_does_what_any_plan_says(
    program: str, seed: int, hollow_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    build, shape = PROGRAMS[program]
    draw = random.Random(seed)
    plans: list[Plan] = []

    def make_plan(problem: Problem, policy: str) -> Plan:
        plans.append(random_plan(problem, draw))
        return plans[-1]

    options = {"device_budget": "16MiB", "host_budget": "64MiB", "policy": "teraio", "calibrate": False}
    torch.manual_seed(seed)
    with mock.patch.object(drafts, "make_plan", make_plan):
        compiled(build(), options)(torch.randn(shape)).backward()
    assert plans[0].spills
    assert ("keeps its convolutions' memory format" in caplog.text) == (program == "convolutions")
