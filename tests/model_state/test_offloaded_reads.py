"""Who reads an offloaded parameter where nothing is compiled: its module's forward, in any thread; others are told."""

import contextlib
import copy
import os
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from conftest import eventually
from tied_model import HIDDEN, batch, compiled, network, train, weights
from torch import Tensor, nn

import tencache_fx
from tencache_fx import compat
from tencache_fx.errors import UsageError
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.optim import AdamW
from tencache_fx.runtime.engine_registry import engines

HINT = r"is offloaded to host memory, and nothing has loaded it.*summon"


compiles_in_threads = pytest.mark.skipif(
    torch.__version__ < "2.12" and not torch.cuda.is_available(),
    reason="without a GPU, torch 2.11 ends the process where a second thread compiles, whatever the backend",
)


@contextlib.contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Have another thread compile something meanwhile."""
    begun, done = threading.Event(), threading.Event()

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        begun.set()
        assert done.wait(60)
        return gm.forward

    thread = threading.Thread(target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(3)))
    thread.start()
    try:
        assert begun.wait(60)
        yield
        assert not done.is_set()
    finally:
        done.set()
        thread.join()


def nothing_here() -> bool:
    return not any(home.on_device for home in parameters_of(engines()[0]))


@compiles_in_threads
def test_a_model_runs_and_trains_while_another_thread_compiles() -> None:
    plain, model = network(), tencache_fx.offload(network())
    with compiling_elsewhere():
        with torch.no_grad():
            assert torch.equal(model(batch(0)), plain(batch(0)))
        assert nothing_here()
        for each in (model, plain):
            each(batch(1)).square().mean().backward()
    for mine, true in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (true.grad is None)
        assert true.grad is None or torch.equal(mine.grad, true.grad)


@compiles_in_threads
def test_a_compilation_that_begins_or_ends_within_a_forward_changes_nothing() -> None:
    plain, model = network(), tencache_fx.offload(network())
    compiling = contextlib.ExitStack()
    for block, change in ((1, lambda *_: compiling.enter_context(compiling_elsewhere())), (2, lambda *_: None)):
        model[block].into.register_forward_hook(change)
    model[3].into.register_forward_pre_hook(lambda *_: compiling.close())
    with torch.no_grad():
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert nothing_here()


@compiles_in_threads
def test_three_threads_train_a_model_of_their_own_each() -> None:
    def run(seed: int, wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]], *, home: bool) -> list[float]:
        model = models[seed, home]
        return train(model, wrap(model), AdamW(model.parameters(), weight_decay=0.1), range(seed, seed + 4))

    def as_it_is(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return model

    models = {(seed, home): network() for seed in range(3) for home in (False, True)}
    for (_, home), model in models.items():
        if home:
            tencache_fx.offload(model)
    ways = (as_it_is, compiled, as_it_is)
    expected = [run(seed, as_it_is, home=False) for seed in range(3)]
    found: dict[int, list[float]] = {}

    def work(seed: int) -> None:
        found[seed] = run(seed, ways[seed], home=True)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    for seed, losses in enumerate(expected):
        torch.testing.assert_close(found[seed], losses, rtol=1e-5, atol=0)


class Waits(nn.Module):
    """Reads its weight after `before` has been called."""

    def __init__(self, before: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, HIDDEN))
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return F.linear(x, self.weight)


def test_what_several_threads_read_goes_with_the_last_of_them() -> None:
    second_is_in, first_is_out = threading.Event(), threading.Event()
    outer = threading.current_thread()

    def before() -> None:
        if threading.current_thread() is outer:
            second_is_in.set()
            assert first_is_out.wait(60)
        else:
            assert second_is_in.wait(60)

    model, x, out = tencache_fx.offload(Waits(before)), torch.ones(2, HIDDEN), []

    def first() -> None:
        with torch.no_grad():
            out.append(model(x))
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert eventually(lambda: not nothing_here())  # it came for the first, and is to stay for the second
    with torch.no_grad():
        out.append(model(x))
    thread.join()
    assert len(out) == 2
    assert all(torch.equal(each, torch.full_like(each, HIDDEN)) for each in out)
    assert nothing_here()


@pytest.mark.parametrize("where", ["forward", "pre_hook", "first_pre_hook"])
def test_a_forward_that_fails_leaves_nothing_behind(where: str) -> None:
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(find_offloaded(model.weight).on_device)
        if len(calls) == 2:
            raise ValueError("injected")

    model = tencache_fx.offload(Waits(fail if where == "forward" else lambda: None))
    if where != "forward":
        model.register_forward_pre_hook(fail, prepend=where == "first_pre_hook")
    x = torch.ones(2, HIDDEN)
    with torch.no_grad():
        for attempt in range(3):
            with pytest.raises(ValueError, match="injected") if attempt == 1 else contextlib.nullcontext():
                model(x)
            assert nothing_here()
    assert calls == [True] * 3


@pytest.mark.parametrize("wrap", [lambda model: model, compiled], ids=["by itself", "compiled"])
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.grad, torch.func.vmap])
def test_transforms_of_functions_read_what_is_offloaded(
    transform: Callable[..., Callable[[Tensor], Tensor]], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    plain = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
    model = tencache_fx.offload(copy.deepcopy(plain))
    run, x = wrap(model), torch.randn(HIDDEN, HIDDEN)

    def scalar(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: run(x).square().mean()

    for _ in range(2):
        torch.testing.assert_close(transform(scalar(run))(x[:4]), transform(scalar(plain))(x[:4]))
        scalar(run)(x).backward()
        scalar(plain)(x).backward()
    for offloaded, here in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(offloaded.grad, here.grad)


def test_a_module_that_calls_itself_keeps_its_parameters_until_the_last_call_ends() -> None:
    depth: list[int] = []

    def before() -> None:
        depth.append(0)
        if len(depth) == 2:
            raise ValueError("injected")
        if len(depth) < 4:
            with contextlib.suppress(ValueError):
                model(torch.ones(1, HIDDEN))
            with contextlib.suppress(ValueError):
                model(torch.ones(1, HIDDEN))

    model = tencache_fx.offload(Waits(before))
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, HIDDEN)), torch.full((2, HIDDEN), float(HIDDEN)))
    assert len(depth) > 3
    assert nothing_here()


def test_hooks_that_came_before_offload_read_what_their_module_reads() -> None:
    model = nn.Linear(HIDDEN, HIDDEN, bias=False)
    sums: list[float] = []
    model.register_forward_pre_hook(lambda module, _: sums.append(module.weight.sum().item()))
    expected = model.weight.sum().item()
    tencache_fx.offload(model)(torch.ones(1, HIDDEN))
    assert sums == [expected]


class Holder(nn.Module):
    """Reads parameters of containers, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        several = [nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 16) for _ in range(4)]
        self.listed = nn.ParameterList(several[:2])
        self.named = nn.ParameterDict({"one": several[2]})
        self.deep = nn.ModuleDict({"down": nn.ModuleList([nn.ParameterList(several[3:])])})
        self.below = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for each in (self.listed[0], self.listed[1], self.named["one"], self.deep["down"][0][0]):
            x = torch.tanh(F.linear(x, each))
        return self.below(x)


@pytest.mark.parametrize("wrap", [lambda model: model, compiled])
def test_containers_belong_to_the_module_that_has_them(wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    plain, model = Holder(), tencache_fx.offload(Holder())
    run, x = wrap(model), torch.randn(8, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(run(x), plain(x))
    assert run is not model or nothing_here()
    for _ in range(2):
        found = []
        for call in (plain, run):
            loss = call(x).square().mean()
            loss.backward()
            found.append(loss.item())
        torch.testing.assert_close(found[1], found[0])
    for mine, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad + 0, true.grad)
    torch.testing.assert_close(weights(model), weights(plain))


class Borrower(nn.Module):
    """Reads the weight of a child that it does not call; with `own`, it has that parameter as well."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN, bias=False)
        if own:
            self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight)


def test_a_module_reads_what_it_took_over_from_another() -> None:
    model = tencache_fx.offload(Borrower(own=True))
    expected = F.linear(torch.ones(1, HIDDEN), model.state_dict()["inner.weight"])
    model(torch.ones(1, HIDDEN)).sum().backward()
    assert torch.equal(model(torch.ones(1, HIDDEN)), expected)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, HIDDEN)), expected)


tells = pytest.mark.skipif(not compat.TELLS_READERS, reason="before torch 2.14 a storage cannot tell who reads it")


@tells
@pytest.mark.parametrize(
    "wrap", [lambda model: model, *(lambda m, b=b: torch.compile(m, backend=b) for b in ("eager",))]
)
def test_what_reads_another_modules_parameter_is_told_which_and_how(
    wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    model = tencache_fx.offload(Borrower(own=False))
    with pytest.raises(RuntimeError, match=r"inner\.weight " + HINT + r".*self\.weight = other\.weight"):
        wrap(model)(torch.ones(1, HIDDEN))


def set_row(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter[0] = 1


def max_norm(parameter: Tensor) -> Tensor:
    return F.embedding(torch.tensor([1]), parameter, max_norm=0.1)


READS: dict[str, Callable[[Tensor], object]] = {
    "repr": repr,
    "row": lambda p: p[0].clone(),
    "set row": set_row,
    "linear": lambda p: F.linear(torch.ones(1, HIDDEN), p),
    "embedding": lambda p: F.embedding(torch.tensor([1]), p),
    "max_norm": max_norm,
    "grad": torch.func.grad(lambda p: (p * p).sum()),
    "vmap": torch.func.vmap(torch.sum),
    "sum": lambda p: p.detach().sum(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "data_ptr": lambda p: p.data_ptr(),
    "fill": lambda p: p.data.fill_(1),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "eager": lambda p: torch.compile(lambda x: x @ x, backend="eager")(p),
    "inductor": lambda p: torch.compile(lambda x: (x + 1).sum(), backend="inductor")(p),
}


@tells
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_an_offloaded_parameter_is_told(read: Callable[[Tensor], object]) -> None:
    model = tencache_fx.offload(network())
    weight, value = model[1].into.weight, weights(model)["1.into.weight"]
    view = weight.detach()[3:]
    with pytest.raises(RuntimeError, match=r"1\.into\.weight " + HINT):
        read(weight)
    with tencache_fx.summon(model):
        assert torch.equal(weight, value)
        assert torch.equal(view, value[3:])  # made while it was away
    with pytest.raises(RuntimeError, match=HINT):
        read(weight)
    assert torch.equal(weights(model)["1.into.weight"], value)


@tells
def test_who_reads_is_told_after_steps_too() -> None:
    model = tencache_fx.offload(network())
    weight, before = model[1].into.weight, weights(model)["1.into.weight"]
    train(model, model, AdamW(model.parameters()), range(2))
    with pytest.raises(RuntimeError, match=HINT):
        weight.clone()
    with tencache_fx.summon(model):
        assert not torch.equal(weight, before)


@tells
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_offloaded_model_that_another_backend_compiles_is_told(backend: str) -> None:
    model = tencache_fx.offload(nn.Linear(HIDDEN, HIDDEN))
    with pytest.raises(RuntimeError, match=r"weight " + HINT + r".*backend='tencache'"):
        torch.compile(model, backend=backend)(torch.ones(1, HIDDEN))


def test_a_forked_child_has_no_offloaded_parameters_and_is_told() -> None:
    model = tencache_fx.offload(network())
    for use in (lambda: model(batch(0)), lambda: tencache_fx.summon(model).__enter__()):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            told = b"nothing was raised"
            try:
                use()
            except UsageError as error:
                told = str(error).encode()
            finally:
                os.write(writes, told)
                os._exit(0)
        os.waitpid(child, 0)
        told = os.read(reads, 4096).decode()
        os.close(reads)
        os.close(writes)
        assert "weight is offloaded to the memory of the process from which" in told
        assert "spawn" in told
