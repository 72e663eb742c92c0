"""Models with offloaded parameters: the same training as without, whatever copies and updates do meanwhile."""

import copy
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import collect
from faulty_streams import FaultyCpuStreams
from one_part_update import OnePart
from tied_model import HIDDEN, ROOMY, TIGHT, TIGHT_BF16, batch, compiled, network, train, trained, weights
from torch import Tensor, nn

import tencache_fx
from tencache_fx.api import regions
from tencache_fx.errors import BudgetError, InvariantError, OptionError, UsageError
from tencache_fx.model_state.host_gradient import HostGradient
from tencache_fx.model_state.modules import roomy_engine
from tencache_fx.model_state.parameter_store import find_offloaded, parameters_of
from tencache_fx.model_state.update import ParameterUpdate
from tencache_fx.optim import AdamW
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.parameter_schedule import first_parameters, keep_resident
from tencache_fx.planning.plan import TransferKind
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.planning.problem import Kind
from tencache_fx.planning.recompute import recompute
from tencache_fx.planning.search import make_plan
from tencache_fx.planning.tuning import TUNING
from tencache_fx.runtime.engine_registry import engines, install_engine


@pytest.mark.parametrize(
    ("dtype", "budget"),
    [
        pytest.param(torch.float32, TIGHT, marks=pytest.mark.slow),
        (torch.bfloat16, TIGHT_BF16),
        pytest.param(torch.float32, ROOMY, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_fifty_steps_are_those_of_a_model_on_the_device(dtype: torch.dtype, budget: str | None) -> None:
    losses, after = trained(home=False, dtype=dtype, steps=50)
    at_home, after_home = trained(home=True, dtype=dtype, steps=50, budget=budget)
    assert at_home == losses
    assert all(torch.equal(after_home[name], value) for name, value in after.items())


def test_clipping_and_accumulation_are_those_of_torch() -> None:
    """Clipping by gradients in fp32 is exact but for the order of sums."""
    losses, after = trained(home=False, dtype=torch.float32, parts=4, clip=0.5, steps=3)
    at_home, after_home = trained(home=True, dtype=torch.float32, parts=4, clip=0.5, steps=3)
    torch.testing.assert_close(at_home, losses)
    torch.testing.assert_close(after_home, after, rtol=1e-4, atol=1e-5)
    unclipped, _ = trained(home=True, dtype=torch.float32, parts=4, steps=3)
    assert unclipped[-1] != pytest.approx(losses[-1], rel=1e-7)


def test_updates_during_backward_are_those_of_a_step() -> None:
    assert trained(home=True, dtype=torch.float32, now=True)[0] == trained(home=False, dtype=torch.float32)[0]


@pytest.mark.parametrize("now", [False, True])
def test_late_copies_and_dirty_buffers_change_nothing(new_engine: Callable[..., object], now: bool) -> None:  # noqa: FBT001
    losses, after = trained(home=False, dtype=torch.float32, steps=5)
    install_engine(new_engine(streams=FaultyCpuStreams(delay_s=0.004)))
    at_home, after_home = trained(home=True, dtype=torch.float32, steps=5, now=now)
    assert at_home == losses
    assert all(torch.equal(after_home[name], value) for name, value in after.items())


@pytest.mark.slow
def test_inductor_trains_it_the_same() -> None:
    found = []
    for home in (False, True):
        model = network()
        if home:
            tencache_fx.offload(model)
        run = compiled(model, TIGHT if home else None, compiler="inductor")
        found.append(train(model, run, AdamW(model.parameters()), range(4)))
        if home:
            record = regions()[-1]
            assert {transfer.kind for transfer in record.plan.transfers} >= {TransferKind.LOAD, TransferKind.STORE}
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("dtype", "to_plain"), [pytest.param(torch.float32, True, marks=pytest.mark.slow), (torch.bfloat16, False)]
)
def test_a_run_goes_on_elsewhere_as_if_it_had_not_stopped(dtype: torch.dtype, to_plain: bool) -> None:  # noqa: FBT001
    losses, _ = trained(home=True, dtype=dtype)
    model = tencache_fx.offload(network(dtype))
    optimizer = AdamW(model.parameters(), weight_decay=0.1)
    first = train(model, compiled(model), optimizer, range(6))
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    del model, optimizer
    torch.compiler.reset()
    tencache_fx.close()
    saved.seek(0)
    of_model, of_optimizer = torch.load(saved)
    again = network(dtype)
    if not to_plain:
        tencache_fx.offload(again)
    again.load_state_dict(of_model)
    other = AdamW(again.parameters(), weight_decay=0.1)
    other.load_state_dict(of_optimizer)
    assert first + train(again, compiled(again, TIGHT if not to_plain else None), other, range(6, 12)) == losses


def test_loaded_weights_replace_masters_while_an_update_is_under_way() -> None:
    model = tencache_fx.offload(network())
    fresh = weights(model)
    run, optimizer = compiled(model), AdamW(model.parameters(), lr=0.5)
    train(model, run, optimizer, range(2))
    tokens = batch(0)
    torch.nn.functional.cross_entropy(run(tokens), tokens).backward()
    optimizer.step()
    model.load_state_dict(fresh)
    assert all(torch.equal(value, fresh[name]) for name, value in weights(model).items())
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    torch.nn.functional.cross_entropy(run(tokens), tokens).backward()
    optimizer.step()
    torch.testing.assert_close(weights(model), fresh, rtol=0, atol=1e-3)  # not where the masters had been


def test_summoned_parameters_can_be_read_and_changed() -> None:
    model = tencache_fx.offload(network())
    parameter = model[1].into.weight
    before = weights(model)["1.into.weight"]
    with tencache_fx.summon(model):
        assert torch.equal(parameter, before)
        with torch.no_grad():
            parameter.mul_(2)
    assert torch.equal(weights(model)["1.into.weight"], before * 2)
    with tencache_fx.summon(model, write=False), torch.no_grad():
        parameter.zero_()
    assert torch.equal(weights(model)["1.into.weight"], before * 2)
    assert not find_offloaded(parameter).on_device
    with pytest.raises(UsageError, match="no parameter of this model is offloaded"), tencache_fx.summon(network()):
        pass


def test_it_runs_and_trains_without_being_compiled() -> None:
    plain, model = network(), tencache_fx.offload(network())
    with torch.no_grad():
        assert torch.equal(model(batch(0)), plain(batch(0)))
    assert not any(home.on_device for home in parameters_of(engines()[0]))
    tied_bytes = model[0].weight.nbytes  # which comes for each of its two modules
    assert tencache_fx.stats()["h2d_bytes"] == sum(home.nbytes for home in parameters_of(engines()[0])) + tied_bytes
    expected = train(plain, plain, AdamW(plain.parameters()), range(3))
    assert train(model, model, AdamW(model.parameters()), range(3)) == expected
    assert not any(home.on_device for home in parameters_of(engines()[0]))


def test_inference_streams_parameters() -> None:
    model, plain = tencache_fx.offload(network()), compiled(network(), None)
    run = compiled(model, "450kB")
    with torch.no_grad():
        run(batch(0))
        record = regions()[-1]
        for step in range(3):
            assert torch.equal(run(batch(step)), plain(batch(step)))
    assert any(transfer.kind is TransferKind.LOAD for transfer in record.plan.transfers)
    assert not any(transfer.kind is TransferKind.STORE for transfer in record.plan.transfers)


@pytest.mark.slow
def test_a_graph_that_serves_several_modules_fetches_each_ones_own() -> None:
    model, plain = tencache_fx.offload(network()), network()
    for block in model[1:4]:
        block.compile(backend="tencache", options={"device_budget": "700kB", "compiler": "eager", "calibrate": False})
    expected = train(plain, plain, AdamW(plain.parameters()), range(3))
    torch.testing.assert_close(train(model, model, AdamW(model.parameters()), range(3)), expected)


def test_a_model_that_gets_offloaded_parameters_after_it_has_run_is_planned_anew() -> None:
    losses, _ = trained(home=False, dtype=torch.float32, steps=4)
    model = network()
    run, optimizer = compiled(model, ROOMY), AdamW(model.parameters(), weight_decay=0.1)
    first = train(model, run, optimizer, range(2))
    tencache_fx.offload(model)
    assert first + train(model, run, optimizer, range(2, 4)) == losses


@pytest.mark.slow
def test_offloaded_parameters_that_leave_no_plan_are_refused_at_each_call() -> None:
    model = network()
    run = compiled(model, "2MB", host_budget="1MiB")  # the homes fit, and gradients beside them do not
    run(batch(0)).sum().backward()
    tencache_fx.configure(host_budget="1MiB")
    try:
        tencache_fx.offload(model)
    finally:
        tencache_fx.configure(reset=True)
    for _ in range(2):  # what was compiled before would read parameters that are not there
        with pytest.raises(BudgetError, match="gradients in host memory"):
            run(batch(0))


def test_a_model_on_meta_is_made_module_by_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    torch.manual_seed(3)
    tencache_fx.offload(model, "cpu")
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        bare = nn.Module()
        bare.register_parameter("weight", nn.Parameter(torch.empty(200, 200)))
    with pytest.raises(OptionError, match="reset_parameters"):
        tencache_fx.offload(bare, "cpu")
    with pytest.raises(OptionError, match="say which device"):
        tencache_fx.offload(bare)


def test_host_memory_too_small_for_it_is_refused() -> None:
    tencache_fx.configure(host_budget="200kB")
    try:
        with pytest.raises(BudgetError, match="offloaded parameters"):
            tencache_fx.offload(network())
    finally:
        tencache_fx.configure(reset=True)


def test_a_model_is_given_the_memory_of_one_that_is_gone_while_its_last_updates_go_on() -> None:
    nbytes = sum(parameter.nbytes for parameter in network().parameters())
    tencache_fx.configure(host_budget=nbytes * 9 // 2)  # parameters, gradients and state of one model
    gate = threading.Event()

    class Held(OnePart):
        def on_host(self, part: int) -> None:
            assert gate.wait(30)

    try:
        model = tencache_fx.offload(network())
        optimizer = AdamW(model.parameters())
        engine = roomy_engine(torch.device("cpu"))
        model(batch(0)).sum().backward()
        parameters_of(engine).updates.submit(Held(), -1, lambda: True)
        optimizer.step()
        assert engine.pool.acquired_bytes > 3.5 * nbytes, "one more has no room"
        del model, optimizer
        collect()
        threading.Timer(0.1, gate.set).start()
        tencache_fx.offload(network())
    finally:
        gate.set()
        tencache_fx.configure(reset=True)


def test_a_device_below_the_floor_is_refused() -> None:
    model = tencache_fx.offload(network())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="BudgetError(.|\\n)*floor of this region"):
        compiled(model, "150kB")(batch(0))


def host_gradient() -> tuple[nn.Parameter, Tensor]:
    """A gradient in host memory, and the same one on the device."""
    torch.manual_seed(1)
    model = nn.Linear(HIDDEN, HIDDEN)
    plain = nn.Linear(HIDDEN, HIDDEN)
    plain.load_state_dict(model.state_dict())
    tencache_fx.offload(model)
    x = torch.randn(32, HIDDEN)
    compiled(model)(x).square().mean().backward()
    plain(x).square().mean().backward()
    return model.weight, plain.weight.grad


def test_a_gradient_in_host_memory_is_like_any_other() -> None:
    parameter, expected = host_gradient()
    gradient = parameter.grad
    assert isinstance(gradient, HostGradient)
    assert "in host memory" in repr(gradient)
    assert (gradient.shape, gradient.dtype, gradient.device) == (expected.shape, expected.dtype, expected.device)
    torch.testing.assert_close(gradient.norm(), expected.norm())
    torch.testing.assert_close(gradient * 2 + 1, expected * 2 + 1)
    gradient.mul_(0.5)
    gradient.add_(expected)
    torch.testing.assert_close(gradient.clone(), expected * 1.5)
    torch.testing.assert_close(gradient.norm(), (expected * 1.5).norm())
    gradient[0] = 0
    assert gradient.abs().sum(dim=1)[0] == 0
    gradient.zero_()
    assert gradient.norm() == 0
    (engine,) = engines()
    acquired = engine.stats.take()["host_acquired_bytes"]
    del gradient
    parameter.grad = None
    assert engine.stats.take()["host_acquired_bytes"] == acquired - parameter.numel() * 4


def test_a_step_records_one_event_for_all_its_updates_and_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these takes the host longer than all else that it does for a parameter."""
    model = tencache_fx.offload(network())
    run, optimizer = compiled(model), AdamW(model.parameters(), lr=0.1)
    engine = roomy_engine(torch.device("cpu"))
    tokens, recorded, updates = batch(0), [], []
    record, begin = type(engine.streams).record_compute, AdamW._begin_update

    def note_begun(self: AdamW, update: ParameterUpdate, *more: object) -> None:
        updates.append(update)
        begin(self, update, *more)

    def note_recorded(self: object) -> object:
        recorded.append(threading.current_thread())
        return record(self)

    monkeypatch.setattr(AdamW, "_begin_update", note_begun)
    for clips in (False, True):
        torch.nn.functional.cross_entropy(run(tokens), tokens).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.streams), "record_compute", note_recorded)
            optimizer.step()
        assert len(updates) > 2
        assert [update.scaling is None for update in updates] == [not clips] * len(updates)
        assert recorded.count(threading.main_thread()) == 1
        if clips:
            numbers = torch.ones(2)
            assert len({update.scaling(numbers) for update in updates}) == 1, "threads take it for one"
        updates.clear()
        recorded.clear()
        optimizer.zero_grad()


def test_a_scaler_skips_a_step_whose_gradients_are_no_numbers() -> None:
    model = tencache_fx.offload(network())
    run, optimizer = compiled(model), AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    for factor, changes in ((float("nan"), False), (1.0, True)):
        tokens = batch(0)
        loss = torch.nn.functional.cross_entropy(run(tokens), tokens) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if changes:
            assert nn.utils.clip_grad_norm_(model.parameters(), 1e9).isfinite()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weights(model)["1.into.weight"], before["1.into.weight"]) == (not changes)


def test_a_failing_update_is_raised_where_the_parameter_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tencache_fx.offload(network())
    run, optimizer = compiled(model), AdamW(model.parameters(), lr=0.1)
    train(model, run, optimizer, range(1))
    before = weights(model)

    def failing(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(ParameterUpdate, "_kernel", lambda update, device: failing)
    tokens = batch(0)
    torch.nn.functional.cross_entropy(run(tokens), tokens).backward()
    optimizer.step()
    with pytest.raises(InvariantError, match="injected.*go back to a checkpoint"):
        run(tokens)
    assert int(optimizer.state[model[1].into.weight]["step"]) == 1
    for home in parameters_of(engines()[0]):
        assert torch.equal(home.host, before[home.name])
    with pytest.warns(UserWarning, match="could not be updated"):
        tencache_fx.close()


@pytest.mark.parametrize("use", ["load_state_dict", "state_dict", "copy"])
def test_updates_that_failed_are_told_all_at_once_and_a_checkpoint_can_be_loaded(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tencache_fx.offload(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12))), "cpu")
    optimizer = AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, index + 1.0)
        optimizer.step()

    step()
    saved, before = copy.deepcopy(optimizer.state_dict()), weights(model)
    step()
    expected = weights(model)

    def failing(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as context:
        context.setattr(ParameterUpdate, "_kernel", lambda update, device: failing)
        step()
        for parameter in model.parameters():
            offloaded = find_offloaded(parameter)
            assert offloaded is not None
            offloaded.join_update()
    uses: dict[str, Callable[[], object]] = {
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "state_dict": optimizer.state_dict,
        "copy": lambda: copy.deepcopy(optimizer),
    }
    said = r"12 parameters could not be updated, 0\.weight, 1\.weight, .*, 7\.weight, \.\.\.; of 0\.weight: "
    with pytest.raises(InvariantError, match=said + r"RuntimeError\('injected'\)\. .*go back to a checkpoint"):
        uses[use]()
    optimizer.load_state_dict(saved)
    model.load_state_dict(before)
    step()
    assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())


def test_what_stays_and_what_is_recomputed_change_the_lives_of_parameters() -> None:
    model = tencache_fx.offload(network())
    run = compiled(model, TIGHT, recompute="auto", policy="teraio")
    train(model, run, AdamW(model.parameters()), range(1))
    problem = regions()[-1].captured
    everything = recompute(problem, [recipe.name for recipe in problem.recipes])
    for each in (problem, everything):
        lives = [s for s in each.storages if s.kind is Kind.FETCHED]
        assert all(s.death <= each.boundary for s in lives if s.birth < each.boundary)  # each graph has its own
        late = [s.parameter for s in lives if s.birth >= each.boundary]
        assert len(late) == len(set(late))
        assert all(s.birth == s.uses[0] for s in lives)
    homes = first_parameters(problem, 1.0)
    kept = keep_resident(problem, homes)
    assert not any(s.kind is Kind.FETCHED for s in kept.storages)
    total = sum({s.parameter: s.nbytes for s in problem.storages if s.kind is Kind.FETCHED}.values())
    assert live_bytes(kept)[0] - live_bytes(problem)[0] >= total - max(live_bytes(problem))
    assert len(first_parameters(problem, 0.5)) < len(homes)
    floor = floor_bytes(problem)
    least = partial(make_plan, policy="joint", tuning=replace(TUNING, resident_shares=(0.0,)))
    assert least(problem.within(device_bytes=floor)).forecast.peak_bytes <= floor
    with pytest.raises(BudgetError):
        least(problem.within(device_bytes=floor - 1))


@pytest.mark.parametrize("how", ["forward", "load", "summon"])
def test_what_reads_a_parameter_that_stays_waits_for_its_late_copy(new_engine: Callable[..., object], how: str) -> None:
    install_engine(new_engine(streams=FaultyCpuStreams(delay_s=0.03)))
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)))
    plain = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)))
    plain.load_state_dict(model.state_dict())
    fresh = weights(plain)
    tencache_fx.offload(model)
    x = torch.randn(16, HIDDEN)
    for each, run in ((model, compiled(model, ROOMY)), (plain, plain)):
        optimizer = AdamW(each.parameters(), lr=0.1)
        for _ in range(2):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if how == "load":
        model.load_state_dict(fresh)
        plain.load_state_dict(fresh)
    elif how == "summon":
        with tencache_fx.summon(model), torch.no_grad():
            model[0].weight.mul_(2)
        with torch.no_grad():
            plain[0].weight.mul_(2)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(weights(model), weights(plain))


def test_an_optimizer_whose_closure_computes_the_gradients_is_refused_before_its_first_step() -> None:
    model = tencache_fx.offload(nn.Linear(256, 256))
    for optimizer in (torch.optim.LBFGS(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(UsageError, match="would update weight.* OffloadedOptimizer or .*summon"):
            optimizer.step(lambda: pytest.fail("the closure ran"))
    model.requires_grad_(False)
    torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: 0)


def test_an_argument_of_a_step_that_is_no_closure_makes_no_gradients() -> None:
    class Scaled(torch.optim.SGD):
        def step(self, scale: float) -> None:  # type: ignore[override]
            super().step()

    model = tencache_fx.offload(nn.Linear(256, 256))
    before = {name: value.clone() for name, value in weights(model).items()}
    Scaled(model.parameters(), lr=0.1).step(0.5)  # is not refused, and has nothing to do
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)


def test_an_optimizer_that_does_not_know_offloading_is_refused_unless_parameters_are_summoned() -> None:
    parameter, gradient = host_gradient()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    with pytest.raises(UsageError, match="SGD would update weight, which is offloaded to host memory"):
        optimizer.step()
    before = find_offloaded(parameter).host.clone()
    holder = nn.Module()
    holder.register_parameter("weight", parameter)
    with tencache_fx.summon(holder):
        optimizer.step()
    torch.testing.assert_close(find_offloaded(parameter).host, before - 0.5 * gradient)


def test_writes_through_views_of_a_gradient_count() -> None:
    parameter, expected = host_gradient()
    parameter.grad[:100] = 0
    parameter.grad.view(-1)[-1] = 7
    expected[:100] = 0
    expected.view(-1)[-1] = 7
    torch.testing.assert_close(nn.utils.clip_grad_norm_([parameter], 0.5), expected.norm())
    expected.mul_(0.5 / (expected.norm() + 1e-6))
    torch.testing.assert_close(parameter.grad.buffer.host(), expected)


def test_a_saved_state_outlives_its_model() -> None:
    model = tencache_fx.offload(network())
    best = model.state_dict()
    kept = {name: value.clone() for name, value in best.items()}
    del model
    other = tencache_fx.offload(network())
    with tencache_fx.summon(other), torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(3)
    assert all(torch.equal(value, kept[name]) for name, value in best.items())


def test_an_evaluation_between_forward_and_backward_takes_nothing_away() -> None:
    plain, model = network(), tencache_fx.offload(network())
    tokens = batch(0)
    for each in (plain, model):
        out = each(tokens)
        with torch.no_grad():
            each(tokens)
        if each is model:
            with tencache_fx.summon(each, write=False):
                pass
        out.square().mean().backward()
    torch.testing.assert_close(model[1].into.weight.grad, plain[1].into.weight.grad)


def test_ties_are_kept_or_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False))
    model[1].weight = model[0].weight
    tencache_fx.offload(model, "cpu")
    assert model[1].weight is model[0].weight
    shared = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    shared[1].weight = nn.Parameter(shared[0].weight.detach())
    with pytest.raises(OptionError, match="1.weight shares memory with 0.weight"):
        tencache_fx.offload(shared)


def test_what_is_done_to_a_gradient_after_a_step_does_not_change_that_step() -> None:
    found = []
    for later in (False, True):
        torch.manual_seed(0)
        model = tencache_fx.offload(nn.Linear(HIDDEN, HIDDEN, bias=False))
        optimizer = AdamW(model.parameters(), lr=0.1)
        compiled(model)(torch.randn(8, HIDDEN)).square().mean().backward()
        blocker = torch.futures.Future() if later else None
        (engine,) = engines()
        if blocker is not None:
            held = SimpleNamespace(on_host=partial(_wait, blocker), parts=1, end=_no_end)
            parameters_of(engine).updates.submit(held, -1, lambda: True)
        optimizer.step()
        if blocker is not None:
            model.weight.grad.mul_(0)
            blocker.set_result(None)
        found.append(weights(model)["weight"])
        torch.compiler.reset()
        tencache_fx.close()
    assert torch.equal(*found)


def _wait(blocker: torch.futures.Future[None], part: int) -> None:
    blocker.wait()


def _no_end(error: BaseException | None) -> None:
    """Do nothing."""
