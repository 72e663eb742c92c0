import dataclasses
import doctest
import importlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_swap

from tencache_fx.errors import OptionError
from tencache_fx.planning.explain import Choice, Price, Reasons, TensorReason
from tencache_fx.planning.loads import Load, loads_of
from tencache_fx.planning.parameter_schedule import step_ns
from tencache_fx.planning.pareto import Frontier, Outcome, Point
from tencache_fx.planning.plan import Forecast, Plan, PoolClass
from tencache_fx.planning.problem import Budgets, Kind, Links, Op, Problem, Recipe, Step, Storage, Tier
from tencache_fx.records import Listing, NodeRow, RegionRecord
from tencache_fx.reporting.dump import read_measured, read_problem, read_regions, write_measured, write_region
from tencache_fx.reporting.tables import (
    amount_rows,
    early_updates,
    graph_dot,
    show_frontier,
    show_graph,
    show_measured,
    show_pool,
    show_reached,
    show_reasons,
    show_summary,
    show_tensors,
)
from tencache_fx.serialization import from_json, to_json
from tencache_fx.units import format_bytes, format_ns


def storage(name, nbytes, birth, death, uses, kind=Kind.ACTIVATION, formula=""):
    return Storage(
        name=name,
        nbytes=nbytes,
        kind=kind,
        birth=Step(birth),
        death=Step(death),
        uses=tuple(map(Step, uses)),
        spillable=kind is Kind.ACTIVATION,
        formula=formula,
    )


PROBLEM = Problem(
    ops=tuple(
        Op(name=name, duration_ns=1_000_000) for name in ("mm", "relu", "loss", "loss_back", "relu_back", "mm_back")
    ),
    boundary=Step(3),
    storages=(
        storage("mm", 3_000_000, 0, 6, (0, 1, 5), formula="4*s0*128"),
        storage("relu", 4_500_000, 1, 5, (1, 2, 4)),
        storage("weight", 500, 0, 6, (0, 5), kind=Kind.PARAMETER),
    ),
    links=Links(
        d2h_bytes_per_s=12 * 10**9,
        h2d_bytes_per_s=12 * 10**9,
        d2h_duplex_bytes_per_s=9 * 10**9,
        h2d_duplex_bytes_per_s=9 * 10**9,
    ),
    budgets=Budgets(device_bytes=6_000_000, host_bytes=64_000_000),
    external_bytes=1_000_000,
)
PLAN = Plan(
    policy="teraio",
    transfers=(
        make_swap(
            name="mm",
            nbytes=3_000_000,
            tier=Tier.HOST,
            copy_out_after=Step(1),
            freed_at=Step(2),
            prefetch_at=Step(4),
            needed_at=Step(5),
        ),
    ),
    pool=(PoolClass(nbytes=3_002_368, count=1),),
    staging=(PoolClass(nbytes=4096, count=2),),
    forecast=Forecast(
        peak_bytes=5_500_500,
        peak_step=Step(2),
        floor_bytes=5_400_000,
        host_bytes=3_010_560,
        disk_bytes=0,
        ideal_ns=6_000_000,
        makespan_ns=6_600_000,
        lower_bound_ns=6_100_000,
        stall_out_ns=0,
        stall_in_ns=600_000,
        d2h_bytes=3_000_000,
        h2d_bytes=3_000_000,
        disk_write_bytes=0,
        disk_read_bytes=0,
    ),
)
LISTING = Listing(
    phase="forward",
    nodes=(
        NodeRow(name="primals_1", op="placeholder", target="primals_1", inputs=(), type="f32[4, 8]"),
        NodeRow(name="mm", op="call_function", target="aten.mm.default", inputs=("primals_1",), type="f32[4, 4]"),
        NodeRow(
            name="offload",
            op="call_function",
            target="tencache.offload.default",
            inputs=("mm",),
            type="i64[1]",
            runtime=True,
            note="mm to host",
        ),
        NodeRow(name="output", op="output", target="output", inputs=("offload",), type=""),
    ),
)
RECORD = RegionRecord(
    region=0,
    name="0/0",
    torch_version="2.13.0",
    device="cpu",
    options=(("policy", "teraio"),),
    captured=PROBLEM,
    problem=PROBLEM,
    plan=PLAN,
    listings=(LISTING,),
)


def trimmed(text):
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def test_examples_in_docstrings():
    found = doctest.testmod(importlib.import_module("tencache_fx.units"))
    assert (found.attempted > 0, found.failed) == (True, 0)


@given(st.integers(-(10**17), 10**17))
def test_bytes_read_back_within_half_a_percent(nbytes):
    number, unit = format_bytes(nbytes).split(" ")
    scale = 1000 ** ("B", "kB", "MB", "GB", "TB", "PB").index(unit)
    assert float(number) * scale == pytest.approx(nbytes, rel=0.006)
    assert abs(float(number)) < 1000
    assert "e" not in number


@pytest.mark.parametrize(("nbytes", "text"), [(999, "999 B"), (999_499, "999 kB"), (999_500, "1 MB"), (0, "0 B")])
def test_bytes_round_into_the_next_unit(nbytes, text):
    assert format_bytes(nbytes) == text


def test_summary():
    assert trimmed(show_summary(PROBLEM, PLAN, PROBLEM)) == trimmed(
        """
policy           teraio
steps            6, backward from 3
device budget    6 MB, of it held outside the region 1 MB
device peak      5.5 MB at 2 loss
device floor     5.4 MB
host             3.01 MB of 64 MB
disk             0 B of 0 B
spilled to host  1, 3 MB
spilled to nvme  0, 0 B
recomputed       0, 0 B, in 0 ns, 0.0% of the time
time             6.6 ms, 1.100 of the 6 ms without limits
lower bound      6.1 ms
best possible    6.21 ms
stalls           0 ns going out, 600 us coming in
link traffic     3 MB out, 3 MB in
disk traffic     0 B written, 0 B read
bound            compute, 6 ms: 90.9% of the step's 6.6 ms
busy in a step   compute 6 ms, link out 250 us (3 MB), link in 250 us (3 MB)
"""
    )


def test_what_is_reached_of_the_bound():
    assert show_reached(PROBLEM, PLAN, 7_500_000) == (
        "A step takes 7.5 ms from call to call, all that the loop does included. Its bound is 6 ms (compute): "
        "80.0% of it is reached."
    )


@pytest.mark.parametrize(("host_ns", "limits"), [(2_000_000, False), (6_500_000, True)])
def test_the_host_s_work_is_told_beside_the_bound(host_ns: int, *, limits: bool) -> None:
    text = show_reached(PROBLEM, PLAN, 7_500_000, host_ns)
    assert f" The host spends {format_ns(host_ns)} of it issuing the graphs' kernels and copies." in text
    assert text.endswith("That is more than the bound, and does not grow with the micro-batch.") is limits
    four = dataclasses.replace(PROBLEM, accumulation=4)
    assert f"spends {format_ns(4 * host_ns)}" in show_reached(four, PLAN, 7_500_000, host_ns)


def test_the_bound_is_of_all_calls_of_a_step_and_its_update():
    """Four times forward and backward: 3 MB a direction, gradients of 2 MB in host memory, their state 12 MB."""
    stored = dataclasses.replace(
        storage("g", 2_000_000, 4, 6, (4,), kind=Kind.STORED), parameter="w", state_bytes=12_000_000
    )
    links = dataclasses.replace(PROBLEM.links, h2d_bytes_per_s=500_000_000, host_bytes_per_s=10_000_000_000)
    problem = dataclasses.replace(PROBLEM, storages=(*PROBLEM.storages, stored), links=links, accumulation=4)
    loads = {load.name: load for load in loads_of(problem, PLAN)}
    assert loads["compute"] == Load(name="compute", busy_ns=24_000_000, nbytes=0)
    assert loads["link in"] == Load(name="link in", busy_ns=24_000_000, nbytes=12_000_000)
    update_bytes, copied_bytes, sum_bytes = 2 * 2_000_000 + 2 * 12_000_000, 4 * 6_000_000, 3 * 3 * 2_000_000
    assert loads["host memory"].nbytes == update_bytes + copied_bytes + sum_bytes
    assert loads["host memory"].busy_ns == loads["host memory"].nbytes // 10
    assert loads["disk read"].busy_ns == 0
    peak = dataclasses.replace(problem, links=dataclasses.replace(links, host_peak_bytes_per_s=12_500_000_000))
    assert loads_of(peak, PLAN)[1].busy_ns == loads["host memory"].busy_ns * 4 // 5, "no step reaches the most"
    late_ns = (update_bytes + PLAN.forecast.d2h_bytes - 2_000_000) // 10
    assert late_ns > PLAN.forecast.forward_ns
    rows = dict(amount_rows(problem, PLAN))
    more = format_ns(late_ns - PLAN.forecast.forward_ns)
    assert rows["updates"] == f"after the last backward; {more} of them do not overlap with the next forward"
    early = dataclasses.replace(problem, updates_in_backward=True)
    assert "updates" not in dict(amount_rows(early, PLAN))
    once, early_once = (dataclasses.replace(each, accumulation=1) for each in (problem, early))
    before, after = (format_ns(step_ns(each, PLAN.forecast)) for each in (once, early_once))
    assert before != after
    offer = f"; a step takes {after} instead of {before} with the optimizer's step_in_backward=True"
    assert dict(amount_rows(once, PLAN))["updates"].endswith(f"the next forward{offer}")


def test_updates_in_the_backward_are_offered_where_a_step_gains_a_fiftieth():
    assert early_updates(1000, 980, accumulation=1) != ""
    assert early_updates(1000, 981, accumulation=1) == ""
    assert early_updates(1000, 500, accumulation=2) == "", "each of the two backwards would update"


def test_tensors():
    assert trimmed(show_tensors(PROBLEM, PLAN)) == trimmed(
        """
storage    bytes            kind        lives    decision       offload    gone    fetch        back
---------  ---------------  ----------  -------  -------------  ---------  ------  -----------  ---------
relu       4.5 MB           activation  [1, 5)   keep
mm         3 MB = 4*s0*128  activation  [0, 6)   spill to host  1 relu     2 loss  4 relu_back  5 mm_back
weight     500 B            parameter   [0, 6)   keep
"""
    )


def test_what_is_recomputed_is_shown():
    forecast = dataclasses.replace(PLAN.forecast, recompute_ns=1_650_000)
    plan = dataclasses.replace(PLAN, recomputed=("relu",), forecast=forecast)
    assert "\nrecomputed       1, 4.5 MB, in 1.65 ms, 25.0% of the time\n" in show_summary(PROBLEM, plan, PROBLEM)
    (row,) = (line for line in show_tensors(PROBLEM, plan).splitlines() if line.startswith("relu"))
    assert row.split()[-1] == "recompute"


def test_a_record_is_planned_anew_as_it_was_captured(tmp_path):
    captured = dataclasses.replace(PROBLEM, recipes=(Recipe(name="relu", steps=(Step(1),)),))
    folder = write_region(tmp_path, dataclasses.replace(RECORD, captured=captured))
    assert read_problem(folder / "record.json") == captured


def test_frontier():
    outcome = Outcome(makespan_ns=6_600_000, recompute_ns=0, stall_ns=600_000, link_bytes=3_000_000, disk_bytes=0)
    points = (
        Point(device_bytes=5_400_000, best_possible_ns=6_300_000, outcomes=(None, None)),
        Point(device_bytes=6_000_000, best_possible_ns=6_000_000, outcomes=(None, outcome)),
    )
    frontier = Frontier(
        policies=("none", "teraio"),
        floors_bytes=(8_500_500, 5_500_000),
        peak_bytes=8_500_500,
        ideal_ns=6_000_000,
        points=points,
    )
    assert from_json(Frontier, to_json(frontier)) == frontier
    assert trimmed(show_frontier(frontier)) == trimmed(
        """
unlimited        6 ms, 8.5 MB on the device
floor of none    8.5 MB
floor of teraio  5.5 MB

device budget    policy         step    of ideal    recomputed    stalls    moved    by disk
---------------  -------------  ------  ----------  ------------  --------  -------  ---------
5.4 MB           best possible  6.3 ms  1.050
                 none           -       -           -             -         -        -
                 teraio         -       -           -             -         -        -
6 MB             best possible  6 ms    1.000
                 none           -       -           -             -         -        -
                 teraio         6.6 ms  1.100       0 ns          600 us    3 MB     0 B
"""
    )


def test_reasons():
    tensor = TensorReason(
        name="mm",
        nbytes=3_000_000,
        decision="host",
        out_ns=250_000,
        in_ns=300_000,
        stall_ns=50_000,
        recipe_ns=1_000_000,
        held_longer=("relu",),
        held_longer_bytes=4_500_000,
        choices=(
            Choice(decision="keep", change_ns=-50_000, over_bytes=2_000_000),
            Choice(decision="recompute", change_ns=950_000, over_bytes=0),
            Choice(decision="nvme", change_ns=1, over_bytes=4096, over_tier=Tier.NVME),
        ),
    )
    reasons = Reasons(
        policy="joint",
        makespan_ns=6_600_000,
        tensors=(tensor,),
        left_out=3,
        prices=(
            Price(resource="device", amount=-500_000_000, change_ns=None),
            Price(resource="device", amount=500_000_000, change_ns=-600_000),
            Price(resource="links", amount=10, change_ns=-20_000, copying_ns=50_000),
        ),
    )
    columns = [re.split("  +", line) for line in show_reasons(reasons).splitlines() if not line.startswith("-")]
    assert columns == [
        ["joint, 6.6 ms a step as modelled"],
        [""],
        ["storage", "bytes", "decision", "out", "in", "waited", "keep", "recompute", "host", "nvme", "recipe"],
        [
            *("mm", "3 MB", "host", "250 us", "300 us", "50 us"),
            *("2 MB over", "+950 us", "as it is", "4.1 kB over (nvme)", "1 ms, holds 4.5 MB"),
        ],
        ["3 smaller ones are not shown."],
        [""],
        ["resource", "change", "step", "price"],
        ["device", "-500 MB", "does not fit", "-"],
        ["device", "+500 MB", "-600 us", "1.2 ms per GB"],
        ["links", "+10 %", "-20 us", "0.40 s per link-second"],
    ]


def test_pool():
    assert trimmed(show_pool(PLAN)) == trimmed(
        """
use           buffer    count    bytes
------------  --------  -------  -------
host swaps    3 MB      1        3 MB
disk staging  4.1 kB    2        8.19 kB
all                     3        3.01 MB
"""
    )


def test_a_graph_as_text_marks_the_runtimes_nodes():
    assert trimmed(show_graph(LISTING)) == trimmed(
        """
forward: 4 nodes, 1 of the runtime
   primals_1: f32[4, 8] = placeholder
   mm: f32[4, 4] = aten.mm.default(primals_1)
>> offload: i64[1] = tencache.offload.default(mm)  # mm to host
   output = output(offload)
"""
    )


def test_a_graph_as_dot():
    assert graph_dot(LISTING).splitlines() == [
        'digraph "forward" {',
        "  node [shape=box];",
        r'  "primals_1" [label="primals_1\nprimals_1\nf32[4, 8]"];',
        r'  "mm" [label="mm\naten.mm.default\nf32[4, 4]"];',
        '  "primals_1" -> "mm";',
        r'  "offload" [label="offload\ntencache.offload.default\ni64[1]\nmm to host"'
        ", style=filled, fillcolor=lightblue];",
        '  "mm" -> "offload";',
        r'  "output" [label="output\noutput"];',
        '  "offload" -> "output";',
        "}",
    ]


def test_dot_escapes_what_would_end_a_name():
    row = NodeRow(name='a"b', op="call_function", target="back\\slash", inputs=(), type="")
    assert r'"a\"b" [label="a\"b\nback\\slash"];' in graph_dot(Listing(phase="forward", nodes=(row,)))


def test_measured_figures_are_shown_in_their_units():
    text = show_measured({"step_ns": 1_500_000, "peak_bytes": 2_000, "hits": 0.5})
    assert trimmed(text) == "step_ns     1.5 ms\npeak_bytes  2 kB\nhits        0.5"


def test_a_record_reads_back_equal(tmp_path):
    folder = write_region(tmp_path / "new", RECORD)
    assert sorted(path.name for path in folder.iterdir()) == ["forward.txt", "record.json"]
    assert read_regions(tmp_path / "new") == (RECORD,)
    assert read_problem(folder / "record.json") == PROBLEM
    (tmp_path / "problem.json").write_text(to_json(PROBLEM))
    assert read_problem(tmp_path / "problem.json") == PROBLEM


def test_regions_come_in_order(tmp_path):
    records = [dataclasses.replace(RECORD, region=index) for index in (10, 2, 0)]
    for record in records:
        write_region(tmp_path, record)
    assert [record.region for record in read_regions(tmp_path)] == [0, 2, 10]


def test_measured_lines_add_up_until_the_region_is_written_anew(tmp_path):
    write_region(tmp_path, RECORD)
    assert read_measured(tmp_path, 0) == ()
    write_measured(tmp_path, 0, {"step_ns": 1})
    write_measured(tmp_path, 0, {"step_ns": 2})
    assert read_measured(tmp_path, 0) == ({"step_ns": 1}, {"step_ns": 2})
    write_region(tmp_path, dataclasses.replace(RECORD, listings=()))
    assert read_measured(tmp_path, 0) == ()
    assert [path.name for path in (tmp_path / "region-000").iterdir()] == ["record.json"]


def test_a_directory_without_regions_or_with_a_broken_one_is_refused(tmp_path):
    with pytest.raises(OptionError, match="holds no region"):
        read_regions(tmp_path)
    folder = write_region(tmp_path, RECORD)
    raw = json.loads((folder / "record.json").read_text())
    for broken in (
        "{",
        json.dumps({**raw, "region": "zero"}),
        json.dumps({**raw, "options": [["policy"]]}),
        '{"a": 1}',
    ):
        (folder / "record.json").write_text(broken)
        with pytest.raises(OptionError, match="record.json cannot be read as RegionRecord"):
            read_regions(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written to: Not a directory"):
        write_region(tmp_path / "file", RECORD)
    with pytest.raises(OptionError, match="cannot be written to: No such file"):
        write_measured(tmp_path, 3, {})


def test_json_keeps_pairs_apart_from_lists():
    assert from_json(RegionRecord, to_json(RECORD)).options == (("policy", "teraio"),)
