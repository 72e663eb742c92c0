"""A CPU whose allocator counts as an accelerator's does, and models to train on it."""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tencache_fx
from tencache_fx.hardware import memory_gauge
from tencache_fx.hardware.device_memory import AllocatorCounts
from tencache_fx.kept_code import Phase
from tencache_fx.region import boundary_memory, budget_check, environment, step_planner
from tencache_fx.region.compiled_region import Compiled, WrittenPlan, keep_boxed
from tencache_fx.region.step_monitor import StepMonitor
from tencache_fx.runtime.swap_points import SwapPoints
from tencache_fx.runtime.transfers import Layout

ROWS, WIDTH = 1024, 64
VALUE = 4 * ROWS * WIDTH  # bytes of one activation


class Meter(TorchDispatchMode):
    """Counts the bytes of a CPU's tensors, as an accelerator's allocator does: those made while it is there."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = self.ever = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            result = self._run_bodies(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" and each.layout is torch.strided:
                self._meet(each.untyped_storage())
        return result

    def _run_bodies(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """Run an op that runs graphs: what it makes within them counts, and of most ops all that they make."""
        run = func.py_kernels[DispatchKey.CompositeExplicitAutograd]
        if func.name() not in ("cond", "scan"):
            with self:
                return run(*args, **kwargs)

        def metered(body: Callable[..., Any]) -> Callable[..., Any]:  # these two refuse to run in a mode
            def call(*given: Any) -> Any:
                with self:
                    return body(*given)

            return call

        with _disable_current_modes():
            return run(*(metered(each) if callable(each) else each for each in args), **kwargs)

    def _meet(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or storage.nbytes() < 1024:
            return
        self._known.add(storage._cdata)
        self.held += storage.nbytes()
        self.ever += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._lose, storage._cdata, storage.nbytes())

    def _lose(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes


def metered_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Meter]:
    """Have the backend take a CPU for a device whose allocator counts."""
    found = Meter()

    def forget(device: torch.device) -> None:
        found.peak = found.held

    instrument = boundary_memory.BoundaryMemory.instrument

    def metered(
        self: boundary_memory.BoundaryMemory, phase: Phase, run: Callable[..., Any], written: WrittenPlan
    ) -> Callable[..., Any]:
        """Count what a compiled forward makes: torch compiles nothing that is called under a mode."""

        def run_metered(*args: Any) -> Any:
            with found:
                return run(*args)

        run_metered._boxed_call = getattr(run, "_boxed_call", False)  # type: ignore[attr-defined]
        return instrument(self, phase, run if phase == "backward" else run_metered, written)

    monkeypatch.setattr(boundary_memory.BoundaryMemory, "instrument", metered)
    for module in (budget_check, environment):
        monkeypatch.setattr(module, "held_bytes", lambda device: found.held)
    monkeypatch.setattr(
        boundary_memory, "allocator_counts", lambda device: AllocatorCounts(found.held, found.peak, found.ever)
    )
    monkeypatch.setattr(boundary_memory, "forget_peak", forget)
    caplog.set_level(logging.INFO, "tencache_fx")
    torch.compiler.reset()
    gc.collect()  # optimizers of other tests might be expected to make state
    yield found
    torch.compiler.reset()
    tencache_fx.close()


@contextlib.contextmanager
def counting_steps() -> Iterator[Meter]:
    """Have the regions of steps take a CPU for a device whose allocator counts, as a GPU's does.

    Other work than compiled forwards counts if it runs within the meter, as backwards have to.
    """
    found, instrument, empty = Meter(), StepMonitor.instrument, Layout.empty

    def metered(self: StepMonitor, phase: Phase, run: Compiled, written: WrittenPlan) -> Compiled:
        def run_metered(*args: object) -> object:
            with found:
                return run(*args)

        return instrument(self, phase, keep_boxed(run, run_metered), written)

    def unmetered(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_unmetered(*args: Any, **more: Any) -> Any:
            with _disable_current_modes():  # buffers in host memory are none of the device
                return call(*args, **more)

        return call_unmetered

    def met(self: Layout) -> Tensor:
        tensor = empty(self)
        found._meet(tensor.untyped_storage())
        return tensor

    def counts(device: torch.device) -> AllocatorCounts:
        return AllocatorCounts(found.held, found.peak, found.ever)

    def forget(device: torch.device) -> None:
        found.peak = found.held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepMonitor, "instrument", metered)
        patch.setattr(Layout, "empty", met)
        for name in ("begin", "end", "follow", "make_room"):
            patch.setattr(SwapPoints, name, unmetered(getattr(SwapPoints, name)))
        patch.setattr(
            memory_gauge, "allocator_counts", lambda device: AllocatorCounts(found.held, found.peak, found.ever)
        )
        patch.setattr(memory_gauge, "counts_all", lambda device: True)
        patch.setattr(memory_gauge, "forget_peak", forget)
        for module in (budget_check, environment, step_planner):
            patch.setattr(module, "held_bytes", lambda device: found.held)
        yield found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(count)))


def wide_loss(result: Tensor) -> Tensor:
    """Take twelve activations' worth of memory."""
    return result.repeat(1, 4).cos().square().mean()


def train(meter: Meter, forward: Callable[[Tensor], Tensor], model: nn.Module, steps: int = 6) -> tuple[list[int], Any]:
    """Return the peak of each step, and the gradients of the last."""
    peaks = []
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        meter.peak = meter.held
        result = forward(inputs)
        with meter:
            wide_loss(result).backward()
        del result
        peaks.append(meter.peak)
    return peaks, [parameter.grad for parameter in model.parameters()]


OPTIONS = {"compiler": "eager", "recompute": "none", "calibrate": False, "scope": "region"}


def expected(model: nn.Module, steps: int = 6) -> Any:
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        wide_loss(model(inputs)).backward()
    return [parameter.grad for parameter in model.parameters()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in zip(found, wanted, strict=True))


def over(text: str) -> int:
    return text.count("more than device_budget")
