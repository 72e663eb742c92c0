"""A second start takes whole regions, plans and code, from AOTAutograd's cache, or compiles them as if it had none."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundle, TritonKernelArtifacts
from torch.compiler._cache import CacheArtifactManager

import tencache_fx
from tencache_fx import compat, options
from tencache_fx.errors import InvariantError
from tencache_fx.hardware.capacity import Space
from tencache_fx.kept_code import without_loaded
from tencache_fx.planning.recalibration import Correction, Scales
from tencache_fx.region import kept_region, lowering
from tencache_fx.region.candidate import RegionPlanner
from tencache_fx.region.compilation import Compilation
from tencache_fx.region.dynamic_shapes import Footprint
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime import engine_registry

OPTIONS = {"device_budget": "1.1MB", "calibrate": False, "scope": "region", "host_budget": "64MB"}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


@pytest.fixture(autouse=True)
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let regions be kept, in a folder of this test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with CacheArtifactManager.with_fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield tmp_path / "inductor" / "aotautograd"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., "Start"]:
    """Return a function that trains a step as a process does that begins."""

    def begin(model: nn.Module | None = None, rows: int = 512, steps: int = 1, **options: Any) -> Start:
        return Start(monkeypatch, model or Tower(), rows, steps, options)

    return begin


class Start:
    """What a process does that begins, and trains `steps`: it has compiled a region, or has `found` it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, model: nn.Module, rows: int, steps: int, options: dict[str, Any]
    ) -> None:
        tencache_fx.close()
        torch.compiler.reset()
        counters.clear()
        monkeypatch.setattr(engine_registry, "_REGISTRY", engine_registry.Registry())
        self.split = 0
        dynamic = options.pop("dynamic", None)
        partition = Compilation.partition

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.split += 1
            return partition(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Compilation, "partition", counted)
            self.run = torch.compile(model, backend="tencache", options={**OPTIONS, **options}, dynamic=dynamic)
            self.losses = []
            for _ in range(steps):
                model.zero_grad()
                device = next(model.parameters()).device
                loss = self.run(torch.linspace(-1, 1, rows * 64, device=device).view(rows, 64))
                if loss.requires_grad:
                    loss.backward()
                self.losses.append(loss.detach())
        self.gradients = [each.grad for each in model.parameters()]
        self.region = REGIONS.live()[-1]
        self.stats = tencache_fx.stats()
        self.step = next(iter(tencache_fx.steps()), None)
        self.found = counters["aot_autograd"]["autograd_cache_hit"]
        self.code_found = counters["inductor"]["fxgraph_cache_hit"]
        self.written = counters["aot_autograd"]["autograd_cache_saved"]


def entry(cached: Path) -> Path:
    (path,) = (path for path in cached.rglob("*") if path.is_file())
    return path


def test_a_pass_over_the_joint_graph_is_run_in_each_start(hollow_kernels: None, start: Any) -> None:
    passed: list[str] = []

    def by(name: str) -> Callable[[Any, object], Any]:
        return lambda gm, inputs: passed.append(name) or gm

    for name in ("first", "second"):
        with functorch_config.patch(joint_custom_pass=by(name)):
            start()
    without = start()
    assert passed == ["first", "second"]
    assert (without.split, without.found) == (1, 0)


def test_a_second_start_compiles_nothing_and_has_the_same_region(hollow_kernels: None, start: Any) -> None:
    first, second = start(), start()
    assert (first.split, first.found) == (1, 0)
    assert (second.split, second.found) == (0, 1)
    was, now = first.region.current, second.region.current
    assert was.record.plan.transfers
    assert now.record.plan == was.record.plan
    assert now.record.problem == was.record.problem
    assert now.record.listings == was.record.listings
    assert now.record.code_peak_bytes == was.record.code_peak_bytes
    assert now.record.region == second.region.index
    assert now.placement == was.placement
    assert now.footprint.at(()) == was.footprint.at(())
    assert second.stats["offloads"] == first.stats["offloads"] > 0
    assert "1 of 1 whole regions" in tencache_fx.report().splitlines()[-1]


def test_numbers_are_the_same_to_the_bit(start: Any) -> None:
    first, second = start(steps=2), start(steps=2)
    assert second.found
    assert second.stats["offloads"]
    assert torch.equal(torch.stack(second.losses), torch.stack(first.losses))
    assert all(map(torch.equal, second.gradients, first.gradients))


def test_what_was_asked_for_otherwise_is_compiled(hollow_kernels: None, start: Any) -> None:
    start()
    for changed in (
        {"device_budget": "1.2MB"},
        {"policy": "teraio"},
        {"recompute": "none"},
        {"host_budget": "8MB"},
        {"rows": 480},
    ):
        assert start(**changed).split, changed
    assert not start().split


def test_another_version_of_this_package_compiles(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr(kept_region, "digest_sources", lambda *folders: "other")
    assert start().split


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other"])
def test_a_damaged_entry_is_not_used(
    hollow_kernels: None, start: Any, cached: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, path = start(), entry(cached)
    content = bytearray(path.read_bytes())
    at = content.index(b"tencache_fx.planning.plan") + 100
    content[at] ^= 1
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "flipped": bytes(content), "other": b"x" * 100}
    path.write_bytes(damaged[damage])
    second = start()
    assert (second.split, second.found) == (1, 0)
    assert second.region.record.plan == first.region.record.plan


def test_a_region_is_compiled_again_for_a_plan_that_breaks_a_rule(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    with monkeypatch.context() as patch:
        patch.setattr(lowering, "verify_plan", _once(lowering.verify_plan))
        second = start()
    assert second.split
    assert "has no right plan" in caplog.text
    assert second.stats["offloads"]


def _once(check: Callable[..., None]) -> Callable[..., None]:
    """Return a check that refuses what it is given first."""
    refused = []

    def refuse(*checked: object) -> None:
        if not refused:
            refused.append(checked)
            raise InvariantError("the plan is wrong.")
        check(*checked)

    return refuse


def test_a_region_is_planned_again_where_less_memory_is_free(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key says so as well; not where torch's estimate of a graph is too low."""
    monkeypatch.setattr(RegionPlanner, "facts", lambda self, bound_bytes: ())
    start()
    assert start(host_budget="2MB").split


@pytest.mark.parametrize(("free_bytes", "split"), [(9_900_000, 0), (8_000_000, 1)])
def test_a_little_more_or_less_free_memory_compiles_nothing(
    hollow_kernels: None,
    start: Any,
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    split: int,
) -> None:
    """A region of which torch cannot say that it is far smaller than the host's memory."""
    for available_bytes in (10_000_000, free_bytes):
        space = Space(total_bytes=20_000_000, available_bytes=available_bytes)
        monkeypatch.setattr(options, "host_space", lambda space=space: space)
        found = start(host_budget="auto")
    assert found.split == split


def test_graphs_call_the_engine_that_there_is(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_region, "expected_indices", lambda device: (0, 1))
    start()
    as_ever = engine_registry.Registry.__init__

    def later(self: engine_registry.Registry) -> None:
        as_ever(self)
        self._count = 5

    monkeypatch.setattr(engine_registry.Registry, "__init__", later)
    second = start()
    assert second.split
    assert second.stats["offloads"]


def test_a_forecast_that_was_corrected_has_the_same_plan(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other plan was better: there is no reason to make one."""
    slower = Correction(scales=Scales(forward=2.0, backward=2.0), pays=False)
    monkeypatch.setattr("tencache_fx.region.recalibrator.reconsider", lambda *measured: slower)
    first, second = start(steps=12, calibrate=True), start(calibrate=True)
    assert second.found
    assert second.region.record.plan.transfers == first.region.record.plan.transfers
    assert second.region.record.plan.forecast == first.region.record.plan.forecast


def test_a_lesson_that_pays_is_heeded_once(hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = [Correction(scales=Scales(forward=4.0, backward=4.0), pays=True)]
    monkeypatch.setattr(
        "tencache_fx.region.recalibrator.reconsider", lambda *measured: lessons.pop() if lessons else None
    )
    assert start(steps=12, calibrate=True).split == 2
    second, third = start(calibrate=True), start(calibrate=True)
    assert second.split
    assert third.found
    assert third.region.record.problem == second.region.record.problem


def test_a_region_of_a_step_is_found(hollow_kernels: None, start: Any) -> None:
    first, second = start(scope="step", steps=3), start(scope="step", steps=3)
    assert second.found
    assert second.region.in_steps
    was, now = first.region.current.swap_region, second.region.current.swap_region
    assert (now.problem, now.transfers, now.points, now.margins) == (
        was.problem,
        was.transfers,
        was.points,
        was.margins,
    )
    assert second.step.plan.forecast == first.step.plan.forecast
    assert second.stats["offloads"] == first.stats["offloads"] > 0


def test_a_region_with_offloaded_parameters_is_found(hollow_kernels: None, start: Any) -> None:
    first, second = (start(model=tencache_fx.offload(Tower(), "cpu"), device_budget="1MB") for _ in range(2))
    assert second.found
    assert second.region.current.placement == first.region.current.placement
    assert second.stats["d2h_bytes"] == first.stats["d2h_bytes"] > 0
    assert start().split, "nothing is offloaded"


def test_a_region_without_a_backward_is_found(hollow_kernels: None, start: Any) -> None:
    with torch.no_grad():
        first, second = start(), start()
    assert second.found
    assert second.region.record.plan == first.region.record.plan


def test_what_is_precompiled_for_others_has_nothing_of_ours(hollow_kernels: None, start: Any, cached: Path) -> None:
    with functorch_config.patch(bundled_autograd_cache=True):
        start()
    assert not cached.exists()


def test_sizes_are_read_from_the_inputs_again(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(dynamic=True), start(dynamic=True)
    assert not second.split
    was, now = first.region.current.footprint, second.region.current.footprint
    assert 512 in now.formulas.planned
    for times in (1, 2):
        larger = tuple(times * size for size in now.formulas.planned)
        assert now.at(larger) == was.at(larger)
    seen, look_up = [], Footprint.at
    with monkeypatch.context() as patch:
        patch.setattr(Footprint, "at", lambda self, sizes: seen.append(sizes) or look_up(self, sizes))
        second.run(torch.ones(300, 64))
    assert 300 in seen[0], "its sizes are read from the inputs as before"
    assert start(dynamic=True, rows=400).split, "it is planned for other sizes"


def test_regions_go_with_torchs_artifacts(
    hollow_kernels: None, start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start()
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert start().split
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    torch.compiler.load_cache_artifacts(saved[0])
    assert not start().split


def test_a_region_without_a_budget_is_compiled_as_ever(hollow_kernels: None, start: Any, cached: Path) -> None:
    start(device_budget=None)
    assert start(device_budget=None).split
    assert not cached.exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_an_entry_of_which_only_a_part_could_be_read_is_no_hit(monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:  # noqa: FBT001
    """Torch has read the forward's code, not the backward's, and compiles: what was read is of another compilation."""
    graph = torch.fx.symbolic_trace(nn.Identity())
    options = SimpleNamespace(compiler="inductor", device_budget=1)
    source: Any = SimpleNamespace(graph=graph, options=options, settings={})
    lowers: Any = SimpleNamespace(lower=lambda *_, **__: "new code")
    code: Any = object()

    def compile_inductor(gm: torch.fx.GraphModule, inputs: Any, *, lower: Callable[..., object], **_: Any) -> Any:
        if damaged:
            lower(gm, inputs, None, phase="backward")
        return "function", [code]

    monkeypatch.setattr(compat, "compile_inductor", compile_inductor)
    taken: list[object] = []

    def take_up(codes: list[Any]) -> bool:
        taken.extend(codes)
        return True

    planner: Any = None
    compilation = Compilation(source, planner, {}, frozenset(), lowers)
    keeper: Any = SimpleNamespace(take_up=take_up, foresee=bool)
    assert compilation.run([], "key", keeper) == "function"
    assert taken == ([] if damaged else [code])


@pytest.mark.gpu
def test_code_from_inductors_cache_is_kept(start: Any) -> None:
    """Triton's kernels are launched by objects of the cache's entry, which cannot be written again as they are."""

    def begin(device_budget: str) -> tuple[tuple[int, int, int], float]:
        begun = start(Tower().cuda(), device_budget=device_budget)
        found = (begun.found, begun.code_found, begun.written), begun.losses[0].item()
        del begun  # what it holds on the device would tell the next start from this one
        gc.collect()
        return found

    (first, loss), (second, _) = begin("8GB"), begin("9GB")
    assert first == (0, 0, 1)
    assert second == (0, 2, 1)
    assert begin("9GB") == ((1, 0, 0), loss)


@pytest.mark.parametrize("found", [True, False])
def test_kernels_that_are_loaded_are_written_as_inductors_cache_has_them(
    monkeypatch: pytest.MonkeyPatch,
    found: bool,  # noqa: FBT001
) -> None:
    kernels = [SimpleNamespace(launchers=launchers) for launchers in ([], [object()])]
    autotuners = [StaticallyLaunchedAutotuner(str(at), "kernel", kernel) for at, kernel in enumerate(kernels)]
    bundle = TritonBundle([TritonKernelArtifacts("hash", 0, [])], autotuners)
    before = TritonBundle(bundle.kernel_artifacts, [replace(each, kernel="unloaded") for each in autotuners])
    entries = [("other code", bundle), ("code", None), ("code", before)] if found else []

    def candidates(local: bool, remote: object, key: str) -> list[tuple[Any, bytes, bool]]:  # noqa: FBT001
        assert (local, remote, key) == (True, None, "key")
        return [(SimpleNamespace(source_code=code, _triton_bundle=each), b"", True) for code, each in entries]

    monkeypatch.setattr(FxGraphCache, "iterate_over_candidates", candidates)
    code: Any = SimpleNamespace(source_code="code", _triton_bundle=bundle, _fx_graph_cache_key="key")
    written = without_loaded(code)
    assert written is not None
    assert written.kernel_artifacts == bundle.kernel_artifacts
    assert written.static_autotuners == (before.static_autotuners if found else autotuners[:1])
    assert bundle.static_autotuners == autotuners  # this process goes on with it
    code._fx_graph_cache_key = None
    assert without_loaded(code).static_autotuners == autotuners[:1]
    code._triton_bundle = None
    assert without_loaded(code) is None


def test_code_that_is_kept_is_in_inductors_cache_by_its_key(
    hollow_kernels: None, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    """What `without_loaded` reads there."""
    codes: list[Any] = []
    monkeypatch.setattr("tencache_fx.kept_code.without_loaded", codes.append)
    start()
    assert len(codes) == 2
    for code in codes:
        found = FxGraphCache.iterate_over_candidates(True, None, code._fx_graph_cache_key)
        assert [graph.source_code for graph, *_ in found] == [code.source_code]
