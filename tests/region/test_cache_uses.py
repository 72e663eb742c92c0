"""What caches had is told, and what is kept on disk goes with torch's own cache artifacts."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.compiler._cache import CacheArtifactManager

import tencache_fx
from tencache_fx.hardware.cache import USES
from tencache_fx.region.cache_uses import TencacheArtifact, show_uses

OPTIONS = {"device_budget": "5MB", "host_budget": "64MB", "compiler": "eager", "calibrate": True}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def start(**options: object) -> None:
    """Train a step as a process does that begins, but for the numbers of its regions."""
    torch.compiler.reset()
    counters.clear()
    torch.compile(Wide(), backend="tencache", options={**OPTIONS, **options})(torch.ones(1024, 128)).backward()


@pytest.fixture
def artifacts() -> Iterator[None]:
    """Let torch collect artifacts of this test only."""
    with CacheArtifactManager.with_fresh_cache():
        yield


def test_uses_are_shown_as_shares() -> None:
    before, after = {"plan": (1, 1), "op": (0, 3)}, {"plan": (3, 1), "op": (0, 3), "links": (0, 1)}
    assert show_uses(after, before) == "2 of 2 plans, 0 of 1 links' rates"
    assert show_uses(after) == "3 of 4 plans, 0 of 3 ops' times, 0 of 1 links' rates"
    assert show_uses(after, after) == "nothing was looked for"


def test_each_region_logs_what_caches_had(
    hollow_kernels: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def told() -> dict[str, tuple[int, int]]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "tencache_fx"):
            start(compiler="inductor")
        (line,) = (each.message for each in caplog.records if "read from caches" in each.message)
        found = re.findall(r"(\d+) of (\d+) ([A-Za-z' ]+)", line)
        return {sort: (int(read), int(used)) for read, used, sort in found}

    first = told()
    assert first["plans"] == (0, 1)
    assert first["ops' times"][0] == 0
    assert first["Inductor's graphs"] == (0, 2)
    assert told() == {sort: (used, used) for sort, (_, used) in first.items()}
    assert "2 of 2 Inductor's graphs" in tencache_fx.report().splitlines()[-1]


def test_all_that_was_used_goes_with_torchs_artifacts(
    artifacts: None, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Read or written: the second start saves as much as the first one, and one on another machine makes nothing."""
    saved = []
    for _ in range(2):
        with CacheArtifactManager.with_fresh_cache():
            start()
            saved.append(torch.compiler.save_cache_artifacts())
    (content, about), (_, again) = saved
    files = {path.name: path.read_bytes() for path in cache_folder.iterdir()}
    assert {name.partition("-")[0] for name in files} >= {"links", "roofline", "op", "plan", "choice"}
    assert set(about.tencache_artifacts) == set(again.tencache_artifacts) == set(files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    torch.compiler.load_cache_artifacts(content)
    assert {path.name: path.read_bytes() for path in (tmp_path / "other" / "tencache_fx").iterdir()} == files
    before = USES.counts()
    start()
    after = USES.counts()
    assert {sort: made for sort, (_, made) in after.items()} == {sort: made for sort, (_, made) in before.items()}
    assert after["plan"][0] > before["plan"][0]


def test_what_this_machine_has_stays(cache_folder: Path) -> None:
    name = "links-0123456789abcdef.json"
    TencacheArtifact(name, b"first").populate_cache()
    TencacheArtifact(name, b"second").populate_cache()
    assert (cache_folder / name).read_bytes() == b"first"


@pytest.mark.parametrize("name", ["../plan-0.json", "/tmp/plan-0.json", "plan-0.py", "plan-0.json/x", ""])
def test_names_that_are_none_of_ours_are_not_written(
    name: str, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TencacheArtifact(name, b"x").populate_cache()
    assert not list(cache_folder.parent.rglob("*"))
    assert "it is none of ours" in caplog.text


def test_a_folder_that_cannot_be_written_loads_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "tencache_fx"):
        TencacheArtifact("plan-0.json", json.dumps({}).encode()).populate_cache()
    assert "plan-0.json cannot be kept" in caplog.text
