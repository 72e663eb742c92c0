"""Any class that updates each element by itself can be in host memory; state in bfloat16."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tied_model import ROOMY, TIGHT, compiled, network, train, weights
from torch import Tensor, fx, nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.errors import OptionError
from tencache_fx.model_state import placement
from tencache_fx.model_state.parameter_store import parameters_of
from tencache_fx.model_state.step_kernel import find_rule
from tencache_fx.model_state.step_tracing import trace_step
from tencache_fx.model_state.stored_form import round_by_hash
from tencache_fx.optim import AdamW, OffloadedOptimizer
from tencache_fx.runtime.engine_registry import engines

CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True, "foreach": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 3.0}),
]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675), as somebody else may have written it."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_((group["beta"] * mean + p.grad * (1 - group["beta"])).sign(), alpha=-group["lr"])
                mean.mul_(0.99).add_(p.grad, alpha=0.01)


@pytest.fixture(autouse=True)
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in host memory however small a parameter is: on the device the kernel is that of updates in host memory."""
    monkeypatch.setattr(placement, "LEAST_BYTES", 0)


def gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize(("optimizer_class", "options"), [*CLASSES, (Lion, {})])
def test_what_is_traced_of_a_class_does_what_it_does(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    parameter = nn.Parameter(torch.randn(8))
    inner = optimizer_class([parameter], **options)
    weight, arrays, scalars = parameter.detach().clone(), {}, {}
    keys = set()
    for step in range(9):
        inner.param_groups[0]["lr"] *= 0.9
        gradients([parameter], step)
        traced = trace_step(optimizer_class, {}, inner.param_groups[0], (8,), scalars, tuple(arrays))
        inner.step()
        keys.add(traced.graph.key)
        arrays |= {name: torch.full((8,), value) for name, value in traced.initial.items()}
        given = [parameter.grad, weight, *(arrays[name] for name in traced.reads), torch.tensor(traced.numbers)]
        weight, *made = fx.Interpreter(fx.GraphModule(nn.Module(), traced.graph.as_fx())).run(*given)
        arrays, scalars = dict(zip(traced.names, made, strict=True)), traced.scalars
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=1e-6)
    assert len(keys) <= 2
    state = {name: value for name, value in inner.state[parameter].items() if value is not None}
    assert {*arrays, *scalars} == set(state)
    for name, value in state.items():
        torch.testing.assert_close({**arrays, **scalars}[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (Lion, {}),
        pytest.param(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}, marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in CLASSES),
    ],
)
def test_steps_are_those_of_the_class(optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Rates change, state goes to torch's own and back on the way, and the second parameter joins later."""
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(9))]
    others = copy.deepcopy(mine)
    ours, theirs = OffloadedOptimizer(mine, optimizer_class, **options), optimizer_class(others, **options)
    for step in range(8):
        for parameters, optimizer in ((mine, ours), (others, theirs)):
            optimizer.param_groups[0]["lr"] *= 0.9
            gradients(parameters, step)
            if step < 2:
                parameters[1].grad = None
            optimizer.step()
        if step == 4:
            saved = copy.deepcopy(ours.state_dict())
            ours = OffloadedOptimizer(mine, optimizer_class, **options)
            ours.load_state_dict(theirs.state_dict())
            theirs.load_state_dict(saved)
        for one, other in zip(mine, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(mine, others, strict=True):
        state = {name: value for name, value in theirs.state[other].items() if value is not None and name != "master"}
        assert ours.state[one].keys() == {"master", *state}
        for name, value in state.items():
            torch.testing.assert_close(ours.state[one][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer_class", "options", "message"),
    [
        (torch.optim.Muon, {}, "Muon only supports 2D parameters"),
        (torch.optim.Adafactor, {}, "Adafactor does more than arithmetic on single elements"),
        (
            torch.optim.LBFGS,
            {},
            "LBFGS cannot update an offloaded parameter: within a step it calls a closure.*; use an",
        ),
        (int, {}, "optimizer_class is int; give a class of torch.optim.Optimizer, such as torch.optim.SGD"),
        (torch.optim.SGD([nn.Parameter(torch.ones(4))]), {}, "optimizer_class is an object of type SGD; give a class"),
        (torch.optim.Optimizer, {}, "Optimizer cannot be made with these options: .*; correct them"),
        (torch.optim.SGD, {"lrr": 1}, "SGD has no option lrr; did you mean lr. its options are: lr, momentum, "),
        (torch.optim.SGD, {"lr": "x"}, "SGD cannot be made with these options: .*'str'.*; correct them"),
        (torch.optim.Adam, {"fused": True, "differentiable": True}, "Adam cannot be made with these options: .fused."),
        (torch.optim.SGD, {"lr": -1.0}, "SGD cannot be made with these options: Invalid learning rate"),
        (
            torch.optim.Adam,
            {"state_dtype": torch.float16},
            "state_dtype is torch.float16; choose torch.float32, torch",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], message: str
) -> None:
    parameter = nn.Parameter(torch.ones(4))
    with pytest.raises(OptionError, match=message):
        OffloadedOptimizer([parameter], optimizer_class, **options)


class Counting(Lion):
    """Keeps a number in its group."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        super().step()


def test_a_class_that_counts_in_its_group_is_refused() -> None:
    with pytest.raises(OptionError, match="Counting changes its own options as it steps"):
        OffloadedOptimizer([nn.Parameter(torch.ones(4))], Counting)


@pytest.mark.parametrize(
    ("make", "now"),
    [(torch.optim.SGD, True), pytest.param(torch.optim.RMSprop, False, marks=pytest.mark.slow)],
)
def test_training_with_offloading_is_that_without(make: type[torch.optim.Optimizer], now: bool) -> None:  # noqa: FBT001
    options = {"lr": 0.05, "momentum": 0.9}
    plain = network()
    expected = train(plain, compiled(plain, ROOMY), OffloadedOptimizer(plain.parameters(), make, **options), range(4))
    tencache_fx.close()
    torch.compiler.reset()
    model = tencache_fx.offload(network())
    optimizer = OffloadedOptimizer(model.parameters(), make, step_in_backward=now, **options)
    run = compiled(model, TIGHT)
    assert train(model, run, optimizer, range(4)) == expected
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=0)
    each_bytes = 4 * (2 + (make is torch.optim.RMSprop))
    homes = [home for home in parameters_of(engines()[0]) if home.parameter.requires_grad]
    assert homes
    assert all(home.state_bytes == each_bytes * home.parameter.numel() for home in homes)
    region = regions()[-1]
    sunk = [storage for storage in region.problem.storages if storage.state_bytes]
    assert sunk
    assert all(storage.state_bytes <= each_bytes * storage.nbytes // 4 for storage in sunk)


def steps(optimizer: torch.optim.Optimizer, count: int, gradient_of: Callable[[int], Tensor]) -> None:
    (parameter,) = optimizer.param_groups[0]["params"]
    for step in range(count):
        parameter.grad = gradient_of(step)
        optimizer.step()


def test_moments_in_bfloat16_take_half_the_memory_and_follow_those_in_fp32() -> None:
    """Also where a step changes them by less than a bfloat16 can show: gradients die down, and so do the squares."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(4096, generator=generator) for _ in range(120)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.ones(4096).bfloat16())
        optimizer = AdamW([parameter], lr=1e-3, betas=(0.9, 0.998), state_dtype=dtype)
        steps(optimizer, 120, lambda step: (noise[step] * 0.95**step).bfloat16())
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == dtype
        state = optimizer.state_dict()["state"][0]
        assert state["master"].dtype == torch.float32
        found.append({name: value.float() for name, value in state.items()})
    exact, short = found
    torch.testing.assert_close(short["exp_avg_sq"].mean(), exact["exp_avg_sq"].mean(), rtol=0.01, atol=0)
    torch.testing.assert_close(short["master"], exact["master"], rtol=0, atol=0.01)


def test_rounding_is_fair_and_keeps_what_is_no_number() -> None:
    value = torch.full((1 << 16,), 1 + 2.0**-9)  # a quarter of the way to the next bfloat16
    other = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    rounded = round_by_hash(value, other)
    assert sorted(set(rounded.tolist())) == [1.0, 1 + 2.0**-7]
    assert (rounded > 1).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(rounded, rounded.bfloat16().float())
    odd = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 3.3e38])
    assert torch.equal(round_by_hash(odd, odd)[:4], odd[:4])
    assert round_by_hash(torch.tensor([float("nan")]), odd[:1]).isnan().all()


def test_state_in_bfloat16_goes_on_from_a_checkpoint_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(100, generator=generator) for _ in range(6)]
    whole, first, second = (nn.Parameter(torch.ones(100)) for _ in range(3))
    options = {"lr": 0.1, "state_dtype": torch.bfloat16}
    steps(AdamW([whole], **options), 6, noise.__getitem__)
    before = AdamW([first], **options)
    steps(before, 3, noise.__getitem__)
    second.data.copy_(first.data)
    after = AdamW([second], **options)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    steps(after, 3, lambda step: noise[step + 3])
    assert torch.equal(whole, second)


class Other(torch.optim.Optimizer):
    """Does what its `change` does, given the parameter, its gradient, its state and itself."""

    change: Callable[..., None]

    def __init__(self, params: Any, lr: float = 0.1, rate: float = 0.9) -> None:
        self.rate, self.count = rate, 0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            type(self).change(self, p, p.grad, self.state[p])


def other(change: Callable[..., None]) -> type[Other]:
    return type(change.__name__.title(), (Other,), {"change": change})


def keeps_the_weight_before(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["before"] = p.clone()
    p.sub_(g, alpha=0.1)


def swaps(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    one, two = state.setdefault("one", torch.zeros_like(p)), state.setdefault("two", torch.ones_like(p))
    state["one"], state["two"] = two, one + g
    p.sub_(two, alpha=0.1)


def looks_ahead(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    slow = state.setdefault("slow", p.clone())
    p.sub_(g, alpha=0.1)
    state["step"] = state.get("step", 0) + 1
    if state["step"] % 3 == 0:
        slow.lerp_(p, 0.5)
        p.copy_(slow)


def has_a_rate_of_its_own(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.mul_(self.rate).sub_(g)


def divides_by_its_step(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["step"] = state.get("step", 0) + 1
    p.sub_(g / state["step"]).add_(state["step"] * 2 - 1)


def looks_at_the_dimensions(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.sub_(g, alpha=0.1 if p.dim() > 1 else 0.2)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        keeps_the_weight_before,
        swaps,
        looks_ahead,
        has_a_rate_of_its_own,
        divides_by_its_step,
        looks_at_the_dimensions,
    ],
)
def test_whatever_a_class_does_to_elements_is_done(change: Callable[..., None], dim: int) -> None:
    """Step by step beside the class itself; kernels run uncompiled."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn((3,) * dim, generator=generator))
    inner = other(change)([parameter], rate=0.5)
    rule, group = find_rule(type(inner), torch.float32, {"rate": 0.5})
    arrays = {name: torch.zeros(3**dim) for name in rule.arrays(group, dim)}
    arrays["master"].copy_(parameter.detach().flatten())
    scalars: dict[str, Any] = {}
    made: frozenset[str] = frozenset()
    weight, kernels = torch.empty(3**dim), set()
    for _ in range(7):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        step = rule.step(group, dim, scalars, made)
        if not made:
            arrays |= {name: torch.full_like(weight, value) for name, value in step.initial.items()}
        step.kernel._update(parameter.grad.flatten().clone(), weight, *arrays.values(), step.numbers)
        scalars, made = dict(step.after), frozenset(arrays)
        kernels.add(step.kernel)
        inner.step()
        torch.testing.assert_close(weight, parameter.detach().flatten(), rtol=1e-6, atol=1e-6)
        for name, value in arrays.items():
            expected = inner.state[parameter][name].flatten() if name != "master" else weight
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    assert len(kernels) <= 3


def wants_matrices(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    if p.dim() != 2:
        raise ValueError("no matrix")
    p.sub_(g, alpha=0.1)


def test_state_of_a_class_for_matrices_only_is_loaded() -> None:
    optimizer = OffloadedOptimizer([nn.Parameter(torch.ones(3, 3))], other(wants_matrices))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(OptionError, match="cannot update an offloaded parameter: no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def counts(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    self.count += 1
    p.sub_(g, alpha=0.1 / self.count)


def has_state_for_all(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    self.state["all"] = {"step": 1}


def keeps_one_twice(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    state["one"] = state["two"] = state.get("one", torch.zeros_like(p)).add_(g)


def throws_dice(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.sub_(g * torch.rand(()))


def looks_at_the_size(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.sub_(g, alpha=p.numel() ** -0.5)


def hardens(self: Other, p: Tensor, g: Tensor, state: dict[str, Any]) -> None:
    p.copy_(nn.functional.hardtanh(p, -2.0, 2.0))


@pytest.mark.parametrize("params", [7, None, nn.Linear(4, 4), torch.ones(4)], ids=lambda params: type(params).__name__)
def test_parameters_that_are_none_are_refused(params: Any) -> None:
    for make in (AdamW, lambda params: OffloadedOptimizer(params, torch.optim.SGD)):
        with pytest.raises(OptionError, match=rf"params is a {type(params).__name__}; give model\.parameters\(\)"):
            make(params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (counts, "changes its own options"),
        (has_state_for_all, "has state of more than its parameters"),
        (keeps_one_twice, r"keeps what shares memory.*\(one, two\)"),
        (throws_dice, "more than arithmetic on single elements .*rand"),
        (looks_at_the_size, "depends on a parameter's size"),
        (hardens, "(?s)cannot update an offloaded parameter.*hardtanh"),
    ],
)
def test_what_would_go_wrong_later_is_refused_at_once(change: Callable[..., None], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        OffloadedOptimizer([nn.Parameter(torch.ones(4))], other(change))


@pytest.mark.parametrize("at_home", [pytest.param(False, marks=pytest.mark.slow), True])
def test_options_and_state_may_be_changed_on_the_way(at_home: bool) -> None:  # noqa: FBT001
    """Momentum comes and goes, groups change places, state is forgotten."""

    def run(make: Callable[..., torch.optim.Optimizer], *, home: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 160))
        if home:
            tencache_fx.offload(model)
        optimizer = make([{"params": list(layer.parameters()), "lr": 0.1 * k} for k, layer in enumerate(model, 1)])
        for step in range(8):
            if step == 2:
                optimizer.param_groups.reverse()
            if step == 3:
                optimizer.param_groups[0]["momentum"] = 0.9
            if step == 5:
                optimizer.state.clear()
            if step == 6:
                optimizer.param_groups[0]["momentum"] = 0.0
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    expected = run(partial(torch.optim.SGD, lr=0.1), home=False)
    found = run(partial(OffloadedOptimizer, optimizer_class=torch.optim.SGD, lr=0.1), home=at_home)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_kernels_do_not_depend_on_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        parameter = nn.Parameter(torch.ones(9, dtype=torch.float32))
        optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=0.1)
        step = optimizer._rule.step(optimizer.param_groups[0], 1, {}, ())
        kernel = step.kernel.compiled(torch.float32, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    master, weight = torch.ones(9), torch.ones(9)
    kernel(torch.ones(9), weight, master, step.numbers)
    torch.testing.assert_close(weight, torch.full((9,), 0.9))


def test_a_step_compiles_one_kernel_whatever_its_numbers() -> None:
    rule, group = find_rule(torch.optim.AdamW, torch.float32, {"lr": 1e-3})
    kernels = set()
    scalars: dict[str, Any] = {}
    made: frozenset[str] = frozenset()
    for step in range(5):
        found = rule.step({**group, "lr": 1e-3 / (1 + step), "betas": (0.9 - step / 100, 0.99)}, 2, scalars, made)
        kernels.add(found.kernel)
        scalars, made = dict(found.after), frozenset(rule.arrays(group, 2))
    assert len(kernels) == 1
    with pytest.raises(OptionError, match="AdamW cannot update an offloaded parameter: 'step'"):
        rule.step(group, 2, {}, made)


@pytest.mark.parametrize("count", [100, 1 << 17])
@pytest.mark.parametrize("least_bytes", [0, 1 << 30])
def test_state_of_two_dtypes_can_be_saved(monkeypatch: pytest.MonkeyPatch, count: int, least_bytes: int) -> None:
    monkeypatch.setattr(placement, "LEAST_BYTES", least_bytes)
    parameter = nn.Parameter(torch.ones(count).bfloat16())
    optimizer = AdamW([parameter], state_dtype=torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert count * 8 <= file.tell() <= count * 8 + 4096  # no more than there is
    file.seek(0)
    found, state = torch.load(file)["state"][0], optimizer.state_dict()["state"][0]
    assert all(torch.equal(found[name], state[name]) for name in ("master", "exp_avg", "exp_avg_sq"))


class LateDecay(torch.optim.Optimizer):
    """Plain descent, with decay of matrices only, from the third step on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > 2 and parameter.dim() > 1:
                    parameter.mul_(1 - 0.5 * group["lr"])
                parameter.add_(parameter.grad, alpha=-group["lr"])


def test_a_class_may_come_to_treat_matrices_otherwise() -> None:
    found = []
    for make in (partial(OffloadedOptimizer, optimizer_class=LateDecay), LateDecay):
        parameters = [nn.Parameter(torch.ones(size)) for size in ((4,), (4, 4))]
        optimizer = make(parameters)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        found.append([parameter.detach().clone() for parameter in parameters])
    assert all(torch.allclose(ours, torchs) for ours, torchs in zip(*found, strict=True))
    assert not torch.allclose(found[1][0][0], found[1][1][0, 0])
