"""Blocks of one kind of which only some are offloaded: each set of offloaded inputs has its region, compiled once."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from combinations import each_in_a_quick_case
from harness import Block, faulty_engine
from torch import Tensor, nn

import tencache_fx
from tencache_fx.optim import AdamW
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points

DEPTH, WIDTH, STEPS = 6, 64, 5
OPTIONS = {"compiler": "eager", "calibrate": False, "host_budget": 1 << 28}
BUDGETS = {"step": 5_000_000, "region": 2_500_000, "auto": 5_000_000}

Run = Callable[[Tensor], Tensor]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))


def inputs(seed: int) -> Tensor:
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_by_one(model: nn.Sequential, backend: str, **options: object) -> nn.Sequential:
    for block in model:
        block.compile(backend=backend, **({"options": {**OPTIONS, **options}} if backend == "tencache" else {}))
    return model


def trained(model: nn.Module, run: Run, after: Callable[[], object] = lambda: None) -> list[Tensor]:
    """Return the losses of a few steps, and the parameters at their end; call `after` each step."""
    optimizer, left = AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        loss = run(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
        after()
    return [*left, *(value.clone() for value in model.state_dict().values())]


def wanted(order: Sequence[int] = tuple(range(DEPTH))) -> list[Tensor]:
    """Return what training by torch's own compiler leaves, on the same graphs."""
    model = one_by_one(blocks(), "aot_eager_decomp_partition")
    found = trained(model, lambda x: through(model, order, x))
    torch.compiler.reset()
    return found


def through(model: nn.Sequential, order: Sequence[int], x: Tensor) -> Tensor:
    for place in order:
        x = model[place](x)
    return x


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    different = [k for k, (mine, other) in enumerate(zip(found, expected, strict=True)) if not mine.equal(other)]
    assert not different


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28, delay_s=0.001) as found:
        yield found


@each_in_a_quick_case(
    chosen=[
        pytest.param((1, 3, 5), id="in turns"),
        pytest.param((0, 1, 2), id="first"),
        pytest.param((2,), id="one"),
    ],
    scope=tuple(BUDGETS),
)
def test_blocks_of_which_some_are_offloaded_compile_once(scope: str, chosen: Sequence[int], engine: Engine) -> None:
    """Copies are late, and freed memory is poisoned."""
    expected, model = wanted(), blocks()
    for place in chosen:
        tencache_fx.offload(model[place], "cpu")
    one_by_one(model, "tencache", scope=scope, device_budget=BUDGETS[scope])
    compiled: list[int] = []
    found = trained(model, model, lambda: compiled.append(REGIONS.compilations))
    assert_same(found, expected)
    assert compiled[1] == compiled[-1], "nothing is compiled from the second step on"
    assert any(record.plan.transfers for record in tencache_fx.steps() or tencache_fx.regions())
    assert swap_points(engine).extra_bytes == 0


class Parted(nn.Module):
    """Four matrices, of which any may be offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return x


def with_offloaded(places: Iterable[int]) -> Parted:
    torch.manual_seed(0)
    model = Parted()
    for place in places:
        tencache_fx.offload(model.parts[place], "cpu")
    model.compile(backend="tencache", options={**OPTIONS, "scope": "region", "device_budget": 1 << 24})
    return model


def test_the_sets_that_ran_last_are_kept(engine: Engine) -> None:
    """Nine sets of four matrices, one after another."""
    x = torch.linspace(-1, 1, 8 * 2 * WIDTH).view(8, 2 * WIDTH)
    models = [with_offloaded(places) for count in range(4) for places in itertools.combinations(range(4), count)][:9]
    expected = models[0](x).detach()
    earlier = REGIONS.compilations
    for model in (*models, *reversed(models[1:])):
        assert model(x).equal(expected)
    assert REGIONS.compilations == earlier + 8, "eight are kept"
    models[0](x)
    assert REGIONS.compilations == earlier + 9, "the first was dropped"
    models[2](x)
    assert REGIONS.compilations == earlier + 9, "it ran later"
    models[8](x)
    assert REGIONS.compilations == earlier + 10, "it ran before all others that were kept"
