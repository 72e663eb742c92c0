"""An optimizer's state on disk: the same training, whatever the disk does, and nothing left behind."""

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import eventually
from faulty_streams import FaultyCpuStreams, FaultyIO
from tied_model import TIGHT, compiled, network, train, trained, weights
from torch import Tensor

import tencache_fx
from tencache_fx.errors import InvariantError
from tencache_fx.model_state.disk_state import DiskState, line_bytes
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.model_state.stored_form import BF16, FP32
from tencache_fx.optim import AdamW
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import engines, install_engine
from tencache_fx.runtime.store import Store
from tencache_fx.units import PAGE_BYTES

HOST_BYTES = 3_700_000
BUFFER_BYTES = line_bytes(HOST_BYTES) // 5
PIECE = BUFFER_BYTES // 12  # elements of each of three arrays


def engine_with(tmp_path: Path, io: FaultyIO | None = None, delay_s: float = 0.0, *, checksum: bool = True) -> Engine:
    engine = Engine(
        torch.device("cpu"), host_budget_bytes=HOST_BYTES, streams=FaultyCpuStreams(delay_s=delay_s, poison=True)
    )
    engine.attach_store(Store([tmp_path], 1 << 28, checksum=checksum, io=io))
    install_engine(engine)
    return engine


def options(tmp_path: Path) -> dict[str, object]:
    return {"spill_dir": str(tmp_path), "spill_budget": 1 << 28, "host_budget": HOST_BYTES, "checksum": True}


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_training_is_that_with_all_state_in_memory(tmp_path: Path, dtype: torch.dtype, now: bool) -> None:  # noqa: FBT001
    losses, after = trained(home=False, dtype=dtype, steps=6)
    io = FaultyIO(seed=1)
    io.short, io.delay_s = True, 0.001
    engine = engine_with(tmp_path, io, delay_s=0.001)
    model = tencache_fx.offload(network(dtype))
    optimizer = AdamW(model.parameters(), weight_decay=0.1, step_in_backward=now)
    budget = TIGHT if dtype == torch.float32 else "450kB"
    assert train(model, compiled(model, budget, **options(tmp_path)), optimizer, range(6)) == losses
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())
    places = [held.place for held in optimizer._states.values()]
    if dtype == torch.float32:
        assert Tier.NVME in places
        assert Tier.HOST in places
        on_disk = sum(held.nbytes for held in optimizer._states.values() if held.place is Tier.NVME)
        counts = engine.stats.take()
        assert 5 * on_disk <= counts["disk_read_bytes"] <= 6 * on_disk
        assert on_disk <= counts["disk_acquired_bytes"]
    assert engine.pool.allocated_bytes <= HOST_BYTES


def test_it_goes_on_from_a_saved_state_and_after_the_engine_is_closed(tmp_path: Path) -> None:
    losses, after = trained(home=False, dtype=torch.float32, steps=6)
    engine_with(tmp_path)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    first = train(model, compiled(model, **options(tmp_path)), optimizer, range(2))
    saved, values = copy.deepcopy(optimizer.state_dict()), weights(model)
    assert all(set(each) == {"step", "master", "exp_avg", "exp_avg_sq"} for each in saved["state"].values())
    tencache_fx.close()
    torch.compiler.reset()
    assert first + train(model, model, optimizer, range(2, 4)) == losses[:4]  # an ordinary model again
    tencache_fx.close()
    engine_with(tmp_path)
    other = tencache_fx.offload(network())
    other.load_state_dict(values)
    again = AdamW(other.parameters(), weight_decay=0.1)
    again.load_state_dict(saved)
    assert Tier.NVME in [held.place for held in again._states.values()]
    assert train(other, compiled(other, **options(tmp_path)), again, range(2, 6)) == losses[2:]
    assert all(torch.equal(value, after[name]) for name, value in weights(other).items())


def test_what_cannot_be_written_stays_in_host_memory(tmp_path: Path) -> None:
    losses, _ = trained(home=False, dtype=torch.float32, steps=6)
    io = FaultyIO()
    engine = engine_with(tmp_path, io)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    run = compiled(model, **options(tmp_path))
    found = train(model, run, optimizer, range(2))
    optimizer.state_dict()
    io.write_errors = [5] * 3
    with pytest.warns(UserWarning, match="with this in host memory"):
        found += train(model, run, optimizer, range(2, 4))
    optimizer.state_dict()
    io.write_errors = []
    assert found + train(model, run, optimizer, range(4, 6)) == losses
    assert engine.stats.take()["disk_write_failures"] == 3


def test_a_piece_that_cannot_be_read_is_named_by_whoever_reads_the_parameter(tmp_path: Path) -> None:
    io = FaultyIO()
    engine = engine_with(tmp_path, io)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters())
    run = compiled(model, **options(tmp_path))
    train(model, run, optimizer, range(1))
    optimizer.state_dict()
    io.read_errors = [5] * 1000
    with pytest.raises(InvariantError, match="could not be updated.*go back to a checkpoint"):
        train(model, run, optimizer, range(1, 3))
    for home in parameters_of(engine):
        home.join_update()  # an update that has yet to read would find a disk that works again
    io.read_errors = []
    with pytest.warns(UserWarning, match="could not be updated"):
        tencache_fx.close()


def test_nothing_is_left_of_an_optimizer_that_is_gone(tmp_path: Path) -> None:
    engine = engine_with(tmp_path)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters())
    train(model, compiled(model, **options(tmp_path)), optimizer, range(2))
    optimizer.state_dict()
    assert engine.stats.take()["disk_acquired_bytes"] > 0
    del optimizer

    def is_free() -> bool:
        gc.collect()
        parameters_of(engine).disk_line.drain()
        return engine.stats.take()["disk_acquired_bytes"] == 0

    assert eventually(is_free)
    assert list(tmp_path.iterdir()) == []
    assert engines() == (engine,)


def test_a_kept_piece_is_read_and_updated_again_while_it_is_written(tmp_path: Path) -> None:
    """Each pass begins as soon as the one before is done, which is before it is written; some writes fail."""
    io = FaultyIO(seed=3)
    io.delay_s = 0.002
    engine = engine_with(tmp_path, io)
    parameter = torch.zeros(2 * PIECE + 7)
    forms = {"a": FP32, "b": BF16}  # numbers that bfloat16 has
    state = DiskState(parameters_of(engine).disk_line, parameter, forms, {"a": parameter, "b": 1.0}, "it")

    def add(part: slice, arrays: Sequence[Tensor]) -> None:
        arrays[0].add_(1)
        arrays[1].mul_(2)

    def update_twelve_times() -> None:
        for step in range(12):
            io.write_errors = [5] if step % 3 == 0 else []
            state.begin(add).result(30)
            parameters_of(engine).disk_line.run(state, lambda part, arrays: None, writes=False)

    with pytest.warns(UserWarning, match="with this in host memory"):
        update_twelve_times()
    found = state.read()
    assert torch.equal(found["a"], torch.full_like(parameter, 12))
    assert torch.equal(found["b"], torch.full_like(parameter, 2.0**12, dtype=torch.bfloat16))
    assert engine.stats.take()["disk_write_failures"] >= 2
    acquired = engine.pool.acquired_for(Use.STATE)
    assert acquired <= (5 + sum(piece.kept is not None for piece in state.pieces)) * BUFFER_BYTES


def test_a_copy_of_an_optimizer_has_what_is_on_disk(tmp_path: Path) -> None:
    engine_with(tmp_path)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters())
    train(model, compiled(model, **options(tmp_path)), optimizer, range(2))
    on_disk = [held for held in optimizer._states.values() if held.place is Tier.NVME]
    assert on_disk
    packed = optimizer.__getstate__()["state"]
    saved = optimizer.state_dict()["state"]
    torch.save(saved, tmp_path / "saved.pt")
    for kept, each in zip(packed.values(), saved.values(), strict=True):
        assert kept.keys() == each.keys()
        assert all(torch.equal(kept[name], each[name]) for name in kept)


def test_states_that_die_while_the_store_is_closed_are_no_obstacle(tmp_path: Path) -> None:
    io = FaultyIO()
    engine = engine_with(tmp_path, io)
    parameter = torch.zeros(PIECE)
    forms = {"a": FP32}
    states = [
        DiskState(parameters_of(engine).disk_line, parameter, forms, {"a": float(k)}, f"state {k}") for k in range(6)
    ]
    kept = states[3]
    io.read_gate = threading.Event()
    closing = threading.Thread(target=tencache_fx.close)
    closing.start()
    assert io.reading.wait(30)
    states.clear()
    io.read_gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert torch.equal(kept.read()["a"], torch.full_like(parameter, 3))


def test_the_line_goes_on_when_no_buffer_can_be_written(tmp_path: Path) -> None:
    """All its buffers are where pieces are from then on: it takes others."""
    io = FaultyIO()
    engine = engine_with(tmp_path, io)
    state = DiskState(parameters_of(engine).disk_line, torch.zeros(7 * PIECE), {"a": FP32}, {"a": 0.0}, "it")

    def fill(part: slice, arrays: Sequence[Tensor]) -> None:
        arrays[0].fill_(3)

    def filled() -> torch.Tensor:
        parameters_of(engine).disk_line.run(state, fill)
        return state.read()["a"]  # waits for the writes that fail, where `run` does not

    io.write_errors = [28] * 1000
    with pytest.warns(UserWarning, match="with this in host memory"):
        found = filled()
    assert torch.equal(found, torch.full((7 * PIECE,), 3.0))


def test_one_buffer_is_enough_for_the_line(tmp_path: Path) -> None:
    """The thread that works on a piece in it waits for no other."""
    engine = engine_with(tmp_path)
    taken = engine.pool.acquire(HOST_BYTES - 2 * BUFFER_BYTES + PAGE_BYTES, Use.GRADIENT)
    found: list[Tensor] = []

    def work() -> None:
        line = parameters_of(engine).disk_line
        found.append(DiskState(line, torch.zeros(7 * PIECE), {"a": FP32}, {"a": 2.0}, "it").read()["a"])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert torch.equal(found[0], torch.full((7 * PIECE,), 2.0))
    engine.pool.release(taken)


def test_state_is_in_host_memory_where_that_has_room_for_it(tmp_path: Path) -> None:
    """A step over offloaded parameters alone needs no buffers for others, however small the host budget is."""
    tencache_fx.configure(host_budget="32MiB", spill_dir=str(tmp_path), spill_budget="64MiB")
    model = tencache_fx.offload(network())
    train(model, model, AdamW(model.parameters()), range(2))
    found = tencache_fx.stats()
    assert found["updates"] > found["device_updates"], "some state is not on the device"
    assert found["disk_write_bytes"] == found["disk_acquired_bytes"] == 0


@pytest.mark.parametrize(("matrices", "in_host"), [(4, 0), (92, 5)])
def test_loaded_state_of_frozen_parameters_leaves_room_for_gradients_and_others(
    tmp_path: Path, matrices: int, in_host: int
) -> None:
    nbytes, count = 128 * 128 * 4, 16
    host_bytes = (count + matrices) * nbytes + line_bytes(1_500_000)  # all gradients, and what passes through to disk
    tencache_fx.configure(host_budget=host_bytes, spill_dir=str(tmp_path), spill_budget="64MiB")
    torch.manual_seed(0)
    model = tencache_fx.offload(torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(count))), "cpu")
    optimizer = AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(4, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    saved = optimizer.state_dict()
    model[:8].requires_grad_(False)
    optimizer.load_state_dict(saved)
    places = [held.place for held in optimizer._states.values() if held.nbytes > nbytes]
    assert places == [*[Tier.NVME] * 8, *[Tier.HOST] * in_host, *[Tier.NVME] * (8 - in_host)]
    step()
    model.requires_grad_(True)
    step()


ENDING = """
import time, sys, torch, tencache_fx
from tencache_fx.model_state.disk_state import DiskLine
write = DiskLine._write
def slow(self, *given):
    time.sleep(0.05)
    write(self, *given)
DiskLine._write = slow
tencache_fx.configure(host_budget="1500KB", spill_dir=sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(16)))
model = tencache_fx.offload(model, "cpu")
optimizer = tencache_fx.optim.AdamW(model.parameters())
model(torch.ones(4, 128)).sum().backward()
optimizer.step()
assert tencache_fx.stats()["disk_acquired_bytes"]
"""


def test_a_process_ends_while_state_on_disk_is_updated(tmp_path: Path) -> None:
    """Python's executors take no more work then, so what waits for it fails."""
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
