"""What a forward computes for its backward only is computed where what it is made of is there."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from harness import EAGER, compiled
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tencache_fx
from tencache_fx.passes.early_results import compute_early
from tencache_fx.planning.planner import floor_bytes
from tencache_fx.region import joint_split

_aten = torch.ops.aten


def order(function: Callable[..., object], *inputs: Tensor, outputs: int) -> list[str]:
    """Return the names of the ops of a forward whose first results are the caller's, once it is sorted."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    expected = module(*inputs)
    compute_early(module.graph, outputs)
    module.graph.lint()
    module.recompile()
    for found, wanted in zip(module(*inputs), expected, strict=True):
        assert torch.equal(found, wanted)
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def test_views_and_elementwise_ops_follow_what_they_are_made_of() -> None:
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = _aten.relu(x)
        second = _aten.mm(first, y)
        third = _aten.mm(second, y)
        turned = _aten.permute(second, [1, 0])
        view = _aten.view(turned.contiguous(), [-1])
        mask = _aten.le(first, 0)
        both = _aten.mul(mask, third)
        return third, turned, view, mask, both, _aten.t(y)

    found = order(forward, torch.randn(8, 8), torch.randn(8, 8), outputs=1)
    assert found == ["t", "relu", "le", "mm", "permute", "clone", "view", "mm_1", "mul"]


def test_what_the_caller_gets_and_what_it_is_made_of_stays() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        first, second = _aten.exp(x), _aten.mm(x, x)
        third = _aten.neg(first)
        return _aten.add(third, second), third

    before = ["exp", "mm", "neg", "add"]
    assert order(forward, torch.randn(4, 4), outputs=1) == before


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        first = _aten.native_dropout(x, 0.5, True)[0]
        second = _aten.native_dropout(x, 0.5, True)[0]
        return second, _aten.bernoulli(x.sigmoid()), first

    module = make_fx(forward, tracing_mode="fake")(torch.rand(4, 4))
    before = [node.name for node in module.graph.nodes if "dropout" in node.name or "bernoulli" in node.name]
    compute_early(module.graph, 1)
    assert [node.name for node in module.graph.nodes if "dropout" in node.name or "bernoulli" in node.name] == before


def test_all_results_of_an_op_follow_it() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        values, places = _aten.topk(x, 2)
        product = _aten.mm(values, values.t())
        return product, _aten.neg(values), _aten.add(places, 1)

    found = order(forward, torch.randn(4, 4), outputs=1)
    assert found == ["topk", "getitem", "getitem_1", "neg", "add", "t", "mm"]


@pytest.mark.parametrize("before", [False, True])
def test_nothing_moves_across_a_write_to_what_it_reads(before: bool) -> None:  # noqa: FBT001
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = _aten.exp(y)
        if before:
            mask = _aten.le(x, 0)
            _aten.copy_(x, first)
        else:
            _aten.copy_(x, first)
            mask = _aten.le(x, 0)
        return first, mask, _aten.ge(y, 0)

    module = make_fx(forward, tracing_mode="fake")(torch.randn(4), torch.randn(4))
    compute_early(module.graph, 1)
    wanted = ["le", "ge", "exp", "copy_"] if before else ["ge", "exp", "copy_", "le"]
    assert [node.name for node in module.graph.nodes if node.op == "call_function"] == wanted


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of one rank."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_nothing_is_read_before_the_wait_for_it(group: str) -> None:
    """The wait's own result is for nobody here."""

    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        summed = torch.ops._c10d_functional.all_reduce(x, "sum", group)
        torch.ops._c10d_functional.wait_tensor(summed)
        product = _aten.mm(y, y)
        return product, _aten.le(summed, 0), _aten.ge(product, 0), _aten.neg(summed)

    module = make_fx(forward, tracing_mode="fake")(torch.randn(4), torch.randn(4, 4))
    compute_early(module.graph, 1)
    order = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert order == ["all_reduce", "wait_tensor", "le", "neg", "mm", "ge"]


@pytest.mark.parametrize("draws", [True, False])
def test_a_size_that_is_drawn_stays_in_order(draws: bool) -> None:  # noqa: FBT001
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(_aten.bernoulli.default, (x,))
    size = graph.call_function(_aten.bernoulli.default if draws else _aten.sym_size.int, (x,) if draws else (x, 0))
    size.meta["val"] = ShapeEnv().create_unbacked_symint()
    graph.output((first, size))
    compute_early(graph, 1)
    ops = [node for node in graph.nodes if node.op == "call_function"]
    assert ops == ([first, size] if draws else [size, first])


def test_what_has_several_results_moves_with_them() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        first = _aten.exp(x)
        second = _aten.mm(first, first)
        upper, lower = _aten.split(first, 2)
        return second, _aten.neg(upper), _aten.add(lower, 1)

    found = order(forward, torch.randn(4, 4), outputs=1)
    assert found == ["exp", "split", "getitem", "getitem_1", "neg", "add", "mm"]


class WrittenOut(nn.Module):
    """Attention in matrix products, whose weights the backward has transposed, and layers with a ReLU."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(64, 192) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for projection, layer in zip(self.projections, self.layers, strict=True):
            query, key, value = projection(x).chunk(3, -1)
            x = x + layer((query @ key.mT / 8).softmax(-1) @ value).relu()
        return x.square().mean()


def test_what_is_read_transposed_in_the_backward_is_away_before_the_forward_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = WrittenOut(8), torch.randn(4, 128, 64)

    def train(run: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        loss = run(x)
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    expected = train(torch.compile(model, backend="aot_eager_decomp_partition"))
    floors = []
    for early in (True, False):
        before = tencache_fx.regions()
        if not early:
            torch._dynamo.reset()
            monkeypatch.setattr(joint_split, "compute_early", lambda forward, count: None)
        found = train(compiled(model, {**EAGER, "device_budget": "5MB"}))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        (record,) = (each for each in tencache_fx.regions() if each not in before)
        assert record.plan.forecast.d2h_bytes > 0
        floors.append(floor_bytes(record.problem))
    assert floors[0] < 0.6 * floors[1]
