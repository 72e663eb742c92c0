"""The trace of a run: its slices, arrows and counters are the plan's, in the form that Perfetto's importer wants."""

import dataclasses
import json
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from outcomes import Outcomes
from problems import GIB, moving_problems, problems, transformer
from test_step_tables import small_step
from test_tables import RECORD

from tencache_fx.cli import main
from tencache_fx.errors import BudgetError
from tencache_fx.planning.plan import Plan, TransferKind
from tencache_fx.planning.problem import Links, Problem, Tier
from tencache_fx.planning.search import plan_region
from tencache_fx.records import RegionRecord
from tencache_fx.reporting.dump import write_measured, write_region, write_step
from tencache_fx.reporting.trace import trace_events
from tencache_fx.reporting.view import views_of

Event = dict[str, Any]


def planned(problem: Problem, policy: str = "teraio") -> RegionRecord:
    problem_for, plan = plan_region(problem, policy)
    return dataclasses.replace(RECORD, captured=problem, problem=problem_for, plan=plan)


def lanes(events: list[Event], process: int) -> dict[str, list[Event]]:
    """Return the slices of each thread of a process by its name."""
    names = {
        each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name" and each["pid"] == process
    }
    found: dict[str, list[Event]] = {name: [] for name in names.values()}
    for each in events:
        if each["ph"] == "X" and each["pid"] == process:
            found[names[each["tid"]]].append(each)
    return found


def check_form(events: list[Event]) -> None:
    """What Perfetto's importer drops or merges without a word does not occur.

    Slices that overlap, arrows outside of any slice or whose id is no number, and threads of several lanes.
    """
    assert json.loads(json.dumps(events)) == events
    threads = {(each["pid"], each["tid"]) for each in events if each["ph"] == "X"}
    assert len({thread for _, thread in threads}) == len(threads)
    assert not {thread for _, thread in threads} & {0, *(process for process, _ in threads)}
    assert all(isinstance(each["id"], int) for each in events if each["ph"] in "stf")
    slices: dict[tuple[int, int], list[Event]] = {}
    for each in events:
        assert each["ph"] in "MXstfC"
        if each["ph"] == "X":
            assert each["dur"] >= 0
            slices.setdefault((each["pid"], each["tid"]), []).append(each)
    for found in slices.values():
        for early, late in pairwise(found):
            assert early["ts"] + early["dur"] <= late["ts"] + 1e-6
    arrows: dict[int, list[Event]] = {}
    for each in events:
        if each["ph"] in "stf":
            arrows.setdefault(each["id"], []).append(each)
            around = [s for s in slices[each["pid"], each["tid"]] if s["ts"] <= each["ts"] <= s["ts"] + s["dur"]]
            assert any(s["name"] == each["name"] for s in around)
    for way in arrows.values():
        assert [each["ph"] for each in way] == ["s", *"t" * (len(way) - 2), "f"]
        assert way[-1]["bp"] == "e"
        assert [each["ts"] for each in way] == sorted(each["ts"] for each in way)


def check_counts(events: list[Event], process: int, plan: Plan) -> None:
    """There is a slice for each copy, and an arrow for each swap, from its copy out to its copy in."""
    kinds = Counter(transfer.kind for transfer in plan.transfers)
    swaps = kinds[TransferKind.SWAP]
    on_disk = Counter(transfer.kind for transfer in plan.transfers if transfer.tier is Tier.NVME)
    found = lanes(events, process)
    assert len(found.get("copies out", ())) == swaps + kinds[TransferKind.STORE]
    assert len(found.get("copies in", ())) == swaps + kinds[TransferKind.LOAD]
    assert len(found.get("disk writes", ())) == on_disk[TransferKind.SWAP]
    assert len(found.get("disk reads", ())) == on_disk.total()
    phases = Counter(each["ph"] for each in events if each["pid"] == process)
    assert (phases["s"], phases["t"], phases["f"]) == (swaps, 2 * on_disk[TransferKind.SWAP], swaps)
    held = [sum(each["args"].values()) for each in events if each["name"] == "device bytes" and each["pid"] == process]
    assert max(held) == plan.forecast.peak_bytes
    ends = [each["ts"] + each["dur"] for each in found["graphs"]]
    assert max(ends, default=0) * 1000 == pytest.approx(plan.forecast.makespan_ns, abs=1)


OUTCOMES = Outcomes()


@OUTCOMES.reaching(0.3, "to host", "to disk")
@settings(max_examples=150)
@given(problem=problems() | moving_problems())
def test_slices_and_arrows_count_as_transfers_do(problem: Problem) -> None:
    try:
        record = planned(problem)
    except BudgetError:
        OUTCOMES.note("no plan")
        return
    events = list(trace_events(views_of([record], {}, {})))
    check_form(events)
    check_counts(events, 1, record.plan)
    tiers = {transfer.tier for transfer in record.plan.transfers}
    OUTCOMES.note("to disk" if Tier.NVME in tiers else "to host" if tiers else "kept")


def slow_region() -> RegionRecord:
    """Of a region that waits for its copies, some of which go on to disk."""
    rate = 4 * 10**9
    slow = Links(
        d2h_bytes_per_s=rate,
        h2d_bytes_per_s=rate,
        d2h_duplex_bytes_per_s=rate,
        h2d_duplex_bytes_per_s=rate,
        disk_write_bytes_per_s=rate // 2,
        disk_read_bytes_per_s=rate // 2,
    )
    problem = dataclasses.replace(transformer(layers=2, device_bytes=6 * GIB), links=slow)
    record = planned(problem.within(host_bytes=GIB, disk_bytes=100 * GIB))
    assert {transfer.tier for transfer in record.plan.transfers} == {Tier.HOST, Tier.NVME}
    return record


def test_a_dump_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, region = small_step(), slow_region()
    write_step(tmp_path, 0, step)
    write_region(tmp_path, region)
    write_measured(tmp_path, 0, {"call_to_call_ns": 5_000, "calls_seen": 9})
    path = tmp_path / "trace.json"
    assert main(["view", str(tmp_path), "--trace", str(path)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert not (tmp_path / "view.html").exists()
    events = json.loads(path.read_text())["traceEvents"]
    check_form(events)
    check_counts(events, 1, step.plan)
    check_counts(events, 3, region.plan)
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == [
        "planned: step 0: 3 calls of 2 regions on cpu",
        "planned: region 0: 0/0 on cpu",
        "measured: region 0: 0/0 on cpu",
    ]
    assert [each["name"] for each in lanes(events, 1)["graphs"]] == [str(run) for run in step.runs]
    assert [(each["name"], each["dur"]) for each in lanes(events, 4)["measured"]] == [("call to call", 5)]
    assert {each["cat"] for each in lanes(events, 3)["compute"]} == {"op", "recompute", "stall"}

    page = tmp_path / "page.html"
    assert main(["view", str(tmp_path), "--trace", str(path), "--html", str(page)]) == 0
    assert page.exists()


@pytest.mark.skipif(
    shutil.which("trace_processor_shell") is None, reason="Perfetto's trace_processor_shell is not here"
)
def test_perfettos_own_processor_counts_the_same(tmp_path: Path) -> None:
    write_step(tmp_path, 0, small_step())
    write_region(tmp_path, slow_region())
    write_measured(tmp_path, 0, {"call_to_call_ns": 5_000, "calls_seen": 9})
    path = tmp_path / "trace.json"
    assert main(["view", str(tmp_path), "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    arrows = sum(each["ph"] in "st" for each in events)
    assert arrows
    query = tmp_path / "query.sql"
    query.write_text(
        "select (select count(*) from slice), (select sum(dur) from slice), (select max(depth) from slice), "
        "(select count(*) from flow), (select count(*) from (select distinct utid, thread.name from slice "
        "join thread_track on track_id = thread_track.id join thread using (utid))), "
        "(select count(*) from stats where severity in ('error', 'data_loss') and value > 0);"
    )
    command = ["trace_processor_shell", "-q", str(query), str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    lanes = {(each["pid"], each["tid"]) for each in slices}
    duration_ns = sum(round(each["dur"] * 1000) for each in slices)
    found = [int(number) for number in printed.splitlines()[-1].split(",")]
    assert found == [len(slices), duration_ns, 0, arrows, len(lanes), 0]


def test_a_trace_that_cannot_be_written_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_region(tmp_path, RECORD)
    path = tmp_path / "no" / "trace.json"
    assert main(["view", str(tmp_path), "--trace", str(path)]) == 2
    there = f"{path} cannot be written to: No such file or directory; name another file."
    assert capsys.readouterr().err == f"tencache: {there}\n"
