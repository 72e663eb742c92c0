"""Optimizers that look at whole matrices: the weights and states of torch's own, wherever the parameters are."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from combinations import each_in_a_quick_case
from failing_copies import step_with_failing_copy
from faulty_streams import FaultyCpuStreams, FaultyCudaStreams
from harness import Block, faulty_engine
from tied_model import TIGHT, compiled, network, train
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError, OptionError, UsageError
from tencache_fx.hardware.devices import resolve_device
from tencache_fx.model_state import streamed_optimizer, streamed_update, update_chunks
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.optim import AdamW, Muon, StreamedOptimizer
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine

CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Muon, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"amsgrad": True}),
]
Optimizers = list[torch.optim.Optimizer]


class Whitening(torch.optim.Optimizer):
    """Somebody's own: it keeps a matrix of another size than the parameter, and another one from its third step on."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, rows = self.state[p], p.grad.reshape(len(p), -1)
                state["steps"] = state.get("steps", 0) + 1
                state["product"] = state.get("product", torch.eye(len(p))) + rows @ rows.T
                if state["steps"] >= 3:
                    state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.5)
                p.add_(torch.linalg.solve(state["product"], rows).reshape(p.shape), alpha=-group["lr"])


@pytest.fixture(autouse=True)
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in host memory however small a parameter is."""
    monkeypatch.setattr(streamed_optimizer, "LEAST_BYTES", 0)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, which Muon is for, and all others."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def torchs(model: nn.Module, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> Optimizers:
    matrices, others = split(model)
    return [cls(matrices, **options), torch.optim.AdamW(others, fused=False, foreach=False)]


def ours(model: nn.Module, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> Optimizers:
    matrices, others = split(model)
    return [StreamedOptimizer(matrices, cls, **options), StreamedOptimizer(others, torch.optim.AdamW)]


class Both:
    """Two optimizers as one."""

    def __init__(self, both: Optimizers) -> None:
        self.both = both
        self.param_groups = [group for each in both for group in each.param_groups]

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    packed = optimizer.state_dict()["state"]
    return [packed[index] for index in sorted(packed)]


def check_states(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for one, other in zip(states(mine), states(theirs), strict=True):
        other = {name: value for name, value in other.items() if value is not None}
        assert set(one) - {"master"} == set(other)
        for name, value in other.items():
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(value)), name


@each_in_a_quick_case(
    made=[pytest.param(each, id=each[0].__name__) for each in [*CLASSES, (Whitening, {})]],
    where=["on the device", "offloaded", "compiled", "roomy"],
    clip=[None, 0.5],
)
def test_weights_and_states_are_those_of_torch(
    made: tuple[type[torch.optim.Optimizer], dict[str, Any]], where: str, clip: float | None
) -> None:
    """With late copies, poisoned memory and several backwards; norms in host memory are added up in another order."""
    cls, options = made
    is_exact = clip is None or where != "compiled"
    budget = {"compiled": TIGHT, "roomy": "8MB"}.get(where)
    plain = network()
    theirs = torchs(plain, cls, options)
    run = plain if budget is None else compiled(plain, None)
    losses = train(plain, run, Both(theirs), range(5), parts=2, clip=clip)
    torch.compiler.reset()
    tencache_fx.close()
    with faulty_engine():
        model = network()
        if where != "on the device":
            tencache_fx.offload(model, "cpu")
        run = model if budget is None else compiled(model, budget)
        mine = ours(model, cls, options)
        found = train(model, run, Both(mine), range(5), parts=2, clip=clip)
        if is_exact:
            assert found == losses
            check_equal(values(model), values(plain))
            for one, other in zip(mine, theirs, strict=True):
                check_states(one, other)
        else:
            assert found == pytest.approx(losses, rel=1e-4)
        offloaded = [find_offloaded(p) for p in split(model)[0]]
        if where != "on the device":
            assert any(each is not None and each.updated_on_device for each in offloaded) == (where == "roomy")
        del run, model, mine, offloaded


def test_a_half_is_trained_by_its_master() -> None:
    """The weights of torch's optimizer on an fp32 copy, whose gradients are those of the rounded weights."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False).bfloat16()
    master = nn.Parameter(model.weight.detach().float())
    theirs, mine = torch.optim.Muon([master], lr=0.01), Muon(model.parameters(), lr=0.01)
    for step in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        master.grad = model.weight.grad.float()
        theirs.step()
        mine.step()
        mine.zero_grad()
        assert torch.equal(model.weight.detach(), master.detach().bfloat16())
    (state,) = states(mine)
    assert torch.equal(state["master"], master.detach())


@pytest.mark.parametrize("from_ours", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "options"), CLASSES)
def test_states_are_saved_and_loaded(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype, *, from_ours: bool
) -> None:
    """Half of the steps with one object, the others with another one that has loaded its state."""

    def made(model: nn.Module, *, own: bool) -> torch.optim.Optimizer:
        return StreamedOptimizer(model.parameters(), cls, **options) if own else cls(model.parameters(), **options)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False)).to(dtype)

    def some(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if dtype == torch.bfloat16 and not from_ours:
        pytest.skip("torch's own has no master weights, so its steps are others")
    whole = net()
    some(whole, made(whole, own=from_ours), range(6))
    model = tencache_fx.offload(net(), "cpu") if from_ours else net()
    first = made(model, own=from_ours)
    some(model, first, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = net()
    again.load_state_dict(saved["model"])
    if not from_ours:
        tencache_fx.offload(again, "cpu")
    second = made(again, own=True)
    second.load_state_dict(saved["optimizer"])
    some(again, second, range(3, 6))
    check_equal(values(again), values(whole))


def trained_matrix(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 2) -> Any:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 48))
    optimizer = make([parameter])
    for step in range(steps):
        parameter.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return parameter, optimizer


def test_a_copy_goes_on_by_itself() -> None:
    expected, _ = trained_matrix(lambda params: torch.optim.Muon(params, lr=0.01), 4)
    parameter, optimizer = trained_matrix(lambda params: Muon(params, lr=0.01), 2)
    other_parameter, other = copy.deepcopy((parameter, optimizer))
    for step in (2, 3):
        other_parameter.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(step))
        other.step()
    assert torch.equal(other_parameter, expected)
    assert not torch.equal(parameter, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_was_set_between_two_steps_is_taken_as_it_is(dtype: torch.dtype) -> None:
    model = tencache_fx.offload(nn.Linear(256, 192, bias=False).to(dtype), "cpu")
    optimizer = StreamedOptimizer(model.parameters(), torch.optim.SGD, lr=0.0, momentum=0.9)
    x = torch.randn(8, 256).to(dtype)
    for value in (None, 0.25, 0.5):
        if value is not None:
            with tencache_fx.summon(model), torch.no_grad():
                model.weight.fill_(value)
        model(x).float().square().mean().backward()
        optimizer.step()
        assert value is None or torch.equal(model.state_dict()["weight"], torch.full((192, 256), value, dtype=dtype))
    model.state_dict()["weight"].fill_(2.0)
    model(x).float().square().mean().backward()
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], torch.full((192, 256), 2.0, dtype=dtype))


@pytest.mark.parametrize("offloaded", [False, True])
def test_without_room_for_its_state_a_parameter_is_as_it_was(
    new_engine: Callable[..., Engine], *, offloaded: bool
) -> None:
    """There is room for the state of the first of two."""
    state_bytes = 2 * 4 * 256 * 256
    engine = new_engine(host_budget_bytes=state_bytes + (2 * 4 * 256 * 256 if offloaded else 0) + 8192)
    engine.serves_all = True
    install_engine(engine)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    if offloaded:
        tencache_fx.offload(model, "cpu")
    before = values(model)
    optimizer = StreamedOptimizer(model.parameters(), torch.optim.AdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones(256, 256)
    with pytest.raises(BudgetError, match="host_budget"):
        optimizer.step()
    after = values(model)
    assert not torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert list(optimizer.state) == [model[0].weight]
    tencache_fx.configure(host_budget="64MiB")
    optimizer.step()
    assert list(optimizer.state) == [model[0].weight, model[1].weight]
    assert not torch.equal(values(model)["1.weight"], before["1.weight"])


@pytest.mark.parametrize("failing", range(6))
def test_a_copy_that_fails_is_told(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is updated by itself."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", 0)
    torch.manual_seed(0)
    model, told = step_with_failing_copy(failing)
    assert told == (failing in {3, 4, 5})  # copies out; the others are copies in
    with tencache_fx.summon(model):
        assert all(p.isfinite().all() for p in model.parameters())


class Spread:
    """What an offloaded parameter has that is a part of one."""


@pytest.mark.parametrize(
    ("cls", "params", "options", "message"),
    [
        (torch.optim.Muon, [nn.Parameter(torch.ones(4))], {}, "Muon only supports 2D parameters"),
        (torch.optim.LBFGS, [nn.Parameter(torch.ones(4, 4))], {}, "within a step it calls a closure"),
        (torch.optim.Muon, [nn.Parameter(torch.ones(4, 4))], {"lrr": 1}, "Muon has no option lrr"),
        (torch.optim.Muon, [nn.Parameter(torch.ones(4, 4, dtype=torch.float64))], {}, "float64"),
        (torch.optim.Adafactor, [nn.Parameter(torch.ones(4, 4))], {"lr": -1.0}, "cannot be made with these options"),
        (int, [nn.Parameter(torch.ones(4, 4))], {}, "give a class of torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_used_is_refused(cls: Any, params: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StreamedOptimizer(params, cls, **options)


def test_rows_of_a_matrix_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tencache_fx.offload(nn.Linear(128, 128, bias=False), "cpu")
    offloaded = find_offloaded(model.weight)
    assert offloaded is not None
    monkeypatch.setattr(offloaded, "shard", Spread())
    with pytest.raises(OptionError, match="weight is spread over ranks, each with some of its rows"):
        Muon(model.parameters())


def test_a_sparse_gradient_is_refused_before_anything_is_updated() -> None:
    table, matrix = nn.Embedding(16, 64, sparse=True), nn.Linear(64, 64, bias=False)
    before = matrix.weight.detach().clone()
    optimizer = StreamedOptimizer([matrix.weight, table.weight], torch.optim.Adafactor)
    matrix(table(torch.arange(4))).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    assert torch.equal(matrix.weight, before)


def test_it_says_how_to_use_classes_that_look_at_whole_matrices() -> None:
    with pytest.raises(OptionError, match="StreamedOptimizer"):
        tencache_fx.optim.OffloadedOptimizer([nn.Parameter(torch.ones(4, 4))], torch.optim.Adafactor)


def test_scaled_losses() -> None:
    """A scaler's factor reaches the update; a step with infinite gradients is left out."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, bias=False)
    model = tencache_fx.offload(copy.deepcopy(plain), "cpu")
    pairs = [(plain, torch.optim.Muon(plain.parameters())), (model, Muon(model.parameters()))]
    for each, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            loss = each(x).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    check_equal(values(model), values(plain))


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_half_whose_memory_format_changes_keeps_its_weight(*, offloaded: bool) -> None:
    def trained(format_from: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(64, 64, 3, bias=False)).bfloat16()
        optimizer = StreamedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        for step in range(3):
            if step == format_from:
                saved = optimizer.state_dict()
                model = model.to(memory_format=torch.channels_last)
                if offloaded:
                    model = tencache_fx.offload(model, "cpu")
                optimizer = StreamedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
                optimizer.load_state_dict(saved)
            change = torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(step))
            model[0].weight.grad = torch.empty_like(model[0].weight).copy_(change)
            optimizer.step()
        return model.state_dict()["0.weight"].clone().contiguous()

    assert torch.equal(trained(1), trained(9))


def test_a_number_keeps_its_master() -> None:
    number, matrix = (nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in ((), (1,)))
    optimizer = StreamedOptimizer([number, matrix], torch.optim.SGD, lr=1e-3)
    for _ in range(20):
        for each in (number, matrix):
            each.grad = torch.ones_like(each)
        optimizer.step()
    assert number.item() == matrix.item() < 1


@pytest.mark.parametrize(("cls", "options"), CLASSES)
def test_halves_states_of_torch_are_loaded(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, 48).bfloat16())
    theirs = cls([parameter], **options)
    parameter.grad = torch.randn(64, 48).bfloat16()
    theirs.step()
    mine = StreamedOptimizer([parameter], cls, **options)
    mine.load_state_dict(theirs.state_dict())
    mine.step()
    (state,) = states(mine)
    assert {each.dtype for each in state.values() if isinstance(each, Tensor) and each.dim()} == {torch.float32}
    theirs.load_state_dict(mine.state_dict())
    mine.load_state_dict(theirs.state_dict())
    mine.step()


class Growing(torch.optim.Optimizer):
    """It keeps one tensor more from its second step on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                for name in ("one", "two")[: state["steps"]]:
                    state.setdefault(name, torch.zeros_like(p)).add_(p.grad)
                p.sub_(state["one"], alpha=group["lr"])


def test_a_state_that_grows_where_there_is_no_room_changes_nothing(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(host_budget_bytes=4 * 256 * 256 + 8192)
    engine.serves_all = True
    install_engine(engine)
    parameter = nn.Parameter(torch.ones(256, 256))
    parameter.grad = torch.ones(256, 256)
    optimizer = StreamedOptimizer([parameter], Growing)
    optimizer.step()
    before = parameter.detach().clone()
    with pytest.raises(BudgetError, match="host_budget"):
        optimizer.step()
    assert torch.equal(parameter, before)
    assert optimizer.state[parameter]["steps"] == 1
    assert torch.equal(optimizer.state[parameter]["one"], torch.ones(256, 256))


class Counting(torch.optim.Optimizer):
    """It counts its steps where all parameters of a group see it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["count"])


def test_a_class_that_changes_its_options_is_told_before_anything_is_written() -> None:
    parameter, _ = trained_matrix(lambda params: torch.optim.SGD(params, lr=0.0), 1)
    before = parameter.detach().clone()
    with pytest.raises(UsageError, match="Counting changes count in its step"):
        StreamedOptimizer([parameter], Counting).step()
    assert torch.equal(parameter, before)


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(OptionError, match="twice"):
        StreamedOptimizer([parameter, parameter], torch.optim.SGD)


def test_a_model_that_is_offloaded_later_knows_of_its_state() -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = StreamedOptimizer(model.parameters(), torch.optim.AdamW)
    for step in range(3):
        if step == 1:
            tencache_fx.offload(model, "cpu")
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    offloaded = find_offloaded(model.weight)
    assert offloaded is not None
    assert offloaded.optimizer_state is not None
    assert offloaded.state_bytes == 2 * 4 * 256 * 256


def test_who_reads_a_weight_is_told_if_waiting_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose error stays: a wait for one copy raises, and the updates of others end all the same."""
    streams = FaultyCpuStreams()
    install_engine(Engine(torch.device("cpu"), host_budget_bytes=1 << 26, streams=streams))
    model = tencache_fx.offload(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), "cpu")
    model(torch.ones(2, 256)).square().mean().backward()
    optimizer = Muon(model.parameters())

    def fails(events: Any) -> None:
        raise RuntimeError("an error that stays")

    with monkeypatch.context() as patch:
        patch.setattr(streams, "wait_host", fails)
        with pytest.raises(RuntimeError, match="an error that stays"):
            optimizer.step()
    for parameter in model.parameters():
        offloaded = find_offloaded(parameter)
        assert offloaded is not None
        assert not offloaded.updating


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [0, 1 << 24, 128 << 20])
@pytest.mark.parametrize("cls", [torch.optim.Muon, torch.optim.Adafactor])
def test_weights_on_a_gpu_are_those_of_torch(
    cls: type[torch.optim.Optimizer], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With late copies, poisoned memory, and so little room that copies out are waited for."""
    monkeypatch.setattr(update_chunks, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(streamed_update, "ROOM_BYTES", 1 << 25)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block(1024) for _ in range(3))).cuda()

    def steps(model: nn.Module, both: Optimizers) -> None:
        for step in range(4):
            x = torch.randn(64, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for each in both:
                each.step()
                each.zero_grad()
            for p in model.parameters():  # takes memory that copies may still read
                torch.full_like(p, float("nan"))

    plain = net()
    steps(plain, torchs(plain, cls, {}))
    device = resolve_device(torch.device("cuda"))
    streams = FaultyCudaStreams(device, delay_cycles=3_000_000)
    engine = Engine(device, host_budget_bytes=1 << 30, streams=streams)
    install_engine(engine)
    try:
        model = tencache_fx.offload(net(), "cuda")
        matrices, others = split(model)
        steps(model, [StreamedOptimizer(matrices, cls), AdamW(others)])
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name].cpu(), rtol=1e-3, atol=1e-4)
    finally:
        del model
        engine.close()
