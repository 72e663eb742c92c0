"""Recipes, run on real tensors: each makes its saved value again, to the last bit, from what is there anyway."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import EAGER, budget_for, compiled, faulty_engine, problems_of, train
from rates import pretend_slow_links
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint
from zoo import BATCH, CASES, LENGTH, WIDTH, Case, case, vectors

import tencache_fx
from tencache_fx.passes.buffer_reuse import reuse_in_place
from tencache_fx.passes.graphs import RegionGraphs, output_args, placeholders
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.lifetimes import StorageNodes, measure_lifetimes
from tencache_fx.passes.recipes import find_recipes, recomputed_nodes
from tencache_fx.planning.problem import Kind, Recipe
from tencache_fx.region.joint_split import Joint, split_joint

JOINT = {**EAGER, "policy": "joint", "calibrate": True}


@dataclass
class Seen:
    """A captured region with its recipes, all values of a forward run, and the inputs as that left them."""

    capture: RegionGraphs
    storages: tuple[StorageNodes, ...]
    recipes: tuple[Recipe, ...]
    checkpointed: frozenset[str]  # what the user has decided about
    again: RegionGraphs  # split once more, with all recipes' nodes recomputed
    values: dict[fx.Node, Any]
    inputs: dict[fx.Node, Any]

    def item(self, name: str) -> StorageNodes:
        return next(item for item in self.storages if item.storage.name == name)

    def targets(self, recipe: Recipe) -> list[str]:
        return [str(self.capture.nodes[step].target) for step in recipe.steps]


def look(case: Case, *, recompute: str = "auto") -> list[Seen]:
    """Run the forward of each training region of `case` once, node by node: each twice, as eager and as fused."""
    found: list[Seen] = []

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        checkpointed = frozenset(node.name for node in joint.graph.nodes if node.meta.get("recompute") is not None)
        task = Joint.prepare(joint, joint_inputs, recompute=recompute, **kwargs)
        halves, capture = split(task)
        model = InductorModel.of(capture)
        fused, _ = reuse_in_place(capture, model, measure_lifetimes(capture, model))
        values: dict[fx.Node, Any] = {}
        inputs: dict[fx.Node, Any] = {}
        for storages in (measure_lifetimes(capture), fused):
            recipes = find_recipes(capture, storages)
            names = recomputed_nodes(capture, recipes, [recipe.name for recipe in recipes])
            _, again = split(task, again=names)
            found.append(Seen(capture, storages, recipes, checkpointed, again, values, inputs))
        return halves

    def run(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        seen = next((each for each in found if each.capture.forward is gm.graph), None)

        def call(args: list[Any]) -> Any:
            interpreter = fx.Interpreter(gm, garbage_collect_values=False)
            returned = interpreter.run(*args)
            if seen is not None:
                seen.values.update(interpreter.env)
                seen.inputs.update(zip(placeholders(gm.graph), args, strict=True))
            return returned

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    backend = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,  # as under Inductor
    )
    torch.compiler.reset()
    train(case, lambda model: torch.compile(model, backend=backend), 1, optimizer=False)
    return found


def split(joint: Joint, again: Collection[str] = ()) -> tuple[tuple[fx.GraphModule, fx.GraphModule], RegionGraphs]:
    forward, backward = split_joint(joint, again=again)
    capture = RegionGraphs(
        forward=forward.graph,
        backward=backward.graph,
        num_outputs=joint.num_outputs,
        static_inputs=frozenset(joint.static_inputs),
        device=torch.device("cpu"),
    )
    return (forward, backward), capture


def make_again(seen: Seen, recipe: Recipe) -> dict[fx.Node, Any]:
    """Return the values of a recipe's steps, run from nothing but inputs and the other saved storages."""
    own, (output,) = seen.item(recipe.name), seen.capture.forward.find_nodes(op="output")
    there: dict[fx.Node, Any] = dict(seen.inputs)
    for item in seen.storages:
        if item is not own and (item.saved or item.storage.kind in (Kind.PARAMETER, Kind.INPUT)):
            single = [node for node in item.members if node in seen.values and isinstance(seen.values[node], Tensor)]
            there |= {node: seen.values[node] for node in single}
    there |= {node: seen.values[node] for node in seen.capture.forward.find_nodes(op="get_attr")}
    there |= {node: value for node, value in seen.values.items() if isinstance(value, int | float | bool)}
    made: dict[fx.Node, Any] = {}
    for step in recipe.steps:
        node = seen.capture.nodes[step]
        assert node.op == "call_function"
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: made[n] if n in made else there[n])
        made[node] = node.target(*args, **kwargs)
    assert output not in made
    return made


def check(seen: Seen) -> None:
    returned = output_args(seen.capture.forward)
    for recipe in seen.recipes:
        item = seen.item(recipe.name)
        made = make_again(seen, recipe)
        assert item.saved
        for position in item.saved:
            node = returned[position]
            assert isinstance(node, fx.Node)
            assert node in made, f"the recipe of {recipe.name} does not make {node.name}"
            torch.testing.assert_close(made[node], seen.values[node], rtol=0, atol=0, equal_nan=True)
            assert made[node].stride() == seen.values[node].stride()


@pytest.fixture
def slow_links() -> None:
    pretend_slow_links()


QUICK = ("gpt2", "convnet-autocast", "views")


@pytest.mark.parametrize(
    "each",
    [each if each.name in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in CASES],
    ids=[each.name for each in CASES],
)
def test_each_recipe_makes_its_value_again(each: Case) -> None:
    regions = look(each)
    for seen in regions:
        check(seen)
        check_split(seen)
    assert sum(len(seen.recipes) for seen in regions) >= (8 if each.name in QUICK else 0)


def check_split(seen: Seen) -> None:
    """When all recipes are recomputed, torch's partitioner runs those nodes in the backward and saves none of them."""
    names = recomputed_nodes(seen.capture, seen.recipes, [recipe.name for recipe in seen.recipes])
    late = {node.name for node in seen.again.nodes[seen.again.boundary :]}
    returned = output_args(seen.again.forward)[seen.again.num_outputs :]
    assert names <= late
    assert not names & {node.name for node in returned if isinstance(node, fx.Node)}
    own = {node.name for node in seen.capture.nodes[seen.capture.boundary :]} & seen.checkpointed
    assert own <= late, "what the user checkpoints still runs again"


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "views", "convnet"])
def test_what_autograd_saves_can_be_made_again_too(name: str) -> None:
    """With the default partitioner far more is saved, views of one storage among it."""
    (seen, _) = look(case(name), recompute="none")
    assert seen.recipes
    check(seen)


def only(build: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]] = vectors) -> Case:
    return Case(name="only", build=build, batch=batch)


class Net(nn.Module):
    """Two layers around something, so that what is between them is saved."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.full((BATCH, LENGTH, WIDTH), 0.5))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).exp().mean()


def test_an_op_with_several_results_is_not_there_because_one_is_saved() -> None:
    """Of a norm the mean is saved, and what was made of the variance: both are made again from their op."""

    def norm(net: nn.Module, x: Tensor) -> Tensor:
        return F.layer_norm(x @ net.first.weight, (WIDTH,)).sin() @ net.last.weight

    for seen in look(only(lambda: Net(norm))):
        check(seen)
        made = [recipe for recipe in seen.recipes if "aten.rsqrt.default" in seen.targets(recipe)]
        assert made
        assert all("aten.var_mean.correction" in seen.targets(recipe) for recipe in made)


def test_each_of_several_saved_results_has_a_recipe() -> None:
    def best(net: nn.Module, x: Tensor) -> Tensor:
        values, where = (x.sin() @ net.first.weight).topk(WIDTH // 2, dim=-1)
        return torch.cat((values.square(), torch.zeros_like(values)), dim=-1).scatter_add(-1, where, values.sin())

    (seen, _) = look(only(lambda: Net(best)), recompute="none")
    check(seen)
    assert sum("aten.topk.default" in seen.targets(recipe) for recipe in seen.recipes) >= 2


def write_late(net: nn.Module, x: Tensor) -> Tensor:
    """Read a buffer, then write to it: what is made from it again would be made from something else."""
    y = (x @ net.first.weight + net.table).sin()
    net.table.add_(1)
    return (y @ y.transpose(1, 2)).tanh() @ y


def test_nothing_is_made_again_from_an_input_that_is_written() -> None:
    for seen in look(only(lambda: Net(write_late))):
        check(seen)
        written = {node.args[0] for node in seen.capture.nodes if node.target is torch.ops.aten.copy_.default}
        assert written, "the write is in the graph"
        for recipe in seen.recipes:
            assert not written & {a for step in recipe.steps for a in seen.capture.nodes[step].all_input_nodes}
        assert any("aten.tanh.default" in seen.targets(recipe) for recipe in seen.recipes), "others may be made again"


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """An op of somebody else's, and how often it has run."""
    runs: list[int] = []
    library = torch.library.Library("tencache_recipes", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    def twice(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    library.impl("twice", twice, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    op = torch.ops.tencache_recipes.twice.default
    torch.library.register_autograd(op, lambda context, grad: grad * 2, lib=library)
    yield runs
    library._destroy()


def test_ops_of_unknown_origin_run_once(counted: list[int], slow_links: None) -> None:
    def custom(net: nn.Module, x: Tensor) -> Tensor:
        return torch.ops.tencache_recipes.twice(x.sin()).cos() * x.tanh()

    build = lambda: Net(custom)  # noqa: E731
    (seen, _) = look(only(build), recompute="none")
    check(seen)
    assert seen.recipes
    assert not [r for r in seen.recipes if any("twice" in target for target in seen.targets(r))]
    counted.clear()
    assert_same_within_budget(only(build), steps=2)
    assert len(counted) == 1 + 2 + 2, "once a step: to see the problem, without a budget, and with one"


def test_randomness_is_never_run_again() -> None:
    for seen in look(case("gpt2-dropout")):
        check(seen)
        assert seen.recipes
        for recipe in seen.recipes:
            nodes = [seen.capture.nodes[step] for step in recipe.steps]
            assert not [n for n in nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]


@pytest.mark.parametrize("name", ["gpt2-checkpoint", "half"])
def test_what_the_user_checkpoints_is_left_to_that(name: str) -> None:
    each = only(HalfCheckpointed) if name == "half" else case(name)
    for seen in look(each):
        check(seen)
        check_split(seen)
        assert seen.checkpointed
        assert seen.recipes
        named = recomputed_nodes(seen.capture, seen.recipes, [recipe.name for recipe in seen.recipes])
        assert not seen.checkpointed & named


class HalfCheckpointed(nn.Module):
    """A plain block, a checkpointed one, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for start in (0, 2, 4):

            def block(y: Tensor, start: int = start) -> Tensor:
                return (y + torch.tanh(self.layers[start + 1](F.gelu(self.layers[start](y))))).sin()

            x = checkpoint(block, x, use_reentrant=False) if start == 2 else block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(case("gpt2-dropout"), id="dropout"),
        pytest.param(only(HalfCheckpointed), id="half checkpointed"),
    ],
)
def test_numbers_stay_as_they_are(each: Case, slow_links: None) -> None:
    assert_same_within_budget(each)


def assert_same_within_budget(each: Case, *, steps: int = 2) -> None:
    """Train with and without a budget that is too small for transfers alone to be quick."""
    budget = budget_for(problems_of(each, EAGER), 40)
    plain = train(each, lambda model: compiled(model, EAGER), steps)
    torch.compiler.reset()
    before = {record.region for record in tencache_fx.regions()}
    with faulty_engine():
        ours = train(each, lambda model: compiled(model, {**JOINT, "device_budget": budget}), steps)
        plans = [record.plan for record in tencache_fx.regions() if record.region not in before]
        assert any(plan.recomputed for plan in plans)
    assert torch.equal(ours.losses, plain.losses)
    for mine, other in ((ours.gradients, plain.gradients), (ours.state, plain.state)):
        assert not [name for name in other if not torch.equal(mine[name], other[name])]
