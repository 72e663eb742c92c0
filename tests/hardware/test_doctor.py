"""`tencache doctor`: a report on this machine, and one finding for each thing that is wrong with a made-up one."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tencache_fx.cli import main
from tencache_fx.doctor import DiskReport, Report, device_findings, disk_findings, host_findings, show_report
from tencache_fx.hardware import disk
from tencache_fx.hardware.capacity import Space
from tencache_fx.hardware.disk import Disk
from tencache_fx.hardware.profiles import find_profile
from tencache_fx.hardware.rates import known_rates
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.planning.problem import Links

pytestmark = pytest.mark.usefixtures("cache_folder")

GB = 10**9
RATES = Disk(write_bytes_per_s=3 * GB, read_bytes_per_s=2 * GB, direct=True)
DISK = DiskReport(
    directory=Path("/scratch"), filesystem="xfs", rates=RATES, free_bytes=900 * GB, dealt_rates=RATES, share=1.0
)
LINKS = Links(
    d2h_bytes_per_s=54 * GB, h2d_bytes_per_s=51 * GB, d2h_duplex_bytes_per_s=44 * GB, h2d_duplex_bytes_per_s=40 * GB
)
SOUND = Report(
    device=torch.device("cuda", 0),
    device_name="NVIDIA H200",
    device_space=Space(total_bytes=150 * GB, available_bytes=149 * GB),
    matmul_per_s=(("bfloat16", 720 * 10**12), ("float32", 45 * 10**12), ("tf32", 380 * 10**12)),
    roofline=Roofline(
        flops_per_s=(("bfloat16", 720 * 10**12),),
        memory_bytes_per_s=4000 * GB,
        launch_ns=2000,
        issue_ns=4000,
        attention_flops_per_s=(330 * 10**12, 250 * 10**12),
    ),
    links=LINKS,
    pageable=(15 * GB, 7 * GB),
    pin_ns=300_000_000,
    disks=(DISK,),
    host_space=Space(total_bytes=137 * GB, available_bytes=130 * GB),
    machine_bytes=137 * GB,
    locked_bytes=None,
    host_budget_bytes=104 * GB,
)


def findings(report):
    return [*device_findings(report), *host_findings(report), *disk_findings(report)]


def with_links(**rates):
    return {"links": dataclasses.replace(LINKS, **rates)}


def with_disk(**changes):
    return {"disks": (dataclasses.replace(DISK, **changes),)}


def test_a_sound_machine_has_no_findings():
    assert findings(SOUND) == []
    text = show_report(SOUND)
    assert text.endswith("\n\nNothing looks wrong.")
    for expected in ("NVIDIA H200", "720 TFLOP/s", "54 GB/s, 44 GB/s while both are busy, pageable 15 GB/s"):
        assert expected in text
    for expected in ("0.3 s/GiB", "xfs, direct I/O, write 3 GB/s, read 2 GB/s, 900 GB free", "4 TB/s", "tf32"):
        assert expected in text
    assert "330 TFLOP/s forward, 250 TFLOP/s backward" in text


def test_several_spill_directories_have_shares():
    slow = Disk(write_bytes_per_s=GB, read_bytes_per_s=GB * 2 // 3, direct=True)
    other = dataclasses.replace(DISK, directory=Path("/other"), rates=slow, dealt_rates=slow, share=0.25)
    text = show_report(dataclasses.replace(SOUND, disks=(dataclasses.replace(DISK, share=0.75), other)))
    assert "write 3 GB/s, read 2 GB/s, 900 GB free, gets 75.0% of what is spilled" in text
    assert "write 1 GB/s, read 667 MB/s, 900 GB free, gets 25.0% of what is spilled" in text
    assert "write 4 GB/s, read 2.67 GB/s\n" in text
    assert "all spill_dirs" not in show_report(SOUND)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (with_links(d2h_bytes_per_s=6 * GB) | {"pageable": (2 * GB, 2 * GB)}, "The link out moves 6 GB/s"),
        (with_links(h2d_bytes_per_s=6 * GB) | {"pageable": (2 * GB, 2 * GB)}, "The link in moves 6 GB/s"),
        ({"pageable": (50 * GB, 7 * GB)}, "Pinned copies out (54 GB/s) are hardly faster than pageable ones (50 GB/s)"),
        ({"pageable": (7 * GB, 50 * GB)}, "Pinned copies in (51 GB/s)"),
        (with_links(d2h_duplex_bytes_per_s=27 * GB, h2d_duplex_bytes_per_s=26 * GB), "share one direction's rate"),
        ({"pin_ns": None}, "refuses to pin"),
        ({"pin_ns": 3_000_000_000}, "Pinning takes 3 s/GiB"),
        ({"locked_bytes": 8 << 20}, "limit on locked memory, 8.39 MB, is below the host budget of 104 GB"),
        ({"machine_bytes": 500 * GB}, "A cgroup allows 137 GB of the machine's 500 GB"),
        ({"host_budget_bytes": 20 * GB}, "less than half of the device's memory"),
        (with_disk(filesystem="tmpfs"), "is host memory: what is spilled there frees none"),
        (
            with_disk(filesystem="overlay", rates=Disk(write_bytes_per_s=GB, read_bytes_per_s=GB, direct=False)),
            "/scratch (overlay) takes no direct I/O",
        ),
        (with_disk(filesystem="nfs4"), "a filesystem of another machine"),
        (
            with_disk(rates=Disk(write_bytes_per_s=GB, read_bytes_per_s=GB // 10, direct=True)),
            "moves 100 MB/s, so a GiB there takes 11 s",
        ),
        (with_disk(free_bytes=10**8), "has 100 MB free"),
        ({"device": torch.device("cpu"), "pageable": None, "pin_ns": None}, "No CUDA device is used"),
    ],
)
def test_each_fault_is_one_finding_with_a_remedy(changes, expected):
    report = dataclasses.replace(SOUND, **changes)
    (found,) = findings(report)
    assert expected in found
    assert "; " in found
    assert found.endswith(".")
    assert "\n" not in found
    assert show_report(report).endswith(f"\n\n* {found}")


@pytest.mark.parametrize(
    ("changes", "gain"),
    [
        (with_links(d2h_bytes_per_s=6 * GB) | {"pageable": (2 * GB, 2 * GB)}, "with PCIe 4 x16 it would take 0.045 s."),
        (with_links(d2h_duplex_bytes_per_s=27 * GB, h2d_duplex_bytes_per_s=26 * GB), "up to 50% less time."),
        ({"pin_ns": None}, "pinned copies are 7.3 times as fast as pageable ones here."),
        ({"pin_ns": 3_000_000_000}, "to pin all of that would take 252 s less."),
        ({"machine_bytes": 500 * GB}, "up to 363 GB more could be offloaded."),
        (
            with_disk(rates=Disk(write_bytes_per_s=GB, read_bytes_per_s=GB // 10, direct=True)),
            "at 3 GB/s it would take 0.36 s.",
        ),
    ],
)
def test_a_finding_says_what_its_remedy_gains(changes, gain):
    (found,) = findings(dataclasses.replace(SOUND, **changes))
    assert found.endswith(gain)


@pytest.mark.timeout(120)
def test_the_command_reports_on_this_machine(capsys, tmp_path, cache_folder):
    spill, other = tmp_path / "spill", tmp_path / "other"
    spill.mkdir()
    other.mkdir()
    precision = torch.backends.cuda.matmul.fp32_precision
    saved = tmp_path / "profile.json"
    assert (
        main(["doctor", "--device", "cpu", "--spill-dir", str(spill), "--spill-dir", str(other), "--save", str(saved)])
        == 0
    )
    profile = find_profile(str(saved))
    known = known_rates(torch.device("cpu"), [spill], calibrate=True, has_disk=True)
    assert (profile.roofline, profile.links) == (known.roofline, known.links)
    assert known.measured
    assert profile.links.has_disk
    assert not profile.roofline.of_gpu
    out = capsys.readouterr().out
    for expected in (
        "device ",
        "matmul float32",
        "link out",
        "host memory",
        "host budget",
        f"spill_dir {spill}",
        f"spill_dir {other}",
    ):
        assert expected in out
    assert out.count("gets 50.0% of what is spilled") == 2
    assert "* No CUDA device is used" in out
    assert list(spill.iterdir()) == []
    kept = sorted(path.name.split("-")[0] for path in cache_folder.iterdir())
    assert kept == ["auto", "auto", "disk", "links", "roofline"]
    assert torch.backends.cuda.matmul.fp32_precision == precision


@pytest.mark.gpu
def test_the_command_reports_on_a_gpu(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for expected in (torch.cuda.get_device_name(), "matmul tf32", "attention", "pinning", "pageable"):
        assert expected in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "gpu"], "'gpu' is not a device; give cuda, cuda:1 or cpu."),
        (["--device", "cuda:99"], "is not there: torch sees"),
        (["--device", "meta"], "is not there: torch sees"),
        (["--device", "cpu", "--spill-dir", "/nowhere"], "/nowhere is not a directory"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(capsys, arguments, message):
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_a_disk_without_direct_io_is_told_by_trying(monkeypatch, tmp_path):
    def refuse(descriptor, command, flags=0):
        if command == disk.fcntl.F_SETFL:
            raise OSError(22, "Invalid argument")
        return 0

    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    assert disk.measure_disk(tmp_path).direct is False
