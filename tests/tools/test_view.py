"""The page of a run: its numbers are the plan's, it needs no network, and it is small enough."""

import base64
import dataclasses
import doctest
import gzip
import importlib
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects
import pytest
import torch
from hypothesis import given, settings
from outcomes import Outcomes
from problems import GIB, moving_problems, problems, trained_offloaded, transformer
from test_bounds import recipes_of_matmuls
from test_step_tables import small_step
from test_tables import PROBLEM, RECORD
from torch import nn

import tencache_fx
from tencache_fx.cli import main
from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import keep_resident
from tencache_fx.planning.planner import plan_transfers
from tencache_fx.planning.problem import Links, Problem
from tencache_fx.planning.search import plan_region
from tencache_fx.planning.simulator import simulate
from tencache_fx.records import Listing, NodeRow, RegionRecord, StepRecord
from tencache_fx.reporting import page
from tencache_fx.reporting.decisions import dearest_decisions
from tencache_fx.reporting.dump import read_regions, read_steps, write_measured, write_region, write_step
from tencache_fx.reporting.figure import CALL, Measured, draw, merge
from tencache_fx.reporting.page import MOST_BYTES, build_page, write_page
from tencache_fx.reporting.timeline import Bar, Held, Lane, Timeline, region_timeline, step_timeline
from tencache_fx.reporting.view import views_of

EAGER = {"compiler": "eager", "calibrate": False}


def planned(problem: Problem, policy: str = "joint") -> RegionRecord:
    problem_for, plan = plan_region(problem, policy)
    return dataclasses.replace(RECORD, captured=problem, problem=problem_for, plan=plan)


def unpacked(page: str) -> list[dict[str, Any]]:
    """Return the data of all views of a page."""
    packed = re.findall(r'<script type="text/plain" id="view-\d+">(\S+)</script>', page)
    return [json.loads(gzip.decompress(base64.b64decode(text))) for text in packed]


def trace(figure: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in figure["data"] if each["name"] == name]
    return found


@pytest.fixture(scope="module")
def crowded() -> RegionRecord:
    """Of a region whose values are moved and recomputed."""
    problem = transformer(layers=2, device_bytes=6 * GIB)
    return planned(dataclasses.replace(problem, recipes=recipes_of_matmuls(problem)))


def check_timeline(timeline: Timeline) -> None:
    """The timeline has the forecast's peak, times and traffic."""
    problem, plan, forecast = timeline.problem, timeline.plan, timeline.plan.forecast
    assert (timeline.total_bytes == live_bytes(problem, plan.transfers)).all()
    assert int(timeline.total_bytes.max()) == forecast.peak_bytes
    assert int(timeline.total_bytes.argmax()) == forecast.peak_step
    assert all((nbytes >= 0).all() for nbytes in timeline.held.values())
    assert timeline.replay.makespan_ns == forecast.makespan_ns
    compute = timeline.lane(Lane.COMPUTE)
    assert all(early.end_ns <= late.start_ns + 2 for early, late in pairwise(compute))
    busy_ns = sum(bar.duration_ns for bar in compute if bar.sort != "stall")
    assert busy_ns == sum(op.duration_ns for op in problem.ops)
    stalls_ns = sum(bar.duration_ns for bar in compute if bar.sort == "stall")
    assert stalls_ns == pytest.approx(forecast.stall_out_ns + forecast.stall_in_ns, abs=2 * len(compute) + 2)
    for lane, nbytes in ((Lane.OUT, forecast.d2h_bytes), (Lane.IN, forecast.h2d_bytes)):
        sizes = {transfer.name: transfer.nbytes for transfer in plan.transfers}
        assert sum(sizes[bar.storage] for bar in timeline.lane(lane)) == nbytes
    for lane, nbytes in ((Lane.WRITE, forecast.disk_write_bytes), (Lane.READ, forecast.disk_read_bytes)):
        assert sum(sizes[bar.storage] for bar in timeline.lane(lane)) == nbytes
    assert timeline.host.nbytes[-1] == timeline.disk.nbytes[-1] == 0


OUTCOMES = Outcomes()


@OUTCOMES.reaching(0.3, "moved")
@settings(max_examples=150)
@given(problem=problems() | moving_problems())
def test_numbers_of_any_region_are_the_forecast(problem: Problem) -> None:
    try:
        record = planned(problem, "teraio")
    except BudgetError:
        OUTCOMES.note("no plan")
        return
    check_timeline(region_timeline(record))
    OUTCOMES.note("moved" if record.plan.transfers else "kept")


def test_numbers_of_a_crowded_region_are_the_forecast(crowded: RegionRecord) -> None:
    timeline = region_timeline(crowded)
    check_timeline(timeline)
    assert crowded.plan.recomputed
    assert timeline.held[Held.RECOMPUTED].any()
    assert any(bar.sort == "recompute" for bar in timeline.lane(Lane.COMPUTE))


def test_numbers_of_a_step_are_the_forecast() -> None:
    record = small_step()
    timeline = step_timeline(record, {})
    check_timeline(timeline)
    run = record.runs[3]
    assert timeline.held[Held.EXTERNAL][run.begin : run.end].tolist() == [run.held_bytes] * (run.end - run.begin)
    assert [bar.name for bar in timeline.lane(Lane.GRAPH)] == [str(run) for run in record.runs]
    assert timeline.plain.peak_bytes == 14_002_000
    (bar,) = timeline.lane(Lane.OUT)
    why = "next read by op 19 mm_3; if it stayed, op 9 mm would be 3 MB over the budget"
    assert bar.note == f"activation, 4 MB<br>call 3.0<br>{why}"


@pytest.mark.parametrize("early", [True, False])
def test_state_on_the_device_is_told_from_what_others_hold(*, early: bool) -> None:
    problem = trained_offloaded(6).within(device_bytes=420)
    problem = dataclasses.replace(problem, external_bytes=7, updates_in_backward=early)
    record = planned(problem)
    assert record.plan.updated_here
    timeline = region_timeline(record)
    check_timeline(timeline)
    assert set(timeline.held[Held.OPTIMIZER].tolist()) == {96 * len(record.plan.updated_here)}
    assert set(timeline.held[Held.EXTERNAL].tolist()) == {7}
    assert timeline.plain.peak_bytes == 7 + 6 * (16 + 16 + 96)  # parameters, gradients and state of all
    updates = timeline.lane(Lane.UPDATE)
    assert len(updates) == 6 - len(record.plan.updated_here) > 0
    landed = {bar.storage: bar.end_ns for bar in timeline.lane(Lane.OUT)}
    parameters = {storage.parameter: storage.name for storage in record.problem.storages}
    if early:
        assert all(bar.start_ns >= landed[parameters[bar.name]] for bar in updates)
    else:  # those of the step before, in the order of reading
        assert [bar.name for bar in updates] == sorted(bar.name for bar in updates)
        assert updates[0].start_ns == 0
    assert {bar.duration_ns for bar in updates} == {(2 * 16 + 2 * 96) * 10}


def test_copies_of_parameters_that_stay_are_parameters() -> None:
    """Also where their names say that a graph has two of them."""
    problem = dataclasses.replace(trained_offloaded(6), copies_parameters=True)
    storages = [dataclasses.replace(s, name=s.name.replace("_1", "#2")) for s in problem.storages]
    record = planned(dataclasses.replace(problem, storages=tuple(storages)).within(device_bytes=10_000))
    assert record.plan.resident
    timeline = region_timeline(record)
    check_timeline(timeline)
    assert not timeline.held[Held.RECOMPUTED].any()
    assert not timeline.held[Held.ACTIVATIONS].any()
    assert timeline.plain.peak_bytes == 6 * (16 + 16 + 96)


def test_plain_has_the_state_of_parameters_that_stay_too() -> None:
    """As in steps, whose problems have decided which stay: their gradients may be stored all the same."""
    problem = keep_resident(trained_offloaded(6), [f"w{index}" for index in range(6)])
    assert region_timeline(planned(problem)).plain.peak_bytes == 6 * (16 + 16 + 96)


def test_the_figure_has_the_plan_in_it(crowded: RegionRecord) -> None:
    call = Bar(lane=Lane.GRAPH, name=CALL, start_ns=0, end_ns=10**12)
    measured = Measured(bars=(call,), peak_bytes=5 * GIB)
    graphs = Measured(bars=(dataclasses.replace(call, name="forward", end_ns=2 * crowded.plan.forecast.makespan_ns),))
    wide = draw(region_timeline(crowded), 6 * GIB, graphs, 1000)
    assert wide["layout"]["xaxis"]["range"][1] == pytest.approx(2 * crowded.plan.forecast.makespan_ns / 1e6)
    forecast = crowded.plan.forecast
    for columns in (1000, 20):
        figure = draw(region_timeline(crowded), 6 * GIB, measured, columns)
        assert max(trace(figure, "all, as planned")["y"]) == forecast.peak_bytes
        stacked = [each["y"] for each in figure["data"] if each.get("stackgroup")]
        assert np.sum(stacked, axis=0).tolist() == trace(figure, "all, as planned")["y"]
        assert trace(figure, "all, as planned")["x"][-1] == pytest.approx(forecast.makespan_ns / 1e6)
        assert trace(figure, "budget 6.44 GB")["y"] == [6 * GIB, 6 * GIB]
        assert trace(figure, "measured peak 5.37 GB")["y"] == [5 * GIB, 5 * GIB]
        assert figure["layout"]["xaxis"]["range"][1] == pytest.approx(1.25 * forecast.makespan_ns / 1e6)
        lanes = ["measured", "copies in", "copies out", "compute", "graphs"]
        assert figure["layout"]["yaxis2"]["categoryarray"] == lanes
        ops_ns = sum(op.duration_ns for op in crowded.problem.ops)
        drawn = [each for each in figure["data"] if each.get("y", [""])[0] == "compute" and each["name"] != "stall"]
        assert sum(sum(each["x"]) for each in drawn) == pytest.approx(ops_ns / 1e6)
        plotly.graph_objects.Figure(figure)  # raises for what Plotly does not know


def test_bars_too_short_to_see_are_merged_by_sort() -> None:
    bars = [
        Bar(lane=Lane.COMPUTE, name=f"op_{k}", start_ns=10 * k, end_ns=10 * k + 8, sort="stall" if k % 2 else "op")
        for k in range(8)
    ]
    found = merge(bars, columns=2, end_ns=80)
    assert [(bar.name, bar.sort, bar.start_ns, bar.end_ns) for bar in found] == [
        ("2: op_0 to op_2", "op", 0, 16),
        ("2: op_1 to op_3", "stall", 16, 32),
        ("2: op_4 to op_6", "op", 40, 56),
        ("2: op_5 to op_7", "stall", 56, 72),
    ]
    assert merge(bars, columns=8, end_ns=80) == bars


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(importlib.import_module("tencache_fx.reporting.figure"))
    assert (found.attempted > 0, found.failed) == (True, 0)


def test_decisions_are_priced_by_the_replay_without_them(crowded: RegionRecord) -> None:
    slow = Links(
        d2h_bytes_per_s=4 * 10**9,
        h2d_bytes_per_s=4 * 10**9,
        d2h_duplex_bytes_per_s=3 * 10**9,
        h2d_duplex_bytes_per_s=3 * 10**9,
    )
    record = planned(dataclasses.replace(crowded.captured, links=slow), "teraio")
    timeline = region_timeline(record)
    found = dearest_decisions(timeline, record.captured, most=4)
    assert len(found) == 4
    assert [each.price_ns for each in found] == sorted((each.price_ns for each in found), reverse=True)
    first = found[0]
    assert first.price_ns > 0
    others = [each for each in record.plan.transfers if each.name != first.name]
    without = simulate(record.problem, others, record.plan.staging).makespan_ns
    assert first.price_ns == record.plan.forecast.makespan_ns - without
    recomputed = dearest_decisions(region_timeline(crowded), crowded.captured, most=100)
    assert {each.name for each in recomputed if each.deed == "recomputed"} == set(crowded.plan.recomputed)


def test_a_decision_to_recompute_names_the_layer(crowded: RegionRecord) -> None:
    makers = [op.name for op in crowded.captured.ops]
    rows = tuple(NodeRow(name=m, op="call_function", target="", inputs=(), type="", layer=f"of {m}") for m in makers)
    record = dataclasses.replace(crowded, listings=(Listing(phase="forward", nodes=rows),))
    found = dearest_decisions(region_timeline(record), record.captured, most=100)
    notes = [each.note for each in found if each.deed == "recomputed"]
    assert notes
    assert all(re.fullmatch(r"activation, of (.+), made by \1", note) for note in notes)


def test_a_page_of_too_many_plans_names_how_many_are_left_out(
    crowded: RegionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown first is there in any case."""
    many = [dataclasses.replace(RECORD, region=number, problem=PROBLEM) for number in range(1, 5)]
    views = views_of([crowded, *many], {}, {})
    whole = build_page(views, "run")
    assert len(unpacked(whole)) == 5
    assert "did not find room" not in whole
    monkeypatch.setattr(page, "MOST_BYTES", len(whole) - 1000 + page._ROOM_BYTES)
    left = build_page(views, "run")
    (first, *others) = json.loads(re.search(r"NAMES = (.*), CHOSEN = 0", left)[1])
    assert first == views[0].name
    assert len(unpacked(left)) == 1 + len(others) < 5
    assert f"{4 - len(others)} more plans did not find room; tencache dump tells of them." in left


def test_a_page_has_all_plans_and_fetches_nothing(crowded: RegionRecord) -> None:
    step = small_step()
    seen = {"call_to_call_ns": 10**9, "calls_seen": 3, "forward_ns": 40_000_000, "backward_ns": 50_000_000}
    views = views_of([crowded], {4: step}, {0: {**seen, "device_peak_bytes": None}})
    built = build_page(views, "a </title> b")
    first, second = unpacked(built)
    assert max(trace(first["frames"][0]["figure"], "all, as planned")["y"]) == step.plan.forecast.peak_bytes
    assert max(trace(second["frames"][0]["figure"], "all, as planned")["y"]) == crowded.plan.forecast.peak_bytes
    assert ["measured, call to call", "1 s"] in second["frames"][0]["facts"]
    assert ["measured, forward and backward", "90 ms"] in second["frames"][0]["facts"]
    seen = trace(second["frames"][0]["figure"], "measured")
    assert [seen["base"], seen["x"], seen["text"]] == [[0, 40], [40, 50], ["forward", "backward"]]
    assert "device peak" in second["frames"][0]["text"]
    head, *rows = second["frames"][0]["decisions"]
    assert 5 < len(rows) <= 10, "the ten most expensive decisions, of a plan that has few more"
    assert all(len(row) == len(head) for row in rows)
    assert "<title>a &lt;/title&gt; b</title>" in built
    assert not re.findall(r"(?:src|href)=|https?:|@\w+@", re.sub(r'<script type="text/plain".*', "", built))
    assert len(built) < 2.2e6


@pytest.mark.slow
def test_a_page_of_ten_thousand_steps_is_small(tmp_path: Path) -> None:
    problem = transformer(layers=420, device_bytes=None)
    assert len(problem.ops) > 10_000
    problem = problem.within(device_bytes=int(live_bytes(problem).max()) * 6 // 10, host_bytes=1 << 50)
    plan = plan_transfers(problem, "teraio", 0.0)
    assert len(plan.transfers) > 1000
    write_region(tmp_path, dataclasses.replace(RECORD, captured=problem, problem=problem, plan=plan))
    assert main(["view", str(tmp_path)]) == 0
    text = (tmp_path / "view.html").read_text()
    assert len(text) < MOST_BYTES
    figure = unpacked(text)[0]["frames"][0]["figure"]
    assert max(trace(figure, "all, as planned")["y"]) == plan.forecast.peak_bytes
    assert sum(len(each["x"]) for each in figure["data"]) < 30_000


def test_a_region_that_ran_is_drawn(tmp_path: Path) -> None:
    """By the public function, and by the command from its dump: the same plan, with the layers of its tensors."""
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    options = {**EAGER, "device_budget": "2MB", "recompute": "none", "dump_dir": tmp_path, "scope": "region"}
    model = torch.compile(nn.Sequential(*layers), backend="tencache", options=options)
    for _ in range(3):
        model(torch.randn(1024, 64)).square().mean().backward()
    text = tencache_fx.report(html=tmp_path / "live.html")
    record = tencache_fx.regions()[-1]  # regions of other tests may live
    assert f"region {record.region} Sequential" in text
    tencache_fx.close()
    torch._dynamo.reset()
    assert main(["view", str(tmp_path), "--html", str(tmp_path / "dumped.html")]) == 0
    for name in ("live", "dumped"):
        view = unpacked((tmp_path / f"{name}.html").read_text())[-1]
        figure = view["frames"][0]["figure"]
        assert max(trace(figure, "all, as planned")["y"]) == record.plan.forecast.peak_bytes
        assert trace(figure, "copies out")["hovertext"]
        assert all("(Linear)" in text or "(Tanh)" in text for text in trace(figure, "copies out")["hovertext"])
        assert len(trace(figure, "copies out")["x"]) == len(record.plan.transfers) > 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[StepRecord, ...]]:
    """Return the dump of a step that ran, with the page of the live regions in it, and the plans of its steps."""
    folder = tmp_path_factory.mktemp("ran")
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    for block in blocks:
        block.compile(backend="tencache", options={**EAGER, "device_budget": "4.5MB", "dump_dir": folder})
    for _ in range(4):
        blocks(torch.randn(512, 64)).square().mean().backward()
    tencache_fx.report(html=folder / "live.html")
    records = tencache_fx.steps()
    tencache_fx.close()
    torch._dynamo.reset()
    assert any(record.plan.transfers for record in records)
    return folder, records


def test_a_step_that_ran_is_drawn(ran: tuple[Path, tuple[StepRecord, ...]]) -> None:
    folder, live = ran
    assert main(["view", str(folder), "--html", str(folder / "dumped.html")]) == 0
    for name, records in (("live", live), ("dumped", read_steps(folder).values())):
        text = (folder / f"{name}.html").read_text()
        views = unpacked(text)
        for record, view in zip(records, views, strict=False):
            figure = view["frames"][0]["figure"]
            assert max(trace(figure, "all, as planned")["y"]) == record.plan.forecast.peak_bytes
            assert len(trace(figure, "graphs")["x"]) == len(record.runs)
        assert len(views) > len(records) > 0
        names = json.loads(re.search(r"NAMES = (.*), CHOSEN", text)[1])
        assert names[0].startswith("step 0: ")
        assert names[-1].endswith("(where its step has no plan)")


def test_a_page_has_a_slider_for_other_budgets(ran: tuple[Path, tuple[StepRecord, ...]]) -> None:
    """Each budget has its plan, and no plan is over its budget; the one of the run is shown first."""
    folder, _ = ran
    assert main(["view", str(folder), "--sweep", "5", "--html", str(folder / "swept.html")]) == 0
    views = unpacked((folder / "swept.html").read_text())
    for number, record in read_steps(folder).items():
        view = views[number]
        assert len(view["frames"]) >= 5
        assert view["frames"][view["chosen"]]["budget"] == "4.5 MB"
        peaks = []
        for frame in view["frames"]:
            (limit,) = [each["y"][0] for each in frame["figure"]["data"] if each["name"] == f"budget {frame['budget']}"]
            peaks.append(max(trace(frame["figure"], "all, as planned")["y"]))
            assert peaks[-1] <= limit
        assert peaks[view["chosen"]] == record.plan.forecast.peak_bytes
        assert peaks == sorted(peaks)
        assert peaks[0] < peaks[-1]
    assert {len(view["frames"]) for view in views[len(read_steps(folder)) :]} == {1}


def test_a_step_planned_anew_keeps_to_the_budget_asked_for(
    ran: tuple[Path, tuple[StepRecord, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies back begin sooner where there is room: in that budget, not in the one of the run."""
    folder, _ = ran
    for number, record in read_steps(folder).items():
        path = folder / f"step-{number:03d}" / "record.json"
        for nbytes in range(record.plan.forecast.floor_bytes, 4_500_000, 50_000):
            assert main(["plan", str(path), "--json", "--device-budget", str(nbytes)]) == 0
            assert json.loads(capsys.readouterr().out)["forecast"]["peak_bytes"] <= nbytes


def test_what_a_dump_has_of_a_step_is_shown_beside_it(tmp_path: Path) -> None:
    """A region with one call in a step is called once a step."""
    record: StepRecord = small_step()
    write_step(tmp_path, 0, record)
    for region in (3, 4):
        write_region(tmp_path, dataclasses.replace(RECORD, region=region))
        write_measured(
            tmp_path, region, {"call_to_call_ns": region * 10**9, "calls_seen": 9, "device_peak_bytes": region}
        )
    assert main(["view", str(tmp_path)]) == 0
    step, *regions = unpacked((tmp_path / "view.html").read_text())
    assert ["measured, call to call", "4 s"] in step["frames"][0]["facts"]
    assert ["measured peak", "4 B"] in step["frames"][0]["facts"]
    assert ["measured, call to call", "3 s"] in regions[0]["frames"][0]["facts"]
    assert len(read_regions(tmp_path)) == len(regions) == 2


def test_what_cannot_be_drawn_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: str) -> str:
        assert main(["view", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    nowhere = tmp_path / "nowhere"
    holds = "holds no region; give the dump_dir of a run that compiled a model."
    assert told(str(nowhere)) == f"tencache: {nowhere} {holds}\n"
    write_region(tmp_path, RECORD)
    lost = tmp_path / "no" / "page.html"
    there = f"{lost} cannot be written to: No such file or directory; name another file."
    assert told(str(tmp_path), "--html", str(lost)) == f"tencache: {there}\n"
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    missing = "pages are drawn with plotly, which is not installed: pip install 'tencache_fx[view]'."
    assert told(str(tmp_path)) == f"tencache: {missing}\n"
    with pytest.raises(OptionError, match="there is no plan to show"):
        write_page(tmp_path / "page.html", [], "nothing")
