"""An "auto" budget is at most what there is, and stays what it was while the free memory changes little."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_fx import options
from tencache_fx.hardware.auto_budget import lasting_bytes
from tencache_fx.hardware.capacity import Space
from tencache_fx.options import Options

HOST = {"tier": "host", "total": 1 << 37}
GIB = 1 << 30


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5))
def test_it_is_never_more_and_at_most_a_sixteenth_less(found_free: list[int]) -> None:
    for most_bytes in found_free:
        assert most_bytes - most_bytes // 16 <= lasting_bytes(most_bytes, HOST) <= most_bytes


def test_it_stays_while_the_free_memory_changes_little(cache_folder: Path) -> None:
    first = lasting_bytes(80 * GIB, HOST)
    assert lasting_bytes(79 * GIB, HOST) == lasting_bytes(81 * GIB, HOST) == first
    assert lasting_bytes(60 * GIB, HOST) < 60 * GIB
    assert lasting_bytes(80 * GIB, HOST) == first  # found anew: 60 GiB would be too little


def test_it_is_of_one_tier(cache_folder: Path) -> None:
    first = lasting_bytes(80 * GIB, HOST)
    assert lasting_bytes(79 * GIB, {**HOST, "tier": "/scratch"}) != first


@pytest.mark.parametrize("name", ["host_budget", "spill_budget"])
def test_budgets_are_the_same_in_the_next_start(
    name: str, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for free_bytes in (60 * GIB, 61 * GIB, 59 * GIB):
        space = Space(total_bytes=128 * GIB, available_bytes=free_bytes)
        monkeypatch.setattr(options, "host_space", lambda space=space: space)
        monkeypatch.setattr(options, "disk_space", lambda directories, space=space: space)
        resolved = Options.suppose({"spill_dir": str(tmp_path)}, device_bytes=None)
        found.append(getattr(resolved, name))
        assert found[-1] < free_bytes
    assert len(set(found)) == 1
