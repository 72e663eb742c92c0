"""Gradients of several backwards: added up behind the caller's back, which nobody who reads the sum can tell."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_futures
from pathlib import Path

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import given, settings
from hypothesis import strategies as st
from tied_model import batch, compiled, network, trained
from torch import Tensor, nn

import tencache_fx
from tencache_fx import native_code
from tencache_fx.errors import InvariantError
from tencache_fx.garbage import CollectorPause
from tencache_fx.model_state import host_gradient, sum_kernel
from tencache_fx.model_state.disk_state import DiskState
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.model_state.parameter_ops import offload_grad, take_grad
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.model_state.stored_form import FP32
from tencache_fx.model_state.sum_kernel import Addends, SumKernel, kernel_of
from tencache_fx.model_state.update import send_to_host
from tencache_fx.native_code import Library
from tencache_fx.optim import AdamW
from tencache_fx.planning.plan import PoolClass
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import engines
from tencache_fx.units import PAGE_BYTES, round_up

COUNT = 3000


class Gate:
    """Holds additions back until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = 0

    def kernel_of(self, dtype: torch.dtype) -> SumKernel:
        def add(pairs: Sequence[Addends]) -> list[float]:
            self.begun += 1
            assert self.opened.wait(20)
            return kernel_of(dtype)(pairs)

        return add


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    kernel_of(torch.float32)  # compiled before anybody waits
    made = Gate()
    monkeypatch.setattr(host_gradient, "kernel_of", made.kernel_of)
    yield made
    made.opened.set()


@pytest.fixture
def engine(new_engine: Callable[..., Engine]) -> Engine:
    made = new_engine()
    made.reserve_gradients([4 * COUNT] * 6)
    return made


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)).to(dtype)


def addends(sums: Tensor, more: Tensor) -> Addends:
    return Addends(sums.view(torch.uint8), more.view(torch.uint8), sums.nbytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_and_its_norm_are_those_of_torch(engine: Engine, dtype: torch.dtype) -> None:
    gradient, expected = send_to_host(engine, numbers(0, dtype)), numbers(0, dtype)
    for seed in (1, 2, 3):
        gradient.add_(send_to_host(engine, numbers(seed, dtype)))
        expected.add_(numbers(seed, dtype))
    norm = expected.double().norm()
    torch.testing.assert_close(gradient.buffer.norm(), norm.float(), rtol=1e-3, atol=0)
    assert torch.equal(gradient.clone(), expected)


def test_a_sum_beyond_the_largest_number_has_no_finite_norm(engine: Engine) -> None:
    gradient = send_to_host(engine, torch.full((8,), 40000.0, dtype=torch.float16))
    gradient.add_(send_to_host(engine, torch.full((8,), 25500.0, dtype=torch.float16)))
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    assert norm.isfinite()
    assert gradient.clone().isfinite().all()
    gradient.add_(send_to_host(engine, torch.full((8,), 100.0, dtype=torch.float16)))
    assert gradient.clone().isinf().all()
    assert torch.linalg.vector_norm(gradient, dtype=torch.float32).isinf()


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def other_default(request: pytest.FixtureRequest) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(kept)


class Counted:
    """Adds, and notes how many pairs each call had."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.pairs = gate, list[int]()

    def __call__(self, pairs: Sequence[Addends]) -> list[float]:
        self.pairs.append(len(pairs))
        assert self.gate.opened.wait(20)
        return kernel_of(torch.float32)(pairs)


def test_additions_that_are_ready_are_one_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also two to the same sum, in their order, and one of which another part is added meanwhile."""
    counted = Counted(gate := Gate())
    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: counted)
    first, second = (send_to_host(engine, numbers(seed)) for seed in range(2))
    first.add_(send_to_host(engine, numbers(2)))
    while not counted.pairs:
        time.sleep(0.001)
    first.add_(send_to_host(engine, numbers(3)))
    second.add_(send_to_host(engine, numbers(4)))
    first.add_(send_to_host(engine, numbers(5)))
    second.add_(first)  # only once the others are there
    gate.opened.set()
    expected = sum((numbers(seed) for seed in (2, 3, 5)), numbers(0))
    torch.testing.assert_close(first.clone(), expected)
    torch.testing.assert_close(second.clone(), numbers(1) + numbers(4) + expected)
    torch.testing.assert_close(second.buffer.norm(), (numbers(1) + numbers(4) + expected).norm(), rtol=1e-3, atol=0)
    assert counted.pairs == [1, 3, 1]


def test_one_addition_of_several_may_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise InvariantError("injected")

    counted = Counted(gate := Gate())
    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: counted)
    sums = [send_to_host(engine, numbers(seed)) for seed in range(3)]
    for seed, gradient in enumerate(sums):
        more = send_to_host(engine, numbers(seed + 3))
        if seed == 1:
            more.buffer.wait_landed = broken
        gradient.add_(more)
    del more
    gate.opened.set()
    for seed in (0, 2):
        torch.testing.assert_close(sums[seed].clone(), numbers(seed) + numbers(seed + 3))
    with pytest.raises(InvariantError, match="is lost.*injected"):
        sums[1].clone()


class BrokenEvent:
    """As of a device that has failed: to ask it is an error, too."""

    def query(self) -> bool:
        raise RuntimeError("injected")

    def synchronize(self) -> None:
        raise RuntimeError("injected")


def test_one_addition_of_several_may_wait_for_an_event_that_is_broken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(gate := Gate())
    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: counted)
    sums, more = ([send_to_host(engine, numbers(seed + part)) for seed in range(4)] for part in (0, 4))
    more[2].buffer._landed = BrokenEvent()
    for gradient, other in zip(sums, more, strict=True):
        gradient.add_(other)
    while not counted.pairs:
        time.sleep(0.001)
    done = [gradient.buffer._sum.done for gradient in sums]
    gate.opened.set()
    wait_futures(done, 20)
    assert all(each.done() for each in done)
    for seed in (0, 1, 3):
        torch.testing.assert_close(sums[seed].clone(), numbers(seed) + numbers(seed + 4))
    with pytest.raises(InvariantError, match="is lost.*injected"):
        sums[2].clone()


def test_an_addition_that_failed_is_no_garbage_in_a_cycle(engine: Engine) -> None:
    """Its gradients would hold buffers until Python looks for some, which it seldom does."""
    pause = CollectorPause()
    pause.begin()
    try:
        gradient, more = (send_to_host(engine, numbers(seed)) for seed in range(2))
        more.buffer._landed = BrokenEvent()
        gradient.add_(more)
        assert isinstance(gradient.buffer._sum.done.exception(20), RuntimeError)
        del gradient, more
        until = time.monotonic() + 10  # the thread may have yet to let go
        while engine.stats.take()["host_acquired_bytes"] and time.monotonic() < until:
            time.sleep(0.001)
        assert not engine.pool.acquired_for(Use.GRADIENT)
    finally:
        pause.end()


def test_memory_of_additions_that_are_over_goes_while_the_thread_waits_for_others(gate: Gate) -> None:
    streams = FaultyCpuStreams(poison=False)
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 20, streams=streams)
    try:
        engine.reserve_gradients([4 * COUNT] * 4)
        gradient, other = (send_to_host(engine, numbers(seed)) for seed in range(2))
        memory = [weakref.ref(each.buffer.buffer_memory) for each in (gradient, other)]
        gradient.add_(other)
        streams.gate = threading.Event()
        handles = [offload_grad(engine, numbers(seed)) for seed in range(2, 4)]
        later, more = (take_grad(engine, handle) for handle in handles)
        later.add_(more)
        gate.opened.set()
        gradient.buffer.wait_landed()
        del gradient, other
        engine.object_buffers.drain()
        engine.forget_reserved()
        engine.pool.make_room([engine.pool.budget_bytes - 2 * round_up(4 * COUNT, PAGE_BYTES)], Use.STATE)
        until = time.monotonic() + 10  # the thread may have yet to let go
        while any(each() is not None for each in memory) and time.monotonic() < until:
            time.sleep(0.001)
        assert [each() for each in memory] == [None, None]
        streams.gate.set()
        torch.testing.assert_close(later.clone(), numbers(2) + numbers(3))
    finally:
        if streams.gate is not None:
            streams.gate.set()
        engine.close()


@pytest.mark.usefixtures("other_default")
def test_the_norm_does_not_depend_on_the_default_dtype(engine: Engine) -> None:
    kernel_of.cache_clear()
    first, second = numbers(0, torch.float32), numbers(1, torch.float32)
    gradient = send_to_host(engine, first.clone())
    gradient.add_(send_to_host(engine, second.clone()))
    torch.testing.assert_close(gradient.buffer.norm(), (first + second).norm(), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("other_default")
def test_a_gradient_is_scaled_by_all_digits_of_a_number(engine: Engine) -> None:
    gradient = send_to_host(engine, numbers(0, torch.float32))
    gradient.mul_(0.3)
    torch.testing.assert_close(gradient.clone(), numbers(0, torch.float32) * 0.3)


def test_the_kernel_is_one_of_the_cpu_whatever_the_default_device() -> None:
    kernel_of.cache_clear()
    with torch.device("meta"):
        kernel = kernel_of(torch.float32)
        value, more = (torch.full((3,), number, device="cpu") for number in (1.0, 2.0))
        squares = kernel([addends(value, more)])
    assert torch.equal(value, torch.full((3,), 3.0))
    assert squares == [27.0]


@pytest.mark.parametrize("count", [0, 1, 1000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("without_compiler", [False, True])
def test_the_kernel_adds_as_torch_does(
    dtype: torch.dtype, count: int, *, without_compiler: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Infinities and numbers that are none, too; and where nothing can be built."""
    kernel_of.cache_clear()
    if without_compiler:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(sum_kernel, "library_of", lambda source: Library(f"{source} // {tmp_path}"))
        monkeypatch.setattr(native_code, "_compiler", lambda: "no-such-compiler")
    generator = torch.Generator().manual_seed(count)
    value, more = (100 * torch.randn(count, generator=generator).to(dtype) for _ in range(2))
    expected = value + more
    (squares,) = kernel_of(dtype)([addends(value, more)])
    assert torch.equal(value, expected)
    assert squares == pytest.approx(expected.double().square().sum().item(), rel=1e-6)
    if count > 1:
        for special in (float("inf"), float("nan"), 60000.0):
            odd, others = (torch.full((count,), 1.0, dtype=dtype) for _ in range(2))
            odd[count // 2] = others[count // 2] = special
            expected = odd + others
            (squares,) = kernel_of(dtype)([addends(odd, others)])
            assert torch.equal(odd.isnan(), expected.isnan())
            assert torch.equal(odd.nan_to_num(), expected.nan_to_num())
            wanted = expected.double().square().sum().item()
            assert squares == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    kernel_of.cache_clear()


def test_norms_of_many_equal_numbers(engine: Engine) -> None:
    gradient = send_to_host(engine, torch.full((1 << 22,), 0.1))
    assert gradient.buffer.norm().item() == pytest.approx(0.1 * 2**11, rel=1e-6)
    gradient.add_(torch.full((1 << 22,), 0.2))
    assert gradient.buffer.norm().item() == pytest.approx(0.3 * 2**11, rel=1e-6)


def test_buffers_to_be_reserved_wait_for_additions(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = round_up(4 * COUNT, PAGE_BYTES)
    engine = new_engine(host_budget_bytes=2 * page_bytes)
    kernel = kernel_of(torch.float32)

    def late(pairs: Sequence[Addends]) -> list[float]:
        time.sleep(0.1)
        return kernel(pairs)

    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: late)
    gradient = send_to_host(engine, numbers(0))
    gradient.add_(send_to_host(engine, numbers(1)))
    engine.reserve(pool=[PoolClass(nbytes=4 * COUNT, count=1)], staging=[], disk_bytes=0)
    torch.testing.assert_close(gradient.clone(), numbers(0) + numbers(1))


def test_a_double_has_the_range_of_one(engine: Engine) -> None:
    gradient = send_to_host(engine, torch.full((4,), 1e25, dtype=torch.float64))
    gradient.add_(send_to_host(engine, torch.full((4,), 1e25, dtype=torch.float64)))
    torch.testing.assert_close(torch.linalg.vector_norm(gradient).item(), 4e25)


def test_a_state_takes_the_place_of_what_is_being_added(new_engine: Callable[..., Engine], gate: Gate) -> None:
    """The budget has room for a sum and the state, once what is added is gone; a step follows at once."""
    engine = new_engine(host_budget_bytes=3 * round_up(4 * COUNT, PAGE_BYTES))
    gradient = send_to_host(engine, numbers(0))
    gradient.add_(send_to_host(engine, numbers(1)))
    threading.Timer(0.2, gate.opened.set).start()
    state = engine.object_buffers.acquire_settled(8 * COUNT, Use.STATE)
    torch.testing.assert_close(gradient.clone(), numbers(0) + numbers(1))
    engine.pool.release(state)


def test_nobody_waits_for_an_addition_but_who_reads(engine: Engine, gate: Gate) -> None:
    gradient, more = send_to_host(engine, numbers(0)), send_to_host(engine, numbers(1))
    gradient.add_(more)
    gradient.add_(send_to_host(engine, numbers(2)))
    gradient.mul_(0.5)
    assert not gradient.buffer.has_landed
    threading.Timer(0.2, gate.opened.set).start()
    norm = torch.linalg.vector_norm(gradient)
    assert gate.opened.is_set()
    expected = (numbers(0) + numbers(1) + numbers(2)) * 0.5
    torch.testing.assert_close(gradient.clone(), expected)
    torch.testing.assert_close(norm, expected.norm())
    torch.testing.assert_close(torch.linalg.vector_norm(gradient), expected.norm())


def test_what_is_being_added_is_not_changed_meanwhile(engine: Engine, gate: Gate) -> None:
    gradient, more = send_to_host(engine, numbers(0)), send_to_host(engine, numbers(1))
    gradient.add_(more)
    threading.Timer(0.2, gate.opened.set).start()
    more.mul_(3)
    more.add_(numbers(2))
    assert gate.opened.is_set()
    torch.testing.assert_close(more.clone(), numbers(1) * 3 + numbers(2))
    torch.testing.assert_close(gradient.clone(), numbers(0) + numbers(1))


def test_an_addition_keeps_what_it_needs(engine: Engine, gate: Gate) -> None:
    gradient = send_to_host(engine, numbers(0))
    gradient.add_(send_to_host(engine, numbers(1)))
    others = [send_to_host(engine, numbers(seed)) for seed in range(2, 6)]
    acquired = engine.stats.take()["host_acquired_bytes"]
    gate.opened.set()
    torch.testing.assert_close(gradient.clone(), numbers(0) + numbers(1))
    assert engine.stats.take()["host_acquired_bytes"] == acquired * 5 // 6
    for seed, other in enumerate(others, start=2):
        assert torch.equal(other.clone(), numbers(seed))


def test_an_addition_outlives_its_gradient(engine: Engine, gate: Gate) -> None:
    gradient = send_to_host(engine, numbers(0))
    gradient.add_(send_to_host(engine, numbers(1)))
    del gradient
    assert engine.stats.take()["host_acquired_bytes"] > 0
    gate.opened.set()


def test_new_gradients_take_the_place_of_those_being_added(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow additions are, two gradients of each parameter are all there is."""
    engine = new_engine()
    kernel = kernel_of(torch.float32)

    def late(pairs: Sequence[Addends]) -> list[float]:
        time.sleep(0.01)
        return kernel(pairs)

    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: late)
    sums = [send_to_host(engine, numbers(seed)) for seed in range(4)]
    held_bytes = engine.pool.allocated_bytes
    for part in range(1, 4):
        more = [send_to_host(engine, numbers(seed + part)) for seed in range(4)]
        for gradient, other in zip(sums, more, strict=True):
            gradient.add_(other)
        del more, other
    assert engine.pool.allocated_bytes == 2 * held_bytes
    for seed, gradient in enumerate(sums):
        torch.testing.assert_close(gradient.clone(), sum((numbers(seed + part) for part in range(1, 4)), numbers(seed)))


def test_an_addition_that_fails_is_raised_by_whoever_reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(pairs: Sequence[Addends]) -> list[float]:
        raise RuntimeError("injected")

    gradient, more = send_to_host(engine, numbers(0)), send_to_host(engine, numbers(1))
    with monkeypatch.context() as patch:
        patch.setattr(host_gradient, "kernel_of", lambda _: failing)
        gradient.add_(more)
    gradient.add_(more)
    for read in (torch.linalg.vector_norm, Tensor.clone, Tensor.zero_):
        with pytest.raises(InvariantError, match=r"size \(3000,\) is lost.*injected.*repeat the step"):
            read(gradient)
    assert torch.equal(more.clone(), numbers(1))


def test_gradients_of_an_engine_that_is_closed_are_added(engine: Engine) -> None:
    gradient, more = send_to_host(engine, numbers(0)), send_to_host(engine, numbers(1))
    gradient.add_(more)
    engine.close()
    gradient.add_(more)
    torch.testing.assert_close(gradient.clone(), numbers(0) + 2 * numbers(1))


ACTIONS = [
    "add",
    "add plain",
    "add twice",
    "add alpha",
    "scale",
    "norm",
    "zero",
    "write",
    "scale other",
    "change other",
]


@settings(max_examples=40)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=12), delay_ms=st.sampled_from([0, 2]))
def test_any_use_of_gradients_is_that_of_ordinary_ones(actions: list[str], delay_ms: int) -> None:
    engine = Engine(torch.device("cpu"), host_budget_bytes=1 << 24, streams=FaultyCpuStreams(delay_s=delay_ms / 1000))
    try:
        sums, others = (numbers(0), send_to_host(engine, numbers(0))), (numbers(1), send_to_host(engine, numbers(1)))
        for seed, action in enumerate(actions, start=2):
            if action == "add":
                others = numbers(seed), send_to_host(engine, numbers(seed))
            found = []
            for total, other in zip(sums, others, strict=True):
                if action == "add plain":
                    total.add_(numbers(seed))
                elif action == "add alpha":
                    total.add_(other, alpha=0.25)
                elif action.startswith("add"):
                    total.add_(other)
                elif action == "scale":
                    total.mul_(0.5)
                elif action == "norm":
                    found.append(torch.linalg.vector_norm(total))
                elif action == "zero":
                    total.zero_()
                elif action == "write":
                    total[:7] = 2.0
                elif action == "scale other":
                    other.mul_(2.0)
                else:
                    other[3:9] = 1.0
                if action == "add twice":
                    total.add_(other)
            if found:
                torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(sums[1].clone(), sums[0])
        torch.testing.assert_close(others[1].clone(), others[0])
    finally:
        engine.close()


@pytest.mark.parametrize("clip", [False, True])
def test_updates_wait_for_additions(monkeypatch: pytest.MonkeyPatch, clip: bool) -> None:  # noqa: FBT001
    how = {"dtype": torch.float32, "steps": 3, "parts": 4, "clip": 0.5 if clip else None}
    expected = trained(home=False, **how)
    kernel = kernel_of(torch.float32)

    def late(pairs: Sequence[Addends]) -> list[float]:
        time.sleep(0.003)
        return kernel(pairs)

    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: late)
    found = trained(home=True, **how)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_step_with_an_addition_that_failed_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(pairs: Sequence[Addends]) -> list[float]:
        raise RuntimeError("injected")

    monkeypatch.setattr(host_gradient, "kernel_of", lambda _: failing)
    model = tencache_fx.offload(network())
    run, optimizer = compiled(model), AdamW(model.parameters(), lr=0.1)
    for part in range(2):
        tokens = batch(part)
        nn.functional.cross_entropy(run(tokens), (tokens * 7 + 3) % 128).backward()
    (engine,) = engines()
    before = {home.name: home.host.clone() for home in parameters_of(engine)}
    assert any(isinstance(p.grad, HostGradient) for p in model.parameters())
    optimizer.step()
    with pytest.raises(InvariantError, match="could not be updated: .*injected"):
        run(batch(0))
    assert [home.name for home in parameters_of(engine) if not torch.equal(home.host, before[home.name])] == []
    with pytest.warns(UserWarning, match="could not be updated"):
        tencache_fx.close()


@pytest.mark.parametrize("what", ["an activation", "state on disk"])
def test_others_wait_for_the_memory_of_what_is_added(new_engine: Callable[..., Engine], gate: Gate, what: str) -> None:
    nbytes = round_up(4 * COUNT, PAGE_BYTES)
    engine = new_engine(host_budget_bytes=2 * nbytes)
    gradient = send_to_host(engine, numbers(0))
    gradient.add_(send_to_host(engine, numbers(1)))  # its memory is free once it is added
    timer = threading.Timer(0.2, gate.opened.set)
    timer.start()
    if what == "an activation":
        handle = engine.offload(numbers(2), Tier.HOST)
        assert torch.equal(engine.wait(engine.prefetch(handle)), numbers(2))
    else:
        state = DiskState(parameters_of(engine).disk_line, numbers(2), {"a": FP32}, {"a": numbers(2)}, "it")
        assert torch.equal(state.read()["a"], numbers(2))
    timer.join()
    assert torch.equal(gradient.clone(), numbers(0) + numbers(1))
    engine.close()  # the line keeps its buffers up to then
