"""Gradients that stay on the device and are known as a rank's part: what is done to them is done to the values."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor, nn

from tencache_fx.garbage import CollectorPause
from tencache_fx.model_state.gradient_parts import PartHook
from tencache_fx.model_state.host_gradient import HostGradient, HostGradientBuffer
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.model_state.update import send_to_host
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import CpuEvent

SIZE = (256, 64)


@pytest.fixture
def engine(new_engine: Callable[..., Engine]) -> Engine:
    return new_engine()


@pytest.fixture
def hooked(engine: Engine) -> Iterator[nn.Parameter]:
    parameter = nn.Parameter(torch.randn(SIZE))
    PartHook(parameter, parameters_of(engine).additions, "ranks")
    yield parameter
    parameter.grad = None


def test_what_arrives_is_known_as_a_part_and_takes_no_host_memory(engine: Engine, hooked: nn.Parameter) -> None:
    before = engine.pool.held_for(Use.GRADIENT)
    for _ in range(2):
        (hooked * torch.arange(64.0)).sum().backward()
    assert isinstance(hooked.grad, HostGradient)
    assert hooked.grad.buffer.shard == "ranks"
    assert engine.pool.held_for(Use.GRADIENT) == before
    assert torch.equal(hooked.grad.clone(), 2 * torch.arange(64.0).expand(SIZE))
    assert "on the device" in repr(hooked.grad)


def test_who_wants_it_in_host_memory_gets_it_there(engine: Engine, hooked: nn.Parameter) -> None:
    hooked.square().sum().backward()
    assert isinstance(hooked.grad, HostGradient)
    hooked.grad.mul_(0.5)
    assert torch.equal(hooked.grad.buffer.host(), hooked.detach())
    assert engine.pool.held_for(Use.GRADIENT) > 0


def test_it_is_added_to_one_in_host_memory_without_a_buffer_of_its_own(engine: Engine, hooked: nn.Parameter) -> None:
    first = torch.randn(SIZE)
    hooked.grad = send_to_host(engine, first.clone())
    held = engine.pool.held_for(Use.GRADIENT)
    hooked.square().sum().backward()
    assert engine.pool.held_for(Use.GRADIENT) == held
    torch.testing.assert_close(hooked.grad.clone(), first + 2 * hooked.detach())


def test_no_copy_that_is_late_lands_on_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer may be given back while a copy out still writes to it."""

    copy: Future[None] = Future()
    monkeypatch.setattr(engine.streams, "after_return", lambda memory, after: after)
    value = torch.randn(SIZE)
    engine.reserve_gradients([value.nbytes])
    buffer = engine.object_buffers.acquire(value.nbytes, Use.GRADIENT)
    engine.pool.release(buffer, CpuEvent(copy))
    threading.Timer(0.2, copy.set_result, (None,)).start()
    gradient = HostGradientBuffer.on_device(parameters_of(engine).additions, value, "ranks")
    found: Tensor = gradient.host()
    assert found.data_ptr() == buffer.memory.data_ptr(), "the subject of this test"
    assert copy.done()
    del gradient, found, buffer


def test_once_the_engine_is_closed_gradients_are_ordinary_ones(engine: Engine, hooked: nn.Parameter) -> None:
    parameters_of(engine).additions.stop()
    hooked.sum().backward()
    assert type(hooked.grad) is Tensor


def test_frozen_parameters_may_be_trained_later(engine: Engine) -> None:
    parameter = nn.Parameter(torch.randn(SIZE), requires_grad=False)
    PartHook(parameter, parameters_of(engine).additions, "ranks")
    assert not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.sum().backward()
    assert isinstance(parameter.grad, HostGradient)


def test_the_last_of_several_pauses_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = [True]
    monkeypatch.setattr("gc.isenabled", lambda: states[-1])
    monkeypatch.setattr("gc.disable", lambda: states.append(False))
    monkeypatch.setattr("gc.enable", lambda: states.append(True))
    pause = CollectorPause()
    pause.begin()
    pause.begin()
    pause.end()
    assert not states[-1]
    pause.end()
    assert states[-1]
    pause.begin()
    pause.begin()
    pause.end_in_child()
    assert states[-1], "a child has none of the other threads"
