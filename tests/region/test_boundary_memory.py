"""External memory between a region's forward and its backward: learned in the first step, and then kept free."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Block
from meter import OPTIONS, ROWS, VALUE, WIDTH, Layer, Meter, expected, layers, over, same, train
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import InvariantError
from tencache_fx.optim import AdamW
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.verify import verify_plan
from tencache_fx.region import boundary_memory, budget_check, candidate, environment
from tencache_fx.region.compiled_region import WrittenPlan
from tencache_fx.region.recalibrator import Recalibrator
from tencache_fx.region.registry import REGIONS
from tencache_fx.tensors import storages_on


def test_a_loss_outside_of_the_region_finds_room(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    model, budget = layers(12), 28 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    peaks, gradients = train(meter, run, model)
    assert peaks[0] > budget >= max(peaks[1:])
    record = tencache_fx.regions()[-1]
    assert max(peaks[1:]) >= budget - 2 * VALUE, "no more is away than has to be"
    assert "held between graphs" in tencache_fx.report()
    assert record.plan.transfers
    assert not over(caplog.text)
    assert same(gradients, expected(layers(12)))


def test_a_loss_that_leaves_room_changes_nothing(meter: Meter) -> None:
    model, budget = layers(12), 60 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    peaks, _ = train(meter, run, model)
    assert max(peaks) <= budget
    record = tencache_fx.regions()[-1]
    assert record.problem.boundary_bytes == 0
    assert not record.plan.transfers


def test_a_loss_too_large_is_told_of_once(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    model, budget = layers(12), 18 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    peaks, gradients = train(meter, run, model)
    assert budget < peaks[-1] < peaks[0]
    assert over(caplog.text) == 1
    assert f"cpu holds {peaks[-1]} bytes" in caplog.text
    assert same(gradients, expected(layers(12)))


def test_blocks_compiled_one_by_one_leave_room_for_each_other(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    model, budget = layers(12), 40 * VALUE
    for layer in model:
        layer.compile(backend="tencache", options={**OPTIONS, "device_budget": budget})
    peaks, gradients = train(meter, model, model)
    assert peaks[0] > budget >= max(peaks[1:])
    assert caplog.text.count("planning again") == 1, "the blocks share one region"
    assert not over(caplog.text)
    assert same(gradients, expected(layers(12)))


def test_regions_make_room_for_each_other(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    one, two = layers(8), layers(6)
    budget = 28 * VALUE
    first, second = (
        torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget}) for model in (one, two)
    )
    peaks, gradients = train(meter, lambda x: second(first(x)), nn.ModuleList([one, two]))
    assert peaks[0] > budget >= max(peaks[3:])
    assert not over(caplog.text)
    assert same(gradients, expected(nn.Sequential(layers(8), layers(6))))


def test_a_region_that_would_not_fit_beside_one_that_waits_runs(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    """The second is planned as if the first, which keeps all it may, kept nothing; the next time that makes room."""
    one, two = layers(16), layers(2)
    budget = 26 * VALUE
    first, second = (
        torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget}) for model in (one, two)
    )

    def forward(x: Tensor) -> Tensor:
        wide = first(x)
        return second(torch.cat([wide] * 2))

    peaks, gradients = train(meter, forward, nn.ModuleList([one, two]))
    assert "over the budget this once" in caplog.text
    assert peaks[0] > budget
    assert max(peaks[3:]) < peaks[0] - 4 * VALUE
    assert gradients[0] is not None


def test_no_region_goes_over_what_the_device_has(
    meter: Meter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = layers(8), layers(6)
    budget = 28 * VALUE
    monkeypatch.setattr(budget_check, "most_bytes", lambda device: budget)
    first, second = (
        torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget}) for model in (one, two)
    )
    _, gradients = train(meter, lambda x: second(first(x)), nn.ModuleList([one, two]), steps=3)
    assert "this once" not in caplog.text
    assert same(gradients, expected(nn.Sequential(layers(8), layers(6)), steps=3))


def test_a_forward_whose_backward_never_comes_is_forgotten(meter: Meter) -> None:
    model, budget = layers(12), 28 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    inputs = torch.randn(ROWS, WIDTH)
    for _ in range(5):
        run(inputs)
    peaks, _ = train(meter, run, model)
    assert budget >= max(peaks[1:])
    region = REGIONS.live()[-1]
    assert region.boundary_memory.pending_bytes == 0


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_pause_is_in_the_plan_but_not_in_the_graphs(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = 18 * VALUE
    monkeypatch.setattr(boundary_memory.BoundaryMemory, "review", lambda self, current, sizes: current)
    first = boundary_memory.BoundaryMemory.__init__

    def begin(self: boundary_memory.BoundaryMemory, *args: Any) -> None:
        first(self, *args)
        self.wanted_bytes = wanted

    monkeypatch.setattr(boundary_memory.BoundaryMemory, "__init__", begin)
    torch.compiler.reset()
    model, budget = layers(12), 28 * VALUE
    options = {**OPTIONS, "compiler": compiler, "device_budget": budget, "dump_dir": str(tmp_path)}
    loss = torch.compile(model, backend="tencache", options=options)(torch.ones(ROWS, WIDTH)).square().mean()
    loss.backward()
    record = tencache_fx.regions()[-1]
    assert record.problem.boundary_bytes == wanted
    at = record.problem.boundary
    assert record.problem.ops[at].name == "between_graphs"
    assert live_bytes(record.problem, record.plan.transfers)[at] <= budget
    kept = replace(record.problem, boundary_bytes=0)
    assert live_bytes(kept, record.plan.transfers)[at] <= budget - wanted + VALUE  # the tangent comes then
    with pytest.raises(InvariantError, match="device-budget"):
        verify_plan(replace(record.problem, boundary_bytes=wanted + 4 * VALUE), record.plan)
    assert all("between_graphs" not in str(listing) for listing in record.listings)
    plain = layers(12)
    plain(torch.ones(ROWS, WIDTH)).square().mean().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.compiler.reset()
    tencache_fx.close()


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Let Python collect garbage only when told to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def garbage(meter: Meter, nbytes: int) -> weakref.ref[Any]:
    """Hold so many bytes by a cycle that nobody holds, as torch's compiler holds the inputs it has compiled for."""
    cycle = Layer()
    with meter:
        cycle.held = [cycle, torch.ones(nbytes // 4)]
    return weakref.ref(cycle)


def test_what_only_garbage_holds_is_no_reason_to_plan_anew(
    meter: Meter, by_hand: None, caplog: pytest.LogCaptureFixture
) -> None:
    model, budget = layers(12), 28 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    train(meter, run, model, steps=4)
    before = caplog.text.count("planning again")
    held = garbage(meter, 20 * VALUE)
    peaks, _ = train(meter, run, model, steps=1)
    assert held() is None
    assert peaks[0] <= budget
    assert caplog.text.count("planning again") == before


def test_what_only_garbage_holds_takes_no_room_from_a_plan(meter: Meter, by_hand: None) -> None:
    held = garbage(meter, 20 * VALUE)
    model = layers(12)
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": 28 * VALUE})
    train(meter, run, model, steps=1)
    assert held() is None
    assert tencache_fx.regions()[-1].problem.external_bytes < VALUE


@pytest.mark.parametrize("less_bytes", [0, VALUE // 2, 4 * VALUE])
def test_a_little_more_from_call_to_call_is_no_reason_to_plan_anew(
    less_bytes: int, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens generated, say, in a budget of which something has to be left; what fits is left alone, though."""
    with meter:
        model, inputs, kept = layers(12), torch.randn(ROWS, WIDTH), [torch.ones(VALUE)]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    budget = 1 << 30
    for _ in range(2):
        torch.compiler.reset()
        options = {**OPTIONS, "device_budget": budget}
        run = torch.compile(lambda x: model(x).square().mean(), backend="tencache", options=options)
        run(inputs).backward()
        record = tencache_fx.regions()[-1]
        budget = record.plan.forecast.peak_bytes - less_bytes
    assert bool(record.plan.transfers) == bool(less_bytes)
    if less_bytes:
        assert record.plan.forecast.peak_bytes <= options["device_budget"] * 255 // 256
        for _ in range(10):
            with meter:
                kept.append(torch.ones(512))
            run(inputs).backward()
        assert "planning again" not in caplog.text


@pytest.mark.parametrize("alone", [{"policy": "none"}, {"host_budget": 4096}])
def test_what_fits_needs_no_policy_and_no_host(alone: dict[str, Any], meter: Meter) -> None:
    with meter:
        model, inputs = layers(12), torch.randn(ROWS, WIDTH)
    budget = 1 << 30
    for _ in range(2):
        torch.compiler.reset()
        options = {**OPTIONS, **alone, "device_budget": budget}
        torch.compile(lambda x: model(x).square().mean(), backend="tencache", options=options)(inputs).backward()
        budget = tencache_fx.regions()[-1].plan.forecast.peak_bytes + 512
    assert not tencache_fx.regions()[-1].plan.transfers


def test_a_plan_that_needs_the_whole_budget_has_it(meter: Meter) -> None:
    with meter:
        model, inputs = layers(12), torch.randn(ROWS, WIDTH)
    plans, floor = [], 14 * VALUE
    for _ in range(2):
        torch.compiler.reset()
        options = {**OPTIONS, "device_budget": floor}
        torch.compile(lambda x: model(x).square().mean(), backend="tencache", options=options)(inputs).backward()
        plans.append(tencache_fx.regions()[-1].plan)
        floor = plans[0].forecast.floor_bytes
    assert plans[0].forecast.peak_bytes <= 14 * VALUE * 255 // 256
    assert floor * 255 // 256 < plans[1].forecast.peak_bytes <= floor


def test_what_has_no_storage_is_no_matter(meter: Meter) -> None:
    """A sparse result, say: it has none that could be looked at."""
    where, what = torch.tensor([[0, 2]]), torch.ones(2, WIDTH, requires_grad=True)

    def scatter(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(where, values * 2, (4, WIDTH))

    monitor = boundary_memory.BoundaryMemory(0, torch.device("cpu"), 1 << 30)
    watched = monitor.instrument("forward", scatter, WrittenPlan())
    assert torch.equal(watched(what).to_dense()[2], torch.full((WIDTH,), 2.0))


@pytest.mark.parametrize("short", [{"policy": "none"}, {"host_budget": 2 * VALUE}])
def test_what_cannot_leave_stays_and_training_goes_on(
    short: dict[str, Any], meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    model, budget = layers(12), 28 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget, **short})
    peaks, gradients = train(meter, run, model)
    assert peaks[-1] > budget
    assert over(caplog.text) == 1
    assert same(gradients, expected(layers(12)))


def test_a_region_that_cannot_be_planned_anew_stays_as_it_was(
    meter: Meter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(capture: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(candidate, "write_pause", fail)
    model, budget = layers(12), 30 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    train(meter, run, model, steps=1)
    region = REGIONS.live()[-1]
    before = region.current
    _, gradients = train(meter, run, model)
    assert caplog.text.count("stays as it was: RuntimeError: a bug") == 1
    assert region.current is before
    assert same(gradients, expected(layers(12)))


def test_blocks_that_keep_too_much_in_the_first_step_do_not_stop_it(meter: Meter) -> None:
    """A plan that keeps its least changes nothing for the forwards before it, which keep more until this step ends."""
    model, budget = layers(24), 40 * VALUE
    for layer in model:
        layer.compile(backend="tencache", options={**OPTIONS, "device_budget": budget})
    peaks, gradients = train(meter, model, model, steps=3)
    assert peaks[-1] < peaks[0]
    assert same(gradients, expected(layers(24), steps=3))


def test_a_forward_that_is_kept_for_good_is_taken_as_held(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    budget = 29 * VALUE
    options = {**OPTIONS, "device_budget": budget}
    kept, run = (torch.compile(layers(count), backend="tencache", options=options) for count in (10, 8))
    inputs = torch.randn(ROWS, WIDTH)
    features = kept(inputs)
    for _ in range(boundary_memory._PRESSES + 2):
        meter.peak = meter.held
        run(inputs).mean().backward()
    assert meter.peak <= budget
    assert caplog.text.count("this once") == boundary_memory._PRESSES
    assert features.grad_fn is not None


def test_what_other_compilers_take_is_not_learned(meter: Meter) -> None:
    model, budget = layers(12), 60 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})

    def compile_wastefully(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        meter.peak = max(meter.peak, meter.held + 2 * budget)
        return gm

    run(torch.ones(ROWS, WIDTH)).mean().backward()
    loss = torch.compile(lambda result: result.square().mean(), backend=compile_wastefully)
    for _ in range(3):
        loss(run(torch.ones(ROWS, WIDTH))).backward()
    assert REGIONS.live()[-1].boundary_memory.wanted_bytes == 0


def test_room_is_made_before_a_plan_without_it_is_timed(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with more room is slower than its rival without, which would go on instead, and nobody would ask again."""
    model, budget = layers(12), 28 * VALUE
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    learned = []
    monkeypatch.setattr(Recalibrator, "_assess", lambda self, *measured: learned.append(measured))
    train(meter, run, model, steps=1)
    region = REGIONS.live()[-1]
    assert isinstance(region.boundary_memory.review(region.current, ()), str)
    region.current = replace(region.current, clock=SimpleNamespace(times=lambda: 1, stop=lambda: None))
    run(torch.ones(ROWS, WIDTH))
    assert not learned
    assert region.record.problem.boundary_bytes


def test_a_region_that_returns_a_sparse_tensor_runs() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * 2), torch.sparse_coo_tensor(torch.arange(8)[None], x[:8, 0], (16,))

    seen = storages_on(torch.device("cpu"), (forward(torch.ones(8, 8)),))
    assert len(seen) == 1


def test_learned_durations_hold_with_a_pause_and_without(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def remember(*args: Any, **kwargs: Any) -> Any:
        found.append(analyze(*args, **kwargs))
        return found[-1]

    analyze = candidate.analyze
    monkeypatch.setattr(candidate, "analyze", remember)
    model, budget = layers(12), 28 * VALUE
    run, keys = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget}), []
    for _ in range(3):
        train(meter, run, model, steps=1)
        keys.append(REGIONS.live()[-1].current.correction_key)
    assert [sum(op.name == "between_graphs" for op in each.ops) for each in found] == [0, 1]
    assert keys[0] == keys[-1]


@pytest.mark.parametrize("wide", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_offloaded_parameters_make_room_as_well(wide: int, meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    """What the first plan keeps between the graphs are activations, and parameters that are on their way by then."""
    hidden, budget = 256, 34 * 2 * 256 * 256
    torch.manual_seed(0)
    model = tencache_fx.offload(nn.Sequential(*(Block(hidden) for _ in range(16))).bfloat16(), "cpu")
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget})
    optimizer = AdamW(model.parameters(), lr=1e-3)
    peaks = []
    for _ in range(4):
        meter.peak = meter.held
        result = run(torch.ones(hidden, hidden, dtype=torch.bfloat16))
        with meter:
            (result.float().repeat(1, wide) - 1).square().mean().backward()
        del result
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(meter.peak)
    assert "stays as it was" not in caplog.text
    assert tencache_fx.regions()[-1].problem.boundary_bytes
    assert peaks[0] > budget
    assert (max(peaks[1:]) <= budget) == (wide == 2), "four of them are more by themselves"
    assert over(caplog.text) == (wide == 4)


def trained(meter: Meter, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> list[float]:
    """Train within a budget; parameters, gradients and state count, too."""
    torch.manual_seed(0)
    with meter:
        model = nn.Sequential(*(Layer() for _ in range(12)))
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    run = torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": 20 * VALUE})
    inputs, losses = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)), []
    for _ in range(4):
        loss = run(inputs).sum()
        with meter:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("optimizer_class", "options"), [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})]
)
def test_state_that_is_to_come_has_room_from_the_first_step_on(
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
    meter: Meter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = trained(meter, optimizer_class, **options)
    assert tencache_fx.regions()[-1].plan.transfers
    often = caplog.text.count("planning again")
    monkeypatch.setattr(environment, "expected_state_bytes", lambda device: 0)
    torch.compiler.reset()
    caplog.clear()
    assert trained(meter, optimizer_class, **options) == losses
    assert caplog.text.count("planning again") > often
