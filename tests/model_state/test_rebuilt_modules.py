"""Modules whose parameters are parametrized, pruned or moved to other modules once they are offloaded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import tencache_fx
from tencache_fx import compat

SIDE = 144
Rebuild = Callable[[nn.Sequential], object]


class Upper(nn.Module):
    """A parametrization whose right inverse is the identity."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu()


class Symmetric(nn.Module):
    """A parametrization with a right inverse of its own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.triu()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def take_over(model: nn.Sequential) -> None:
    doubled = Doubled(SIDE, SIDE)
    doubled.weight, doubled.bias = model[0].weight, model[0].bias
    model[0] = doubled


def parametrized(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[0], "weight", Upper())


REBUILDS: dict[str, Rebuild] = {
    "upper": parametrized,
    "symmetric": lambda model: parametrize.register_parametrization(model[0], "weight", Symmetric()),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0]),
    "old weight_norm": lambda model: nn.utils.weight_norm(model[0]),
    "spectral_norm": lambda model: parametrizations.spectral_norm(model[0]),
    "prune": lambda model: prune.l1_unstructured(model[0], "weight", 0.3),
    "take over": take_over,
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, compiler: str | None) -> list[Tensor]:
    run = model if compiler is None else torch.compile(model, backend="tencache", options={"compiler": compiler})
    losses = []
    for step in range(3):
        loss = run(torch.randn(8, SIDE, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def expected(rebuild: Rebuild, *, before: int) -> list[Tensor]:
    model = network()
    losses = steps(model, torch.optim.AdamW(model.parameters()), None) if before else []
    rebuild(model)
    losses += steps(model, torch.optim.AdamW(model.parameters()), None)
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
@pytest.mark.parametrize("compiler", [None, "eager"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_module_may_be_rebuilt_inside_summon(
    rebuild: Rebuild,
    compiler: str | None,
    trained: bool,  # noqa: FBT001
) -> None:
    model = tencache_fx.offload(network())
    earlier = tencache_fx.optim.AdamW(model.parameters())  # it keeps parameters alive that go from the model
    losses = steps(model, earlier, compiler) if trained else []
    if not trained:
        del earlier
    with tencache_fx.summon(model):
        rebuild(model)
    losses += steps(model, tencache_fx.optim.AdamW(model.parameters()), compiler)
    torch.testing.assert_close([*losses, *model.state_dict().values()], expected(rebuild, before=trained))


@pytest.mark.parametrize("rebuild", [parametrized, take_over])
@pytest.mark.parametrize("compiler", [None, "eager"])
def test_a_parameter_may_move_to_another_module_without_being_read(rebuild: Rebuild, compiler: str | None) -> None:
    model = tencache_fx.offload(network())
    rebuild(model)
    losses = steps(model, tencache_fx.optim.AdamW(model.parameters()), compiler)
    torch.testing.assert_close([*losses, *model.state_dict().values()], expected(rebuild, before=False))


@pytest.mark.skipif(not compat.TELLS_READERS, reason="before torch 2.14 a storage cannot tell who reads it")
def test_a_parametrization_that_reads_the_weight_is_refused_before_anything_has_changed() -> None:
    model = tencache_fx.offload(network())
    with pytest.raises(RuntimeError, match=r"0\.weight is offloaded .*summon"):
        REBUILDS["symmetric"](model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model.state_dict(), network().state_dict(), rtol=0, atol=0)


def test_a_parametrization_may_be_removed_inside_summon() -> None:
    model = network()
    parametrized(model)
    tencache_fx.offload(model)
    with tencache_fx.summon(model):
        parametrize.remove_parametrizations(model[0], "weight")
    plain = network()
    with torch.no_grad():
        plain[0].weight.triu_()
    torch.testing.assert_close(model(torch.ones(2, SIDE)), plain(torch.ones(2, SIDE)))
