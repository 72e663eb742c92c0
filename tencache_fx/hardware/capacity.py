"""How many bytes each tier of this machine has: device, host (cgroup-aware), disk."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tencache_fx.errors import OptionError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Bytes of one tier: all that exist, and those this process may use now, its own included."""

    total_bytes: int
    available_bytes: int


def device_space(device: "torch.device") -> Space:
    """Return the memory of `device` that torch may take; what its allocator already holds counts as available.

    `torch.cuda.set_per_process_memory_fraction` limits both. A CPU "device" is the host's memory.
    """
    if device.type != "cuda":
        return host_space()
    import torch  # here, because sizes are also read by commands that must start without torch

    free_bytes, device_bytes = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index  # torch asks for a number below
    total_bytes = int(device_bytes * torch.cuda.get_per_process_memory_fraction(index))
    return Space(
        total_bytes=total_bytes,
        available_bytes=min(total_bytes, free_bytes + torch.cuda.memory_reserved(device)),
    )


def host_space(root: Path = Path("/")) -> Space:
    """Return the host's memory: the least of what the kernel and every enclosing cgroup (v1 and v2) allow.

    `root` is where `proc` and `sys` are found.
    """
    meminfo = (root / "proc/meminfo").read_text()
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    limits = list(_cgroup_limits(root))
    return Space(
        total_bytes=min([fields["MemTotal"], *(limit for limit, _ in limits)]),
        available_bytes=max(0, min([fields["MemAvailable"], *(limit - used for limit, used in limits)])),
    )


def disk_space(directories: Sequence[Path]) -> Space:
    """Return the space of the filesystems that hold `directories`, each filesystem counted once.

    Raises `OSError` when a directory does not exist.
    """
    stats = {os.stat(directory).st_dev: os.statvfs(directory) for directory in directories}
    return Space(
        total_bytes=sum(stat.f_blocks * stat.f_frsize for stat in stats.values()),
        available_bytes=sum(stat.f_bavail * stat.f_frsize for stat in stats.values()),
    )


def ranks_here() -> int:
    """Return how many processes share this host's memory and disks: ranks that train together, or only this one.

    torchrun says how many ranks it has started here. Without it, all ranks of torch's process group are taken to be
    here: where that is not so, they get less than there is, never more. Raises `OptionError` if the environment says it
    in no number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        return _group_size()
    if not text.isdecimal() or int(text) < 1:
        raise OptionError(f"LOCAL_WORLD_SIZE={text!r} is no number of ranks; set it to at least 1, or remove it.")
    return int(text)


def _group_size() -> int:
    """Return the size of torch's process group, if there is one by now; does not load torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return 1 if distributed.get_backend() == "fake" else int(distributed.get_world_size())


def _cgroup_limits(root: Path) -> Iterable[tuple[int, int]]:
    """Yield `(limit, used)` bytes of this process's memory cgroup and of every cgroup above it.

    The page cache that the kernel can drop at once (`inactive_file`) does not count as used. Inside a container the
    path may name folders that only the host sees, so folders that are not there are passed over.
    """
    membership = root / "proc/self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        leaf = base / path.lstrip("/")
        for folder in (leaf, *leaf.parents):
            if (folder / names[0]).exists():
                yield from _read_limit(folder, *names)
            if folder == base:
                break


def _read_limit(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterable[tuple[int, int]]:
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    dropped = re.search(rf"^{cache_name} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    used_bytes = int((folder / usage_name).read_text()) - (int(dropped[1]) if dropped else 0)
    yield int(limit), max(0, used_bytes)
