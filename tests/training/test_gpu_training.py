"""Training on a CUDA device within a budget: equal gradients under poison and late copies, and the budget kept."""

import gc
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import MIB
from harness import Block, faulty_cuda_engine
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.runtime.engine import Engine

pytestmark = pytest.mark.gpu

LAYERS, WIDTH, BATCH = 8, 1024, 4096


@pytest.fixture
def faulty() -> Iterator[Engine]:
    with faulty_cuda_engine() as engine:
        yield engine


class Net(nn.Module):
    """Blocks and a loss: what is computed outside a region is not in its plan."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH, 2) for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net().cuda()


def options(**more: object) -> dict[str, object]:
    return {"host_budget": 2048 * MIB, "calibrate": False, **more}


def losses_and_gradients(model: nn.Module, run: Callable[[Tensor], Tensor], steps: int) -> list[Tensor]:
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for step in range(steps):
        x = torch.randn(BATCH, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        sgd.zero_grad()
        loss = run(x)
        loss.backward()
        sgd.step()
        seen.append(loss.detach())
    return [*seen, *(p.grad.clone() for p in model.parameters())]


def tight_budget(compiler: str) -> int:
    """Return a budget between what a step needs and its floor."""
    model = build()
    run = torch.compile(model, backend="tencache", options=options(device_budget=None, compiler=compiler))
    losses_and_gradients(model, run, 1)
    forecast = tencache_fx.regions()[-1].plan.forecast
    torch.compiler.reset()
    return (forecast.peak_bytes + forecast.floor_bytes) // 2


def test_eager_is_bitwise_equal(faulty: Engine) -> None:
    budget = tight_budget("eager")
    model = build()
    plain_run = torch.compile(model, backend="tencache", options=options(device_budget=None, compiler="eager"))
    plain = losses_and_gradients(model, plain_run, 10)
    del model, plain_run
    torch.compiler.reset()
    model = build()
    run = torch.compile(model, backend="tencache", options=options(device_budget=budget, compiler="eager"))
    ours = losses_and_gradients(model, run, 10)
    assert faulty.stats.take()["offloads"] >= 10
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_inductor_is_equal_within_rounding(faulty: Engine) -> None:
    budget = tight_budget("inductor")
    model = build()
    plain = losses_and_gradients(model, torch.compile(model), 10)
    del model
    torch.compiler.reset()
    model = build()
    run = torch.compile(model, backend="tencache", options=options(device_budget=budget))
    ours = losses_and_gradients(model, run, 10)
    assert faulty.stats.take()["offloads"] >= 10
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_peak_is_within_the_budget(compiler: str) -> None:
    budget = tight_budget(compiler)
    model = build()
    run = torch.compile(model, backend="tencache", options=options(device_budget=budget, compiler=compiler))
    losses_and_gradients(model, run, 1)  # Triton's autotuning, in the first step, works on copies of its own
    torch.cuda.reset_peak_memory_stats()
    losses_and_gradients(model, run, 3)
    record = tencache_fx.regions()[-1]
    assert record.plan.transfers
    assert (record.code_peak_bytes is not None) == (compiler == "inductor"), "the code for a GPU was read, too"
    assert torch.cuda.max_memory_allocated() <= budget


def test_the_first_step_counts_the_workspaces_of_cublas() -> None:
    """They are allocated by the first products of a process, when the region is planned already."""
    budget = tight_budget("eager")
    model = build()
    torch._C._cuda_clearCublasWorkspaces()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = torch.compile(model, backend="tencache", options=options(device_budget=budget, compiler="eager"))
    losses_and_gradients(model, run, 1)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() > before_bytes + gradient_bytes + 8 * MIB, "they are there now"
    assert tencache_fx.regions()[-1].plan.transfers
    assert torch.cuda.max_memory_allocated() <= budget


class Checkpointed(nn.Module):
    """Checkpointed attention that drops out: the backward draws the same numbers again, of generators handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 3 * 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._attend, layer, x, use_reentrant=False)
        return x.square().mean()

    @staticmethod
    def _attend(layer: nn.Linear, x: Tensor) -> Tensor:
        query, key, value = layer(x).unflatten(-1, (3, 4, 64)).movedim(-3, 0).transpose(-3, -2)
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return functional.dropout(x + found.transpose(-3, -2).flatten(-2), 0.1)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_checkpointed_layers_draw_the_same_numbers_again(faulty: Engine, compiler: str) -> None:
    """The gradient is that of the forward with its random numbers, by finite differences.

    AOTAutograd draws by generators of its own, seeded when a region runs first: all runs begin with its compilation.
    """
    given, towards = torch.randn(2, 16, 256, 256, device="cuda", dtype=torch.float64)

    def train(budget: int | None, *, moved: float = 0.0, seed: int = 0) -> tuple[float, float]:
        """Return the loss of the second step, its input moved so far, and the derivative by its gradient."""
        torch.compiler.reset()
        gc.collect()  # the memory of an earlier run counts against the budget of the next
        torch.manual_seed(seed)
        model = Checkpointed().cuda().double()
        for index, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator("cuda").manual_seed(index))
        run = torch.compile(model, backend="tencache", options=options(device_budget=budget, compiler=compiler))
        for step in range(2):
            x = (given + step * moved * towards).requires_grad_()
            loss = run(x)
            loss.backward()
        assert x.grad is not None
        return loss.item(), float((x.grad * towards).sum())

    def compare(budget: int | None) -> None:
        more, less = (train(budget, moved=moved)[0] for moved in (1e-5, -1e-5))
        _, by_gradient = train(budget)
        assert by_gradient == pytest.approx((more - less) / 2e-5, rel=1e-4)
        assert train(budget, seed=1)[1] != pytest.approx(by_gradient, rel=1e-3), "other numbers would be seen"

    def refusal_of(budget: int) -> str:
        try:
            train(budget)
        except (BackendCompilerFailed, BudgetError) as refusal:  # in the first call, or in a later one
            return str(refusal)
        return ""

    def least_budget() -> int:
        """Return a budget that is enough: each refusal says how much is, by what was compiled until then."""
        budget = MIB
        while refusal := refusal_of(budget):
            found = re.search(r"Set device_budget to (\d+)MiB or more", refusal)
            assert found is not None, refusal
            assert int(found[1]) * MIB > budget, refusal
            budget = int(found[1]) * MIB
        return budget

    compare(None)
    compare(least_budget())
    plan = tencache_fx.regions()[-1].plan
    assert plan.transfers or plan.recomputed
