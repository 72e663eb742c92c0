"""State in host memory for parameters on a CUDA device: the same weights as on the CPU, however late copies are."""

import math
from collections.abc import Iterator

import pytest
import torch
from conftest import MIB, eventually, settled
from faulty_streams import FaultyCudaStreams
from torch import Tensor, nn

import tencache_fx
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state.staged_update import round_shape
from tencache_fx.optim import AdamW
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine

pytestmark = pytest.mark.gpu


@pytest.fixture
def late_copies() -> Iterator[None]:
    device = resolve_device(torch.device("cuda"))
    engine = Engine(device, host_budget_bytes=512 * MIB, streams=FaultyCudaStreams(device, delay_cycles=5_000_000))
    install_engine(engine)
    yield
    assert eventually(lambda: settled(engine)), engine.stats.take()
    engine.close()


def weights(device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """One of several pieces, one with channels last, small ones."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(4000, 5000), (64, 32, 3, 3), (7,), ()]
    values = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    values[1] = values[1].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(value.to(device)) for value in values]


def train(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the weights as each step's next kernel sees them; gradients are contiguous, and freed at once."""
    parameters = weights(device, dtype)
    optimizer = AdamW(parameters, lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(4):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.grad = gradient.to(device) * 2  # still being computed when the step begins
        optimizer.step()
        seen += [parameter.detach().clone() for parameter in parameters]
        optimizer.zero_grad()
        for parameter in parameters:  # takes the gradients' memory
            torch.full_like(parameter, float("nan"))
    return [each.cpu() for each in seen]


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    assert all(map(torch.equal, train("cuda", dtype), train("cpu", dtype)))


def test_the_device_holds_weights_and_gradients_only() -> None:
    before = torch.cuda.memory_allocated()
    parameter = nn.Parameter(torch.zeros(32 << 20, device="cuda", dtype=torch.bfloat16))
    optimizer = AdamW([parameter])
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.zero_grad()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * parameter.nbytes + MIB
    state_bytes = 10 * parameter.numel() + parameter.numel() // 8  # what its master has besides it, and moments
    assert (
        state_bytes
        <= tencache_fx.stats()["host_pool_bytes"]
        <= state_bytes + math.prod(round_shape([parameter.nbytes]))
    )
