"""Thirty cases of torch's own suites, and the program that runs all of them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_server import seconds
from nightly import choose, run, summary
from sample import PARTS
from steps import Result
from verdict import OURS, Verdict

HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(900)  # a quiet core takes a minute
@pytest.mark.parametrize(
    "names", [pytest.param(PARTS[0], id="first"), pytest.param(PARTS[1], id="second", marks=pytest.mark.slow)]
)
def test_a_sample_of_torchs_suites_is_the_same_in_the_least_memory(names: tuple[str, ...]) -> None:
    """In a process of its own: torch's suites freeze `torch.backends` for the process that imports them."""
    folders = [HERE.parents[1], HERE.parent, HERE.parent / "support", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, str(HERE / "nightly.py"), "--names", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[3:5] for line in lines[:-1]] == [["same", name] for name in names], done.stdout
    assert "nothing could move" not in done.stdout
    ran = map(int, re.findall(r"(\d+) run, 0 mismatches, 0 errors of ours, 0 without transfers", lines[-1]))
    assert sum(ran) == len(names)


def test_the_sample_is_of_thirty_of_all_kinds() -> None:
    names = [name for part in PARTS for name in part]
    assert len(set(names)) == 30
    assert {name.split(":")[0] for name in names} == {"op_db", "module_db", "hop_db", "custom_op_db"}
    variants = {"plain", "inplace", "mutated", "complex", "bf16", "dynamic", "inductor", "eval"}
    assert {name.split(":")[2] for name in names} == variants


def verdicts(*found: tuple[str, str, bool]) -> list[Verdict]:
    return [Verdict(name, kind, moved=moved) for name, kind, moved in found]


def test_the_last_line_counts_by_suite() -> None:
    found = verdicts(
        ("op_db:a:plain", "same", True),
        ("op_db:b:plain", "same", False),
        ("op_db:c:plain", "mismatch", True),
        ("op_db:d:plain", "torch", False),
        ("op_db:e:plain", "expected", False),
        ("module_db:a:plain", "error", False),
        ("module_db:b:plain", "mended", True),
        ("module_db:c:plain", "no transfers", False),
        ("module_db:d:plain", "unstable", False),
        ("module_db:e:plain", "skipped", False),
    )
    assert summary(found) == (
        "op_db 4 run, 1 mismatches, 0 errors of ours, 1 without transfers, 0 above the floor, 1 known to fail,"
        " 1 that torch's own backend refuses; "
        "module_db 3 run, 0 mismatches, 3 errors of ours, 0 without transfers, 0 above the floor, 1 skipped,"
        " 1 where torch's own runs differ"
    )


@pytest.mark.parametrize(
    ("kind", "settled"),
    [
        ("same", "mended"),
        ("mismatch", "expected"),
        ("error", "expected"),
        ("no transfers", "expected"),
        ("torch", "torch"),
    ],
)
def test_what_is_known_to_fail_has_to(kind: str, settled: str) -> None:
    found = Verdict("op_db:a:plain", kind)
    assert found.expecting(None) == found
    assert found.expecting("item 9").kind == settled
    assert (settled in OURS) == (settled == "mended")


@pytest.mark.parametrize(
    ("kind", "moved", "settled"),
    [("same", False, "unmoved"), ("same", True, "mended"), ("mismatch", True, "mismatch"), ("error", False, "error")],
)
def test_a_case_that_is_known_to_leave_nothing_to_move_has_to(kind: str, *, moved: bool, settled: str) -> None:
    found = Verdict("op_db:a:plain", kind, moved=moved).expecting(None, "sparse")
    assert found.kind == settled
    assert "0 without transfers" in summary([found])


def test_shards_are_all_of_the_names_and_each_once() -> None:
    names = [f"op_db:{index}:plain" for index in range(20)]
    assert sorted(name for part in range(1, 4) for name in choose(names, f"{part}/3", "")) == sorted(names)
    assert choose(names, "1/1", ":1[0-2]:") == names[10:13]
    with pytest.raises(SystemExit, match="is no part"):
        choose(names, "4/3", "")


def test_no_case_begins_when_the_time_is_up() -> None:
    assert [seconds(text) for text in ("90s", "30m", "2h")] == [90, 1800, 7200]
    served: list[str] = []

    class Served:
        def judge(self, name: str, limit_s: float) -> Verdict:
            served.append(name)
            return Verdict(name, "same")

    assert list(run(["a", "b"], Served(), -1)) == []
    assert served == []
    assert len(list(run(["a", "b"], Served(), 60))) == 2


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add(1e-7), lambda x: x.t(), lambda x: x.double(), lambda x: -x, lambda x: x * float("nan")],
    ids=["bit", "strides", "dtype", "sign", "nan"],
)
def test_a_difference_in_one_bit_is_seen(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    one = Result({"out": torch.ones(2, 2), "zero": torch.zeros(2, 2)})
    same = Result({"out": torch.ones(2, 2), "zero": torch.zeros(2, 2)})
    assert one.differences(same, exact=True) == []
    assert one.differences(Result({**one.values, "out": change(torch.ones(2, 2))}), exact=True) == ["out"]
    assert one.differences(Result({**one.values, "zero": -torch.zeros(2, 2)}), exact=True) == ["zero"]
    assert one.differences(Result({"out": torch.ones(2, 2)}), exact=True) == ["zero"]


def test_only_rounding_is_no_difference_for_inductor() -> None:
    one = Result({"out": torch.tensor([1.0, float("nan")])})
    assert one.differences(Result({"out": torch.tensor([1.0001, float("nan")])}), exact=False) == []
    assert one.differences(Result({"out": torch.tensor([1.01, float("nan")])}), exact=False) == ["out"]
    assert one.differences(Result({"out": torch.tensor([1.0, 0.0])}), exact=False) == ["out"]
