"""Regions of one step planned together: blocks compiled one by one stay within the budget, and compile once."""

import gc
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import Block, faulty_engine
from meter import Meter
from torch import Tensor, nn
from torch.nn import functional as F

import tencache_fx
from tencache_fx.errors import BudgetError, OptionError, UsageError
from tencache_fx.kept_code import Phase
from tencache_fx.passes import costs
from tencache_fx.passes.op_kinds import count_flops
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Tier
from tencache_fx.planning.step import FRUGAL
from tencache_fx.region.compiled_region import Compiled, CompiledRegion, WrittenPlan, keep_boxed
from tencache_fx.region.region import Region
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_calls import Call
from tencache_fx.region.step_monitor import StepMonitor
from tencache_fx.region.step_recorder import StepRecorder, recorder_of
from tencache_fx.reporting.dump import read_steps
from tencache_fx.reporting.step_tables import list_step
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points

WIDTH, ROWS, DEPTH = 64, 512, 8
BUDGETS = {"plenty": 1 << 30, "some": 6_200_000, "little": 5_100_000}


def blocks(depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 4) for _ in range(depth)))


def inputs(seed: int = 1, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_by_one(model: nn.Sequential, backend: str = "tencache", **options: object) -> nn.Sequential:
    given = {"compiler": "eager", "calibrate": False, "scope": "step", "host_budget": 1 << 28, **options}
    for block in model:
        block.compile(backend=backend, **({"options": given} if backend == "tencache" else {}))
    return model


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    run(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def wanted(steps: int = 1) -> list[list[Tensor]]:
    """Return the gradients of steps without a budget, by the same decompositions."""
    model = one_by_one(blocks(), "aot_eager_decomp_partition")
    found = [gradients(model, model, inputs(seed)) for seed in range(steps)]
    torch.compiler.reset()
    return found


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Count what compiled graphs make, and what stays of it."""
    found, instrument = Meter(), StepMonitor.instrument

    def metered(self: StepMonitor, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        def run_metered(*args: object) -> object:
            with found:
                return run(*args)

        return instrument(self, phase, keep_boxed(run, run_metered), written)

    monkeypatch.setattr(StepMonitor, "instrument", metered)
    return found


def recorder(engine: Engine) -> StepRecorder:
    return recorder_of(swap_points(engine))


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_are_equal_bit_for_bit(engine: Engine, budget: str) -> None:
    expected, model = wanted(4), one_by_one(blocks(), device_budget=BUDGETS[budget])
    for step, each in enumerate(expected):
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
    (program,) = recorder(engine).programs.values()
    assert program.planned is not None
    assert program.planned.plan is not None
    assert bool(program.planned.plan.transfers) == (budget != "plenty")
    assert program.schedule is not FRUGAL


def test_every_step_is_within_the_budget_the_first_included(engine: Engine, meter: Meter) -> None:
    plain = one_by_one(blocks(), device_budget=BUDGETS["plenty"])
    with meter:
        plain_inputs = inputs()
    for _ in range(3):
        meter.peak = meter.held
        with meter:
            gradients(plain, plain, plain_inputs)
    most_bytes = meter.peak
    del plain
    torch.compiler.reset()
    gc.collect()
    budget = int(0.6 * most_bytes)
    model, peaks = one_by_one(blocks(), device_budget=budget), []
    for step in range(5):
        meter.peak = meter.held
        gradients(model, model, inputs(step))
        peaks.append(meter.peak)
    assert max(peaks) <= budget, (peaks, budget, most_bytes)
    assert min(peaks[2:]) >= 0.8 * budget, (peaks, budget)


@pytest.mark.usefixtures("hollow_kernels")
def test_generated_code_is_followed_behind_each_runtime_op(engine: Engine) -> None:
    """Where it holds more than the graphs show: Inductor does not write a sum over the product that is added to."""
    before = set(REGIONS.live())
    model = one_by_one(blocks(2), device_budget=BUDGETS["some"], compiler="inductor")
    gradients(model, model, inputs())
    regions = [current(each).swap_region for each in REGIONS.live() if each not in before]
    assert regions
    for region in regions:
        assert region is not None
        assert [len(margins) for margins in region.margins] == [1 + len(points) for points in region.points]
        assert max(region.margins[0]) == 4 * ROWS * WIDTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_what_a_backward_begins_to_read_may_leave_between_the_graphs(engine: Engine, compiler: str) -> None:
    """No heavy op is between its uses, but other regions are; Inductor could write over it in the backward."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer() for _ in range(4)))

    before = set(REGIONS.live())
    plain = one_by_one(layers(), "aot_eager_decomp_partition" if compiler == "eager" else "inductor")
    model = one_by_one(layers(), device_budget=BUDGETS["some"], compiler=compiler)
    for step in range(4):
        expected, found = (gradients(each, each, inputs(step)) for each in (plain, model))
        assert equal(found, expected), step
    regions = [current(each).swap_region for each in REGIONS.live() if each not in before]
    assert regions
    for region in regions:
        assert region is not None
        assert region.pending_bytes == 0


@pytest.mark.usefixtures("hollow_kernels")
def test_what_a_loss_is_of_is_written_over_at_once(engine: Engine) -> None:
    """Its backward comes next: nothing is between, and what has left would be there beside its gradient."""
    head = nn.Linear(WIDTH, WIDTH)
    options = {"device_budget": BUDGETS["some"], "scope": "step", "compiler": "inductor"}
    loss = torch.compile(lambda x: F.gelu(head(x)).mean(), backend="tencache", options=options)
    before = set(REGIONS.live())
    loss(inputs()).backward()
    (region,) = (current(each).swap_region for each in REGIONS.live() if each not in before)
    assert region is not None
    assert region.pending_bytes == 4 * ROWS * WIDTH


@pytest.mark.usefixtures("hollow_kernels")
def test_what_kernels_are_taken_to_allocate_is_held_beside_what_generated_code_shows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate of what nobody has measured."""
    peaks, activation_bytes = [], 4 * ROWS * WIDTH
    for nbytes in (0, 16 * activation_bytes):
        monkeypatch.setattr(costs, "_scratch_bytes", lambda node, nbytes=nbytes, **_: nbytes * bool(count_flops(node)))
        before = set(REGIONS.live())
        model = one_by_one(blocks(2), device_budget=BUDGETS["some"], compiler="inductor")
        gradients(model, model, inputs())
        regions = [current(each).swap_region for each in REGIONS.live() if each not in before]
        peaks.append([int(own.max()) for region in regions if region is not None for own in region.own_bytes])
        torch.compiler.reset()
    assert peaks[0]
    for without, peak_bytes in zip(*peaks, strict=True):  # where it is held, less may be held otherwise
        assert peak_bytes >= without + 12 * activation_bytes


@torch._dynamo.config.patch(recompile_limit=64)  # all of these models share one code object
def test_numbers_are_right_under_every_order(engine: Engine) -> None:
    """Accumulation, an evaluation between, two models in turns, a graph that is dropped: programs recur."""
    first, second = one_by_one(blocks(), device_budget=12_000_000), one_by_one(blocks(4), device_budget=1 << 23)
    plain = one_by_one(blocks(), "aot_eager_decomp_partition"), one_by_one(blocks(4), "aot_eager_decomp_partition")

    def cycle(one: nn.Module, other: nn.Module) -> list[list[Tensor]]:
        found = []
        for model in (one, other, one):
            model.zero_grad(set_to_none=True)
            for part in range(3):
                model(inputs(part)).square().mean().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
            with torch.no_grad():
                found.append([model(inputs(9))])
            model(inputs(5))  # no backward comes
            (one(inputs(6)).mean() + one(inputs(7)).square().mean()).backward()
            found.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
        return found

    expected = [cycle(*plain) for _ in range(5)]
    compiled = []
    for wanted_now in expected:
        assert all(map(equal, cycle(first, second), wanted_now))
        compiled.append(REGIONS.compilations)
    assert compiled[-1] == compiled[2], "no compilation after the third cycle"
    assert recorder(engine).programs


@pytest.mark.parametrize("where", ["forward", "loss", "backward", "dropped"])
def test_the_step_after_a_failure_is_right(engine: Engine, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            if where == "loss":
                raise RuntimeError("asked for")
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradient: Tensor) -> Tensor:
            if where == "backward":
                raise RuntimeError("asked for")
            return gradient[0]

    expected, model = wanted(5), one_by_one(blocks(), device_budget=BUDGETS["some"])
    for step, each in enumerate(expected):
        if step in (1, 3):
            middle = list(model)[4].register_forward_hook(_raise) if where == "forward" else None
            if where == "dropped":
                model(inputs())
            else:
                with pytest.raises(RuntimeError, match="asked for"):
                    Fails.apply(model(inputs())).sum().backward()
            if middle is not None:
                middle.remove()
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
    assert recorder(engine).points.extra_bytes == 0
    assert any(program.schedule is not FRUGAL for program in recorder(engine).programs.values())


def _raise(*_: object) -> None:
    raise RuntimeError("asked for")


def test_a_backward_may_only_hand_on_its_gradient(engine: Engine) -> None:
    """That of a sum has no step: what it is given is in no step of its plan."""

    def run(backend: str, **options: object) -> list[list[Tensor]]:
        model = one_by_one(blocks(2), backend, **options)
        given = {"compiler": "eager", "calibrate": False, "scope": "step", **options}
        more = {"options": given} if backend == "tencache" else {}
        add = torch.compile(lambda x, y: x + y, backend=backend, **more)
        return [gradients(model, lambda x: add(x, model[1](model[0](x))), inputs(seed)) for seed in range(3)]

    found = run("tencache", device_budget=4_200_000)
    records = [each for each in tencache_fx.regions() if len(each.problem.ops) == each.problem.boundary]
    assert records, "no backward without a step"
    torch.compiler.reset()
    for mine, other in zip(found, run("aot_eager_decomp_partition"), strict=True):
        assert equal(mine, other)


def test_inputs_that_the_caller_keeps_are_not_written_to(engine: Engine) -> None:
    model, kept = one_by_one(blocks(), device_budget=BUDGETS["some"]), []

    def run(x: Tensor) -> Tensor:
        kept.clear()
        for block in model:
            kept.append(x)
            x = block(x)
        return x

    for step, each in enumerate(wanted(4)):
        assert equal(gradients(model, run, inputs(step)), each)
        again = inputs(step)
        for block, given in zip(model, kept, strict=True):
            torch.testing.assert_close(given, again, rtol=1e-5, atol=1e-5)
            again = block(again).detach()
    assert recorder(engine).points.shared


def test_what_was_modified_in_place_is_refused(engine: Engine) -> None:
    model = one_by_one(blocks(), device_budget=BUDGETS["plenty"])
    gradients(model, model, inputs())
    gradients(model, model, inputs())
    result, hidden = inputs(), []
    for block in model:
        hidden.append(result)
        result = block(result)
    with torch.no_grad():
        hidden[3].add_(1)
    with pytest.raises((UsageError, RuntimeError), match="modified"):
        result.sum().backward()


def test_a_budget_below_what_any_schedule_needs_is_refused_at_once(engine: Engine) -> None:
    model = one_by_one(blocks(), device_budget=2_000_000)
    with pytest.raises(BudgetError, match=r"region \d+, call 0 of the step, needs .* the budget is 2 MB"):
        gradients(model, model, inputs())


def test_a_step_that_needs_all_of_the_budget_has_a_plan(engine: Engine) -> None:
    """What plans leave free for drift is left where there is room for it."""
    model = one_by_one(blocks(), device_budget=BUDGETS["some"], recompute="none")
    gradients(model, model, inputs())
    gradients(model, model, inputs())
    least = floor_bytes(tencache_fx.steps()[-1].problem)
    torch.compiler.reset()
    model = one_by_one(blocks(), device_budget=least, recompute="none")
    for step in range(3):
        gradients(model, model, inputs(step))
    (record,) = tencache_fx.steps()
    assert least - least // 256 < record.plan.forecast.peak_bytes <= least


def test_nothing_is_left_behind(engine: Engine) -> None:
    model = one_by_one(blocks(), device_budget=BUDGETS["little"])
    for step in range(3):
        gradients(model, model, inputs(step))
    points = recorder(engine).points
    assert points.extra_bytes == 0
    assert points.in_use == 0


def test_steps_are_reported(engine: Engine) -> None:
    assert tencache_fx.steps() == ()
    model = one_by_one(blocks(), device_budget=BUDGETS["some"])
    for step in range(3):
        gradients(model, model, inputs(step))
    (record,) = tencache_fx.steps()
    assert len(record.runs) == 2 * DEPTH
    assert str(record.runs[DEPTH - 1]).replace("forward", "backward") == str(record.runs[DEPTH])
    assert record.plan.transfers
    (program,) = recorder(engine).programs.values()
    assert record.schedule == program.schedule
    report, first = tencache_fx.report(), record.runs[0].region
    assert "It is planned with the step that it is in" in report
    assert "\na step on cpu, 8 calls of 2 regions:\n" in report
    assert f"  region {first}: forward (harness.py:" in report
    assert f"\nbackward {first + 1}.{DEPTH - 2} to {first + 1}.0  " in report
    leaving = record.plan.transfers[0].name
    told = tencache_fx.explain(tensor=leaving)
    assert f"{leaving}, of forward {leaving.split(':')[0]}, forward (harness.py:" in told
    assert "goes to host, freed at " in told
    assert tencache_fx.explain(step=0, most=1).startswith("a step on cpu")
    place = [each.region for each in tencache_fx.regions()].index(first)
    assert tencache_fx.explain(place, most=1).startswith(f"region {first} ")
    with pytest.raises(OptionError, match="no step 1: 1 are live"):
        tencache_fx.explain(step=1)


def test_steps_are_dumped_as_they_are_planned(engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump_dir = tmp_path / "dumped"
    model = one_by_one(blocks(), device_budget=BUDGETS["some"], dump_dir=dump_dir)
    for _ in range(3):  # the shorter step runs by the plan of the longer one until it recurs
        gradients(model, model, inputs())
        gradients(model, model[:4], inputs())
    found = read_steps(dump_dir)
    assert sorted(found) == [0, 1]
    assert list(found.values()) == sorted(tencache_fx.steps(), key=lambda record: -len(record.runs))
    listed = (dump_dir / "step-000" / "schedule.txt").read_text()
    assert listed == list_step(found[0]) + "\n"
    assert len(re.findall(r"^(?:for|back)ward", listed, re.MULTILINE)) == 2 * DEPTH
    shutil.rmtree(dump_dir)
    dump_dir.touch()
    for _ in range(3):
        gradients(model, model[:2], inputs())
        gradients(model, model, inputs())
    assert "cannot be written to" in caplog.text


def test_lengths_may_change_from_step_to_step(engine: Engine) -> None:
    plain, model = one_by_one(blocks(), "aot_eager_decomp_partition"), one_by_one(blocks(), device_budget=7_000_000)
    lengths = [512, 512, 384, 512, 448, 384, 512, 448, 384]
    expected = [gradients(plain, plain, inputs(step, rows)) for step, rows in enumerate(lengths)]
    for step, rows in enumerate(lengths):
        assert equal(gradients(model, model, inputs(step, rows)), expected[step]), (step, rows)
    assert any(program.schedule is not FRUGAL for program in recorder(engine).programs.values())


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="while torch 2.11 traces in one thread, nn.Module.__call__ is patched for all"
)
def test_three_threads_train_at_once(engine: Engine) -> None:
    expected = wanted(4)
    models = [one_by_one(blocks(), device_budget=16_000_000) for _ in range(3)]
    gradients(models[0], models[0], inputs())
    found: dict[int, list[bool]] = {}

    def work(number: int) -> None:
        model = models[number]
        found[number] = [equal(gradients(model, model, inputs(step)), each) for step, each in enumerate(expected)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), [True] * 4)


def test_what_host_memory_cannot_hold_goes_to_disk(tmp_path: Path) -> None:
    expected = wanted(4)
    options = {"host_budget": 4_000_000, "spill_dir": tmp_path, "spill_budget": 1 << 26}
    model = one_by_one(blocks(), device_budget=BUDGETS["little"], **options)
    for step, each in enumerate(expected):
        assert equal(gradients(model, model, inputs(step)), each), f"step {step}"
    assert tencache_fx.stats()["disk_read_bytes"] > 0
    assert any(each.tier is Tier.NVME for each in tencache_fx.steps()[-1].plan.transfers)


def test_a_region_that_saves_nothing_may_need_more_at_other_lengths(engine: Engine, meter: Meter) -> None:
    """Its backward needs nothing of it, and so it moves nothing; its plan is of its lengths all the same."""
    budget, model = 8_000_000, one_by_one(blocks(), device_budget=8_000_000)
    options = {"compiler": "eager", "calibrate": False, "scope": "step", "host_budget": 1 << 28}
    pool = torch.compile(
        lambda x: torch.cat([x] * 8).mul(2).sum(), backend="tencache", options={**options, "device_budget": budget}
    )
    for step, rows in enumerate([64, 96, 96, 96, 512, 512, 96]):
        meter.peak = meter.held
        gradients(model, lambda x, rows=rows: pool(model(x)[:rows]), inputs(step))
        assert meter.peak <= budget, f"step {step}"
    assert len(recorder(engine).programs) == 3


def current(region: object) -> CompiledRegion:
    assert isinstance(region, Region)
    return region.current


def test_inductor_is_equal_within_rounding(engine: Engine) -> None:
    model = one_by_one(blocks(4), device_budget=3_600_000, compiler="inductor")
    plain = blocks(4)
    for step in range(4):
        found, expected = gradients(model, model, inputs(step)), gradients(plain, plain, inputs(step))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert tencache_fx.steps()[-1].plan.transfers


def test_what_runs_is_what_the_schedule_says(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of a planned step, by storage and in its order, against the plan."""
    model = one_by_one(blocks(), device_budget=BUDGETS["some"])
    for step in range(3):
        gradients(model, model, inputs(step))
    issued: list[tuple[str, str]] = []
    for deed in ("offload", "prefetch"):
        monkeypatch.setattr(engine, deed, _noted(getattr(engine, deed), deed, issued))
    gradients(model, model, inputs(9))
    (record,) = tencache_fx.steps()
    labels = [transfer.name.split(":")[1] for transfer in record.plan.transfers]
    assert sorted(label for deed, label in issued if deed == "offload") == sorted(labels)
    assert len(issued) == 2 * len(labels)


def _noted(run: Callable[..., Tensor], deed: str, issued: list[tuple[str, str]]) -> Callable[..., Tensor]:
    def noting(value: Tensor, *more: object, **options: object) -> Tensor:
        issued.append((deed, str(more[-1]) if more else ""))
        return run(value, *more, **options)

    return noting


@pytest.mark.usefixtures("hollow_kernels")
def test_what_the_last_op_and_the_first_one_behind_it_read_leaves_in_between(engine: Engine) -> None:
    """Other regions run in between; also where kernels are fused, and only heavy ones keep their place."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    earlier = set(REGIONS.live())  # of models that are not garbage yet
    model = one_by_one(nn.Sequential(*(Gated() for _ in range(4))), device_budget=4_000_000, compiler="inductor")
    model(inputs().view(4, -1, WIDTH)).square().mean().backward()
    found = [current(region).swap_region for region in REGIONS.live() if region not in earlier]
    pending = [region.pending_bytes for region in found if region is not None]
    assert len(pending) == 2
    assert max(pending) < ROWS * WIDTH * 4, "less than any activation of a block"


def test_the_budget_changes_from_one_step_to_the_next(engine: Engine, meter: Meter) -> None:
    expected, model = wanted(8), blocks()
    tencache_fx.configure(device_budget=BUDGETS["some"])
    one_by_one(model)
    gradients(model, model, inputs(0))
    gradients(model, model, inputs(1))
    compiled = REGIONS.compilations
    for step, budget in enumerate((6_200_000, 5_100_000, 9_000_000, 5_600_000, 6_200_000), 2):
        tencache_fx.configure(device_budget=budget)
        meter.peak = meter.held
        assert equal(gradients(model, model, inputs(step)), expected[step])
        assert 0.7 * budget < meter.peak <= budget
    assert REGIONS.compilations == compiled
    tencache_fx.configure(device_budget=None)
    meter.peak = meter.held
    assert equal(gradients(model, model, inputs(7)), expected[7])
    assert meter.peak > 9_000_000


def fail(grad: Tensor) -> Tensor:
    raise RuntimeError("failed between")


def test_new_code_whose_step_failed_is_still_new(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tuned where they run first: those of a backward that was not reached, in a later step."""
    model, seen = one_by_one(blocks(), device_budget=6_200_000, recompute="none"), []
    arrive = StepRecorder._arrive

    def noted(self: StepRecorder, call: Call, *, backward: bool) -> None:
        arrive(self, call, backward=backward)
        seen.append(self.has_new_code)

    monkeypatch.setattr(StepRecorder, "_arrive", noted)
    result = model(inputs())
    result.register_hook(fail)
    with pytest.raises(RuntimeError, match="failed between"):
        result.sum().backward()
    del result
    assert all(seen)
    seen.clear()
    gradients(model, model, inputs())
    assert all(seen)
    seen.clear()
    gradients(model, model, inputs())
    assert not any(seen)
