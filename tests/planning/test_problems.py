"""Ten captured problems, of models of several kinds: plans stay as good as they were, to a thousandth."""

import dataclasses

import pytest
from captured import EXPECTED, FOLDER, POLICIES, Figures, planned, read_problem, read_runs

RUNS = read_runs()
REMEDY = "if that is meant, write down new figures by tests/planning/capture_problems.py --plan"


def changes(found: Figures, before: Figures) -> dict[str, tuple[int, int]]:
    """Return the figures that changed, as they were and as they are."""
    pairs = ((field.name, getattr(before, field.name), getattr(found, field.name)) for field in FIELDS)
    return {name: (old, new) for name, old, new in pairs if old != new}


FIELDS = dataclasses.fields(Figures)


def is_worse(old: int, new: int) -> bool:
    return new * 1000 > old * 1001


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_plans_stay_as_good(run):
    """What got better is shown by `pytest -rP`."""
    found = planned(read_problem(run.problem).within(device_bytes=run.device_bytes), run.policy)
    if run.figures is None or found is None:
        assert run.figures is None, f"there was a plan; {REMEDY}"
        assert found is None, f"there is a plan now: write its figures down by capture_problems.py --plan: {found}"
        return
    changed = changes(found, run.figures)
    worse = {name: pair for name, pair in changed.items() if is_worse(*pair)}
    assert not worse, f"{run.name} is worse (before, now); {REMEDY}: {worse}"
    print(f"{run.name}: {changed or 'as before'}")


def test_every_problem_is_planned_by_every_policy():
    problems = {path.stem for path in FOLDER.glob("*.json")} - {EXPECTED.stem}
    assert len(problems) == 10
    wanted = {(name, budget, policy) for name in problems for budget in ("tight", "medium") for policy in POLICIES}
    assert {(run.problem, run.budget, run.policy) for run in RUNS} == wanted
    assert len(RUNS) == len(wanted)


def test_the_problems_are_of_many_kinds():
    """They have model state and none, recipes and none, scheduling barriers and none, a disk, swaps of all kinds."""
    problems = [read_problem(name) for name in {run.problem for run in RUNS}]
    for kind in (
        lambda p: any(s.state_bytes for s in p.storages),
        lambda p: bool(p.recipes),
        lambda p: bool(p.barriers),
        lambda p: p.budgets.disk_bytes > 0,
        lambda p: p.boundary_bytes > 0,
    ):
        assert 0 < sum(map(kind, problems)) < len(problems)
    figures = {(run.problem, run.budget, run.policy): run.figures for run in RUNS}
    assert None in figures.values()  # host memory is too small unless more is recomputed
    joint = {key[:2]: found for key, found in figures.items() if key[2] == "joint" and found}
    others = {key: figures[*key, "teraio"] for key in joint}
    gains = [key for key, other in others.items() if other is None or joint[key].step_ns < other.step_ns * 0.99]
    assert len(gains) >= 6


def test_a_worse_figure_is_found():
    before = RUNS[0].figures
    assert before is not None
    later = dataclasses.replace(before, step_ns=before.step_ns * 1002 // 1000, h2d_bytes=before.h2d_bytes - 1)
    changed = changes(later, before)
    assert list(changed) == ["step_ns", "h2d_bytes"]
    assert [is_worse(*pair) for pair in changed.values()] == [True, False]
