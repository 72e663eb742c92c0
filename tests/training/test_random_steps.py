"""Random loops of several compiled blocks, planned together or not: bit for bit as torch's own compiler has them."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import eventually
from harness import EAGER, Options, faulty_engine
from meter import Meter
from nightly_steps import COMMAND, main, seeds_of
from outcomes import Outcomes
from planted_cases import serve_planted
from step_programs import Loop, Trainer, draw_loop
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed

import tencache_fx
from tencache_fx.backend import tencache
from tencache_fx.errors import BudgetError
from tencache_fx.kept_code import Phase
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.region.compiled_region import Compiled, WrittenPlan, keep_boxed
from tencache_fx.region.registry import REGIONS
from tencache_fx.region.step_monitor import StepMonitor
from tencache_fx.region.step_recorder import recorder_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import swap_points
from tencache_fx.runtime.swap_points import SwapPoints

ROOMY = 1 << 24
"""No loop needs so much; of more, 8 KiB would not be worth an op."""


SCOPES = ("step", "auto", "step", "mixed")
"""What regions are planned with, in turns; "mixed" has each region draw its scope."""


class Both:
    """A backend that compiles with torch's own and with tencache; `ours` says which is run."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.ours = False

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        theirs = lookup_backend("aot_eager_decomp_partition")(gm, inputs)
        ours = tencache(gm, inputs, options=self._options)
        return lambda *args: (ours if self.ours else theirs)(*args)

    def wrap(self, module: nn.Module) -> Callable[..., list[Tensor]]:
        return torch.compile(module, backend=self)


class Ours:
    """A backend that compiles with tencache: all regions in one scope, or "mixed"."""

    def __init__(self, options: Options, scope: str, rng: random.Random) -> None:
        self._options, self._scope, self._rng = options, scope, rng

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        scope = self._rng.choice(["auto", "step", "region"]) if self._scope == "mixed" else self._scope
        return tencache(gm, inputs, options={**self._options, "scope": scope})

    def wrap(self, module: nn.Module) -> Callable[..., list[Tensor]]:
        return torch.compile(module, backend=self)


@contextlib.contextmanager
def metered(found: Meter) -> Iterator[Meter]:
    """Count what compiled graphs make, and what stays of it."""
    instrument = StepMonitor.instrument

    def metered_graph(self: StepMonitor, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        def run_metered(*args: object) -> object:
            with found:
                return run(*args)

        return instrument(self, phase, keep_boxed(run, run_metered), written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepMonitor, "instrument", metered_graph)
        yield found


@contextlib.contextmanager
def serving() -> Iterator[tuple[Engine, Meter]]:
    """Serve with late copies and poisoned memory; random numbers are drawn as without a compiler."""
    with (
        torch._inductor.config.patch(fallback_random=True),
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024),
        faulty_engine(delay_s=0.0002) as engine,
        metered(Meter()) as meter,
    ):
        yield engine, meter


def check(loop: Loop, scope: str, engine: Engine, meter: Meter, seen: Outcomes) -> None:
    """Train as torch's own compiler does, with all the room there is, and then with a part of what that took.

    Peaks are compared with the budget where all regions are planned with their step. What one without a backward holds
    between two of the others is not seen on a CPU.
    """
    torch.compiler.reset()
    trainer = Trainer(loop)
    try:
        alone = list(trainer.train())
    except RuntimeError as error:
        need_refusal(error)
        seen.note("refused by autograd")
        return
    if not all(tensor.isfinite().all() for step in alone for tensor in step):
        seen.note("not finite")
        return
    rng = random.Random(loop.seed + 1)
    options = {**EAGER, "recompute": rng.choice(["none", "auto"]), "policy": "joint"}
    both = Both({**options, "scope": "step"})
    tencache_fx.configure(device_budget=ROOMY)
    trainer.compile(both.wrap)
    try:
        wanted = list(trainer.train())
    except RuntimeError as error:
        need_refusal(error)
        seen.note("torch's own compiler cannot")
        return
    both.ours = True
    assert_same(trainer, wanted)
    problems = [record.problem for record in tencache_fx.steps()]
    if not problems:
        seen.note("no step to plan")
        return
    floor = max(floor_bytes(problem) for problem in problems)
    peak = max(int(live_bytes(problem).max()) for problem in problems)
    budget = (floor + (peak - floor) * rng.randint(0, 80) // 100) * 65 // 64
    while True:
        tencache_fx.configure(device_budget=budget)
        if scope != "step":
            torch.compiler.reset()
            trainer.compile(Ours(options, scope, rng).wrap)
        seen_whole = scope == "step" and all(region.in_steps for region in REGIONS.live())
        try:
            assert_same(trainer, wanted, meter if seen_whole else None, budget)
            break
        except (BudgetError, BackendCompilerFailed) as error:
            if isinstance(error, BackendCompilerFailed) and not isinstance(error.inner_exception, BudgetError):
                raise
            # A step that breaks off, or is never differentiated, may need more: it is in no plan.
            budget = budget * 5 // 4
            assert budget < 4 * peak
    records = [record for record in tencache_fx.steps() if record.device_budget == budget]
    assert all(record.plan.forecast.peak_bytes <= budget for record in records)
    empty_queue()
    assert recorder_of(swap_points(engine)).points.extra_bytes == 0
    plans = [record.plan for record in (*records, *(() if scope == "step" else tencache_fx.regions()))]
    moved = any(plan.transfers for plan in plans)
    seen.note("transferred" if moved else "left alone" if plans else "no plan")


def assert_same(trainer: Trainer, wanted: list[list[Tensor]], meter: Meter | None = None, budget: int = 0) -> None:
    steps = trainer.train()
    for number, theirs in enumerate(wanted):
        if meter is not None:
            meter.peak = meter.held
        ours = next(steps)
        assert len(ours) == len(theirs), f"step {number}"
        different = [
            k for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(mine, other)
        ]
        assert not different, f"step {number}: {different} of {len(ours)}"
        if meter is not None:
            assert meter.peak <= budget, f"step {number}"
    assert next(steps, None) is None


def need_refusal(error: RuntimeError) -> None:
    """Raise `error` again unless it is autograd's about a value that was overwritten."""
    if "in-place operation" not in str(error) and "inplace operation" not in str(error):
        raise error


def empty_queue() -> None:
    """Have torch forget what a broken off backward has left to do: until the next one (torch: `engine.cpp`)."""
    torch.ones((), requires_grad=True).backward()


def check_seed(seed: int, seen: Outcomes) -> None:
    """Check the loop of this seed; when it is over, nothing may wait for a backward."""
    with serving() as (engine, meter):
        check(draw_loop(seed), SCOPES[seed % len(SCOPES)], engine, meter, seen)
        points = swap_points(engine)
        torch.compiler.reset()
        empty_queue()
        assert eventually(lambda: nothing_waits(points)), "a storage waits for a backward"


def check_loops(seeds: range, share: float) -> None:
    """Check the loops of these seeds; of so many some storage must be offloaded by a plan."""
    seen = Outcomes()
    for seed in seeds:
        try:
            check_seed(seed, seen)
        except BaseException as error:
            error.add_note(f"in the loop of seed {seed}: {COMMAND} {seed}")
            raise
    seen.check(share, "transferred")


def nothing_waits(points: SwapPoints) -> bool:
    gc.collect()
    return points.in_use == 0


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_loops_have_the_same_bits_within_a_budget(part: int) -> None:
    check_loops(range(6 * part, 6 * part + 6), 0.3)


@pytest.mark.parametrize("seed", [2258, 2263, 2394])
def test_loops_that_have_failed(seed: int) -> None:
    """A graph that torch keeps after a broken off backward, and a view of what another block has transposed."""
    check_seed(seed, Outcomes())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_loops_have_the_same_bits_within_a_budget(part: int) -> None:
    check_loops(range(1000 + 100 * part, 1100 + 100 * part), 0.5)


def test_the_nightly_run_names_what_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert seeds_of("7,10-12") == [7, 10, 11, 12]
    assert main(["--seeds", "0-9", "--processes", "2"], serve_planted) == 1
    told = capfd.readouterr().out
    assert f"FAILED: {COMMAND} 2\nwrong" in told
    assert f"FAILED: {COMMAND} 3\nthe process died: exit status 7" in told
    assert told.endswith(f"8 1 transferred, 2 FAILED\nAgain: {COMMAND} 2,3\n")
    assert main(["--seeds", "0-1", "--processes", "1"], serve_planted) == 0
    assert main(["--seeds", "0-9", "--limit", "0s"], serve_planted) == 2
    assert capfd.readouterr().out.endswith("10 of 10 were not run.\n")


@pytest.mark.slow
def test_the_nightly_run_trains_loops() -> None:
    """As many as there are processes, each of its own."""
    assert main(["--seeds", "0-1", "--processes", "2"]) == 0
