"""Facts about single tensors, real or fake: storage, device, sizes."""

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tencache_fx.errors import TencacheError
from tencache_fx.units import round_up

_AS_IT_IS = contextlib.nullcontext()
_NO_BOUND = 1 << 50  # torch's bound of a size that may be anything is one of 64-bit integers


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors a node makes or stands for; nothing for symbols, tokens and void ops."""
    return tuple(tensors_in(node.meta.get("val")))


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return `value` if it is a tensor, and those in lists and tuples of it, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:  # no call for each: this runs at every call of a region
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += tensors_in(item)
    return found


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for a sparse one, which has none: asking for it raises."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others that live; 0 for a tensor without one."""
    storage = storage_of(tensor)
    return 0 if storage is None else storage._cdata


def storages_on(device: torch.device, values: Iterable[object]) -> list[torch.UntypedStorage]:
    """Return the storages on `device` of the tensors among `values`, in their order; those in lists and tuples, too."""
    tensors = (value for value in tensors_in(list(values)) if value.device == device)
    return [storage for value in tensors if (storage := storage_of(value)) is not None]


def last_made(device: torch.device, results: object, given: Collection[int]) -> torch.UntypedStorage | None:
    """Return the storage on `device` of the last tensor among `results` that has none of those `given`, by address."""
    for tensor in reversed(tensors_in(results)):
        if tensor.device == device and (storage := storage_of(tensor)) is not None and storage._cdata not in given:
            return storage
    return None


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are not its values: it is yet to be conjugated or negated."""
    return tensor.is_conj() or tensor.is_neg()


def is_hinted(size: int | torch.SymInt) -> bool:
    """Return whether a size has a value while it is traced: not what only a run knows, as the rows of `nonzero`."""
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def byte_hint(size: int | torch.SymInt) -> int:
    """Return a size, a symbolic one at the value seen while tracing, or if only a run knows it, the most it can be.

    Raises `TencacheError` if nothing bounds it.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if (hint := size.node.hint) is not None:
        return int(hint)
    if (most := upper_bound(size)) is None:
        raise TencacheError(
            f"the size {size} is known only when the region runs, and nothing bounds it, so its memory cannot be "
            "planned; bound it (torch._check(size <= most)), keep what has that size out of the region "
            "(torch.compiler.disable), or set device_budget to None."
        )
    return most


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """Return what the allocator takes for `nbytes`: CUDA's rounds up to 512 (torch: `CUDACachingAllocator.cpp`)."""
    return round_up(nbytes, 512) if device.type == "cuda" else nbytes


def upper_bound(size: torch.SymInt) -> int | None:
    """Return the most that a size can be beside the others as seen while tracing; None if nothing bounds it."""
    shape_env = size.node.shape_env
    assert shape_env is not None
    upper = shape_env.bound_sympy(size.node.expr.xreplace(dict(shape_env.backed_var_to_val))).upper
    return int(upper) if isinstance(upper, sympy.Integer) and upper < _NO_BOUND else None


def main_device(values: Iterable[object]) -> torch.device:
    """Return the device whose memory is planned: the accelerator that holds most of the tensors, else the CPU."""
    held = Counter(value.device for value in values if isinstance(value, torch.Tensor))
    accelerators = {device: count for device, count in held.items() if device.type != "cpu"}
    if not accelerators:
        return torch.device("cpu")
    return max(sorted(accelerators, key=str), key=lambda device: accelerators[device])


def are_faked(values: Sequence[object]) -> bool:
    """Return whether to compute with these values is to compute with fakes: some are, or a mode makes them of all."""
    return torch._guards.active_fake_mode() is not None or any(isinstance(value, FakeTensor) for value in values)


def ordinary_tensors() -> contextlib.AbstractContextManager[object]:
    """Return a context in which tensors are made that are none of inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 view of a dense tensor's memory, whatever its dtype and strides."""
    start = tensor.storage_offset() * tensor.itemsize
    with ordinary_tensors():
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.itemsize,), (1,))
