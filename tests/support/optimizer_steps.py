"""Weights and states of an optimizer after a step, and what interrupts at many lines of a step leave of them."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from interrupts import Interrupts
from torch import Tensor, nn

from tencache_fx.errors import TencacheError
from tencache_fx.model_state.parameter_store import find_offloaded

OneStep = tuple[Tensor, dict[str, Any]]
"""A parameter's weight and state."""


def found(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[OneStep]:
    """Return weights and states; no reader of a weight may wait for ever."""
    for parameter in model:
        offloaded = find_offloaded(parameter)
        assert offloaded is None or not offloaded.updating
    saved = optimizer.state_dict()["state"]
    return [(value.clone(), copy.deepcopy(saved.get(at, {}))) for at, value in enumerate(model.state_dict().values())]


def are_same(one: OneStep, other: OneStep) -> bool:
    return (
        torch.equal(one[0], other[0])
        and one[1].keys() == other[1].keys()
        and all(torch.equal(torch.as_tensor(one[1][name]), torch.as_tensor(other[1][name])) for name in one[1])
    )


def interrupt_steps(
    begin: Callable[[], tuple[nn.ParameterList, torch.optim.Optimizer]],
    files: Collection[str],
    apart: int,
    expected: Sequence[list[OneStep]],
    interrupted: Callable[[], object] = lambda: None,
) -> tuple[int, list[str]]:
    """Interrupt the step of what `begin` makes, each time anew, at one line in `apart` of those in these `files`.

    Weight and state of each parameter have to be of one of the `expected` steps, or an error has to say that they may
    not be. Return how often they were, and what the errors said. `interrupted` is called behind each interrupt.
    """
    interrupts, at, whole = Interrupts(files), 0, 0
    told: list[str] = []
    while True:
        model, optimizer = begin()
        if not interrupts.run(optimizer.step, at):
            return whole, told
        interrupted()
        try:
            for index, each in enumerate(found(model, optimizer)):
                assert any(are_same(each, step[index]) for step in expected), interrupts.where
            whole += 1
        except TencacheError as error:
            told.append(str(error))
        at += apart
