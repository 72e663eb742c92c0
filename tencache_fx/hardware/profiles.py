"""Profiles of devices: what `tencache fit` has to know of one that need not be in this machine."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tencache_fx.errors import OptionError
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.planning.host_work import HostCosts
from tencache_fx.planning.problem import Links
from tencache_fx.serialization import Positive, from_json, to_json

# Rounded, of virtual machines with an H200, which differ by a factor of two. In the graphs of a GPT-2 of 8 layers the
# thread works for 62 ms, for some 250 kernels and 306 runtime ops: twice what these take one behind the other, as other
# code runs between them. In `step()` of our AdamW it works for 17 ms, for 70 parameters on the device and 30 in host
# memory.
HOST_COSTS = HostCosts(launch_ns=14_000, transfer_op_ns=120_000, device_update_ns=75_000, host_update_ns=380_000)
"""Those of a host that is not known better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device's memory and rates, and those of the links to it; as `rates.roofline` and `rates.links` return them.

    `workspace_bytes` are what libraries keep on it while a model is trained; `source` says where the figures are from.
    torch chooses some kernels by the `compute_capability` of a GPU. `host` are the costs of the thread that
    runs a step.
    """

    name: str
    memory_bytes: Positive
    roofline: Roofline
    links: Links
    source: str = "measured"
    workspace_bytes: int = 0
    compute_capability: tuple[int, int] = (8, 0)
    host: HostCosts = HOST_COSTS


def workspace_bytes(compute_capability: int, configured: str | None = None) -> int:
    """Return what cuBLAS keeps on a GPU of this major compute capability, while a model is trained.

    It has a workspace for the thread of the forward, and one for the backward's (torch:
    `aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize`). `configured` is `CUBLAS_WORKSPACE_CONFIG`,
    sizes in KiB and how many of each.

    >>> workspace_bytes(9) >> 20, workspace_bytes(9, ":4096:2:16:8") >> 10
    (64, 16640)
    """
    if configured and (sizes := re.findall(r":([0-9]+):([0-9]+)", configured)):
        return 2 * sum(int(kib) * int(count) << 10 for kib, count in sizes)
    return 2 * ((32 << 20) if compute_capability in (9, 10) else (8 << 20) + (128 << 10))


def _profile(
    name: str,
    memory_bytes: int,
    compute_capability: tuple[int, int],
    flops_per_s: tuple[int, int, int],
    memory_bytes_per_s: int,
    attention_flops_per_s: tuple[int, int],
    links: Links,
    source: str,
) -> DeviceProfile:
    """Return the profile of a GPU; `flops_per_s` are those in bfloat16, float16 and float32."""
    names = ("bfloat16", "float16", "float32")
    return DeviceProfile(
        name=name,
        memory_bytes=memory_bytes,
        roofline=Roofline(
            flops_per_s=tuple(zip(names, flops_per_s, strict=True)),
            memory_bytes_per_s=memory_bytes_per_s,
            launch_ns=2_500,  # assumed, not measured
            issue_ns=HOST_COSTS.launch_ns,
            attention_flops_per_s=attention_flops_per_s,
        ),
        links=links,
        source=source,
        workspace_bytes=workspace_bytes(compute_capability[0]),
        compute_capability=compute_capability,
    )


def _by_published_rates(
    name: str,
    gib: int,
    compute_capability: tuple[int, int],
    tflops: tuple[float, float],
    memory_tb_per_s: float,
    link_gb_per_s: float,
    host_gb_per_s: float,
) -> DeviceProfile:
    """Return the profile of a GPU of `gib`, from Ampere on, with its rates in reduced precision and in fp32.

    Its source is the published peak rates, times what an H100 was measured to reach of its own: 76 % of its compute,
    78 % of its memory's, 75 % of its link's. Attention is FlashAttention-2, which was published (arXiv 2307.08691) to
    reach about 70 % of an A100's peak in its forward, and 60 % in its backward; nine tenths of that.
    """
    half, single = (int(rate * 0.76e12) for rate in tflops)
    link = int(link_gb_per_s * 0.75e9)
    return _profile(
        name,
        gib << 30,
        compute_capability,
        (half, half, single),
        int(memory_tb_per_s * 0.78e12),
        (int(tflops[0] * 0.63e12), int(tflops[0] * 0.54e12)),
        Links(
            d2h_bytes_per_s=link,
            h2d_bytes_per_s=link,
            d2h_duplex_bytes_per_s=link * 14 // 15,
            h2d_duplex_bytes_per_s=link * 14 // 15,
            host_bytes_per_s=int(host_gb_per_s * 1e9),
        ),
        "published peak rates, by what an H100 was measured to reach of its own",
    )


# Nine tenths of what cuDNN's attention reached with a mask on an H200: 2048 tokens, 16 heads of 128, torch 2.11.
_HOPPER_ATTENTION = (327_000_000_000_000, 254_000_000_000_000)
_ALL = (
    _profile(
        "h100",
        85_000_000_000,
        (9, 0),
        (750_562_257_758_589, 522_082_233_145_669, 46_480_207_326_775),
        2_615_530_792_662,
        _HOPPER_ATTENTION,
        Links(
            d2h_bytes_per_s=51_385_364_920,
            h2d_bytes_per_s=49_957_073_913,
            d2h_duplex_bytes_per_s=49_938_863_432,
            h2d_duplex_bytes_per_s=43_114_049_381,
            host_bytes_per_s=141_079_243_580,
        ),
        "NVIDIA H100 80GB HBM3 (700 W), torch 2.11.0: compute and host memory of one machine, links of another; "
        "launch times are assumed",
    ),
    _profile(
        "h200",
        150_000_000_000,
        (9, 0),
        (770_159_790_383_934, 739_399_669_592_729, 45_927_539_111_404),
        3_633_412_858_078,
        _HOPPER_ATTENTION,
        Links(
            d2h_bytes_per_s=53_298_813_422,
            h2d_bytes_per_s=52_893_475_314,
            d2h_duplex_bytes_per_s=49_510_731_750,
            h2d_duplex_bytes_per_s=49_325_361_961,
            host_bytes_per_s=118_000_000_000,
            host_peak_bytes_per_s=142_000_000_000,
        ),
        "NVIDIA H200, torch 2.11.0: a virtual machine of 16 cores, host memory of one with 8; launch times are assumed",
    ),
    _by_published_rates("a100-80gb", 80, (8, 0), (312, 19.5), 2.04, 32, 100),
    _by_published_rates("a100-40gb", 40, (8, 0), (312, 19.5), 1.55, 32, 100),
    _by_published_rates("rtx4090", 24, (8, 9), (165, 82.6), 1.01, 32, 45),
    _by_published_rates("rtx3090", 24, (8, 6), (71, 35.6), 0.94, 32, 35),
)
PROFILES: Mapping[str, DeviceProfile] = MappingProxyType({profile.name: profile for profile in _ALL})
"""Those that have a name."""


def find_profile(given: str) -> DeviceProfile:
    """Return the profile of a name, or of a file that `tencache doctor --save` has written.

    Raises `OptionError` if there is none, or it cannot be read.
    """
    if (found := PROFILES.get(given.lower())) is not None:
        return found
    path = Path(given)
    if not path.exists():
        near = difflib.get_close_matches(given.lower(), PROFILES, n=1, cutoff=0.5)
        hint = f" did you mean {near[0]}?" if near else ""
        raise OptionError(
            f"{given!r} is no device profile;{hint} there are {', '.join(PROFILES)}, and "
            "files that `tencache doctor --save FILE` writes on a machine that has the device."
        )
    try:
        return from_json(DeviceProfile, path.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{given} is no device profile: {str(error).rstrip('.')}; write it with `tencache doctor --save`."
        ) from error


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile for `find_profile`; raises `OptionError` if it cannot be written."""
    try:
        path.write_text(to_json(profile) + "\n")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}; name another file.") from error
