"""Moving or converting a model whose parameters are offloaded: nothing where it is right, else a clear error."""

import copy

import pytest
import torch
from torch import nn

import tencache_fx
from tencache_fx.model_state.parameter_store import find_offloaded


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 192), nn.Sequential(nn.Linear(192, 192), nn.Conv2d(64, 64, 3)))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.float(),
        lambda model: model.to(torch.float32),
        lambda model: model.requires_grad_(requires_grad=False),
    ],
)
def test_what_is_there_already_stays_offloaded(move) -> None:
    model = tencache_fx.offload(network())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert move(model) is model
    assert find_offloaded(model[0].weight) is not None
    assert not find_offloaded(model[0].weight).on_device
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("meta"),
        lambda model: model.double(),
        lambda model: model.bfloat16(),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.share_memory(),
    ],
)
def test_what_would_lose_the_bytes_is_refused_before_it_is_done(move) -> None:
    model = tencache_fx.offload(network())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        tencache_fx.UsageError, match=r"weight is offloaded to host memory.* before tencache_fx\.offload"
    ):
        move(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(value.dtype == torch.float32 for value in model.parameters())


def test_a_model_in_another_format_may_be_asked_for_it_again() -> None:
    model = tencache_fx.offload(network().to(memory_format=torch.channels_last))
    model.to(memory_format=torch.channels_last)
    assert find_offloaded(model[1][1].weight) is not None


def test_a_model_that_is_summoned_may_be_copied() -> None:
    model = tencache_fx.offload(network())
    with tencache_fx.summon(model):
        twin = copy.deepcopy(model)
    twin.double()
    assert all(value.dtype == torch.float64 for value in twin.parameters())
    assert model[0].weight.dtype == torch.float32
    with pytest.raises(tencache_fx.UsageError):
        model.double()
