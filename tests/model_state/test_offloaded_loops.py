"""What training loops do to parameters, gradients and state besides training: offloaded as with torch's own."""

import contextlib
import gc
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import EAGER, compiled
from torch import Tensor, nn

import tencache_fx
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.update import ParameterUpdate
from tencache_fx.optim import AdamW
from tencache_fx.region.registry import REGIONS
from tencache_fx.runtime.engine_registry import engines

WIDTH = 256
WAYS = (
    "modules",
    "1MB",
    "64MB",
)  # run by themselves, compiled with weights that are offloaded, and with some that stay
Change = Callable[[nn.Module, torch.optim.Optimizer], None]

each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def engine_is_closed() -> Iterator[None]:
    yield
    torch.compiler.reset()
    tencache_fx.close()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have updates end long after `step`, as on a busy host."""
    on_host = ParameterUpdate.on_host

    def late(update: ParameterUpdate, part: int) -> None:
        time.sleep(0.05)
        on_host(update, part)

    monkeypatch.setattr(ParameterUpdate, "on_host", late)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def network(first: Callable[[], nn.Module] = linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(first(), nn.Tanh(), linear())


def run_of(model: nn.Module, way: str) -> nn.Module:
    return model if way in ("plain", "modules") else compiled(model, {**EAGER, "device_budget": way})


def summoned(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    at_home = any(find_offloaded(parameter) is not None for parameter in model.parameters())
    return tencache_fx.summon(model) if at_home else contextlib.nullcontext()


def train(
    way: str, change: Change, first: Callable[[], nn.Module] = linear, x: Tensor | None = None
) -> dict[str, Tensor]:
    """Train for four steps, with a change after the second; return the weights."""
    model = network(first)
    x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH) if x is None else x
    if way != "plain":
        model = tencache_fx.offload(model)
    optimizer = (torch.optim.AdamW if way == "plain" else AdamW)(model.parameters(), lr=1e-3, eps=1e-3)
    run = run_of(model, way)
    for step in range(4):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            change(model, optimizer)
    return {name: value.clone() for name, value in model.state_dict().items()}


def gives_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with summoned(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def fills_from_a_vector(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with summoned(model):
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def gives_data_outside(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    weight.data = torch.full((WIDTH, WIDTH), 0.01)
    time.sleep(0.2)  # an update that is under way ends


def writes_to_the_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for value in model.state_dict().values():
        value.mul_(0.5)


def assigns_the_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def steps_in_summon(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with summoned(model):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def clears_the_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    optimizer.state.clear()


CHANGES = (
    gives_data,
    fills_from_a_vector,
    gives_data_outside,
    writes_to_the_state_dict,
    clears_the_state,
    assigns_the_state,
    steps_in_summon,
)


@each_way
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.usefixtures("slow")
def test_changes_between_steps(change: Change, way: str) -> None:
    ours, theirs = train(way, change), train("plain", change)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


class Clamped(nn.Linear):
    """Weights are kept non-negative, as in monotone networks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(x)


class Limited(nn.Linear):
    """Weights are given anew in each forward, with a limit to their size."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


def test_a_forward_may_give_its_own_parameters_data() -> None:
    ours, theirs = (
        train(way, lambda *_: None, lambda: Limited(WIDTH, WIDTH), torch.ones(8, WIDTH)) for way in ("modules", "plain")
    )
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_forward_may_train_itself() -> None:
    class Trains(nn.Module):
        def __init__(self, *, at_home: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
            if at_home:
                tencache_fx.offload(self)
            self.by = (AdamW if at_home else torch.optim.AdamW)([self.weight], lr=1e-2)

        def forward(self, x: Tensor) -> Tensor:
            (x @ self.weight).square().mean().backward()
            self.by.step()
            self.by.zero_grad()
            return x

    ours, theirs = Trains(at_home=True), Trains(at_home=False)
    for _ in range(3):
        for model in (ours, theirs):
            model(torch.ones(8, WIDTH))
    torch.testing.assert_close(ours.state_dict()["weight"], theirs.state_dict()["weight"])


@each_way
@pytest.mark.parametrize("kind", ["clamp", "max_norm"])
def test_a_forward_may_change_its_own_parameters(kind: str, way: str) -> None:
    def first() -> nn.Module:
        return Clamped(WIDTH, WIDTH) if kind == "clamp" else nn.Embedding(2000, WIDTH, max_norm=1.0)

    x = None if kind == "clamp" else torch.arange(64).reshape(8, 8)
    budget = "16MB" if (kind, way) == ("max_norm", "1MB") else way
    ours, theirs = (train(each, lambda *_: None, first, x) for each in (budget, "plain"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_what_a_parameter_is_given_stays_its_givers() -> None:
    model = tencache_fx.offload(network())
    averages = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    expected = {name: value.clone() for name, value in averages.items()}
    homes = [find_offloaded(parameter) for parameter in model.parameters()]
    with tencache_fx.summon(model):
        for name, parameter in model.named_parameters():
            parameter.data = averages[name]
    assert [find_offloaded(parameter) for parameter in model.parameters()] == homes
    assert all(torch.equal(averages[name], value) for name, value in expected.items())
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    with tencache_fx.summon(model, write=False):
        model[0].weight.data = torch.zeros(WIDTH, WIDTH)
    assert torch.equal(model.state_dict()["0.weight"], expected["0.weight"])


def test_a_parameter_of_another_size_gets_another_host_copy() -> None:
    model = tencache_fx.offload(network())
    (engine,) = engines()
    before = engine.stats.take()["host_acquired_bytes"]
    with tencache_fx.summon(model):
        model[2].weight.data = torch.ones(2 * WIDTH, WIDTH)
        model[0].weight.data = model[0].weight.data.t()[:, :WIDTH]  # a view of what it has
        transposed = model[0].weight.data.clone()
    home = find_offloaded(model[2].weight)
    assert home is not None
    assert home.host.shape == (2 * WIDTH, WIDTH)
    assert torch.equal(model.state_dict()["2.weight"], torch.ones(2 * WIDTH, WIDTH))
    assert torch.equal(model.state_dict()["0.weight"], transposed)
    assert engine.stats.take()["host_acquired_bytes"] == before + WIDTH * WIDTH * 4
    with tencache_fx.summon(model):
        model[2].weight.data = torch.ones(4, WIDTH)  # too small for a home
    assert find_offloaded(model[2].weight) is None
    assert model[2].weight.sum() == 4 * WIDTH
    assert engine.stats.take()["host_acquired_bytes"] == before - WIDTH * WIDTH * 4


def test_who_summoned_first_decides() -> None:
    model = tencache_fx.offload(network())
    with tencache_fx.summon(model):
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            with tencache_fx.summon(model, write=False):
                model[2].weight.fill_(2.0)
        assert model[0].weight.mean() == 1.0
        assert all(home.summoned for home in parameters_of(engines()[0]))
    assert model.state_dict()["0.weight"].mean() == 1.0
    assert model.state_dict()["2.weight"].mean() == 2.0
    assert not any(home.on_device for home in parameters_of(engines()[0]))


def test_a_factor_is_read_when_it_is_given() -> None:
    model = tencache_fx.offload(network())
    run_of(model, "1MB")(torch.randn(8, WIDTH)).square().mean().backward()
    gradient, factor = model[0].weight.grad, torch.tensor(0.5)
    expected = gradient.clone() * 0.5
    gradient.mul_(factor)
    factor.fill_(100.0)
    assert torch.equal(gradient.clone(), expected)


@pytest.mark.parametrize("in_backward", [True, False])
def test_the_newest_optimizer_updates(*, in_backward: bool) -> None:
    model = tencache_fx.offload(network())
    run = run_of(model, "1MB")
    first = AdamW(model.parameters(), lr=1e-3, step_in_backward=True)
    for _ in range(2):
        run(torch.randn(8, WIDTH)).square().mean().backward()
    first.step()
    with pytest.warns(UserWarning, match="takes over 4 parameters"):
        second = AdamW(model.parameters(), lr=0.0, weight_decay=0.0, step_in_backward=in_backward)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        run(torch.randn(8, WIDTH)).square().mean().backward()
    second.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {int(first.state[parameter]["step"]) for parameter in (model[0].weight, model[2].weight)} == {2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdamW(nn.Linear(WIDTH, WIDTH).parameters(), step_in_backward=True)


def test_a_backward_may_come_after_a_step() -> None:
    """One optimizer of a generator and of what judges it, run by themselves."""

    def norms(*, at_home: bool) -> list[float]:
        makes, judges = network(), network()
        if at_home:
            tencache_fx.offload(makes)
            tencache_fx.offload(judges)
        parameters = [*makes.parameters(), *judges.parameters()]
        optimizer = (AdamW if at_home else torch.optim.AdamW)(parameters, lr=1e-3)
        made = makes(torch.ones(8, WIDTH))
        judges(made.detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        judges(made).mean().backward()
        optimizer.step()
        return [float(value.norm()) for model in (makes, judges) for value in model.state_dict().values()]

    assert norms(at_home=True) == pytest.approx(norms(at_home=False), rel=1e-5)


@pytest.mark.parametrize("train_it", [True, False])
def test_modules_that_read_what_belongs_to_others(*, train_it: bool) -> None:
    x = torch.randn(2, 5, WIDTH)
    for make in (lambda: nn.MultiheadAttention(WIDTH, 4), lambda: nn.TransformerEncoderLayer(WIDTH, 4, 512, 0.0)):
        found = []
        for at_home in (True, False):
            torch.manual_seed(0)
            model = make().train(train_it)
            if at_home:
                tencache_fx.offload(model)
            with torch.set_grad_enabled(train_it):
                result = model(x, x, x)[0] if isinstance(model, nn.MultiheadAttention) else model(x)
            if train_it:
                result.square().mean().backward()
            found.append(result)
        assert torch.equal(*found)


def test_updates_in_the_backward_follow_the_groups() -> None:
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), lr=1e-3, step_in_backward=True)

    def moved() -> float:
        before = model.state_dict()["0.weight"].clone()
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return float((model.state_dict()["0.weight"] - before).abs().max())

    assert moved() < 0.01
    (group,) = optimizer.param_groups
    optimizer.param_groups.append({**group, "params": [group["params"].pop(0)], "lr": 1e-1})
    assert moved() > 0.05
    optimizer.param_groups.pop()
    before = model.state_dict()["0.weight"].clone()
    model(torch.ones(8, WIDTH)).square().mean().backward()
    assert torch.equal(model.state_dict()["0.weight"], before)


@each_way
def test_an_update_is_no_change_by_somebody_else(way: str) -> None:
    """A master that is thought to be out of date is read and written once more."""
    model = tencache_fx.offload(network())
    optimizer, run = AdamW(model.parameters(), lr=1e-3), run_of(model, way)
    versions = []
    for _ in range(4):
        run(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.state_dict()
        versions.append([home.version for home in parameters_of(engines()[0])])
    assert versions[1:] == versions[:-1]


def test_who_has_other_data_keeps_it_at_the_end() -> None:
    model = tencache_fx.offload(network())
    model[0].weight.data = torch.full((WIDTH, WIDTH), 0.01)
    model[2].weight.data = torch.ones(2 * WIDTH, WIDTH)
    tencache_fx.close()
    assert torch.equal(model[0].weight, torch.full((WIDTH, WIDTH), 0.01))
    assert torch.equal(model[2].weight, torch.ones(2 * WIDTH, WIDTH))


def test_an_old_state_dict_is_refused_where_the_device_is_newer() -> None:
    model = tencache_fx.offload(network())
    optimizer, run = AdamW(model.parameters(), lr=1e-3), run_of(model, "64MB")
    old = model.state_dict()
    for _ in range(2):
        run(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(home.updated_on_device for home in parameters_of(engines()[0]))
    old["0.weight"].zero_()
    with pytest.raises(tencache_fx.UsageError, match=r"0\.weight .* call state_dict\(\) anew"):
        run(torch.randn(8, WIDTH))
    assert model.state_dict()["0.weight"].norm() > 1.0


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = network()
        expected = model(torch.ones(8, WIDTH))
        assert torch.equal(tencache_fx.offload(model)(torch.ones(8, WIDTH)), expected)


def test_what_stays_may_read_what_is_offloaded() -> None:
    """The attention's own weight is trained, and stays; that of its child is frozen."""
    model = nn.ModuleList([nn.MultiheadAttention(WIDTH, 4), *(linear() for _ in range(120))]).requires_grad_(False)
    model[0].in_proj_weight.requires_grad_(True)
    tencache_fx.offload(model)
    assert find_offloaded(model[0].in_proj_weight) is None
    assert find_offloaded(model[0].out_proj.weight) is not None
    x = torch.randn(4, 2, WIDTH)
    model[0](x, x, x)[0].sum().backward()
    assert model[0].in_proj_weight.grad.norm() > 0


def test_what_passes_through_a_module_brings_nothing_back() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x) @ self.weight, c

    layers = tencache_fx.offload(nn.ModuleList([Passes(), Passes()]))
    optimizer = AdamW(layers.parameters(), lr=1e-3, step_in_backward=True)
    for _ in range(2):
        start = torch.randn(WIDTH, requires_grad=True)
        x, c = torch.randn(8, WIDTH), start * 2
        for layer in layers:
            x, c = layer(x, c)
        (x.square().mean() + c.sum()).backward()
        assert not any(home.on_device for home in parameters_of(engines()[0]) if not home.name.endswith("bias"))
        optimizer.step()


def test_who_is_gone_is_not_taken_over_from() -> None:
    model = tencache_fx.offload(network())
    first = AdamW(model.parameters(), step_in_backward=True)
    del first
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = AdamW(model.parameters())
        model(torch.ones(8, WIDTH)).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        second.step()
    assert {int(state["step"]) for state in second.state.values()} == {1}


def test_layers_of_one_kind_share_their_code() -> None:
    """Twelve of them, each a frame of its own: more than Dynamo compiles of one function."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = x + layer(x)
            return x.square().mean()

    plain, model, x = Layers(), Layers(), torch.randn(8, WIDTH)
    plain(x).backward()
    tencache_fx.offload(model, "cpu")
    before = REGIONS.compilations
    compiled(model, {**EAGER, "compiler": "eager"})(x).backward()
    assert REGIONS.compilations - before <= 3, "the first one's input needs no gradient"
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad.to(one.grad.device))


def test_what_a_forward_makes_of_its_layers_breaks_no_graph() -> None:
    """Models of transformers run `self.layers[:n]`: a new list, which takes in modules with offloaded parameters."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(linear() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights = nn.ParameterList([self.layers[3].weight])
            for layer in self.layers[:2]:
                x = x + torch.tanh(layer(x))
            x = nn.Sequential(self.layers[2], nn.Tanh())(x)
            return nn.functional.linear(x, weights[0]).square().mean()

    plain, model, x = Layers(), Layers(), torch.randn(8, WIDTH)
    plain(x).backward()
    tencache_fx.offload(model, "cpu")
    compiled(model, {**EAGER, "compiler": "eager"}, fullgraph=True)(x).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, None if other.grad is None else other.grad.to(one.grad.device))


def test_what_traced_code_puts_an_offloaded_model_into_is_guarded_from_being_spread() -> None:
    model, holder = linear(), nn.Module()
    tencache_fx.offload(model, "cpu")

    @torch.compile(backend="eager")
    def take_in(x: Tensor) -> Tensor:
        holder.inner = model
        return x + 1

    take_in(torch.ones(1))
    assert "_distribute_module_applied" in vars(holder), "where torch looks before it spreads parameters"
