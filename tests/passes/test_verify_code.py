"""The checker of generated code: hand-written code in Inductor's style, each rule broken once."""

import dataclasses

import pytest
import torch
from torch import fx

from tencache_fx.errors import InvariantError
from tencache_fx.ops import OFFLOAD, RELEASE
from tencache_fx.passes.verify_code import PlannedCalls, planned_calls, verify_code

GOOD = """
def call(self, args):
    primals_1, offload_old = args
    args.clear()
    with torch.cpu.device(0):
        buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(primals_1, primals_1, out=buf0)
        buf1 = torch.ops.tencache.offload.default(reinterpret_tensor(buf0, (64, 64), (64, 1), 0), 0, 'host', 'mm')
        buf2 = buf1
        del buf1
        buf3 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(buf0, primals_1, out=buf3)
        torch.ops.tencache.release.default(buf2, buf0, 0)
        del buf0
        buf4 = torch.ops.tencache.prefetch.default(offload_old, 0)
        del offload_old
        buf5 = buf4
        buf6 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(buf3, primals_1, out=buf6)
        buf7 = torch.ops.tencache.wait.default(buf5, [64, 64], [64, 1], torch.float32, torch.device('cpu'), 0)
        extern_kernels.mm(buf7, buf6, out=buf3)
    return (buf2, buf3)
"""
PLANNED = PlannedCalls(
    segments={
        ("offload", "mm"): (1, 1),
        ("release", "mm"): (2, 2),
        ("prefetch", "offload_old"): (2, 2),
        ("wait", "offload_old"): (3, 3),
    },
    handles={"offload_old": "offload_old"},
    heavy=4,
)


def moved(line: str, behind: str) -> str:
    """Return the good code with the line that contains `line` moved behind the one that contains `behind`."""
    lines = GOOD.splitlines()
    (taken,) = (each for each in lines if line in each)
    lines.remove(taken)
    (place,) = (i for i, each in enumerate(lines) if behind in each)
    lines.insert(place + 1, taken)
    return "\n".join(lines)


def test_good_code_passes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "tencache_fx")
    assert verify_code(PLANNED, GOOD)
    assert caplog.messages == ["generated code has 4 heavy kernels; the places of 4 runtime ops are as planned"]
    assert verify_code(PLANNED, None)


def test_what_is_planned_is_read_off_the_graph() -> None:
    """A product runs at its node, or at its only reader if that is a sum; others' readers move nothing."""
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    handle = graph.call_function(OFFLOAD, (x, 0, "host", "x"))
    product = graph.call_function(aten.mm.default, (x, x))
    old = graph.placeholder("old")
    graph.call_function(RELEASE, (old, x, 0))
    total = graph.call_function(aten.add.Tensor, (product, x))
    other = graph.call_function(aten.bmm.default, (total, total))
    graph.call_function(RELEASE, (handle, x, 0))
    graph.output((graph.call_function(aten.sin.default, (other,)), other))
    planned = planned_calls(graph)
    assert planned.segments == {("offload", "x"): (0, 0), ("release", "old"): (0, 1), ("release", "x"): (2, 2)}
    assert planned.heavy == 2
    assert planned.handles == {"old": "old"}


def test_an_op_that_got_lost() -> None:
    code = "\n".join(line for line in GOOD.splitlines() if "release" not in line and "del buf0" not in line)
    with pytest.raises(InvariantError, match=r"code: the graph has the runtime ops .*release.*, the code"):
        verify_code(PLANNED, code)


def test_an_op_that_runs_twice() -> None:
    line = "        buf9 = torch.ops.tencache.prefetch.default(offload_old, 0)\n"
    code = GOOD.replace("        del offload_old\n", line)
    with pytest.raises(InvariantError, match="code: the graph has the runtime ops"):
        verify_code(PLANNED, code)


def test_a_source_freed_before_its_release() -> None:
    code = moved("del buf0", "buf2 = buf1")
    with pytest.raises(InvariantError, match=r"code: buf0 is freed while mm is being copied out"):
        verify_code(PLANNED, code)


def test_a_source_reused_before_its_release() -> None:
    """Inductor recycles a dead buffer for a new one of its size."""
    code = GOOD.replace(
        "buf3 = empty_strided_cpu((64, 64), (64, 1), torch.float32)", "buf3 = buf0; del buf0  # reuse"
    ).replace("        del buf0\n", "")
    with pytest.raises(InvariantError, match=r"code: buf0 is freed while mm is being copied out"):
        verify_code(PLANNED, code)


def test_a_release_behind_a_later_op() -> None:
    code = moved("tencache.release", "tencache.wait").replace("        del buf0\n", "")
    with pytest.raises(
        InvariantError, match=r"code: release of mm runs behind heavy kernel 3, planned before kernel 3"
    ):
        verify_code(PLANNED, code)


def test_a_prefetch_hoisted_before_an_offload() -> None:
    code = GOOD.replace("        buf4 = torch.ops.tencache.prefetch.default(offload_old, 0)\n", "").replace(
        "        buf0 = empty",
        "        buf4 = torch.ops.tencache.prefetch.default(offload_old, 0)\n        buf0 = empty",
    )
    with pytest.raises(
        InvariantError, match=r"code: offload of mm runs behind heavy kernel 2, planned before kernel 2"
    ):
        verify_code(PLANNED, code)


def test_a_wait_may_slip_to_its_reader() -> None:
    segments = {**PLANNED.segments, ("wait", "offload_old"): (0, 0)}
    verify_code(PlannedCalls(segments=segments, handles=PLANNED.handles, heavy=4), GOOD)


def test_an_op_that_crosses_a_heavy_kernel_in_the_order_of_ours() -> None:
    code = moved("tencache.prefetch", "extern_kernels.mm(buf3").replace("        buf5 = buf4\n", "")
    code = code.replace("        del offload_old\n", "").replace("wait.default(buf5", "wait.default(buf4")
    with pytest.raises(
        InvariantError, match="code: prefetch of offload_old runs behind 3 heavy kernels, planned behind 2"
    ):
        verify_code(PLANNED, code)
    early = moved("tencache.release", "buf2 = buf1")
    early = early.replace(
        "        extern_kernels.mm(buf0, primals_1, out=buf3)",
        "        extern_kernels.mm(primals_1, primals_1, out=buf3)",
    )
    with pytest.raises(InvariantError, match="code: release of mm runs behind 1 heavy kernels, planned behind 2"):
        verify_code(PLANNED, early)


def test_a_wait_before_its_place() -> None:
    code = moved("tencache.wait", "buf5 = buf4")
    with pytest.raises(InvariantError, match="code: wait of offload_old runs behind 2 heavy kernels, planned behind 3"):
        verify_code(PLANNED, code)


def test_other_numbers_of_heavy_kernels_are_no_fault_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Inductor may compute a small product in a loop of its own."""
    caplog.set_level("INFO", "tencache_fx")
    looped = GOOD.replace("extern_kernels.mm(buf7, buf6, out=buf3)", "cpp_fused_mm_0(buf7, buf6, buf3)")
    assert not verify_code(PLANNED, looped)
    assert "generated code has 3 heavy kernels, the graph 4: 4 runtime ops were compared" in caplog.text


def test_an_op_between_a_product_and_its_sum_may_be_on_either_side() -> None:
    either = {**PLANNED.segments, ("prefetch", "offload_old"): (1, 2)}
    assert verify_code(dataclasses.replace(PLANNED, segments=either), GOOD)
    for both in ((0, 1), (3, 4)):
        wrong = dataclasses.replace(PLANNED, segments={**PLANNED.segments, ("prefetch", "offload_old"): both})
        with pytest.raises(InvariantError, match="code: prefetch of offload_old runs behind|code: .* runs behind"):
            verify_code(wrong, GOOD)


@pytest.mark.parametrize(
    "reader",
    [
        "cpp_fused_tanh_0(buf0, buf3)",
        "cpp_fused_tanh_0(reinterpret_tensor(buf0, (4096, ), (1, ), 0), buf3)",
        "buf9 = buf0",
        "cpp_fused_tanh_0(buf8, buf3)",
    ],
)
def test_a_reader_behind_the_release(reader: str) -> None:
    code = GOOD.replace(
        "        buf2 = buf1\n", "        buf2 = buf1\n        buf8 = reinterpret_tensor(buf0, (64, 64), (1, 64), 0)\n"
    )
    verify_code(PLANNED, code)
    late = code.replace("        del buf0\n", f"        {reader}\n        del buf0\n")
    assert late != code
    with pytest.raises(InvariantError, match=r"code: buf\d is read after the release of mm: "):
        verify_code(PLANNED, late)


def test_a_released_buffer_that_is_returned() -> None:
    code = GOOD.replace("        del buf0\n", "").replace("return (buf2, buf3)", "return (buf2, buf3, buf0)")
    with pytest.raises(InvariantError, match=r"code: buf0 is read after the release of mm: return"):
        verify_code(PLANNED, code)
