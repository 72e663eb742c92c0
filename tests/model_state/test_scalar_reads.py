"""Numbers of the device that an optimizer reads on the host: their bits, and that they don't wait for copies out."""

from typing import Any, ClassVar

import pytest
import torch
from faulty_streams import FaultyCudaStreams
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state import scalar_reads, streamed_optimizer, update_chunks
from tencache_fx.model_state.scalar_reads import MappedNumber, ScalarReads, read_past_copies
from tencache_fx.optim import StreamedOptimizer
from tencache_fx.runtime.cuda_streams import CudaStreams
from tencache_fx.runtime.streams import Lane

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


class Reader:
    """It counts reads, and gives copies; or nothing at all."""

    def __init__(self, *, gives: bool = True) -> None:
        self.gives, self.reads = gives, 0

    def __call__(self, number: Tensor) -> Tensor | None:
        assert number.shape == (1,)
        assert not number.is_floating_point()
        self.reads += 1
        return number.clone() if self.gives else None


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_read_as_they_are(dtype: torch.dtype, *, gives: bool) -> None:
    read = Reader(gives=gives)
    for value in (1, 0, -0.0, float("inf")) if dtype.is_floating_point else (1, 0):
        number = torch.tensor(value, dtype=dtype)
        with ScalarReads(CPU, read):
            found = number.item(), float(number), bool(number), number.reshape(1, 1).tolist(), f"{float(number)}"
        assert repr(found) == repr(
            (number.item(), float(number), bool(number), number.reshape(1, 1).tolist(), f"{float(number)}")
        )
    assert read.reads == 5 * (4 if dtype.is_floating_point else 2)


def test_nothing_else_is_read() -> None:
    """Lists, numbers of other devices, those that are wider than eight bytes, and tensors of a class of their own."""

    class Own(Tensor):
        pass

    read = Reader()
    with ScalarReads(CPU, read):
        assert torch.ones(3).tolist() == [1.0, 1.0, 1.0]
        assert torch.tensor(1j, dtype=torch.complex128).item() == 1j
        assert torch.ones(1).as_subclass(Own).item() == 1.0
        assert torch.ones(1).conj().item() == 1.0
    with ScalarReads(torch.device("meta"), read):
        assert torch.ones(1).item() == 1.0
    assert read.reads == 1  # `conj` of a real number is that number


def test_graphs_that_are_compiled_within_are_those_of_torch() -> None:
    read = Reader()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return x * 2 + 1

    with ScalarReads(CPU, read):
        found = compiled(torch.ones(3))
        assert found.sum().item() == 9.0
    assert read.reads == 1
    torch.compiler.reset()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_reads_by_way_of_it(monkeypatch: pytest.MonkeyPatch, *, foreach: bool) -> None:
    """Two numbers of each parameter, and the count of its steps, which are all on the device here."""
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    read = Reader()
    monkeypatch.setattr(scalar_reads, "read_past_copies", lambda device, waits: ScalarReads(device, read))

    def trained(make: Any) -> list[nn.Parameter]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in [(64, 48), (48,), (32, 8)]]
        optimizer = make(parameters)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        return parameters

    expected = trained(lambda parameters: torch.optim.Adafactor(parameters, foreach=foreach))
    assert read.reads == 0
    found = trained(lambda parameters: StreamedOptimizer(parameters, torch.optim.Adafactor, foreach=foreach))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert read.reads == 3 * 3 * (2 + (3 if foreach else 1))


class Reading(torch.optim.SGD):
    """It reads a number of each gradient from its third step on, and notes which steps are in a function mode."""

    within: ClassVar[list[bool]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.within.append(len(_get_current_function_mode_stack()) > 0)
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = steps = self.state[p].get("steps", 0) + 1
            if steps > 2:
                self.state[p]["first"] = p.grad[0, 0].item()


def test_only_steps_of_a_class_that_reads_numbers_are_in_the_function_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as is known: all of the first step, one in each of the others, and all from the first read on."""
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 0)
    monkeypatch.setattr(Reading, "within", [])
    read = Reader()
    monkeypatch.setattr(scalar_reads, "read_past_copies", lambda device, waits: ScalarReads(device, read))
    parameters = [nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
    optimizer = StreamedOptimizer(parameters, Reading, lr=0.1)
    for within, reads in (([True] * 4, 0), ([True, False, False, False], 0), ([True] * 4, 4), ([True] * 4, 8)):
        Reading.within.clear()
        for p in parameters:
            p.grad = torch.randn(8, 8)
        optimizer.step()
        assert (Reading.within, read.reads) == (within, reads)


def test_numbers_of_a_cpu_are_read_by_torch() -> None:
    with read_past_copies(CPU) as context:
        assert not isinstance(context, ScalarReads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_a_gpu_have_their_bits(dtype: torch.dtype) -> None:
    device = resolve_device(torch.device("cuda"))
    for value in (1, 0, -0.0, float("inf"), float("nan")) if dtype.is_floating_point else (1, 0):
        number = torch.tensor(value, dtype=dtype, device=device)
        with read_past_copies(device):
            found = number.item()
        assert repr(found) == repr(number.item())
    assert MappedNumber(device).read(torch.ones(1, dtype=torch.int32, device=device)) is not None


@pytest.mark.gpu
def test_numbers_of_a_gpu_do_not_wait_for_copies_out() -> None:
    device = resolve_device(torch.device("cuda"))
    streams = CudaStreams(device)
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cpu", pin_memory=True)
    number = torch.ones((), device=device)
    with read_past_copies(device):
        assert (number + 1).item() == 2.0  # the kernels are loaded
        torch.cuda.synchronize()
        pairs = [(target, source)] * 24  # half a second, so that a busy host has read the number by then
        copied = streams.copy_all(Lane.UPDATE_OUT, pairs, (streams.record_compute(),))
        assert (number + 2).item() == 3.0
        assert not copied.query()
    streams.close()
    del source, target


@pytest.mark.gpu
def test_a_number_is_that_of_its_time() -> None:
    """Behind kernels that take long, on another stream than the default one."""
    device = resolve_device(torch.device("cuda"))
    streams = FaultyCudaStreams(device)
    with read_past_copies(device), streams.beside():
        for step in range(20):
            number = torch.full((), float(step), device=device)
            torch.cuda._sleep(1_000_000)
            number += 1
            assert number.item() == step + 1
    streams.close()


@pytest.mark.gpu
def test_what_is_queued_before_a_number_of_a_gpu_is_waited_for_is_not_waited_for() -> None:
    """Nothing is queued where another stream is current than the one that was at first."""
    device = resolve_device(torch.device("cuda"))
    calls = []

    def waits() -> None:
        calls.append(torch.cuda.current_stream(device))
        torch.cuda._sleep(2_000_000_000)  # a second

    number = torch.ones((), device=device)
    stream = torch.cuda.current_stream(device)
    with read_past_copies(device, waits):
        assert number.item() == 1.0
        assert not stream.query()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            assert number.item() == 1.0
    assert calls == [stream]
    torch.cuda.synchronize(device)
