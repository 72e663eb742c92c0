"""What this machine can do, measured once: link rates, matmul and memory rates, launch cost.

Results are kept by `cache.py`, keyed by all that changes them: device, driver, torch version, threads and matmul
precision for the device; the filesystem for a disk.
"""

import dataclasses
import itertools
import logging
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from tencache_fx.hardware.cache import cached, kept
from tencache_fx.hardware.copies import LINK_BYTES, copy_pairs, copy_rates, cuda_copy_rates, kernels
from tencache_fx.hardware.disk import Disk, filesystem_id, joint_rates, measure_disk
from tencache_fx.hardware.roofline import KnownRates, Roofline, dtype_name
from tencache_fx.hardware.timing import cpu_seconds, cuda_seconds, per_second
from tencache_fx.planning.problem import Links
from tencache_fx.stages import CALIBRATION, STAGES
from tencache_fx.units import format_flops, format_rate

log = logging.getLogger("tencache_fx")

_MiB = 1 << 20
_HOST_BYTES = 512 * _MiB  # more than any cache holds
_HOST_TIMES = 3
_BESIDE_TIMES = 150  # copies that keep the links busy for a fifth of a second and more
_CPU_RUNS_S = 0.2  # one kernel on a CPU is timed for so long: some have no fast product of bfloat16
_SMALL_BYTES = _MiB  # a copy so small shows what it costs beyond its bytes
_ATTAINABLE = (9, 10)  # of the rate of one large kernel or copy, what a graph of many gets
_BESIDE_KERNELS = (49, 50)  # of the rate of copies beside kernels, what copies of a plan get
_OF_HOST_MEMORY = (5, 6)  # of its rate while links and threads are busy, what a step gets: at times they are not


# With `calibrate=False`: what a modest machine reaches. A PCIe 3 x16 link, a SATA-class disk, an older device.
FIXED_LINKS = Links(
    d2h_bytes_per_s=12_000_000_000,
    h2d_bytes_per_s=12_000_000_000,
    d2h_duplex_bytes_per_s=9_000_000_000,
    h2d_duplex_bytes_per_s=9_000_000_000,
)
FIXED_DISK = Disk(write_bytes_per_s=500_000_000, read_bytes_per_s=500_000_000, direct=True)
FIXED_ROOFLINE: Mapping[str, Roofline] = MappingProxyType(
    {
        "cuda": Roofline(
            flops_per_s=(
                ("bfloat16", 100_000_000_000_000),
                ("float16", 100_000_000_000_000),
                ("float32", 15_000_000_000_000),
            ),
            memory_bytes_per_s=700_000_000_000,
            launch_ns=5_000,
            issue_ns=5_000,
        ),
        "cpu": Roofline(
            flops_per_s=(("bfloat16", 50_000_000_000), ("float32", 50_000_000_000)),
            memory_bytes_per_s=10_000_000_000,
            launch_ns=2_000,
            issue_ns=0,
        ),
    }
)


def links(device: torch.device, spill_dirs: Sequence[Path], *, calibrate: bool, renew: bool = False) -> Links:
    """Return the rates between `device`, host and the disks that hold `spill_dirs`: of all of them together.

    Those of a GPU's link are measured beside kernels. Others are nine tenths of what large copies reach while nothing
    else goes on: beside computing they slow down.

    Measuring takes about two seconds, 224 MiB of the device's memory and 640 of the host's, and for each disk at most
    two seconds and 256 MiB; afterwards the cache answers, unless `renew`. With `calibrate` false the fixed rates are
    returned.

    Raises `StoreError` when a spill directory cannot be written or read.
    """
    by_filesystem = {filesystem_id(directory): directory for directory in spill_dirs}
    if not calibrate:
        return _with_disks(FIXED_LINKS, [FIXED_DISK] * len(by_filesystem))
    measure = STAGES.timed(CALIBRATION, lambda: _measure_links(device))
    found = cached(_links_key(device), Links, measure, renew=renew)
    return _derated(device, _with_disks(found, [disk(directory, renew=renew) for directory in by_filesystem.values()]))


def _links_key(device: torch.device) -> dict[str, str]:
    return device_key("links", device) | ({"beside": "kernels", "host": "peak"} if device.type == "cuda" else {})


def _with_disks(links: Links, disks: Sequence[Disk]) -> Links:
    write_rate, read_rate = joint_rates(disks)
    return dataclasses.replace(links, disk_write_bytes_per_s=write_rate, disk_read_bytes_per_s=read_rate)


def _derated(device: torch.device, links: Links) -> Links:
    rates = {name: _attainable(rate) for name, rate in dataclasses.asdict(links).items() if name.endswith("_per_s")}
    if device.type == "cuda":
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "d2h_duplex_bytes_per_s", "h2d_duplex_bytes_per_s"):
            rates[name] = getattr(links, name) * _BESIDE_KERNELS[0] // _BESIDE_KERNELS[1]
        rates["host_peak_bytes_per_s"] = links.host_peak_bytes_per_s
        rates["host_bytes_per_s"] = links.host_peak_bytes_per_s * _OF_HOST_MEMORY[0] // _OF_HOST_MEMORY[1]
    return dataclasses.replace(links, **rates)


def disk(directory: Path, *, renew: bool = False) -> Disk:
    """Return the rates of the filesystem that holds `directory`: measured once, and again with `renew`.

    Raises `StoreError` when it cannot be written or read.
    """
    measure = STAGES.timed(CALIBRATION, lambda: measure_disk(directory))
    return cached(_disk_key(filesystem_id(directory)), Disk, measure, renew=renew)


def rates_by_directory(directories: Sequence[Path], rates_of: Callable[[Path], Disk | None]) -> dict[Path, Disk]:
    """Return the rates of each directory while all are busy, from those of its filesystem that `rates_of` returns.

    Directories of one filesystem share its rates. Those whose rates are not known (None) are missing. Raises
    `StoreError` when a directory cannot be read.
    """
    names = {directory: filesystem_id(directory) for directory in directories}
    found: dict[Path, Disk] = {}
    for directory, name in names.items():
        if (whole := rates_of(directory)) is not None:
            count = list(names.values()).count(name)
            found[directory] = dataclasses.replace(
                whole,
                write_bytes_per_s=max(1, whole.write_bytes_per_s // count),
                read_bytes_per_s=max(1, whole.read_bytes_per_s // count),
            )
    return found


def measured_disk(directory: Path) -> Disk | None:
    """Return the rates that were measured earlier of the filesystem that holds `directory`; nothing is measured now.

    Raises `StoreError` when it cannot be read.
    """
    return kept(_disk_key(filesystem_id(directory)), Disk)


def _disk_key(filesystem: str) -> dict[str, str]:
    return {"what": "disk", "filesystem": filesystem}


def roofline(device: torch.device, *, calibrate: bool, renew: bool = False) -> Roofline:
    """Return the compute rates of `device`: nine tenths of what one large kernel of each sort reaches.

    Measuring takes under a second and at most 256 MiB of device memory; afterwards the cache answers, unless `renew`.
    With `calibrate` false the fixed rates are returned.
    """
    if not calibrate:
        return FIXED_ROOFLINE[device.type]
    measure = STAGES.timed(CALIBRATION, lambda: _measure_roofline(device))
    return cached(device_key("roofline", device), Roofline, measure, renew=renew)


def known_rates(device: torch.device, spill_dirs: Sequence[Path], *, calibrate: bool, has_disk: bool) -> KnownRates:
    """Return the rates that were measured earlier, or else the fixed ones; nothing is measured.

    Those of disks are measured ones for `spill_dirs` that were, and fixed ones for all others, or, without any
    directory, for one disk if there is to be one (`has_disk`).
    """
    by_filesystem = {filesystem_id(directory): directory for directory in spill_dirs} if has_disk else {}
    disks = [kept(_disk_key(name), Disk) if calibrate else None for name in by_filesystem] or [None] * has_disk
    roofline = kept(device_key("roofline", device), Roofline) if calibrate else None
    links = kept(_links_key(device), Links) if calibrate else None
    measured = roofline is not None and links is not None
    found = _with_disks((measured and links) or FIXED_LINKS, [disk or FIXED_DISK for disk in disks])
    return KnownRates(
        roofline=(measured and roofline) or FIXED_ROOFLINE[device.type],
        links=_derated(device, found) if measured else found,
        measured=measured,
    )


def attention_rates(device: torch.device) -> tuple[int, int] | None:
    """Return the FLOP/s of attention in bfloat16 on a GPU, forward and backward: nine tenths of what is measured.

    There is a mask, as models of transformers give one. Takes under a second, and 200 MiB where a kernel is fused.
    FLOPs are counted as torch does: two products forward, five backward. None where the device cannot compute it.
    """
    batch, heads, tokens, width = 2, 16, 2048, 128
    own = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, tokens, width)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, generator=own).requires_grad_() for _ in range(3)
    )
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    try:
        result = forward()
        backward = partial(torch.autograd.grad, result, (q, k, v), torch.ones_like(result), retain_graph=True)
        times_s = _mean_seconds(device, forward), _mean_seconds(device, backward)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    flops = 4 * batch * heads * tokens * tokens * width
    return _attainable(per_second(flops, times_s[0])), _attainable(per_second(flops * 5 // 2, times_s[1]))


def _measure_links(device: torch.device) -> Links:
    copy_rates(device, ("out", "in"))  # wakes the link
    beside = kernels(device) if device.type == "cuda" else None
    d2h, h2d = (copy_rates(device, (way,), meanwhile=beside)[0] for way in ("out", "in"))
    d2h_duplex, h2d_duplex = copy_rates(device, ("out", "in"), meanwhile=beside)
    latencies_ns = [
        _SMALL_BYTES * 1_000_000_000 // copy_rates(device, (way,), nbytes=_SMALL_BYTES)[0]
        - _SMALL_BYTES * 1_000_000_000 // rate
        for way, rate in (("out", d2h), ("in", h2d))
    ]
    found = Links(
        d2h_bytes_per_s=d2h,
        h2d_bytes_per_s=h2d,
        d2h_duplex_bytes_per_s=min(d2h, d2h_duplex),
        h2d_duplex_bytes_per_s=min(h2d, h2d_duplex),
        copy_latency_ns=max(FIXED_LINKS.copy_latency_ns, *latencies_ns),  # the runtime's own share is not in a copy
        host_peak_bytes_per_s=_host_rate(device) if device.type == "cuda" else 0,  # a CPU "device" computes there, too
    )
    log.info(
        "measured links of %s: out %s (%s while both are busy), in %s (%s), latency %d ns; host memory %s",
        device,
        *map(format_rate, (d2h, found.d2h_duplex_bytes_per_s, h2d, found.h2d_duplex_bytes_per_s)),
        found.copy_latency_ns,
        format_rate(found.host_peak_bytes_per_s),
    )
    return found


def _host_rate(device: torch.device) -> int:
    """Return the most bytes per second that updates and copies make the host's memory read and write.

    Updates in place run beside copies both ways, and the best of a few times counts.
    """
    state = torch.ones(_HOST_BYTES // 4, dtype=torch.float32, device="cpu")
    pieces = state.split(len(state) // 32)  # so small that none runs on for long when the copies are done
    pairs = copy_pairs(device, ("out", "in"), LINK_BYTES, pinned=True)

    def measure() -> int:
        updated_bytes_per_s = 0

        def update(done: Callable[[], bool]) -> None:
            nonlocal updated_bytes_per_s
            start_ns, nbytes = time.perf_counter_ns(), 0
            for piece in itertools.cycle(pieces):
                if done():
                    break
                piece.add_(1)  # in place: reads and writes as much
                nbytes += 2 * piece.nbytes
            updated_bytes_per_s = per_second(nbytes, (time.perf_counter_ns() - start_ns) / 1e9)

        copied_bytes_per_s = cuda_copy_rates(device, pairs, times=_BESIDE_TIMES, meanwhile=update)
        return updated_bytes_per_s + sum(copied_bytes_per_s)

    return max(measure() for _ in range(_HOST_TIMES))


def _measure_roofline(device: torch.device) -> Roofline:
    cuda = device.type == "cuda"
    # float32 first: the slowest, it also brings the device's clock up for the others.
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if cuda else (torch.float32, torch.bfloat16)
    flops = [(dtype_name(dtype), _attainable(_matmul_rate(device, dtype, 4096 if cuda else 768))) for dtype in dtypes]
    source = torch.zeros((120 if cuda else 32) * _MiB // 4, device=device)  # more than any cache holds
    target = torch.empty_like(source)
    tiny = target[:1]

    def add() -> None:
        torch.add(source, 1, out=target)

    def nothing() -> None:
        tiny.add_(1)

    memory_s, launch_s = _mean_seconds(device, add), _mean_seconds(device, nothing, times=100)
    found = Roofline(
        flops_per_s=tuple(sorted(flops)),
        memory_bytes_per_s=_attainable(per_second(2 * source.numel() * 4, memory_s)),
        launch_ns=max(1, int(launch_s * 1e9)),
        issue_ns=_issue_ns(device, nothing) if cuda else 0,
    )
    log.info(
        "measured %s: %s, memory %s, launch %d ns, issue %d ns",
        device,
        ", ".join(f"{name} {format_flops(rate)}" for name, rate in found.flops_per_s),
        format_rate(found.memory_bytes_per_s),
        found.launch_ns,
        found.issue_ns,
    )
    return found


def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int) -> int:
    own = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay as they are
    left, right = (torch.rand(side, side, device=device, dtype=dtype, generator=own) for _ in range(2))
    product = torch.empty_like(left)
    return per_second(2 * side**3, _mean_seconds(device, lambda: torch.mm(left, right, out=product)))


def _mean_seconds(device: torch.device, run: Callable[[], object], *, times: int = 20) -> float:
    """Return the seconds that one `run` takes on `device`, after a warm-up as long; on a CPU, fewer of a slow one."""
    if device.type != "cuda":
        once_s = min(cpu_seconds(run, times=1) for _ in range(2))
        return cpu_seconds(run, times=max(1, min(times, int(_CPU_RUNS_S / max(once_s, 1e-9)))))
    with torch.cuda.device(device):
        cuda_seconds(run, times=times)
        return cuda_seconds(run, times=times)


def _issue_ns(device: torch.device, run: Callable[[], object], *, times: int = 100) -> int:
    """Return how long this thread takes to issue a small kernel."""
    torch.cuda.synchronize(device)
    start_ns = time.perf_counter_ns()
    for _ in range(times):
        run()
    issued_ns = time.perf_counter_ns() - start_ns
    torch.cuda.synchronize(device)
    return issued_ns // times


def _attainable(rate: int) -> int:
    return min(rate, max(1, rate * _ATTAINABLE[0] // _ATTAINABLE[1]))  # 0 would mean no link


def device_key(what: str, device: torch.device) -> dict[str, str]:
    """Return the cache's key for `what` was measured of `device`."""
    cuda = device.type == "cuda"
    return {
        "what": what,
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "driver": _driver_version() if cuda else "",
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        # Not `torch.get_float32_matmul_precision()`: that raises once somebody has set these.
        "matmul": (torch.backends.cuda if cuda else torch.backends.mkldnn).matmul.fp32_precision,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.machine()


def _driver_version() -> str:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.exists() else f"CUDA {torch.version.cuda}"
