"""A rank that fails, at any stage: those that wait for it end, and say why; all others go on."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types

import pytest
import torch.distributed as dist
from started_ranks import LIMIT_S, ROOT, SUPPORT
from torch.utils.checkpoint import _StopRecomputationError

from tencache_fx.runtime.engine_registry import RankStage
from tencache_fx.runtime.rank_notes import RankNote, RankNotes

COPY = "InvariantError: a copy between device and host memory failed: OSError(5, 'injected copy failure')."
COMPILE = "failed in the compilation of a region: BudgetError: step "
WAITED = {
    "one_fails_to_offload": "failed in offload: BudgetError: offloaded parameters need 1253376 bytes",
    "one_fails_to_compile": COMPILE,
    "one_fails_in_the_forward": f"failed in the forward of a region: {COPY}",
    "one_fails_in_the_backward": f"failed in the backward of region 0: {COPY}",
    "one_fails_in_the_update": "failed in an optimizer's step: RuntimeError: this closure fails.",
    "one_fails_behind_a_reducer": COMPILE,
}
LEFT = {"one_is_killed": "has ended (process ", "one_ends_early": "has ended."}
SET_FREE = "one_fails_and_the_other_is_set_free"
GOES_ON = (
    "all_fail_and_go_on",
    "one_fails_and_tries_again",
    "one_fails_and_nobody_waits",
    "one_fails_and_then_saves",
    "groups_come_and_go",
)
QUICK = {"one_fails_in_the_backward", "one_is_killed"}


def cases(names):
    """Give a test each of `names`; most of them nightly."""
    marked = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("case", marked)


@pytest.fixture(scope="module")
def ends(request, tmp_path_factory):
    """How each of two ranks has ended, by case: those of the tests that are to run."""
    items = (item for item in request.session.items if item.module is request.module and hasattr(item, "callspec"))
    names = {SET_FREE, *(item.callspec.params["case"] for item in items)}
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(ROOT), str(ROOT / "tests"), str(SUPPORT), *sys.path]
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(SUPPORT / "failing_ranks.py"), str(folder), *sorted(names)]
    ran = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@cases(WAITED)
def test_who_waits_for_a_rank_that_fails_and_lives_on_ends_and_says_why(ends, case):
    waits, _ = ends[case]["said"]
    assert f"rank 0: rank 1 of 2 {WAITED[case]}" in waits, waits[-3000:]
    assert "This rank waits for it, and aborts its collectives." in waits
    assert ends[case]["codes"][0] == 1
    assert ends[case]["took_s"] < 30


def test_whose_collectives_could_be_aborted_hears_of_it_when_it_goes_on(ends):
    waits, _ = ends[SET_FREE]["said"]
    assert "RankError: rank 1 of 2 failed in an optimizer's step: RuntimeError: this closure fails." in waits
    assert ends[SET_FREE]["codes"][0] == 0


@cases(LEFT)
def test_who_loses_the_connection_to_a_rank_is_told_which(ends, case):
    waits, _ = ends[case]["said"]
    assert "RuntimeError: " in waits
    assert f"rank 1 of 2 {LEFT[case]}" in waits, waits[-3000:]
    assert ends[case]["codes"][0] == 1


@cases(GOES_ON)
def test_nobody_ends_who_waits_for_nobody_or_for_one_that_goes_on(ends, case):
    lived_on = case == "one_fails_and_nobody_waits"
    assert ends[case]["codes"] == [0, -signal.SIGKILL if lived_on else 0], ends[case]["said"]
    assert "aborts its collectives" not in "".join(ends[case]["said"])


def test_notes_are_read_by_all_and_withdrawn():
    store = dist.HashStore()
    first, second = (RankNotes(store, rank, 2) for rank in range(2))
    assert first.read() == second.read() == ()
    note = RankNote(rank=1, state="failed", told="failed in a test: ValueError: no", issued={"0 on cpu": 3})
    second.write(note)
    assert first.read() == first.read() == (note,)
    assert second.read() == ()
    second.write(None)
    assert first.read() == ()


def test_a_process_that_has_ended_is_written_down_for_other_hosts(monkeypatch):
    store = dist.HashStore()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        RankNotes(store, 1, 3).write_issued({"0 on cpu": 3})
    here = RankNotes(store, 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr("tencache_fx.runtime.rank_notes._host", lambda: "another host")
        there = RankNotes(store, 2, 3)
    assert here.read() == here.killed() == ()
    child.kill()  # a process that nobody has asked for its end yet is in /proc, too
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    (note,) = here.killed()
    assert (note.rank, note.state) == (1, "killed")
    assert there.killed() == ()
    known = (dataclasses.replace(note, issued={"0 on cpu": 3}),)
    assert here.read() == there.read() == known
    child.communicate()
    assert here.read() == known


def test_ranks_that_cannot_be_watched_run_and_are_told_once(monkeypatch, caplog, tmp_path):
    """As with a store of the user's own, which cannot be connected to once more."""

    def refused():
        raise RuntimeError("no clone")

    def run():
        with RankStage("a test"):
            return 1

    monkeypatch.setattr("tencache_fx.runtime.engine_registry.several_ranks", dist.is_initialized)
    monkeypatch.setattr("tencache_fx.runtime.rank_watch.store_connection", refused)
    for group in range(2):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{group}", rank=0, world_size=1)
        caplog.clear()
        try:
            assert run() == run() == 1
            with pytest.raises(ZeroDivisionError), RankStage("a test"):
                raise ZeroDivisionError
        finally:
            dist.destroy_process_group()
        (told,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert told.endswith("will wait for their group's timeout: no clone")
    assert run() == 1


def test_what_ends_a_recomputation_early_is_no_failure(monkeypatch):
    told = []
    watch = types.SimpleNamespace(go_on=lambda: None, fail=lambda error, what: told.append((type(error), what)))
    monkeypatch.setattr("tencache_fx.runtime.engine_registry.Registry.rank_watch", lambda self: watch)
    with pytest.raises(_StopRecomputationError), RankStage("a test"):
        raise _StopRecomputationError
    with pytest.raises(KeyboardInterrupt), RankStage("a test"):
        raise KeyboardInterrupt
    assert told == [(KeyboardInterrupt, "a test")]
