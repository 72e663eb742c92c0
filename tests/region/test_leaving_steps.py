"""Regions that leave a step which does not fit: on a CPU, too, their plans count what the others of the step hold."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness import Block, faulty_engine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.hardware.memory_gauge import MemoryGauge
from tencache_fx.planning.step import FRUGAL
from tencache_fx.region.external_memory import ExternalMemory
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points

CPU = torch.device("cpu")
WIDTH, ROWS, DEPTH = 64, 256, 6


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, 4) for _ in range(DEPTH)))


def compiled(backend: str = "tencache", **options: object) -> nn.Sequential:
    model, given = blocks(), {"compiler": "eager", "calibrate": False, "host_budget": 1 << 28, **options}
    for block in model:
        block.compile(backend=backend, **({"options": given} if backend == "tencache" else {}))
    return model


@contextmanager
def configured(budget: int) -> Iterator[nn.Sequential]:
    """Yield a model compiled with the budget of the process, which may be changed."""
    tencache_fx.configure(device_budget=budget, compiler="eager", calibrate=False, host_budget=1 << 28)
    try:
        model = blocks()
        for block in model:
            block.compile(backend="tencache")
        yield model
    finally:
        tencache_fx.configure(reset=True)


def train(model: nn.Sequential, run: Callable[[Tensor], Tensor], seed: int = 0) -> tuple[list[Tensor], int]:
    """Return the gradients of a step, and the most bytes held in it, parameters included."""
    model.zero_grad(set_to_none=True)

    def step() -> None:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        run(x).square().mean().backward()

    peak_bytes = tencache_fx.peak_bytes(step, CPU)
    parameters = list(model.parameters())
    found = [each.grad.clone() for each in parameters if each.grad is not None]
    model.zero_grad(set_to_none=True)
    return found, peak_bytes + sum(each.nbytes for each in parameters)


def wanted() -> tuple[list[Tensor], int]:
    """Return the gradients without a budget, and what they take."""
    model = compiled("aot_eager_decomp_partition")
    found = train(model, model)
    torch.compiler.reset()
    return found


def among(before: set[object]) -> list[bool]:
    """Return of each region made since `before` whether it is planned with its step."""
    return [region.in_steps for region in REGIONS.live() if region not in before]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


def whole(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("budget", [2_800_000, 2_650_000])
def test_they_stay_within_a_budget_that_no_schedule_of_the_step_fits(budget: int) -> None:
    (expected, plain_bytes), before = wanted(), set(REGIONS.live())
    assert plain_bytes > 1.5 * budget
    model, peaks = compiled(device_budget=budget), []
    for _ in range(6):
        found, peak_bytes = train(model, model)
        assert all(map(torch.equal, found, expected))
        peaks.append(peak_bytes)
    assert not all(among(before)), "none has left"
    assert max(peaks[3:]) <= budget, peaks


@pytest.mark.usefixtures("engine")
def test_it_is_refused_where_they_do_not_fit_beside_the_others() -> None:
    model = compiled(device_budget=2_200_000)
    with pytest.raises(Exception, match="the budget is 2.2 MB") as raised:
        [train(model, model) for _ in range(4)]
    error = getattr(raised.value, "inner_exception", raised.value)
    assert isinstance(error, BudgetError), error


@pytest.mark.usefixtures("engine")
def test_they_join_the_step_again_when_the_budget_grows() -> None:
    before = set(REGIONS.live())
    with configured(2_800_000) as model:
        for _ in range(4):
            train(model, model)
        assert not all(among(before)), "none has left"
        tencache_fx.configure(device_budget=4_000_000)
        peaks = [train(model, model)[1] for _ in range(4)]
        assert all(among(before))
        assert max(peaks) <= 4_000_000, peaks


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("budget", "leaves"), [(3_300_000, False), (2_700_000, True)])
def test_blocks_that_are_checkpointed_together_are_planned_together(budget: int, *, leaves: bool) -> None:
    """In the backward their forwards run again, one after the other, and wait: the first plans did not see that.

    None leaves its step there: what runs again has to save what it saved before.
    """
    (expected, _), before = wanted(), set(REGIONS.live())
    model = compiled(device_budget=budget)
    runs = [train(model, whole(model)) for _ in range(7)]
    assert all(all(map(torch.equal, found, expected)) for found, _ in runs)
    assert all(among(before)) != leaves
    assert runs[0][1] > 1.5 * budget, "nothing was to be done"
    assert max(peak_bytes for _, peak_bytes in runs[3 if leaves else 1 :]) <= budget, runs


@pytest.mark.usefixtures("engine")
def test_a_checkpointed_forward_is_planned_as_a_whole() -> None:
    """Its calls run again in the backward, the first one first: all run by the same plan."""
    (expected, _), budget = wanted(), 2_900_000
    model = compiled(device_budget=budget)
    for _ in range(6):
        train(model, model)
    torch.compiler.reset()
    model = compiled(device_budget=budget)
    for _ in range(6):
        found, _ = train(model, whole(model))
        assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("engine")
def test_other_hooks_than_those_of_a_checkpoint_do_not_fix_plans() -> None:
    """What looks like a checkpointed forward, and does not run again, may be planned again in the next step."""
    before, model = set(REGIONS.live()), compiled(device_budget=4_000_000)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        peaks = [train(model, model)[1] for _ in range(6)]
    assert among(before)
    assert all(among(before))
    assert max(peaks[2:]) <= 4_000_000, peaks


@pytest.mark.usefixtures("engine")
def test_models_made_anew_are_not_refused_for_those_before_them() -> None:
    """A compiled module is in a reference cycle: it is there until garbage is collected."""
    for _ in range(4):
        model = compiled(device_budget=2_700_000)
        peaks = [train(model, model)[1] for _ in range(5)]
        assert peaks[-1] <= 2_700_000, peaks
        del model


@pytest.mark.usefixtures("engine")
def test_a_budget_that_is_lowered_too_far_is_refused() -> None:
    with configured(4_000_000) as model:
        for _ in range(3):
            train(model, model)
        tencache_fx.configure(device_budget=2_200_000)
        with pytest.raises(Exception, match="the budget is 2.2 MB") as raised:
            [train(model, model) for _ in range(4)]
        assert isinstance(getattr(raised.value, "inner_exception", raised.value), BudgetError)


def test_what_comes_back_early_is_seen(engine: Engine) -> None:
    """What the schedule brings early is on the device beside external memory, which is no less for that."""
    model, held = compiled(device_budget=3_100_000, scope="step"), []
    for _ in range(5):
        train(model, whole(model))
        model(torch.zeros(1, WIDTH))  # the round is over when the next forward begins
        (program,) = recorder_of(swap_points(engine)).programs.values()
        held.append([visit.held_bytes for visit in program.visits if visit.backward])
    assert any(brought for acts in program.schedule.acts.values() for _, brought in acts.values())
    assert program.schedule is not FRUGAL
    assert held[-1] == held[0], held


def test_a_gauge_of_a_cpu_knows_of_peaks_until_the_next_mark() -> None:
    gauge, held = MemoryGauge(CPU), torch.zeros(100)
    seen = gauge.see((held, held[:3]))
    assert gauge.see((held[1:],)) == seen
    assert gauge.bytes_of(seen) == 400
    mark = gauge.mark()
    gauge.rise_to(1000)
    gauge.rise_to(900)
    assert gauge.bytes_since(mark) == (400, 1000)
    mark = gauge.mark()
    assert gauge.bytes_since(mark) == (400, 400)


def test_a_storage_that_takes_the_address_of_one_that_has_died_is_another_one() -> None:
    gauge = MemoryGauge(CPU)
    held = torch.zeros(100)
    address, seen = held.untyped_storage()._cdata, gauge.see((held,))
    assert gauge.held_bytes() == 400
    del held
    assert gauge.held_bytes() == gauge.bytes_of(seen) == 0
    others = []
    while not others or others[-1].untyped_storage()._cdata != address:
        assert len(others) < 10_000
        others.append(torch.zeros(100))
    assert gauge.see(others[-1:]).isdisjoint(seen)
    assert (gauge.held_bytes(), gauge.bytes_of(seen)) == (400, 0)


def test_memory_that_was_freed_is_not_counted_and_may_come_back() -> None:
    gauge, held = MemoryGauge(CPU), torch.zeros(100)
    storage = held.untyped_storage()
    for nbytes in (400, 0, 800, 0):
        storage.resize_(nbytes)
        assert len(gauge.see((held,))) == bool(nbytes)
        assert gauge.held_bytes() == nbytes


def test_the_most_of_this_round_and_the_last_counts(engine: Engine) -> None:
    points = swap_points(engine)
    external, mine, others = ExternalMemory(points), torch.zeros(100), [torch.zeros(1000)]
    own, more = points.see((mine,)), points.see(others)
    external.note(7, own)
    external.note(8, own | more)
    assert (external.most_bytes(7), external.most_bytes(8), external.most_bytes(9)) == (4000, 0, 0)
    external.begin_round()
    del others[0]
    gc.collect()
    external.note(7, own)
    assert external.most_bytes(7) == 4000
    external.begin_round()
    assert external.most_bytes(7) == 0
    alone = {"own_bytes": 5000, "limit_bytes": 1 << 20}
    external.begin_alone(7, (mine,), frozenset(), **alone, begins_turn=True)
    external.begin_round()
    assert points.gauge.bytes_since(points.gauge.mark()) == (400, 400)
    external.forget([7])
    assert external.most_bytes(7) == 0


def test_what_is_gone_is_forgotten_in_two_turns(engine: Engine) -> None:
    """Where all regions of a step are planned by themselves no round begins."""
    points = swap_points(engine)
    external, mine, others = ExternalMemory(points), torch.zeros(100), [torch.zeros(1000)]
    points.see(others)
    seen = []
    for _ in range(3):
        external.begin_alone(7, (mine,), frozenset(), own_bytes=0, limit_bytes=1 << 20, begins_turn=True)
        seen.append((external.last_bytes(7), external.most_bytes(7)))
        others.clear()
        gc.collect()
    assert seen == [(4000, 4000), (0, 4000), (0, 0)]


@pytest.mark.usefixtures("engine")
def test_outputs_that_are_kept_once_end_no_training(caplog: pytest.LogCaptureFixture) -> None:
    """External memory that is there in one step alone is no reason to refuse the next one."""
    model, kept = compiled(device_budget=2_800_000), []
    x = torch.randn(ROWS, WIDTH)
    for step in range(9):
        if step == 5:
            caplog.clear()
            kept.extend(model(x) for _ in range(8))
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        kept.clear()
    assert "It runs this time" in caplog.text
    assert caplog.text.count("planning again") <= 4 * DEPTH, "once refused, a region is not planned anew in that turn"


def test_regions_that_fit_by_themselves_are_refused_where_host_memory_has_no_room_for_their_step() -> None:
    model = compiled(device_budget=2_600_000, host_budget=200_000)
    with pytest.raises(BudgetError, match=r"more than device_budget, which is 2.6 MB.* host_budget is 200 kB"):
        train(model, model, 0)


def test_regions_that_host_memory_keeps_out_of_their_step_say_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Each fits by itself, and all together do not."""
    budget = 2_600_000
    model = compiled(device_budget=budget, host_budget=200_000, spill_dir=tmp_path, spill_budget=100_000)
    peaks = [train(model, model, step)[1] for step in range(4)]
    assert peaks[-1] > budget
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("stays as it was: BudgetError" in each and "host_budget is 200 kB" in each for each in told)
    assert sum("the device may hold more than device_budget" in each for each in told) in range(1, len(model))
