"""A parameter that a graph reads at its begin, and maybe at its end: it is not there in between, unless it stays."""

import copy
import functools
import re

import pytest
import torch
from harness import Block
from torch import Tensor, nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import AdamW
from tencache_fx.planning.problem import Kind
from tencache_fx.records import RegionRecord

WORDS, HIDDEN = 1024, 192
EMBEDDING_BYTES = 4 * WORDS * HIDDEN


def network(blocks: int = 8) -> nn.Module:
    torch.manual_seed(0)
    stack = (Block(HIDDEN) for _ in range(blocks))
    model = nn.Sequential(nn.Embedding(WORDS, HIDDEN), *stack, nn.Linear(HIDDEN, WORDS, bias=False))
    model[-1].weight = model[0].weight
    return model


class Borrower(nn.Module):
    """A module that has a parameter of a module below it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.weight = self.inner.weight


def test_a_parameter_of_a_module_and_of_one_below_it_is_loaded() -> None:
    model = tencache_fx.offload(Borrower())
    model.load_state_dict({name: torch.full((HIDDEN, HIDDEN), 2.0) for name in ("weight", "inner.weight")})
    offloaded = find_offloaded(model.weight)
    assert not offloaded.on_device
    assert bool((offloaded.host == 2.0).all())


def words(step: int, rows: int = 64) -> Tensor:
    return torch.randint(0, WORDS, (rows,), generator=torch.Generator().manual_seed(step))


@functools.cache
def trained(compiler: str, budget: str | None, *, now: bool = False) -> tuple[list[float], RegionRecord]:
    model = network()
    if budget is not None:
        tencache_fx.offload(model)
    options = {"device_budget": budget, "compiler": compiler, "calibrate": False}
    run = torch.compile(model, backend="tencache", options=options)
    optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=now)
    losses = []
    for step in range(4):
        loss = nn.functional.cross_entropy(run(words(step)), (words(step) * 7 + 3) % WORDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    record = regions()[-1]
    torch.compiler.reset()
    tencache_fx.close()
    return losses, record


def arrivals(record: RegionRecord) -> int:
    """Return how often the embedding comes to the device in the forward."""
    found = [s for s in record.problem.storages if s.parameter == "0.weight" and s.kind is Kind.FETCHED]
    return sum(storage.birth < record.problem.boundary for storage in found)


@pytest.mark.parametrize(
    ("compiler", "budget", "times", "now"),
    [
        pytest.param("eager", "3MB", 2, False, marks=pytest.mark.slow),
        ("eager", "5MB", 0, True),
        pytest.param("inductor", "3MB", 2, True, marks=pytest.mark.slow),
        pytest.param("inductor", "5MB", 0, False, marks=pytest.mark.slow),
    ],
)
def test_it_trains_the_same(compiler: str, budget: str, times: int, now: bool) -> None:  # noqa: FBT001
    losses, record = trained(compiler, budget, now=now)
    assert losses == trained(compiler, None)[0]
    assert ("0.weight" in record.plan.resident) == (times == 0)
    if times:
        assert arrivals(record) == times


def floor_of(model: nn.Module, tokens: Tensor) -> str:
    """Return the floor of the region's forward, as whoever asks for too little is told."""
    options = {"compiler": "eager", "calibrate": False, "device_budget": "100kB"}
    with torch.no_grad(), pytest.raises(Exception, match="The floor of this region is") as error:
        torch.compile(tencache_fx.offload(model), backend="tencache", options=options)(tokens)
    torch.compiler.reset()
    (floor,) = re.findall(r"The floor of this region is (.*)\.", str(error.value))
    return str(floor)


def test_a_forward_needs_no_room_for_it_in_between() -> None:
    model = network(blocks=12)
    wide = nn.Sequential(nn.Linear(HIDDEN, 8 * HIDDEN), nn.Tanh(), nn.Linear(8 * HIDDEN, HIDDEN))
    model = nn.Sequential(*model[:6], wide, *model[6:])
    head = nn.Linear(HIDDEN, WORDS, bias=False)
    head.load_state_dict(model[-1].state_dict())
    untied = nn.Sequential(*copy.deepcopy(model[:-1]), head)
    tokens = words(0, rows=512)
    assert floor_of(model, tokens) == floor_of(untied, tokens)


def test_a_short_absence_is_none() -> None:
    model = tencache_fx.offload(network(blocks=1))
    options = {"compiler": "eager", "calibrate": False, "device_budget": "4MB"}
    torch.compile(model, backend="tencache", options=options)(words(0)).square().mean().backward()
    assert arrivals(regions()[-1]) <= 1


class Residual(nn.Module):
    """A residual block, wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 8192, bias=False), nn.Linear(8192, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and what the layers make of it."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Embedded(nn.Module):
    """Blocks behind an embedding of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(16384, 64), nn.Sequential(Residual(), Residual())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what the blocks make of the rows of `tokens`."""
        return self.blocks(self.table(tokens))


def test_an_embedding_leaves_as_soon_as_its_rows_are_read() -> None:
    """Inductor would read them again where a residual is added, with all of the embedding there until then."""
    model, tokens = Embedded().eval(), torch.randint(16384, (4, 16))
    with torch.no_grad():
        expected = model(tokens)
        tencache_fx.offload(model)
        model.compile(backend="tencache", options={"device_budget": "6.5MiB", "host_budget": "64MiB"})
        torch.testing.assert_close(model(tokens), expected)
    (region,) = regions()
    (table,) = (s for s in region.problem.storages if s.parameter == "table.weight")
    wide = [s.birth for s in region.problem.storages if s.nbytes == 2 << 20 and s.kind is Kind.ACTIVATION]
    assert table.death <= min(wide)
    assert region.code_peak_bytes <= 6.5 * 2**20
