"""Problems captured from models of several kinds, and what each policy made of them: `tests/planning/problems`.

`expected.json` holds one run a line: a problem, one of its budgets, a policy, and what its plan came to; no figures
where the policy has no plan. Rates and budgets are part of it, so that no figure depends on the machine.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tencache_fx.errors import BudgetError
from tencache_fx.planning.parameter_schedule import step_ns
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.search import plan_region
from tencache_fx.serialization import from_json, from_raw

FOLDER = Path(__file__).resolve().parents[1] / "planning" / "problems"
EXPECTED = FOLDER / "expected.json"
POLICIES = ("10cache", "teraio", "joint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a plan came to; for each figure less is better."""

    step_ns: int
    makespan_ns: int
    peak_bytes: int
    d2h_bytes: int
    h2d_bytes: int
    disk_write_bytes: int
    disk_read_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One problem at one budget, planned by one policy; `figures` is None where that has no plan."""

    problem: str
    budget: str
    device_bytes: int
    policy: str
    figures: Figures | None

    @property
    def name(self) -> str:
        return f"{self.problem}-{self.budget}-{self.policy}"


def read_problem(name: str) -> Problem:
    return from_json(Problem, (FOLDER / f"{name}.json").read_text())


def read_runs() -> tuple[Run, ...]:
    return tuple(from_raw(Run, raw) for raw in json.loads(EXPECTED.read_text()))


def planned(captured: Problem, policy: str) -> Figures | None:
    """Return what `policy` makes of `captured`; None where it has no plan."""
    try:
        problem, plan = plan_region(captured, policy)
    except BudgetError:
        return None
    known = dataclasses.asdict(plan.forecast) | {"step_ns": step_ns(problem, plan.forecast)}
    return Figures(**{field.name: known[field.name] for field in dataclasses.fields(Figures)})


def write_problem(name: str, problem: Problem) -> None:
    """Write `problem` without the fields that have their default, one op, storage or recipe a line."""
    parts = []
    for key, value in _without_defaults(problem).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(_compact(item) for item in value) + "\n]"
        else:
            text = _compact(value)
        parts.append(f"{json.dumps(key)}:{text}")
    (FOLDER / f"{name}.json").write_text("{" + ",\n".join(parts) + "}\n")
    assert read_problem(name) == problem


def write_runs(runs: tuple[Run, ...]) -> None:
    rows = [_compact(dataclasses.asdict(run)) for run in runs]
    EXPECTED.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _without_defaults(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: field.default for field in dataclasses.fields(value)}
        read: Mapping[str, Any] = {name: getattr(value, name) for name in fields}
        return {name: _without_defaults(item) for name, item in read.items() if item != fields[name]}
    return [_without_defaults(item) for item in value] if isinstance(value, tuple) else value
