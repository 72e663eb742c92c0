"""One case by torch's own backend and by tencache in as little memory as there is a plan for; a verdict.

Freed memory is poisoned and copies are late: whoever reads too early or too late sees NaN.
"""

import contextlib
import gc
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from cases import Case, Subject, subjects
from harness import EAGER, INDUCTOR, faulty_engine
from known import EXPECTED, SKIPPED, UNMOVED
from steps import Result, Work, make_work, train
from verdict import Verdict

import tencache_fx
from tencache_fx.errors import BudgetError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.search import policy_floor_bytes

STEPS = 2
# The floor, and this much beside it. The first two steps are tried where generated code holds more than graphs show.
MARGINS = (1.002, 1.05, 1.15, 1.4)
REFERENCES: Mapping[str, str] = {"eager": "aot_eager_decomp_partition", "inductor": "inductor"}
# A verdict is made of whatever a case raises: of an entry of torch's databases nobody knows what that may be.
# Interrupts and exits, and pytest's time-outs and outcomes, are no `Exception`: they end the run.
EVERY_FAILURE = Exception


def judge(case: Case) -> Verdict:
    """Run a case and compare; a case that is known to fail, or to leave nothing to move, has to."""
    if reason := SKIPPED.get(case.entry):
        return Verdict(case.name, "skipped", detail=reason)
    return _run(case).expecting(EXPECTED.get(case.name), UNMOVED.get(case.name))


def _run(case: Case) -> Verdict:
    compiler = "inductor" if case.variant == "inductor" else "eager"
    options = {**(INDUCTOR if compiler == "inductor" else EAGER), "policy": case.policy}
    try:
        given = subjects(case, STEPS)
        work = make_work(case, given[0])
        with _plain_draws(wanted=compiler == "eager"), _compiled(case, work, {"backend": REFERENCES[compiler]}) as run:
            wanted = train(case, run, given)
            again = train(case, run, given)
    except EVERY_FAILURE as error:
        return Verdict(case.name, "torch", detail=_line(error))
    if unstable := _differences(again, wanted, exact=compiler == "eager"):
        return Verdict(case.name, "unstable", detail=unstable)
    try:
        problems = _problems(case, work, given, options)
        ours, moved, raised, able = _in_a_budget(case, work, given, options, problems)
    except EVERY_FAILURE as error:
        return Verdict(case.name, "error", detail=_line(error))
    if differences := _differences(ours, wanted, exact=compiler == "eager"):
        return Verdict(case.name, "mismatch", moved, raised, differences)
    return Verdict(case.name, "no transfers" if able and not moved else "same", moved, raised)


def _plain_draws(*, wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Have torch's own backend draw random numbers as torch does without a compiler, as ours does without Inductor.

    Decomposed, an operation draws others for the same seed.
    """
    return torch._inductor.config.patch(fallback_random=wanted)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _compiled(case: Case, work: Work, how: Mapping[str, object]) -> Iterator[Work]:
    """Return `work` compiled as `how` says, and forget it afterwards."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.compile(work, dynamic=True if case.variant == "dynamic" else None, **how)
    torch.compiler.reset()


def _problems(case: Case, work: Work, given: Sequence[Subject], options: Mapping[str, object]) -> list[Problem]:
    """Return what there is to plan, region by region.

    Kernels run: an operation between two regions is given what the first has computed, and may refuse anything else.
    """
    before = _known_regions()
    with _compiled(case, work, {"backend": "tencache", "options": options}) as run:
        train(case, run, given[:1])
        records = [record for record in tencache_fx.regions() if record.region not in before]
    return [replace(record.captured, min_spill_bytes=4096) for record in records]


def _known_regions() -> set[int]:
    """Return the regions there are already: what torch's compiler keeps may hold some of an earlier case."""
    return {record.region for record in tencache_fx.regions()}


def _in_a_budget(
    case: Case, work: Work, given: Sequence[Subject], options: Mapping[str, object], problems: Sequence[Problem]
) -> tuple[list[Result], bool, bool, bool]:
    """Return the results, whether anything moved, whether the budget was raised, and whether it is below some peak."""
    floor = max((policy_floor_bytes(problem, case.policy) for problem in problems), default=1 << 20)
    for margin in MARGINS:
        budget = int(floor * margin)
        before = _known_regions()
        able = any(budget < live_bytes(problem).max(initial=0) for problem in problems)
        try:
            with faulty_engine() as engine:
                limited = {"backend": "tencache", "options": {**options, "device_budget": budget}}
                with _compiled(case, work, limited) as run:
                    ours = train(case, run, given)
                    records = [record for record in tencache_fx.regions() if record.region not in before]
                    again = sum(len(record.plan.recomputed) for record in records)
                    moved = bool(engine.stats.take()["offloads"] or again)
                del run
                gc.collect()
            return ours, moved, margin != MARGINS[0], able
        except (BudgetError, torch._dynamo.exc.BackendCompilerFailed) as error:
            cause = getattr(error, "inner_exception", error)
            if not isinstance(cause, BudgetError) or margin == MARGINS[-1]:
                raise
    raise AssertionError("there is a last margin")


def _differences(ours: Sequence[Result], wanted: Sequence[Result], *, exact: bool) -> str:
    """Return in which values of which step they differ."""
    found = [
        f"step {step}: {', '.join(names)}"
        for step, (mine, other) in enumerate(zip(ours, wanted, strict=True))
        if (names := mine.differences(other, exact=exact))
    ]
    return "; ".join(found)


def _line(error: Exception) -> str:
    """Return an error's first line, its cause's where torch wraps it, and where it was raised."""
    cause = getattr(error, "inner_exception", error)
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    text = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {text[0][:300]}{place}"
