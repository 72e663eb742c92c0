"""State in host memory: the same steps as torch's own AdamW with fp32 master weights, whatever copies do in between."""

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import eventually
from faulty_streams import FaultyCpuStreams
from torch import Tensor, nn

import tencache_fx
from tencache_fx.errors import BudgetError, OptionError, UsageError
from tencache_fx.model_state import optimizer as optimizer_module
from tencache_fx.model_state import placement, staged_update
from tencache_fx.model_state.update import run_piece
from tencache_fx.optim import AdamW, StreamedOptimizer
from tencache_fx.runtime.engine_registry import engines, install_engine

CPU = torch.device("cpu")
STATE = ("master", "exp_avg", "exp_avg_sq")


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Weights of all sorts: a scalar, a bias of one, channels last, transposed, tied, frozen."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 40))
    first.to(memory_format=torch.channels_last)
    second = nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 1))
    second[3].weight = second[1].weight
    second[1].bias.requires_grad_(requires_grad=False)
    model = nn.Sequential(first, second)
    model.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
    model.register_parameter("turned", nn.Parameter(torch.randn(7, 5).t()))
    return model.to(dtype)


def linears() -> nn.Module:
    """Large weights, and small ones, which are not offloaded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 8, 8, generator=generator).to(model.scale.dtype)
    return (model(x) * model.scale + model.turned.square().mean()).square().mean()


def groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() <= 1]}]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Two backwards a step, gradients clipped, a schedule; `before` is called before each step of the optimizer."""
    losses = []
    for step in steps:
        for group, lr in zip(optimizer.param_groups, (1e-2, 2e-2), strict=True):
            group["lr"] = lr / (1 + step)
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model, 2 * step + part)
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before()
        optimizer.step()
    return losses


class WithMasters:
    """torch's own: AdamW on fp32 copies of a model's parameters, rounded into the model after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = []
        mine = groups(model)
        for group in mine:
            masters = [nn.Parameter(p.detach().float().clone()) for p in group["params"]]
            self.pairs += zip(group["params"], masters, strict=True)
            group["params"] = masters
        self.inner = torch.optim.AdamW(mine)
        self.param_groups = self.inner.param_groups

    def zero_grad(self) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None

    def step(self) -> None:
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in host memory however small a parameter is."""
    monkeypatch.setattr(placement, "LEAST_BYTES", 0)


@pytest.fixture(autouse=True, params=["small", pytest.param("large", marks=pytest.mark.slow)])
def small_or_large(request: pytest.FixtureRequest) -> None:
    """State on the device and in host memory, wherever that is for parameters of these sizes."""
    if request.param == "large":
        request.getfixturevalue("all_large")


@pytest.fixture(params=[None, 2048])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter in one piece, and in many."""
    if request.param is not None:
        monkeypatch.setattr(staged_update, "PIECE_BYTES", request.param)
        monkeypatch.setattr(optimizer_module, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("small_pieces", [2048], indirect=True)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_fifty_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    model = network(dtype)
    other = copy.deepcopy(model)
    mine, theirs = AdamW(groups(model)), WithMasters(other)
    losses = train(model, mine, range(25))
    assert losses == pytest.approx(train(other, theirs, range(25)), rel=1e-4 if dtype == torch.float32 else 5e-2)
    if dtype == torch.float32:
        train(model, mine, range(25, 50))
        train(other, theirs, range(25, 50))
        for (parameter, master), name in itertools.product(theirs.pairs, STATE[1:]):
            if master.grad is None:
                continue
            ours = next(p for p, q in zip(model.parameters(), other.parameters(), strict=True) if q is parameter)
            torch.testing.assert_close(ours, parameter, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(mine.state[ours][name], theirs.inner.state[master][name], rtol=1e-3, atol=1e-7)


def master_of(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the master of its only parameter, whole however it is kept."""
    return optimizer.state_dict()["state"][0]["master"].clone()


def test_one_step_in_low_precision_is_rounded_once() -> None:
    """Behind equal gradients the state is torch's to the last digits, and the weight is the master rounded."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(1000).bfloat16())
    master = nn.Parameter(parameter.detach().float())
    ours = AdamW([parameter], lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW([master], lr=1e-2, weight_decay=0.1)
    for _ in range(10):
        parameter.grad = torch.randn(1000).bfloat16()
        master.grad = parameter.grad.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(master_of(ours), master.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(parameter, master_of(ours).bfloat16())


@pytest.mark.usefixtures("small_pieces")
def test_late_copies_and_dirty_buffers_change_nothing(new_engine: Callable[..., object]) -> None:
    def run(**faults: float) -> tuple[list[float], list[Tensor]]:
        engine = new_engine(streams=FaultyCpuStreams(**faults), host_budget_bytes=1 << 29) if faults else None
        if engine is not None:
            install_engine(engine)
        model = network()
        losses = train(model, AdamW(groups(model)), range(3))
        tencache_fx.close()
        return losses, list(model.parameters())

    losses, parameters = run()
    late_losses, late = run(delay_s=0.0003, seed=1)
    assert late_losses == losses
    assert all(map(torch.equal, parameters, late))


@pytest.mark.parametrize("weights_first", [False, True])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(weights_first: bool) -> None:  # noqa: FBT001
    model = network(torch.bfloat16)
    optimizer = AdamW(groups(model))
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    losses = train(model, optimizer, range(5, 10))
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = network(torch.bfloat16)
    other = AdamW(groups(again))
    loads = [lambda: again.load_state_dict(saved["model"]), lambda: other.load_state_dict(saved["optimizer"])]
    for load in loads if weights_first else reversed(loads):
        load()
    assert train(again, other, range(5, 10)) == losses
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("ours_first", [False, True])
def test_state_moves_to_and_from_torch(ours_first: bool) -> None:  # noqa: FBT001
    makers = [AdamW, torch.optim.AdamW]
    truth = network()
    train_truth = train(truth, AdamW(groups(truth)), range(6))
    model = network()
    first, second = (make(groups(model)) for make in (makers if ours_first else makers[::-1]))
    losses = train(model, first, range(3))
    second.load_state_dict(first.state_dict())
    assert losses + train(model, second, range(3, 6)) == pytest.approx(train_truth, rel=1e-4)


def test_weights_changed_from_outside_are_taken_as_they_are() -> None:
    parameter = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = AdamW([parameter], lr=1e-4, weight_decay=0.0)
    parameter.grad = torch.ones(4).bfloat16()
    optimizer.step()
    kept = master_of(optimizer)
    assert not torch.equal(kept, parameter.float())  # the step was too small to show
    with torch.no_grad():
        parameter[0] = 5.0
    parameter.grad = torch.zeros(4).bfloat16()
    parameter.grad[1] = 1.0
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert master_of(optimizer).tolist() == [5.0, *kept[1:].tolist()]


@pytest.mark.parametrize("change", ["in place", "data", "behind", "vector"])
def test_however_weights_are_changed_it_is_noticed(change: str) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=0.0)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        optimizer.step()
        if change == "in place":
            parameter.data.mul_(3)
        elif change == "data":
            parameter.data = 3 * parameter.data
        elif change == "behind":
            parameter.detach().numpy()[:] *= 3
        else:
            nn.utils.vector_to_parameters(3 * parameter.detach(), [parameter])
    assert parameter.tolist() == [9.0] * 4
    optimizer.step()
    assert optimizer.state[parameter]["master"].tolist() == [9.0] * 4


def test_the_memory_format_may_change_between_steps() -> None:
    def run(turn: bool) -> Tensor:  # noqa: FBT001
        torch.manual_seed(0)
        model = nn.Conv2d(4, 6, 3)
        optimizer = AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            if turn and step == 1:
                model.to(memory_format=torch.channels_last)
            generator = torch.Generator().manual_seed(step)
            model.weight.grad = torch.randn(model.weight.shape, generator=generator)
            optimizer.step()
        return model.weight.detach()

    assert torch.equal(run(turn=False), run(turn=True))


def test_many_sorts_of_parameters_and_settings_are_not_too_many() -> None:
    parameters = [
        nn.Parameter(torch.ones(size, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for size in (0, 1, 7)
    ]
    optimizer = AdamW(parameters)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with torch.autocast("cpu", enabled=threads == 2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert {int(optimizer.state[parameter]["step"]) for parameter in parameters} == {3}


@pytest.mark.parametrize(
    "change", [lambda step: step.fill_(10), lambda step: step.data.fill_(10), lambda step: step.numpy().fill(10)]
)
def test_however_a_count_of_steps_is_changed_the_next_step_goes_on_from_there(change: Callable[[Tensor], Any]) -> None:
    ours, theirs = network(), network()
    optimizers = [AdamW(groups(ours)), torch.optim.AdamW(groups(theirs))]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        train(model, optimizer, range(2))
        for state in list(optimizer.state.values())[1::2]:
            change(state["step"])
        train(model, optimizer, range(2, 4))
        assert [int(state["step"]) for state in optimizer.state.values()][:4] == [4, 12, 4, 12]
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("inside", [{0}, {1}, {0, 1, 2}])
@pytest.mark.parametrize(
    "make", [AdamW, lambda params: StreamedOptimizer(params, torch.optim.AdamW)], ids=["AdamW", "StreamedOptimizer"]
)
def test_steps_within_inference_mode_are_as_others(
    make: Callable[[Any], torch.optim.Optimizer], inside: set[int]
) -> None:
    expected, model = linears(), tencache_fx.offload(linears(), "cpu")
    theirs, ours = torch.optim.AdamW(expected.parameters()), make(model.parameters())
    for step in range(3):
        expected(torch.ones(4, 256)).square().mean().backward()
        model(torch.ones(4, 256)).square().mean().backward()
        theirs.step()
        with torch.inference_mode(step in inside):
            ours.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected.state_dict()[name], atol=1e-5)


def test_state_of_another_size_is_refused_and_nothing_changes() -> None:
    small, large = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(3, 4))
    optimizers = [AdamW([small]), AdamW([large])]
    for optimizer, parameter in zip(optimizers, (small, large), strict=True):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    before = copy.deepcopy(optimizers[0].state_dict()["state"])
    with pytest.raises(OptionError, match=r"master has size \(3, 4\), its parameter \(2, 4\)"):
        optimizers[0].load_state_dict(optimizers[1].state_dict())
    after = optimizers[0].state_dict()["state"]
    assert all(torch.equal(before[0][name], after[0][name]) for name in (*STATE, "step"))


def test_a_parameter_whose_size_has_changed_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    parameter.data, parameter.grad = torch.ones(6), None
    parameter.grad = torch.ones(6)
    with pytest.raises(UsageError, match=r"master has size \(4,\), its parameter \(6,\).*needs a new optimizer"):
        optimizer.step()


def test_a_closure_a_scaler_and_a_skipped_step_are_torchs() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale((parameter * (float("inf") if bad else 1.0)).sum()).backward()
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter, before) is bad
    assert optimizer.state[parameter]["step"] == 1

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    expected = parameter.square().sum().item()
    assert optimizer.step(closure).item() == expected
    assert optimizer.state[parameter]["step"] == 2


def test_autograd_notices_a_weight_updated_before_backward() -> None:
    weight = nn.Parameter(torch.ones(3))
    loss = weight.square().sum()
    weight.grad = torch.ones(3)
    AdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("parameter", "options", "message"),
    [
        (torch.ones(2), {"lr": -1.0}, "AdamW cannot be made with these options: Invalid learning rate: -1.0"),
        (torch.ones(2), {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1"),
        (torch.ones(2), {"eps": float("nan")}, "Invalid epsilon value: nan"),
        (torch.ones(2, dtype=torch.complex64), {}, "complex64"),
        (torch.ones(2, dtype=torch.float64), {}, "float64, and master weights are fp32"),
        (torch.ones(1).expand(3), {}, "strides"),
        (torch.ones(4, 4)[:, :2], {}, "gaps"),
    ],
)
def test_what_cannot_be_used_is_refused(parameter: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AdamW([parameter.detach().requires_grad_()], **options)


def test_a_parameter_that_is_given_twice_is_refused() -> None:
    weight = nn.Parameter(torch.ones(8))
    with pytest.warns(UserWarning, match="duplicate parameters"), pytest.raises(OptionError, match="in a group twice"):
        AdamW([weight, weight])


def test_a_parameter_without_a_size_is_refused() -> None:
    with pytest.raises(OptionError, match="no size yet, as it is of a lazy module; call the model with a batch first"):
        AdamW(nn.LazyLinear(4).parameters())


def test_a_sparse_gradient_is_refused_before_anything_is_updated() -> None:
    embedding, plain = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    (embedding(torch.tensor([1])).sum() + plain.sum()).backward()
    optimizer = AdamW([plain, embedding.weight])
    with pytest.raises(UsageError, match=r"\(4, 2\) is sparse"):
        optimizer.step()
    assert torch.equal(plain, torch.ones(2))


@pytest.mark.usefixtures("all_large")
def test_without_room_for_its_buffers_nothing_is_updated() -> None:
    tencache_fx.configure(host_budget="12KiB")
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    parameter.grad = other.grad = torch.ones(2)
    optimizer = AdamW([parameter, other])
    with pytest.raises(BudgetError, match="host_budget"):  # for three pages, and four are wanted
        optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    tencache_fx.close()
    tencache_fx.configure(reset=True)
    optimizer.step()
    assert not torch.equal(parameter, torch.ones(2))


@pytest.mark.usefixtures("no_leaks", "all_large")
def test_a_failing_copy_says_what_was_updated_and_the_next_step_runs(
    new_engine: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the third gradient: the first pieces have come out before one goes in."""
    streams = FaultyCpuStreams(failing=[4])
    engine = new_engine(streams=streams, host_budget_bytes=1 << 29)
    install_engine(engine)

    def run_late(*given: Any) -> None:
        assert eventually(lambda: streams.copies >= 6)
        run_piece(*given)

    monkeypatch.setattr(optimizer_module, "run_piece", run_late)
    parameters = [nn.Parameter(torch.ones(8)) for _ in range(5)]
    optimizer = AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(8)
    with pytest.raises(Exception, match="copy") as failure:
        optimizer.step()
    counts = [int(optimizer.state[p].get("step", 0)) if p in optimizer.state else 0 for p in parameters]
    assert f"Of 5 parameters {sum(counts)} have been updated" in "\n".join(failure.value.__notes__)
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == 2
    assert engine.pool.acquired_bytes == 0
    optimizer.step()
    assert all(torch.isfinite(p).all() and not torch.equal(p, torch.ones(8)) for p in parameters)


def test_it_trains_a_region_with_a_plan() -> None:
    def run(compile_model: Callable[[nn.Module], Callable[..., Tensor]]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        call, optimizer, x = compile_model(model), AdamW(model.parameters(), lr=1e-2), torch.randn(512, 64)
        losses = []
        for _ in range(5):
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    options = {"device_budget": "1.6MB", "compiler": "eager", "calibrate": False}
    planned = run(lambda model: torch.compile(model, backend="tencache", options=options))
    assert tencache_fx.regions()[-1].plan.transfers
    assert planned == pytest.approx(run(lambda model: model), rel=1e-5)
    assert len(engines()) == 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So little work is done sooner without many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_old_name_of_the_optimizer_tells_the_new_one() -> None:
    with pytest.raises(AttributeError, match="new name: tencache_fx.optim.OffloadedOptimizer"):
        _ = tencache_fx.optim.HomeOptimizer
    with pytest.raises(AttributeError, match="it has AdamW, Muon, OffloadedOptimizer"):
        _ = tencache_fx.optim.Adamw
