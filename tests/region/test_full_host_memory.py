"""Steps without a plan leave host memory to gradients and to a staging buffer: what finds no room goes to disk."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import eventually
from harness import Block, faulty_engine
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.model_state.disk_state import line_bytes
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import AdamW
from tencache_fx.planning.problem import Tier
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.store import Store
from tencache_fx.units import PAGE_BYTES

WIDTH, ROWS, DEPTH, STEPS = 64, 512, 6, 2
MATRIX = 4 * WIDTH * WIDTH * 4  # bytes
WEIGHTS, ACTIVATION = 2 * DEPTH * MATRIX, ROWS * 4 * WIDTH * 4  # of all matrices; the largest
DISK = 64 << 20
BACKWARD = WEIGHTS + ACTIVATION  # host memory that every step takes: gradients come on top
MOST = 9 * WEIGHTS // 2  # with more there is room for weights, gradients, state, and a part of the activations
ALONE = {"compiler": "eager", "calibrate": False, "scope": "region", "recompute": "none"}  # quick to plan
DEVICES = {"no plan": 46 * MATRIX, "plan": 64 * MATRIX}  # for the steps after the first


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))


def trained(model: nn.Sequential, optimizer: torch.optim.Optimizer, note: Callable[[], object] = int) -> list[Tensor]:
    """Return the losses of steps, and the parameters after them; call `note` after each step."""
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        note()
    is_offloaded = any(find_offloaded(parameter) for parameter in model.parameters())
    with tencache_fx.summon(model) if is_offloaded else contextlib.nullcontext():
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.fixture(scope="module")
def wanted() -> list[Tensor]:
    model = blocks()
    for block in model:
        block.compile(backend="aot_eager_decomp_partition")
    found = trained(model, AdamW(model.parameters(), lr=0.01))
    torch.compiler.reset()
    tencache_fx.close()
    return found


@contextlib.contextmanager
def spilling(spill_dir: Path, host_bytes: int, disk_bytes: int = DISK) -> Iterator[Engine]:
    """Serve the CPU, inside, with an engine of such budgets; copies are late."""
    with faulty_engine(host_budget_bytes=host_bytes) as engine:
        engine.attach_store(Store((spill_dir,), disk_bytes))
        yield engine
        engine.close()  # some buffers stay acquired up to then


def offloaded(spill_dir: Path, engine: Engine, device_budget: int) -> nn.Sequential:
    assert engine.store is not None
    model = tencache_fx.offload(blocks(), "cpu")
    for block in model:
        options = {"compiler": "eager", "calibrate": False, "scope": "step", "device_budget": device_budget}
        spills = {"spill_dir": spill_dir, "spill_budget": DISK}
        block.compile(backend="tencache", options={**options, **spills, "host_budget": engine.pool.budget_bytes})
    return model


@pytest.mark.parametrize("device_budget", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("early", [False, True], ids=["at the end", "in backward"])
def test_steps_run_with_any_host_memory_above_a_floor(
    *, early: bool, device_budget: int, spill_dir: Path, wanted: list[Tensor]
) -> None:
    gradients = MATRIX if early else WEIGHTS
    least = BACKWARD + gradients + line_bytes(2 * BACKWARD)  # state on disk passes through some memory, too
    for host_bytes in range(least, MOST, WEIGHTS):
        written: list[int] = []
        with spilling(spill_dir, host_bytes) as engine:
            model = offloaded(spill_dir, engine, device_budget)
            optimizer = AdamW(model.parameters(), lr=0.01, step_in_backward=early)
            found = trained(model, optimizer, partial(note_written, engine, written))
            assert engine.pool.high_water_bytes <= host_bytes
            del model, optimizer
        assert all(map(torch.equal, found, wanted)), host_bytes
        assert written[0] > ACTIVATION, host_bytes


def test_a_region_has_room_for_gradients_beside_those_they_are_added_to(spill_dir: Path) -> None:
    model, losses, host_bytes = blocks()[:4], list[float](), 44 * MATRIX
    for offloads in (False, True):
        with spilling(spill_dir, host_bytes) if offloads else contextlib.nullcontext():
            run: Callable[[Tensor], Tensor] = model
            if offloads:
                tencache_fx.offload(model, "cpu")
                options = {**ALONE, "device_budget": 64 * MATRIX}
                spills = {"spill_dir": spill_dir, "spill_budget": DISK, "host_budget": host_bytes}
                run = torch.compile(model, backend="tencache", options={**options, **spills})
            for part in range(3):
                loss = run(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(part))).square().mean()
                loss.backward()
                losses.append(loss.item())
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            losses.append(norm.item())
            model.zero_grad()
            assert not offloads or tencache_fx.regions()[-1].plan.forecast.host_bytes
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-5)


def test_room_for_sums_is_sought_no_more_when_nothing_was_added_up_for_long(spill_dir: Path) -> None:
    """Nothing is compiled for that, nor in a loop that adds up now and then; a larger batch is planned without."""
    host_bytes, before = 44 * MATRIX, set(REGIONS.live())
    with spilling(spill_dir, host_bytes):
        model = tencache_fx.offload(blocks()[:4], "cpu")
        options = {**ALONE, "device_budget": 64 * MATRIX}
        spills = {"spill_dir": spill_dir, "spill_budget": DISK, "host_budget": host_bytes}
        run = torch.compile(model, backend="tencache", options={**options, **spills}, dynamic=True)
        optimizer = AdamW(model.parameters(), lr=0.01)

        def update(backwards: int, rows: int = ROWS) -> None:
            for _ in range(backwards):
                run(torch.randn(rows, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for backwards in (1, 2, 2):
            update(backwards)
        (region,) = set(REGIONS.live()) - before
        assert region.accumulation.adds
        compilations = REGIONS.compilations
        for wait in (15, 17, 20):
            for _ in range(wait):
                update(1)
            assert region.accumulation.adds == (wait in (15, 20)), wait
            update(2)
            assert region.accumulation.adds
        assert REGIONS.compilations == compilations
        room_bytes = tencache_fx.regions()[-1].problem.budgets.host_bytes
        for _ in range(33):
            update(1)
        update(1, rows=ROWS * 5 // 4)
        assert REGIONS.compilations == compilations + 1
        more_bytes = tencache_fx.regions()[-1].problem.budgets.host_bytes - room_bytes
        assert more_bytes == WEIGHTS // DEPTH * 4, "that of a set of gradients"


def note_written(engine: Engine, written: list[int]) -> None:
    written.append(engine.stats.take()["disk_write_bytes"])


HOST = 4 * MATRIX  # for a weight, its gradient, a staging buffer of its size: one more is too much, beside an offload


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(WIDTH, 4 * WIDTH, bias=False)


def is_on_disk(engine: Engine, nbytes: int, *, planned: bool = False) -> bool:
    """Return whether a tensor goes to disk that may, once what was there before has left."""
    assert eventually(lambda: not engine.stats.take()["disk_acquired_bytes"])
    handle = engine.offload(torch.ones(nbytes // 4), Tier.HOST, or_disk=True, planned=planned)
    on_disk = bool(engine.stats.take()["disk_acquired_bytes"])
    assert torch.equal(engine.wait(engine.prefetch(handle)), torch.ones(nbytes // 4))
    return on_disk


def test_what_is_not_planned_leaves_room_for_the_backward(spill_dir: Path, layer: nn.Linear) -> None:
    with spilling(spill_dir, HOST - PAGE_BYTES) as engine:
        tencache_fx.offload(layer, "cpu")
        assert is_on_disk(engine, MATRIX)
        assert not is_on_disk(engine, MATRIX, planned=True)
        assert not is_on_disk(engine, MATRIX // 4)  # with a staging buffer of its size
        layer.requires_grad_(False)
        assert not is_on_disk(engine, MATRIX)


def test_what_finds_no_room_on_disk_takes_that_of_others(spill_dir: Path, layer: nn.Linear) -> None:
    with spilling(spill_dir, HOST - PAGE_BYTES, disk_bytes=PAGE_BYTES) as engine:
        tencache_fx.offload(layer, "cpu")
        assert not is_on_disk(engine, MATRIX)


def test_where_a_backward_cannot_run_nothing_is_left_for_it(spill_dir: Path, layer: nn.Linear) -> None:
    with spilling(spill_dir, 3 * MATRIX - PAGE_BYTES) as engine:
        tencache_fx.offload(layer, "cpu")
        assert not is_on_disk(engine, MATRIX)
        kept = engine.offload(torch.ones(MATRIX // 4), Tier.HOST)
        with pytest.raises(BudgetError, match=f"take {3 * MATRIX} bytes .* host_budget is {3 * MATRIX - PAGE_BYTES}"):
            engine.offload(torch.ones(MATRIX // 4), Tier.NVME)
        del kept


@pytest.mark.parametrize(
    ("host_matrices", "way"),
    [(38, "whole, disk"), (42, "whole, disk"), (28, "blocks, disk"), (56, "blocks"), (72, "blocks")],
)
def test_sums_of_gradients_leave_room_for_all_that_a_backward_adds(
    host_matrices: int, way: str, spill_dir: Path
) -> None:
    """In a step that is planned as a whole, with a disk and without."""
    losses: list[list[float]] = []
    for offloads in (False, True):
        model, host_bytes = blocks()[:4], host_matrices * MATRIX
        with contextlib.ExitStack() as stack:
            if offloads:
                engine = stack.enter_context(faulty_engine(host_budget_bytes=host_bytes))
                stack.callback(engine.close)
                tencache_fx.offload(model, "cpu")
                options = {"compiler": "eager", "calibrate": False, "scope": "step", "device_budget": 64 * MATRIX}
                options |= {"host_budget": host_bytes}
                options |= {"spill_dir": spill_dir, "spill_budget": DISK} if "disk" in way else {}
                for each in (model,) if "whole" in way else model:
                    each.compile(backend="tencache", options=options)
            optimizer = AdamW(model.parameters(), lr=0.01)
            losses.append([])
            for step in range(9):
                loss = model(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
                loss.backward()
                losses[-1].append(loss.item())
                if step % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            del model, optimizer, loss
        tencache_fx.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
