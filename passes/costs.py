"""How long each step takes: heavy ops as they were timed on this device, all else by a roofline over flops and bytes.

Pointwise work is charged the way Inductor will run it (`InductorModel.traffic`): what stays in registers costs nothing,
each kernel reads a value once, and views are free.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import fx

from tencache_fx.hardware.op_timing import Call, OpCost, describe_call
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.ops import arguments_of, by_name
from tencache_fx.passes.bodies import held_inside
from tencache_fx.passes.collectives import begins_collective
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inductor_model import (
    InductorModel,
    Traffic,
    calls_library,
    eager_traffic,
    is_loop_body,
)
from tencache_fx.passes.op_kinds import (
    called_op,
    count_flops,
    is_composite,
    is_pointwise,
    nbytes_of,
    packet_of,
    readers_of,
)
from tencache_fx.planning.problem import Op
from tencache_fx.tensors import byte_hint, tensors_of


def measure_traffic(capture: RegionGraphs, model: InductorModel | None) -> tuple[Traffic, ...]:
    """Return what each step of `capture` moves; `model` is None where no compiler fuses."""
    return eager_traffic(capture.nodes) if model is None else model.traffic


def find_calls(capture: RegionGraphs, roofline: Roofline, model: InductorModel | None) -> dict[Call, int]:
    """Return the distinct heavy ops of `capture`, each with the ns that all its steps take by the roofline."""
    totals: Counter[Call] = Counter()
    for node, traffic in zip(capture.nodes, measure_traffic(capture, model), strict=True):
        if traffic.launches and (call := _call_of(node, model)) is not None:
            totals[call] += _roofline_ns(node, traffic, roofline)
    return dict(totals)


def estimate_ops(
    capture: RegionGraphs,
    roofline: Roofline,
    model: InductorModel | None,
    measured: Mapping[Call, OpCost],
    scratch: Mapping[str, int],
) -> tuple[Op, ...]:
    """Return one `Op` per step of `capture`: as `measured` where it was, else by the roofline.

    A heavy op that was not timed is taken to miss the roofline by as much as the timed ones of its kind do. `model`
    is None where no compiler fuses. `scratch` is what kernels allocate for themselves, as measured and as estimated.
    O(nodes + arguments).
    """
    fuses = model is not None
    traffic = measure_traffic(capture, model)
    steps = list(zip(capture.nodes, traffic, strict=True))
    calls = [_call_of(node, model) if moved.launches else None for node, moved in steps]
    first_ns = [_roofline_ns(node, moved, roofline) for node, moved in steps]
    times_ns = {call: cost.duration_ns for call, cost in measured.items()}
    durations_ns = _with_waits(_corrected(calls, first_ns, times_ns), traffic, roofline.issue_ns)
    is_cpu = _plans_cpu(capture, roofline)
    scratch_of = partial(_scratch_bytes, is_cpu=is_cpu, fuses=fuses)
    return tuple(
        Op(
            name=node.name,
            duration_ns=ns,
            scratch_bytes=scratch[node.name]
            + _split_bytes(node, is_cpu=is_cpu, fuses=fuses)
            + held_inside(node, capture.device, scratch_of, fuses=fuses),
        )
        for node, ns in zip(capture.nodes, durations_ns, strict=True)
    )


def measured_scratch(
    capture: RegionGraphs, model: InductorModel | None, measured: Mapping[Call, OpCost]
) -> dict[str, int]:
    """Return what the kernels of `capture` allocate for themselves, in bytes, by the names of nodes it is known of."""
    targets = {call.target for call in measured}  # to describe a call takes longer
    calls = [(node, _call_of(node, model)) for node in capture.nodes if node.target in targets]
    costs = {node.name: measured[call] for node, call in calls if call is not None and call in measured}
    return {name: cost.scratch_bytes for name, cost in costs.items() if cost.scratch_bytes is not None}


def estimated_scratch(
    capture: RegionGraphs, roofline: Roofline, model: InductorModel | None, known: Collection[str]
) -> dict[str, int]:
    """Return about what all but the nodes `known` allocate for themselves: no code that a compiler generates shows it.

    Those are the ones of which it was measured.
    """
    is_cpu = _plans_cpu(capture, roofline)
    nodes = [node for node in capture.nodes if node.name not in known]
    return {node.name: _scratch_bytes(node, is_cpu=is_cpu, fuses=model is not None) for node in nodes}


def _plans_cpu(capture: RegionGraphs, roofline: Roofline) -> bool:
    return capture.device.type == "cpu" and not roofline.of_gpu  # a GPU that is not here is planned for on a CPU


def _call_of(node: fx.Node, model: InductorModel | None) -> Call | None:
    alone = not is_loop_body(node) or is_composite(node) if model is None else calls_library(node)
    return describe_call(node, alone=alone)


def _corrected(calls: Sequence[Call | None], first_ns: Sequence[int], times_ns: Mapping[Call, int]) -> Iterator[int]:
    """Yield each step's own time: as timed, else its first estimate times what the timed ones of its kind came to."""
    timed, estimated = Counter[object](), Counter[object]()
    for call, ns in zip(calls, first_ns, strict=True):
        if call is not None and call in times_ns:
            timed[call.target] += times_ns[call]
            estimated[call.target] += ns
    for call, ns in zip(calls, first_ns, strict=True):
        if call is None or not estimated[call.target]:
            yield ns
        else:
            yield times_ns.get(call, ns * timed[call.target] // estimated[call.target])


def _with_waits(own_ns: Iterable[int], traffic: Sequence[Traffic], issue_ns: int) -> Iterator[int]:
    """Yield each step's time with what the device waits before it for the thread that issues its kernel.

    The thread runs ahead while kernels are long, and is behind while they are short: one kernel each `issue_ns`.
    """
    issued = ready = 0
    for own, moved in zip(own_ns, traffic, strict=True):
        issued += issue_ns if moved.launches else 0
        done = (max(issued, ready) if moved.launches else ready) + own
        yield done - ready
        ready = done


def _roofline_ns(node: fx.Node, traffic: Traffic, roofline: Roofline) -> int:
    if not traffic.nbytes and not traffic.launches:
        return 0
    if begins_collective(node):  # the device computes on, once it has begun
        return roofline.launch_ns
    flops = count_flops(node, on_gpu=roofline.of_gpu)
    compute_ns = flops * 1_000_000_000 // _flops_rate(node, roofline) if flops else 0
    memory_ns = traffic.nbytes * 1_000_000_000 // roofline.memory_bytes_per_s
    return max(compute_ns, memory_ns) + (roofline.launch_ns if traffic.launches else 0)


def _flops_rate(node: fx.Node, roofline: Roofline) -> int:
    """Return the FLOP/s at which an op runs, of those that torch's formulas count."""
    op, args, kwargs = called_op(node)
    name = str(op)
    if "scaled_dot_product" not in name:
        return roofline.flops_rate(tensors_of(node)[0].dtype)
    given = by_name(op, args, kwargs)
    dtype, causal = tensors_of(given["query"])[0].dtype, bool(given.get("is_causal"))
    return roofline.attention_rate(dtype, backward="backward" in name, causal=causal)


def _scratch_bytes(node: fx.Node, *, is_cpu: bool, fuses: bool) -> int:
    """Return about how many bytes a kernel allocates for itself, where that was not measured.

    The backward of attention sums up gradients in fp32: the query's, or all three. Convolutions reorder what they read
    into a layout of their own, weights padded; in the code Inductor makes for CPUs the layout mostly fits already. A
    CPU's matmuls in reduced precision pack blocks of their operands (at most 2.3 times the smallest one was seen). Its
    eager pointwise kernels first convert what has not the dtype they compute in.
    """
    packet = packet_of(node)
    read = node.all_input_nodes
    if packet in _CONVOLUTIONS:
        weight = nbytes_of(arguments_of(node)["weight"])
        return min(map(nbytes_of, read[:2])) + 2 * weight if fuses and is_cpu else sum(map(nbytes_of, read)) + weight
    if not is_cpu:
        summed = tensors_of(node)[: _SUMMED.get(packet, 0)]
        return sum(byte_hint(tensor.numel()) * 9 // 2 for tensor in summed)  # an eighth more, for rows rounded up
    tensors = [tensor for argument in read for tensor in tensors_of(argument)]
    if tensors and tensors[0].dtype.itemsize < 4 and count_flops(node) > 0:
        return 5 * min(map(nbytes_of, read)) // 2
    if fuses or not is_pointwise(node):
        return 0
    common = max((tensor.dtype.itemsize for tensor in tensors), default=0)
    return sum(byte_hint(tensor.numel()) * common for tensor in tensors if tensor.dtype.itemsize != common)


def _split_bytes(node: fx.Node, *, is_cpu: bool, fuses: bool) -> int:
    """Return the bytes of the product, where Inductor adds the bias in a generated kernel: it and the sum are two."""
    split = fuses and not is_cpu and packet_of(node) is _aten.addmm
    return nbytes_of(node) if split and any(map(is_pointwise, readers_of(node))) else 0


_aten = torch.ops.aten
_CONVOLUTIONS = frozenset((_aten.convolution, _aten.convolution_backward))
_SUMMED: dict[object, int] = {
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,  # it stands for a GPU's
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 3,
}
