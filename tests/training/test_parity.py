"""The same numbers as without us: whole training runs, with every buffer poisoned the moment it may not be read."""

from collections.abc import Callable, Sequence

import pytest
import torch
from harness import (
    EAGER,
    INDUCTOR,
    Options,
    Outcome,
    budget_for,
    compiled,
    faulty_engine,
    planned_floor,
    problems_of,
    train,
    train_and_look,
)
from torch import Tensor, nn
from torch._inductor.exc import InductorError
from torch.utils.checkpoint import checkpoint
from zoo import CASES, Case, Gpt2, Llama, case, text

import tencache_fx
from tencache_fx import compat
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.runtime.engine import Engine

SHARE = 40  # percent of the activation peak that the budget leaves, or the floor if that is more

each_case = pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert torch.equal(ours.losses, theirs.losses)
    for mine, other in ((ours.gradients, theirs.gradients), (ours.state, theirs.state)):
        assert mine.keys() == other.keys()
        different = [name for name in mine if not torch.equal(mine[name], other[name])]
        assert not different


def assert_close(ours: Outcome, theirs: Outcome, *, tolerance: float) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=tolerance)
    for mine, other in ((ours.gradients, theirs.gradients), (ours.state, theirs.state)):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=tolerance, atol=tolerance, msg=name)


FUSED = "as fused, it is largest at an op of the backward that reads all that is there"
ALONE = "the recurrent module runs outside, and the region of the loss holds 1 KiB"
NOTHING_TO_MOVE = {
    **({("eager", "lstm-default"): ALONE} if compat.TORCH < (2, 15) else {}),
    ("inductor", "lstm-default"): ALONE,
    ("inductor", "convnet"): FUSED,
    ("inductor", "convnet-autocast"): FUSED,
}
"""The cases that train without a budget, because no plan of theirs would have a transfer, and why."""


def tight(each: Case, problems: Sequence[Problem], options: Options) -> Options:
    """Return `options` with a budget that makes one of these regions offload; without one if none is expected to.

    Generated code may hold a little more than the floor that the graphs show. Each call of a region has the budget.
    """
    options = {**options, "scope": "region"}
    able = any(planned_floor(problem) < live_bytes(problem).max() for problem in problems)
    assert able != ((options["compiler"], each.name) in NOTHING_TO_MOVE), "NOTHING_TO_MOVE has the others"
    least = max((above_floor(problem, options) for problem in problems), default=0)
    return {**options, "device_budget": max(least, budget_for(problems, SHARE))} if able else options


def region_indices() -> frozenset[int]:
    """Return which regions are alive: of models that are not garbage yet, too."""
    return frozenset(record.region for record in tencache_fx.regions())


def check_transfers(each: Case, engine: Engine, options: Options, steps: int, earlier: frozenset[int]) -> None:
    """Within a budget the plans have transfers, and each step carried some out; without one there are none."""
    new = [record for record in tencache_fx.regions() if record.region not in earlier]
    planned = sum(len(record.plan.transfers) for record in new)
    assert engine.stats.take()["offloads"] >= steps * each.accumulate * (planned > 0)
    assert (planned > 0) == ("device_budget" in options)


def above_floor(problem: Problem, options: Options) -> int:
    floor, peak = planned_floor(problem), int(live_bytes(problem).max())
    return floor + min(floor * 15 // 100, (peak - floor) // 2) if options["compiler"] == "inductor" else floor


# Each of these is a part of another case: `gpt2-dropout`, `gpt2-checkpoint-dropout`.
PARTS = ("gpt2", "gpt2-checkpoint")
LONG = ("lstm", "t5", "vit", "gpt2-autocast", "gpt2-accumulate", "gpt2-checkpoint-dropout", "convnet-autocast")


@pytest.mark.parametrize(
    "each",
    [pytest.param(each, marks=pytest.mark.slow if each.name in (*PARTS, *LONG) else ()) for each in CASES],
    ids=lambda each: each.name,
)
def test_eager_is_bitwise_equal(each: Case) -> None:
    """Ten steps on the same graphs, with and without transfers."""
    plain, problems = train_and_look(each, EAGER, 10)
    options, earlier = tight(each, problems, EAGER), region_indices()
    torch.compiler.reset()
    with faulty_engine() as engine:
        ours = train(each, lambda model: compiled(model, options), 10)
        check_transfers(each, engine, options, 10, earlier)
    assert_equal(ours, plain)


def check_inductor(each: Case, steps: int, caplog: pytest.LogCaptureFixture) -> Options:
    """Return the options it was compiled with; in the code, the ops' places among the heavy kernels were checked."""
    options = tight(each, problems_of(each, INDUCTOR), INDUCTOR)
    caplog.set_level("DEBUG", "tencache_fx")
    torch.compiler.reset()
    plain, earlier = train(each, torch.compile, steps), region_indices()
    torch.compiler.reset()
    with faulty_engine() as engine:
        ours = train(each, lambda model: compiled(model, options), steps)
        check_transfers(each, engine, options, steps, earlier)
    checked = [line for line in caplog.messages if line.startswith("generated code has")]
    assert all(line.endswith("are as planned") for line in checked), checked
    assert bool(checked) == ("device_budget" in options)
    assert_close(ours, plain, tolerance=2e-2 if each.autocast else 1e-4)
    return options


class Equals(nn.Module):
    """Equal layers with dropout, whose kernels have to be compiled but once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(nn.functional.gelu(layer(x)), 0.2, training=self.training)
        return x.square().mean()


def rows(step: int) -> tuple[Tensor]:
    return (torch.randn(256, 64, generator=torch.Generator().manual_seed(step)),)


def test_inductor_is_equal_within_rounding(caplog: pytest.LogCaptureFixture) -> None:
    assert "device_budget" in check_inductor(Case(name="equals", build=Equals, batch=rows), 4, caplog)


@pytest.mark.slow
@each_case
def test_inductor_zoo(each: Case, caplog: pytest.LogCaptureFixture) -> None:
    check_inductor(each, 20, caplog)


def test_the_cases_with_nothing_to_move_are_few_and_exist() -> None:
    assert {name for _, name in NOTHING_TO_MOVE} <= {each.name for each in CASES}
    assert len(NOTHING_TO_MOVE) <= 4


@pytest.mark.slow
def test_two_models_share_the_engine() -> None:
    cases = (Case(name="gpt2", build=Gpt2, batch=text), Case(name="llama", build=Llama, batch=text))
    budgets = [tight(each, problems_of(each, EAGER), EAGER) for each in cases]
    plain = [train(each, lambda model: model, 4, optimizer=False) for each in cases]
    torch.manual_seed(0)
    with faulty_engine() as engine:
        models = []
        for each in cases:
            torch.manual_seed(0)
            models.append(each.build())
        runs = [compiled(model, options) for model, options in zip(models, budgets, strict=True)]
        for step in range(4):
            for model in models:
                model.zero_grad()
            losses = [run(*text(step)) for run in runs]  # both forwards are under way before either backward
            for loss in losses:
                loss.backward()
        assert engine.stats.take()["offloads"] >= 8
    for model, outcome in zip(models, plain, strict=True):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, outcome.gradients[name], rtol=1e-4, atol=1e-5)


class Chain(nn.Module):
    """Wide layers without autograd: the only thing to move is a value that is read early and late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers:
            x = layer(x).cumsum(-1)
        wide = torch.cat([x, x, x, x], dim=-1).cumsum(-1)
        return wide[:, :64] + first.cumsum(-1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_in_a_budget(mode: Callable[[], object]) -> None:
    torch.manual_seed(0)
    model = Chain()
    x = torch.randn(256, 64)
    with mode():  # type: ignore[attr-defined]
        torch.compiler.reset()
        run = compiled(model, EAGER)
        truth = run(x)
        problem = tencache_fx.regions()[-1].problem
        del run
        torch.compiler.reset()
        assert problem.boundary == len(problem.ops), "there is no backward"
        with faulty_engine() as engine:
            limited = compiled(model, {**EAGER, "device_budget": budget_for([problem], 0)})
            for _ in range(3):
                assert torch.equal(limited(x), truth)
            assert engine.stats.take()["offloads"] == 3
            del limited


def test_evaluation_between_training_steps() -> None:
    """The same compiled model with and without gradients: two regions, one of which may fit."""
    each = case("gpt2-dropout")
    options = tight(each, problems_of(each, EAGER), EAGER)

    def loop(options: Options) -> list[Tensor]:
        torch.manual_seed(0)
        model = each.build()
        run = compiled(model, options)
        seen = []
        for step in range(3):
            model.train()
            model.zero_grad()
            run(*text(step)).backward()
            seen += [p.grad.clone() for p in model.parameters()]
            model.eval()
            with torch.no_grad():
                seen.append(run(*text(step)))
        return seen

    plain = loop(EAGER)
    torch.compiler.reset()
    with faulty_engine() as engine:
        ours = loop(options)
        assert engine.stats.take()["offloads"] > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


class RunningSum(nn.Module):
    """Every layer adds to a buffer, in place, and goes on with what it holds by then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.register_buffer("total", torch.zeros(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = torch.sin(layer(x))
            self.total.add_(h.detach())
            x = torch.exp(-h * h) * torch.cos(self.total.clone())
        return x.square().mean()


@pytest.mark.parametrize("options", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)], ids=["eager", "inductor"])
@pytest.mark.parametrize("budget", [None, 800_000, 1_100_000])
def test_what_is_computed_from_an_overwritten_buffer_is_not_computed_again(
    options: Options, budget: int | None
) -> None:
    """Torch's own partitioner does so, and its gradients are then wrong (2.13)."""
    truth, mine = RunningSum(), RunningSum()
    run = torch.compile(mine, backend="tencache", options={**options, "device_budget": budget})
    for _ in range(2):
        x = torch.randn(256, 64)
        truth(x).backward()
        run(x).backward()
        plan = tencache_fx.regions()[-1].plan
        assert bool(plan.transfers or plan.recomputed) == (budget is not None)
        torch.testing.assert_close(mine.total, truth.total)
        for got, want in zip(mine.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [EAGER, INDUCTOR], ids=["eager", "inductor"])
@pytest.mark.parametrize("optimizer", [pytest.param(torch.optim.SGD, marks=pytest.mark.slow), torch.optim.AdamW])
def test_a_compiled_step_updates_the_parameters_themselves(
    options: Options, optimizer: type[torch.optim.Optimizer]
) -> None:
    """What an optimizer holds is in the module that Dynamo makes, not among its inputs: no copy may stand for it."""
    results = []
    for wrap in (lambda step: step, lambda step: compiled(step, {**options, "device_budget": 1_000_000})):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        updates = optimizer(model.parameters(), lr=0.1)

        def step(model: nn.Module = model, updates: torch.optim.Optimizer = updates) -> Tensor:
            updates.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            updates.step()
            return loss.detach()

        run = wrap(step)
        results.append([run() for _ in range(4)] + [parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


class Drawing(nn.Module):
    """Draws in several ways; but for these, what is decomposed gives the same bits as what is not."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.checkpointed = checkpointed

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.relu(layer(x)), 0.2)
        return x + torch.empty_like(x).exponential_() * torch.rand_like(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else self.block(layer, x)
        return x.square().mean()


def draw(wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]], *, checkpointed: bool) -> list[Tensor]:
    """Return, for some seeds, the loss, the gradients, and what is drawn after them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, seen = Drawing(checkpointed=checkpointed), []
    run = wrap(model)
    for seed in range(4):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = run(*rows(seed))
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(4)]
    return seen


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_without_inductor_random_numbers_are_those_of_torch(*, checkpointed: bool) -> None:
    truth = draw(lambda model: torch.compile(model, backend="aot_eager"), checkpointed=checkpointed)
    with faulty_engine() as engine:
        for options, moves in ((EAGER, False), ({**EAGER, "device_budget": 600_000}, True)):
            ours = draw(lambda model, options=options: compiled(model, options), checkpointed=checkpointed)
            assert len(ours) == len(truth) == 40
            assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))
            assert (engine.stats.take()["offloads"] > 0) == moves


class Unread(nn.Module):
    """Drops out what is overwritten before anybody reads it; what is drawn afterwards depends on it all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropped = nn.functional.dropout(x.sin(), 0.5).zero_()
            x = nn.functional.dropout(torch.relu(layer(x)), 0.2) + dropped * torch.rand_like(x)
        return x.square().mean()


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_dropout_that_nobody_reads(recompute: str) -> None:
    """Torch's partitioner that saves all that autograd would refuses it (2.14: `default_partition`).

    It is drawn where torch is told to draw as it does without a compiler, and to leave out no draw.
    """
    outcomes = []
    for backend in ("aot_eager", "tencache"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Unread()
        options = {**EAGER, "device_budget": 600_000, "recompute": recompute} if backend == "tencache" else None
        with torch._inductor.config.patch(fallback_random=True):
            loss = torch.compile(model, backend=backend, options=options)(*rows(0))
            loss.backward()
        outcomes.append([loss.detach(), *(p.grad for p in model.parameters()), torch.rand(4)])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outcomes, strict=True))
    assert tencache_fx.regions()[-1].plan.transfers


class Numbers(nn.Module):
    """Layers through complex numbers: the gradient of a product with one of Python's is a view of no tensor."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.turn = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), turn

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.turn(layer(x)).imag)
        return x.square().mean()


def times_i(y: Tensor) -> Tensor:
    return 1j * y


def times_a_number(y: Tensor) -> Tensor:
    return y * (2 + 1j)


def turned(y: Tensor) -> Tensor:
    return torch.exp(1j * y)


def turned_back(y: Tensor) -> Tensor:
    return torch.conj(torch.exp(1j * y)) * (1 + 2j)


TURNS = (times_i, times_a_number, turned, turned_back)


@pytest.mark.parametrize(
    ("compiler", "turn"),
    [
        *(pytest.param(EAGER, turn, id=f"eager-{turn.__name__}") for turn in TURNS),
        pytest.param(INDUCTOR, times_i, id="inductor-times_i", marks=pytest.mark.slow),
        pytest.param(INDUCTOR, turned_back, id="inductor-turned_back", marks=pytest.mark.slow),
        pytest.param(INDUCTOR, times_a_number, id="inductor-times_a_number", marks=pytest.mark.slow),
        pytest.param(INDUCTOR, turned, id="inductor-turned", marks=pytest.mark.slow),
    ],
)
def test_complex_numbers(compiler: Options, turn: Callable[[Tensor], Tensor]) -> None:
    each = Case(name="numbers", build=lambda: Numbers(turn), batch=rows)
    options = {**compiler, "recompute": "none"}
    if compiler is INDUCTOR:
        try:
            train(each, torch.compile, 1)
        except InductorError as error:  # torch 2.11
            pytest.skip(f"Inductor itself cannot compile it: {error}")
    plain, (problem,) = train_and_look(each, options, 2)
    floor, peak = planned_floor(problem), int(live_bytes(problem).max())
    budget = floor + (peak - floor) * (3 if compiler is INDUCTOR else 1) // 4  # generated code holds a little besides
    torch.compiler.reset()
    with faulty_engine() as engine:
        ours = train(each, lambda model: compiled(model, {**options, "device_budget": budget}), 2)
        assert engine.stats.take()["offloads"] >= 2
    assert_equal(ours, plain)
