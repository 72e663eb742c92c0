"""What generated code holds: code in Inductor's style weighed by hand, and what happens when it is too much."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from harness import INDUCTOR, compiled
from torch import nn

import tencache_fx
from tencache_fx.passes.code_interface import Interface, Part
from tencache_fx.passes.code_memory import UnreadableCodeError, code_bytes, code_peak_bytes
from tencache_fx.region import candidate

MATRIX = 64 * 64 * 4
FORWARD = """
def call(self, args):
    primals_1, primals_2 = args
    args.clear()
    with torch.cpu.device(0):
        buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(primals_1, primals_2, out=buf0)
        buf1 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        buf9 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
        kernel(buf0, buf1)
        del buf0
        buf2 = buf1; del buf1  # reuse
        kernel(buf2)
    return (buf2, primals_1, reinterpret_tensor(buf2, (4096, ), (1, ), 0))
"""
BACKWARD = """
def call(self, args):
    primals_1, saved, tangents_1 = args
    args.clear()
    with torch.cpu.device(0):
        buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        extern_kernels.mm(saved, tangents_1, out=buf0)
        del saved
        del tangents_1
        del primals_1
        buf1 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        kernel(buf0, buf1)
    return (buf1, )
"""


def interface(
    takes: Mapping[str, int],
    returns: tuple[str, ...] = (),
    made: Mapping[str, list[tuple[Part | None, ...]]] | None = None,
    sizes: Mapping[str, int] | None = None,
    device: str = "cpu",
    scratch: Mapping[str, int] | None = None,
) -> Interface:
    """An interface whose inputs have these bytes, each a storage of its own."""
    parts = {name: Part(key=key, nbytes=nbytes, shape=()) for key, (name, nbytes) in enumerate(takes.items())}
    return Interface(
        takes=parts,
        inputs=tuple(takes),
        returns=returns,
        made=made or {},
        scratch=scratch or {},
        item_bytes={},
        sizes=sizes or {},
        device=torch.device(device),
    )


TWO = interface({"primals_1": MATRIX, "primals_2": MATRIX}, ("out", "primals_1", "saved"))
BACK = interface({"primals_1": MATRIX, "saved": MATRIX, "tangents_1": MATRIX})


def weigh(body: str, given: Interface = TWO) -> int:
    """What lines of code hold besides their inputs, and other inputs than `args` may have been in."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    entering = sum(part.nbytes for part in given.takes.values())
    code = f"def call(self, args):\n    {', '.join(given.inputs)}, = args\n{lines}    return ()\n"
    return code_peak_bytes([(given, code)], 0) - entering


def test_a_forward_holds_its_inputs_and_what_is_alive_at_once() -> None:
    assert code_peak_bytes([(TWO, FORWARD)], 1) == 4 * MATRIX


def test_a_backward_begins_with_what_was_saved() -> None:
    """Saved and returned are one storage, which the caller keeps: both inputs, it, the gradient, two buffers."""
    assert code_peak_bytes([(TWO, FORWARD), (BACK, BACKWARD)], 1) == 6 * MATRIX


def test_what_only_the_backward_holds_is_dropped_by_it() -> None:
    assert code_peak_bytes([(TWO, FORWARD), (BACK, BACKWARD)], 0) == 5 * MATRIX


def test_a_late_del_weighs_more() -> None:
    late = BACKWARD.replace("        del saved\n", "").replace("kernel(buf0, buf1)", "kernel(buf0, buf1); del saved")
    assert late != BACKWARD
    assert code_peak_bytes([(TWO, FORWARD), (BACK, late)], 0) == 6 * MATRIX


def test_names_and_views_share_what_they_name() -> None:
    allocated = "buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)\n"
    view = "buf1 = reinterpret_tensor(buf0, (4096, ), (1, ), 0)\ndel buf0\n"
    other = "buf2 = empty_strided_cpu((64, 64), (64, 1), torch.float32)\n"
    assert weigh(allocated + view) == MATRIX
    assert weigh(allocated + view + other) == 2 * MATRIX
    assert weigh(allocated + view + "del buf1\n" + other) == MATRIX


def test_strides_and_symbols_and_rounding() -> None:
    assert weigh("buf0 = empty_strided_cpu((2, 3), (10, 1), torch.float64)") == 13 * 8
    assert weigh("buf0 = empty_strided_cpu((0, 3), (3, 1), torch.float64)") == 0
    dynamic = interface({"primals_1": 0}, sizes={"s77": 5})
    assert weigh("buf0 = empty_strided_cpu((s77, max(2, s77 // 2)), (2, 1), torch.int8)", dynamic) == 10
    # Heads of attention are padded: torch's `PythonPrinter` writes the floor of a sum with fractions so.
    assert (
        weigh("buf0 = empty_strided_cpu((2*math.floor(15 / 16 + 1 / 16*s77*s77), ), (1, ), torch.int8)", dynamic) == 4
    )
    cuda = interface({"primals_1": 0}, device="cuda")
    assert weigh("buf0 = empty_strided_cuda((3, ), (1, ), torch.float32)", cuda) == 512


def test_what_an_operation_returns() -> None:
    """By the shape that the code asserts, if the graph calls the operation with several; fresh, or a view."""
    small, large = (Part(key=1, nbytes=size * 4, shape=(size,)) for size in (8, 800))
    made = {"sort": [(small, small), (large, large)], "view_as_real": [(replace(large, fresh=False),)]}
    given = interface({"primals_1": 0}, made=made)
    sort = "buf0 = torch.ops.aten.sort.stable(primals_1)\nbuf1 = buf0[0]\n"
    sort += "assert_size_stride(buf1, ({}, ), (1, ), 'sort')\n"
    assert weigh(sort.format(8), given) == 2 * 32
    assert weigh(sort.format(800), given) == 2 * 3200
    dropped = "del buf0\nbuf2 = empty_strided_cpu((9, ), (1, ), torch.int8)"
    assert weigh(sort.format(8) + dropped, given) == 64
    assert weigh(sort.format(8) + dropped.replace("9", "99"), given) == 32 + 99
    assert weigh("buf0 = empty_strided_cpu((800, ), (1, ), torch.float32)", given) == 3200
    viewed = (
        "buf0 = empty_strided_cpu((800, ), (1, ), torch.float32)\nbuf1 = torch.ops.aten.view_as_real.default(buf0)\n"
    )
    assert weigh(viewed, given) == 3200
    assert weigh(viewed + "del buf0\nbuf2 = empty_strided_cpu((9, ), (1, ), torch.int8)", given) == 3209
    unknown = "buf0 = torch.ops.mine.op.default(primals_1)\nassert_size_stride(buf0, (10, ), (1, ), 'op')\n"
    assert weigh(unknown, given) == 80
    stated = "assert_tensor_metadata(buf0, (10, ), (1, ), torch.int16, 'op')\n"
    assert weigh(unknown + stated, given) == 20
    assert weigh(unknown, replace(given, item_bytes={(10,): 4})) == 40


def test_what_an_operation_takes_for_itself_is_gone_when_it_is_done() -> None:
    part = Part(key=1, nbytes=400, shape=(100,))
    given = interface({"primals_1": 0}, made={"sort": [(part,)]}, scratch={"sort": 1000})
    sort = "buf0 = torch.ops.aten.sort.default(primals_1)\n"
    small = "buf1 = empty_strided_cpu((900, ), (1, ), torch.int8)\n"
    assert weigh(sort, given) == 1400
    assert weigh(small + sort, given) == 2300
    assert weigh(sort + small, given) == 1400
    assert weigh(sort + small.replace("900", "1001"), given) == 1401
    written = small + "extern_kernels.sort(primals_1, out=buf1)\n"
    assert weigh(written, given) == 1900


def test_transfers() -> None:
    """What leaves is held until its release, what comes back from its prefetch on."""
    out = "buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)\n"
    out += "buf1 = torch.ops.tencache.offload.default(buf0, 0, 'host', 'mm')\nbuf2 = buf1\ndel buf0\n"
    other = "buf3 = empty_strided_cpu((64, 64), (64, 1), torch.float32)\n"
    release = "torch.ops.tencache.release.default(buf2, buf0, 0)\n"
    assert weigh(out + other) == 2 * MATRIX
    assert weigh(out + release + other) == MATRIX
    back = "buf4 = torch.ops.tencache.prefetch.default(buf2, 0)\nbuf5 = buf4\ndel buf4\n"
    wait = "buf6 = torch.ops.tencache.wait.default(buf5, [64, 64], [64, 1], torch.float32, torch.device('cpu'), 0)\n"
    assert weigh(out + release + back + wait) == MATRIX
    assert weigh(out + release + back + other + wait) == 2 * MATRIX
    assert weigh(out + release + back + wait + "del buf5\ndel buf6\n" + other) == MATRIX


def test_what_is_held_behind_each_of_our_operations() -> None:
    body = """
    buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    buf1 = torch.ops.tencache.offload.default(buf0, 0, 'host', 'mm')
    buf2 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    del buf2
    buf9 = torch.ops.tencache.release.default(buf1, buf0, 0)
    assert_tensor_metadata(buf9, (1, ), (1, ), torch.int64, 'torch.ops.tencache.release.default')
    del buf0
    buf3 = torch.ops.tencache.prefetch.default(buf1, 0)
    buf4 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    buf5 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    buf6 = torch.ops.tencache.wait.default(buf3, [64, 64], [64, 1], torch.float32, torch.device('cpu'), 0)
    del buf3, buf4, buf5, buf6
    return ()
"""
    code = f"def call(self, args):\n    primals_1, primals_2, = args\n{body.lstrip(chr(10))}"
    (parts,) = code_bytes([(TWO, code)], 0)
    assert [part // MATRIX - 2 for part in parts] == [1, 2, 0, 3, 3]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("buf0 = empty_strided_cpu((u0, ), (1, ), torch.float32)", "the size u0 has no value"),
        ("buf0 = empty_strided_cpu(size, (1, ), torch.float32)", "size stands where a tuple should"),
        ("buf0 = empty_strided_cpu((1, ), (1, ), dtype)", "dtype is no dtype"),
        ("buf0 = torch.ops.tencache.prefetch.default(primals_1, 0)", "nothing waits for buf0"),
        ("a, b, c = args", "it takes 3 inputs, its graph 2"),
        ("assert_tensor_metadata(primals_1)", "IndexError"),
        ("a = b = primals_1", "ValueError"),
    ],
)
def test_code_of_another_style_is_not_guessed_at(line: str, complaint: str) -> None:
    with pytest.raises(UnreadableCodeError, match=complaint):
        weigh(line)


class Tower(nn.Module):
    """Layers that fuse plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.fixture
def tower() -> tuple[nn.Module, torch.Tensor, int]:
    """A tower, its input, and what the code for it holds without a plan."""
    torch.manual_seed(0)
    model, x = Tower(), torch.randn(1024, 64)
    compiled(model, {**INDUCTOR, "device_budget": 1 << 30})(x)
    record = tencache_fx.regions()[-1]
    assert record.code_peak_bytes is not None
    torch.compiler.reset()
    return model, x, record.code_peak_bytes


@pytest.mark.usefixtures("hollow_kernels")
def test_code_that_holds_too_much_is_planned_and_generated_again(
    tower: tuple[nn.Module, torch.Tensor, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tower fits what the graphs show; that the code held a tenth more would only be seen in the code."""
    model, x, peak_bytes = tower
    monkeypatch.setattr(
        candidate, "code_peak_bytes", lambda code, outputs: code_peak_bytes(code, outputs) + peak_bytes // 10
    )
    with caplog.at_level("INFO", "tencache_fx"):
        compiled(model, {**INDUCTOR, "device_budget": peak_bytes * 21 // 20})(x)
    record = tencache_fx.regions()[-1]
    assert record.plan.transfers or record.plan.recomputed
    assert record.code_peak_bytes is not None
    assert record.code_peak_bytes <= peak_bytes * 21 // 20
    assert "bytes too many; planning again" in caplog.text
    assert "held by the code" in tencache_fx.report()


@pytest.mark.usefixtures("hollow_kernels")
def test_code_that_cannot_hold_less_is_refused_before_it_runs(
    tower: tuple[nn.Module, torch.Tensor, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, peak_bytes = tower
    monkeypatch.setattr(candidate, "code_peak_bytes", lambda code, outputs: code_peak_bytes(code, outputs) + peak_bytes)
    with pytest.raises(Exception, match=r"BudgetError: .*(\n.*)*outside this region's graphs"):
        compiled(model, {**INDUCTOR, "device_budget": peak_bytes})(x)


@pytest.mark.usefixtures("hollow_kernels")
def test_code_that_cannot_be_read_runs_as_forecast(
    tower: tuple[nn.Module, torch.Tensor, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> int:
        raise UnreadableCodeError("it is new")

    model, x, peak_bytes = tower
    monkeypatch.setattr(candidate, "code_peak_bytes", refuse)
    compiled(model, {**INDUCTOR, "device_budget": peak_bytes * 2})(x)
    assert "the generated code cannot be read, so its peak is a forecast: it is new." in caplog.text
    assert tencache_fx.regions()[-1].code_peak_bytes is None


def test_lengths_that_only_a_run_knows_count_with_the_most_that_they_can_be(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(64, 256), nn.Linear(256, 64)
    x, mask = torch.randn(512, 64), torch.rand(512) > 0.5

    def f(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = torch.relu(up(x))[mask]
        return down(torch.relu(chosen * 2)).square().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(f, backend="tencache", options={**INDUCTOR, "device_budget": "3MB"})(x, mask)
        found.backward()
    torch.testing.assert_close(found, f(x, mask))
    (region,) = tencache_fx.regions()
    assert region.plan is not None
    assert "cannot be read" not in caplog.text


@pytest.mark.usefixtures("hollow_kernels")
def test_code_that_stays_too_large_says_so(
    tower: tuple[nn.Module, torch.Tensor, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, peak_bytes = tower
    monkeypatch.setattr(candidate, "code_peak_bytes", lambda code, outputs: peak_bytes + 1000)
    compiled(model, {**INDUCTOR, "device_budget": peak_bytes + 500})(x)
    assert "its generated code holds 500 bytes more than the device budget of" in caplog.text


BODIES = """
def small(args):
    small_arg0, = args
    args.clear()
    small_buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    kernel(small_arg0, small_buf0)
    del small_arg0
    return (small_buf0, )

def large(args):
    large_arg0, = args
    args.clear()
    large_buf0 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    kernel(large_arg0, large_buf0)
    large_buf1 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
    kernel(large_buf0, large_buf1)
    del large_buf0
    return (large_buf1, )

class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
"""
BRANCHES = """
buf4 = [None] * 1
if buf3_selector == 0:
    {first}_args = [primals_1]
    buf4 = {first}({first}_args)
else:
    {second}_args = [primals_1]
    buf4 = {second}({second}_args)
buf5 = buf4[0]
del buf4
buf6 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
return (buf5, buf6)
"""
LOOP = """
buf4 = [None] * 1
buf4[0] = primals_1
should_loop = buf4_cond_result
if not should_loop:
    buf4[0] = buf4[0].clone()
while should_loop:
    small_args = [buf4[0]]
    (buf4[0],) = small(small_args)
buf5 = buf4[0]
del buf4
return (buf5, )
"""


def weigh_call(lines: str) -> int:
    code = BODIES + "".join(f"        {line}\n" for line in lines.strip().splitlines())
    return code_peak_bytes([(TWO, code)], 1) - 2 * MATRIX


def test_branches_hold_what_the_larger_one_does() -> None:
    for first, second in (("small", "large"), ("large", "small")):
        assert weigh_call(BRANCHES.format(first=first, second=second)) == 2 * MATRIX
    assert weigh_call(BRANCHES.format(first="small", second="small")) == 2 * MATRIX  # what it returned, and buf6


def test_a_loop_holds_what_this_turn_and_the_last_one_have_made() -> None:
    assert weigh_call(LOOP) == 2 * MATRIX
    assert weigh_call(LOOP.replace("small", "large")) == 3 * MATRIX
