import itertools
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tencache_fx.errors import StoreError
from tencache_fx.hardware import disk
from tencache_fx.hardware import rates as rates_module
from tencache_fx.hardware.cache import cached, kept
from tencache_fx.hardware.disk import Disk, filesystem_type
from tencache_fx.hardware.rates import FIXED_DISK, FIXED_LINKS, links, roofline

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("cache_folder")

DISK = Disk(write_bytes_per_s=1, read_bytes_per_s=2, direct=True)
OTHER = Disk(write_bytes_per_s=3, read_bytes_per_s=4, direct=False)


@pytest.fixture
def spill(tmp_path):
    (tmp_path / "spill").mkdir()
    return tmp_path / "spill"


def test_fixed_rates_touch_nothing(cache_folder):
    found = links(CPU, [Path("/tmp")], calibrate=False)
    assert found.d2h_bytes_per_s == FIXED_LINKS.d2h_bytes_per_s
    assert found.disk_write_bytes_per_s == FIXED_DISK.write_bytes_per_s
    assert links(CPU, [], calibrate=False).disk_read_bytes_per_s == 0
    assert roofline(CPU, calibrate=False).flops_rate(torch.float32) > 0
    assert not cache_folder.exists()


def check_plausible(found):
    for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "d2h_duplex_bytes_per_s", "h2d_duplex_bytes_per_s"):
        assert isinstance(getattr(found, name), int)
        assert 10**7 < getattr(found, name) < 10**13
    assert found.d2h_duplex_bytes_per_s <= found.d2h_bytes_per_s
    assert found.h2d_duplex_bytes_per_s <= found.h2d_bytes_per_s


def test_measured_links_are_plausible_kept_and_logged_once(cache_folder, spill, caplog):
    with caplog.at_level(logging.INFO, "tencache_fx"):
        found = links(CPU, [spill], calibrate=True)
        check_plausible(found)
        assert found.disk_write_bytes_per_s > 10**6
        assert found.disk_read_bytes_per_s > 10**6
        lines = len(caplog.records)
        assert lines >= 2
        assert links(CPU, [spill], calibrate=True) == found
        assert len(caplog.records) == lines
    assert sorted(path.name.split("-")[0] for path in cache_folder.iterdir()) == ["disk", "links"]
    assert not any(spill.iterdir())


def test_the_rate_of_host_memory_is_that_of_updates_and_copies(monkeypatch):
    """By a clock that goes on by a microsecond each time somebody looks at it, and copies that take 100 updates."""
    clock, measured = itertools.count(step=1000), []

    def copy(device, pairs, *, times, meanwhile):
        asked = itertools.count()
        meanwhile(lambda: next(asked) == 100)
        assert next(asked) == 101, "updates end with the copies"
        measured.append([[30_000, 10_000], [70_000, 50_000], [1, 1]][len(measured) % 3])
        return measured[-1]

    monkeypatch.setattr(rates_module, "cuda_copy_rates", copy)
    monkeypatch.setattr(rates_module, "_HOST_BYTES", 32 * 128)
    monkeypatch.setattr(rates_module, "LINK_BYTES", 4096)
    monkeypatch.setattr(rates_module, "time", SimpleNamespace(perf_counter_ns=lambda: next(clock)))
    updated_bytes_per_s = 100 * 2 * 128 * 10**6
    assert rates_module._host_rate(CPU) == updated_bytes_per_s + 120_000


def test_two_directories_of_one_filesystem_are_one_disk(spill):
    (spill / "a").mkdir()
    (spill / "b").mkdir()
    both = links(CPU, [spill / "a", spill / "b"], calibrate=False)
    assert both.disk_write_bytes_per_s == FIXED_DISK.write_bytes_per_s


def disk_of(write_rate, read_rate):
    return Disk(write_bytes_per_s=write_rate, read_bytes_per_s=read_rate, direct=True)


def test_the_rates_of_disks_together_are_those_of_bytes_dealt_by_rate():
    assert disk.joint_rates([]) == (0, 0)
    assert disk.joint_rates([disk_of(300, 600)]) == (300, 600)
    assert disk.joint_rates([disk_of(rate, 2 * rate) for rate in (300, 600, 1200, 2400)]) == (4500, 9000)
    uneven = [disk_of(1000, 1000), disk_of(1000, 9000)]
    write_rate, read_rate = disk.joint_rates(uneven)  # shares are 5 / 14 and 9 / 14
    assert (write_rate, read_rate) == (1000 * 1400 // 900, 1000 * 1400 // 500)


def test_each_directory_has_its_part_of_what_its_filesystem_does(monkeypatch, tmp_path):
    monkeypatch.setattr(rates_module, "filesystem_id", lambda directory: directory.name[0])
    paths = [tmp_path / name for name in ("a1", "b1", "a2", "c1")]
    for name, rate in (("a", 300), ("b", 90)):
        cached({"what": "disk", "filesystem": name}, Disk, lambda rate=rate: disk_of(rate, 2 * rate))
    found = rates_module.rates_by_directory(paths, rates_module.measured_disk)
    assert found == {paths[0]: disk_of(150, 300), paths[1]: disk_of(90, 180), paths[2]: disk_of(150, 300)}
    planned = rates_module.known_rates(CPU, paths[:3], calibrate=True, has_disk=True).links
    assert (planned.disk_write_bytes_per_s, planned.disk_read_bytes_per_s) == (390, 780)


def test_measured_compute_rates_are_plausible_and_kept_and_leave_the_random_numbers_as_they_are(cache_folder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    found = roofline(CPU, calibrate=True)
    assert torch.equal(torch.rand(3), expected)
    assert dict(found.flops_per_s).keys() == {"float32", "bfloat16"}
    assert all(10**7 < rate < 10**16 for _, rate in found.flops_per_s)
    assert 10**7 < found.memory_bytes_per_s < 10**13
    assert 10 < found.launch_ns < 10**7
    assert found.issue_ns == 0
    assert roofline(CPU, calibrate=True) == found
    assert found.flops_rate(torch.float64) == min(dict(found.flops_per_s).values())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', "\x00", '{"value": {"write_bytes_per_s": "fast"}}'])
def test_a_corrupt_file_is_measured_again_and_replaced(cache_folder, text):
    key = {"what": "disk", "filesystem": "7"}
    values = iter([DISK, OTHER])

    def read():
        return cached(key, Disk, lambda: next(values))

    assert read() == read() == DISK
    (path,) = cache_folder.iterdir()
    path.write_text(text)
    assert read() == read() == OTHER
    assert json.loads(path.read_text())["value"] == {"write_bytes_per_s": 3, "read_bytes_per_s": 4, "direct": False}
    assert list(cache_folder.iterdir()) == [path]


def test_what_was_measured_for_something_else_is_not_used(cache_folder):
    def read(filesystem, rate):
        return cached(
            {"what": "disk", "filesystem": filesystem},
            Disk,
            lambda: Disk(write_bytes_per_s=rate, read_bytes_per_s=rate, direct=True),
        )

    assert read("1", 10).read_bytes_per_s == 10
    assert read("2", 20).read_bytes_per_s == 20
    (first, second) = sorted(cache_folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first.write_text(second.read_text())
    assert read("1", 30).read_bytes_per_s == 30


def test_a_folder_that_cannot_be_written_costs_only_time(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, "tencache_fx"):
        found = cached({"what": "disk"}, Disk, lambda: DISK)
    assert found.write_bytes_per_s == 1
    assert any("cannot be kept" in record.getMessage() for record in caplog.records)


def test_a_spill_directory_that_is_gone_is_a_store_error(tmp_path):
    with pytest.raises(StoreError, match=r"gone cannot be read: No such file"):
        links(CPU, [tmp_path / "gone"], calibrate=True)


def test_a_full_disk_is_a_store_error(spill, monkeypatch):
    def refuse(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "posix_fallocate", refuse)
    with pytest.raises(StoreError, match="cannot be used: No space left on device; free some space"):
        disk.measure_disk(spill)


def test_renewing_measures_again_and_keeps_the_new_value(cache_folder):
    key, values = {"what": "disk"}, iter([DISK, OTHER])
    assert kept(key, Disk) is None
    assert cached(key, Disk, lambda: next(values)) == DISK
    assert cached(key, Disk, lambda: next(values), renew=True) == OTHER
    assert kept(key, Disk) == OTHER


def test_precision_set_by_the_newer_api_is_part_of_the_key(cache_folder):
    """Once it is set, `torch.get_float32_matmul_precision` raises."""
    matmul, before = torch.backends.mkldnn.matmul, torch.backends.mkldnn.matmul.fp32_precision
    try:
        for precision in ("ieee", "bf16"):
            matmul.fp32_precision = precision
            links(CPU, [], calibrate=True)
    finally:
        matmul.fp32_precision = before
    assert len(list(cache_folder.iterdir())) == 2


def test_the_filesystem_of_a_directory_is_that_of_the_deepest_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:20 / / rw,relatime shared:1 - overlay overlay rw\n"
        f"23 22 0:21 / {tmp_path}/my\\040disk rw - ext4 /dev/sda rw\n"
        f"24 22 0:21 / {tmp_path}/my\\040disk rw - xfs /dev/sdb rw\n"
        f"25 23 0:22 / {tmp_path}/my\\040disk/deep rw - tmpfs tmpfs rw\n"
    )
    for name, expected in (("my disk/a", "xfs"), ("my disk/deep/er", "tmpfs"), ("elsewhere", "overlay")):
        (tmp_path / name).mkdir(parents=True)
        assert filesystem_type(tmp_path / name, mounts) == expected
    assert filesystem_type(tmp_path, tmp_path / "none") == ""


@pytest.mark.gpu
def test_cuda_is_measured_in_little_memory():
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):  # the library's workspaces are not the measurement's
        torch.zeros(16, 16, dtype=dtype, device=device).mm(torch.zeros(16, 16, dtype=dtype, device=device))
    torch.cuda.reset_peak_memory_stats(device)
    start_bytes = torch.cuda.memory_allocated(device)
    rates = links(device, [], calibrate=True)
    check_plausible(rates)
    both_ways = (rates.d2h_duplex_bytes_per_s + rates.h2d_duplex_bytes_per_s) // 2
    assert both_ways < rates.host_bytes_per_s < rates.host_peak_bytes_per_s < 10**13
    found = roofline(device, calibrate=True)
    assert dict(found.flops_per_s).keys() == {"float32", "bfloat16", "float16"}
    assert found.flops_rate(torch.bfloat16) >= found.flops_rate(torch.float32)
    assert 100 < found.launch_ns < 50_000
    assert 100 < found.issue_ns < 500_000
    assert torch.cuda.max_memory_allocated(device) - start_bytes <= 256 << 20
    assert torch.cuda.memory_allocated(device) == start_bytes
