"""The folder of what is kept: how large it gets, who was used, and what stands in its way."""

import logging
import os
from pathlib import Path

import pytest

from tencache_fx.hardware import cache
from tencache_fx.hardware.cache import USES, cached, keep_file, kept
from tencache_fx.hardware.disk import Disk

DISK = Disk(write_bytes_per_s=1, read_bytes_per_s=2, direct=True)


def age(path: Path, seconds: int) -> None:
    """Take a file for last used so long ago."""
    now = path.stat().st_mtime - seconds
    os.utime(path, (now, now))


def test_the_ones_used_last_are_kept(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each sort by itself, and in whole pages."""
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * 4096)
    keep_file(cache_folder / "op-0.json", b"x")
    for index in range(3):
        path = cache_folder / f"plan-{index}.json"
        keep_file(path, b"x" * (4096 if index else 1))
        age(path, 100 - index)
    USES.note(cache_folder / "plan-0.json")
    keep_file(cache_folder / "plan-3.json", b"x")
    assert {path.name for path in cache_folder.iterdir()} == {
        "op-0.json",
        *(f"plan-{index}.json" for index in (0, 2, 3)),
    }
    keep_file(cache_folder / "plan-4.json", b"x" * (4 * 4096))
    assert {path.name for path in cache_folder.iterdir()} == {"op-0.json", "plan-4.json"}, "the newest stays"


def test_what_was_read_and_what_was_written_is_counted(cache_folder: Path) -> None:
    key, before = {"what": "counted"}, USES.counts()
    assert "counted" not in before
    for _ in range(3):
        assert cached(key, Disk, lambda: DISK) == DISK
    assert kept({"what": "counted", "of": "another"}, Disk) is None
    assert USES.counts() == {**before, "counted": (2, 1)}


def test_a_value_that_is_not_accepted_is_made_again(cache_folder: Path) -> None:
    key, other = {"what": "disk"}, Disk(write_bytes_per_s=3, read_bytes_per_s=4, direct=False)
    cached(key, Disk, lambda: DISK)
    assert cached(key, Disk, lambda: other, accept=lambda value: value == DISK) == DISK
    assert cached(key, Disk, lambda: other, accept=lambda value: value != DISK) == other
    assert kept(key, Disk) == other


def test_processes_that_measure_at_once_go_on_with_one_value(cache_folder: Path) -> None:
    key, first = {"what": "disk"}, Disk(write_bytes_per_s=3, read_bytes_per_s=4, direct=False)

    def measure_late() -> Disk:
        assert cached(key, Disk, lambda: first) == first, "another process has measured meanwhile"
        return DISK

    assert cached(key, Disk, measure_late) == first
    assert kept(key, Disk) == first
    assert cached(key, Disk, lambda: DISK, renew=True) == DISK


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.INFO, "tencache_fx"):
        assert cached({"what": "disk"}, Disk, lambda: DISK) == DISK
    assert "cannot be kept: there is no cache folder: Could not determine home directory." in caplog.text


def test_a_write_that_fails_leaves_nothing(cache_folder: Path) -> None:
    (cache_folder / "plan-0.json" / "sub").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        keep_file(cache_folder / "plan-0.json", b"x")
    assert [path.name for path in cache_folder.iterdir()] == ["plan-0.json"]
