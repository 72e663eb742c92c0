"""`tencache doctor`: the rates of this machine, measured again, and warnings about what looks wrong."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tencache_fx.hardware import rates as rates_module
from tencache_fx.hardware.capacity import Space, device_space, disk_space, host_space
from tencache_fx.hardware.copies import copy_rates
from tencache_fx.hardware.disk import Disk, filesystem_id, filesystem_type, joint_rates
from tencache_fx.hardware.profiles import DeviceProfile, workspace_bytes, write_profile
from tencache_fx.hardware.rates import known_rates
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.model_state.arguments import find_device
from tencache_fx.options import Options
from tencache_fx.planning.problem import Links
from tencache_fx.reporting.tables import show_measured
from tencache_fx.runtime.buffers import new_mapping
from tencache_fx.runtime.cuda_streams import open_streams
from tencache_fx.units import format_bytes, format_flops, format_rate

_GiB = 1 << 30
_PIN_BYTES = 256 << 20
_SLOW_LINK = 12_000_000_000  # what PCIe 3 x16 reaches
_USUAL_LINK = 24_000_000_000  # PCIe 4 x16
_SLOW_DISK = 500_000_000
_USUAL_DISK = 3_000_000_000  # an NVMe disk
_USUAL_PIN_NS = 400_000_000
_SLOW_PIN_NS = 2_000_000_000  # for a GiB
_NETWORKED = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "ceph", "lustre")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """One spill directory: its filesystem's type and rates, and the bytes that are free there.

    `dealt_rates` are those that the store expects of it, less where others are on the same filesystem; `share` is what
    it gets of all that is spilled.
    """

    directory: Path
    filesystem: str
    rates: Disk
    free_bytes: int
    dealt_rates: Disk
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The measured rates. `matmul_per_s` is FLOP/s by precision; a CPU has neither `pageable` rates nor pinning.

    `pageable` is bytes per second out and in; `pin_ns` what pinning one GiB takes, None where it was refused.
    """

    device: torch.device
    device_name: str
    device_space: Space
    matmul_per_s: tuple[tuple[str, int], ...]
    roofline: Roofline
    links: Links
    pageable: tuple[int, int] | None
    pin_ns: int | None
    disks: tuple[DiskReport, ...]
    host_space: Space
    machine_bytes: int
    locked_bytes: int | None
    host_budget_bytes: int


def examine(device_name: str | None, spill_dirs: Sequence[Path] | None, save: Path | None = None) -> str:
    """Return the report on a device (the GPU if there is one) and on spill directories (those of the options).

    Its rates are also written to the file `save`, if there is one, as a profile for `tencache fit --device-profile`.

    Takes a few seconds, and renews the rates that plans are made with. Raises `OptionError` for a device or an option
    that cannot be used, `StoreError` for a directory that cannot.
    """
    device = find_device(device_name)
    options = Options.resolve(None if spill_dirs is None else {"spill_dir": list(spill_dirs)}, device=device)
    report = _measure(device, options)
    if save is not None:
        write_profile(save, _profile_of(report, options))
    return show_report(report)


def _profile_of(report: Report, options: Options) -> DeviceProfile:
    """Return a device's rates as plans count on them, not as they were measured."""
    is_gpu = report.device.type == "cuda"
    found = known_rates(report.device, options.spill_dir, calibrate=True, has_disk=bool(options.spill_dir))
    capability = torch.cuda.get_device_capability(report.device) if is_gpu else (0, 0)
    return DeviceProfile(
        name=report.device_name,
        memory_bytes=report.device_space.total_bytes,
        roofline=replace(found.roofline, attention_flops_per_s=report.roofline.attention_flops_per_s),
        links=found.links,
        source=f"measured, torch {torch.__version__}",
        workspace_bytes=workspace_bytes(capability[0]) if is_gpu else 0,
        compute_capability=capability,
    )


def show_report(report: Report) -> str:
    """Return a report as text: every figure, then what looks wrong."""
    links = report.links
    rows = {
        "device": f"{report.device}, {report.device_name}",
        "device memory": f"{_space(report.device_space)}",
        **{f"matmul {name}": format_flops(rate) for name, rate in report.matmul_per_s},
        **dict(_attention_rows(report.roofline)),
        "device memory traffic": format_rate(report.roofline.memory_bytes_per_s),
        "kernel": f"{report.roofline.launch_ns} ns on the device, {report.roofline.issue_ns} ns to issue",
        "link out": _link(links.d2h_bytes_per_s, links.d2h_duplex_bytes_per_s, report.pageable, 0),
        "link in": _link(links.h2d_bytes_per_s, links.h2d_duplex_bytes_per_s, report.pageable, 1),
    }
    if report.device.type == "cuda":
        rows["pinning"] = "refused" if report.pin_ns is None else f"{report.pin_ns / 1e9:.2g} s/GiB"
    rows |= {
        "host memory": f"{_space(report.host_space)}, of {format_bytes(report.machine_bytes)} in the machine",
        "host budget": format_bytes(report.host_budget_bytes),
        "locked memory limit": "none" if report.locked_bytes is None else format_bytes(report.locked_bytes),
    }
    rows |= dict(_disk_rows(report.disks))
    found = [f"* {line}" for line in (*device_findings(report), *host_findings(report), *disk_findings(report))]
    note = "Compute and copy rates are nine tenths of what one large kernel or copy reaches: what plans count on."
    return "\n".join([show_measured(rows), "", note, "", *(found or ["Nothing looks wrong."])])


def _disk_rows(disks: Sequence[DiskReport]) -> Iterator[tuple[str, str]]:
    """Yield what each spill directory does; of several, also the share that it will get, and what all do together."""
    for disk in disks:
        way = "direct I/O" if disk.rates.direct else "no direct I/O: the page cache's rates"
        share = f", gets {disk.share:.1%} of what is spilled" if len(disks) > 1 else ""
        yield (
            f"spill_dir {disk.directory}",
            f"{disk.filesystem or 'unknown filesystem'}, {way}, write {format_rate(disk.rates.write_bytes_per_s)}, "
            f"read {format_rate(disk.rates.read_bytes_per_s)}, {format_bytes(disk.free_bytes)} free{share}",
        )
    if len(disks) > 1:
        write_rate, read_rate = joint_rates([disk.dealt_rates for disk in disks])
        yield "all spill_dirs", f"write {format_rate(write_rate)}, read {format_rate(read_rate)}"


def device_findings(report: Report) -> Iterator[str]:
    """Yield what looks wrong with the device and its links: what it costs, and what to do."""
    if report.device.type != "cuda":
        yield (
            "No CUDA device is used: everything runs on the CPU, where budgets are for trying things out and save no "
            "memory; if there is a GPU, install its driver and a torch build for CUDA."
        )
        return
    links = report.links
    for name, rate, pageable in (
        ("out", links.d2h_bytes_per_s, (report.pageable or (0, 0))[0]),
        ("in", links.h2d_bytes_per_s, (report.pageable or (0, 0))[1]),
    ):
        if rate < _SLOW_LINK:
            yield (
                f"The link {name} moves {format_rate(rate)}, so a GiB takes {_GiB / rate:.2g} s, and fewer transfers "
                "are hidden; look at the slot's PCIe generation and width (nvidia-smi -q -d PCIE, lspci -vv): with "
                f"PCIe 4 x16 it would take {_GiB / _USUAL_LINK:.2g} s."
            )
        if rate < pageable * 3 // 2:
            yield (
                f"Pinned copies {name} ({format_rate(rate)}) are hardly faster than pageable ones "
                f"({format_rate(pageable)}), so copies hold up kernels; look for a virtual machine with bounce buffers "
                "(confidential computing, an IOMMU in translating mode)."
            )
    if links.d2h_duplex_bytes_per_s + links.h2d_duplex_bytes_per_s < 1.2 * max(
        links.d2h_bytes_per_s, links.h2d_bytes_per_s
    ):
        yield (
            "Copies out and in share one direction's rate, so where both overlap each takes twice as long; look for a "
            "PCIe switch or a NUMA hop between the GPU and host memory (nvidia-smi topo -m), and bind to its node: "
            f"copies that overlap would take up to {_duplex_gain(links):.0%} less time."
        )
    if report.pin_ns is None:
        yield (
            "The driver refuses to pin host memory, so copies run at pageable speed and hold up kernels; raise the "
            f"limit on locked memory (ulimit -l unlimited; in a container --ulimit memlock=-1){_pinned_gain(report)}."
        )
    elif report.pin_ns > _SLOW_PIN_NS:
        yield (
            f"Pinning takes {report.pin_ns / 1e9:.2g} s/GiB, which the first step waits for; allow huge pages (write "
            "madvise to /sys/kernel/mm/transparent_hugepage/enabled), or set a smaller host_budget: to pin all of that "
            f"would take {(report.pin_ns - _USUAL_PIN_NS) / 1e9 * report.host_budget_bytes / _GiB:.0f} s less."
        )


def _duplex_gain(links: Links) -> float:
    """Return by what share copies both ways would take less time if each had its own rate."""
    alone = links.d2h_bytes_per_s + links.h2d_bytes_per_s
    return 1 - (links.d2h_duplex_bytes_per_s + links.h2d_duplex_bytes_per_s) / alone


def _pinned_gain(report: Report) -> str:
    """Return what pinned copies would gain over the pageable ones that were measured, to be read on; "" if nothing."""
    slowest = min(report.pageable or (0,))
    gain = min(report.links.d2h_bytes_per_s, report.links.h2d_bytes_per_s) / slowest if slowest else 0
    return f": pinned copies are {gain:.1f} times as fast as pageable ones here" if gain > 1 else ""


def host_findings(report: Report) -> Iterator[str]:
    """Yield what looks wrong with host memory: what it costs, and what to do."""
    if report.device.type != "cuda":
        return
    if report.locked_bytes is not None and report.locked_bytes < report.host_budget_bytes:
        yield (
            f"The limit on locked memory, {format_bytes(report.locked_bytes)}, is below the host budget of "
            f"{format_bytes(report.host_budget_bytes)}, so a driver that keeps to it pins no more than that and copies "
            "from the rest are slow; raise it (ulimit -l unlimited; in a container --ulimit memlock=-1)."
        )
    if report.host_space.total_bytes < report.machine_bytes * 9 // 10:
        yield (
            f"A cgroup allows {format_bytes(report.host_space.total_bytes)} of the machine's "
            f"{format_bytes(report.machine_bytes)}, so more is spilled to disk or refused; give the container or job "
            f"more memory: up to {format_bytes(report.machine_bytes - report.host_space.total_bytes)} more could be "
            "offloaded."
        )
    if report.host_budget_bytes < report.device_space.total_bytes // 2:
        yield (
            f"The host budget, {format_bytes(report.host_budget_bytes)}, is less than half of the device's memory, so "
            "little can be offloaded to host memory; free some, or name a spill_dir on a fast disk."
        )


def disk_findings(report: Report) -> Iterator[str]:
    """Yield what looks wrong with the spill directories: what it costs, and what to do."""
    for disk in report.disks:
        slowest = min(disk.rates.write_bytes_per_s, disk.rates.read_bytes_per_s)
        if disk.filesystem in ("tmpfs", "ramfs"):
            yield (
                f"{disk.directory} is on {disk.filesystem}, which is host memory: what is spilled there frees none; "
                "name a directory on a disk."
            )
        elif not disk.rates.direct:
            yield (
                f"{disk.directory} ({disk.filesystem or 'unknown filesystem'}) takes no direct I/O, so what is spilled "
                "passes through the page cache and competes for host memory; name a directory on ext4 or xfs, in a "
                "container a mounted volume."
            )
        if disk.filesystem.partition(".")[0] in _NETWORKED:
            yield (
                f"{disk.directory} is on {disk.filesystem}, a filesystem of another machine, so its rates change with "
                "its load; name a directory on a local disk."
            )
        if slowest < _SLOW_DISK:
            yield (
                f"{disk.directory} moves {format_rate(slowest)}, so a GiB there takes {_GiB / slowest:.2g} s; name a "
                f"directory on an NVMe disk, or several on different disks: at {format_rate(_USUAL_DISK)} it would "
                f"take {_GiB / _USUAL_DISK:.2g} s."
            )
        if disk.free_bytes < _GiB:
            yield (
                f"{disk.directory} has {format_bytes(disk.free_bytes)} free, so hardly anything can be spilled there; "
                "free some space, or name another directory."
            )


def _attention_rows(roofline: Roofline) -> Iterator[tuple[str, str]]:
    if roofline.attention_flops_per_s is not None:
        forward, backward = map(format_flops, roofline.attention_flops_per_s)
        yield "attention", f"{forward} forward, {backward} backward"


def _measure(device: torch.device, options: Options) -> Report:
    cuda = device.type == "cuda"
    free = device_space(device)  # before this process holds any
    roofline = rates_module.roofline(device, calibrate=True, renew=True)
    if cuda:
        roofline = replace(roofline, attention_flops_per_s=rates_module.attention_rates(device))
    links = rates_module.links(device, (), calibrate=True, renew=True)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    host = host_space()
    return Report(
        device=device,
        device_name=rates_module.device_key("", device)["device"],
        device_space=free,
        matmul_per_s=_matmul_rates(device, roofline),
        roofline=roofline,
        links=links,
        pageable=_pageable_rates(device) if cuda else None,
        pin_ns=_pin_ns(device) if cuda else None,
        disks=tuple(_disk_reports(options.spill_dir)),
        host_space=host,
        machine_bytes=max(host.total_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        host_budget_bytes=options.host_budget,
    )


def _matmul_rates(device: torch.device, roofline: Roofline) -> tuple[tuple[str, int], ...]:
    rates = dict(roofline.flops_per_s)
    if device.type == "cuda":
        with _float32_as("tf32"):
            rates["tf32"] = rates_module.roofline(device, calibrate=True, renew=True).flops_rate(torch.float32)
    return tuple(rates.items())


@contextlib.contextmanager
def _float32_as(precision: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _pageable_rates(device: torch.device) -> tuple[int, int]:
    out, into = (copy_rates(device, (way,), pinned=False)[0] for way in ("out", "in"))
    return out, into


def _pin_ns(device: torch.device) -> int | None:
    """Return the time to pin a GiB, the way the runtime pins; None if the driver refuses."""
    streams = open_streams(device)
    memory = np.frombuffer(new_mapping(_PIN_BYTES), dtype=np.uint8)
    try:
        start_ns = time.perf_counter_ns()
        pinned = streams.pin(memory)
        taken_ns = time.perf_counter_ns() - start_ns
        if pinned:
            streams.unpin(memory)
    finally:
        streams.close()
    return taken_ns * (_GiB // _PIN_BYTES) if pinned else None


def _disk_reports(directories: Sequence[Path]) -> Iterator[DiskReport]:
    found: dict[str, Disk] = {}  # each filesystem is measured once
    for directory in directories:
        name = filesystem_id(directory)
        found[name] = found.get(name) or rates_module.disk(directory, renew=True)
    dealt = rates_module.rates_by_directory(directories, lambda directory: found[filesystem_id(directory)])
    total = sum(rates.both_ways_bytes_per_s for rates in dealt.values())
    for directory in directories:
        yield DiskReport(
            directory=directory,
            filesystem=filesystem_type(directory),
            rates=found[filesystem_id(directory)],
            free_bytes=disk_space([directory]).available_bytes,
            dealt_rates=dealt[directory],
            share=dealt[directory].both_ways_bytes_per_s / total,
        )


def _space(space: Space) -> str:
    return f"{format_bytes(space.total_bytes)}, {format_bytes(space.available_bytes)} of it free"


def _link(solo: int, duplex: int, pageable: tuple[int, int] | None, way: int) -> str:
    also = f", pageable {format_rate(pageable[way])}" if pageable else ""
    return f"{format_rate(solo)}, {format_rate(duplex)} while both are busy{also}"
