"""The same numbers as without us where a model's parts are compiled one by one and planned together."""

from collections.abc import Callable

import pytest
import torch
from harness import EAGER, Outcome, faulty_engine, train
from torch import Tensor, nn
from zoo import CASES, Case

import tencache_fx
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes

STEPS = 4
ROOMY = 1 << 25  # no step needs so much; of more, 8 KiB would not be worth an op

OF_TORCH = frozenset({"convnet", "convnet-autocast", "lstm", "lstm-default", "views", "turned-dropout"})
"""Cases whose parts are torch's own modules: torch 2.11 does not compile these by themselves, and they save little."""

QUICK = frozenset({"t5", "gpt2-dropout"})

each_case = pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else pytest.mark.slow)
        for each in CASES
        if each.name not in OF_TORCH
    ],
)


def in_parts(model: nn.Module, **how: object) -> Callable[..., Tensor]:
    """Compile the model's parts, and those of lists, one by one."""
    parts = [part for child in model.children() for part in (child if isinstance(child, nn.ModuleList) else (child,))]
    for part in parts:
        part.compile(**how)
    return model


@torch._inductor.config.patch(fallback_random=True)  # random numbers as torch draws them without a compiler
def expected(each: Case) -> Outcome:
    outcome = train(each, lambda model: in_parts(model, backend="aot_eager_decomp_partition"), STEPS)
    torch.compiler.reset()
    return outcome


def trained(each: Case, budget: int) -> Outcome:
    options = {**EAGER, "scope": "step", "device_budget": budget, "host_budget": 1 << 28}
    return train(each, lambda model: in_parts(model, backend="tencache", options=options), STEPS)


@each_case
@torch._dynamo.config.patch(recompile_limit=64)
def test_parts_are_bitwise_equal(each: Case) -> None:
    """With all the room there is, and then with little of what lies between the step's floor and its peak."""
    wanted = expected(each)
    with faulty_engine(host_budget_bytes=1 << 28):
        assert_equal(trained(each, ROOMY), wanted)
        problems = [record.problem for record in tencache_fx.steps()]
        assert problems
        least = max(floor_bytes(problem) for problem in problems)
        most = max(int(live_bytes(problem).max()) for problem in problems)
        budget = least + max(least // 8, (most - least) // 3)
        torch.compiler.reset()
    with faulty_engine(host_budget_bytes=1 << 28):
        assert_equal(trained(each, budget), wanted)
        moved = any(record.plan.transfers for record in tencache_fx.steps())
        recomputed = any(record.plan.recomputed for record in tencache_fx.regions())
        assert moved or recomputed


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert torch.equal(ours.losses, theirs.losses)
    for mine, other in ((ours.gradients, theirs.gradients), (ours.state, theirs.state)):
        assert mine.keys() == other.keys()
        assert not [name for name in mine if not torch.equal(mine[name], other[name])]
