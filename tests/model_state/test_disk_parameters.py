"""Parameters on disk: the same training, whatever the disk does, within the host budget, and nothing left behind."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import eventually
from faulty_streams import FaultyCpuStreams, FaultyIO
from harness import Block
from tied_model import HIDDEN, compiled, train, weights
from torch import nn
from weights import save_weights

import tencache_fx
from tencache_fx.errors import BudgetError, StoreError
from tencache_fx.model_state import disk_backing
from tencache_fx.model_state.disk_backing import DiskBacking
from tencache_fx.model_state.modules import watch
from tencache_fx.model_state.offloading import Offloading
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.optim import AdamW, Muon
from tencache_fx.planning.problem import Kind, Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.store import Store

MATRIX_BYTES = HIDDEN * HIDDEN * 4
DEVICE = "1MB"
ALL = 1_750_000  # with this host budget all matrices of blocks go to disk
MOST = 2_100_000  # with this one all that are frozen do, and some that are trained


def network() -> nn.Module:
    """A tied embedding, two frozen blocks and two that are trained."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, HIDDEN), *(Block(HIDDEN) for _ in range(4)), nn.Linear(HIDDEN, 128, bias=False)
    )
    model[-1].weight = model[0].weight
    for place in (1, 2):
        model[place].requires_grad_(requires_grad=False)
    return model


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    losses = train(model, compiled(model, DEVICE), optimizer, range(3))
    found = weights(model)
    tencache_fx.close()
    torch.compiler.reset()
    return losses, found


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO(seed=1)


@pytest.fixture
def engine(request: pytest.FixtureRequest, no_leaks: None, spill_dir: Path, io: FaultyIO) -> Iterator[Engine]:
    """An engine with late copies and poisoned buffers, and the host budget that the test is given."""
    host_bytes = getattr(request, "param", ALL)
    streams = FaultyCpuStreams(delay_s=0.001, poison=True)
    engine = Engine(torch.device("cpu"), host_budget_bytes=host_bytes, streams=streams)
    engine.attach_store(Store([spill_dir], 1 << 28, checksum=True, io=io))
    install_engine(engine)
    yield engine
    tencache_fx.close()
    torch.compiler.reset()


def run_of(model: nn.Module, engine: Engine) -> object:
    store = engine.store
    assert store is not None
    more = {"spill_dir": str(store.directories[0]), "spill_budget": 1 << 28, "checksum": True}
    return compiled(model, DEVICE, host_budget=engine.pool.budget_bytes, **more)


def on_disk(engine: Engine) -> dict[str, DiskBacking]:
    found = {each.name: each.backing for each in parameters_of(engine)}
    return {name: backing for name, backing in found.items() if isinstance(backing, DiskBacking)}


def disk_bytes(engine: Engine) -> int:
    return sum(backing.layout.nbytes for backing in on_disk(engine).values())


@pytest.mark.parametrize(("engine", "now"), [(ALL, True), (MOST, False)], indirect=["engine"])
def test_training_is_that_with_all_in_host_memory(engine: Engine, io: FaultyIO, now: bool, expected) -> None:  # noqa: FBT001
    io.short, io.delay_s = True, 0.001
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1, step_in_backward=now)
    run = run_of(model, engine)
    assert train(model, run, optimizer, range(3)) == expected[0]
    record = tencache_fx.regions()[-1]  # regions of other tests may live
    tiers = {each.parameter: each.tier for each in record.problem.storages if each.kind is Kind.FETCHED}
    assert all(tier is (Tier.NVME if name in on_disk(engine) else Tier.HOST) for name, tier in tiers.items())
    assert Tier.NVME in tiers.values()
    assert "parameters of cpu on disk: " in tencache_fx.report()
    counts = engine.stats.take()
    assert counts["parameter_disk_bytes"] == disk_bytes(engine)
    assert counts["host_high_water_bytes"] <= engine.pool.budget_bytes
    trained = [name for name in on_disk(engine) if name[0] in "034"]
    assert trained
    assert len(on_disk(engine)) - len(trained) == 4
    least = 3 * (2 * 4 + 3 * len(trained)) * MATRIX_BYTES // 2  # one that is on the device for long is not read again
    assert counts["disk_read_bytes"] + counts["disk_write_bytes"] > least
    found = weights(model)
    assert all(torch.equal(value, found[name]) for name, value in expected[1].items())
    summed = model.state_dict()
    assert all(torch.equal(value, summed[name]) for name, value in expected[1].items())


@pytest.mark.parametrize("engine", [MOST], indirect=True)
def test_steps_of_many_regions_load_each_parameter_from_where_it_is(engine: Engine, expected) -> None:
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    for place in range(1, 5):  # two of them share their code, and one is on disk in part
        model[place] = run_of(model[place], engine)
    assert train(model, model, optimizer, range(3)) == expected[0]
    step = tencache_fx.steps()[-1]
    weights_of = [each for each in step.problem.storages if each.kind in (Kind.FETCHED, Kind.PARAMETER)]
    tiers = {each.parameter: each.tier for each in weights_of}
    read_here = [name for name in on_disk(engine) if name != "0.weight"]
    assert list(tiers.values()).count(Tier.NVME) == len(read_here)
    assert Tier.HOST in tiers.values()
    assert step.plan.forecast.disk_read_bytes > 0


def test_frozen_weights_are_read_from_their_file_in_place(engine: Engine, tmp_path: Path, expected) -> None:
    path = save_weights(tmp_path / "model.safetensors", network().state_dict())
    before = path.read_bytes()
    with torch.device("meta"):
        empty = network()
    model = tencache_fx.offload(empty, "cpu", weights=path)
    in_file = [backing for name, backing in on_disk(engine).items() if backing.weights is not None]
    assert len(in_file) == 4
    assert engine.stats.take()["disk_acquired_bytes"] == disk_bytes(engine) - 4 * MATRIX_BYTES
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    assert train(model, run_of(model, engine), optimizer, range(3)) == expected[0]
    with tencache_fx.summon(model):  # writes back what nobody has changed
        assert all(torch.equal(value, expected[1][name]) for name, value in model.state_dict().items())
    assert all(backing.weights is not None for backing in in_file)
    assert path.read_bytes() == before
    with tencache_fx.summon(model), torch.no_grad():
        model[1].into.weight.add_(1)
    assert [name for name, each in on_disk(engine).items() if name[0] in "12" and each.weights is None] == [
        "1.into.weight"
    ]
    assert torch.equal(model.state_dict()["1.into.weight"], expected[1]["1.into.weight"] + 1)
    assert path.read_bytes() == before
    tencache_fx.close()
    assert torch.equal(model[2].out.weight, expected[1]["2.out.weight"])  # an ordinary parameter again


def test_files_are_enough_without_a_store(no_leaks: None, tmp_path: Path) -> None:
    """What is changed then stays in host memory, and says so."""
    reference = network()
    path = save_weights(tmp_path / "model.safetensors", reference.state_dict())
    engine = Engine(torch.device("cpu"), host_budget_bytes=1_200_000, streams=FaultyCpuStreams(delay_s=0.001))
    install_engine(engine)
    model = tencache_fx.offload(network().requires_grad_(requires_grad=False), weights=path)
    assert all(backing.weights is not None for backing in on_disk(engine).values())
    assert len(on_disk(engine)) >= 5
    tokens = torch.arange(64)
    run = compiled(model, DEVICE, host_budget=1_200_000)
    with torch.no_grad():
        expected = reference(tokens)
        assert torch.equal(model(tokens), expected)
        torch.testing.assert_close(run(tokens), expected, rtol=1e-5, atol=1e-4)  # norms are other kernels there
    record = tencache_fx.regions()[-1]  # regions of other tests may live
    assert record.plan.forecast.disk_read_bytes > 0
    assert engine.stats.take()["host_high_water_bytes"] <= 1_200_000
    name = next(iter(on_disk(engine)))
    weight = model.get_parameter(name)
    message = f"there is no spill_dir.*with {name} in host memory"
    with pytest.warns(UserWarning, match=message), tencache_fx.summon(model):
        weight.data.zero_()
    assert not model.state_dict()[name].any()
    tencache_fx.close()
    assert not weight.any()


def test_a_changed_file_is_refused(engine: Engine, tmp_path: Path) -> None:
    path = save_weights(tmp_path / "model.safetensors", network().state_dict())
    model = tencache_fx.offload(network(), weights=path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(StoreError, match=r"1\.into\.weight from .*model\.safetensors: the file has .* when it was op"):
        model(torch.zeros(2, dtype=torch.int64))
    with path.open("ab") as file:
        file.truncate(1 << 16)
    with pytest.raises(StoreError, match=r"model\.safetensors.*(ends|was changed)"):
        model(torch.zeros(2, dtype=torch.int64))
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.size())  # closing the engine does not read them


def test_a_failed_read_names_the_parameter_and_may_be_repeated(engine: Engine, io: FaultyIO, expected) -> None:
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    run = run_of(model, engine)
    assert train(model, run, optimizer, range(2)) == expected[0][:2]
    optimizer.state_dict()
    io.read_errors = [5]
    with pytest.raises(
        StoreError, match=rf"could not read .* of \d\.(into\.|out\.|)weight .*{engine.store.directories[0]}"
    ):
        run(torch.zeros(64, dtype=torch.int64))
    io.read_errors = []
    assert train(model, run, optimizer, range(2, 3)) == expected[0][2:]


@pytest.mark.parametrize("trains", [False, True])
def test_a_module_that_runs_by_itself_repeats_a_failed_read(engine: Engine, io: FaultyIO, *, trains: bool) -> None:
    model = nn.Linear(HIDDEN, HIDDEN)
    x = torch.ones(2, HIDDEN)
    expected = model(x).detach()
    parameters_of(engine).offload(model.weight, "weight", engine.device, disk_backing.Place(on_disk=True))
    watch(model)
    io.read_errors = [5]
    with torch.set_grad_enabled(trains), pytest.raises(StoreError, match="could not read .* of weight "):
        model(x)
    assert not find_offloaded(model.weight).on_device
    io.read_errors = []
    assert torch.equal(model(x), expected)


def test_a_weight_that_cannot_be_written_stays_in_host_memory(spill_dir: Path, no_leaks: None, expected) -> None:
    io = FaultyIO()
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=FaultyCpuStreams(poison=True))
    engine.attach_store(Store([spill_dir], 1 << 28, checksum=True, io=io))
    install_engine(engine)
    model = nn.Linear(HIDDEN, HIDDEN)
    offloaded = parameters_of(engine).offload(model.weight, "weight", engine.device, disk_backing.Place(on_disk=True))
    values = [torch.full((HIDDEN, HIDDEN), float(k)) for k in range(4)]
    io.write_errors = [5]
    with pytest.warns(UserWarning, match=r"could not write .* weight .*with weight in host memory"):
        offloaded.set_host(lambda memory: memory.copy_(values[1]))
    assert torch.equal(offloaded.host, values[1])
    offloaded.load()
    assert torch.equal(model.weight, values[1])
    with offloaded.begin_write(read=True) as write:
        write.elements.fill_(7)  # which nobody commits
    assert torch.equal(offloaded.host, values[1])
    io.write_errors = [5, 0]
    with pytest.warns(UserWarning, match="in host memory"):
        offloaded.set_host(lambda memory: memory.copy_(values[2]))
    assert torch.equal(offloaded.host, values[2])
    offloaded.set_host(lambda memory: memory.copy_(values[3]))
    assert offloaded.backing._held is None
    assert torch.equal(offloaded.host, values[3])
    del offloaded, model, write
    gc.collect()
    assert eventually(lambda: not engine.stats.take()["host_acquired_bytes"])
    assert not engine.stats.take()["disk_acquired_bytes"]
    tencache_fx.close()


def test_readers_find_the_next_value_while_it_is_written(spill_dir: Path, no_leaks: None) -> None:
    io = FaultyIO()
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=FaultyCpuStreams(delay_s=0.002))
    engine.attach_store(Store([spill_dir], 1 << 28, io=io))
    install_engine(engine)
    parameter = nn.Parameter(torch.zeros(HIDDEN, HIDDEN))
    offloaded = parameters_of(engine).offload(parameter, "w", engine.device, disk_backing.Place(on_disk=True))
    io.writing.clear()
    io.write_gate = threading.Event()
    writing = threading.Thread(target=offloaded.set_host, args=(lambda memory: memory.fill_(3.0),))
    writing.start()
    assert io.writing.wait(30)
    offloaded.load()
    assert torch.equal(parameter, torch.full((HIDDEN, HIDDEN), 3.0))
    io.write_gate.set()
    writing.join(30)
    for _ in range(20):  # buffers are used again and again behind late copies
        offloaded.evict()
        offloaded.load()
        assert torch.equal(parameter, torch.full((HIDDEN, HIDDEN), 3.0))
    tencache_fx.close()


def test_weights_are_loaded_and_whole_matrices_updated(engine: Engine, expected) -> None:
    model = tencache_fx.offload(network())
    reference = network()
    model.load_state_dict(expected[1])
    reference.load_state_dict(expected[1])
    assert all(torch.equal(value, expected[1][name]) for name, value in model.state_dict().items())
    for each in (model, reference):
        matrices = [p for p in each.parameters() if p.dim() == 2 and p.requires_grad]
        optimizer = (Muon if each is model else torch.optim.Muon)(matrices, lr=0.02)
        for _ in range(2):
            each(torch.arange(64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in model.state_dict().items())
    assert any(each.tier is Tier.NVME and each.parameter.requires_grad for each in parameters_of(engine))


def test_without_room_the_model_is_as_it_was(engine: Engine, tmp_path: Path) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine.pool.resize_budget(500_000)
    with pytest.raises(BudgetError, match="host memory has .* raise host_budget"):
        tencache_fx.offload(model)
    engine.pool.resize_budget(ALL)
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    path = save_weights(tmp_path / "model.safetensors", zeros)

    def fail(self: Offloading, module: nn.Module) -> None:
        if module is model[4]:
            raise StoreError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offloading, "move_buffers", fail)
        with pytest.raises(StoreError, match="no"):
            tencache_fx.offload(model, weights=path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(find_offloaded(parameter) is None for parameter in model.parameters())
    assert eventually(lambda: not engine.stats.take()["host_acquired_bytes"])
    assert not engine.stats.take()["disk_acquired_bytes"]


def test_nothing_is_left_of_a_model_that_is_gone(engine: Engine, tmp_path: Path) -> None:
    path = save_weights(tmp_path / "model.safetensors", network().state_dict())
    model = tencache_fx.offload(network(), weights=path)
    assert on_disk(engine)
    del model
    gc.collect()
    assert eventually(lambda: not engine.stats.take()["host_acquired_bytes"])
    counts = engine.stats.take()
    assert not counts["disk_acquired_bytes"]
    assert not counts["parameter_disk_bytes"]
