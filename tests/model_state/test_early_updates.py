"""Updates that begin where a gradient leaves: only where that is all of it, and with what nobody has changed since."""

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from conftest import collect, eventually
from harness import Block
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import UsageError
from tencache_fx.model_state.step_hooks import is_hooked_once
from tencache_fx.model_state.update import ParameterUpdate
from tencache_fx.model_state.update_protocol import Submit
from tencache_fx.optim import AdamW
from tencache_fx.runtime.streams import Event

HIDDEN = 160
STEPS = 4

Loss = Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor]


def once(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run(x).square().mean()


def twice(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (run(x) + run(2 * x)).square().mean()


def beside_itself(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """One block is run by itself as well."""
    return (run(x) + model[1](x)).square().mean()


def beside_another_region(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    options = {"device_budget": "1MB", "compiler": "eager", "calibrate": False}
    other = torch.compile(model[1], backend="tencache", options=options)
    return (run(x) + other(x)).square().mean()


def with_one_forward_for_nothing(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    run(x)
    return run(2 * x).square().mean()


def with_views_of_the_results(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run(x).view(-1)[3:].square().mean()


def hooked(model: nn.Module) -> None:
    model[1].into.weight.register_hook(lambda gradient: gradient * 2)


def doubled(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def watched(model: nn.Module) -> None:
    """The gradient of one is changed by a hook that was there before the optimizer's."""
    model[1].into.weight.register_post_accumulate_grad_hook(doubled)


@pytest.mark.parametrize(
    ("loss_of", "prepare", "all_early"),
    [
        (once, None, True),
        (twice, None, False),
        (beside_itself, None, False),
        (beside_another_region, None, False),
        (with_one_forward_for_nothing, None, True),
        (with_views_of_the_results, None, True),
        (once, hooked, False),
        (once, watched, False),
    ],
)
@pytest.mark.parametrize("budget", ["1MB", pytest.param(None, marks=pytest.mark.slow)])
def test_they_are_those_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
    loss_of: Loss,
    prepare: Callable[[nn.Module], None] | None,
    all_early: bool,  # noqa: FBT001
    budget: str | None,
) -> None:
    begun: list[bool] = []
    begin_update = AdamW._begin_update

    def noting(self: AdamW, update: ParameterUpdate, submit: Submit, readers: Event | None) -> None:
        begun.append(readers is None)
        begin_update(self, update, submit, readers)

    monkeypatch.setattr(AdamW, "_begin_update", noting)
    torch.manual_seed(0)
    first = nn.Sequential(*(Block(HIDDEN) for _ in range(3)))
    found = []
    for now in (False, True):
        begun.clear()
        model = tencache_fx.offload(copy.deepcopy(first))
        if prepare is not None:
            prepare(model)
        optimizer = AdamW(model.parameters(), lr=1e-2, step_in_backward=now)
        options = {"device_budget": budget, "compiler": "eager", "calibrate": False, "recompute": "none"}
        run = torch.compile(model, backend="tencache", options=options)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, run, torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((losses, weights, list(begun)))
        torch.compiler.reset()
        tencache_fx.close()
    (losses, weights, in_step), (losses_now, weights_now, early) = found
    assert losses_now == losses
    torch.testing.assert_close(weights_now, weights, rtol=0, atol=0)
    assert not any(in_step)
    parameters = 6  # with a home
    if all_early:
        assert early == [False] * parameters + [True] * parameters * (STEPS - 1)
    else:
        assert 0 <= sum(early) < parameters * (STEPS - 1)
        assert len(early) <= parameters * STEPS  # the other region may have some updated on the device


def test_an_optimizer_is_not_kept_alive_by_its_parameters() -> None:
    model = tencache_fx.offload(nn.Sequential(Block(HIDDEN)))
    optimizer = AdamW(model.parameters(), step_in_backward=True)
    options = {"device_budget": "1MB", "compiler": "eager", "calibrate": False}
    run = torch.compile(model, backend="tencache", options=options)
    run(torch.randn(8, HIDDEN)).square().mean().backward()
    gone = weakref.ref(optimizer)
    del optimizer
    model.state_dict()  # waits for the updates, which count

    def is_gone() -> bool:
        collect()
        return gone() is None

    assert eventually(is_gone)


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_a_backward_that_asks_for_other_gradients_updates_nothing(how: str) -> None:
    model = tencache_fx.offload(nn.Sequential(Block(HIDDEN)))
    optimizer = AdamW(model.parameters(), step_in_backward=True)
    options = {"device_budget": "1MB", "compiler": "eager", "calibrate": False}
    run = torch.compile(model, backend="tencache", options=options)
    for _ in range(2):
        run(torch.randn(8, HIDDEN)).square().mean().backward()
    optimizer.state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, HIDDEN, requires_grad=True)
    loss = run(x).square().mean()
    if how == "grad":
        torch.autograd.grad(loss, [x])
    else:
        loss.backward(inputs=[x])
    optimizer.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert int(optimizer.state[model[0].into.weight]["step"]) == 2


def test_a_gradient_that_has_unknown_parts_is_not_taken_twice() -> None:
    model = tencache_fx.offload(nn.Sequential(Block(HIDDEN)))
    optimizer = AdamW(model.parameters(), step_in_backward=True)
    run = torch.compile(model, backend="tencache", options={"compiler": "eager", "calibrate": False})
    run(torch.randn(8, HIDDEN)).square().mean().backward()
    assert optimizer.state
    with pytest.raises(UsageError, match=r"0\.into\.weight was updated by a gradient that is a part of it only"):
        (run(torch.randn(8, HIDDEN)).square().mean() + model[0].into.weight.square().sum()).backward()


@pytest.mark.parametrize("now", [False, True])
def test_inside_summon_an_optimizer_of_ours_leaves_the_weights_there(now: bool) -> None:  # noqa: FBT001
    found = []
    for summoned in (False, True):
        torch.manual_seed(0)
        model = tencache_fx.offload(nn.Sequential(Block(HIDDEN)))
        optimizer = AdamW(model.parameters(), step_in_backward=now)
        run = torch.compile(model, backend="tencache", options={"compiler": "eager", "calibrate": False})
        with tencache_fx.summon(model) if summoned else contextlib.nullcontext():
            run(torch.ones(8, HIDDEN)).square().mean().backward()
            optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        torch.compiler.reset()
        tencache_fx.close()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_after_a_backward_that_failed_training_goes_on() -> None:
    """Updates that had begun before the failure are not taken for parts of the next gradients."""
    model = tencache_fx.offload(nn.Sequential(Block(HIDDEN), Block(HIDDEN)))
    optimizer = AdamW(model.parameters(), step_in_backward=True)
    options = {"device_budget": "1MB", "compiler": "eager", "calibrate": False}
    run = torch.compile(model, backend="tencache", options=options)
    failing = [False]

    def fail(gradient: Tensor) -> None:
        if failing[0]:
            raise RuntimeError("injected")

    model[0].norm.weight.register_hook(fail)
    kept = []
    for step in range(4):
        failing[0] = step == 2
        loss = run(torch.randn(8, HIDDEN)).square().mean()
        kept.append(loss)  # so that its graph does not die
        with pytest.raises(RuntimeError, match="injected") if failing[0] else contextlib.nullcontext():
            loss.backward()
    model(torch.randn(8, HIDDEN)).square().mean().backward()
    optimizer.state_dict()
    assert int(optimizer.state[model[1].into.weight]["step"]) == 5


def test_a_parameter_that_is_frozen_between_steps_is_left_alone() -> None:
    found = []
    for now in (False, True):
        torch.manual_seed(0)
        model = tencache_fx.offload(nn.Sequential(Block(HIDDEN), Block(HIDDEN)))
        optimizer = AdamW(model.parameters(), step_in_backward=now)
        run = torch.compile(model, backend="tencache", options={"compiler": "eager", "calibrate": False})
        for step in range(4):
            loss = run(torch.ones(8, HIDDEN)).square().mean()
            model[1].requires_grad_(requires_grad=step % 2 == 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        torch.compiler.reset()
        tencache_fx.close()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_second_optimizer_takes_the_place_of_one_that_is_gone() -> None:
    model = tencache_fx.offload(nn.Sequential(Block(HIDDEN)))
    run = torch.compile(model, backend="tencache", options={"compiler": "eager", "calibrate": False})
    weight = model[0].into.weight
    for _ in range(3):
        optimizer = AdamW(model.parameters(), step_in_backward=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                run(torch.ones(8, HIDDEN)).square().mean().backward()
        assert weight.grad is None
        model.state_dict()  # waits for updates, which keep their optimizer
        assert eventually(lambda: is_hooked_once(weight))
    gone = weakref.ref(optimizer)
    del optimizer
    assert eventually(lambda: gone() is None)
    with pytest.warns(UserWarning, match="the optimizer that was made with step_in_backward=True .* is gone"):
        run(torch.ones(8, HIDDEN)).square().mean().backward()
    assert weight.grad is not None
