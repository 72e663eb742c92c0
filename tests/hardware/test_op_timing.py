"""Ops that are timed by themselves: each is run for real, inside of tracing, and nothing of the caller changes."""

import logging
import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import WORKERS
from harness import capture_of
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

import tencache_fx
from tencache_fx.hardware import op_timing
from tencache_fx.hardware.capacity import Space
from tencache_fx.hardware.device_memory import AllocatorCounts
from tencache_fx.hardware.op_timing import Call, Operand, describe_call, time_calls
from tencache_fx.passes import costs
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.tensors import tensors_of

pytestmark = pytest.mark.usefixtures("cache_folder")

CPU = torch.device("cpu")
aten = torch.ops.aten


def product(rows=256, inner=256, columns=256):
    def operand(shape):
        return Operand(shape, (shape[1], 1), torch.float32)

    return Call(aten.mm.default, (operand((rows, inner)), operand((inner, columns))), (), 4 * rows * columns)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def lookup(weight, x):
    return F.embedding(torch.arange(12).remainder(5), weight) @ x


def convolve(x, weight, bias):
    return F.conv2d(x, weight, bias, stride=2, padding=1)


def place(x, y):
    return torch.index_put(x, (torch.tensor([0, 2, 2]),), y, accumulate=True)


def mean_of_squares(x, y):
    return x.square().sum(0) * y.mean(0)


def ranks(x):
    return x.detach().sort(-1)[0].cumsum(-1) * x


def fused(x):
    return torch.ops.prims.fma(x.detach(), x.detach(), x.detach()) * x


@pytest.mark.parametrize(
    ("function", "shapes", "packets"),
    [
        (torch.mm, [(6, 4), (4, 8)], {aten.mm}),
        (torch.addmm, [(8,), (6, 4), (4, 8)], {aten.addmm, aten.mm, aten.sum}),
        (torch.bmm, [(2, 6, 4), (2, 4, 8)], {aten.bmm}),
        (convolve, [(2, 3, 8, 8), (5, 3, 3, 3), (5,)], {aten.convolution, aten.convolution_backward}),
        (
            attention,
            [(2, 3, 16, 8)] * 3,
            {
                aten._scaled_dot_product_flash_attention_for_cpu,
                aten._scaled_dot_product_flash_attention_for_cpu_backward,
            },
        ),
        (lookup, [(5, 4), (4, 8)], {aten.mm, aten.embedding_dense_backward}),
        (place, [(4, 8), (3, 8)], {aten.index_put}),
        (mean_of_squares, [(4, 8), (3, 8)], {aten.sum, aten.mean}),
        (ranks, [(4, 8)], {aten.sort, aten.cumsum}),
        (fused, [(4, 8)], {torch.ops.prims.fma}),
    ],
)
def test_a_described_op_runs_and_returns_what_the_graph_says(function, shapes, packets):
    """The oracle is tracing: what each op returned there, in shape, stride and dtype."""
    seen = set()
    for node in capture_of(function, *(torch.randn(shape, requires_grad=True) for shape in shapes)).nodes:
        call = costs._call_of(node, None)
        if call is None:
            continue
        made = call.prepare(CPU)()
        tensors = [one for one in (made if isinstance(made, tuple) else (made,)) if isinstance(one, torch.Tensor)]
        described = [(one.shape, one.stride(), one.dtype) for one in tensors_of(node)]
        assert [(one.shape, one.stride(), one.dtype) for one in tensors] == described
        assert call.made_bytes == sum(one.numel() * one.element_size() for one in tensors)
        assert hash(call) == hash(costs._call_of(node, None))
        seen.add(call.target.overloadpacket)
    assert seen == packets


def test_what_a_compiler_leaves_to_a_library_is_timed_under_it():
    capture = capture_of(lambda x: x * torch.cdist(x.detach(), x.detach()).sum(), torch.randn(4, 8, requires_grad=True))
    model = InductorModel.of(capture)
    calls = [call for node in capture.nodes if (call := costs._call_of(node, model))]
    assert [call.target for call in calls] == [aten._cdist_forward.default]


def test_what_a_compiler_generates_is_not_timed_under_it():
    for function in (place, mean_of_squares, lambda x, y: fused(x) + ranks(y).sum()):
        capture = capture_of(function, torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True))
        model = InductorModel.of(capture)
        assert [costs._call_of(node, model) for node in capture.nodes] == [None] * len(capture.nodes)


@pytest.mark.parametrize(
    ("shape", "stride"), [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((3, 4), (0, 1)), ((0, 4), (4, 1)), ((), ())]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_operands_are_as_described_and_in_range(shape, stride, dtype):
    generator = torch.Generator().manual_seed(0)
    made = Operand(shape, stride, dtype, below=2).make(CPU, generator)
    assert (tuple(made.shape), made.stride(), made.dtype) == (shape, stride, dtype)
    values = made.to(torch.float64)
    assert values.isfinite().all()
    assert dtype.is_floating_point or values.numel() == 0 or (values.min() >= 0 and values.max() < 2)


def test_operands_are_random_to_their_last_element(monkeypatch):
    monkeypatch.setattr(op_timing, "_BLOCK_ELEMENTS", 7)
    made = Operand((20,), (1,), torch.float32).make(CPU, torch.Generator().manual_seed(0))
    assert torch.equal(made[:7], made[7:14])
    assert torch.equal(made[14:], made[:6])
    assert made.std() > 0


def test_ops_are_timed_in_the_midst_of_tracing_and_leave_no_trace():
    """As a backend is called: under fake tensors and the Python dispatcher, perhaps with autocast."""
    call = product()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with FakeTensorMode() as mode, enable_python_dispatcher(), torch.autocast("cpu", torch.bfloat16):
        found = time_calls({call: 10**9}, CPU, budget_bytes=None)
        assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is mode
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        assert isinstance(torch.empty(2), torch._subclasses.FakeTensor)
    assert torch.equal(torch.rand(4), expected)
    assert 10**4 < found[call].duration_ns < 10**10
    assert found[call].scratch_bytes is None, "the allocator of a CPU does not count"


def test_dropout_in_attention_does_not_change_the_callers_random_numbers():
    q = Operand((1, 2, 64, 32), (4096, 2048, 32, 1), torch.float32)
    call = Call(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, 0.0, True), (), 1 << 14)
    dropout = Call(aten.native_dropout.default, (q, 0.5, True), (), 1 << 15)  # what draws from the default generator
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert time_calls({call: 10**9, dropout: 10**9}, CPU, budget_bytes=None).keys() == {call, dropout}
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    "kind", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
)
def test_a_backward_of_attention_is_timed_without_dropout_whose_seed_may_be_read_on_the_host(kind):
    target = getattr(aten, f"_scaled_dot_product_{kind}_backward").default
    graph = fx.Graph()
    tensor = graph.placeholder("tensor")
    tensor.meta["val"] = torch.empty(2, 4, 16, 8, device="meta")
    values = {"Tensor": tensor, "int": 16, "SymInt": 16, "float": 0.1, "bool": True, "List[bool]": [True] * 4}
    arguments = [each for each in target._schema.arguments if not each.kwarg_only and not each.has_default_value()]
    node = graph.call_function(target, tuple(values[str(each.type)] for each in arguments), {"scale": 0.5})
    node.meta["val"] = (tensor.meta["val"],) * 3
    call = describe_call(node, alone=True)
    timed = dict(zip([each.name for each in arguments], call.args, strict=True))
    assert timed.pop("dropout_p") == 0.0
    assert 0.0 not in timed.values()
    assert dict(call.kwargs)["scale"] == 0.5


def test_a_time_is_measured_once_for_each_device_and_settings(monkeypatch, cache_folder):
    ran = []

    def measure(device, run, *, limit_ns):
        ran.append(run())
        return 1000 + len(ran)

    monkeypatch.setattr(op_timing, "run_ns", measure)
    calls = {product(): 10**9, product(columns=128): 10**9}
    found = time_calls(calls, CPU, budget_bytes=None)
    assert sorted(cost.duration_ns for cost in found.values()) == [1001, 1002]
    with monkeypatch.context() as patch:
        patch.setattr(op_timing, "_room_bytes", lambda device, budget_bytes: 0)
        assert time_calls(calls, CPU, budget_bytes=None) == found  # what is kept needs no room
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert time_calls(calls, CPU, budget_bytes=None) != found
    assert len(ran) == len(list(cache_folder.iterdir())) == 4


def test_what_does_not_fit_matter_or_run_is_left_out_and_said(monkeypatch, caplog):
    monkeypatch.setattr(op_timing, "run_ns", lambda device, run, *, limit_ns: run() is not None or 1)
    large, small, cheap = product(rows=4096), product(), product(columns=8)
    broken = Call(aten.mm.default, (product().args[0], Operand((8, 8), (8, 1), torch.float32)), (), 4)
    monkeypatch.setattr(op_timing, "device_space", lambda device: Space(total_bytes=0, available_bytes=small.nbytes))
    estimates = {large: 10**9, small: 10**9, broken: 10**9, cheap: 10**5}
    with caplog.at_level(logging.INFO, "tencache_fx"):
        found = time_calls(estimates, CPU, budget_bytes=None)
    assert found.keys() == {small}
    assert small.nbytes == 3 * 4 * 256 * 256
    text = caplog.text
    assert "aten.mm.default(4096x256, 256x256) is not timed but estimated: it needs 8.65 MB on cpu" in text
    assert "where 786 kB are free within the budget" in text
    assert "aten.mm.default(256x256, 8x8) is not timed but estimated: " in text
    assert "mat1 and mat2 shapes cannot be multiplied" in text


def test_an_op_that_refuses_its_arguments_is_left_out_whatever_it_raises(caplog):
    """A graph may have it where it never runs; and some of torch's prims take nothing that their schemas have."""
    empty, some = Operand((4, 0), (1, 1), torch.float32), Operand((4, 4), (4, 1), torch.float32)
    refused = [
        Call(aten.max.dim, (empty, 1), (), 0),
        Call(torch.ops.prims.sum.default, (some, (0,)), (("output_dtype", torch.float32),), 16),
        Call(aten.unfold_backward.default, (some, (4,), 0, 1, -1), (), 16),
    ]
    with caplog.at_level(logging.INFO, "tencache_fx"):
        assert time_calls(dict.fromkeys(refused, 10**9), CPU, budget_bytes=None) == {}
    assert len(caplog.messages) == len(refused)


def test_timing_ends_when_its_time_is_up(monkeypatch, caplog):
    monkeypatch.setattr(op_timing, "_ALL_NS", -1)
    with caplog.at_level(logging.INFO, "tencache_fx"):
        assert time_calls({product(): 10**9}, CPU, budget_bytes=None) == {}
    assert "1 ops are not timed but estimated" in caplog.text


def test_the_prediction_holds_up(cache_folder):
    """A region's predicted time is near the measured one; a shared CPU may need some tries."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(640, 640), nn.ReLU()) for _ in range(4)))
    x = torch.randn(512, 640)
    ratios = []
    for _ in range(8):
        torch.compiler.reset()
        for path in cache_folder.glob("*.json"):
            path.unlink()
        step = torch.compile(
            lambda x: model(x).square().mean(),
            backend="tencache",
            options={"compiler": "eager", "device_budget": None, "calibrate": True},
        )
        step(x).backward()
        measured_ns = []
        for _ in range(9):
            start_ns = time.perf_counter_ns()
            step(x).backward()
            measured_ns.append(time.perf_counter_ns() - start_ns)
        ratios.append(tencache_fx.regions()[-1].plan.forecast.ideal_ns / statistics.median(measured_ns))
        if 0.6 < ratios[-1] < 1.4:
            break
    assert 0.6 < ratios[-1] < 1.4, ratios
    assert any(path.name.startswith("op-") for path in cache_folder.iterdir())


def test_without_calibration_nothing_is_measured(cache_folder):
    step = torch.compile(nn.Linear(512, 512), backend="tencache", options={"compiler": "eager", "calibrate": False})
    step(torch.randn(512, 512)).sum().backward()
    assert {path.name.split("-")[0] for path in cache_folder.iterdir()} == {"auto", "plan"}


class Block(nn.Module):
    """A decoder block as in Llama, of heads of 128."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, -1, 128).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


@pytest.mark.gpu
@pytest.mark.skipif(WORKERS > 1, reason="times of a device that other tests use, too, are of no use")
def test_the_prediction_holds_up_on_cuda():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(2048) for _ in range(4))).to("cuda", torch.bfloat16)
    x = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16)
    step = torch.compile(
        lambda x: model(x).square().mean(), backend="tencache", options={"device_budget": None, "calibrate": True}
    )
    for _ in range(5):
        step(x).backward()
        model.zero_grad(set_to_none=True)
    measured_ns = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step(x).backward()
        stop.record()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        measured_ns.append(start.elapsed_time(stop) * 1e6)
    predicted_ns = tencache_fx.regions()[-1].plan.forecast.ideal_ns
    assert predicted_ns == pytest.approx(statistics.median(measured_ns), rel=0.10)


@pytest.mark.parametrize(("budget", "room"), [(None, 60), (50, 20), (200, 60), (20, -10)])
def test_the_room_on_a_gpu_is_what_budget_and_device_leave(monkeypatch, budget, room):
    monkeypatch.setattr(op_timing, "device_space", lambda device: Space(total_bytes=100, available_bytes=90))
    monkeypatch.setattr(op_timing, "held_bytes", lambda device: 30)
    assert op_timing._room_bytes(torch.device("cuda"), budget) == room


def test_the_device_is_hot_before_it_is_timed(monkeypatch):
    """Also where the op is so short that one measurement of it is over long before."""
    operand = Operand((2, 2), (2, 1), torch.float32)
    ran_ns = []

    def note(device, run, *, limit_ns):
        ran_ns.append(time.perf_counter_ns())
        return 1

    monkeypatch.setattr(op_timing, "run_ns", note)
    start_ns = time.perf_counter_ns()
    op_timing._time_call(Call(aten.mm.default, (operand, operand), (), 16), torch.device("cpu"), 30_000_000)
    assert ran_ns[-1] - start_ns >= 30_000_000


@pytest.mark.gpu
def test_timing_on_cuda_gives_back_memory_and_repeats():
    device, operand = torch.device("cuda"), Operand((2048, 2048), (2048, 1), torch.bfloat16)
    call = Call(aten.mm.default, (operand, operand), (), 2 * 2048 * 2048)
    call.prepare(device)()  # the library's workspace is not the measurement's
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    state = torch.cuda.get_rng_state()
    found = time_calls({call: 10**9}, device, budget_bytes=None)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)
    assert torch.cuda.max_memory_allocated() - allocated <= call.nbytes + (4 << 20)
    again = [op_timing._time_call(call, device, 0) for _ in range(5)]
    durations = [one.duration_ns for one in again]
    assert max(durations) < 1.2 * min(durations)
    assert found[call].duration_ns == pytest.approx(statistics.median(durations), rel=0.1)
    assert found[call].scratch_bytes == 0


@pytest.mark.gpu
def test_what_attention_allocates_for_itself_is_measured():
    """Its backward sums up a gradient in fp32, whichever of the libraries it comes from."""
    shape, dtype = (2, 8, 1024, 128), torch.bfloat16
    q, k, v = (torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    nodes = capture_of(attention, q, k, v).nodes
    (node,) = (node for node in nodes if getattr(node.target, "overloadpacket", None) in costs._SUMMED)
    call = describe_call(node, alone=True)
    (cost,) = time_calls({call: 10**9}, torch.device("cuda"), budget_bytes=None).values()
    assert 4 * q.numel() <= cost.scratch_bytes
    guess = costs._scratch_bytes(node, is_cpu=False, fuses=True)
    assert cost.scratch_bytes <= guess <= 1.5 * cost.scratch_bytes


@pytest.mark.gpu
def test_what_a_reduction_allocates_for_itself_is_measured_however_short_it_is():
    """It sums up parts of columns in a buffer of its own, which may be larger than what it reads."""
    x, weight = torch.randn(4096, 2048, device="cuda", requires_grad=True), torch.randn(2048, 8, device="cuda")
    capture = capture_of(lambda x, weight: x.sum(0) + (x @ weight).sum(), x, weight)
    calls = {call: 1 for node in capture.nodes if (call := costs._call_of(node, None))}
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    (result := x.sum(0)).detach_()
    held_bytes = result.untyped_storage().nbytes()
    allocated_bytes = torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    assert allocated_bytes - held_bytes >= 1 << 20, "this torch allocates nothing here"
    found = time_calls(calls | {product(2048, 2048, 2048): 10**12}, torch.device("cuda"), budget_bytes=None)
    sums = [cost for call, cost in found.items() if call.args[0].shape == x.shape and "sum" in str(call.target)]
    assert [cost.scratch_bytes for cost in sums] == [allocated_bytes - held_bytes]


@pytest.mark.gpu
def test_what_is_allocated_one_after_the_other_counts_once():
    """Whatever the allocator's peak was before: it stays what it was, or rises."""
    x, device = torch.randn(1 << 20, device="cuda"), torch.device("cuda")
    high = torch.empty(1 << 26, device=device)
    peak_bytes = torch.cuda.max_memory_allocated()
    del high
    assert op_timing._scratch_bytes(lambda: x.add(1).mul(2).add(3).mul(4), device) == x.nbytes
    assert op_timing._scratch_bytes(lambda: x.add(1), device) == 0
    assert torch.cuda.max_memory_allocated() >= peak_bytes


def test_the_allocators_peak_is_brought_back_to_where_it_was(monkeypatch):
    """Held, the peak, and what was ever allocated: of 60 bytes beside the results of 40, 50 are there at once."""
    counts = iter([(100, 900, 1000), (140, 900, 1100), (100, 900, 1100), (140, 190, 1200)])
    monkeypatch.setattr(op_timing, "allocator_counts", lambda device: AllocatorCounts(*next(counts)))
    forgotten, made = [], []
    monkeypatch.setattr(op_timing, "forget_peak", forgotten.append)
    monkeypatch.setattr(torch, "empty", lambda size, **_: made.append(size))
    assert op_timing._scratch_bytes(lambda: None, CPU) == 50
    assert (forgotten, made) == ([CPU], [800])
