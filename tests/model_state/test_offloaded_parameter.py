"""The copies of an offloaded parameter, against one number: whatever comes in which order, readers see that number."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from torch import nn

from tencache_fx.errors import InvariantError, UsageError
from tencache_fx.model_state.copy_state import CopyState
from tencache_fx.model_state.parameter_ops import sync_param
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.streams import Event

COUNT = 1 << 14


class Forward:
    """A module's forward that loads the parameter."""


class CopyMachine(RuleBasedStateMachine):
    """Does to one parameter what modules, plans, optimizers and users may. All its elements are `value`."""

    def __init__(self) -> None:
        super().__init__()
        streams = FaultyCpuStreams(delay_s=0.0002)
        self.engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 20, streams=streams)
        self.parameter = nn.Parameter(torch.zeros(COUNT))
        self.offloaded = parameters_of(self.engine).offload(self.parameter, "weight", torch.device("cpu"))
        self.alias = self.offloaded.host  # as a state_dict has it
        self.thread = ThreadPoolExecutor(1)
        self.gate = threading.Event()
        self.model = {"value": 0.0, "fails": False, "device_newer": False}
        self.last = 0.0
        self.forwards: list[Forward] = []

    def new_value(self) -> float:
        self.last += 1.0
        return self.last

    @property
    def pinned(self) -> bool:
        return self.offloaded.resident or self.offloaded.summoned or bool(self.forwards)

    @property
    def updating(self) -> bool:
        return self.offloaded._update.work is not None

    def blocking(self, deed: Callable[[], object]) -> None:
        """Do what waits for the update under way, which ends first; if that fails, the deed says so, once."""
        self.gate.set()
        if self.model["fails"] and self.updating:
            with pytest.raises(InvariantError, match="weight could not be updated: RuntimeError"):
                deed()
            self.model["fails"] = False
        deed()

    def check_device(self) -> None:
        assert self.offloaded.on_device
        assert bool((self.parameter.detach() == self.model["value"]).all())

    @rule()
    def load(self) -> None:
        self.blocking(self.offloaded.load)
        self.check_device()

    @rule()
    def sync(self) -> None:
        self.blocking(lambda: sync_param(self.engine, self.parameter))
        assert self.offloaded.is_loaded
        self.check_device()

    @rule()
    def evict(self) -> None:
        self.offloaded.evict()
        if self.offloaded.resident or self.offloaded.summoned:
            assert self.offloaded.on_device
        else:
            assert not self.offloaded.on_device
            self.model["device_newer"] = False

    @rule()
    def pin(self) -> None:
        if not self.offloaded.resident:
            self.blocking(self.offloaded.pin)
            self.check_device()

    @rule()
    def unpin(self) -> None:
        if self.offloaded.resident:
            self.blocking(self.offloaded.unpin)
            self.model["device_newer"] &= self.offloaded.summoned

    @rule()
    def summon(self) -> None:
        if not self.offloaded.summoned:
            self.blocking(self.offloaded.load)
            self.offloaded.summoned = True
        else:
            self.offloaded.summoned = False
            self.evict()

    @rule(inference=st.booleans())
    def begin_forward(self, inference: bool) -> None:  # noqa: FBT001
        forward = Forward()
        self.forwards.append(forward)
        self.blocking(lambda: self.offloaded.load_for_forward(forward, inference=inference))
        self.check_device()

    @precondition(lambda self: self.forwards)
    @rule(keep=st.booleans())
    def end_forward(self, keep: bool) -> None:  # noqa: FBT001
        self.offloaded.end_forward(self.forwards.pop(), keep=keep)
        self.model["device_newer"] &= self.offloaded.on_device

    @rule()
    def load_for_backward(self) -> None:
        self.blocking(self.offloaded.load_for_backward)
        self.check_device()

    @rule()
    def read_host(self) -> None:
        self.blocking(self.offloaded.wait_update)
        assert bool((self.offloaded.host == self.model["value"]).all())
        self.model["device_newer"] = False

    @rule(known=st.booleans(), fails=st.booleans())
    def update_on_host(self, known: bool, fails: bool) -> None:  # noqa: FBT001
        self.blocking(self.offloaded.wait_update)
        self.offloaded.evict()
        self.offloaded.sync_host()
        self.gate = gate = threading.Event()
        value = self.model["value"] if fails else self.new_value()

        def work() -> None:
            assert gate.wait(30)
            if fails:
                raise RuntimeError("no update")
            self.offloaded.backing.begin_write(read=True).wait_readers()
            self.offloaded.begin_write(read=True).elements.fill_(value)
            self.offloaded.finish_update()

        begun = Future[None]()

        def carry_out() -> None:
            try:
                work()
            except RuntimeError as error:
                begun.set_exception(error)
            else:
                begun.set_result(None)

        self.offloaded.begin_update(begun, self.engine.streams.record_compute() if known else None)
        self.thread.submit(carry_out)
        self.model.update(value=value, fails=fails, device_newer=False)

    @rule()
    def set_readers(self) -> None:
        self.offloaded.set_readers(self.engine.streams.record_compute())

    @precondition(lambda self: self.pinned)
    @rule()
    def update_on_device(self) -> None:
        self.blocking(self.offloaded.load)
        value = self.new_value()
        self.parameter.detach().fill_(value)
        self.offloaded.mark_device_newer()
        self.model.update(value=value, device_newer=True)

    @precondition(lambda self: self.pinned)
    @rule()
    def write_to_device(self) -> None:
        self.blocking(self.offloaded.load)
        value, before = self.new_value(), self.offloaded.version
        self.parameter.detach().fill_(value)
        self.offloaded.write_back()
        assert self.offloaded.version > before
        self.model.update(value=value, device_newer=False)

    @rule()
    def write_to_host(self) -> None:
        """A `state_dict` of before the last update on the device is too old to be written to."""
        self.blocking(self.offloaded.wait_update)
        self.offloaded.backing.begin_write(read=True).wait_readers()
        value = self.new_value()
        self.alias.fill_(value)
        if self.model["device_newer"]:
            with pytest.raises(UsageError, match="older than its last update"):
                self.offloaded.sync_host()
        else:
            self.model["value"] = value

    @invariant()
    def state_is_that_of_the_copies(self) -> None:
        state = self.offloaded._state
        if state is not CopyState.UPDATING:
            assert (state is CopyState.HOST) == (not self.offloaded.on_device)
            assert (state is CopyState.DEVICE_NEWER) == self.model["device_newer"]
        if self.pinned and not self.updating:
            assert self.offloaded.on_device or not (self.offloaded.resident or self.offloaded.summoned)

    def teardown(self) -> None:
        """Closing brings the value to the device."""
        self.blocking(self.offloaded.wait_update)
        self.thread.shutdown()
        self.engine.close()
        self.check_device()


def test_readers_see_the_last_value_whatever_comes_in_which_order() -> None:
    checks = [HealthCheck.too_slow]
    run_machine(CopyMachine, settings=settings(max_examples=60, suppress_health_check=checks))


def test_a_change_of_state_that_is_not_in_the_table_is_refused() -> None:
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 20)
    offloaded = parameters_of(engine).offload(nn.Parameter(torch.zeros(COUNT)), "weight", torch.device("cpu"))
    with pytest.raises(AssertionError, match="weight"):
        offloaded.mark_device_newer()
    with pytest.raises(AssertionError, match="weight has no device copy"):
        offloaded.write_back()
    engine.close()


class ManyStreams(FaultyCpuStreams):
    """Has the compute stream `key`, and notes which one was told to wait; the host waits as well."""

    def __init__(self) -> None:
        super().__init__()
        self.key: object = "first"
        self.waits: list[object] = []

    def compute_key(self) -> object:
        return self.key

    def wait_compute(self, event: Event) -> None:
        self.waits.append(self.key)
        super().wait_compute(event)


def test_each_compute_stream_waits_once_for_each_copy_in() -> None:
    streams = ManyStreams()
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 20, streams=streams)
    parameter = nn.Parameter(torch.zeros(COUNT))
    offloaded = parameters_of(engine).offload(parameter, "weight", torch.device("cpu"))

    def waits(*keys: object) -> list[object]:
        streams.waits.clear()
        for streams.key in keys:
            sync_param(engine, parameter)
        return streams.waits

    offloaded.pin()
    assert waits("first", "second", "first", "second", "third") == ["second", "third"]
    assert waits(None, None) == [None, None], "another stream may have the key of one that nobody can tell from it"
    with offloaded.begin_write(read=False) as write:
        write.wait_readers()
        done = Future[None]()
        offloaded.begin_update(done, streams.record_compute())
        write.elements.fill_(1.0)
        offloaded.finish_update()
        done.set_result(None)
    assert waits("first", "first", "second") == ["first", "second"], "there is another copy"
    assert bool((parameter.detach() == 1.0).all())
    offloaded.backing.value().fill_(2.0)  # as by a tensor of a state_dict
    assert waits("second", "first", "second") == ["second", "first"]
    assert bool((parameter.detach() == 2.0).all())
    streams.key = "fourth"
    streams.waits.clear()
    offloaded.unpin()
    assert streams.waits == ["fourth"], "who has its memory next goes on behind the copy"
    engine.close()


def test_a_copy_in_that_fails_is_told_to_each_who_asks() -> None:
    streams = FaultyCpuStreams(failing=[0])
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 20, streams=streams)
    parameter = nn.Parameter(torch.zeros(COUNT))
    offloaded = parameters_of(engine).offload(parameter, "weight", torch.device("cpu"))
    offloaded.summoned = True
    with pytest.raises(InvariantError, match="injected copy failure"):
        sync_param(engine, parameter)
    sync_param(engine, parameter)
    assert bool((parameter.detach() == 0.0).all())
    done = Future[None]()
    streams._failing = frozenset((streams.copies,))
    offloaded.begin_update(done, streams.record_compute())
    offloaded.finish_update()
    done.set_result(None)
    for _ in range(2):
        with pytest.raises(InvariantError, match="injected copy failure"):
            sync_param(engine, parameter)
    offloaded.refresh()
    engine.close()
