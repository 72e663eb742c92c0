"""How fast the ranks of a process group exchange bytes: measured once for each group, by all of its ranks together.

A collective takes a latency, and then the time for the bytes that each rank sends (`CollectiveKind.traffic`) over the
group's link. Ranks agree on both numbers, those of the slowest: else their plans would differ by them. Results are kept
by `cache.py`, keyed by all that changes them: backend, number of ranks, of them on this host, device and torch version.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from tencache_fx.hardware.cache import cached, kept
from tencache_fx.hardware.capacity import ranks_here
from tencache_fx.hardware.rates import device_key
from tencache_fx.hardware.timing import cpu_seconds, cuda_seconds, per_second
from tencache_fx.planning.problem import CollectiveKind
from tencache_fx.serialization import MOST, Positive
from tencache_fx.stages import CALIBRATION, STAGES
from tencache_fx.units import format_rate

log = logging.getLogger("tencache_fx")

_KiB, _MiB = 1 << 10, 1 << 20
_WHOLE_BYTES: Mapping[str, Sequence[int]] = MappingProxyType(
    {"cuda": (256 * _KiB, 16 * _MiB, 128 * _MiB), "cpu": (16 * _KiB, 1 * _MiB, 8 * _MiB)}
)
"""What is gathered to measure: the first shows the latency, the other two the rate."""
_TIMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRates:
    """The link of a process group: what each collective takes beside its bytes, and the bytes that a rank sends."""

    latency_ns: int
    bytes_per_s: Positive


# Where nothing was measured, because that takes all ranks at once, and only `offload(model, shard=...)` has them there.
# Round numbers that tell long collectives from short ones: for GPUs, half of what NVLink carries one way between A100s
# (300 GB/s); for processes of one host, about what its loopback device does.
FIXED_RATES: Mapping[str, GroupRates] = MappingProxyType(
    {
        "cuda": GroupRates(latency_ns=30_000, bytes_per_s=150_000_000_000),
        "cpu": GroupRates(latency_ns=200_000, bytes_per_s=1_000_000_000),
    }
)

_AGREED: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupRates]]" = weakref.WeakKeyDictionary()


def group_rates(group: "dist.ProcessGroup", device_type: str) -> GroupRates:
    """Return what the ranks of `group` have agreed on for its collectives on "cuda" or "cpu", or the fixed rates.

    Nothing is measured, and no other rank is asked.
    """
    return _AGREED.get(group, {}).get(device_type, FIXED_RATES[device_type])


def group_facts() -> Sequence[tuple[str, int, Sequence[tuple[str, GroupRates]]]]:
    """Return the name and the number of ranks of each process group, and what its ranks have agreed on, in order.

    Durations of collectives follow from that, and plans from these: what is kept of a plan is for these facts only.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ()
    groups = dist.distributed_c10d._world.pg_names
    return sorted((name, each.size(), sorted(_AGREED.get(each, {}).items())) for each, name in groups.items())


def agree_on_rates(group: "dist.ProcessGroup", device: torch.device, *, calibrate: bool) -> GroupRates:
    """Return the rates of collectives of `group` on `device`: known to all of its ranks, or measured now.

    A collective: all ranks of the group call it, at the same place among their collectives. It measures for about a
    tenth of a second, with up to 256 MiB of a GPU's memory, if a rank does not know them; if a rank does not
    `calibrate`, or has no room for that, all take the fixed ones. Ranks ask one another once for each group.
    """
    known = _AGREED.setdefault(group, {})
    if device.type not in known:
        known[device.type] = _agree(group, device, calibrates=calibrate and backend_of(group, device) != "fake")
    return known[device.type]


def backend_of(group: "dist.ProcessGroup", device: torch.device) -> str:
    """Return the name of a group's backend for `device`, such as "nccl"; "" if it has none."""
    if torch.device(device.type) not in {torch.device(each.type) for each in group._device_types}:
        return ""
    backend: Any = group._get_backend(torch.device(device.type))
    return str(backend.name())


def _agree(group: "dist.ProcessGroup", device: torch.device, *, calibrates: bool) -> GroupRates:
    key = _key(group, device)
    mine = kept(key, GroupRates) if calibrates else None
    fixed = FIXED_RATES[device.type]
    (all_calibrate, all_know), slowest = _slowest(group, device, mine or fixed, (calibrates, mine is not None))
    if not all_calibrate:
        return fixed
    if all_know:
        return slowest
    (have_room,), _ = _slowest(group, device, fixed, (_has_room(group, device),))
    if not have_room:
        log.info("collectives are not measured: a rank has no memory for that; fixed rates are used")
        return fixed

    def measure() -> GroupRates:
        return _slowest(group, device, _measure(group, device))[1]

    found = cached(key, GroupRates, STAGES.timed(CALIBRATION, measure), renew=True)
    log.info(
        "measured collectives of %d ranks over %s: %s, latency %d ns",
        group.size(),
        key["backend"],
        format_rate(found.bytes_per_s),
        found.latency_ns,
    )
    return found


def _has_room(group: "dist.ProcessGroup", device: torch.device) -> bool:
    """Return whether this rank has memory for the largest gather; it is then in torch's cache."""
    try:
        torch.empty(2 * _WHOLE_BYTES[device.type][-1], dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def _slowest(
    group: "dist.ProcessGroup", device: torch.device, mine: GroupRates, flags: Sequence[bool] = ()
) -> tuple[list[bool], GroupRates]:
    """Return which flags are true on all ranks, and the rates of the slowest."""
    told = torch.tensor([*map(int, flags), -mine.latency_ns, mine.bytes_per_s], dtype=torch.int64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    *agreed, latency_ns, bytes_per_s = told.tolist()
    return list(map(bool, agreed)), GroupRates(latency_ns=-latency_ns, bytes_per_s=bytes_per_s)


def _measure(group: "dist.ProcessGroup", device: torch.device) -> GroupRates:
    ranks = group.size()
    seconds = [_gather_seconds(group, device, nbytes // ranks) for nbytes in _WHOLE_BYTES[device.type]]
    sent = [CollectiveKind.ALL_GATHER.traffic(nbytes, ranks) for nbytes in _WHOLE_BYTES[device.type]]
    # The two large ones are sent alike. If something held one of them up, or latency is most of both, the first tells.
    other = 1 if seconds[2] - seconds[1] > seconds[2] / 4 else 0
    rate = per_second(sent[2] - sent[other], max(seconds[2] - seconds[other], 1e-9))
    rate = min(max(1, rate), MOST)
    return GroupRates(latency_ns=max(0, int(seconds[0] * 1e9) - sent[0] * 1_000_000_000 // rate), bytes_per_s=rate)


def _gather_seconds(group: "dist.ProcessGroup", device: torch.device, part_bytes: int) -> float:
    """Return the seconds that it takes to gather parts of so many bytes; all ranks do so as often."""
    part = torch.zeros(part_bytes, dtype=torch.uint8, device=device)
    whole = torch.empty(part_bytes * group.size(), dtype=torch.uint8, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part, group=group)

    gather()  # the first one makes connections
    if device.type != "cuda":
        return cpu_seconds(gather, times=_TIMES)
    with torch.cuda.device(device):
        return cuda_seconds(gather, times=_TIMES)


def _key(group: "dist.ProcessGroup", device: torch.device) -> dict[str, str]:
    told = {"backend": backend_of(group, device), "ranks": str(group.size()), "here": str(ranks_here())}
    return {**device_key("collectives", device), **told}
