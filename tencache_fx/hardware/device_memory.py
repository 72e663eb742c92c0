"""What is held on the device right now, and how much of it is not the region's own."""

import logging
import os
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tencache_fx.hardware.capacity import device_space

log = logging.getLogger("tencache_fx")

_GAPS = 16  # one part in so many is lost to gaps between tensors, at most, as far as was measured (docs/benchmarks.md)


class AllocatorCounts(NamedTuple):
    """The bytes that torch's allocator holds now, has held at most, and has ever handed out."""

    held_bytes: int
    peak_bytes: int
    ever_bytes: int


def allocator_counts(device: torch.device) -> AllocatorCounts | None:
    """Return what torch's allocator counts on `device`; None for a CPU, whose allocator does not count.

    It reads the nested statistics: the flat ones cost ten times as much, and this runs at every call of a region.
    """
    if device.type != "cuda":
        return None
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    if not statistics:
        return AllocatorCounts(0, 0, 0)
    found = statistics["allocated_bytes"]["all"]
    return AllocatorCounts(int(found["current"]), int(found["peak"]), int(found["allocated"]))


def allocate_workspaces(device: torch.device) -> None:
    """Have cuBLAS allocate on a GPU what it would in the first step; it keeps that as long as the process runs.

    It has a workspace for each thread that calls it: this one, and autograd's where gradients are wanted. Each takes 32
    MiB on a card of compute capability 9.0 (torch: `aten/src/ATen/cuda/CublasHandlePool.cpp`). A plan made before they
    are there would go over its budget by so much.
    """
    if device.type != "cuda":
        return
    with _disable_current_modes(), torch.inference_mode(mode=False):
        for dtype in (torch.bfloat16, torch.float32):
            tile = torch.ones((16, 16), dtype=dtype, device=device, requires_grad=torch.is_grad_enabled())
            product = torch.addmm(tile[0], tile, tile)
            if product.requires_grad:
                product.sum().backward()


def held_bytes(device: torch.device) -> int:
    """Return the bytes torch's allocator has handed out on `device`; 0 for a CPU, whose allocator does not count."""
    counts = allocator_counts(device)
    return 0 if counts is None else counts.held_bytes


def most_bytes(device: torch.device) -> int | None:
    """Return the bytes torch could hold on `device` now at the very most; None for a CPU."""
    return device_space(device).available_bytes if device.type == "cuda" else None


def tensor_bytes(device: torch.device) -> int:
    """Return how many bytes of tensors torch can hold on a GPU for certain, now.

    The rest goes to gaps between them: in segments of the allocator that grow (`avoid_fragmentation`), and in those
    that are there already, do not grow, and have something in them. Some tensors go into the latter.
    """
    most = device_space(device).available_bytes
    index = torch.cuda.current_device() if device.index is None else device.index
    gap_bytes = sum(
        segment["total_size"] - segment["active_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["active_size"] and not segment["is_expandable"]
    )
    return max(0, most - max(most // _GAPS, int(gap_bytes) + most // (2 * _GAPS)))


def peak_held_bytes(device: torch.device) -> int | None:
    """Return the most bytes held on `device` since its peak was last reset; None for a CPU."""
    counts = allocator_counts(device)
    return None if counts is None else counts.peak_bytes


def forget_peak(device: torch.device) -> None:
    """Let `peak_held_bytes` begin anew from what is held now; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def avoid_fragmentation(device: torch.device) -> None:
    """Let torch's allocator take device memory in segments that grow, unless the user has configured it otherwise.

    A plan counts bytes; the allocator needs them in one piece. Beside swaps, fixed segments leave gaps worth 5 to 15 %
    of a budget, growing ones (torch: `expandable_segments`, `c10/cuda/CUDACachingAllocator.cpp`) about 5 %.
    """
    configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if device.type != "cuda" or configured or torch.cuda.get_allocator_backend() != "native":
        return
    log.info("torch's allocator takes memory in segments that grow from now on (PYTORCH_ALLOC_CONF sets it otherwise).")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.empty_cache()  # what is cached lies in fixed segments
