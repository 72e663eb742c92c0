"""Plans outlive their process: equal problems are planned once, and a damaged file is never used, and never fatal."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from problems import (
    GIB,
    PLENTY,
    crowded_region,
    links,
    offloaded_weights,
    recipes_of_matmuls,
    trained_offloaded,
    transformer,
)

from tencache_fx import planning
from tencache_fx.errors import BudgetError
from tencache_fx.hardware.cache import cached, digest_sources
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.search import make_plan, plan_region, policy_floor_bytes
from tencache_fx.planning.tuning import TUNING
from tencache_fx.region import kept_plans
from tencache_fx.region.kept_plans import kept_plan, kept_region_plan

SMALL = transformer(layers=1, device_bytes=4 * GIB)
PROBLEMS = {
    "activations": SMALL,
    "disk": transformer(layers=2, device_bytes=5 * GIB, host_bytes=GIB // 2, disk_bytes=PLENTY),
    "parameters": trained_offloaded(8).within(device_bytes=1000),
}
REGIONS = """
import gc, torch, tencache_fx
from torch import nn
from tencache_fx.hardware.cache import USES

class Model(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x

def train(whole, budget):
    torch.manual_seed(0)
    parts = [Model(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]
    model = Model(*parts)
    for part in [model] if whole else parts:
        part.compile(backend="tencache", options={"device_budget": budget, "compiler": "eager", "calibrate": False})
    for _ in range(3):
        loss = model(torch.ones(1024, 64)).square().mean()
        loss.backward()
    planned = tencache_fx.steps() or tencache_fx.regions()
    print([each.plan for each in planned], loss.item(), sep="\\n")

for whole, budget in ((True, "6MB"), (False, "5MB")):
    train(whole, budget)
    torch.compiler.reset()
    gc.collect()
    assert not tencache_fx.regions()
print(USES.counts())
"""


@pytest.fixture
def made(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Return the problems that are planned from here on."""
    problems: list[Problem] = []

    def counted(problem: Problem, *arguments: str, **options: object) -> Plan:
        problems.append(problem)
        return make_plan(problem, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_plans, "make_plan", counted)
    return problems


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_planned_once(name: str, made: list[Problem]) -> None:
    problem = PROBLEMS[name]
    first = kept_plan(problem, "joint")
    assert first == make_plan(problem, "joint")
    assert first.transfers
    assert kept_plan(problem, "joint") == first
    assert made == [problem]


def recomputing() -> Problem:
    problem = offloaded_weights(transformer(layers=3))
    problem = replace(problem, recipes=recipes_of_matmuls(problem), links=links(10**7))
    return problem.within(device_bytes=policy_floor_bytes(problem, "joint") * 5 // 4)


@pytest.mark.parametrize("problem", [recomputing(), PROBLEMS["parameters"]], ids=["recomputing", "parameters"])
def test_a_region_is_planned_once(problem: Problem, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept_region_plan(problem, "joint")
    assert first == plan_region(problem, "joint")
    assert first[1].recomputed or not problem.recipes
    monkeypatch.setattr(kept_plans, "plan_region", None)
    assert kept_region_plan(problem, "joint") == first
    (file,) = cache_folder.glob("regionplan-*")
    file.write_text(file.read_text().replace(first[1].transfers[0].name, "another"))
    monkeypatch.setattr(kept_plans, "plan_region", plan_region)
    assert kept_region_plan(problem, "joint") == first


CHANGES: dict[str, Callable[[Problem], Problem]] = {
    "a duration": lambda p: replace(p, ops=(replace(p.ops[0], duration_ns=p.ops[0].duration_ns + 1), *p.ops[1:])),
    "a size": lambda p: replace(p, storages=(replace(p.storages[0], nbytes=p.storages[0].nbytes + 1), *p.storages[1:])),
    "a rate": lambda p: replace(p, links=replace(p.links, d2h_bytes_per_s=p.links.d2h_bytes_per_s + 1)),
    "the device budget": lambda p: p.within(device_bytes=4 * GIB + 1),
    "a host budget that is short": lambda p: p.within(host_bytes=8 * GIB),
    "external memory": lambda p: replace(p, external_bytes=1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_problem_is_planned_anew(what: str, made: list[Problem]) -> None:
    assert sum(storage.nbytes for storage in SMALL.storages) > 4 * GIB
    kept_plan(SMALL, "teraio")
    other = CHANGES[what](SMALL)
    assert kept_plan(other, "teraio") == make_plan(other, "teraio")
    assert made == [SMALL, other]


def test_another_policy_tuning_or_planner_plans_anew(made: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    kept_plan(SMALL, "teraio")
    kept_plan(SMALL, "10cache")
    kept_plan(SMALL, "teraio", tuning=replace(TUNING, repairs=TUNING.repairs + 1))
    monkeypatch.setattr(kept_plans, "digest_sources", lambda folder: "another")
    kept_plan(SMALL, "teraio")
    assert len(made) == 4


def test_each_byte_of_the_planner_counts(tmp_path: Path) -> None:
    copied = shutil.copytree(Path(planning.__file__).parent, tmp_path / "planning")

    def digest() -> str:
        return digest_sources.__wrapped__(copied)

    found = [digest()]
    source = copied / "policies" / "teraio.py"
    for edit in (
        lambda: source.write_text(source.read_text().replace("0", "1", 1)),
        lambda: source.rename(source.with_name("other.py")),
    ):
        edit()
        found.append(digest())
    assert digest_sources(Path(planning.__file__).parent) == found[0]
    assert len(set(found)) == 3


def test_how_much_memory_is_free_does_not_matter_where_it_is_plenty(made: list[Problem]) -> None:
    kept_plan(SMALL, "teraio")
    kept_plan(SMALL.within(host_bytes=63 * GIB, host_taken_bytes=GIB), "teraio")
    assert made == [SMALL]


@pytest.mark.parametrize("policy", ["teraio", "10cache", "joint"])
def test_plans_are_the_same_with_more_memory_than_all_storages_take(policy: str) -> None:
    outcomes = []
    for seed in range(60):
        problem = replace(crowded_region(seed), min_spill_bytes=4096)
        lasting = kept_plans._lasting(problem)
        try:
            plan = make_plan(problem, policy)
        except BudgetError:
            with pytest.raises(BudgetError):
                make_plan(lasting, policy)
        else:
            assert make_plan(lasting, policy) == plan
            outcomes.append(bool(plan.transfers) and lasting != problem)
    assert sum(outcomes) >= 20


def flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes((content[at] ^ (1 << rng.randrange(8)),)) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit is another": flip,
    "truncated": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda content, rng: b"",
    "of another version": lambda content, rng: content.replace(b'"version": "', b'"version": "9', 1),
    "of another planner": lambda content, rng: content.replace(b'"planner": "', b'"planner": "f', 1),
    "no text": lambda content, rng: rng.randbytes(100),
    "longer": lambda content, rng: content + b"}",
    "a number is another": lambda content, rng: content.replace(b'"after": ', b'"after": 1', 1),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_plan_is_made_again(what: str, made: list[Problem], cache_folder: Path) -> None:
    first, rng = kept_plan(SMALL, "teraio"), random.Random(what)
    (path,) = cache_folder.iterdir()
    whole = path.read_bytes()
    for _ in range(40 if what == "a bit is another" else 5):
        made.clear()
        path.write_bytes(DAMAGE[what](whole, rng))
        same = same_value(path.read_bytes(), whole)
        assert kept_plan(SMALL, "teraio") == first
        assert bool(made) is not same
    path.write_bytes(DAMAGE[what](whole, rng))
    assert kept_plan(SMALL, "teraio") == kept_plan(SMALL, "teraio") == first
    assert same_value(path.read_bytes(), whole), "it was replaced"


def same_value(content: bytes, whole: bytes) -> bool:
    """Return whether only white space differs."""
    try:
        return bool(json.loads(content) == json.loads(whole))
    except ValueError:
        return False


def test_a_plan_of_another_problem_under_this_name_is_not_used(made: list[Problem], cache_folder: Path) -> None:
    first = kept_plan(SMALL, "teraio")
    (path,) = cache_folder.iterdir()
    kept_plan(SMALL.within(device_bytes=5 * GIB), "teraio")
    (other,) = set(cache_folder.iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    assert kept_plan(SMALL, "teraio") == first
    assert len(made) == 3


def test_a_plan_that_breaks_a_rule_is_made_again(
    made: list[Problem], cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Though it is as it was written: only the plan's checker can tell."""
    first = kept_plan(SMALL, "teraio")
    (path,) = cache_folder.iterdir()
    key = {name: each for name, each in json.loads(path.read_text())["key"].items() if name != "version"}
    cached(key, Plan, lambda: replace(first, transfers=first.transfers[1:]), renew=True)
    assert kept_plan(SMALL, "teraio") == first
    assert "the plan breaks the rule" in caplog.text
    assert kept_plan(SMALL, "teraio") == first
    assert len(made) == 2


@pytest.mark.parametrize("what", ["a folder in its place", "no folder may be made", "unreadable"])
def test_what_stands_in_the_way_costs_only_time(
    what: str,
    made: list[Problem],
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = kept_plan(SMALL, "teraio")
    (path,) = cache_folder.iterdir()
    if what == "a folder in its place":
        path.unlink()
        path.mkdir()
    elif what == "no folder may be made":
        monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    else:  # root may read what nobody may

        def refuse(*arguments: object, **more: object) -> str:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_text", refuse)
        monkeypatch.setattr(os, "replace", refuse)
    with caplog.at_level(logging.INFO, "tencache_fx"):
        assert kept_plan(SMALL, "teraio") == first
    assert len(made) == 2
    assert "cannot be kept" in caplog.text
    assert not [each for each in cache_folder.iterdir() if each != path], "nothing is left behind"


def test_a_refusal_is_not_kept(made: list[Problem], cache_folder: Path) -> None:
    tight = SMALL.within(device_bytes=1000)
    for _ in range(2):
        with pytest.raises(BudgetError, match="the budget is 1 kB"):
            kept_plan(tight, "teraio")
    assert not cache_folder.exists()


def test_the_second_process_reads_what_the_first_one_planned(tmp_path: Path) -> None:
    """Of a region that is a whole model, and of a step of several."""
    # A busy machine may have a sixteenth less free memory when the second one starts.
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TENCACHE_HOST_BUDGET": "1GiB"}

    def start() -> tuple[dict[str, tuple[int, int]], str]:
        command = [sys.executable, "-c", REGIONS]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        plans, _, counts = told.strip().rpartition("\n")
        return eval(counts), plans

    first, plans = start()
    assert {"plan", "choice", "stepchoice"} <= first.keys()
    assert all(written for read, written in first.values())
    again, same = start()
    assert same == plans
    assert again == {sort: (read + written, 0) for sort, (read, written) in first.items()}
