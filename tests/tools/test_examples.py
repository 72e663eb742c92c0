"""The examples run as a stranger runs them, and show what they claim to show."""

import argparse
import dataclasses
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from problems import transformer
from programs import transformer_recipes
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tencache_fx.option_values import read_size
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.search import plan_region
from tencache_fx.serialization import to_json
from tencache_fx.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--layers", "2", "--hidden", "64", "--batch", "4", "--seq", "128", "--device", "cpu")
LIMIT_S = 280


def run_example(name: str, *arguments: str) -> str:
    """Run an example in a process of its own, on one thread; return what it prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_ranks_share_a_model_and_go_on_from_a_checkpoint_as_another_number(tmp_path):
    """In less than the weights take; the loss goes on falling."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "TENCACHE_COMPILER": "eager",
    }
    losses = []
    for ranks in (2, 1):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        asked = ["--device-budget", "6MB", "--steps", "10", "--checkpoint", str(tmp_path / "saved")]
        done = subprocess.run(
            [*launch, ROOT / "examples" / "train_sharded.py", *asked],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        losses += [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
        assert f"of weights on each of {ranks} ranks" in done.stdout
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)


def shown(output: str, label: str) -> str:
    """Return what stands behind `label` in the summary."""
    (value,) = re.findall(rf"^{re.escape(label)} {{2,}}(.+)$", output, re.MULTILINE)
    return value


def shown_bytes(output: str, label: str) -> int:
    size = read_size(label, shown(output, label))
    assert size is not None
    assert size.nbytes is not None
    return size.nbytes


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_train_gpt_stays_in_its_budget_on_all_three_tiers(compiler, tmp_path):
    output = run_example(
        "train_gpt.py", *TINY, "--steps", "12", "--compiler", compiler, "--compare", "--dump-dir", str(tmp_path)
    )
    first, last = map(float, shown(output, "training loss").split(" -> "))
    assert last < first - 1

    plain, peak = shown_bytes(output, "device peak, plain"), shown_bytes(output, "device peak, tencache")
    assert peak <= plain * 0.61  # the budget is 60 %, and what is printed is rounded
    moved, to_disk = (shown_bytes(output, f"{what}, a step") for what in ("to host memory", "of it on to disk"))
    assert 0 < to_disk < moved

    (apart,) = re.findall(r"The losses differ by at most (\S+) over 12 steps", output)
    assert float(apart) < (1e-6 if compiler == "eager" else 1e-2)
    assert re.search(r"^plain .*\b1\.000 ", output, re.MULTILINE)
    assert (tmp_path / "region-000" / "record.json").exists()


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.slow
def test_train_gpt_takes_budgets_and_a_directory_and_says_so_where_there_is_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    output = run_example(
        "train_gpt.py", *TINY, "--steps", "3", "--policy", "10cache",
        "--budget", "6MB", "--host-budget", "1GB", "--spill-dir", str(tmp_path),
    )  # fmt: skip
    assert "Inductor needs a C++ compiler on a CPU, and there is none" in output
    assert "training loss" in output
    assert shown(output, "device peak, plain") == "not run"
    assert shown_bytes(output, "device peak, tencache") <= 6_000_000
    assert shown(output, "of it on to disk, a step") == "0 B"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(LIMIT_S + 20)
def test_losses_are_those_of_torch_whatever_state_is_kept_in():
    sizes = ("--layers", "1", "--hidden", "64", "--seq", "32", "--batch", "2")
    steps = ("--steps", "6", "--every", "3", "--seeds", "1", "--compiler", "eager", "--device", "cpu")
    about, *lines = map(json.loads, run_example("loss_curves.py", *sizes, *steps).splitlines())
    assert [line["state"] for line in lines] == about["states"] == ["torch", "fp32", "bf16", "8bit"]
    torchs, *ours = (torch.tensor([*line["losses"], line["validation_loss"]]) for line in lines)
    assert torchs[1] < torchs[0], "it learns"
    for losses in ours:
        torch.testing.assert_close(losses, torchs, rtol=0.01, atol=0)


def test_inspect_graph_shows_every_op(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    output = run_example("inspect_graph.py")
    for op in ("offload", "release", "prefetch", "wait"):
        assert re.search(rf"^>> .*tencache\.{op}\.", output, re.MULTILINE), op
    for heading in ("The plan", "The tensors", "The pinned host buffers", "The rewritten graphs"):
        assert f"\n{heading}" in output
    (dump_dir,) = re.findall(r"tencache dump (\S+) --what all", output)
    assert Path(dump_dir).is_relative_to(tmp_path)
    assert (Path(dump_dir) / "region-000" / "forward.txt").exists()


# ---------------------------------------------------------------- the benchmark

GIB = 1 << 30
MEASURED = (
    {"way": "plain", "step_ns": 100, "peak_bytes": 20 * GIB, "state_bytes": 8 * GIB},
    {"way": "checkpoint", "step_ns": 130, "peak_bytes": 10 * GIB},
    {"way": "memory-budget:0.5", "error": "RuntimeError: no"},
    {"way": "tencache:teraio@16", "policy": "teraio", "forecast": {"floor_bytes": 9 * GIB}},
)


@pytest.fixture
def bench(monkeypatch):
    """Return a function that imports one of the benchmark's modules, as its scripts do."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "bench")
    return importlib.import_module


@pytest.fixture
def draw_memory(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "9")
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("draw_memory")


def test_draw_memory_draws_what_the_run_held(draw_memory, tmp_path, monkeypatch, capsys):
    """Each path goes through the memory of its step, the line through the budget, and the labels name both peaks."""
    curves, traced = [], draw_memory.trace_step

    def trace_step(compile_model, args):
        curves.append(traced(compile_model, args))
        return curves[-1]

    monkeypatch.setattr(draw_memory, "trace_step", trace_step)
    picture = tmp_path / "memory.svg"
    monkeypatch.setattr(sys, "argv", ["draw_memory.py", *TINY, "--compiler", "eager", "--output", str(picture)])
    draw_memory.main()
    svg = ElementTree.fromstring(picture.read_text())
    space = {"svg": "http://www.w3.org/2000/svg"}
    top, height = draw_memory.peak(curves[0]) * 1.08, draw_memory.HEIGHT - draw_memory.TOP - draw_memory.BOTTOM
    paths = svg.findall("svg:path", space)
    assert len(paths) == len(curves) == 2
    for curve, path in zip(curves, paths, strict=True):
        drawn = [
            (draw_memory.HEIGHT - draw_memory.BOTTOM - float(y)) / height * top
            for y in re.findall(r"V([\d.]+)", path.get("d"))
        ]
        assert max(drawn) == pytest.approx(draw_memory.peak(curve), abs=top / height)
        assert min(drawn) == pytest.approx(min(held for _, held in curve), abs=top / height)
        assert drawn[-1] == pytest.approx(curve[-1][1], abs=top / height)
    plain, ours = map(draw_memory.peak, curves)
    budget = plain * 60 // 100
    assert ours <= budget < plain
    texts = [text.text for text in svg.findall("svg:text", space)]
    assert {f"torch.compile, peak {format_bytes(plain)}", f"tencache, peak {format_bytes(ours)}"} <= set(texts)
    assert f"budget {format_bytes(budget)}" in texts
    assert f"peak {format_bytes(plain)} plain, {format_bytes(ours)} with tencache." in capsys.readouterr().out


def test_draw_memory_adds_up_what_is_allocated_and_freed(draw_memory):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        before = torch.empty(1 << 20, dtype=torch.uint8)
        with record_function(draw_memory.START):
            pass
        first = torch.empty(3 << 20, dtype=torch.uint8)
        del before
        second = torch.empty(1 << 19, dtype=torch.uint8)
        del first, second
    held = [nbytes for _, nbytes in draw_memory.read_curve(profiled, held_bytes=1 << 20)]
    assert held == [1 << 20, 4 << 20, 3 << 20, (3 << 20) + (1 << 19), 1 << 19, 0]


def request_of(bench, way: str, budget_bytes: int | None = None):
    return bench("measure").Request(
        case="tiny",
        way=way,
        budget_bytes=budget_bytes,
        device="cpu",
        steps=5,
        compiler="eager",
        cap=1.1,
        pair=False,
        dump_dir=None,
    )


def test_ablate_plans_as_we_do_and_says_what_recomputation_is_worth(bench, tmp_path, monkeypatch, capsys):
    problem = transformer_recipes(transformer(layers=2))
    path = tmp_path / "problem.json"
    path.write_text(to_json(problem))
    monkeypatch.setattr(sys, "argv", ["ablate.py", str(path), "--divisors", "1.5"])
    bench("ablate").main()
    lines = capsys.readouterr().out.splitlines()
    whole, less = (next(line for line in lines if line.startswith(part)) for part in ("nothing", "recomputation"))
    tight = problem.within(device_bytes=int(live_bytes(problem).max() / 1.5))
    plan = plan_region(tight, "joint")[1]
    assert f"{plan.forecast.makespan_ns / plan.forecast.ideal_ns:.4f}" == whole.split()[3]
    assert less.split()[1] > whole.split()[3]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_bench_runs_a_case_side_by_side(bench, compiler, tmp_path):
    lines_path, markdown = tmp_path / "lines.jsonl", tmp_path / "table.md"
    markdown.write_text("before\n<!-- bench:tiny -->\nold\n<!-- /bench:tiny -->\nbehind\n")
    output = run_example(
        "bench/run.py", "--case", "tiny", "--ways", "tencache:teraio@60%", "checkpoint", "--steps", "5", "--device",
        "cpu", "--in-process", "--compiler", compiler, "--json", str(lines_path), "--markdown", str(markdown),
        "--dump", str(tmp_path / "dump"),
    )  # fmt: skip
    lines = [json.loads(line) for line in lines_path.read_text().splitlines()]
    assert [json.loads(line) for line in output.splitlines() if line.startswith("{")] == lines
    plain, ours, checkpoint = lines  # the budget is a share of plain's peak, so plain ran first
    assert (plain["way"], plain["ratio"]) == ("plain", 1.0)
    assert ours["budget_bytes"] == int(plain["peak_bytes"] * 0.6)
    assert plain["state_bytes"] < ours["peak_bytes"] <= ours["budget_bytes"]
    assert checkpoint["peak_bytes"] < plain["peak_bytes"]
    assert ours["ratio"] == pytest.approx(ours["step_ns"] / plain["step_ns"], abs=1e-4)
    assert ours["forecast"]["transfers"] > 0
    assert ours["per_step"]["d2h_bytes"] == ours["forecast"]["d2h_bytes"]
    for line in lines:
        for what in ("loss_first", "loss_last", "gradient_norm_first", "gradient_norm_last"):
            assert line[what] == pytest.approx(plain[what], rel=1e-5)

    text = markdown.read_text()
    assert re.fullmatch(r"before\n<!-- bench:tiny -->\n.*\n<!-- /bench:tiny -->\nbehind\n", text, re.DOTALL)
    assert "old" not in text
    assert re.search(r"^\| tencache:teraio@60% .*\| ok +\|", text, re.MULTILINE)
    assert (tmp_path / "dump/tiny/tencache_teraio_60_/region-000/record.json").exists()
    read = bench("run").read_lines([lines_path], "tiny")
    assert bench("verdicts").report(bench("cases").CASES["tiny"], read) in output


@pytest.mark.slow
def test_what_a_trace_shows_by_itself(bench):
    exposure = bench("exposure")
    assert exposure.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert exposure.exposed([(0, 4), (7, 8)], [(1, 2), (3, 6)]) == 3
    assert exposure.exposed([(1, 2)], [(0, 3)]) == exposure.exposed([], [(0, 3)]) == 0

    def event(name: str, begin: float, end: float, device=DeviceType.CUDA, *, is_range=False):
        times = SimpleNamespace(start=begin, end=end)
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=is_range, time_range=times)

    events = [event("gemm", 0, 4), event("ncclDevKernel_AllGather", 3, 6), event("Memcpy HtoD", 5, 8)]
    events += [event("gemm", 9, 10), event("aten::mm", 0, 10, DeviceType.CPU)]
    events += [event("Optimizer.step#AdamW.step", 0, 10, is_range=True), event("nccl:all_gather", 0, 10, is_range=True)]
    kinds = exposure.spans_of(events)
    shares = {"kernels": 0.5, "exposed_collectives": 0.2, "waits_for_ranks": 0, "exposed_copies": 0.2, "idle": 0.1}
    assert exposure.shares_of(kinds) == pytest.approx(shares)
    shares |= {"exposed_collectives": 0.05, "waits_for_ranks": 0.15}  # another rank came to it at 5.5
    assert exposure.shares_of(kinds, [0.5]) == pytest.approx(shares)
    with pytest.raises(RuntimeError, match="leave out --trace"):
        exposure.shares_of(exposure.spans_of(events[4:]))


def test_bench_goes_on_after_a_way_that_failed(bench):
    measure = bench("measure")
    workload = measure.Workload(bench("cases").CASES["tiny"], torch.device("cpu"))
    failed = measure.measure(workload, request_of(bench, "tencache:teraio@1MiB", 1 << 20))
    assert re.fullmatch(r"BudgetError: step \d+ .* the budget is 1.05 MB\.", failed["error"])
    assert "step_ns" not in failed
    paired = measure.measure(workload, dataclasses.replace(request_of(bench, "checkpoint"), pair=True))
    assert "error" not in paired
    assert paired["plain_ns"] > 0, "plain was timed right after"
    assert workload.model.checkpointed is False


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_bench_runs_each_way_in_a_process_of_its_own(bench, capsys):
    arguments = argparse.Namespace(
        case="tiny",
        device="cpu",
        steps=5,
        compiler="eager",
        cap=1.1,
        pair=False,
        dump=None,
        json=None,
        timeout=LIMIT_S,
        in_process=False,
    )
    (line, failed) = bench("run").run(bench("ways").parse_ways(["checkpoint", "tencache:teraio@floor"]), arguments)
    assert line["way"] == "checkpoint"
    assert 0 < line["step_ns"] < line["first_step_ns"] * 10
    assert "ratio" not in line  # plain was not measured
    assert failed["error"].startswith("WayError: the budget of tencache:teraio@floor depends on")
    assert [json.loads(text) for text in capsys.readouterr().out.splitlines()] == [line, failed]


def test_bench_ends_a_way_that_takes_too_long(bench):
    line = bench("run").measure_apart(request_of(bench, "plain"), timeout_s=0.2)
    assert line["error"].startswith("TimeoutError: not done within 0.2 s")
    assert line["way"] == "plain"


@pytest.mark.gpu
def test_bench_caps_what_the_allocator_reserves(bench):
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    budget_bytes = int((torch.cuda.memory_reserved() + (64 << 20)) / 1.1)
    with bench("measure").capped(device, budget_bytes, 1.1), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device=device)
    torch.empty(1 << 30, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("13.5", int(13.5 * GIB)),
        ("512MiB", 512 << 20),
        ("60%", 12 * GIB),
        ("peak/2.5", 8 * GIB),
        ("peak*0.5", 10 * GIB),
        ("half-activations", 14 * GIB),
        ("checkpoint", 10 * GIB),
        ("checkpoint/2", 5 * GIB),
        ("floor*2", 18 * GIB),
        ("auto", None),
    ],
)
def test_bench_reads_budgets(bench, budget, expected):
    (way,) = bench("ways").parse_ways([f"tencache:teraio@{budget}"])
    assert bench("ways").budget_bytes(way, MEASURED) == expected


@pytest.mark.parametrize(
    "name", ["tencache:10cache@floor", "tencache:teraio@memory-budget:0.5", "tencache:teraio@save-on-cpu"]
)
def test_bench_refuses_budgets_that_depend_on_what_was_not_measured(bench, name):
    (way,) = bench("ways").parse_ways([name])
    with pytest.raises(bench("ways").WayError, match="run"):
        bench("ways").budget_bytes(way, MEASURED)


def test_bench_reads_ways(bench):
    ways = bench("ways")
    names = [way.name for way in ways.parse_ways(["plain", "tencache:all@8", "plain"])]
    assert names[0] == "plain"
    assert {"tencache:teraio@8", "tencache:10cache@8"} <= set(names[1:])
    assert len(names) == len(ways.POLICIES)
    (way,) = ways.parse_ways(["tencache:teraio@8+host_budget=2GiB+spill_dir=/tmp"])
    assert (way.budget, dict(way.options)) == ("8", {"host_budget": "2GiB", "spill_dir": "/tmp"})
    for wrong in (
        "plane", "plain@8", "tencache:teraio", "tencache:lru@8", "memory-budget", "memory-budget:2", "checkpoint:x",
    ):  # fmt: skip
        with pytest.raises(ways.WayError, match=re.escape(repr(wrong))):
            ways.parse_ways([wrong])
    for case in bench("cases").CASES.values():
        assert ways.parse_ways(case.ways)


def test_bench_says_what_is_not_as_it_must_be(bench):
    cases, verdicts = bench("cases"), bench("verdicts")
    same = dict.fromkeys(("loss_first", "loss_last", "gradient_norm_first", "gradient_norm_last"), 2.0)
    plain = {"way": "plain", "step_ns": 100, "peak_bytes": 20, "ratio": 1.0, **same}
    peer = {"way": "checkpoint", "step_ns": 110, "peak_bytes": 10, "ratio": 1.1, **same}
    forecast = {"makespan_ns": 108, "peak_bytes": 10}
    good = {"way": "ours", "step_ns": 105, "peak_bytes": 10, "budget_bytes": 10, "ratio": 1.05, **same}
    good |= {"forecast": forecast}
    case = cases.Case(
        title="", model=None, batch=None, dtype=None, ways=("plain",), must={"ours": 1.06}, unbeaten=("ours",)
    )

    def found(**changes):
        return list(verdicts.faults(case, [plain, peer, good | changes]))

    assert found() == []
    assert re.search("over its budget", *found(budget_bytes=9, step_ns=105, warm_up_peak_bytes=10))
    assert re.search("over its budget", *found(warm_up_peak_bytes=11))
    assert re.search("gradient norm last is .nan%", *found(gradient_norm_last=math.nan))
    assert re.search("loss last is .1.00% from plain's", *found(loss_last=1.98))
    assert re.search("must be 1.060 or less", *found(ratio=1.07))
    assert re.search("slower than checkpoint", *found(step_ns=111))
    assert re.search("predicted time", *found(step_ns=96))
    assert re.search("predicted peak", *found(forecast=forecast | {"peak_bytes": 9}))
    assert re.search("predicted peak", *found(forecast=forecast | {"peak_bytes": 12}))
    assert len(list(verdicts.faults(case, [plain, peer]))) == 2  # what must be measured was not
    assert re.search("^ours failed", next(verdicts.faults(case, [plain, {"way": "ours", "error": "x"}])))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_whole_steps_with_the_state_offloaded_and_on_the_device_lose_the_same():
    output = run_example(
        "bench/whole_step.py", "--layers", "1", "--hidden", "128", "--batch", "2", "--seq", "64", "--warm-up", "1",
        "--steps", "5", "--device", "cpu", "--ways", "device", "home@none", "offload-now@45MB", "home@1MB",
    )  # fmt: skip
    device, home, offloaded, refused = map(json.loads, output.splitlines())
    for ours in (home, offloaded):
        assert ours["losses"] == pytest.approx(device["losses"], rel=0.02)
        assert ours["losses"][1] < ours["losses"][0]
    assert offloaded["stats"]["updates"] > 0
    assert offloaded["stats"]["update_ns"] < offloaded["step_ns"]
    assert refused["error"].startswith("BudgetError")
