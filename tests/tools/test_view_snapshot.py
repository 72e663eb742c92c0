"""The memory snapshot of a run: torch's own viewer reads it, and at each op it holds what the plan says."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from outcomes import Outcomes
from problems import moving_problems, problems
from test_step_tables import small_step
from test_view_trace import planned, slow_region

from tencache_fx.cli import main
from tencache_fx.errors import BudgetError
from tencache_fx.planning.problem import Problem
from tencache_fx.reporting.dump import write_region, write_step
from tencache_fx.reporting.snapshot import device_spans, snapshot_of
from tencache_fx.reporting.view import views_of

OUTCOMES = Outcomes()


@OUTCOMES.reaching(0.3, "transfers")
@settings(max_examples=100)
@given(problem=problems() | moving_problems())
def test_the_device_holds_what_the_plan_says(problem: Problem) -> None:
    try:
        record = planned(problem)
    except BudgetError:
        OUTCOMES.note("no plan")
        return
    OUTCOMES.note("transfers" if record.plan.transfers else "kept")
    (view,) = views_of([record], {}, {})
    timeline = view.timeline
    spans = list(device_spans(timeline))
    starts = timeline.replay.starts_ns
    for step, start in enumerate(starts):
        if step + 1 < len(starts) and starts[step + 1] == start:
            continue  # an op of no length is not to be seen
        held = sum(s.nbytes for s in spans if s.start_ns <= start and (s.stop_ns is None or start < s.stop_ns))
        assert held == timeline.total_bytes[step]


def check_trace(trace: list[dict[str, Any]], segments: list[dict[str, Any]]) -> int:
    """Nothing overlaps, and what is never freed is what the segment has at the end; return the most that is held."""
    live: dict[int, int] = {}
    most = 0
    for event in trace:
        if event["action"] == "alloc":
            ends = event["addr"] + event["size"]
            assert all(at >= ends or at + size <= event["addr"] for at, size in live.items())
            live[event["addr"]] = event["size"]
            most = max(most, sum(live.values()))
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
    assert [event["time_us"] for event in trace] == sorted(event["time_us"] for event in trace)
    blocks = [block for segment in segments for block in segment["blocks"]]
    assert {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"} == live
    assert sum(block["size"] for block in blocks) == sum(segment["total_size"] for segment in segments)
    return most


def test_a_dump_as_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, region = small_step(), slow_region()
    write_step(tmp_path, 0, step)
    write_region(tmp_path, region)
    path = tmp_path / "snapshot.pickle"
    assert main(["view", str(tmp_path), "--snapshot", str(path)]) == 0
    assert "pytorch.org/memory_viz" in capsys.readouterr().out
    assert not (tmp_path / "view.html").exists()
    found = pickle.loads(path.read_bytes())
    peaks = [
        check_trace(trace, [segment for segment in found["segments"] if segment["device"] == device])
        for device, trace in enumerate(found["device_traces"])
    ]
    assert len(peaks) == 6
    assert peaks[0] == step.plan.forecast.peak_bytes
    assert peaks[3] == region.plan.forecast.peak_bytes
    assert 0 < peaks[4] <= region.plan.forecast.host_bytes
    assert 0 < peaks[5] <= region.plan.forecast.disk_bytes


def test_torch_reads_the_snapshot() -> None:
    viz = importlib.import_module("torch.cuda._memory_viz")
    region = slow_region()
    found = snapshot_of(views_of([region], {}, {}))
    assert "alloc" in viz.trace(found)
    assert "Total Allocated" in viz.segsum(found) or "total" in viz.segsum(found).lower()
    for plot in (viz.trace_plot, viz.segment_plot):
        page = plot(found)
        assert "MemoryViz" in page
        assert len(page) > 1000
    for lines in (viz.memory, viz.segments):
        seen: list[str] = []
        lines(found, format_flamegraph=seen.append)
        assert any("active_allocated" in text for text in seen)


def test_a_snapshot_that_cannot_be_written_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_region(tmp_path, slow_region())
    assert main(["view", str(tmp_path), "--snapshot", str(tmp_path)]) == 2
    assert "cannot be written to: Is a directory" in capsys.readouterr().err
