"""How long compiling takes, stage by stage, and the line on a terminal."""

import io
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx import stages
from tencache_fx.hardware import rates
from tencache_fx.optim import AdamW
from tencache_fx.stages import STAGES, Stages, show_line, show_times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets time pass; none does by itself."""
    now_ns = 0

    def let_pass(ns: int) -> None:
        nonlocal now_ns
        now_ns += ns

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    return let_pass


def test_each_moment_counts_for_one_stage(clock: Callable[[int], None]) -> None:
    found = Stages()

    @partial(found.timed, "failing")
    def fail() -> None:
        clock(1000)
        raise ValueError("x")

    with found.stage("outer"):
        clock(1)
        with found.stage("inner"):
            clock(10)
            with found.stage("outer"):
                clock(100)
        with pytest.raises(ValueError, match="x"):
            fail()
        clock(10_000)
    assert found.timed("timed", lambda ns: clock(ns) or ns)(100_000) == 100_000
    clock(1_000_000)
    assert found.spent_ns() == {"outer": 10_101, "inner": 10, "failing": 1000, "timed": 100_000}


def test_a_compilation_has_the_stages_of_its_thread(clock: Callable[[int], None]) -> None:
    found = Stages()
    with found.stage("before"):
        clock(1)
    with found.compilation("a region") as spent:
        clock(10)
        with found.stage("inner"):
            clock(100)

        def meanwhile() -> None:
            with found.stage("elsewhere"):
                clock(1000)

        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
    assert spent == {"other work": 1010, "inner": 100}
    assert found.spent_ns() == {"before": 1, "other work": 1010, "inner": 100, "elsewhere": 1000}


def test_times_are_shown_longest_first() -> None:
    assert show_times({"planning": 2_000_000, "Inductor": 1_500_000_000, "none": 0}) == (
        "1.5 s (Inductor 1.5 s, planning 2 ms)"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal in stderr's place, and let lines come at once."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(stages, "_DELAY_S", 0.001)
    monkeypatch.setattr(stages, "_PERIOD_S", 0.001)
    return found


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_terminal_shows_which_stage_runs_and_is_clean_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    found, terminal = Stages(), open_terminal(monkeypatch)
    with found.compilation("region 3"):
        with found.stage("planning"):
            wait_for(lambda: "\rtencache: region 3: planning, 0 s" in terminal.getvalue())
        with found.stage("calibration"):  # whose own bars are there
            terminal.truncate(0)
            wait_for(lambda: terminal.getvalue().endswith(" \r"))
            terminal.truncate(0)
            time.sleep(0.02)
            assert terminal.getvalue() == ""
        wait_for(lambda: "\rtencache: region 3: other work, 0 s" in terminal.getvalue())
    assert re.search(r"\r +\r$", terminal.getvalue())
    assert not [each for each in threading.enumerate() if each.name == "tencache-progress"]


def test_what_is_short_shows_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(stages, "_DELAY_S", 60.0)
    with show_line(lambda: "short"):
        pass
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", ["file", "closed", "none"])
def test_elsewhere_there_is_no_line(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = None if stream == "none" else io.StringIO()
    if stream == "closed":
        other.close()
    monkeypatch.setattr(sys, "stderr", other)
    made: list[object] = []
    monkeypatch.setattr(stages, "_Line", lambda *given: made.append(given))
    with show_line(lambda: "x"):
        assert not made
    assert stream != "file" or other.getvalue() == ""


def test_a_terminal_that_goes_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with show_line(lambda: "x"):
        wait_for(terminal.getvalue)
        terminal.close()
    assert terminal.closed, "and no error came of it"


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_what_a_region_took_is_logged_and_reported(
    compiler: str, hollow_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer = AdamW(model.parameters())
    options = {"compiler": compiler, "device_budget": "10MB"}
    with caplog.at_level(logging.INFO, "tencache_fx"):
        torch.compile(model, backend="tencache", options=options)(torch.ones(8, 256)).sum().backward()
    optimizer.step()
    (line,) = (each.message for each in caplog.records if "compiled in" in each.message)
    names = {"tracing", "planning", "rewriting", "other work"} | ({"Inductor"} if compiler == "inductor" else set())
    pattern = r"region \d+: compiled in [\d.]+ m?s \((.*)\)"
    assert names <= stages_in(re.fullmatch(pattern, line)[1])
    (reported,) = re.findall(r"^compiling, so far: [\d.]+ m?s \((.*)\)$", tencache_fx.report(), re.MULTILINE)
    assert {*names, "Dynamo", "the optimizer's kernels", "pinning"} <= stages_in(reported)


def test_measuring_is_a_stage_and_what_is_kept_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    rates.roofline(device, calibrate=True)
    before = STAGES.spent_ns().get("calibration", 0)
    rates.roofline(device, calibrate=True)
    assert STAGES.spent_ns().get("calibration", 0) == before
    monkeypatch.setattr(rates, "_measure_roofline", lambda device: time.sleep(0.01) or rates.FIXED_ROOFLINE["cpu"])
    rates.roofline(device, calibrate=True, renew=True)
    assert STAGES.spent_ns()["calibration"] >= before + 10_000_000


def test_a_second_start_measures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Ops are timed at the first one; the machine's rates are known."""

    def start() -> set[str]:
        tencache_fx.close()
        torch.compiler.reset()
        caplog.clear()
        model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
        options = {"compiler": "eager", "device_budget": "20MB", "calibrate": True}
        torch.compile(model, backend="tencache", options=options)(torch.ones(512, 512)).sum().backward()
        (line,) = (each.message for each in caplog.records if "compiled in" in each.message)
        return stages_in(line.partition("(")[2].rstrip(")"))

    with caplog.at_level(logging.INFO, "tencache_fx"):
        assert start() >= {"calibration", "planning", "tracing"}
        second = start()
    assert second >= {"planning", "tracing"}
    assert "calibration" not in second


def stages_in(text: str) -> set[str]:
    return {re.sub(r" [\d.]+ [mun]?s$", "", each) for each in text.split(", ")}
