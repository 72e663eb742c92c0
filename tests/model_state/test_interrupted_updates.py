"""Ctrl-C while updates begin: each parameter and its state are those of before, or those of behind the step."""

import copy
import threading
from typing import Any

import pytest
import torch
from interrupts import Interrupts
from torch import Tensor, nn

import tencache_fx
from tencache_fx.optim import AdamW

WIDTH = 144  # state of a matrix has a mapping of its own
BEGINNING = ("optimizer.py", "update.py", "update_queue.py", "offloaded_parameter.py", "host_gradient.py", "worker.py")
Each = tuple[Tensor, dict[str, Any]]


class Training:
    """A model whose parameters and state may be set to what they were."""

    def __init__(self, *, now: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(4)]
        self.model = tencache_fx.offload(nn.Sequential(*layers), "cpu")
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, step_in_backward=now)
        options = {"device_budget": "500kB", "compiler": "eager", "calibrate": False}
        self.run = torch.compile(self.model, backend="tencache", options=options)

    def begin(self) -> Tensor:
        torch.manual_seed(1)
        return self.run(torch.randn(64, WIDTH)).square().mean()

    def step(self) -> None:
        self.begin().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def found(self) -> list[Each]:
        state = self.optimizer.state_dict()["state"]
        weights = self.model.state_dict().values()
        return copy.deepcopy([(weight, state[index]) for index, weight in enumerate(weights)])

    def found_elsewhere(self) -> list[Each] | None:
        """Return what there is, read in another thread; None if that waits for ever."""
        read: list[list[Each]] = []
        reader = threading.Thread(target=lambda: read.append(self.found()), daemon=True)
        reader.start()
        reader.join(20)
        return read[0] if read else None


def are_same(one: Each, other: Each) -> bool:
    values, others = one[1], other[1]
    same = values.keys() == others.keys() and all(torch.equal(values[name], others[name]) for name in values)
    return same and torch.equal(one[0], other[0])


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # within __del__
@pytest.mark.parametrize(("now", "every"), [(False, 13), (True, 7)], ids=["in step()", "in backward()"])
def test_an_interrupt_as_an_update_begins_leaves_no_mixture_of_steps(now: bool, every: int) -> None:  # noqa: FBT001
    training = Training(now=now)
    for _ in range(2):
        training.step()
    weights, state = copy.deepcopy(training.model.state_dict()), copy.deepcopy(training.optimizer.state_dict())
    steps = [training.found()]
    training.step()
    steps.append(training.found())
    interrupts, mixed = Interrupts(BEGINNING), 0
    for at in range(0, 10**6, every):
        training.optimizer.zero_grad()
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(copy.deepcopy(state))
        loss = training.begin()
        if not now:
            loss.backward()
        interrupts.run(loss.backward if now else training.optimizer.step, at)
        if not interrupts.where:
            break
        found = training.found_elsewhere()
        assert found is not None, interrupts.where
        of = [[are_same(each, step[index]) for step in steps] for index, each in enumerate(found)]
        assert all(map(any, of)), interrupts.where
        mixed += len({each[1] for each in of}) == 2
        training.optimizer.zero_grad()
        training.step()  # and what goes on does so
        assert training.found_elsewhere() is not None, interrupts.where
    assert mixed
    tencache_fx.close()
