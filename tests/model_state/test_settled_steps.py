"""A step of a whole-matrix optimizer that does not end: weight and state are of one step, or the next use says no."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from interrupts import Interrupts
from optimizer_steps import are_same, found, interrupt_steps
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import InvariantError, TencacheError, UsageError
from tencache_fx.model_state import offloading, streamed_optimizer, update_chunks
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import StreamedOptimizer
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.streams import Event, Lane

SIDE = 144  # state of a matrix has a mapping of its own
PLACES = ["offloaded", "state in host memory", "state on the device"]
INTERRUPTED = (
    "chunk_queue.py",
    "streamed_optimizer.py",
    "streamed_update.py",
    "host_state.py",
    "offloaded_parameter.py",
)


class Renaming(torch.optim.Optimizer):
    """It keeps its last gradient by another name at each step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            steps = state.get("steps", 0) + 1
            mean = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.5)
            state.clear()
            state.update({"steps": steps, "mean": mean, f"gradient {steps}": p.grad.clone()})
            p.sub_(mean)


class FailingOnce(torch.optim.Adam):
    """It fails at the third parameter that it is given, having updated those before, while `fails`."""

    fails: ClassVar[bool] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for index, parameter in enumerate(parameters := group["params"]):
            if self.fails and index == 2:
                raise ArithmeticError("no good")
            group["params"] = [parameter]
            super().step()
        group["params"] = parameters


class NoCopiesOut(FaultyCpuStreams):
    """Copies out of updates fail, while `fails`."""

    fails = False

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        self._failing = frozenset({self.copies} if self.fails and lane is Lane.UPDATE_OUT else ())
        return super().copy_all(lane, pairs, after)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where weights and states are; two matrices are updated together."""
    name: str = request.param
    monkeypatch.setattr(offloading, "LEAST_BYTES", 0)
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 1 << 30 if name == "state on the device" else 0)
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 2 * 20 * SIDE * SIDE)
    return name


def made(place: str, cls: type[torch.optim.Optimizer], count: int = 3) -> tuple[nn.ParameterList, StreamedOptimizer]:
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(SIDE, SIDE)) for _ in range(count))
    if place == "offloaded":
        tencache_fx.offload(model, "cpu")
    return model, StreamedOptimizer(model.parameters(), cls)


def set_gradients(model: nn.ParameterList, step: int) -> None:
    for index, parameter in enumerate(model):
        parameter.grad = torch.full((SIDE, SIDE), float(step + index + 1))


def train(model: nn.ParameterList, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*could not be updated.*:UserWarning")
@pytest.mark.parametrize("cls", [torch.optim.AdamW, Renaming])
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_an_interrupt_at_any_line_leaves_no_mixture_of_steps(place: str, cls: type[torch.optim.Optimizer]) -> None:
    """At one line in eleven, and with late copies."""
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=FaultyCpuStreams(delay_s=0.0002)))
    model, optimizer = made(place, cls)
    expected = []
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        expected.append(found(model, optimizer))

    def begin() -> tuple[nn.ParameterList, StreamedOptimizer]:
        model, optimizer = made(place, cls)
        train(model, optimizer, range(1))
        set_gradients(model, 1)
        return model, optimizer

    whole, told = interrupt_steps(begin, INTERRUPTED, 11, expected)
    assert told
    assert all("go back to a checkpoint" in each for each in told)
    assert whole > len(told) / 2


@pytest.mark.filterwarnings("ignore:.*could not be updated.*:UserWarning")
@pytest.mark.parametrize("place", ["offloaded"], indirect=True)
@pytest.mark.parametrize("apart", [1, 3, 8, 20])
def test_no_reader_waits_for_ever_after_two_interrupts(place: str, apart: int) -> None:
    """The second comes while the step ends for the first: readers have the weights of a step, or are told."""
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=FaultyCpuStreams(delay_s=0.0002)))
    model, optimizer = made(place, torch.optim.AdamW)
    values = []
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        values.append([value for value, _ in found(model, optimizer)])
    interrupts = Interrupts(INTERRUPTED)
    model, optimizer = made(place, torch.optim.AdamW)
    train(model, optimizer, range(1))
    set_gradients(model, 1)
    interrupts.run(optimizer.step)
    last, twice = interrupts.lines, 0
    for at in range(last - 90, last, 5):
        model, optimizer = made(place, torch.optim.AdamW)
        train(model, optimizer, range(1))
        set_gradients(model, 1)
        interrupts.run(optimizer.step, at, at + apart)
        twice += len(interrupts.where) == 2
        read = read_elsewhere(model)
        assert read is not None, interrupts.where
        assert len(read) == len(model), interrupts.where
        for index, value in enumerate(read):
            if isinstance(value, Tensor):
                assert any(torch.equal(value, step[index]) for step in values), interrupts.where
            else:
                assert "go back to a checkpoint" in str(value)
    assert twice > 9


def read_elsewhere(model: nn.ParameterList) -> list[Tensor | TencacheError] | None:
    """Return each weight, or what its reader is told, read in another thread; None if that waits for ever."""
    read: list[Tensor | TencacheError] = []

    def read_all() -> None:
        for parameter in model:
            offloaded = find_offloaded(parameter)
            assert offloaded is not None
            try:
                offloaded.wait_update()
                read.append(offloaded.host.clone())
            except TencacheError as error:
                read.append(error)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    reader.join(10)
    return None if reader.is_alive() else read


@pytest.mark.parametrize("place", ["offloaded"], indirect=True)
def test_a_step_that_nobody_has_ended_is_ended_by_a_reader(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(place, torch.optim.Adam)
    train(model, optimizer, range(1))
    set_gradients(model, 1)

    def interrupted(stream: Any, departure: Any) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(streamed_optimizer.UpdateStream, "_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    read = read_elsewhere(model)
    assert read is not None
    expected = made(place, torch.optim.Adam)
    train(*expected, range(2))
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), found(*expected), strict=True))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_an_error_at_the_third_parameter_leaves_no_mixture_of_steps(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State on the device was changed where it is: the next uses say so, up to `load_state_dict`."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 1 << 30)
    model, optimizer = made(place, FailingOnce, 4)
    train(model, optimizer, range(1))
    before, saved = found(model, optimizer), copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(FailingOnce, "fails", True)
    with pytest.raises(ArithmeticError):
        train(model, optimizer, range(1, 2))
    monkeypatch.setattr(FailingOnce, "fails", False)
    if place == "state on the device":
        for use in (optimizer.step, optimizer.state_dict, lambda: copy.deepcopy(optimizer)):
            with pytest.raises(UsageError, match="weights and states may be of two steps; go back to a checkpoint"):
                use()
        optimizer.load_state_dict(saved)
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), before, strict=True))
    train(model, optimizer, range(1, 3))
    expected = made("on the device", FailingOnce, 4)
    train(*expected, range(3))
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), found(*expected), strict=True))


@pytest.mark.parametrize("place", PLACES[:2], indirect=True)
def test_after_copies_out_have_failed_a_checkpoint_is_loaded(place: str) -> None:
    """What reads a weight or the state says so, and what sets both does not."""
    streams = NoCopiesOut()
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=streams))
    model, optimizer = made(place, torch.optim.Adam)
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    streams.fails = True
    with pytest.raises(InvariantError, match="a copy between device and host memory failed"):
        train(model, optimizer, range(1, 2))
    streams.fails = False
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(UsageError, match="changed 3 parameters, of sizes .*; go back to a checkpoint"):
            use()
    if place == "offloaded":
        with pytest.warns(UserWarning, match="could not be updated"):
            model.load_state_dict(weights)
    else:
        model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1, 3))
    expected = made(place, torch.optim.Adam)
    train(*expected, range(3))
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), found(*expected), strict=True))


@pytest.mark.parametrize("place", PLACES[:2], indirect=True)
def test_an_interrupt_while_copies_are_waited_for_changes_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for all the same: weights and states are those of the step."""
    model, optimizer = made(place, torch.optim.Adam)
    train(model, optimizer, range(1))
    set_gradients(model, 1)
    ends: list[Callable[..., object]] = []
    end = streamed_optimizer.UpdateStream._end

    def interrupted(stream: Any, departure: Any) -> object:
        ends.append(end)
        if len(ends) == 1:
            raise KeyboardInterrupt
        return end(stream, departure)

    monkeypatch.setattr(streamed_optimizer.UpdateStream, "_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    expected = made(place, torch.optim.Adam)
    train(*expected, range(2))
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), found(*expected), strict=True))


class ReadByAHandler(FaultyCpuStreams):
    """Calls `read` before the copies out of an update, and behind them, as the handler of a signal may."""

    read: Callable[[], None] | None = None

    def copy_all(self, lane: Lane, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Event] = ()) -> Event:
        read = self.read if lane is Lane.UPDATE_OUT else None
        if read is not None:
            read()
        event = super().copy_all(lane, pairs, after)
        if read is not None:
            read()
        return event


@pytest.mark.parametrize("place", ["offloaded"], indirect=True)
def test_a_handler_that_reads_weights_in_the_midst_of_a_step_is_told_and_changes_nothing(place: str) -> None:
    streams = ReadByAHandler()
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=streams))
    model, optimizer = made(place, torch.optim.Adam)
    told: list[str] = []

    def read() -> None:
        for parameter in model:
            offloaded = find_offloaded(parameter)
            assert offloaded is not None
            try:
                offloaded.wait_update()
            except UsageError as error:
                told.append(str(error))

    streams.read = read
    train(model, optimizer, range(2))
    streams.read = None
    assert told
    assert all("in the midst of the step that writes it" in each for each in told)
    expected = made(place, torch.optim.Adam)
    train(*expected, range(2))
    assert all(are_same(one, other) for one, other in zip(found(model, optimizer), found(*expected), strict=True))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_state_dict_that_is_kept_goes_on_as_a_whole(place: str) -> None:
    """As torch's does: numbers and arrays are those of the last step."""
    model, optimizer = made(place, torch.optim.Adam)
    train(model, optimizer, range(1))
    kept = optimizer.state_dict()["state"]
    train(model, optimizer, range(1, 3))
    last = optimizer.state_dict()["state"]
    for index, state in last.items():
        assert state["step"] == 3
        assert all(torch.equal(kept[index][name], value) for name, value in state.items())


@pytest.mark.parametrize("place", ["offloaded"], indirect=True)
@pytest.mark.parametrize("other", [StreamedOptimizer, tencache_fx.optim.OffloadedOptimizer])
@pytest.mark.parametrize("cls", [StreamedOptimizer, tencache_fx.optim.OffloadedOptimizer])
def test_a_half_that_two_optimizers_update_has_the_steps_of_both(place: str, cls: Any, other: Any) -> None:
    """The master of each takes over what the other one has done."""
    torch.manual_seed(0)
    model = tencache_fx.offload(nn.ParameterList([nn.Parameter(torch.randn(SIDE, SIDE).bfloat16())]), "cpu")
    still = cls(model.parameters(), torch.optim.SGD, lr=0.0)
    moving = other(model.parameters(), torch.optim.SGD, lr=0.5)
    for _ in range(2):
        model[0].grad = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
        still.step()
        moving.step()
        moved = model.state_dict()["0"].clone()
        still.step()
        assert torch.equal(model.state_dict()["0"], moved)
