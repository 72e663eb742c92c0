"""Classes that draw random numbers in their steps: the numbers of torch's own, and those of a run that goes on."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import faulty_engine
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state import offloading, streamed_optimizer, update_chunks
from tencache_fx.model_state.update_chunks import Wanted, cut_chunks
from tencache_fx.optim import StreamedOptimizer

SHAPES = [(64,), (128, 128), (64,), (40, 40), (128, 128), (64,), (40, 40), (64, 64)]  # small ones around large ones


class Langevin(torch.optim.Optimizer):
    """Its steps add noise, and it keeps three arrays."""

    def __init__(self, params: Any, lr: float = 0.1, generator: torch.Generator | None = None, quiet: int = 0) -> None:
        super().__init__(params, {"lr": lr, "generator": generator, "quiet": quiet})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, generator = self.state[p], group["generator"]
                for name in ("mean", "noise", "sum"):
                    state.setdefault(name, torch.zeros_like(p))
                state["mean"].lerp_(p.grad, 0.1)
                state["steps"] = state.get("steps", 0) + 1
                if state["steps"] > group["quiet"]:
                    state["noise"].copy_(torch.randn(p.shape, generator=generator))
                    state["sum"].add_(torch.rand(p.shape, generator=generator))
                p.add_(state["mean"] + state["noise"], alpha=-group["lr"])


def made(
    *, where: str, own: bool = True, cls: type[torch.optim.Optimizer] = Langevin, **options: Any
) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    """Return parameters and an optimizer of two groups, of which every second parameter is in the other."""
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    if where == "offloaded":
        tencache_fx.offload(model, "cpu")
    all_parameters = list(model)
    groups = [{"params": all_parameters[::2]}, {"params": all_parameters[1::2], "lr": 0.05}]
    if own:
        return model, StreamedOptimizer(groups, cls, **options)
    return model, cls(groups, **options)


def train(model: nn.ParameterList, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for index, parameter in enumerate(model):
            change = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if step % 2 and index % 3 == 0 else change
        optimizer.step()


def values(model: nn.ParameterList) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.fixture(params=[0, 150_000, 1 << 30])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All large, some, or none; the state of the smallest is on the device."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 1000)
    monkeypatch.setattr(offloading, "LEAST_BYTES", 1000)
    size: int = request.param
    return size


class Bound(Langevin):
    """It draws from a generator that is no option of its groups."""

    def __init__(self, params: Any, lr: float = 0.1, generator: torch.Generator | None = None) -> None:
        super().__init__(params, lr)
        self.generator = generator

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["generator"] = self.generator
        super().step(closure)
        for group in self.param_groups:
            group["generator"] = None


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("cls", [Langevin, Bound])
@pytest.mark.parametrize("where", ["on the device", "offloaded"])
def test_random_numbers_are_those_of_torch(
    where: str, cls: type[torch.optim.Optimizer], chunk_bytes: int, *, given: bool
) -> None:
    """With the generator that all use, or one that is given."""

    def generator() -> torch.Generator | None:
        return torch.Generator().manual_seed(7) if given else None

    model, optimizer = made(where="on the device", own=False, cls=cls, generator=generator())
    train(model, optimizer, range(4))
    expected = values(model)
    with faulty_engine():
        model, optimizer = made(where=where, cls=cls, generator=generator())
        train(model, optimizer, range(4))
        assert all(map(torch.equal, values(model), expected))
        del model, optimizer


@pytest.mark.parametrize("where", ["on the device", "offloaded"])
def test_a_run_that_was_saved_goes_on_with_the_same_random_numbers(where: str, chunk_bytes: int) -> None:
    model, optimizer = made(where=where)
    train(model, optimizer, range(4))
    expected = values(model)
    model, optimizer = made(where=where)
    train(model, optimizer, range(2))
    weights, saved, seeds = values(model), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    model, optimizer = made(where=where)
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    optimizer.load_state_dict(saved)
    torch.set_rng_state(seeds)
    train(model, optimizer, range(2, 4))
    assert all(map(torch.equal, values(model), expected))


def test_a_class_that_draws_later_is_in_order_from_then_on(chunk_bytes: int) -> None:
    model, optimizer = made(where="offloaded", quiet=1)
    train(model, optimizer, range(2))
    weights, saved, seeds = values(model), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    train(model, optimizer, range(2, 4))
    plain, theirs = made(where="on the device", own=False, quiet=1)
    plain.load_state_dict(dict(zip(plain.state_dict(), weights, strict=True)))
    theirs.load_state_dict(saved)
    torch.set_rng_state(seeds)
    train(plain, theirs, range(2, 4))
    assert all(map(torch.equal, values(model), values(plain)))


def test_updates_of_a_run_that_goes_on_are_cut_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that take much state, as soon as it is loaded."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 60_000)
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)
    counts: list[list[int]] = []

    def noted(make: Callable[..., Any]) -> Callable[..., Any]:
        def cut(sized: Any, **options: Any) -> Any:
            chunks = make(sized, **options)
            counts.append([len(some) for some in chunks])
            return chunks

        return cut

    model, optimizer = made(where="on the device")
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(streamed_optimizer, "cut_chunks", noted(cut_chunks))
    train(model, optimizer, range(2, 3))
    again, other = made(where="on the device")
    other.load_state_dict(saved)
    train(again, other, range(2, 3))
    before, after = [each for each in counts if each]
    assert before == after


@given(
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 150)), max_size=40),
    most=st.integers(0, 200),
)
def test_chunks_that_are_in_order_have_all_parameters_in_order(sizes: list[tuple[int, int]], most: int) -> None:
    groups: list[dict[str, Any]] = [{}, {}, {}]
    sized = [(Wanted(torch.empty(0), groups[group], None), nbytes) for group, nbytes in sizes]
    nbytes_of = {id(wanted.parameter): nbytes for wanted, nbytes in sized}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_chunks, "CHUNK_BYTES", most)
        chunks = cut_chunks(sized, in_order=True)
    assert [id(wanted.parameter) for some in chunks for wanted in some] == [id(each.parameter) for each, _ in sized]
    for some in chunks:
        assert len({id(wanted.group) for wanted in some}) == 1
        assert len(some) == 1 or sum(nbytes_of[id(wanted.parameter)] for wanted in some) <= most
