"""Budgets and directories of an open engine: who sets them, what is refused, and how to go on after a refusal."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tied_model import batch, network, train, trained, weights
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.hardware.cache import cached
from tencache_fx.hardware.disk import Disk
from tencache_fx.model_state.modules import roomy_engine
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.optim import AdamW
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine_registry import engines, open_engine, usage
from tencache_fx.units import format_bytes

CPU = torch.device("cpu")
HIDDEN = 192


class RefusalError(Exception):
    """What a module of a user's raises."""


class Fragile(nn.Module):
    """Fails when it is to make its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(8))

    def reset_parameters(self) -> None:
        raise RefusalError


def layers(*more: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN), *more)
    model[0].weight.data = model[0].weight.data.t()  # dense, in another order
    return model


def state_of(model: nn.Module) -> list[Any]:
    """Return what an `offload` that is refused must leave as it is, but for the values."""
    found: list[Any] = []
    for module in model.modules():
        hooks = [value for name, value in vars(module).items() if "hook" in name]
        found.append((set(vars(module)), [dict(each) if isinstance(each, dict) else each for each in hooks]))
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        found += [(id(each), each.device, each.dtype, each.size(), each.stride(), each.is_leaf) for each in tensors]
    return found


def values_of(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def acquired_bytes() -> int:
    gc.collect()
    return sum(engine.stats.take()["host_acquired_bytes"] for engine in engines())


def test_a_refused_offload_changes_nothing_and_with_more_room_it_works() -> None:
    model = layers()
    before, values = state_of(model), values_of(model)
    storages = [each.untyped_storage().data_ptr() for each in model.parameters()]
    tencache_fx.configure(host_budget="200kB")  # for one of two matrices
    with pytest.raises(BudgetError, match="offloaded parameters") as refusal:
        tencache_fx.offload(model)
    assert state_of(model) == before
    assert all(map(torch.equal, values_of(model), values))
    assert [each.untyped_storage().data_ptr() for each in model.parameters()] == storages
    assert acquired_bytes() == 0
    assert "need 294912 bytes of pinned memory; the host budget of 200000 bytes has 200000 left" in str(refusal.value)
    expected = model.eval()(torch.ones(4, HIDDEN))
    tencache_fx.configure(host_budget="64MB")
    tencache_fx.offload(model)
    assert len(parameters_of(engines()[0])) == 2
    assert torch.equal(model(torch.ones(4, HIDDEN)), expected)
    assert engines()[0].pool.budget_bytes == 64_000_000


@pytest.mark.parametrize("trained", [True, False])
def test_an_offload_that_fails_half_way_brings_all_back(trained: bool) -> None:  # noqa: FBT001
    """The error is the user's, and comes when everything before that module has moved."""
    with torch.device("meta"):
        fragile, made = Fragile(), nn.Linear(HIDDEN, HIDDEN)
    model = layers(made, fragile).requires_grad_(trained)
    before, values = state_of(model), values_of(model[:3])
    with pytest.raises(RefusalError):
        tencache_fx.offload(model, "cpu")
    assert state_of(model) == before
    assert all(map(torch.equal, values_of(model[:3]), values))
    assert not parameters_of(engines()[0])
    assert not parameters_of(engines()[0]).kept
    assert acquired_bytes() == 0
    assert engines()[0].pool.allocated_bytes == 0
    fragile.reset_parameters = lambda: torch.arange(8, out=fragile.angles)
    tencache_fx.offload(model, "cpu")
    assert len(parameters_of(engines()[0])) == 3
    assert torch.equal(model.state_dict()["0.weight"], values[0])


@pytest.mark.parametrize("last", ["strided", "meta"])
def test_what_cannot_move_is_refused_before_anything_moves(last: str) -> None:
    if last == "strided":
        other = nn.Linear(HIDDEN, HIDDEN)
        other.weight = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN)[:, ::2])
    else:
        other = nn.Module()
        other.register_parameter("weight", nn.Parameter(torch.empty(200, 200, device="meta")))
    model = layers(other)
    before = state_of(model)
    storages = [each.untyped_storage()._cdata for each in model.parameters()]
    with pytest.raises(OptionError, match="contiguous" if last == "strided" else "reset_parameters"):
        tencache_fx.offload(model, "cpu")
    assert state_of(model) == before
    assert [each.untyped_storage()._cdata for each in model.parameters()] == storages


def test_a_refused_step_of_offloaded_parameters_counts_nothing() -> None:
    """Not even for those for whose state there was room."""
    losses, after = trained(home=False, dtype=torch.float32, steps=4)
    tencache_fx.configure(host_budget="64MB")
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 1e-3
    tokens = batch(0)
    loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 128)
    loss.backward()
    tencache_fx.configure(host_budget=engines()[0].pool.acquired_bytes + 1_100_000)  # for some of it
    with pytest.raises(BudgetError, match="raise host_budget"):
        optimizer.step()
    assert engines()[0].pool.acquired_for(Use.STATE), "some was made"
    assert not any(kept.get("step") for kept in optimizer.state.values())
    tencache_fx.configure(host_budget="64MB")
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(loss.item(), losses[0])
    found = train(model, model, optimizer, range(1, 4))
    torch.testing.assert_close(found, losses[1:])
    assert {int(kept["step"]) for kept in optimizer.state.values()} == {4}
    for name, value in weights(model).items():
        torch.testing.assert_close(value, after[name])


@pytest.mark.parametrize("room_bytes", [500_000, 2_200_000])  # for some of the state; for that, and not for a round
def test_a_refused_step_without_offloading_counts_nothing(room_bytes: int) -> None:
    def stepped(*, refused: bool) -> tuple[list[Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(torch.full((4, 256), step + 1.0)).square().mean().backward()
            if refused and step == 0:
                tencache_fx.configure(host_budget=room_bytes)
                values = values_of(model)
                with pytest.raises(BudgetError, match="raise host_budget"):
                    optimizer.step()
                assert all(map(torch.equal, values_of(model), values))
                assert not any(kept.get("step") for kept in optimizer.state.values())
                tencache_fx.configure(host_budget="64MB")
            optimizer.step()
            optimizer.zero_grad()
        found = values_of(model), optimizer.state_dict()["state"]
        tencache_fx.close()
        return found

    (values, state), (expected, plain) = stepped(refused=True), stepped(refused=False)
    assert all(map(torch.equal, values, expected))
    assert all(torch.equal(state[k][name], value) for k, each in plain.items() for name, value in each.items())


def test_a_budget_below_what_is_in_use_is_refused_and_nothing_changes() -> None:
    tencache_fx.configure(host_budget="64MB")
    tencache_fx.offload(layers_kept := layers())
    pool = engines()[0].pool
    with pytest.raises(OptionError, match=r"host_budget 100000 bytes is below the 294912 bytes"):
        tencache_fx.configure(host_budget="100kB", policy="teraio")
    assert pool.budget_bytes == 64_000_000
    assert dict(tencache_fx.configure()) == {"host_budget": "64MB"}
    tencache_fx.configure(host_budget=300_000)
    assert pool.budget_bytes == 300_000
    del layers_kept
    gc.collect()
    tencache_fx.configure(host_budget=4096)  # what has died is given back first
    assert pool.budget_bytes == 4096


def test_a_regions_small_budget_limits_its_plan_only() -> None:
    """Neither a later `offload`, nor an optimizer, nor a region that may take more."""
    run = torch.compile(tower(), backend="tencache", options=spilling(host_budget=1_100_000))
    check(run)
    (engine,) = engines()
    assert engine.pool.budget_bytes == 1_100_000, "nobody else has asked for anything"
    model = tencache_fx.offload(network())
    assert len(parameters_of(engine)) == 7
    assert engine.pool.budget_bytes > 1 << 28
    whole_bytes = engine.pool.budget_bytes
    again = torch.compile(tower(), backend="tencache", options=spilling(host_budget=4_000_000))
    check(again)
    assert engine.pool.budget_bytes == whole_bytes
    assert tencache_fx.regions()[-1].problem.budgets.host_bytes < 4_000_000
    optimizer = AdamW(model.parameters())
    train(model, model, optimizer, range(1))
    optimizer.state_dict()
    assert engine.pool.acquired_for(Use.STATE) > 1_100_000


def test_an_optimizer_without_offloading_has_the_room_of_the_process() -> None:
    open_engine(CPU, host_budget_bytes=4096)  # by a region
    weight = nn.Parameter(torch.ones(256, 256))
    weight.grad = torch.ones(256, 256)
    AdamW([weight]).step()
    assert not torch.equal(weight, torch.ones(256, 256))
    assert usage(CPU).host_bytes > 4096


def test_what_is_configured_again_counts_again() -> None:
    tencache_fx.configure(host_budget="1MB")
    assert roomy_engine(CPU).pool.budget_bytes == 1_000_000
    tencache_fx.configure(reset=True)
    assert engines()[0].pool.budget_bytes == 1_000_000, "nobody needs more so far"
    assert roomy_engine(CPU).pool.budget_bytes > 1 << 28


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


def spilling(**more: object) -> dict[str, object]:
    return {"compiler": "eager", "calibrate": False, "policy": "teraio", "device_budget": "1100kB", **more}


def check(run: nn.Module) -> None:
    """See that gradients are those of the model that is not compiled, and that something has travelled."""
    model, x = run._orig_mod, torch.randn(512, 64)
    model.zero_grad()
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    run(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert tencache_fx.regions()[-1].plan.transfers


def folders(tmp_path: Path, *names: str) -> list[str]:
    found = [tmp_path / name for name in names]
    for each in found:
        each.mkdir()
    return list(map(str, found))


def test_two_models_name_different_directories(tmp_path: Path) -> None:
    first, second = folders(tmp_path, "first", "second")
    on_disk = {"host_budget": 300_000, "spill_budget": "8MB"}
    runs = []
    for folder in (first, second):
        runs.append(torch.compile(tower(), backend="tencache", options=spilling(spill_dir=folder, **on_disk)))
        check(runs[-1])
    (engine,) = engines()
    assert engine.store is not None
    assert list(map(str, engine.store.directories)) == [second]
    before = engine.store.written_bytes
    for run in runs:  # the first one goes on, too
        check(run)
        assert engine.store.written_bytes > before
        before = engine.store.written_bytes


def test_several_directories_are_dealt_to_by_what_was_measured_of_them_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured of two file systems is made up: the directories' names stand for them."""
    names = folders(tmp_path, "slow", "fast")
    monkeypatch.setattr("tencache_fx.hardware.rates.filesystem_id", lambda directory: directory.name)
    for name, rate in (("slow", 10**8), ("fast", 3 * 10**8)):
        made_up = Disk(write_bytes_per_s=rate, read_bytes_per_s=rate, direct=True)
        cached({"what": "disk", "filesystem": name}, Disk, lambda made_up=made_up: made_up)
    options = spilling(spill_dir=names, host_budget=300_000, spill_budget="8MB")
    run = torch.compile(tower(), backend="tencache", options=options)
    check(run)
    (engine,) = engines()
    assert engine.store is not None
    slow, fast = engine.store.uses()
    assert slow.share == pytest.approx(0.25)
    assert slow.written_bytes + fast.written_bytes > 0
    counts = tencache_fx.stats()
    assert [counts[f"disk_written_bytes:{name}"] for name in names] == [slow.written_bytes, fast.written_bytes]
    assert counts["disk_written_bytes"] == engine.store.written_bytes
    (row,) = re.findall(rf"^{re.escape(names[1])} .*$", tencache_fx.report(), re.MULTILINE)
    assert "75.0%" in row
    assert format_bytes(fast.written_bytes) in row


def test_configured_directories_and_disk_budgets_count_at_once(tmp_path: Path) -> None:
    first, second = folders(tmp_path, "first", "second")
    engine = open_engine(CPU, host_budget_bytes=1 << 20)
    tencache_fx.configure(spill_dir=first, spill_budget="64kB")
    assert engine.store is not None
    with pytest.raises(BudgetError, match="spill_budget"):
        engine.store.reserve(1 << 17)
    tencache_fx.configure(spill_budget="1MB")
    extent = engine.store.allocate(1 << 17, "a value")
    with pytest.raises(OptionError, match=r"spill_budget 4096 bytes is below the 131072 bytes"):
        tencache_fx.configure(spill_dir=second, spill_budget=4096)
    assert list(map(str, engine.store.directories)) == [first]
    assert dict(tencache_fx.configure()) == {"spill_dir": first, "spill_budget": "1MB"}
    tencache_fx.configure(spill_dir=second)
    assert list(map(str, engine.store.directories)) == [second]
    assert engine.store.file_bytes == 1 << 17, "the value is in the first one"
    engine.store.free(extent)
    assert engine.store.file_bytes == 0


def test_state_goes_to_the_directories_configured_even_if_no_region_has_named_them(tmp_path: Path) -> None:
    tencache_fx.configure(host_budget="3700kB", spill_dir=str(tmp_path), spill_budget="64MB")
    losses, _ = trained(home=False, dtype=torch.float32, steps=2)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    torch.testing.assert_close(train(model, model, optimizer, range(2)), losses)
    optimizer.state_dict()
    assert engines()[0].stats.take()["disk_acquired_bytes"]
