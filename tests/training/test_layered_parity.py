"""The same numbers as without us where equal layers of a whole graph are compiled once."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from harness import EAGER, INDUCTOR, Options, Outcome, compiled, faulty_engine, train
from layered import ALL, LAYERS, Cached, Layered
from torch import Tensor, nn
from zoo import WIDTH, Block, Gpt2, text, vectors

import tencache_fx
from tencache_fx.optim import AdamW
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes

STEPS = 4
ROOMY = 1 << 25
ONCE: Options = {"repeated_layers": "once", "host_budget": 1 << 28}

QUICK = ("gpt2-dropout", "two-kinds", "residual")
each_model = pytest.mark.parametrize(
    "each",
    [pytest.param(each, marks=() if each.case.name in QUICK else pytest.mark.slow, id=each.case.name) for each in ALL],
)


@torch._inductor.config.patch(fallback_random=True)  # random numbers as torch draws them without a compiler
def expected(each: Layered) -> Outcome:
    outcome = train(each.case, lambda model: torch.compile(model, backend="aot_eager_decomp_partition"), STEPS)
    torch.compiler.reset()
    return outcome


def trained(each: Layered, options: Options) -> Outcome:
    return train(each.case, lambda model: compiled(model, {**options, **ONCE}), STEPS)


def assert_equal(ours: Outcome, theirs: Outcome, *, exact: bool) -> None:
    pairs = [(ours.losses, theirs.losses)]
    for mine, other in ((ours.gradients, theirs.gradients), (ours.state, theirs.state)):
        assert mine.keys() == other.keys()
        pairs += [(mine[name], other[name]) for name in mine]
    for one, another in pairs:
        if exact:
            assert torch.equal(one, another)
        else:
            torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-4)


def calls_of_regions() -> Sequence[int]:
    """Return how often the regions of the last step ran in it, the one that ran most often first."""
    runs = tencache_fx.steps()[-1].runs
    return tuple(sorted(Counter(run.region for run in runs if not run.backward).values(), reverse=True))


@each_model
def test_layers_are_equal(each: Layered) -> None:
    """With all the room there is, and then with little of what lies between the step's floor and its peak."""
    wanted = expected(each)
    with faulty_engine(host_budget_bytes=1 << 28):
        before = {record.region for record in tencache_fx.regions()}
        assert_equal(trained(each, {**EAGER, "device_budget": ROOMY}), wanted, exact=each.exact)
        regions = {record.region for record in tencache_fx.regions()} - before
        assert calls_of_regions() == each.calls
        assert len(regions) == len(each.calls), "what is called often is compiled once"
        problems = [record.problem for record in tencache_fx.steps()]
        least = max(floor_bytes(problem) for problem in problems)
        most = max(int(live_bytes(problem).max()) for problem in problems)
        torch.compiler.reset()
    with faulty_engine(host_budget_bytes=1 << 28):
        tight = least + max(least // 8, (most - least) // 3)
        assert_equal(trained(each, {**EAGER, "device_budget": tight}), wanted, exact=each.exact)
        assert any(record.plan.transfers for record in tencache_fx.steps()) == each.moves
        assert max(record.plan.forecast.peak_bytes for record in tencache_fx.steps()) <= tight


@pytest.mark.slow
@pytest.mark.parametrize("each", ALL[:6:5], ids=["gpt2", "llama"])
def test_layers_are_equal_in_generated_code(each: Layered) -> None:
    wanted = expected(each)
    with faulty_engine(host_budget_bytes=1 << 28):
        assert_equal(trained(each, {**INDUCTOR, "device_budget": ROOMY}), wanted, exact=False)
        assert calls_of_regions() == each.calls


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, *, wrap: bool) -> list[float]:
    run = model
    if wrap:
        run = torch.compile(model, backend="tencache", options={**EAGER, **ONCE, "device_budget": 1 << 20})
    found = []
    for step in range(STEPS):
        loss = run(*text(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_offloaded_layers_share_code() -> None:
    """Their parameters come from host memory, each in its own turn."""
    torch.manual_seed(0)
    model: nn.Module = Gpt2(layers=LAYERS)
    wanted = losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3), wrap=False)
    with faulty_engine(host_budget_bytes=1 << 28):
        torch.manual_seed(0)
        model = tencache_fx.offload(Gpt2(layers=LAYERS), "cpu")
        assert losses(model, AdamW(model.parameters(), lr=1e-3), wrap=True) == pytest.approx(wanted, rel=1e-4)
        assert max(calls_of_regions()) == LAYERS
        del model


@torch.no_grad()
def test_layers_without_a_backward() -> None:
    torch.manual_seed(0)
    model = Gpt2(layers=LAYERS)
    before = {record.region for record in tencache_fx.regions()}
    found = compiled(model, {**EAGER, **ONCE, "device_budget": ROOMY})(*text(0))
    torch.testing.assert_close(found, model(*text(0)))
    assert len({record.region for record in tencache_fx.regions()} - before) == 3


def test_layers_of_changing_length() -> None:
    """The pieces are given the symbols that their sizes depend on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(causal=True) for _ in range(LAYERS)))
    run = compiled(model, {**EAGER, **ONCE, "device_budget": ROOMY})
    for length in (16, 24, 16, 40):
        x = torch.randn(2, length, WIDTH)
        torch._dynamo.mark_dynamic(x, 1)
        result = run(x)
        torch.testing.assert_close(result, model(x))
        result.sum().backward()
    assert calls_of_regions() == (LAYERS - 1, 1, 1), "the first layer is given what needs no gradient"


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).square().mean()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Alone, "it has no run of equal layers between which it can be cut"),
        (Cached, "is made in one piece of it and written to in another one"),
    ],
)
def test_a_graph_that_is_not_cut_is_compiled_whole(
    build: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = build()
    before = {record.region for record in tencache_fx.regions()}
    with caplog.at_level("INFO", "tencache_fx"):
        loss = compiled(model, {**EAGER, **ONCE, "device_budget": ROOMY})(*vectors(0))
    assert torch.equal(loss, model(*vectors(0)))
    assert len({record.region for record in tencache_fx.regions()} - before) == 1
    assert reason in caplog.text
