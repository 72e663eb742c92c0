"""Gradients that leave a step another way than by one `backward()`: they have the same bits, and nothing is held."""

from collections.abc import Callable, Iterator

import pytest
import torch
from combinations import each_in_a_quick_case
from conftest import collect, eventually
from harness import faulty_engine
from test_step_plans import blocks, equal, gradients, inputs, one_by_one, recorder
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import UsageError
from tencache_fx.planning.step import FRUGAL
from tencache_fx.runtime.engine import Engine

STEPS = 4

Way = Callable[[nn.Sequential, int], list[Tensor]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with faulty_engine(host_budget_bytes=1 << 28) as found:
        yield found


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def asked_for(model: nn.Sequential, step: int) -> list[Tensor]:
    loss = model(inputs(step)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def asked_for_some(model: nn.Sequential, step: int) -> list[Tensor]:
    """The backward ends in the middle: that of the first blocks never runs."""
    loss = model(inputs(step)).square().mean()
    return list(torch.autograd.grad(loss, list(model[4:].parameters())))


def of_some_inputs(model: nn.Sequential, step: int) -> list[Tensor]:
    model(inputs(step)).square().mean().backward(inputs=list(model[5:].parameters()))
    return grads(model)


def of_the_input(model: nn.Sequential, step: int) -> list[Tensor]:
    x = inputs(step).requires_grad_()
    (of_x,) = torch.autograd.grad(model(x).square().mean(), [x])
    return [of_x]


def replaced_by_hooks(model: nn.Sequential, step: int) -> list[Tensor]:
    """Of a value between blocks, and of parameters."""
    hooks = [parameter.register_hook(lambda gradient: gradient * 2) for parameter in model[2].parameters()]
    x = model[:4](inputs(step))
    x.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    model[4:](x).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return grads(model)


def replaced_by_module_hooks(model: nn.Sequential, step: int) -> list[Tensor]:
    hook = model.register_full_backward_hook(lambda module, given, made: tuple(each * 3 for each in given))
    x = inputs(step).requires_grad_()
    model(x).square().mean().backward()
    hook.remove()
    assert x.grad is not None
    return [x.grad, *grads(model)]


def as_they_accumulate(model: nn.Sequential, step: int) -> list[Tensor]:
    """Each gradient is taken as soon as it is there, and dropped."""
    taken: list[Tensor] = []

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        taken.append(parameter.grad)
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in model.parameters()]
    model(inputs(step)).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return taken


def of_two_losses(model: nn.Sequential, step: int) -> list[Tensor]:
    """Of two forwards that end together, the first of them last."""
    first, second = model(inputs(2 * step)).square().mean(), model(inputs(2 * step + 1)).mean()
    second.backward()
    first.backward()
    return grads(model)


def of_losses_on_the_way(model: nn.Sequential, step: int) -> list[Tensor]:
    """A loss at each block, all of them in one backward, some of which are worth nothing."""
    x, losses = inputs(step), []
    for block in model:
        x = block(x)
        losses.append(x.square().mean())
    torch.autograd.backward(losses, [torch.tensor(float(k % 3)) for k in range(len(losses))])
    return grads(model)


def cut_off(model: nn.Sequential, step: int) -> list[Tensor]:
    """The forward of the first blocks is never differentiated."""
    model[3:](model[:3](inputs(step)).detach()).square().mean().backward()
    return grads(model)


def dropped(model: nn.Sequential, step: int) -> list[Tensor]:
    """A forward whose loss is dropped, before one whose loss is not."""
    model(inputs(step + 9)).mean()
    model(inputs(step)).square().mean().backward()
    return grads(model)


def kept(model: nn.Sequential, step: int) -> list[Tensor]:
    """A loss of the step before is still there, with all that its backward would read, and is never differentiated."""
    before = KEPT.pop() if KEPT else None
    KEPT.append(model(inputs(step + 9)).mean())
    model(inputs(step)).square().mean().backward()
    del before
    return grads(model)


KEPT: list[Tensor] = []

WAYS: list[Way] = [
    asked_for,
    asked_for_some,
    of_some_inputs,
    of_the_input,
    replaced_by_hooks,
    replaced_by_module_hooks,
    as_they_accumulate,
    of_two_losses,
    of_losses_on_the_way,
    cut_off,
    dropped,
    kept,
]


def run(way: Way, model: nn.Sequential) -> list[list[Tensor]]:
    found = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        found.append(way(model, step))
    KEPT.clear()
    return found


@each_in_a_quick_case(way=WAYS, scope=["step", "auto"])
def test_gradients_are_the_same_and_nothing_is_held(engine: Engine, way: Way, scope: str) -> None:
    wanted = run(way, one_by_one(blocks(), "aot_eager_decomp_partition"))
    torch.compiler.reset()
    # Two forwards wait at once, or the gradients of all steps are kept.
    budget = 11_000_000 if way in (kept, of_two_losses, asked_for, as_they_accumulate) else 6_200_000
    model = one_by_one(blocks(), device_budget=budget, scope=scope)
    for step, (mine, theirs) in enumerate(zip(run(way, model), wanted, strict=True)):
        assert equal(mine, theirs), f"step {step}"
    collect()
    points = recorder(engine).points
    assert eventually(lambda: points.in_use == 0)
    model.zero_grad(set_to_none=True)
    for step in range(3):
        gradients(model, model, inputs(step))
    assert points.extra_bytes == points.in_use == 0
    if scope == "step":
        assert points.schedule is not FRUGAL
        assert tencache_fx.steps()


def twice(model: nn.Sequential, step: int) -> list[Tensor]:
    loss = model(inputs(step)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


def two_losses_of_one_forward(model: nn.Sequential, step: int) -> list[Tensor]:
    x = model(inputs(step))
    x.square().mean().backward(retain_graph=True)
    x.mean().backward()
    return grads(model)


def differentiated_twice(model: nn.Sequential, step: int) -> list[Tensor]:
    x = inputs(step).requires_grad_()
    (of_x,) = torch.autograd.grad(model(x).square().mean(), [x], create_graph=True)
    of_x.square().mean().backward()
    return grads(model)


DONATED = "compiled with non-empty donated buffers which requires create_graph=False and retain_graph=False"
ONCE = rf"a second time: a region with a plan has one backward.*call backward once, without retain_graph|{DONATED}"


@pytest.mark.parametrize(
    ("way", "refusal"),
    [
        (twice, ONCE),
        (two_losses_of_one_forward, ONCE),
        (differentiated_twice, f"does not currently support double backward|{DONATED}"),
    ],
)
def test_what_takes_a_graph_twice_is_refused(engine: Engine, way: Way, refusal: str) -> None:
    """In one sentence of ours or torch's; the steps behind it are right, and planned as ever."""
    model, plain = one_by_one(blocks(), device_budget=6_200_000), one_by_one(blocks(), "aot_eager_decomp_partition")
    gradients(model, model, inputs())
    for step in range(3):
        with pytest.raises((UsageError, RuntimeError), match=refusal):
            way(model, step)
        assert equal(gradients(model, model, inputs(step)), gradients(plain, plain, inputs(step)))
    for step in range(2):  # what is recomputed may have been decided in the last one
        gradients(model, model, inputs(step))
    points = recorder(engine).points
    assert points.schedule is not FRUGAL
    assert points.extra_bytes == points.in_use == 0
