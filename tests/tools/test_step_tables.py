"""A step's plan as text: reports, and what each swap point does, of a small step built by hand."""

import json
import re
from pathlib import Path

import pytest
from test_step import LINKS, budgets, points_of, visit_of
from test_tables import RECORD, trimmed

from tencache_fx.cli import main
from tencache_fx.planning.problem import Kind, Op, Problem, Step, Storage
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.step import join, to_schedule
from tencache_fx.planning.swap_region import SwapRegion, boundary_swaps
from tencache_fx.records import StepRecord
from tencache_fx.region.step_records import record_step
from tencache_fx.reporting.dump import read_problem, read_steps, write_region, write_step
from tencache_fx.reporting.step_tables import list_step, name_step, show_step, tell_storage
from tencache_fx.serialization import from_json, to_json

MS = 1_000_000


def region() -> SwapRegion:
    """Of three ops forward and three backward; the backward reads `small` first."""

    def saved(name: str, nbytes: int, birth: int, back: int) -> Storage:
        uses = (Step(birth), Step(birth + 1), Step(back))
        kind = Kind.ACTIVATION
        return Storage(
            name=name, nbytes=nbytes, kind=kind, birth=uses[0], death=Step(back + 1), uses=uses, spillable=True
        )

    problem = Problem(
        ops=tuple(Op(name=name, duration_ns=5 * MS) for name in ("mm", "gelu", "mm_1", "mm_2", "gelu_1", "mm_3")),
        boundary=Step(3),
        storages=(saved("big", 4 * MS, 0, 5), saved("small", 1 * MS, 0, 4)),
        links=LINKS,
        budgets=budgets(None),
    )
    swaps = boundary_swaps(problem)
    points = points_of(problem, swaps)
    return SwapRegion(
        problem=problem, transfers=swaps, points=points, original=problem, name="forward (model.py:12), 0/0"
    )


ORDER = ((3, 0, False), (3, 1, False), (4, 0, False), (3, 1, True), (3, 0, True))
"""Region, call and phase of each run; region 4 has no backward here."""


def small_step() -> StepRecord:
    """Return the record of a step in which one storage of three leaves."""
    visits = [
        visit_of(region(), index, call, backward=backward, held_bytes=MS + 1000 * place)
        for place, (index, call, backward) in enumerate(ORDER)
    ]
    joined = join(visits, LINKS, budgets(11 * MS), shared={(3, "small")})
    plan = make_plan(joined.problem, "joint")
    found = record_step(visits, joined, plan, device="cpu", device_budget=11_100_000)
    assert found.schedule == to_schedule(joined, plan)
    return found


@pytest.fixture
def record() -> StepRecord:
    return small_step()


def test_a_step_reads_back_equal(record: StepRecord, tmp_path: Path) -> None:
    assert from_json(StepRecord, to_json(record)) == record
    folder = write_step(tmp_path / "new", 7, record)
    assert sorted(path.name for path in folder.iterdir()) == ["record.json", "schedule.txt"]
    assert read_steps(tmp_path / "new") == {7: record}
    assert read_problem(folder / "record.json") == record.problem


def test_what_every_run_holds_is_shown(record: StepRecord) -> None:
    assert trimmed(f"{name_step(record)}\n\n{show_step(record)}") == trimmed(
        """
a step on cpu, 3 calls of 2 regions:
  region 3: forward (model.py:12), 0/0
  region 4: forward (model.py:12), 0/0

policy             joint
runs               5, of 15 steps in all
device budget      11.1 MB, of it 100 kB kept free for what grows
held beside        at most 1 MB, when backward 3.0 begins
between runs       at most 1 MB, before backward 3.0
device peak        10 MB in backward 3.1, at gelu_1
all on the device  14 MB
device floor       6 MB
stay               1, 4 MB
host               4 MB of 1.1 TB
disk               0 B of 0 B
spilled to host    1, 4 MB
spilled to nvme    0, 0 B
time               75 ms, 1.000 of the 75 ms without limits
lower bound        75 ms
stalls             0 ns going out, 0 ns coming in
link traffic       4 MB out, 4 MB in
disk traffic       0 B written, 0 B read
bound              compute, 75 ms: 100.0% of the step's 75 ms
busy in a step     compute 75 ms, link out 4 ms (4 MB), link in 4 ms (4 MB)

runs                 held beside    between    planned peak    stay    out    in
-------------------  -------------  ---------  --------------  ------  -----  ----
forward 3.0 to 3.1   1 MB           1 MB       6 MB            4 MB    4 MB   0 B
forward 4.0          1 MB           1 MB       10 MB           0 B     0 B    0 B
backward 3.1 to 3.0  1 MB           1 MB       10 MB           0 B     0 B    4 MB
"""
    )


def test_what_every_swap_point_does_is_listed(record: StepRecord) -> None:
    assert re.sub(" {2,}", "  ", trimmed(list_step(record))) == trimmed(
        """
forward 3.0, forward (model.py:12), 0/0
  offload  big  goes to host, freed at the end of forward 3.0, copied back at the wait of small in backward 3.1
  offload  small  stays, for its caller keeps it
  release  big  freed later, at the end of forward 3.0
  release  small
>> frees 3.0:big

forward 3.1, forward (model.py:12), 0/0
  offload  big  stays
  offload  small  stays, for its caller keeps it
  release  big
  release  small

forward 4.0, forward (model.py:12), 0/0
  offload  big  leaves at once: no backward of this call is in the step
  offload  small  leaves at once: no backward of this call is in the step
  release  big
  release  small

backward 3.1, forward (model.py:12), 0/0
  prefetch  small
>> copies 3.0:big back
  wait  small
  prefetch  big
  wait  big

backward 3.0, forward (model.py:12), 0/0
  prefetch  small
  wait  small
  prefetch  big  was copied back at the wait of small in backward 3.1
  wait  big
"""
    )


def test_a_storage_is_told_of(record: StepRecord) -> None:
    told = tell_storage(record, "3.0:big")
    assert told.startswith("3.0:big, of forward 3.0, forward (model.py:12), 0/0: goes to host, freed at the end of ")
    assert tell_storage(record, "3.1:big").endswith(": stays.")


@pytest.fixture
def dump(record: StepRecord, tmp_path: Path) -> Path:
    write_region(tmp_path, RECORD)
    write_step(tmp_path, 0, record)
    write_step(tmp_path, 12, record)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dump_shows_steps_behind_regions(capsys: pytest.CaptureFixture[str], dump: Path, record: StepRecord) -> None:
    _, out, _ = run(capsys, "dump", dump)
    assert out.index("region 0: 0/0") < out.index("step 0, a step on cpu") < out.index("step 12, a step on cpu")
    _, out, _ = run(capsys, "dump", dump, "--step", 12, "--what", "all")
    assert "region 0: 0/0" not in out
    for part in (show_step(record), list_step(record), "host swaps", "3.0:big"):
        assert part in out
    _, out, _ = run(capsys, "dump", dump, "--step", 12, "--format", "json")
    assert from_json(StepRecord, out) == record
    _, out, _ = run(capsys, "dump", dump, "--format", "json")
    assert ["runs" in each for each in json.loads(out)] == [False, True, True]


def test_a_dump_says_why_a_storage_of_a_step_leaves(capsys: pytest.CaptureFixture[str], dump: Path) -> None:
    _, out, _ = run(capsys, "dump", dump, "--step", 0, "--what", "why", "--tensor", "3.0:big")
    assert "3.0:big, of forward 3.0" in out
    (row,) = (line for line in out.splitlines() if line.startswith("3.0:big "))
    assert re.split("  +", row)[:3] == ["3.0:big", "4 MB", "host"]
    assert "3.1:big" not in out
    _, out, _ = run(capsys, "dump", dump, "--step", 0, "--what", "why")
    assert "3.1:big" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--step", "7"), "holds no step 7; it holds: 0, 12."),
        (("--what", "why", "--tensor", "mm"), "add --region or --step"),
        (("--step", "0", "--tensor", "mm"), "is for --what why"),
        (
            ("--step", "0", "--what", "why", "--tensor", "3.0:bag"),
            "no tensor '3.0:bag' among the 2 of the plan. Did you",
        ),
    ],
)
def test_what_a_dump_cannot_show_is_said(
    capsys: pytest.CaptureFixture[str], dump: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, "dump", dump, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_a_step_is_planned_again_in_another_budget(
    capsys: pytest.CaptureFixture[str], dump: Path, record: StepRecord
) -> None:
    path = dump / "step-000" / "record.json"
    _, out, _ = run(capsys, "plan", path, "--device-budget", "7MB")
    assert "device budget      7 MB" in out
    assert "backward 3.1 to 3.0" in out
    (row,) = (line for line in out.splitlines() if line.startswith("3.1:big") and "keep" in line)
    assert re.split("  +", row) == ["3.1:big", "4 MB", "keep", "spill to host"]
    _, out, _ = run(capsys, "plan", path)
    assert "No other decision.\n0 of the others leave or come back at other steps." in out
    _, out, _ = run(capsys, "plan", path, "--policy", "none", "--device-budget", "1GB")
    assert re.search("3.0:big +4 MB +spill to host +keep", out)
    code, out, err = run(capsys, "plan", path, "--device-budget", "5MB")
    assert (code, out) == (2, "")
    assert "the budget is 5 MB" in err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"begin": 1,', '"begin": 2,', "the runs do not follow one another"),
        ('"end": 4,', '"end": 0,', "forward 3.0 has no gap before it, or ops that are not in [1, 0]"),
        ('"deed": "release"', '"deed": "relase"', "has no release, or no prefetch"),
        ('"name": "3.0:big"', '"name": "3.7:big"', "no storage or no step for"),
        ('"back": {', '"backs": {', "expected the fields"),
        ('"peak_step": ', '"peak_step": 9', "the peak is at step 9"),
        ('"backward": false', '"backward": 0', "expected bool"),
    ],
)
def test_damaged_records_of_steps_are_refused(
    capsys: pytest.CaptureFixture[str], dump: Path, old: str, new: str, said: str
) -> None:
    path = dump / "step-000" / "record.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) if "name" not in old else new.join(text.rsplit(old, 1)))
    for command in (("plan", path), ("dump", dump)):
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "")
        assert said in err


def test_a_step_is_not_planned_for_other_ranks(capsys: pytest.CaptureFixture[str], dump: Path) -> None:
    code, out, err = run(capsys, "plan", dump / "step-000" / "record.json", "--ranks", 2)
    assert (code, out) == (2, "")
    assert err.startswith("tencache: --ranks is for the record of one region, and this is the record of a step")
