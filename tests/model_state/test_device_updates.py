"""Small parameters that are updated together: the same bits as one by one, in as many calls as there are kinds."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tencache_fx.model_state import device_updates
from tencache_fx.model_state.step_kernel import Kernel, StateDtype
from tencache_fx.optim import AdamW, OffloadedOptimizer

SIZES = ((7,), (64,), (3, 5), (4096,), (16, 256), (5000,), (1,), (2, 2, 2), (0,), (8192,))
DTYPES = (torch.float32, torch.bfloat16)


def trained(sizes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], state: StateDtype) -> list[Tensor]:
    """Return weights, masters and moments after three steps, with weights set and options changed between them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size).to(dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.02, "weight_decay": 0.0}]
    optimizer = AdamW([group for group in groups if group["params"]], lr=0.1, state_dtype=state)
    for step in range(3):
        for index, parameter in enumerate(parameters):
            if index % 3 != step:  # others are a step behind
                parameter.grad = torch.randn_like(parameter)
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            parameters[step % len(parameters)].data.add_(0.25)  # whose version torch does not count
    kept = optimizer.state_dict()["state"]
    return [p.detach() for p in parameters] + [kept[key][name] for key in kept for name in ("master", "exp_avg")]


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_updates, "_MOST_ELEMENTS", {"cpu": -1})


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.sampled_from((torch.float32, torch.bfloat16, "8bit")),
)
def test_what_runs_together_changes_no_bit(
    parameters: list[tuple[tuple[int, ...], torch.dtype]], state: StateDtype
) -> None:
    sizes, dtypes = zip(*parameters, strict=True)
    together = trained(sizes, dtypes, state)
    with pytest.MonkeyPatch.context() as patch:
        one_by_one(patch)
        apart = trained(sizes, dtypes, state)
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the elements of each call of an update are added."""
    lengths: list[int] = []
    compiled = Kernel.compiled

    def count(self: Kernel, dtype: torch.dtype, device: torch.device) -> Callable[..., None]:
        update = compiled(self, dtype, device)

        def call(change: Tensor, *rest: Any) -> None:
            lengths.append(len(change))
            update(change, *rest)

        return call

    patch.setattr(Kernel, "compiled", count)
    return lengths


def test_small_parameters_of_a_group_dtype_and_number_of_dimensions_take_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = counted(monkeypatch)
    some = [nn.Parameter(torch.randn(size)) for size in ((8,), (4, 4), (2, 3, 4), (100,))]
    other = [nn.Parameter(torch.randn(size).bfloat16()) for size in ((8,), (30,))]
    optimizer = AdamW([*some, *other], lr=0.1)
    for parameter in (*some, *other):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sorted(lengths) == [16, 24, 38, 108]


def test_what_is_copied_at_once_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_updates, "JOINT_ELEMENTS", 1000)
    lengths = counted(monkeypatch)
    parameters = [nn.Parameter(torch.randn(400)) for _ in range(5)]
    optimizer = AdamW([*parameters, nn.Parameter(torch.randn(9000))], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sorted(lengths) == [400, 800, 800, 9000]  # the last is large enough for a call of its own


def test_a_weight_set_before_a_step_that_failed_is_taken_over_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(3)]
    optimizer = AdamW(parameters, lr=0.1, weight_decay=0.0)

    def give_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones(8)

    give_gradients()
    optimizer.step()
    for parameter in parameters:
        parameter.data.fill_(5.0)
    give_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
    assert all(torch.equal(parameter, torch.full((8,), 5.0)) for parameter in parameters)
    optimizer.step()
    assert all(((parameter > 4.8) & (parameter < 5.0)).all() for parameter in parameters)


def test_parameters_that_share_memory_are_updated_one_behind_the_other() -> None:
    found = []
    for make in (partial(OffloadedOptimizer, optimizer_class=torch.optim.SGD), torch.optim.SGD):
        first = nn.Parameter(torch.zeros(8))
        second = nn.Parameter(first.data)
        optimizer = make([first, second], lr=0.1)
        for _ in range(3):
            first.grad, second.grad = torch.ones(8), torch.full((8,), 2.0)
            optimizer.step()
        found.append(first.detach().clone())
    assert torch.allclose(*found)
