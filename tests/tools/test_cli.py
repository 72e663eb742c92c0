import dataclasses
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from problems import GIB, trained_offloaded, transformer
from test_bounds import recipes_of_matmuls
from test_tables import PROBLEM, RECORD

from tencache_fx.cli import main
from tencache_fx.planning.pareto import Frontier
from tencache_fx.planning.plan import Plan
from tencache_fx.planning.planner import POLICIES
from tencache_fx.planning.problem import Budgets
from tencache_fx.planning.ranks import Scaling
from tencache_fx.planning.search import plan_region
from tencache_fx.records import RegionRecord
from tencache_fx.reporting.dump import write_measured, write_region
from tencache_fx.serialization import from_json, to_json


@pytest.fixture
def dump(tmp_path):
    write_region(tmp_path, RECORD)
    write_region(tmp_path, dataclasses.replace(RECORD, region=1, name="1/0"))
    return tmp_path


@pytest.fixture
def crowded(tmp_path):
    """The record of a region whose values have to be moved or recomputed."""
    problem = transformer(layers=2, device_bytes=6 * GIB)
    problem = dataclasses.replace(problem, recipes=recipes_of_matmuls(problem))
    planned_for, plan = plan_region(problem, "joint")
    record = dataclasses.replace(RECORD, captured=problem, problem=planned_for, plan=plan)
    return write_region(tmp_path / "crowded", record) / "record.json"


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("what", "expected", "absent"),
    [
        ("summary", "device peak", "aten.mm"),
        ("tensors", "spill to host", "device peak"),
        ("pool", "host swaps", "device peak"),
        ("graphs", ">> offload: i64[1]", "device peak"),
    ],
)
def test_dump_shows_the_part_asked_for(capsys, dump, what, expected, absent):
    code, out, _ = run(capsys, "dump", dump, "--what", what, "--region", 1)
    assert code == 0
    assert expected in out
    assert absent not in out
    assert "region 1: 1/0, torch 2.13.0, cpu" in out
    assert "region 0" not in out


def test_dump_shows_all_parts_of_all_regions(capsys, dump):
    _, out, _ = run(capsys, "dump", dump, "--what", "all")
    for expected in ("region 0", "region 1", "device peak", "spill to host", "host swaps", ">> offload"):
        assert expected in out


def test_dump_shows_the_newest_measurement(capsys, dump):
    write_measured(dump, 0, {"step_ns": 7_000_000})
    write_measured(dump, 0, {"step_ns": 2_000_000})
    _, out, _ = run(capsys, "dump", dump)
    assert "measured:\nstep_ns  2 ms" in out
    assert "7 ms" not in out


def test_dump_as_json_reads_back(capsys, dump):
    _, out, _ = run(capsys, "dump", dump, "--format", "json", "--region", 0)
    assert from_json(RegionRecord, out) == RECORD
    _, out, _ = run(capsys, "dump", dump, "--format", "json")
    assert [raw["region"] for raw in json.loads(out)] == [0, 1]


def test_dump_as_dot(capsys, dump):
    _, out, _ = run(capsys, "dump", dump, "--format", "dot")
    assert out.count("digraph") == 2
    assert out.count("{") == out.count("}")


def test_plan_answers_in_text_and_json(capsys, tmp_path):
    (tmp_path / "problem.json").write_text(to_json(PROBLEM))
    code, out, _ = run(capsys, "plan", tmp_path / "problem.json", "--policy", "none", "--device-budget", "none")
    assert code == 0
    assert "no limit" in out
    _, out, _ = run(
        capsys, "plan", tmp_path / "problem.json", "--policy", "teraio", "--device-budget", "1GiB", "--json"
    )
    plan = from_json(Plan, out)
    assert plan.transfers == ()
    assert plan.forecast.peak_bytes == 7_500_500 + PROBLEM.external_bytes


def test_plan_recomputes_under_joint(capsys, crowded):
    code, out, _ = run(capsys, "plan", crowded)
    assert code == 0
    (count,) = re.findall(r"^recomputed +(\d+), \S+ .B, in \S+ .s, \S+% of the time$", out, re.MULTILINE)
    assert len(re.findall(r"^\S+ +[\d.]+ MB +activation +\[.*\) +recompute$", out, re.MULTILINE)) == int(count) > 0
    _, out, _ = run(capsys, "plan", crowded, "--json")
    assert len(from_json(Plan, out).recomputed) == int(count)
    _, out, _ = run(capsys, "plan", crowded, "--json", "--policy", "teraio")
    assert from_json(Plan, out).recomputed == ()


def test_several_budgets_or_policies_are_compared(capsys, crowded):
    budgets = "--device-budget", "9GiB", "5GB"
    code, out, _ = run(capsys, "plan", crowded, *budgets, "--policy", "none", "--policy", "teraio")
    assert code == 0
    rows = [line.split() for line in out.split("\n\n")[1].splitlines()[2:]]
    assert [row[0] for row in rows] == ["5", "none", "teraio", "9.66", "none", "teraio"]  # GB, by rising budget
    assert rows[1] == ["none", *"------"]
    assert float(rows[2][3]) > float(rows[4][3]) == 1


def test_a_sweep_goes_from_the_floor_to_the_peak(capsys, crowded):
    code, out, _ = run(capsys, "plan", crowded, "--sweep", "3", "--json")
    assert code == 0
    frontier = from_json(Frontier, out)
    assert frontier.policies == tuple(POLICIES)
    floors = dict(zip(frontier.policies, frontier.floors_bytes, strict=True))
    budgets = [point.device_bytes for point in frontier.points]
    assert len(budgets) == 3
    assert (budgets[0], budgets[-1]) == (min(floors.values()), frontier.peak_bytes)
    for point in frontier.points:
        for policy, outcome in zip(frontier.policies, point.outcomes, strict=True):
            assert (outcome is not None) == (point.device_bytes >= floors[policy]), (policy, point)
            assert outcome is None or outcome.makespan_ns >= point.best_possible_ns
    assert {outcome.makespan_ns for outcome in frontier.points[-1].outcomes} == {frontier.ideal_ns}
    _, out, _ = run(capsys, "plan", crowded, "--sweep", "--policy", "none")
    assert out.count("best possible") == 1  # `none` has one budget only: the peak
    _, out, _ = run(capsys, "plan", crowded, "--sweep", "--policy", "10cache")
    assert out.count("best possible") == 8


@pytest.mark.parametrize("name", ["frontier.svg", "frontier.html"])
def test_a_comparison_can_be_drawn(capsys, crowded, tmp_path, name):
    code, out, _ = run(capsys, "plan", crowded, "--sweep", "2", "--plot", tmp_path / name)
    assert code == 0
    assert "best possible" in out
    text = (tmp_path / name).read_text()
    assert text.startswith("<!DOCTYPE html>") == name.endswith(".html")
    (drawn,) = re.findall(r"<svg.*</svg>", text, re.DOTALL)
    lines = ElementTree.fromstring(drawn).findall("{*}polyline")
    assert len(lines) == 1 + len(POLICIES)
    assert all(len(line.get("points").split()) in (1, 2) for line in lines)


def test_dump_tells_why(capsys, crowded):
    code, out, _ = run(capsys, "dump", crowded.parents[1], "--what", "why")
    assert code == 0
    assert re.search(r"^gate_1 +403 MB +\w+ ", out, re.MULTILINE)
    assert "per link-second" in out
    _, out, _ = run(capsys, "dump", crowded.parents[1], "--what", "all")
    assert "as modelled" not in out


def test_plan_takes_a_regions_record(capsys, dump):
    code, out, _ = run(
        capsys,
        "plan",
        dump / "region-000" / "record.json",
        "--policy",
        "teraio",
        "--host-budget",
        "1GB",
        "--device-budget",
        "9MB",
    )
    assert code == 0
    assert "of 1 GB" in out


@pytest.fixture
def offloaded(tmp_path):
    """The problem of a region whose parameters are in host memory."""
    budgets = Budgets(device_bytes=1 << 30, host_bytes=20 << 30, host_taken_bytes=4 << 30)
    path = tmp_path / "offloaded.json"
    path.write_text(to_json(dataclasses.replace(trained_offloaded(8, 64 << 20), budgets=budgets)))
    return path


def test_plan_compares_numbers_of_ranks(capsys, offloaded):
    code, out, _ = run(capsys, "plan", offloaded, "--ranks", "1", "2", "512", "--per-node", "4")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["ranks", "nodes", "step"]
    assert [line.split()[:2] for line in lines[2:]] == [["1", "1"], ["2", "1"], ["512", "128"]]
    assert lines[2].split()[4] == "1.00"
    _, out, _ = run(capsys, "plan", offloaded, "--ranks", "1", "2", "--json")
    one, two = from_json(Scaling, out).points
    assert (one.ranks, two.ranks, one.collective_ns) == (1, 2, 0)
    _, out, _ = run(capsys, "plan", offloaded, "--ranks", "2", "--link-rate", "1GB", "--json")
    assert from_json(Scaling, out).points[0].collective_ns > 10 * two.collective_ns
    _, out, _ = run(capsys, "plan", offloaded, "--ranks", "2", "--device-budget", "100MB")
    assert "the budget is 100 MB" in out
    _, out, _ = run(capsys, "plan", offloaded, "--ranks", "16", "--json")
    fast = from_json(Scaling, out).points[0]
    _, out, _ = run(capsys, "plan", offloaded, "--ranks", "16", "--network-rate", "1GB", "--json")
    assert from_json(Scaling, out).points[0].collective_ns > 5 * fast.collective_ns


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dump", "{dump}/nowhere"], "nowhere holds no region"),
        (["dump", "{dump}", "--region", "7"], "holds no region 7; it holds: 0, 1."),
        (["plan", "{dump}/none.json", "--policy", "none"], "none.json cannot be read"),
        (["plan", "{dump}/region-000/forward.txt", "--policy", "none"], "forward.txt cannot be read"),
        (["plan", "{dump}/region-000/record.json", "--policy", "terraio"], "teraio"),
        (["plan", "{dump}/region-000/record.json", "--policy", "none", "--device-budget", "x"], "is not a size"),
        (
            ["plan", "{dump}/region-000/record.json", "--policy", "none", "--device-budget", "5%"],
            "depends on the machine",
        ),
        (
            ["plan", "{dump}/region-000/record.json", "--policy", "none", "--host-budget", "none"],
            "only --device-budget",
        ),
        (["plan", "{dump}/region-000/record.json", "--device-budget", "9" * 40], "is more than any machine has"),
        (["plan", "{dump}/region-000/record.json", "--device-budget", "9" * 2_000_000], "is more than any machine has"),
        (["plan", "{dump}/" + "x" * 5000], "File name too long"),
        (["dump", "{dump}/" + "x" * 5000], "characters) cannot be read: File name too long; name another directory"),
        (["plan", "{dump}/region-000/record.json", "--policy", "teraio", "--device-budget", "1kB"], "1 kB"),
        (["plan", "{dump}/region-000/record.json", "--sweep", "--device-budget", "1GB"], "give it or --device-budget"),
        (["plan", "{dump}/region-000/record.json", "--sweep", "0"], "1 or more"),
        (["plan", "{dump}/region-000/record.json", "--sweep", "2", "--policy", "terraio"], "Did you mean 'teraio'"),
        (["plan", "{dump}/region-000/record.json", "--device-budget", "1GB", "none"], "none cannot be compared"),
        (["plan", "{dump}/region-000/record.json", "--sweep", "2", "--plot", "{dump}/plot.png"], ".svg or .html"),
        (["plan", "{dump}/region-000/record.json", "--sweep", "2", "--plot", "{dump}/no/plot.svg"], "No such file"),
        (["plan", "{dump}/region-000/record.json", "--ranks", "2"], "none of its parameters are in host memory"),
        (["plan", "{dump}/region-000/record.json", "--ranks", "12"], "12 ranks do not fill nodes of 8"),
        (["plan", "{dump}/region-000/record.json", "--ranks", "2", "--sweep"], "no --sweep"),
        (["plan", "{dump}/region-000/record.json", "--ranks", "2", "--link-rate", "none"], "a number of bytes"),
    ],
)
def test_errors_are_one_clear_line_and_code_2(capsys, dump, arguments, message):
    code, out, err = run(capsys, *(argument.format(dump=dump) for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("tencache: ")
    assert message in err
    assert "Traceback" not in err


def test_wrong_usage_is_code_2(capsys):
    with pytest.raises(SystemExit) as error:
        main(["dump"])
    assert error.value.code == 2
    assert "DIR" in capsys.readouterr().err


def test_options_lists_every_option(capsys):
    code, out, _ = run(capsys, "options")
    assert code == 0
    for name in ("device_budget", "spill_dir", "inductor", "TENCACHE_DEVICE_BUDGET"):
        assert name in out


def test_no_command_starts_torch(dump, crowded):
    program = (
        "import sys; from tencache_fx.cli import main\n"
        f"assert main(['dump', {str(dump)!r}, '--what', 'all']) == 0\n"
        f"assert main(['plan', {str(dump)!r} + '/region-000/record.json', '--policy', 'teraio',"
        " '--device-budget', '1GiB']) == 0\n"
        f"assert main(['plan', {str(crowded)!r}, '--sweep', '2', '--policy', 'joint']) == 0\n"
        f"assert main(['dump', {str(crowded.parents[1])!r}, '--what', 'why']) == 0\n"
        f"assert main(['view', {str(dump)!r}]) == 0\n"
        "assert main(['options']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error(dump):
    program = f"from tencache_fx.cli import main; raise SystemExit(main(['dump', {str(dump)!r}, '--what', 'all']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        complaint, code = process.stderr.read(), process.wait(timeout=60)
    assert (complaint, code) == ("", 1)


def test_output_that_cannot_be_written_is_one_clear_line(dump):
    program = f"from tencache_fx.cli import main; raise SystemExit(main(['dump', {str(dump)!r}, '--what', 'all']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    said = "tencache: the output cannot be written: No space left on device; write it elsewhere.\n"
    assert (done.returncode, done.stderr) == (2, said)
