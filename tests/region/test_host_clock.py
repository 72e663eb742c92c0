"""The time of the host's own work on a region's graphs."""

import time
from typing import Any

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.region.compiled_region import WrittenPlan
from tencache_fx.region.host_clock import HostClock

WRITTEN = WrittenPlan(donated=frozenset(), clock=None, recorder=None)


def work(spent_s: float) -> None:
    end_s = time.thread_time() + spent_s
    while time.thread_time() < end_s:
        pass


def test_work_counts_and_waiting_does_not() -> None:
    clock = HostClock(torch.device("cuda"))

    def run(spent_s: float) -> str:
        work(spent_s)
        time.sleep(0.02)
        return "done"

    assert clock.host_ns is None
    forward, backward = (clock.instrument(phase, run, WRITTEN) for phase in ("forward", "backward"))
    for spent_s in (0.1, 0.002, 0.002, 0.002, 0.002):  # the first one does more
        assert clock.host_ns is None
        assert forward(spent_s) == "done"
    for _ in range(5):
        assert backward(0.003) == "done"
    assert clock.host_ns is not None
    assert 5_000_000 <= clock.host_ns < 15_000_000


def test_a_graph_that_is_compiled_anew_is_timed_anew() -> None:
    clock = HostClock(torch.device("cuda"))
    for _ in range(2):
        run = clock.instrument("inference", work, WRITTEN)
        assert clock.host_ns is None
        for _ in range(5):
            run(0.0)
        assert clock.host_ns is not None


def test_a_cpu_has_no_figure() -> None:
    clock = HostClock(torch.device("cpu"))
    assert clock.instrument("forward", work, WRITTEN) is work
    assert clock.host_ns is None


@pytest.mark.gpu
def test_a_gpu_s_host_is_in_the_report() -> None:
    torch.compiler.reset()
    tencache_fx.close()
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
    run: Any = torch.compile(model, backend="tencache", options={"device_budget": "1GiB", "compiler": "eager"})
    for _ in range(8):
        run(torch.randn(64, 64, device="cuda")).sum().backward()
    assert "The host spends " in tencache_fx.report()
