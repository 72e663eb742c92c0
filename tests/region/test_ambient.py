"""What tracing may leave changed: no trace sees it of the one before, and nobody of a compilation between two steps."""

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from harness import EAGER
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import tencache_fx
from tencache_fx.region import ambient_state, compilation
from tencache_fx.region.compilation import Compilation
from tencache_fx.region.compiled_region import CompiledRegion
from tencache_fx.region.lowering import PlannedLowering
from tencache_fx.region.registry import REGIONS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def set_back() -> object:
    with ambient_state.unchanged(CPU):
        yield


def layers(x: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.exp(torch.tanh(x))
    return x


def ends_without_gradients(x: Tensor) -> Tensor:
    result = layers(x)
    torch.set_grad_enabled(False)
    return result


def ends_in_double(x: Tensor) -> Tensor:
    result = layers(x) * torch.ones(x.shape[1])
    torch.set_default_dtype(torch.float64)
    return result


def ends_deterministic(x: Tensor) -> Tensor:
    result = layers(x)
    torch.use_deterministic_algorithms(True)
    return result


def ends_without_forward_gradients(x: Tensor) -> Tensor:
    result = layers(x)
    torch._C._set_fwd_grad_enabled(False)
    return result


ENDS = (ends_without_gradients, ends_in_double, ends_deterministic, ends_without_forward_gradients)


def state() -> dict[str, object]:
    return {
        "gradients": torch.is_grad_enabled(),
        "forward gradients": torch._C._is_fwd_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "drawn": torch.get_rng_state().tolist(),
        "drawn by Python": random.getstate(),
    }


@pytest.fixture
def twice_traced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Have the first code of each region hold too much; the list gets the state in which each trace begins."""
    found: list[dict[str, object]] = []
    run, finish = Compilation.run, PlannedLowering.finish

    def trace(self: Compilation, *args: object) -> object:
        found.append(state())
        return run(self, *args)

    def finish_as_forecast(self: PlannedLowering, *args: object) -> CompiledRegion:
        compiled = finish(self, *args)
        assert compiled.record is not None
        record = dataclasses.replace(compiled.record, code_peak_bytes=compiled.record.plan.forecast.peak_bytes)
        return dataclasses.replace(compiled, record=record)

    monkeypatch.setattr(Compilation, "run", trace)
    monkeypatch.setattr(PlannedLowering, "finish", finish_as_forecast)
    monkeypatch.setattr(compilation, "_over_bytes", lambda source, record: len(found) % 2)
    return found


@pytest.mark.parametrize("function", ENDS)
def test_each_trace_begins_alike(function: Callable[[Tensor], Tensor], twice_traced: list[dict[str, object]]) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    results, states = [], []
    for backend, options in (
        ("aot_eager_decomp_partition", None),
        ("tencache", {**EAGER, "device_budget": 10_000_000}),
    ):
        torch.compiler.reset()
        with ambient_state.unchanged(CPU):
            results.append(torch.compile(function, backend=backend, options=options)(x))
            states.append(state())
    assert len(twice_traced) == 2
    first, second = twice_traced
    assert first == second
    assert torch.equal(*results)
    assert states[0] == states[1]
    assert torch.is_grad_enabled()
    (wanted,) = torch.autograd.grad(results[0].sum(), x)
    (found,) = torch.autograd.grad(results[1].sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", ENDS)
def test_compiling_between_steps_changes_nothing(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger inputs are planned for when they come. The mode of gradients AOTAutograd sets as the region does."""
    draws, trace_once = [], Compilation.run

    def trace(self: Compilation, *args: object) -> object:
        draws.append((torch.rand(1), random.random()))
        torch.set_autocast_enabled("cpu", len(draws) > 1)
        return trace_once(self, *args)

    monkeypatch.setattr(Compilation, "run", trace)
    run = torch.compile(function, backend="tencache", dynamic=True, options={**EAGER, "device_budget": 400_000})
    with ambient_state.unchanged(CPU):
        first = run(torch.randn(96, 64, requires_grad=True))
    first.sum().backward()
    before, compiled = state(), REGIONS.compilations
    with torch.random.fork_rng():
        x = torch.randn(128, 64, requires_grad=True)
    result = run(x)
    assert REGIONS.compilations > compiled, "it was not planned anew"
    assert tencache_fx.regions()[-1].plan.transfers
    after = state()
    assert after.pop("gradients") is (function is not ends_without_gradients)
    before.pop("gradients")
    assert {name for name in after if after[name] != before[name]} == set()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(result.sum(), x)
        (wanted,) = torch.autograd.grad(layers(x).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_autocast_and_random_numbers_are_set_back() -> None:
    before = state()
    with ambient_state.unchanged(CPU):
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
        torch.rand(3)
        random.random()
        assert state() != before
    assert state() == before
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()


def test_what_fails_is_set_back_too() -> None:
    def fail() -> None:
        with ambient_state.unchanged(CPU):
            torch.set_grad_enabled(False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.is_grad_enabled()


def test_a_region_is_compiled_again_with_the_compilers_settings_of_its_first_time() -> None:
    """A pass over the joint graph that is set around the first call only, and a setting of Inductor beside it."""
    seen: list[int] = []
    default = inductor_config.max_fusion_size

    def note(gm: fx.GraphModule, inputs: object) -> fx.GraphModule:
        seen.append(inductor_config.max_fusion_size)
        return gm

    run = torch.compile(layers, backend="tencache", dynamic=True, options={**EAGER, "device_budget": 400_000})
    with functorch_config.patch(joint_custom_pass=note), inductor_config.patch(max_fusion_size=default + 7):
        run(torch.randn(96, 64, requires_grad=True)).sum().backward()
    compiled, traced = REGIONS.compilations, len(seen)
    assert traced
    run(torch.randn(128, 64, requires_grad=True)).sum().backward()
    assert REGIONS.compilations > compiled, "it was not planned anew"
    assert len(seen) > traced
    assert set(seen) == {default + 7}
    assert functorch_config.joint_custom_pass is None
    assert inductor_config.max_fusion_size == default
