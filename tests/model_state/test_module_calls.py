"""Calls of modules with offloaded parameters: what Dynamo traces of them, and what runs where it compiles nothing."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import EAGER
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import tencache_fx
from tencache_fx.region.registry import REGIONS

WIDTH = 256
OPTIONS = {**EAGER, "compiler": "eager", "device_budget": "24MB"}


@pytest.fixture(autouse=True)
def engine_is_closed() -> Iterator[None]:
    yield
    torch.compiler.reset()
    tencache_fx.close()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) @ self.scale


class Layers(nn.Module):
    """Layers of one kind, each a frame of its own where the graph `breaks`."""

    def __init__(self, count: int = 3, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = x + layer(x)
        return x.square().mean()


def guard_count(function: Callable[..., Any]) -> int:
    """Return how many lines the guards of a function that is compiled once take."""
    (entry,) = _debug_get_cache_entry_list(function)
    return len(str(entry.guard_manager).splitlines())


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    for mine, true in zip(model.parameters(), plain.parameters(), strict=True):
        assert true.grad is not None
        torch.testing.assert_close(mine.grad, true.grad.to(mine.grad.device), rtol=1e-3, atol=1e-3)


def test_dynamo_guards_no_more_of_an_offloaded_model_than_of_another() -> None:
    counts = []
    for offloads in (False, True):
        model = Layers()
        if offloads:
            tencache_fx.offload(model, "cpu")
        torch.compile(model, backend="tencache", options=OPTIONS, fullgraph=True)(torch.randn(8, WIDTH)).backward()
        counts.append(guard_count(Layers.forward))
        torch.compiler.reset()
    assert counts[1] == counts[0]


def with_hooks(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        layer.second.register_forward_hook(lambda module, args, output: output + 1)
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


def test_modules_with_hooks_are_a_part_of_the_graph() -> None:
    plain, model, x = with_hooks(Layers()), with_hooks(Layers()), torch.randn(8, WIDTH)
    tencache_fx.offload(model, "cpu")
    torch.compile(model, backend="tencache", options=OPTIONS, fullgraph=True)(x).backward()
    plain(x).backward()
    check_gradients(model, plain)


def test_modules_with_hooks_are_compiled_as_often_as_without_offloading() -> None:
    counts = []
    for offloads in (False, True):
        model, before = with_hooks(Layers(12, breaks=True)), REGIONS.compilations
        if offloads:
            tencache_fx.offload(model, "cpu")
        torch.compile(model, backend="tencache", options=OPTIONS)(torch.randn(8, WIDTH)).backward()
        counts.append(REGIONS.compilations - before)
        torch.compiler.reset()
    assert counts[1] == counts[0]


@pytest.mark.parametrize("first", ["offload", "compile"])
def test_a_module_that_is_compiled_in_place_still_loads_what_it_reads_where_it_runs_uncompiled(first: str) -> None:
    plain, model, x = Layer(), Layer(), torch.randn(8, WIDTH)
    model.load_state_dict(plain.state_dict())
    if first == "offload":
        tencache_fx.offload(model, "cpu")
    model.compile(backend="tencache", options=OPTIONS)
    if first == "compile":
        tencache_fx.offload(model, "cpu")
    before = REGIONS.compilations
    torch.testing.assert_close(model(x), plain(x))
    assert REGIONS.compilations == before + 1
    assert model._compiled_call_impl
    assert not model.first._compiled_call_impl  # peft and others take what is true there for a compiled module
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(model(x), plain(x))
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    plain(x).sum().backward()
    assert REGIONS.compilations == before + 1
    check_gradients(model, plain)


def test_a_copy_is_an_ordinary_model_that_can_be_offloaded_and_compiled() -> None:
    plain, model, x = Layers(), Layers(), torch.randn(8, WIDTH)
    tencache_fx.offload(model, "cpu")
    with tencache_fx.summon(model):
        copied = copy.deepcopy(model)
    assert torch.equal(copied(x), plain(x))
    saved = set(copied.state_dict())
    tencache_fx.offload(copied, "cpu")
    del model
    assert torch.equal(copied(x), plain(x))
    assert set(copied.state_dict()) == saved
    for layer in copied.layers:
        layer.compile(backend="tencache", options=OPTIONS)
    before = REGIONS.compilations
    copied(x).backward()
    plain(x).backward()
    assert REGIONS.compilations > before
    check_gradients(copied, plain)


def test_a_module_goes_with_its_last_user() -> None:
    model = tencache_fx.offload(Layer(), "cpu")
    model(torch.randn(8, WIDTH)).sum().backward()
    gone = weakref.ref(model.first)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


class WithState(nn.Linear):
    """Its copies have all that it has, unlike those of torch's own modules."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_with_all_state_runs_itself(duplicate: Callable[[nn.Module], Any]) -> None:
    model = tencache_fx.offload(WithState(WIDTH, WIDTH), "cpu")
    with tencache_fx.summon(model):
        copied = duplicate(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.randn(8, WIDTH)).any()
    del model
    assert not copied(torch.randn(8, WIDTH)).any()


@pytest.mark.parametrize("kind", [nn.Linear, WithState])
def test_a_shallow_copy_is_offloaded_by_itself(kind: type[nn.Linear]) -> None:
    model = tencache_fx.offload(kind(WIDTH, WIDTH), "cpu")
    x, copied = torch.randn(8, WIDTH), copy.copy(model)
    copied.forward = lambda x: nn.functional.linear(x, copied.weight) + 1  # type: ignore[method-assign]
    tencache_fx.offload(copied, "cpu")
    true = model(x) - model.bias + 1
    torch.testing.assert_close(copied(x), true)
    before = REGIONS.compilations
    copied.compile(backend="tencache", options=OPTIONS)
    torch.testing.assert_close(copied(x), true)
    assert REGIONS.compilations == before + 1


class OwnCompile(Layer):
    def compile(self, optimizer: str) -> "OwnCompile":  # type: ignore[override]
        self.optimizer = optimizer
        return self


class Flag(Layer):
    compile = None  # type: ignore[assignment]


def test_what_a_module_has_of_its_own_that_is_called_compile_stays() -> None:
    flagged = Layer()
    flagged.compile = False  # type: ignore[assignment, method-assign]
    for module in (Flag(), flagged):
        flag = module.compile
        tencache_fx.offload(module, "cpu")
        assert module.compile is flag
        module(torch.randn(8, WIDTH))
    own = tencache_fx.offload(OwnCompile(), "cpu")
    assert own.compile("adam") is own
    assert own.optimizer == "adam"
    own(torch.randn(8, WIDTH))
