"""What steps cost: bytes counted once for each kernel, timed ops as they were timed, the rest by their kind."""

import logging

import pytest
import torch
from harness import capture_of
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from tencache_fx.hardware.op_timing import OpCost
from tencache_fx.hardware.roofline import Roofline
from tencache_fx.passes.costs import (
    _with_waits,
    estimate_ops,
    estimated_scratch,
    find_calls,
    measure_traffic,
    measured_scratch,
)
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inductor_model import InductorModel, Traffic
from tencache_fx.passes.op_kinds import count_flops

# One byte and one flop take one ns, a launch takes one, and the host is never behind.
UNIT = Roofline(flops_per_s=(("float32", 10**9),), memory_bytes_per_s=10**9, launch_ns=1, issue_ns=0)
ROWS, WIDTH = 128, 256
FULL = ROWS * WIDTH * 4


def inputs(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def forward_of(function, *shapes):
    capture = capture_of(function, *inputs(*shapes))
    return RegionGraphs(
        forward=capture.forward,
        backward=None,
        num_outputs=1,  # what is saved for the backward is not read by anybody here
        static_inputs=frozenset(),
        device=capture.device,
    )


def moved(capture, registers=None):
    """Return the bytes that all kernels of a graph move, and how many kernels there are."""
    steps = measure_traffic(capture, registers)
    return sum(step.nbytes for step in steps), sum(step.launches for step in steps)


def chain(x, y):
    return (x * 2 + y).sin()


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_without_a_compiler_each_op_is_a_kernel_and_views_are_free():
    capture = capture_of(lambda x, y: chain(x, y).t(), *inputs((ROWS, WIDTH), (ROWS, WIDTH)))
    steps = dict(zip([node.name for node in capture.nodes], measure_traffic(capture, None), strict=True))
    assert (steps["mul"], steps["add"], steps["sin"]) == (
        Traffic(2 * FULL, launches=True),
        Traffic(3 * FULL, launches=True),
        Traffic(2 * FULL, launches=True),
    )
    assert all(step == Traffic(0, launches=False) for name, step in steps.items() if name.startswith("t"))


def compiled(function, *shapes):
    capture = forward_of(function, *shapes)
    for node in reversed(capture.forward.nodes):  # keep the function's own result only
        if node.op == "output":
            node.args = (node.args[0][:1],)
    capture.forward.eliminate_dead_code()
    return moved(capture, InductorModel.of(capture))


@pytest.mark.parametrize(
    ("function", "shapes", "nbytes", "kernels"),
    [
        (chain, [(ROWS, WIDTH)] * 2, 3 * FULL, 1),
        (norm, [(ROWS, WIDTH)], 2 * FULL, 1),  # x is read once, though the mean and the product both need it
        (lambda x: x.expand(ROWS, WIDTH) + 1, [(1, WIDTH)], FULL + 4 * WIDTH, 1),  # a row is read, not a matrix
        (lambda x: x[:, :64] + 1, [(ROWS, WIDTH)], 2 * FULL // 4, 1),
        (lambda x: x.t() * 2 + x.t(), [(ROWS, WIDTH)], 2 * FULL, 1),
        (lambda w: w[torch.arange(3)] * 2, [(1000, WIDTH)], 2 * 3 * WIDTH * 4, 1),  # three rows of a table
        (lambda x: x - x.sum(), [(ROWS, WIDTH)], 3 * FULL + 2 * 4, 2),  # a sum of all is a kernel of its own
        (lambda x, w: (x.sin() @ w).cos(), [(ROWS, WIDTH), (WIDTH, WIDTH)], 6 * FULL + 4 * WIDTH**2, 3),
    ],
)
def test_a_kernel_reads_and_writes_each_value_once(function, shapes, nbytes, kernels):
    found = compiled(function, *shapes)
    assert found[1] == kernels
    assert found[0] == pytest.approx(nbytes, rel=0.01)


def test_outputs_of_one_op_are_told_apart():
    function = nn.functional.scaled_dot_product_attention
    capture = capture_of(lambda q, k, v: function(q, k, v).sin(), *inputs(*[(2, 2, 16, 32)] * 3))
    by_name = dict(zip([node.name for node in capture.nodes], measure_traffic(capture, None), strict=True))
    (back,) = [name for name in by_name if "backward" in name]
    assert by_name[back].nbytes > 8 * 2 * 2 * 16 * 32 * 4  # grad, q, k, v, out in; three gradients out


def linear_twice(x, small, large):
    return (x @ small).sum() + (x @ large).sum()


def ops_of(capture, roofline, measured):
    known = measured_scratch(capture, None, measured)
    scratch = known | estimated_scratch(capture, roofline, None, known)
    return estimate_ops(capture, roofline, None, measured, scratch)


def test_a_timed_op_takes_its_time_and_others_of_its_kind_as_much_longer():
    capture = capture_of(linear_twice, *inputs((64, 64), (64, 64), (64, 128)))
    first = {op.name: op.duration_ns for op in ops_of(capture, UNIT, {})}
    estimates = find_calls(capture, UNIT, None)
    small = next(call for call in estimates if call.args[1].shape == (64, 64))
    assert estimates[small] == first["mm"] == 2 * 64**3 + 1
    timed = {small: OpCost(3 * estimates[small], scratch_bytes=77)}
    for op in ops_of(capture, UNIT, timed):
        assert op.duration_ns == (3 * first[op.name] if op.name.startswith("mm") else first[op.name]), op.name
    assert measured_scratch(capture, None, timed) == {"mm": 77}
    assert sum(op.scratch_bytes for op in ops_of(capture, UNIT, timed)) == 77


def test_equal_ops_are_one_call_with_the_time_of_all():
    capture = capture_of(lambda x, a, b: x @ a @ b, *inputs((64, 64), (64, 64), (64, 64)))
    once = {op.name: op.duration_ns for op in ops_of(capture, UNIT, {})}["mm"]
    estimates = find_calls(capture, UNIT, None)
    assert sum(estimates.values()) == 6 * once
    assert max(estimates.values()) >= 2 * once


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=30),
    st.integers(0, 30),
)
def test_waiting_for_the_host_is_a_queue_of_one_server(steps, issue_ns):
    """The oracle: the end of all is the longest path over "host issues first j kernels, device runs the rest"."""
    own = [ns if launches else 0 for ns, launches in steps]
    traffic = [Traffic(0, launches=launches) for _, launches in steps]
    found = list(_with_waits(own, traffic, issue_ns))
    paths = [sum(own)]
    for at, (_, launches) in enumerate(steps):
        if launches:
            issued = sum(launched for _, launched in steps[: at + 1])
            paths.append(issued * issue_ns + sum(own[at:]))
    assert sum(found) == max(paths)
    assert all(ns >= least for ns, least in zip(found, own, strict=True))
    assert issue_ns or found == own


class Gpt(nn.Module):
    """A norm, a wide layer and a gate, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
        self.up, self.gate = (nn.ModuleList(nn.Linear(128, 256) for _ in range(2)) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(256, 128) for _ in range(2))

    def forward(self, x):
        for norm, up, gate, down in zip(self.norms, self.up, self.gate, self.down, strict=True):
            y = norm(x)
            x = x + down(nn.functional.silu(gate(y)) * up(y))
        return x.square().mean()


@pytest.mark.slow
def test_bytes_are_near_what_inductor_counts(monkeypatch):
    """The oracle is Inductor's own count of what its kernels, generated and extern, read and write."""
    from torch._inductor import compile_fx, config, metrics

    import tencache_fx.region.analysis

    found = []

    def watch(capture, roofline, registers, *known):
        found.append(sum(step.nbytes for step in measure_traffic(capture, registers)))
        return estimate_ops(capture, roofline, registers, *known)

    monkeypatch.setattr(tencache_fx.region.analysis, "estimate_ops", watch)
    level = compile_fx.inductor_metrics_log.level
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    try:
        torch.compiler.reset()
        metrics.reset()
        with config.patch(force_disable_caches=True):
            step = torch.compile(Gpt(), backend="tencache", options={"calibrate": False, "device_budget": None})
            step(torch.randn(1024, 128, requires_grad=True)).backward()
        assert found == [pytest.approx(metrics.num_bytes_accessed, rel=0.15)]
    finally:
        compile_fx.inductor_metrics_log.setLevel(level)


def test_grouped_heads_of_attention_are_counted_as_whole_ones() -> None:
    def flops(heads: int, op: object, *, backward: bool) -> int:
        graph = fx.Graph()

        def value(heads: int) -> fx.Node:
            node = graph.placeholder("x")
            node.meta["val"] = torch.empty(2, heads, 32, 16, device="meta")
            return node

        shapes = [8, 8, heads, heads] if backward else [8, heads, heads]
        node = graph.call_function(op, tuple(map(value, shapes)))
        node.meta["val"] = (torch.empty(2, 8, 32, 16, device="meta"),)
        return count_flops(node)

    for name in ("flash", "efficient", "cudnn"):
        for backward in (False, True):
            op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention" + "_backward" * backward).default
            whole = 2 * 2 * 8 * 32 * 32 * 16  # a product of each head
            assert flops(2, op, backward=backward) == flops(8, op, backward=backward) == (5 if backward else 2) * whole


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_reduced_precision_runs_at_rates_of_its_own(causal: bool) -> None:  # noqa: FBT001
    """A GPU's kernels leave out half of the keys where each query has those before it only."""
    shape = (2, 4, 64, 32)
    product = 2 * 2 * 4 * 64 * 64 * 32
    rates = {"flops_per_s": (("bfloat16", 10**12), ("float32", 10**12)), "memory_bytes_per_s": 10**15}
    gpu = Roofline(**rates, launch_ns=0, issue_ns=1, attention_flops_per_s=(10**9, 10**8))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    rates_by_dtype = {torch.bfloat16: (10**9, 10**8), torch.float32: (10**12, 10**12)}
    for dtype, (forward, backward) in rates_by_dtype.items():
        capture = capture_of(attend, *(torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)))
        ops = [op for op in ops_of(capture, gpu, {}) if "attention" in op.name]
        found_ns = {"backward" in op.name: op.duration_ns for op in ops}
        expected_s = {False: 2 * product / forward, True: 5 * product / backward}
        assert found_ns == {
            back: pytest.approx(seconds * 1e9 / (2 if causal else 1), rel=0.01) for back, seconds in expected_s.items()
        }
