"""Shapes that change: one compilation, several batch sizes, the same gradients; and options by every road."""

import contextlib
import logging
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import EAGER, INDUCTOR, Options, budget_for, compiled, faulty_engine
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import tencache_fx
from tencache_fx.errors import BudgetError, OptionError, UsageError
from tencache_fx.passes.lifetimes import StorageNodes, formula_of
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Kind, Step, Storage
from tencache_fx.region.dynamic_shapes import SizeFormulas
from tencache_fx.region.registry import REGIONS


def tower() -> nn.Module:
    """Return sixteen layers: 1.6 MB at a batch of 256, and 0.9 MB at least."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(64, 64), nn.Tanh())))


def backward(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    run(x).square().sum().backward()


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    backward(run, x)
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("marked", [True, False], ids=["mark_dynamic", "automatic"])
def test_one_compilation_serves_several_batch_sizes(*, marked: bool) -> None:
    model = tower()

    def data(batch: int) -> Tensor:
        x = torch.randn(batch, 64)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        return x

    before = {record.region for record in tencache_fx.regions()}
    with faulty_engine() as engine:
        run = compiled(model, {**EAGER, "device_budget": 1_000_000})
        for batch in (256, 250, 200, 130, 256):
            x = data(batch)
            truth = gradients(model, model, x)
            for mine, true in zip(gradients(model, run, x), truth, strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)
        assert engine.stats.take()["offloads"] > 0
        compiled_now = [record for record in tencache_fx.regions() if record.region not in before]
        assert len(compiled_now) == (1 if marked else 2)
        assert any(s.formula for s in tencache_fx.regions()[-1].problem.storages)
        del run


def marked(*sizes: int) -> Tensor:
    """Return random data whose dimensions, but for the last, are dynamic."""
    x = torch.randn(*sizes)
    for dim in range(len(sizes) - 1):
        torch._dynamo.mark_dynamic(x, dim)
    return x


@contextlib.contextmanager
def plannings() -> Iterator[list[str]]:
    """Collect a line for each time that a region is planned again."""
    seen: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "planning again" in record.getMessage():
                seen.append(record.getMessage())

    log, handler = logging.getLogger("tencache_fx"), Collect()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield seen
    log.removeHandler(handler)
    log.setLevel(level)


def check_gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    truth = gradients(model, model, x)
    for mine, true in zip(gradients(model, run, x), truth, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_a_larger_batch_is_planned_for_and_keeps_the_budget(options: Options) -> None:
    """The plan of the largest batch serves all smaller ones; what is held is measured by an independent trace."""
    model, budget, largest = tower(), 2_200_000, 0
    with faulty_engine(), plannings() as again:
        run = compiled(model, {**options, "device_budget": budget})
        for batch in (256, 300, 512, 300, 1024, 512, 256):
            x = marked(batch, 64)
            check_gradients(model, run, x)
            model.zero_grad()
            own = sum(p.nbytes for p in model.parameters()) + x.nbytes
            measured = own + tencache_fx.peak_bytes(partial(backward, run, x), torch.device("cpu"))
            footprint = REGIONS.live()[-1].current.footprint
            forecast = footprint.at((batch,)).peak_bytes
            assert measured - 1024 <= forecast <= budget
            assert footprint.formulas.planned == (max(largest, 256 if batch < 512 else batch),)
            largest = max(largest, *footprint.formulas.planned)
        assert len(again) == 2
        assert "= 512" in again[0]
        assert "= 1024" in again[1]
        del run


def test_a_view_of_a_larger_batch_is_counted_with_what_is_behind_it() -> None:
    """The size of that shows nowhere in the view's shape, and may change while the view's stays."""
    model = tower()
    with faulty_engine() as engine:
        run = compiled(model, {**EAGER, "device_budget": 1_100_000}, dynamic=True)
        for batch, rows in ((300, 200), (310, 200), (320, 240), (300, 210)):
            x = torch.randn(batch, 64)[:rows]
            check_gradients(model, run, x)
            footprint = REGIONS.live()[-1].current.footprint
            *_, sizes = (footprint.formulas.planned, *footprint._needs)
            assert footprint.at(sizes).input_bytes == sum(p.nbytes for p in model.parameters()) + batch * 64 * 4
        assert engine.stats.take()["offloads"] > 0
        del run


VIEWS: dict[str, tuple[Callable[[int], Tensor], Callable[[Tensor], Tensor]]] = {
    "cut off": (lambda n: torch.randn(n // 8, 9, 64), lambda x: x[:, :-1]),
    "transposed": (lambda n: torch.randn(8, n // 8, 64), lambda x: x.transpose(0, 1)),
    "columns": (lambda n: torch.randn(n, 64 + n // 8), lambda x: x[:, :64]),
    "middle": (lambda n: torch.randn(4, n // 2, 64), lambda x: x[1:3]),
}


@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.slow), None])
@pytest.mark.parametrize(
    "view", ["cut off", "middle", *(pytest.param(v, marks=pytest.mark.slow) for v in ("transposed", "columns"))]
)
def test_what_is_behind_any_view_is_read_from_it(view: str, *, dynamic: bool | None) -> None:
    """The shape of `tokens[:, :-1]` tells neither the length nor, with it, the bytes of what it is a view of."""
    model, (make, look) = tower(), VIEWS[view]
    with faulty_engine() as engine:
        run = compiled(model, {**EAGER, "device_budget": 1_300_000}, dynamic=dynamic)
        for batch in (256, 240, 312, 248):
            check_gradients(model, run, look(x := make(batch)))
        assert engine.stats.take()["offloads"] > 0
        footprint = REGIONS.live()[-1].current.footprint
        *_, sizes = (footprint.formulas.planned, *footprint._needs)
        assert footprint.at(sizes).input_bytes == sum(p.nbytes for p in model.parameters()) + x.nbytes
        del run


def test_a_batch_too_large_is_refused_before_anything_runs() -> None:
    model = tower()
    with faulty_engine() as engine, plannings() as again:
        run = compiled(model, {**EAGER, "device_budget": 1_000_000})
        check_gradients(model, run, marked(256, 64))
        before = tencache_fx.regions()[-1]
        engine.stats.take()
        with pytest.raises(
            BudgetError, match=r"^region \d+ at s\d+ = 4096: step .* needs .*; the budget is 1 MB"
        ) as caught:
            run(marked(4096, 64))
        assert "shrink the batch" in str(caught.value)
        assert engine.stats.take()["offloads"] == 0
        assert tencache_fx.regions()[-1] is before
        check_gradients(model, run, marked(200, 64))
        assert len(again) == 1
        del run, caught


@pytest.mark.slow
def test_two_dimensions_that_do_not_fit_together_are_planned_one_by_one() -> None:
    model = tower()
    with faulty_engine(), plannings() as again:
        run = compiled(model, {**EAGER, "device_budget": 1_000_000})
        for sizes in ((4, 64, 64), (64, 4, 64), (16, 16, 64)):
            check_gradients(model, run, marked(*sizes))
        assert len(again) == 0, "256 rows each"
        check_gradients(model, run, marked(4, 72, 64))
        assert len(again) == 1, "4 x 72 rows fit, 64 x 72 would not"
        assert tencache_fx.regions()[-1].plan.forecast.peak_bytes <= 1_000_000
        del run


def test_buffers_for_a_batch_beyond_the_plan_are_there_before_it_runs() -> None:
    """The plan has room for a few more on the device: their buffers are reserved; if they do not fit, it is refused."""
    model = tower()
    with faulty_engine() as engine:
        run = compiled(model, {**EAGER, "device_budget": 1_110_000})
        check_gradients(model, run, marked(256, 64))
        plan = tencache_fx.regions()[-1].plan
        assert plan.transfers
        batch = 258
        check_gradients(model, run, marked(batch, 64))
        assert tencache_fx.regions()[-1].plan is plan, "not planned again"
        have = Counter(buffer.nbytes for buffer in engine.pool._buffers)
        wanted = -(-batch * 64 * 4 // 4096) * 4096
        assert have[wanted] == sum(each.count for each in plan.pool)
        del run


def test_every_batch_keeps_the_host_budget_and_an_earlier_one_always_runs_again() -> None:
    model, host_budget = tower(), 3_600_000
    with faulty_engine(host_budget_bytes=host_budget) as engine:
        run = compiled(model, {**EAGER, "device_budget": 2_300_000, "host_budget": host_budget})
        for batch in (512, 1024, 512, 300, 768, 1024, 512):
            check_gradients(model, run, marked(batch, 64))
            assert 0 < engine.pool.allocated_bytes <= host_budget
        del run


def attention(x: Tensor, w: Tensor) -> Tensor:
    """Return something with bytes linear, quadratic and constant in two symbols."""
    scores = (x @ w) @ x.transpose(1, 2)
    return (scores.softmax(-1) @ x).square().sum() + (w @ w).tanh().sum()


def peak_at(x: Tensor) -> int:
    """Return the peak of `attention` compiled for the sizes of `x` alone."""
    torch.compiler.reset()
    run = torch.compile(attention, backend="tencache", options={**EAGER, "recompute": "none"}, dynamic=False)
    run(x, torch.ones(16, 16, requires_grad=True)).backward()
    return int(live_bytes(tencache_fx.regions()[-1].problem).max())


def test_the_peak_at_other_sizes_is_what_compiling_for_them_would_say() -> None:
    run = torch.compile(attention, backend="tencache", options={**EAGER, "recompute": "none", "device_budget": "1GB"})
    run(marked(4, 8, 16), torch.ones(16, 16, requires_grad=True)).backward()
    footprint = REGIONS.live()[-1].current.footprint
    for batch, length in ((4, 8), (2, 8), (9, 30), (3, 100), (64, 5)):
        x = torch.randn(batch, length, 16)
        symbols = dict(zip(map(str, footprint.formulas.symbols), footprint.formulas.hints, strict=True))
        sizes = tuple({4: batch, 8: length}[hint] for hint in symbols.values())
        assert footprint.at(sizes).peak_bytes == peak_at(x)
        assert footprint.plan_for(sizes).forecast.peak_bytes == footprint.at(sizes).peak_bytes
        assert footprint.at(sizes).input_bytes == x.nbytes + 16 * 16 * 4


class Routed(nn.Module):
    """Layers, between which a number of rows that only the run knows goes another way; `most` bounds it."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.other = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 64)
        self.most = most

    def forward(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if count is None:
            rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
            return x.index_add(0, rows, torch.tanh(self.other(x[rows]))).square().sum()
        size = count.item()
        if self.most is not None:
            torch._check(size <= self.most)
        return x.square().sum() + torch.tanh(self.other(torch.ones(size, 64))).sum()


def train_routed(model: nn.Module, run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("options", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)], ids=["eager", "inductor"])
@pytest.mark.parametrize("counted", [False, True], ids=["nonzero", "checked"])
def test_a_size_that_only_the_run_knows_is_planned_for_the_most_it_can_be(options: Options, *, counted: bool) -> None:
    """No more rows than there are can be chosen; of a number that comes from outside, a check says how many."""
    model, budget = Routed(most=256), 900_000
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    with captured, faulty_engine() as engine:
        run = compiled(model, {**options, "device_budget": budget}, fullgraph=True)
        for count in (100, 7, 256):
            inputs = (torch.randn(256, 64), *([torch.tensor(count)] if counted else []))
            mine, true = train_routed(model, run, *inputs), train_routed(model, model, *inputs)
            for got, want in zip(mine, true, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert engine.stats.take()["offloads"] > 0
        assert tencache_fx.regions()[-1].plan.forecast.peak_bytes <= budget
        del run


@pytest.mark.parametrize("options", [EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)], ids=["eager", "inductor"])
def test_where_nothing_bounds_a_size_the_region_runs_without_a_plan_and_says_so(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    model = Routed()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = compiled(model, {**options, "device_budget": 500_000}, fullgraph=True)
        for count in (100, 7):
            inputs = torch.randn(256, 64), torch.tensor(count)
            mine, true = train_routed(model, run, *inputs), train_routed(model, model, *inputs)
            for got, want in zip(mine, true, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in warned if "is known only when it runs, and nothing bounds it" in line]) == 1


@pytest.mark.slow
def test_inductor_with_dynamic_shapes() -> None:
    model = tower()
    x = torch.randn(256, 64)
    torch._dynamo.mark_dynamic(x, 0)
    run = compiled(model, INDUCTOR)
    run(x).sum().backward()
    problem = tencache_fx.regions()[-1].problem
    torch.compiler.reset()
    with faulty_engine():
        run = compiled(model, {**INDUCTOR, "device_budget": budget_for([problem], 60)})
        for batch in (256, 200):
            x = torch.randn(batch, 64)
            torch._dynamo.mark_dynamic(x, 0)
            truth = gradients(model, model, x)
            for mine, true in zip(gradients(model, run, x), truth, strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)
        assert tencache_fx.regions()[-1].plan.transfers
        del run


def budget_seen(model: nn.Module, **how: object) -> int | None:
    torch.compiler.reset()
    kept = torch.compile(model, backend="tencache", **how)
    kept(torch.randn(256, 64)).sum().backward()
    return tencache_fx.regions()[-1].problem.budgets.device_bytes


def test_options_come_from_the_call_then_configure_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tower()
    for name in ("compiler", "calibrate", "host_budget"):
        monkeypatch.setenv(f"TENCACHE_{name.upper()}", str(EAGER[name]))
    monkeypatch.setenv("TENCACHE_DEVICE_BUDGET", "1100kB")
    assert budget_seen(model) == 1_100_000
    tencache_fx.configure(device_budget="1200kB")
    assert budget_seen(model) == 1_200_000
    assert budget_seen(model, options={"device_budget": "1300kB"}) == 1_300_000


def test_modes() -> None:
    tencache_fx.configure(**{**INDUCTOR, "device_budget": "1GB"})
    model = nn.Linear(8, 8)
    run = torch.compile(model, backend="tencache", mode="max-autotune-no-cudagraphs")
    x = torch.randn(4, 8)
    torch.testing.assert_close(run(x), model(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match="mode='fastest' is unknown"):
        torch.compile(model, backend="tencache", mode="fastest")(x)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(Exception, match="did you mean device_budget") as caught:
        torch.compile(nn.Linear(8, 8), backend="tencache", options={"device_buget": "1GB"})(torch.randn(4, 8))
    assert isinstance(caught.value.__cause__ or caught.value, OptionError) or "OptionError" in str(caught.value)


def test_dumps_are_read_by_the_command_line(tmp_path: Path) -> None:
    model = tower()
    run = compiled(model, {**EAGER, "device_budget": 1_000_000, "dump_dir": tmp_path})
    run(torch.randn(256, 64)).sum().backward()
    record = tencache_fx.regions()[-1]
    folder = tmp_path / f"region-{record.region:03d}"
    assert {"record.json", "forward.txt", "backward.txt"} <= {path.name for path in folder.iterdir()}
    assert "offload_" in (folder / "forward.txt").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "tencache_fx.cli", "dump", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(record.problem.ops)}, backward from {record.problem.boundary}" in done.stdout
    assert int(live_bytes(record.problem, record.plan.transfers).max()) <= 1_000_000


@pytest.mark.parametrize("counted", [False, True], ids=["nonzero", "checked"])
def test_a_size_that_only_the_run_knows_beside_a_dynamic_one(
    *, counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What a check bounds is planned for; rows that are chosen from a number of rows that may be any are not."""
    model = Routed(most=256)
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    with captured, faulty_engine():
        run = compiled(model, {**EAGER, "device_budget": 900_000}, fullgraph=True, dynamic=True)
        for count in (100, 7):
            inputs = (torch.randn(256 - count, 64), *([torch.tensor(count)] if counted else []))
            mine, true = train_routed(model, run, *inputs), train_routed(model, model, *inputs)
            for got, want in zip(mine, true, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert ("runs without a plan" in caplog.text) is not counted
        del run


class Scaled(nn.Module):
    """Reads a Python float, which Dynamo makes an input of the graph where everything is dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.half = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * math.sqrt(2 / self.half)
        return x


def test_a_region_that_reads_a_float_is_planned_again() -> None:
    torch.manual_seed(0)
    model = Scaled()
    options = {"compiler": "eager", "calibrate": False, "host_budget": "64MiB", "device_budget": "3.2MB"}
    run = torch.compile(model, backend="tencache", dynamic=True, options=options)
    for rows in (256, 1400):
        inputs = torch.randn(rows, 64)
        found = run(inputs)
        found.square().mean().backward()
        torch.testing.assert_close(found, model(inputs))
    assert tencache_fx.regions()[-1].plan.transfers


def sized_inputs(*names: str) -> tuple[list[Tensor], list[StorageNodes]]:
    """Return inputs of [rows, 4], each of a symbol of rows of its own, and their storages."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    inputs = [mode.from_tensor(torch.ones(5, 4), source=ConstantSource(name), symbolic_context=rows) for name in names]
    graph, storages = fx.Graph(), []
    for name, value in zip(names, inputs, strict=True):
        node = graph.placeholder(name)
        node.meta["val"] = value
        storage = Storage(
            name=name,
            nbytes=80,
            kind=Kind.INPUT,
            birth=Step(0),
            death=Step(1),
            uses=(Step(0),),
            spillable=False,
            formula=formula_of(value.untyped_storage().nbytes()),
        )
        storages.append(StorageNodes(storage=storage, members=(node,), saved=()))
    return inputs, storages


def test_a_size_that_turns_out_to_equal_another_keeps_its_formula() -> None:
    """torch then calls both by one symbol, while what was planned goes by the name of before."""
    inputs, storages = sized_inputs("a", "b")
    named = [item.storage.formula for item in storages]
    assert inputs[0].shape[0] == inputs[1].shape[0]
    assert [formula_of(value.untyped_storage().nbytes()) for value in inputs] != named, "one was called anew"
    formulas = SizeFormulas(inputs, storages, torch.device("cpu"))
    assert set(formulas.columns) == {"", *named}
    assert formulas.values(formulas.read([torch.ones(7, 4), torch.ones(7, 4)])).tolist() == [1, 112, 112]


def test_sizes_of_another_compilation_go_by_their_names() -> None:
    """A symbol may have become constant in between, and another one may have been a constant before."""
    inputs, storages = sized_inputs("a", "b")
    both = SizeFormulas(inputs, storages, torch.device("cpu"))
    first, second = map(str, both.symbols)
    constant, again = sized_inputs("a")
    one = SizeFormulas(constant, again, torch.device("cpu"), both.named((7, 9)))
    assert [*map(str, one.symbols)] == [first]
    assert one.planned == (7,)
    assert both.unnamed({second: 9}) == (5, 9), "as torch traced it"
    assert SizeFormulas(inputs, storages, torch.device("cpu"), one.named((8,))).planned == (8, 5)


def fake_batch() -> tuple[FakeTensorMode, Tensor]:
    """Return a mode, and a fake tensor of it: a batch of a symbolic number of rows."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return mode, mode.from_tensor(torch.randn(80, 64), symbolic_context=sizes)


@pytest.mark.parametrize("warm", [False, True])
def test_fakes_of_symbolic_sizes_run_through_a_region(*, warm: bool) -> None:
    """As with torch's own `aot_eager`; what is computed for real, before and after, is none the worse for it."""
    model = tower()
    with faulty_engine() as engine:
        run = compiled(model, {**EAGER, "policy": "teraio", "device_budget": 1_000_000}, dynamic=True)
        if warm:
            backward(run, torch.randn(200, 64))
            assert engine.stats.take()["offloads"] > 0
        mode, x = fake_batch()
        with mode:
            y = run(x)
            loss = y.square().sum()
            loss.backward()
        assert isinstance(y, FakeTensor)
        assert isinstance(y.shape[0], torch.SymInt)
        assert y.shape[1:] == (64,)
        assert engine.stats.take()["offloads"] == 0
        for parameter in model.parameters():
            parameter.grad = None
        for batch in (256, 190):
            real = torch.randn(batch, 64)
            truth = gradients(model, model, real)
            for got, want in zip(gradients(model, run, real), truth, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert engine.stats.take()["offloads"] > 0
        del run


def test_generated_code_is_not_run_on_fakes() -> None:
    """It would read memory that they do not have."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    run = compiled(model, {**INDUCTOR, "device_budget": "4MB"}, dynamic=True)
    for mode, x in (fake_batch(), (FakeTensorMode(allow_non_fake_inputs=True), torch.randn(80, 64))):
        with mode, pytest.raises(UsageError, match=r"is called on fake tensors.*eager"):
            run(x)
    x = torch.randn(80, 64)
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.slow
def test_code_that_sees_to_fakes_gets_them() -> None:
    """With a setting of Inductor's, which from torch 2.14 on runs the graph on fakes instead, and before refuses."""
    setting = {"wrap_inductor_compiled_regions": True}
    found = []
    for backend, options in (
        ("inductor", setting),
        ("tencache", {**INDUCTOR, "device_budget": "1MB", "inductor": setting}),
    ):
        run = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), backend=backend, options=options, dynamic=True)
        mode, x = fake_batch()
        try:
            with mode:
                y = run(x)
            found.append((type(y), y.shape[1]))
        except RuntimeError as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1]


def test_strides_may_change_of_inputs_that_are_no_views() -> None:
    """Whether such an input is dense is known of one stride only, which says nothing about the others."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        return ((x * 1.5).sin() * w).tanh()

    weights = torch.randn(32, 64, requires_grad=True)
    compiled_run = compiled(run, {**EAGER, "device_budget": 1_000_000})
    before = REGIONS.compilations
    for stride in (64, 32, 40, 48, 32):
        x = torch.empty_strided((32, 64), (64, 1) if stride == 64 else (1, stride)).normal_()
        found, wanted = (torch.autograd.grad(f(x, weights).sum(), weights)[0] for f in (compiled_run, run))
        torch.testing.assert_close(found, wanted)
    assert REGIONS.compilations == before + 2
