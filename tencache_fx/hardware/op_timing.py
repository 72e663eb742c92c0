"""What the heavy ops of a region cost on this device: each distinct one is timed once, and its cost is kept.

A matmul's time depends on its shapes, strides and dtype in ways that no roofline knows, and what a kernel allocates for
itself is in no graph: to sum up the rows of a matrix, a GPU may take twice its bytes (torch:
`aten/src/ATen/native/cuda/Reduce.cuh: global_memory_size`). So matmuls, convolutions, attention, reductions and the
like are run on random operands, outside of everything that is being traced. Costs are kept by `cache.py`, keyed by the
op with its arguments and by all that `machine.py` keys its rates with.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from tqdm import tqdm

from tencache_fx.hardware.cache import cached, kept
from tencache_fx.hardware.capacity import device_space
from tencache_fx.hardware.device_memory import allocator_counts, forget_peak, held_bytes
from tencache_fx.hardware.rates import device_key
from tencache_fx.hardware.timing import run_ns
from tencache_fx.serialization import Positive
from tencache_fx.stages import CALIBRATION, STAGES
from tencache_fx.tensors import byte_hint, tensors_of
from tencache_fx.units import format_bytes

log = logging.getLogger("tencache_fx")

_OP_NS = 20_000_000  # for timing one op, warm-up apart
_ALL_NS = 30_000_000_000  # for timing the ops of one region; those that are left are estimated
_HEAT_NS = 100_000_000  # under load a GPU lowers its clock within so long: times are taken after it
_SHARE = 1000  # what takes less than a thousandth of its region's heavy work is not worth timing,
_WORTH_NS = {"cuda": 5_000, "cpu": 200_000}  # nor is what takes less than this in all its steps,
_WORTH_BYTES = 1 << 20  # unless it handles so much where an allocator counts: it may allocate as much for itself
_BLOCK_ELEMENTS = 1_000_003  # random numbers made for one operand, repeated to fill it

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
)
_ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
_MATMULS = frozenset((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._int_mm))
_SCATTERS = frozenset((_aten.embedding_dense_backward, _aten.index_put, _aten._unsafe_index_put, _aten.scatter_add))
_UNREPEATABLE = frozenset(
    (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
)
_HEAVY = frozenset((*_MATMULS, _aten.convolution, _aten.convolution_backward, *_ATTENTION, *_ATTENTION_BACKWARD))


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument, as far as it decides how long an op takes. Integers are drawn from `[0, below)`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    below: int = 1

    @property
    def elements(self) -> int:
        """Return how many elements lie between the first and the last, both included."""
        return _span(self.shape, self.stride)

    def make(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor like this one, filled with random numbers of `generator`."""
        block = torch.empty(min(self.elements, _BLOCK_ELEMENTS), dtype=_drawn_as(self.dtype), device=device)
        if block.dtype.is_floating_point or block.dtype.is_complex:
            block.normal_(0, 0.1, generator=generator)
        else:
            block.random_(0, max(1, self.below), generator=generator)
        flat = torch.empty(self.elements, dtype=self.dtype, device=device)
        for start in range(0, self.elements, _BLOCK_ELEMENTS):
            part = flat[start : start + _BLOCK_ELEMENTS]
            part.copy_(block[: part.numel()])
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Call:
    """One distinct op: its target and arguments, tensors as `Operand`s, lists as tuples; `made_bytes` are its results.

    Two calls that are equal cost the same.
    """

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    made_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the device bytes that running it takes: operands and results; workspaces of libraries come on top."""
        return self.made_bytes + sum(one.elements * one.dtype.itemsize for one in _operands((self.args, self.kwargs)))

    @property
    def may_allocate(self) -> bool:
        """Return whether it may allocate enough for itself to matter; a matmul's workspace is kept for good."""
        return self.target.overloadpacket not in _MATMULS and self.nbytes >= _WORTH_BYTES

    def prepare(self, device: torch.device) -> Callable[[], object]:
        """Return a function that runs the op once, on operands that are made now."""
        generator = torch.Generator(device).manual_seed(0)

        def make(value: object) -> object:
            return value.make(device, generator) if isinstance(value, Operand) else value

        args, kwargs = _thawed(self.args, make), {name: _thawed(value, make) for name, value in self.kwargs}
        return lambda: self.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class OpCost:
    """How long an op ran on the device, and what it allocated beside its results; None where nobody counts that."""

    duration_ns: Positive
    scratch_bytes: int | None


def describe_call(node: fx.Node, *, alone: bool) -> Call | None:
    """Return the op of `node` as a `Call` that can be timed by itself, or None if it is not of such a kind.

    `alone` says that it is a kernel of its own, or several: a compiler makes nothing of it. Torch's own kinds only,
    without side effects, random numbers, or integers that may have to name something that is there.
    """
    packet = getattr(node.target, "overloadpacket", None)
    known = packet in _HEAVY or (alone and (packet in _SCATTERS or _runs_on_any_numbers(node)))
    if not known or not tensors_of(node):
        return None
    assert isinstance(node.target, torch._ops.OpOverload)
    try:
        args, kwargs = _frozen(node.args), {name: _frozen(value) for name, value in node.kwargs.items()}
    except TypeError:  # an argument of a kind that cannot be made again, such as a generator
        return None
    made_bytes = sum(byte_hint(tensor.numel()) * tensor.element_size() for tensor in tensors_of(node))
    if packet in _ATTENTION_BACKWARD:
        args, kwargs = _without_dropout(node.target, args, kwargs)
    return Call(node.target, _with_index_range(packet, args), tuple(sorted(kwargs.items())), made_bytes)


def _runs_on_any_numbers(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    schema, tags = op._schema, frozenset(op.tags)
    aliases = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    read = [tensor for argument in node.all_input_nodes for tensor in tensors_of(argument)]
    numbers = op.namespace == "prims" or all(tensor.is_floating_point() or tensor.is_complex() for tensor in read)
    strided = all(tensor.layout is torch.strided for tensor in (*read, *tensors_of(node)))
    return not (aliases or tags & _UNREPEATABLE) and bool(read) and numbers and strided


def kept_costs(calls: Iterable[Call], device: torch.device) -> dict[Call, OpCost]:
    """Return the costs of those of the calls that were timed on `device` earlier; nothing runs."""
    key = _settings_key(device)
    costs = ((call, kept({**key, "op": repr(call)}, OpCost)) for call in calls)
    return {call: cost for call, cost in costs if cost is not None}


def time_calls(
    estimated_ns: Mapping[Call, int], device: torch.device, *, budget_bytes: int | None
) -> dict[Call, OpCost]:
    """Return what each of the calls that matter costs on `device`.

    `estimated_ns` is what all steps with that call take by a first estimate. What is nothing beside the rest stays out
    of the answer; so do, with a line in the log, a call that needs more memory than is free, on a GPU within
    `budget_bytes`, and one that cannot run. What is not kept from earlier is timed now: about 20 ms for each, half a
    minute for all at most, with a progress bar after a second. The caller's random numbers, autograd state and tracing
    modes stay as they are, and device memory goes back; only the allocator's record of its peak may show it.
    """
    total_ns, floor_ns = sum(estimated_ns.values()), _WORTH_NS[device.type]
    worth = [
        call
        for call, ns in estimated_ns.items()
        if (ns * _SHARE >= total_ns and ns >= floor_ns) or (device.type == "cuda" and call.may_allocate)
    ]
    key, room_bytes = _settings_key(device), _room_bytes(device, budget_bytes)
    found: dict[Call, OpCost] = {}
    missing: list[Call] = []
    for call in sorted(worth, key=lambda call: (-estimated_ns[call], repr(call))):
        cost_kept = kept({**key, "op": repr(call)}, OpCost)
        if cost_kept is not None:
            found[call] = cost_kept
        elif call.nbytes > room_bytes:
            log.info(
                "%s is not timed but estimated: it needs %s on %s, where %s are free within the budget",
                _short(call),
                format_bytes(call.nbytes),
                device,
                format_bytes(max(0, room_bytes)),
            )
        else:
            missing.append(call)
    return found | (_time_missing(missing, device, key) if missing else {})


def _room_bytes(device: torch.device, budget_bytes: int | None) -> int:
    space_bytes = device_space(device).available_bytes
    if budget_bytes is not None and device.type == "cuda":
        space_bytes = min(space_bytes, budget_bytes)
    return space_bytes - held_bytes(device)


def _time_missing(calls: Sequence[Call], device: torch.device, key: Mapping[str, str]) -> dict[Call, OpCost]:
    found: dict[Call, OpCost] = {}
    start_ns, cold = time.perf_counter_ns(), device.type == "cuda"
    with STAGES.stage(CALIBRATION), _apart_from_tracing(device):
        bar = tqdm(calls, desc=f"timing ops on {device}", unit="op", delay=1.0, leave=False, disable=None)
        for index, call in enumerate(bar):
            if time.perf_counter_ns() - start_ns > _ALL_NS:
                log.info("%d ops are not timed but estimated: timing took %d s", len(calls) - index, _ALL_NS // 10**9)
                break
            measure = partial(_time_call, call, device, _HEAT_NS if cold else 0)
            try:
                measured = cached({**key, "op": repr(call)}, OpCost, measure)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:  # no memory, or it refuses its arguments
                log.info("%s is not timed but estimated: %s", _short(call), str(error).partition("\n")[0])
            else:
                cold = False
                found[call] = measured
                log.info("timed %s on %s: %.1f us", _short(call), device, measured.duration_ns / 1e3)
        bar.close()
    return found


def _time_call(call: Call, device: torch.device, heat_ns: int) -> OpCost:
    run = call.prepare(device)
    hot_ns = time.perf_counter_ns() + heat_ns
    while time.perf_counter_ns() < hot_ns:
        run_ns(device, run, limit_ns=_OP_NS)
    return OpCost(run_ns(device, run, limit_ns=_OP_NS), _scratch_bytes(run, device))


def _scratch_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes that `run` has at once beside what it returns; None where nobody counts.

    It must have run before, so that what libraries keep for good is there.
    """
    before = allocator_counts(device)
    results = run()
    after = allocator_counts(device)
    del results
    if before is None or after is None:
        return None
    all_bytes = (after.ever_bytes - before.ever_bytes) - (after.held_bytes - before.held_bytes)
    return _most_at_once(run, device) if all_bytes > 0 else 0


def _most_at_once(run: Callable[[], object], device: torch.device) -> int:
    """Return the same, as the allocator's peak shows it: that begins anew, and is brought back to where it was."""
    before = allocator_counts(device)
    assert before is not None
    forget_peak(device)
    try:
        results = run()
        after = allocator_counts(device)
        del results
    finally:  # others read the peak; a buffer of what lacks was there then, and is free now
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(before.peak_bytes - before.held_bytes, dtype=torch.uint8, device=device)
    assert after is not None
    return after.peak_bytes - after.held_bytes


@contextlib.contextmanager
def _apart_from_tracing(device: torch.device) -> Iterator[None]:
    """Run what is inside for real, though a graph is being traced; then give device memory back.

    Backends are called under fake tensors and the Python dispatcher, and may be called under autocast.
    """
    cuda = [device] if device.type == "cuda" else []
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(cuda, device_type=device.type),  # attention with dropout draws from the device's own
    ):
        try:
            yield
        finally:
            if cuda:
                torch.cuda.empty_cache()


def _settings_key(device: torch.device) -> dict[str, str]:
    """Return the cache's key for times on `device` under the settings that choose kernels."""
    backend = torch.backends.cudnn
    chosen = (backend.enabled, backend.benchmark, backend.deterministic, backend.conv.fp32_precision)  # type: ignore[attr-defined]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {**device_key("op", device), "convolution": str(chosen), "deterministic": str(deterministic)}


def _frozen(value: object) -> Any:
    """Return an argument with nodes resolved, tensors as operands, lists as tuples; raises `TypeError` for others."""
    if isinstance(value, fx.Node):
        if "val" not in value.meta:
            raise TypeError("a node without a value")
        return _frozen(value.meta["val"])
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"a tensor of {value.dtype}, {value.layout}")
        return Operand(tuple(map(byte_hint, value.shape)), tuple(map(byte_hint, value.stride())), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, torch.SymInt):
        return byte_hint(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise TypeError(f"an argument of the type {type(value).__name__}")


def _thawed(value: Any, make: Callable[[object], object]) -> Any:
    if isinstance(value, tuple):
        return [_thawed(item, make) for item in value]
    return make(value)


def _operands(value: object) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        yield from itertools.chain.from_iterable(map(_operands, value))


def _with_index_range(packet: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `args` with the integer tensors that name rows drawn from all rows there are."""
    if packet is _aten.embedding_dense_backward:
        return (args[0], _below(args[1], args[2]), *args[2:])
    if packet in (_aten.index_put, _aten._unsafe_index_put):
        sizes = args[0].shape
        indices = tuple(one and _below(one, size) for one, size in zip(args[1], sizes, strict=False))
        return (args[0], indices, *args[2:])
    if packet is _aten.scatter_add:
        return (*args[:2], _below(args[2], args[0].shape[args[1]]), *args[3:])
    return args


def _without_dropout(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a backward of attention, without dropout: no seed is read then.

    Some kernels read the seed on the host and some on the device, which the graph does not say. A seed that is in the
    wrong place ends the process (torch: `aten/src/ATen/native/transformers/cuda/attention_backward.cu`).
    """
    names = [argument.name for argument in target._schema.arguments[: len(args)]]
    kept = tuple(0.0 if name == "dropout_p" else value for name, value in zip(names, args, strict=True))
    return kept, {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}


def _below(index: Operand, below: int) -> Operand:
    return dataclasses.replace(index, below=2 if index.dtype is torch.bool else below)


def _drawn_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which random numbers for `dtype` are drawn: float32 for the narrowest floats."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 0 if math.prod(shape) == 0 else 1 + sum((d - 1) * s for d, s in zip(shape, stride, strict=True))


def _short(call: Call) -> str:
    shapes = ", ".join("x".join(map(str, one.shape)) for one in _operands((call.args, call.kwargs)))
    return f"{call.target}({shapes})"
