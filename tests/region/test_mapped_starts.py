"""Host memory is mapped sooner in a second start: it knows from the first one how much it will want."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.compiler._cache import CacheArtifactManager

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.hardware.cache import folder
from tencache_fx.model_state.parameter_store import ParameterStore
from tencache_fx.planning.plan import PoolClass
from tencache_fx.region import pieces
from tencache_fx.region.lowering import PlannedLowering
from tencache_fx.region.source import RegionSource
from tencache_fx.region.step_planner import StepPlanner
from tencache_fx.region.variants import Variants
from tencache_fx.runtime import engine_registry
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import find_engine, usage

CPU = torch.device("cpu")
OPTIONS = {"device_budget": "9MiB", "calibrate": False, "scope": "region", "host_budget": "128MB"}
Ahead = dict[Use, int]


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let regions be kept, in a folder of this test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "ours"))
    with CacheArtifactManager.with_fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield


def engine() -> Engine:
    found = find_engine(CPU)
    assert found is not None
    return found


def ahead() -> Ahead:
    """Return the bytes that are mapped ahead, by their use."""
    found: Ahead = {}
    for key, coming in engine().pool.ahead._coming.items():
        if coming:
            found[key.use] = found.get(key.use, 0) + key.size * len(coming)
    return found


class Start:
    """A process that begins, makes an optimizer and trains a step; what is mapped ahead at some times of that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
        tencache_fx.close()
        torch.compiler.reset()
        monkeypatch.setattr(engine_registry, "_REGISTRY", engine_registry.Registry())
        torch.manual_seed(0)
        self.model = tencache_fx.offload(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), "cpu")
        self.optimizer = tencache_fx.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.with_optimizer = ahead()
        self.when_loaded: Ahead | None = None
        self.when_asked: Ahead | None = None
        take_up = PlannedLowering.take_up

        def noting(*args: Any) -> bool:
            self.when_loaded = ahead()
            taken = take_up(*args)
            self.when_asked = ahead()
            return taken

        with monkeypatch.context() as patch:
            patch.setattr(PlannedLowering, "take_up", noting)
            run = torch.compile(self.model, backend="tencache", options={**OPTIONS, **options})
            loss: Tensor = run(torch.linspace(-1, 1, 512 * 512).view(512, 512)).square().mean()
        self.compiled = ahead()
        loss.backward()
        self.optimizer.step()
        self.trained = ahead()
        self.loss = loss.item()


@pytest.fixture
def start(hollow_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Start]:
    """Return a function that does what a process does that begins."""
    return lambda **options: Start(monkeypatch, options)


def test_state_is_mapped_from_the_optimizers_start_on(start: Callable[..., Start]) -> None:
    first = start()
    assert first.with_optimizer == {}
    assert first.when_loaded is None
    assert first.compiled[Use.STATE]
    second = start()
    assert second.with_optimizer == {Use.STATE: first.compiled[Use.STATE]}
    assert second.when_loaded is not None
    assert second.when_loaded[Use.STATE] == first.compiled[Use.STATE]
    assert second.trained == {}
    assert second.loss == first.loss


def test_state_is_mapped_while_a_kept_region_is_loaded(start: Callable[..., Start]) -> None:
    first = start()
    for path in folder().glob("state-*"):
        path.write_text("damaged")
    second = start()
    assert second.with_optimizer == {}
    assert second.when_loaded is not None
    assert second.when_loaded[Use.STATE] == first.compiled[Use.STATE]
    assert second.trained == {}


def test_what_a_kept_plan_reserves_is_mapped_while_its_code_is_loaded(start: Callable[..., Start]) -> None:
    start()
    second = start()
    reserved_bytes = engine().pool.held_for(Use.SWAP)
    assert reserved_bytes
    assert second.when_loaded is not None
    assert second.when_loaded[Use.SWAP] == reserved_bytes
    assert Use.SWAP not in second.compiled


def test_nothing_stays_mapped_of_a_kept_plan_that_is_refused(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr("tencache_fx.region.lowering.is_as_free", lambda *_: False)
    second = start()
    assert second.when_loaded is not None
    assert second.when_loaded[Use.SWAP]
    assert second.when_asked is not None
    assert Use.SWAP not in second.when_asked


def test_nothing_stays_mapped_of_a_kept_plan_that_has_no_room(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()

    def refuse(*_: Any, **__: Any) -> None:
        assert ahead()[Use.SWAP]
        raise BudgetError("host memory has no room.")

    monkeypatch.setattr("tencache_fx.region.lowering.reserve", refuse)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no room"):
        start()
    assert Use.SWAP not in ahead()


def test_parameters_of_many_groups_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a group for each parameter, and what is kept is found by all parameters."""
    looked_up: list[int] = []
    monkeypatch.setattr(ParameterStore, "map_state_as_before", lambda store: looked_up.append(len(store)))
    model = tencache_fx.offload(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), "cpu")
    parameters = list(model.parameters())
    optimizer = tencache_fx.optim.AdamW([{"params": [each]} for each in parameters[:3]], lr=1e-3)
    assert looked_up == [4]
    optimizer.add_param_group({"params": parameters[3:]})
    assert looked_up == [4, 4]
    copy.copy(optimizer)
    assert looked_up == [4, 4, 4]


def test_nothing_stays_mapped_of_what_others_reserve(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    foreseen = [PoolClass(nbytes=1 << 20, count=2), PoolClass(nbytes=1 << 16, count=1)]
    engine.reserve_ahead(foreseen)
    assert engine.pool.ahead.nbytes == (2 << 20) + (1 << 16)
    engine.reserve(pool=foreseen[1:], staging=(), disk_bytes=0)
    assert (engine.pool.ahead.nbytes, engine.pool.allocated_bytes) == (0, 1 << 16)
    engine.reserve_ahead(foreseen)
    assert engine.pool.ahead.nbytes == 2 << 20  # the other is there
    engine.reserve_ahead(())


@pytest.mark.parametrize("refused", [False, True])
def test_buffers_for_equal_layers_are_mapped_while_the_others_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
    refused: bool,  # noqa: FBT001
) -> None:
    """The first step has no plan: all of its storages leave, of each call of a layer. The next one may have none."""

    def refuse(*_: Any) -> None:
        raise BudgetError("there is no plan.")

    torch.compiler.reset()
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)) for _ in range(8)]
    model = nn.Sequential(*layers)
    options = {**OPTIONS, "device_budget": "10MB", "scope": "auto", "repeated_layers": "once", "compiler": "eager"}
    run = torch.compile(model, backend="tencache", options=options)
    seen: list[int] = []
    compile_region = pieces.Variants

    def noting(source: RegionSource, inputs: Any) -> Variants:
        seen.append(source.calls or 0)
        compiled = compile_region(source, inputs)
        seen.append(ahead().get(Use.SWAP, 0))
        return compiled

    monkeypatch.setattr(pieces, "Variants", noting)
    batch = torch.randn(2048, 64)
    loss = run(batch).square().mean()
    calls, mapped_bytes, *_ = seen
    assert calls >= 6
    assert mapped_bytes >= (calls - 1) * batch.nbytes
    assert sorted(seen[::2], reverse=True) == seen[::2]
    assert seen[-1] == mapped_bytes  # no region that is compiled later gives them back
    left = ahead().get(Use.SWAP, 0)
    assert left < mapped_bytes // 4, "what was mapped is not what the first forward acquires"
    engine().map_for_calls([1 << 20])  # nobody takes it
    if refused:
        monkeypatch.setattr(StepPlanner, "_plan_within", refuse)
    loss.backward()
    assert ahead()[Use.SWAP] >= 1 << 20
    run(batch).square().mean().backward()
    assert Use.SWAP not in ahead()
    assert len(tencache_fx.steps()) == (not refused)


def test_another_budget_corrects_what_was_mapped_as_before(start: Callable[..., Start]) -> None:
    first = start()
    second = start(device_budget="1GiB")
    assert second.with_optimizer == {Use.STATE: first.compiled[Use.STATE]}
    assert second.compiled == {}  # all of the state stays on the device
    assert start(device_budget="1GiB").with_optimizer == {}


def test_what_is_mapped_ahead_counts_as_memory_of_this_process(start: Callable[..., Start]) -> None:
    """The budgets that are "auto" are of the memory that is free, with what this process has."""
    begun = start()
    before_bytes, pool = usage(CPU).host_bytes, engine().pool
    pool.ahead.begin([1 << 20, 1 << 20], Use.STATE)
    for coming in pool.ahead._coming.values():
        for each in coming:
            each.result()
    assert usage(CPU).host_bytes == before_bytes + (2 << 20)
    del begun
