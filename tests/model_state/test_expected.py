"""The state that optimizers have yet to make: as much as they then do."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.region.optimizer_forecast import expected_state_bytes

CPU = torch.device("cpu")


@pytest.fixture
def expected() -> Callable[[], int]:
    """What is expected beside what other tests may have left."""
    gc.collect()
    before_bytes = expected_state_bytes(CPU)
    return lambda: expected_state_bytes(CPU) - before_bytes


def parameters() -> list[nn.Parameter]:
    """Of two dtypes; one is frozen, one is elsewhere."""
    made = [nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(7).bfloat16())]
    frozen = nn.Parameter(torch.ones(9), requires_grad=False)
    return [*made, frozen, nn.Parameter(torch.ones(11, device="meta"))]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what there is of state in tensors that are as large as their parameters."""
    every = ((p, value) for p, state in optimizer.state.items() for value in state.values())
    return sum(v.nbytes for p, v in every if isinstance(v, torch.Tensor) and v.shape == p.shape and v.device == CPU)


@pytest.mark.parametrize(
    ("optimizer_class", "options", "arrays"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}, 3),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}, 2),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}, 1),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, 3),
        (torch.optim.Adagrad, {}, 0),  # it makes its state with itself
    ],
)
def test_it_is_what_the_first_step_makes(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    arrays: int,
    expected: Callable[[], int],
) -> None:
    trained = parameters()
    optimizer = optimizer_class(trained, **options)
    before_bytes = state_bytes(optimizer)
    expected_bytes = expected()
    assert expected_bytes == arrays * (trained[0].nbytes + trained[1].nbytes)
    for parameter in trained[:2]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state_bytes(optimizer) - before_bytes == expected_bytes
    assert expected() == 0


def test_groups_differ_and_what_has_state_needs_none(expected: Callable[[], int]) -> None:
    one, two, three = (nn.Parameter(torch.ones(100)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [one], "momentum": 0.9}, {"params": [two]}], lr=0.1)
    assert expected() == 400
    one.grad = torch.ones(100)
    optimizer.step()
    assert expected() == 0
    optimizer.add_param_group({"params": [three], "momentum": 0.9})
    assert expected() == 400


def test_nothing_is_expected_of_what_is_not_torchs_or_has_other_state(expected: Callable[[], int]) -> None:
    class Odd(torch.optim.AdamW):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert not hasattr(self, "made"), "it is not made a second time"
            Odd.made = True  # type: ignore[attr-defined]
            super().__init__(*args, **options)

    parameter = nn.Parameter(torch.ones(30, 20))
    kept = [Odd([parameter]), torch.optim.LBFGS([parameter]), torch.optim.Adafactor([parameter])]
    assert expected() == 0
    del kept


def test_offloaded_parameters_have_their_own_account(expected: Callable[[], int]) -> None:
    model = tencache_fx.offload(nn.Linear(200, 200, bias=False), "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    assert expected() == 0
    del optimizer
