"""What `torch.compiler.nested_compile_region` marks is planned with the rest, and computes what it would unmarked."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from conftest import without_kernels
from harness import EAGER, INDUCTOR, Options, budget_for, compiled, faulty_engine
from harness import Block as Plain
from torch import Tensor, fx, nn
from torch._higher_order_ops import invoke_subgraph
from torch._higher_order_ops.invoke_subgraph import NestedCompileRegionOptions
from torch.utils.checkpoint import checkpoint

import tencache_fx
from tencache_fx import compat
from tencache_fx.optim import AdamW
from tencache_fx.passes.nested_regions import inline_nested_regions
from tencache_fx.planning.plan import TransferKind

WIDTH, LAYERS = 32, 3
nested = torch.compiler.nested_compile_region


class Wide(Plain):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, widen=4)


class Marked(Wide):
    @nested
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Dropping(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.sin(super().forward(x)), 0.2, self.training)


class MarkedDropping(Dropping):
    @nested
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Within(nn.Module):
    """Checkpoints its block, or is what runs checkpointed: with the mark inside, outside, or not at all."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class MarkedWithin(Within):
    @nested
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Two(nn.Module):
    """Two blocks, and numbers that all calls share."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * torch.tensor([0.5, 2.0]).repeat(WIDTH // 2))


class MarkedTwo(Two):
    @nested
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Either(nn.Module):
    """A block of which a condition takes one use or another."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.wide = block, Wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.cond(x.sum() > 0, lambda x: self.block(x), lambda x: self.block(x).sin(), (x,)))


class Summing(Wide):
    """A block that also returns what it made, and counts in place what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(x.detach().mean())
        made = super().forward(x)
        return made, made.exp().mean()

    def forward(self, x: Tensor) -> Tensor:
        made, mean = self.both(x)
        return made * mean.sigmoid()


class MarkedSumming(Summing):
    @nested
    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().both(x)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "blocks": (Marked, Wide),
    "dropout": (MarkedDropping, Dropping),
    "in a checkpoint": (lambda: Within(Marked()), lambda: Within(Wide())),
    "around a checkpoint": (lambda: MarkedWithin(Wide()), lambda: Within(Wide())),
    "one in another": (lambda: MarkedTwo(Marked), lambda: Two(Wide)),
    "in a condition": (lambda: Either(Marked()), lambda: Either(Wide())),
    "two results, a buffer": (MarkedSumming, Summing),
}
"""Blocks with the mark, and the same without it."""


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(layers)), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def steps(run: Callable[[Tensor], Tensor], model: nn.Module, rows: int = 256) -> list[Tensor]:
    """Return the losses of two steps, the gradients, and the buffers."""
    torch.manual_seed(1)
    x, losses = torch.randn(rows, WIDTH), []
    for _ in range(2):
        loss = run(x)
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


def trained(
    block: Callable[[], nn.Module], wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]], layers: int = LAYERS
) -> list[Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    return steps(wrap(model := Stack(block, layers=layers)), model)


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)] == [True] * len(theirs)


def limited_to(options: Options, percent: int = 60) -> Options:
    """Return options with a budget that leaves a part of what activations take in the last region, which has none."""
    return {**options, "device_budget": budget_for([tencache_fx.regions()[-1].problem], percent)}


def tight(block: Callable[[], nn.Module], options: Options) -> Options:
    """Return options with a budget that leaves a part of what activations take in a step without one."""
    torch.compiler.reset()
    run = compiled(Stack(block), options)
    run(torch.randn(256, WIDTH)).backward()
    return limited_to(options)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "in a condition" else ()) for kind in KINDS]
)
def test_marked_blocks_train_within_a_budget(kind: str) -> None:
    """The same bits as without the mark, and without a budget; whether or not something is computed again."""
    marked, plain = KINDS[kind]
    with torch._inductor.config.patch(fallback_random=True):  # random numbers as torch draws them without a compiler
        wanted = trained(plain, lambda model: torch.compile(model, backend="aot_eager_decomp_partition"))
    runs: list[Callable[..., Tensor]] = []  # their regions are asked for what was planned

    def train(options: Options) -> list[Tensor]:
        def wrap(model: nn.Module) -> Callable[[Tensor], Tensor]:
            runs.append(compiled(model, options))
            return runs[-1]

        return trained(marked, wrap)

    for recompute in ("auto", "none"):
        options = {**EAGER, "recompute": recompute}
        assert_same(train(options), wanted)
        limited = limited_to(options)
        with faulty_engine() as engine:
            assert_same(train(limited), wanted)
            assert engine.stats.take()["offloads"] > 0, recompute
            assert tencache_fx.regions()[-1].plan.forecast.peak_bytes <= limited["device_budget"], recompute
            runs.clear()


def test_generated_code_of_marked_blocks_trains_within_a_budget() -> None:
    wanted = trained(Marked, torch.compile)
    for recompute in ("auto", "none"):
        with without_kernels():  # the budget follows from the code's buffers
            limited = tight(Wide, {**INDUCTOR, "recompute": recompute})
        with faulty_engine() as engine:
            assert_same(trained(Marked, lambda model, options=limited: compiled(model, options)), wanted)
            assert engine.stats.take()["offloads"] > 0, recompute
            assert tencache_fx.regions()[-1].code_peak_bytes <= limited["device_budget"], recompute


def test_marked_blocks_of_an_offloaded_model() -> None:
    """Parameters are loaded where each call reads its own, and their gradients are stored."""

    def losses(block: Callable[[int], nn.Module], *, offloads: bool) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Stack(lambda: block(192), 192)
        if offloads:
            tencache_fx.offload(model)
        updates = AdamW(model.parameters(), lr=0.1)
        run = compiled(model, {**EAGER, "device_budget": 2_000_000} if offloads else EAGER)
        found = []
        for step in range(4):
            loss = run(torch.randn(64, 192, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            updates.step()
            updates.zero_grad()
            found.append(loss.detach())
        return found

    with faulty_engine() as engine:
        wanted = losses(Wide, offloads=False)
        assert_same(losses(Marked, offloads=True), wanted)
        plan = tencache_fx.regions()[-1].plan
        assert {transfer.kind for transfer in plan.transfers} == set(TransferKind)
        assert engine.stats.take()["offloads"] > 0


def test_a_forecast_of_marked_blocks() -> None:
    """The same as without the mark, whose calls it plans one by one."""
    found = []
    for block in (Marked, Wide):
        torch.compiler.reset()
        given = {**EAGER, "device_budget": "700kB"}
        found.append(tencache_fx.fit(Stack(block), torch.randn(256, WIDTH), device="cpu", **given))
    marked, plain = ([(region.peak_bytes, region.out_bytes, region.steps) for region in fit.regions] for fit in found)
    assert marked == plain
    assert marked[0][1] > 0


def test_marked_layers_are_compiled_once_if_that_is_asked_for() -> None:
    once = {**EAGER, "repeated_layers": "once", "device_budget": 1 << 25}
    layers = 4  # fewer are not worth a cut
    wanted = trained(Wide, lambda model: compiled(model, EAGER), layers)
    before = {record.region for record in tencache_fx.regions()}
    with faulty_engine():
        assert_same(trained(Marked, lambda model: compiled(model, once), layers), wanted)
        calls = Counter(run.region for run in tencache_fx.steps()[-1].runs if not run.backward)
        assert max(calls.values()) >= layers - 1
        assert len({record.region for record in tencache_fx.regions()} - before) == len(calls)


fails_alone = pytest.mark.skipif(
    compat.TORCH >= (2, 15), reason="torch 2.15 cannot trace it, for its own backends either"
)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=fails_alone)])
def test_other_sizes_and_no_gradients(*, dynamic: bool | None) -> None:
    limited = tight(Wide, EAGER)
    torch.manual_seed(0)
    model = Stack(Marked)
    with faulty_engine() as engine:
        run = compiled(model, limited, dynamic=dynamic)
        for rows in (256, 192, 256):
            model.zero_grad()
            ours = steps(run, model, rows)
            model.zero_grad()
            for one, other in zip(ours, steps(model, model, rows), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        assert engine.stats.take()["offloads"] > 0
        with torch.no_grad():
            x = torch.randn(64, WIDTH)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-6)


def nodes_of(gm: fx.GraphModule, target: object) -> int:
    graphs = [each.graph for each in gm.modules() if isinstance(each, fx.GraphModule)]
    return sum(len(graph.find_nodes(op="call_function", target=target)) for graph in graphs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_without_calls_of_nested_regions(kind: str) -> None:
    """It computes the same; calls of one region have results of their own."""
    found: list[fx.GraphModule] = []

    def inline(gm: fx.GraphModule, _: object) -> Callable[..., object]:
        assert nodes_of(gm, invoke_subgraph) > 0
        inline_nested_regions(gm)
        assert nodes_of(gm, invoke_subgraph) == 0
        code = gm.code
        inline_nested_regions(gm)
        assert gm.code == code
        found.append(gm)
        return gm.forward

    torch.manual_seed(0)
    model, x = Stack(KINDS[kind][0]).eval(), torch.randn(8, WIDTH)
    torch.compiler.reset()
    loss = torch.compile(model, backend=inline)(x)
    torch.compiler.reset()
    for buffer in model.buffers():
        buffer.zero_()
    assert torch.equal(loss, model(x))
    (gm,) = found
    assert all("example_value" in node.meta for node in gm.graph.nodes if node.op == "call_function" and node.users)


def test_own_options_of_a_nested_region_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def block(x: Tensor) -> Tensor:
        return x.sin() @ x

    with torch._dynamo.config.patch(enable_invoke_subgraph_regional_compile=True):
        options = NestedCompileRegionOptions(partitioner="default_partition")
        marked = nested(block, options=options)
        compiled(lambda x: marked(marked(x)).sum(), EAGER)(torch.randn(32, 32, requires_grad=True)).backward()
    assert sum("their own options are not used" in line for line in caplog.messages) == 1


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin() * x.detach().abs().max().item()


def counted(x: Tensor, w: Tensor) -> Tensor:
    count = x.detach().abs().max().ceil().long().item()
    torch._check(count >= 0)
    return (x @ w).sin() * torch.ones(count).sum()


@pytest.mark.parametrize("options", [EAGER, INDUCTOR], ids=["eager", "inductor"])
@pytest.mark.parametrize("body", [scaled, counted])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_each_call_reads_its_own_number(body: Callable[[Tensor, Tensor], Tensor], options: Options) -> None:
    found = []
    for call in (body, nested(body)):
        torch.compiler.reset()

        def whole(x: Tensor, w: Tensor, call: Callable[[Tensor, Tensor], Tensor] = call) -> Tensor:
            return call(3 * call(x, w) - 0.2, w).square().sum()

        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(size, generator=generator, requires_grad=True) for size in ((8, 16), (16, 16)))
        run = whole if call is body else compiled(whole, options)
        loss = run(x, w)
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    for ours, theirs in zip(*reversed(found), strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()  # with another call's number it is of their size


def test_a_marked_function_is_called_in_branches_and_beside_them() -> None:
    """torch 2.11 has such graphs ask for results of a body that has fewer."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin()

    found = []
    for call in (body, nested(body)):
        torch.compiler.reset()

        def whole(x: Tensor, w: Tensor, call: Callable[[Tensor, Tensor], Tensor] = call) -> Tensor:
            y = call(x, w)
            return torch.cond(y.sum() > 0, lambda t: call(t, w), lambda t: 2 * call(t, w), (y,)).sum()

        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(size, generator=generator, requires_grad=True) for size in ((8, 16), (16, 16)))
        loss = compiled(whole, EAGER)(x, w)
        loss.backward()
        found.append((loss.detach(), x.grad, w.grad))
    torch.testing.assert_close(found[1], found[0])
