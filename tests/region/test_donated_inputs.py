"""Inputs that a region's caller drops after the forward leave like activations; those that it keeps are let alone."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from combinations import each_in_a_quick_case
from harness import capture_of, faulty_engine
from meter import OPTIONS, VALUE, Meter, expected, layers, same, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx.passes.lifetimes import measure_lifetimes
from tencache_fx.planning.problem import Kind, Storage
from tencache_fx.records import RegionRecord

ROWS, WIDE = 512, 512


class Waist(nn.Module):
    """Reads a wide input once, and is wide again: then the backward holds three wide values besides the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.widen, self.last = nn.Linear(WIDE, 32), nn.Linear(32, WIDE), nn.Linear(WIDE, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.widen(torch.tanh(self.narrow(x)))))


def wide(rows: int = ROWS) -> Tensor:
    """Return something that is neither a parameter nor given by the user."""
    given = torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return given * 2


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def compiled(model: nn.Module, budget: object = "4.2MB", **options: object) -> Callable[[Tensor], Tensor]:
    """Compile `model` for a budget that suffices if the input is away."""
    return torch.compile(model, backend="tencache", options={**OPTIONS, "device_budget": budget, **options})


def inputs_away(record: RegionRecord | None = None) -> list[str]:
    record = record or tencache_fx.regions()[-1]
    kinds = {storage.name: storage.kind for storage in record.problem.storages}
    return [transfer.name for transfer in record.plan.transfers if kinds[transfer.name] is Kind.INPUT]


def one_by_one(model: nn.Sequential, budget: int) -> nn.Sequential:
    for layer in model:
        layer.compile(backend="tencache", options={**OPTIONS, "device_budget": budget})
    return model


def test_blocks_compiled_one_by_one_keep_no_inputs(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    """Sixteen blocks, whose inputs alone would be 16 values beside the 25 that the loss takes."""
    budget, model = 30 * VALUE, layers(16)
    with faulty_engine():
        peaks, found = train(meter, one_by_one(model, budget), model)
        assert max(peaks[1:]) <= budget
        assert len(inputs_away()) == 1
    assert caplog.text.count("planning again") <= 5, "the first block is a region, all others share one"
    assert same(found, expected(layers(16)))


class Equal(nn.Module):
    """Equal layers; of what was made before them all of them read a value, if they skip."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.skips = nn.Linear(64, 64), skips
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = skip = torch.tanh(self.first(x))
        for layer in self.layers:
            x = layer(x * skip if self.skips else x)
        return x


@pytest.mark.parametrize("skips", [False, True])
def test_equal_layers_of_a_whole_graph_keep_no_inputs_that_nobody_reads_behind_them(
    caplog: pytest.LogCaptureFixture,
    skips: bool,  # noqa: FBT001
) -> None:
    caplog.set_level(logging.INFO, "tencache_fx")
    batch = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    plain, model = Equal(skips=skips), Equal(skips=skips)
    options = {**OPTIONS, "scope": "auto", "device_budget": "10MB" if skips else "8MB", "repeated_layers": "once"}
    run = torch.compile(model, backend="tencache", options=options)
    wanted = gradients(plain, plain(batch).square().mean())
    for _ in range(3):
        assert same(gradients(model, run(batch).square().mean()), wanted)
    layer = next(each for each in tencache_fx.regions() if "calls" in each.name)
    assert len(inputs_away(layer)) == 1
    assert "keeps inputs" not in caplog.text


def test_inputs_that_the_caller_keeps_do_not_leave(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    model, budget, kept = layers(8), 16 * VALUE, []

    def forward(x: Tensor) -> Tensor:
        kept.clear()
        for layer in model:
            kept.append(x)
            x = layer(x)
        return x

    one_by_one(model, budget)
    with faulty_engine():
        peaks, found = train(meter, forward, model)
        assert not inputs_away()
    assert caplog.text.count("its caller keeps inputs that were to be offloaded; planning again") == 1
    assert peaks[-1] == peaks[-2]
    assert same(found, expected(layers(8)))


def test_what_leaves_is_what_the_forward_has_read() -> None:
    """The caller may write over its tensor, or go on reading it, while the copy is slow."""
    model = Waist()

    def trained(budget: object) -> list[Tensor]:
        with faulty_engine(delay_s=0.02):
            run, x = compiled(model, budget), wide()
            loss = (run(x).sum(1) * x.sum(1)).mean()
            assert bool(inputs_away()) == (budget is not None)
            if budget is not None:
                x.data.zero_()
            return gradients(model, loss)

    assert all(map(torch.equal, trained("4.2MB"), trained(None)))


@each_in_a_quick_case(compiler=["inductor", "eager"], policy=["joint", "teraio", "10cache"])
def test_numbers_and_peaks(compiler: str, policy: str) -> None:
    model = Waist()
    with faulty_engine():
        run = compiled(model, compiler=compiler, policy=policy)
        for _ in range(2):
            found = gradients(model, run(wide()).square().mean())
        record = tencache_fx.regions()[-1]
        assert inputs_away()
        assert (record.code_peak_bytes is None) == (compiler == "eager")
        assert record.code_peak_bytes is None or record.code_peak_bytes <= record.plan.forecast.peak_bytes
    assert same(found, gradients(model, model(wide()).square().mean()))


def test_its_bytes_are_free_between_the_graphs() -> None:
    run = compiled(Waist())

    def step() -> None:
        """Hold as much as five such inputs while only the backward asks for one."""
        result = run(wide())
        other = torch.ones(5 * ROWS, WIDE)
        loss = result.square().mean() * other[0, 0]
        del other, result
        loss.backward()

    step()  # compiles
    assert inputs_away()
    peak_bytes = tencache_fx.peak_bytes(step, torch.device("cpu"))
    assert 7 < peak_bytes / (4 * ROWS * WIDE) < 7.5, "the five, what the input was made from, and one activation"
    tencache_fx.close()


def of_any_length(x: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_sizes_that_change() -> None:
    model = Waist()
    with faulty_engine():
        run = compiled(model)
        for rows in (384, 512, 192, 448):
            found = gradients(model, run(of_any_length(wide(rows))).square().mean())
            assert same(found, gradients(model, model(wide(rows)).square().mean())), rows
        assert inputs_away()


class Triple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * 2


def test_checkpointed_blocks_save_the_same_when_they_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints keep the inputs, which is seen in the backward: no plan changes before that is over."""
    caplog.set_level(logging.INFO, "tencache_fx")
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Triple() for _ in range(4)))
    plain = copy.deepcopy(blocks)

    def step(model: nn.Sequential) -> list[Tensor]:
        x = torch.ones(4096, 64, requires_grad=True) * torch.linspace(-1, 1, 64)
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return gradients(model, x.square().mean())

    with faulty_engine():
        for block in blocks:
            block.compile(backend="tencache", options={**OPTIONS, "device_budget": "6.5MB"})
        for _ in range(3):
            found = step(blocks)
    assert "its caller keeps inputs" in caplog.text
    assert same(found, step(plain))


def test_where_no_plan_lets_them_stay_they_leave_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model = Waist()
    with faulty_engine():
        run = compiled(model)
        for _ in range(4):
            x = wide()
            found = gradients(model, run(x).square().mean())
        assert inputs_away()
    assert caplog.text.count("planning again") == 1
    assert len([line for line in caplog.text.splitlines() if "stays as it was: BudgetError" in line]) == 1
    logged = [argument for record in caplog.records for argument in record.args or ()]
    assert not [each for each in logged if isinstance(each, BaseException)], "its frames would keep the model"
    assert same(found, gradients(model, model(wide()).square().mean()))


def lives(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Storage]:
    capture = replace(capture_of(function, *inputs), donated=frozenset(range(len(inputs))))
    return {item.storage.name: item.storage for item in measure_lifetimes(capture)}


def test_only_what_the_backward_asks_for_is_away() -> None:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    found = lives(lambda x, w: (x @ w).tanh() + x, x, w)
    assert [found[f"primals_{i}"].spillable for i in (1, 2)] == [True, True]
    assert found["primals_1"].caller_frees_at == found["primals_2"].caller_frees_at > 0
    assert not lives(lambda x, w: x + w, x, w)["primals_1"].spillable, "no backward reads it"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ((x @ w).tanh(), x.view(64)),
        lambda x, w: (x.mul_(2) @ w).tanh(),
    ],
    ids=["returned", "written"],
)
def test_what_the_caller_gets_or_sees_stays(function: Callable[..., Any]) -> None:
    base, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    found = lives(function, base * 1, w)
    assert not found["primals_1"].spillable
    assert found["primals_1"].caller_frees_at == 0


def test_what_only_a_view_spans_stays() -> None:
    x, w = torch.randn(64, 64, requires_grad=True) * 2, torch.randn(64, 64, requires_grad=True)
    assert not lives(lambda x, w: (x[0] @ w).tanh(), x.expand(2, 64, 64), w)["primals_1"].spillable


def test_leaves_and_frozen_inputs_are_the_users() -> None:
    model = Waist()
    for x in (wide().detach(), wide().detach().requires_grad_()):
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Set device_budget to"):
            compiled(model)(x)
