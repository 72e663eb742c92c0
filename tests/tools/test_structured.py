"""Artifacts in torch's structured log: a region's plan and its graphs, and nothing where nobody asks."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.reporting import structured

OPTIONS = {"device_budget": "2MB", "recompute": "none", "compiler": "eager", "calibrate": False}


class Keeper(logging.Handler):
    """Keeps the artifacts that are logged, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        artifact = getattr(record, "metadata", {}).get("artifact", {})
        if artifact.get("name", "").startswith("tencache"):
            assert artifact["encoding"] == "string"
            self.found[artifact["name"]] = record.payload


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    log = logging.getLogger("torch.__trace")
    handlers, level = list(log.handlers), log.level
    log.handlers[:] = [kept := Keeper()]
    log.setLevel(logging.DEBUG)
    yield kept
    log.handlers[:] = handlers
    log.setLevel(level)


def run() -> None:
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    torch.compile(model, backend="tencache", options=OPTIONS)(torch.randn(1024, 64)).square().mean().backward()


def test_a_plan_and_its_graphs_are_in_the_structured_log(keeper: Keeper) -> None:
    run()
    record = tencache_fx.regions()[-1]
    head = f"tencache_region_{record.region}"
    assert set(keeper.found) >= {f"{head}_plan", f"{head}_forward", f"{head}_backward"}
    assert "device budget" in keeper.found[f"{head}_plan"]
    assert record.plan.transfers[0].name in keeper.found[f"{head}_plan"]
    assert ">>" in keeper.found[f"{head}_forward"]
    assert "wait" in keeper.found[f"{head}_backward"]


def test_nothing_is_made_where_the_log_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch.__trace")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(structured, "show_graph", lambda *_: pytest.fail("a text was made"))
    monkeypatch.setattr(structured, "_plan_text", lambda *_: pytest.fail("a text was made"))
    run()
    assert tencache_fx.regions()[-1].plan.transfers, "there was a plan to log"
