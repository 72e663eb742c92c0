"""Ctrl-C at any moment: the process ends, and who goes on has the weights of a step."""

import subprocess
import sys
from pathlib import Path

STARTS = """
import sys, threading
import torch
from torch import nn
import tencache_fx

directory = sys.argv[1]
tencache_fx.configure(host_budget=3_000_000, spill_dir=directory, spill_budget=1 << 26)
torch.manual_seed(0)
model = tencache_fx.offload(nn.Sequential(*(nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(5))))
optimizer = tencache_fx.optim.AdamW(model.parameters())
options = {"device_budget": "900kB", "compiler": "eager", "calibrate": False}
step = torch.compile(model, backend="tencache", options=options)
interrupted, start = set(), threading.Thread.start.__code__
last_line = max(line for *_, line in start.co_lines() if line)  # it waits for the thread, which runs by then

def called(frame, event, argument):
    return passed if frame.f_code is start and frame.f_locals["self"].name.startswith("tencache-") else None

def passed(frame, event, argument):
    name = frame.f_locals["self"].name
    if event == "line" and frame.f_lineno == last_line and name not in interrupted:
        interrupted.add(name)
        raise KeyboardInterrupt
    return passed

while True:
    before = len(interrupted)
    sys.settrace(called)
    try:
        for _ in range(2):
            step(torch.randn(96, 192)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except KeyboardInterrupt:
        optimizer.zero_grad()
    finally:
        sys.settrace(None)
    if len(interrupted) == before:
        break
print(*sorted(interrupted))
"""


def test_a_process_ends_that_was_interrupted_as_threads_started(tmp_path: Path) -> None:
    """Each thread that is started here, once."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(tmp_path)], capture_output=True, text=True, timeout=100, check=True
    )
    assert {"tencache-in_0", "tencache-out_0", "tencache-update_0"} < set(done.stdout.split()), done.stdout
