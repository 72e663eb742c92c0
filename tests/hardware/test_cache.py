"""The folder of what is kept: how large it gets, who was used, and what stands in its way."""

import errno
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
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


def test_of_values_that_are_measured_at_the_same_time_one_is_used_by_all(cache_folder: Path) -> None:
    together = threading.Barrier(4)

    def measured(number: int) -> Disk:
        together.wait()
        return Disk(write_bytes_per_s=number, read_bytes_per_s=1, direct=True)

    with ThreadPoolExecutor(4) as processes:
        for index in range(20):
            key = {"what": "disk", "of": str(index)}
            used = list(processes.map(lambda n, key=key: cached(key, Disk, lambda: measured(n)), range(1, 5)))
            assert len(set(used)) == 1
            assert kept(key, Disk) == used[0]
    assert len(list(cache_folder.iterdir())) == 20


def test_a_file_system_without_links_keeps_values_too(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(path: str, other: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert cached({"what": "disk"}, Disk, lambda: DISK) == kept({"what": "disk"}, Disk) == DISK
    assert len(list(cache_folder.iterdir())) == 1


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
