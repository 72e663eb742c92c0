"""Loops that train more than one model, or in more than one precision: in a tight budget, the bits of torch's own."""

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from harness import EAGER, INDUCTOR, Block, Options, budget_for, compiled, faulty_engine, regions_of
from torch import Tensor, nn

import tencache_fx
from tencache_fx.records import RegionRecord

Wrap = Callable[[nn.Module], Callable[[Tensor], Tensor]]
Loop = Callable[[Wrap], Iterator[Tensor]]  # yields losses, then parameters
STEPS = 4


def noise(step: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(step))


def tower(seed: int, inner: int, outer: int) -> nn.Module:
    torch.manual_seed(seed)
    hidden = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))
    return nn.Sequential(nn.Linear(inner, 64), *hidden, nn.Linear(64, outer))


def adversaries(wrap: Wrap) -> Iterator[Tensor]:
    """A discriminator sees real and made data, and once more what the generator is trained by."""
    makes, judges = tower(0, 16, 32), tower(1, 32, 1)
    make, judge = wrap(makes), wrap(judges)
    makes_by, judges_by = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (makes, judges))
    for step in range(STEPS):
        made = make(noise(step, 256, 16))
        judges_by.zero_grad()
        loss = F.softplus(-judge(noise(-1 - step, 256, 32))).mean() + F.softplus(judge(made.detach())).mean()
        loss.backward()
        judges_by.step()
        makes_by.zero_grad()
        fooled = F.softplus(-judge(made)).mean()
        fooled.backward()
        makes_by.step()
        yield from (loss, fooled)
    yield from (*makes.parameters(), *judges.parameters())


def follower(wrap: Wrap) -> Iterator[Tensor]:
    """A student learns from a teacher that only infers, and follows it slowly."""
    student = tower(0, 32, 32)
    teacher = copy.deepcopy(student)
    learn, teach = wrap(student), wrap(teacher)
    sgd = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(STEPS):
        with torch.no_grad():
            target = teach(noise(step, 256, 32) + 0.1).tanh()
        sgd.zero_grad()
        loss = F.mse_loss(learn(noise(step, 256, 32)), target)
        loss.backward()
        sgd.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        yield loss
    yield from student.parameters()


def reordered(wrap: Wrap) -> Iterator[Tensor]:
    """Blocks are compiled one by one, run in another order in each step, and some of them twice."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(64) for _ in range(4))
    runs = [wrap(block) for block in blocks]
    sgd = torch.optim.SGD(blocks.parameters(), lr=0.05)
    for step, order in enumerate(itertools.islice(itertools.permutations(range(4)), 3, 3 + STEPS)):
        x = noise(step, 256, 64)
        for block in (*order, *order[:step]):
            x = runs[block](x)
        sgd.zero_grad()
        loss = x.square().mean()
        loss.backward()
        sgd.step()
        yield loss
    yield from blocks.parameters()


def interleaved(wrap: Wrap) -> Iterator[Tensor]:
    """Several forwards are under way before the first backward, and these come in another order."""
    models = tower(0, 32, 32), tower(1, 32, 32)
    first, second = map(wrap, models)
    for step in range(STEPS):
        losses = [run(noise(step + k, 256, 32)).square().mean() for k, run in enumerate((first, second, first))]
        for loss in losses if step % 2 else (losses[1], losses[0], losses[2]):
            loss.backward()
        yield from losses
    yield from (parameter.grad for model in models for parameter in model.parameters())


def run_loop(loop: Loop, wrap: Wrap) -> list[Tensor]:
    return [value.detach().clone() for value in loop(wrap)]


@pytest.mark.parametrize("loop", [adversaries, follower, reordered, interleaved])
def test_loops_over_several_regions(loop: Loop) -> None:
    expected = run_loop(loop, lambda model: torch.compile(model, backend="aot_eager_decomp_partition"))
    found: list[list[Tensor]] = []

    def within(budget: int) -> tuple[RegionRecord, ...]:
        kept: list[object] = []  # what keeps the compiled regions alive

        def wrap(model: nn.Module) -> Callable[[Tensor], Tensor]:
            kept.append(run := compiled(model, {**EAGER, "scope": "region", "device_budget": budget}))
            return run

        return regions_of(lambda: (found.append(run_loop(loop, wrap)), kept))

    budget = budget_for([record.problem for record in within(1 << 30)], 40)
    plans = [record.plan for record in within(budget)]
    assert all(torch.equal(mine, true) for mine, true in zip(found[-1], expected, strict=True))
    assert any(plan.transfers for plan in plans)
    assert all(plan.forecast.peak_bytes <= budget for plan in plans)


@pytest.mark.parametrize("loop", [adversaries, reordered, interleaved])
def test_loops_whose_regions_share_a_budget(loop: Loop) -> None:
    """No option says that there are several: the runs do."""
    expected = run_loop(loop, lambda model: torch.compile(model, backend="aot_eager_decomp_partition"))
    torch.compiler.reset()
    found, offloads = [], []
    for budget in (1 << 30, 1_300_000):
        torch.compiler.reset()
        found.append(run_loop(loop, lambda model: compiled(model, {**EAGER, "device_budget": budget})))  # noqa: B023
        offloads.append(tencache_fx.stats()["offloads"])
    for mine in found:
        assert all(torch.equal(one, true) for one, true in zip(mine, expected, strict=True))
    assert tencache_fx.steps(), "the regions were planned together"
    assert all(step.plan.forecast.peak_bytes <= 1 << 30 for step in tencache_fx.steps())
    assert offloads[1] > offloads[0]


def mixed(dtype: torch.dtype, budget: int | None, *, at_home: bool = False) -> tuple[list[Tensor], list[float]]:
    """Return losses, norms and weights, and the scales, of accumulated steps; in the third gradients overflow."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(128) for _ in range(3)))
    if at_home:
        model = tencache_fx.offload(model)
    adamw = tencache_fx.optim.AdamW if at_home else torch.optim.AdamW
    optimizer = adamw(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    options = {**EAGER, "device_budget": budget}
    run = compiled(model, options) if budget else torch.compile(model, backend="aot_eager_decomp_partition")
    found, scales = [], []
    for step in range(5):
        for part in range(2):
            x = noise(2 * step + part, 256, 128)
            with torch.autocast("cpu", dtype):
                loss = F.mse_loss(run(x).float(), x.tanh()) / 2
            scaler.scale(loss * (torch.inf if step == 2 and part else 1)).backward()
            found.append(loss.detach())
        scaler.unscale_(optimizer)
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).nan_to_num(0, 0, 0).clone())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [*found, *(value.clone() for value in model.state_dict().values())], scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_with_a_scaler_skips_the_same_step(dtype: torch.dtype) -> None:
    expected, scales = mixed(dtype, None)
    assert scales == [4096.0, 8192.0, 4096.0, 4096.0, 8192.0]
    for budget, at_home in ((1_900_000, False), (1_300_000, True)):
        ours, our_scales = mixed(dtype, budget, at_home=at_home)
        assert our_scales == scales
        rounding = 1e-4 if at_home else 0.0  # one kernel instead of several
        for mine, true in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=rounding, atol=rounding)
        assert tencache_fx.stats()["d2h_bytes"] > 0


@pytest.mark.parametrize("budget", [479_000, 495_000])
@pytest.mark.parametrize("compiler", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_compiled_autograd_inlines_the_backward_of_an_offloaded_forward(compiler: Options, budget: int) -> None:
    """The graph of compiled autograd holds our backward's ops, while our forward's ops ran before it."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    model, x, options = copy.deepcopy(plain), noise(0, 128, 64), {**compiler, "recompute": "none"}
    plain(x).square().mean().backward()
    with faulty_engine() as engine:
        run = compiled(model, {**options, "device_budget": 390_000})
        backward = torch.compile(backend="tencache", options={**options, "device_budget": budget})
        with torch._dynamo.compiled_autograd._enable(backward):
            for _ in range(2):
                model.zero_grad()
                loss = run(x).square().mean()
                assert engine.stats.take()["offloads"] > 0
                loss.backward()
        del loss
    for parameter, truth in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, truth.grad)
