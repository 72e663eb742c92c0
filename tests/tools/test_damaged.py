"""Damaged files: records that commands are given, and what is kept of measurements. None is fatal, none is believed."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import crowded_region, links
from test_step_tables import small_step
from test_tables import PROBLEM, RECORD

from tencache_fx.cli import main
from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.hardware.cache import cached, kept
from tencache_fx.hardware.disk import Disk
from tencache_fx.hardware.op_timing import OpCost
from tencache_fx.hardware.rates import FIXED_LINKS, FIXED_ROOFLINE, device_key, known_rates
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.planning.explain import find_reasons
from tencache_fx.planning.plan import CopyIn
from tencache_fx.planning.problem import Budgets, Kind, Links, Op, Problem, Step, Storage
from tencache_fx.planning.recalibration import Scales, StoredCorrection
from tencache_fx.planning.search import plan_region
from tencache_fx.planning.step_recompute import Recomputed
from tencache_fx.records import RegionRecord
from tencache_fx.region.earlier_runs import Accumulation, Margin
from tencache_fx.region.kept_plans import Choice, StepChoice
from tencache_fx.reporting.dump import read_problem, write_region
from tencache_fx.serialization import from_json, to_json

Run = Callable[..., tuple[int, str, str]]
OTHER_VALUES = [0, 1, -1, 3, 12, 4096, 10**12, 2**62, 2**63 - 1, 2**63, 10**30, 1e30, 0.5, True, None, "", "x", [], {}]
OTHER_VALUES += [[0], {"a": 1}, "host", "nvme", *(str(kind) for kind in Kind)]


def moving_region() -> Problem:
    """Return a region whose only parameter comes from home, and whose gradient leaves, beside a value that crosses."""
    rows: tuple[tuple[str, Kind, int, int, tuple[int, ...]], ...] = (
        ("weight", Kind.FETCHED, 1, 2, (1,)),
        ("weight_again", Kind.FETCHED, 6, 7, (6,)),
        ("gradient", Kind.STORED, 6, 8, (6, 7)),
        ("saved", Kind.ACTIVATION, 0, 8, (0, 7)),
    )
    storages = tuple(
        Storage(
            name=name,
            nbytes=1000,
            kind=kind,
            birth=Step(birth),
            death=Step(death),
            uses=tuple(map(Step, uses)),
            spillable=kind is Kind.ACTIVATION,
            parameter="weight" if kind in (Kind.FETCHED, Kind.STORED) else "",
        )
        for name, kind, birth, death, uses in rows
    )
    return Problem(
        ops=tuple(Op(name=f"op_{k}", duration_ns=5000) for k in range(9)),
        boundary=Step(4),
        storages=storages,
        links=links(),
        budgets=Budgets(device_bytes=2200, host_bytes=1 << 20, disk_bytes=1 << 20),
    )


def records() -> Iterator[RegionRecord]:
    yield RECORD
    for problem in (moving_region(), *map(crowded_region, range(12))):
        try:
            planned, plan = plan_region(problem, "teraio")
        except BudgetError:
            continue
        yield replace(RECORD, captured=problem, problem=planned, plan=plan)


RAW_RECORDS = [json.loads(to_json(record)) for record in records()]
RAW_STEPS = [json.loads(to_json(small_step()))]
COMMANDS = (
    "dump {dir}",
    "dump {dir} --what all",
    "dump {dir} --what why",
    "dump {dir} --format dot",
    "plan {file} --policy none",
    "plan {file} --policy 10cache",
    "plan {file} --policy joint",
    "plan {file} --policy teraio --sweep 2",
)


def places(raw: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in what was parsed from JSON, but for the whole."""
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in items:
        yield (*where, key)
        yield from places(value, (*where, key))


def damage(raw: Any, rng: random.Random) -> Any:
    """Return a copy of which one to three values are others, or gone; most of them numbers, often close ones."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = list(places(raw))
        numbers = [place for place in every if type(found(raw, place)) is int]
        near = bool(numbers) and rng.random() < 0.7
        *above, key = rng.choice(numbers if near else every)
        parent = found(raw, above)
        if near:
            parent[key] = rng.choice((parent[key] + rng.randint(-3, 3), *OTHER_VALUES[:10]))
        elif rng.random() < 0.2:
            del parent[key]
        else:
            parent[key] = rng.choice((*OTHER_VALUES, copy.deepcopy(found(raw, rng.choice(every)))))
    return raw


def found(raw: Any, where: Any) -> Any:
    for key in where:
        raw = raw[key]
    return raw


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), command=st.sampled_from(COMMANDS))
def test_a_damaged_record_ends_a_command_with_a_sentence_or_not_at_all(
    run: Run, tmp_path: Path, seed: int, command: str
) -> None:
    rng = random.Random(seed)
    write_region(tmp_path, RECORD)
    raw = rng.choice(rng.choice((RAW_RECORDS, RAW_STEPS)))
    folder = tmp_path / ("step-000" if raw in RAW_STEPS else "region-000")
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_text(json.dumps(damage(raw, rng)))
    code, out, err = run(*command.format(dir=tmp_path, file=folder / "record.json").split())
    (folder / "record.json").unlink()
    assert (code, bool(out)) in ((0, True), (2, False))
    assert err.startswith("tencache: ") == (code == 2)
    assert "breaks the rule" not in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"nbytes": 4500000', '"nbytes": 1e30', "expected int, found 1e+30"),
        ('"nbytes": 4500000', f'"nbytes": {10**30}', "expected a number from 0 to 9223372036854775807"),
        ('"nbytes": 4500000', '"nbytes": -5', "expected a number from 0"),
        ('"nbytes": 4500000', '"nbytes": 9223372036854775807', "all its bytes come to"),
        ('"nbytes": 4500000', '"nbytes": NaN', "NaN is no number"),
        ('"birth": 1', '"birth": 77', "relu lives for [77, 5)"),
        ('"death": 5', '"death": 77', "relu ends with step 77, of 6"),
        ('"boundary": 3', '"boundary": 7', "the boundary ends with step 7, of 6"),
        ('"name": "relu",\n    "nbytes"', '"name": "mm",\n    "nbytes"', "two storages have one name"),
        ('"duration_ns": 1000000', '"duration_ns": 9223372036854775807', "all its ns come to"),
        ('"d2h_bytes_per_s": 12000000000', '"d2h_bytes_per_s": 0', "expected a number above zero, found 0"),
        ('"disk_bytes": 0', '"disk_bytes": 4096', "a budget for a disk, and no rate of one"),
    ],
)
def test_values_that_cannot_be_are_named(run: Run, tmp_path: Path, command: str, old: str, new: str, said: str) -> None:
    path = write_region(tmp_path, RECORD) / "record.json"
    text = path.read_text()
    unindented = "\n".join(line.strip() for line in text.splitlines())
    old = "\n".join(line.strip() for line in old.splitlines())
    assert old in unindented
    path.write_text(unindented.replace(old, new))
    code, out, err = run(*command.format(dir=tmp_path, file=path).split())
    assert (code, out) == (2, "")
    assert err.startswith(f"tencache: {path} cannot be read as ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"problem": ' + "[" * 100_000, "[" * 900 + "]" * 900, "\ud800", "7"],
    ids=["brackets", "brackets inside", "closed brackets", "no UTF-8", "number"],
)
@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[4]])
def test_text_that_is_no_record_is_refused(run: Run, tmp_path: Path, text: str, command: str) -> None:
    path = write_region(tmp_path, RECORD) / "record.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    code, out, err = run(*command.format(dir=tmp_path, file=path).split())
    assert (code, out) == (2, "")
    assert "cannot be read as" in err
    assert len(err) < 1000


@pytest.mark.parametrize(
    "text", ["7", "[" * 100_000, '{"step_ns": NaN}', "{"], ids=["number", "brackets", "NaN", "unclosed"]
)
def test_damaged_measurements_are_refused(run: Run, tmp_path: Path, text: str) -> None:
    (write_region(tmp_path, RECORD) / "measured.jsonl").write_text(text + "\n")
    code, out, err = run("dump", tmp_path)
    assert (code, out) == (2, "")
    assert "measured.jsonl cannot be read as JSON lines" in err


def test_a_plan_for_another_problem_is_refused(run: Run, tmp_path: Path) -> None:
    late = CopyIn(prefetch_at=Step(9), needed_at=Step(99))
    for plan in (
        replace(RECORD.plan, recomputed=("nothing",)),
        replace(RECORD.plan, transfers=(replace(RECORD.plan.transfers[0], name="nothing"),)),
        replace(RECORD.plan, transfers=(replace(RECORD.plan.transfers[0], back=late),)),
    ):
        write_region(tmp_path, replace(RECORD, plan=plan))
        code, _, err = run("dump", tmp_path, "--what", "all")
        assert code == 2
        assert "the plan" in err


def test_a_disk_that_the_run_did_not_have_cannot_be_planned_for(run: Run, tmp_path: Path) -> None:
    path = write_region(tmp_path, RECORD) / "record.json"
    code, _, err = run("plan", path, "--spill-budget", "1GB")
    assert (code, "has no rates of one; run it with spill_dir" in err) == (2, True)


def test_reasons_are_found_for_offloaded_parameters_and_for_the_smallest_budgets() -> None:
    problem = moving_region()
    _, plan = plan_region(problem, "teraio")
    reasons = find_reasons(problem, plan)
    choices = {tensor.name: {choice.decision for choice in tensor.choices} for tensor in reasons.tensors}
    assert "nvme" not in choices["gradient"]  # homes are in host memory
    assert "nvme" in choices["saved"]
    small = replace(problem.within(device_bytes=12), storages=tuple(replace(s, nbytes=5) for s in problem.storages))
    _, plan = plan_region(small, "teraio")
    assert {price.amount for price in find_reasons(small, plan).prices if price.resource == "device"} == {-1, 1}


def test_a_slow_link_stays_a_link() -> None:
    problem = replace(moving_region(), links=links(1, disk_write_bytes_per_s=1, disk_read_bytes_per_s=1))
    for policy in ("10cache", "teraio", "joint"):
        _, plan = plan_region(problem, policy)
        assert plan.transfers


KEPT: list[tuple[Any, Any]] = [
    (FIXED_LINKS, replace(FIXED_LINKS, d2h_bytes_per_s=7)),
    (
        Disk(write_bytes_per_s=1, read_bytes_per_s=2, direct=True),
        Disk(write_bytes_per_s=3, read_bytes_per_s=4, direct=True),
    ),
    (FIXED_ROOFLINE["cuda"], FIXED_ROOFLINE["cpu"]),
    (OpCost(5, 6), OpCost(7, None)),
    (StoredCorrection(planning=Scales(forward=0.5)), StoredCorrection()),
    (Margin(nbytes=4096), Margin(nbytes=0)),
    (Accumulation(count=4), Accumulation(count=1)),
    (Choice(names=("mm", "relu")), Choice(names=())),
    (StepChoice(regions=((0, Recomputed(always=("mm",), first=("relu",), first_calls=2)),)), StepChoice(regions=None)),
]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), pair=st.sampled_from(KEPT))
def test_a_damaged_value_is_measured_anew(cache_folder: Path, seed: int, pair: tuple[Any, Any]) -> None:
    value, other = pair
    key, rng = {"what": "rates", "of": type(value).__name__}, random.Random(seed)
    assert cached(key, type(value), lambda: value, renew=True) == value
    assert kept(key, type(value)) == value
    (path,) = (each for each in cache_folder.iterdir() if json.loads(each.read_text())["key"]["of"] == key["of"])
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(damage(whole, rng)))
    again = cached(key, type(value), lambda: other)
    assert again in (value, other)  # what it was, if only a field is gone that had its default
    assert kept(key, type(value)) == again


def test_a_value_of_a_few_digits_more_is_not_believed(cache_folder: Path) -> None:
    """No range tells it from a good one, and regions would be planned with it."""
    cached({"what": "margin"}, Margin, lambda: Margin(nbytes=4096))
    (path,) = cache_folder.iterdir()
    path.write_text(path.read_text().replace("4096", "4096000000000"))
    assert kept({"what": "margin"}, Margin) is None


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (FIXED_LINKS, {"d2h_bytes_per_s": 0}),
        (FIXED_LINKS, {"h2d_duplex_bytes_per_s": -1}),
        (FIXED_LINKS, {"copy_latency_ns": 2**63}),
        (KEPT[1][0], {"write_bytes_per_s": 0}),
        (FIXED_ROOFLINE["cpu"], {"flops_per_s": []}),
        (FIXED_ROOFLINE["cpu"], {"flops_per_s": [["float32", 0]]}),
        (FIXED_ROOFLINE["cpu"], {"memory_bytes_per_s": 0}),
        (FIXED_ROOFLINE["cpu"], {"launch_ns": -1}),
        (OpCost(5, 6), {"duration_ns": 0}),
        (OpCost(5, 6), {"scratch_bytes": -1}),
        (Scales(), {"forward": 0.0}),
        (Scales(), {"forward": -1.0}),
        (Scales(), {"backward": 1e300}),
        (Scales(), {"backward": float("nan")}),
        (Scales(), {"backward": float("inf")}),
        (Margin(nbytes=1), {"nbytes": -1}),
    ],
)
def test_what_cannot_have_been_measured_is_not_read(value: Any, changes: Mapping[str, object]) -> None:
    raw = json.loads(to_json(value))
    assert from_json(type(value), json.dumps(raw)) == value
    with pytest.raises(ValueError, match=next(iter(changes)) + r"|factor|NaN|Infinity"):
        from_json(type(value), json.dumps({**raw, **changes}))


def test_rates_of_zero_are_not_taken_for_measured_ones(cache_folder: Path) -> None:
    device = torch.device("cpu")
    cached(device_key("links", device), Links, lambda: FIXED_LINKS)
    cached(device_key("roofline", device), Roofline, lambda: FIXED_ROOFLINE["cpu"])
    assert known_rates(device, (), calibrate=True, has_disk=False).measured
    for path in cache_folder.iterdir():
        raw = json.loads(path.read_text())
        raw["value"] = {name: 0 if type(each) is int else each for name, each in raw["value"].items()}
        path.write_text(json.dumps(raw))
    rates = known_rates(device, (), calibrate=True, has_disk=False)
    assert not rates.measured
    assert rates.links.d2h_bytes_per_s > 0


def test_a_problem_by_itself_is_read_as_strictly(tmp_path: Path) -> None:
    (tmp_path / "problem.json").write_text(to_json(PROBLEM).replace('"boundary": 3', '"boundary": 30'))
    with pytest.raises(OptionError, match="as Problem: Problem: the boundary ends with step 30, of 6; give a file"):
        read_problem(tmp_path / "problem.json")
