"""Whatever a plan asks for, Inductor's code does it where the plan says.

Runtime ops stay in their place, what leaves is what was computed, and nobody reads it afterwards. Most plans are random
and senseless; the check of the generated code (`verify_code`) is what judges.
"""

import itertools
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from harness import compiled
from problems import legal_swap, make_swap
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tencache_fx.ops import OFFLOAD, REFRESH_PARAM, RELEASE, SYNC_PARAM, key_tensor
from tencache_fx.passes.barriers import PinOrder
from tencache_fx.planning.liveness import clip_to_barriers, inactive_intervals, is_candidate
from tencache_fx.planning.plan import Plan, Transfer
from tencache_fx.planning.planner import build_plan
from tencache_fx.planning.problem import Problem, Step, Storage, Tier
from tencache_fx.region import candidate


class Residual(nn.Module):
    """A stream that each layer adds to and normalises: sums of sums, which Inductor computes as late as it can."""

    def __init__(self, layers: int = 5, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner in zip(self.norms, self.inner, strict=True):
            x = x + inner(norm(x))
        return torch.mean(x.square())


class Convolutions(nn.Module):
    """Convolutions in torch's default memory format, which Inductor would rather have with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(self.body(x))


class Recurrent(nn.Module):
    """One weight used again and again: its gradient is a sum of products, and products wait for their turn."""

    def __init__(self, steps: int = 6, width: int = 32) -> None:
        super().__init__()
        self.inner, self.steps = nn.Linear(width, width), steps

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(self.steps):
            state = torch.tanh(self.inner(state)) * torch.sigmoid(state) + x
        return torch.mean(state)


OPTIONS = {"device_budget": "16MiB", "host_budget": "64MiB", "policy": "teraio", "calibrate": False}
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (64, 32)),
    "convolutions": (Convolutions, (8, 3, 32, 32)),
    "recurrent": (Recurrent, (64, 32)),
}


def random_swap(problem: Problem, storage: Storage, draw: random.Random) -> Transfer | None:
    """Draw a swap, with every freedom that a policy has; long ones are likelier."""
    intervals = inactive_intervals(storage)
    (interval,) = draw.choices(intervals, weights=[v - u for u, v in intervals])
    return clip_to_barriers(problem, legal_swap(problem, storage, interval, draw.randint))


def random_plan(problem: Problem, draw: random.Random) -> Plan:
    """Draw a plan in which about half of what may be offloaded is, and something is if that is possible at all."""
    able = [s for s in problem.storages if is_candidate(problem, s) and inactive_intervals(s)]
    swaps: dict[str, Transfer] = {}
    for tries in itertools.count(1) if able else ():
        storage = draw.choice(able)
        if storage.name not in swaps and (swap := random_swap(problem, storage, draw)) is not None:
            swaps[storage.name] = swap
        if 2 * len(swaps) > len(able) or tries > (4 if swaps else 100) * len(able):
            break
    return build_plan(problem, "teraio", tuple(swaps.values()))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_code_does_what_any_plan_says(
    program: str, seed: int, hollow_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    build, shape = PROGRAMS[program]
    draw = random.Random(seed)
    plans: list[Plan] = []

    def make_plan(problem: Problem, policy: str) -> Plan:
        plans.append(random_plan(problem, draw))
        return plans[-1]

    torch.manual_seed(seed)
    with mock.patch.object(candidate, "kept_plan", make_plan):
        compiled(build(), OPTIONS)(torch.randn(shape)).backward()
    assert plans[0].transfers
    assert ("keeps its convolutions' memory format" in caplog.text) == (program == "convolutions")


def late_values(x: Tensor, w: Tensor) -> Tensor:
    """Values that only products read from memory, all after the release: Inductor computes each from `product` anew."""
    product = x @ w
    first = torch.relu(product)
    second = torch.sin(first)
    third = torch.cos(second)  # the release follows this, which reads no other value from memory
    return (first @ w) * (second @ w) * (third @ w) * product


def dead_copy(x: Tensor, w: Tensor) -> Tensor:
    """`gate` is read after the swap of `product` only, so it is computed again there, and nobody reads the first one.

    Inductor would compute `late` early, in one kernel with `early`, and the product that `late` reads before that.
    """
    early = torch.sin(x)
    product = x @ w
    gate = product * (early @ product)
    late = x * (x @ x)
    return gate * ((early @ late) @ late)


def late_reader(small: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a function that reads `small(product)`, through a value in registers, after the release only."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        few = small(product)
        late = torch.cos(few)
        return (few @ few.T).sum() * torch.sum(late) * product

    return function


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        (late_values, "mm_1"),
        (dead_copy, "mm_3"),
        pytest.param(late_reader(torch.sin), "mm_1", id="late_reader"),
        pytest.param(late_reader(lambda x: x.view(64, 16, 4).sum(-1)), "mm_1", id="sum_of_four"),
        pytest.param(late_reader(lambda x: x.view(64, 16, 4).var(-1)), "mm_1", id="variance_of_four"),
        pytest.param(late_reader(lambda x: F.avg_pool2d(x[None], 2)[0]), "mm_1", id="average_pool"),
        pytest.param(late_reader(lambda x: F.max_pool2d(x[None], 2)[0]), "mm_1", id="maximum_pool"),
    ],
)
def test_the_code_does_what_this_plan_says(function: Callable[..., Tensor], gone: str, hollow_kernels: None) -> None:
    """The first product leaves as soon as it is there, and is gone when the op `gone` runs."""
    swaps: list[Transfer] = []

    def make_plan(problem: Problem, policy: str) -> Plan:
        names = [op.name for op in problem.ops]
        (product,) = (storage for storage in problem.storages if storage.name == "mm")
        _, back = inactive_intervals(product)[-1]
        times = {
            "copy_out_after": product.birth,
            "freed_at": Step(names.index(gone)),
            "prefetch_at": Step(back - 1),
            "needed_at": back,
        }
        swap = clip_to_barriers(problem, make_swap(name=product.name, nbytes=product.nbytes, tier=Tier.HOST, **times))
        assert swap is not None
        swaps.append(swap)
        return build_plan(problem, "teraio", (swap,))

    with mock.patch.object(candidate, "kept_plan", make_plan), torch.no_grad():
        compiled(function, OPTIONS)(torch.randn(64, 64), torch.randn(64, 64))
    assert swaps


def sorted_heads(x: Tensor, w: Tensor) -> Tensor:
    """Inductor would lay out `heads` as it reads the product, and a sort lays out its result as what it sorts."""
    heads = torch.sin((x @ w).view(16, -1, 4, 16).transpose(1, 2)).contiguous()
    rows, late = torch.sort(heads, dim=-1).values, w @ w
    for _ in range(4):
        late = late @ w
    return torch.mean((rows + heads).transpose(1, 2).reshape(-1, 64) @ late)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("leaves", ["sort", "clone"])
def test_what_leaves_lies_in_memory_as_the_graph_says_for_all_its_readers(
    leaves: str,
    dynamic: bool,  # noqa: FBT001
    hollow_kernels: None,
) -> None:
    swaps: list[Transfer] = []

    def make_plan(problem: Problem, policy: str) -> Plan:
        (storage,) = (storage for storage in problem.storages if storage.name == leaves)
        (first, back), *_ = [each for each in inactive_intervals(storage) if each[1] - each[0] > 3]
        times = {"copy_out_after": first, "freed_at": Step(first + 2), "prefetch_at": Step(back - 1), "needed_at": back}
        swap = clip_to_barriers(problem, make_swap(name=leaves, nbytes=storage.nbytes, tier=Tier.HOST, **times))
        assert swap is not None
        swaps.append(swap)
        return build_plan(problem, "teraio", (swap,))

    with mock.patch.object(candidate, "kept_plan", make_plan), torch.no_grad():
        x = torch.randn(64, 64)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        compiled(sorted_heads, OPTIONS)(x, torch.randn(64, 64))
    assert swaps


def test_a_release_follows_no_reader_of_what_is_in_memory_already() -> None:
    aten, graph = torch.ops.aten, fx.Graph()

    def call(op: object, *args: object) -> fx.Node:
        node = graph.call_function(op, args)  # type: ignore[arg-type]
        node.meta["val"] = op(*fx.map_arg(args, lambda source: source.meta["val"]))  # type: ignore[operator]
        return node

    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(8, 8)
        source = call(aten.mm.default, x, x)
        handle = call(OFFLOAD, source, 0, "host", "mm")
        first = call(aten.relu.default, source)
        reader = call(aten.mm.default, first, x)  # so `first` is in memory, and what reads it reads that
        second = call(aten.sin.default, first)
        third = call(aten.cos.default, second)  # the release follows this and so need not follow `second`
        call(RELEASE, handle, source, 0)
        graph.output((reader, call(aten.mm.default, second, x), call(aten.mm.default, third, x)))
    module = fx.GraphModule({}, graph)
    PinOrder()(module.graph)
    (release,) = (node for node in module.graph.nodes if node.name.startswith("release"))
    followed, *_ = release.args  # of torch's `control_deps`
    assert {node.name for node in followed} == {"mm_default_1", "relu_default", "cos_default"}


@pytest.mark.parametrize("op", [SYNC_PARAM, REFRESH_PARAM])
def test_what_comes_behind_an_op_that_writes_follows_what_it_wrote(op: torch._ops.OpOverload) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        weight, x = graph.placeholder("weight"), graph.placeholder("x")
        weight.meta["val"] = x.meta["val"] = torch.empty(8, 8)
        token = graph.call_function(op, (weight, 0, "weight"))
        token.meta["val"] = key_tensor()
        product = graph.call_function(torch.ops.aten.mm.default, (x, x))
        product.meta["val"] = torch.empty(8, 8)
        graph.output((product,))
    PinOrder()(fx.GraphModule({}, graph).graph)
    (product,) = (node for node in graph.nodes if node.name.startswith("mm"))
    followed, *_ = product.args  # of torch's `control_deps`
    assert followed == (weight,)  # Inductor drops what is held by the token: nobody reads that
