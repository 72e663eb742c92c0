"""Inputs that are written to where they are: found as Inductor finds them, which its code tells."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from harness import EAGER, INDUCTOR, Options, compiled, faulty_engine, planned_floor
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import tencache_fx
from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inplace_inputs import find_mutations
from tencache_fx.passes.lifetimes import measure_lifetimes
from tencache_fx.passes.verify_graph import _replay
from tencache_fx.planning.liveness import live_bytes
from tencache_fx.planning.problem import Kind, Step

_aten = torch.ops.aten
SIZE = (4, 64, 48)
BUFFER = f"= empty_strided_cpu({SIZE}"


class Writer:
    """Writes a graph with a cache among its inputs."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.cache = self.given("cache", torch.zeros(SIZE))
        self.row = self.given("row", torch.zeros(4, 48))
        self.at = self.given("at", torch.zeros((), dtype=torch.int64))

    def given(self, name: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target: torch._ops.OpOverload, *args: object) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def put(self, base: fx.Node, at: fx.Node | None = None, row: fx.Node | None = None) -> fx.Node:
        return self.call(_aten.index_put.default, base, [None, at or self.at], row or self.row)

    def slice(self, base: fx.Node, start: int = 3) -> fx.Node:
        return self.call(_aten.slice.Tensor, base, 1, start, start + 1)

    def scatter(self, base: fx.Node) -> fx.Node:
        return self.call(_aten.slice_scatter.default, base, self.call(_aten.sin.default, self.slice(base)), 1, 3, 4)

    def copy(self, value: fx.Node) -> None:
        self.call(_aten.copy_.default, self.cache, value)

    def capture(self, *outputs: fx.Node) -> RegionGraphs:
        self.graph.output((outputs,))
        cpu = torch.device("cpu")
        return RegionGraphs(
            forward=self.graph, backward=None, num_outputs=len(outputs), static_inputs=frozenset(), device=cpu
        )


def test_what_is_put_into_an_input_is_that_input() -> None:
    writer = Writer()
    writer.call(_aten.sin.default, writer.cache)
    new = writer.put(writer.cache)
    read = writer.call(_aten.cos.default, new)
    writer.copy(new)
    capture = writer.capture(read)
    found = find_mutations(capture)
    assert found == {new: writer.cache}
    storages = {item.storage.name: item.storage for item in measure_lifetimes(capture, mutations=found)}
    assert set(storages) == {"cache", "row", "at", "sin_default", "cos_default"}
    assert storages["cache"].uses == (0, 1, 2, 3)
    assert (storages["cache"].kind, storages["cache"].death) == (Kind.INPUT, Step(4))
    assert not storages["cache"].spillable
    assert "index_put_default" in {item.storage.name for item in measure_lifetimes(capture)}


def read_behind(writer: Writer, value: fx.Node) -> None:
    writer.call(_aten.cos.default, writer.cache)


def read_in_part_behind(writer: Writer, value: fx.Node) -> None:
    writer.call(_aten.cos.default, writer.slice(writer.cache, 9))


@pytest.mark.parametrize("use", [read_behind, read_in_part_behind])
def test_an_input_that_is_read_again_stays_as_it_is(use: Callable[[Writer, fx.Node], None]) -> None:
    writer = Writer()
    new = writer.put(writer.cache)
    use(writer, new)
    writer.copy(new)
    assert find_mutations(writer.capture(new)) == {}


def test_an_input_that_gets_nothing_back_stays_as_it_is() -> None:
    writer = Writer()
    assert find_mutations(writer.capture(writer.put(writer.cache))) == {}


def test_several_rows_are_put_one_after_the_other() -> None:
    writer = Writer()
    first = writer.put(writer.cache)
    read = writer.call(_aten.sin.default, first)
    second = writer.put(first)
    writer.copy(second)
    assert find_mutations(writer.capture(read)) == {first: writer.cache, second: writer.cache}


def test_a_row_is_not_put_over_one_that_is_still_read() -> None:
    writer = Writer()
    first = writer.put(writer.cache)
    second = writer.put(first)
    read = writer.call(_aten.sin.default, first)
    writer.copy(second)
    assert find_mutations(writer.capture(read)) == {first: writer.cache}


def test_a_part_is_written_where_it_goes_back_at_once() -> None:
    writer = Writer()
    first = writer.scatter(writer.cache)
    second = writer.scatter(first)
    writer.copy(second)
    assert find_mutations(writer.capture(second)) == {}, "Inductor may make one kernel of both"
    writer = Writer()
    only = writer.scatter(writer.cache)
    writer.copy(only)
    assert find_mutations(writer.capture(only)) == {only: writer.cache}


def test_a_put_of_the_input_itself_is_not_one() -> None:
    writer = Writer()
    new = writer.put(writer.cache, row=writer.call(_aten.select.int, writer.cache, 1, 5))
    writer.copy(new)
    assert find_mutations(writer.capture(new)) == {}


def test_an_input_of_another_device_is_not_counted() -> None:
    writer = Writer()
    new = writer.put(writer.cache)
    writer.copy(new)
    capture = dataclasses.replace(writer.capture(writer.row), device=torch.device("cuda", 0))
    found = find_mutations(capture)
    assert found == {}
    assert measure_lifetimes(capture, mutations=found) == ()


@pytest.mark.parametrize(
    ("write", "handed_out"),
    [
        pytest.param(Writer.put, 0, id="a put over what is handed out"),
        pytest.param(Writer.scatter, 1, id="a part of what was put"),
    ],
)
def test_what_follows_a_put_is_a_copy(write: Callable[[Writer, fx.Node], fx.Node], handed_out: int) -> None:
    writer = Writer()
    first = writer.put(writer.cache)
    second = write(writer, first)
    writer.copy(second)
    assert find_mutations(writer.capture((first, second)[handed_out])) == {first: writer.cache}


def test_a_mask_is_not_one_that_puts() -> None:
    writer = Writer()
    mask, number = writer.given("mask", torch.zeros(SIZE, dtype=torch.bool)), writer.given("number", torch.zeros(()))
    new = writer.call(_aten.index_put.default, writer.cache, [mask], number)
    writer.copy(new)
    assert find_mutations(writer.capture(new)) == {}


def test_a_put_of_all_of_the_input_is_not_one() -> None:
    writer = Writer()
    new = writer.put(writer.cache, row=writer.cache)
    writer.copy(new)
    assert find_mutations(writer.capture(new)) == {}


def test_the_checker_counts_what_was_written_to_the_end() -> None:
    writer = Writer()
    new = writer.put(writer.cache)
    writer.copy(new)
    later = writer.call(_aten.zeros.default, [4, 64, 192])
    given = [node.meta["val"].nbytes for node in (writer.cache, writer.row, writer.at, later)]
    peak_bytes, where = _replay(writer.capture(later), frozenset(), {new: writer.cache})
    assert (peak_bytes, where) == (sum(given), later.name)


def put_row(cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
    cache.index_copy_(1, at, row)
    return torch.matmul(cache, cache.transpose(1, 2)).softmax(-1)


def write_slice(cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
    cache[:, 3:4] = row
    return torch.matmul(cache, cache.transpose(1, 2)).softmax(-1)


def write_twice(cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
    before = torch.matmul(cache, cache.transpose(1, 2))
    cache.index_copy_(1, at, row)
    between = torch.matmul(cache, cache.transpose(1, 2))
    cache.index_copy_(1, at + 1, row)
    return before + between + torch.matmul(cache, cache.transpose(1, 2))


def clone_first(cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
    other = cache.clone()
    other.index_copy_(1, at, row)
    return torch.matmul(other, cache.transpose(1, 2)) + torch.matmul(cache, cache.transpose(1, 2))


@pytest.mark.parametrize(("function", "copies"), [(put_row, 0), (write_slice, 0), (write_twice, 0), (clone_first, 1)])
def test_the_plan_has_a_cache_as_often_as_the_code(function: Callable[..., Tensor], copies: int) -> None:
    given = torch.Generator().manual_seed(1)
    inputs = [torch.randn(SIZE, generator=given), torch.randn(4, 1, 48, generator=given), torch.tensor([7])]
    expected_cache, found_cache = inputs[0].clone(), inputs[0].clone()
    with torch.no_grad():
        expected = function(expected_cache, *inputs[1:])
        run = torch.compile(function, backend="tencache", options={"device_budget": "1GB", "calibrate": False})
        found, (code, *_) = run_and_get_code(run, found_cache, *inputs[1:])
    torch.testing.assert_close(found, expected)
    assert torch.equal(found_cache, expected_cache)
    assert code.count(BUFFER) == copies
    record = tencache_fx.regions()[-1]
    made = [s for s in record.problem.storages if s.nbytes == inputs[0].nbytes and s.kind is not Kind.INPUT]
    assert len(made) == copies


def keep_least(given: Tensor, x: Tensor, order: Tensor) -> Tensor:
    """Autograd is to see what is written, so AOTAutograd writes it, behind the forward."""
    given.index_reduce_(0, order, x, "amin")
    return x * given.cos()


def multiply(given: Tensor, x: Tensor, order: Tensor) -> Tensor:
    """The backward reads the input itself, as it was."""
    given.mul_(x)
    return given + x


def multiply_turned(given: Tensor, x: Tensor, order: Tensor) -> Tensor:
    given.t().mul_(x.t())
    return given + x


def multiply_by_parts(given: Tensor, x: Tensor, order: Tensor) -> Tensor:
    """The backward reads parts of a copy, and the input is written in the forward."""
    left, right = given.clone().split(32, 1)
    given.add_(x.detach())
    return x * (x[:, :32] * left + x[:, 32:] * right).mean(1, keepdim=True)


def add_unseen(given: Tensor, x: Tensor, order: Tensor) -> Tensor:
    made = x * given.clone()
    given.add_(x.detach())
    return made


WRITES = (keep_least, multiply, multiply_turned, multiply_by_parts, add_unseen)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    ("write", "options", "recompute"),
    [
        pytest.param(each, EAGER, recompute, id=f"{each.__name__}-eager-{recompute}")
        for each in WRITES
        for recompute in ("auto", "none")
    ]
    + [
        pytest.param(
            each,
            INDUCTOR,
            recompute,
            id=f"{each.__name__}-inductor-{recompute}",
            marks=() if (each, recompute) in ((multiply_turned, "auto"), (add_unseen, "none")) else pytest.mark.slow,
        )
        for each in WRITES
        for recompute in ("auto", "none")
    ],
)
def test_the_backward_has_what_an_overwritten_input_was(
    write: Callable[..., Tensor], options: Options, recompute: str
) -> None:
    """By itself torch reads the input in the backward, and fails there, or with Inductor computes wrong gradients."""
    given = torch.Generator().manual_seed(1)
    weights = [torch.randn(64, 64, generator=given) / 8 for _ in range(4)]
    written = [torch.randn(512, 64, generator=given) for _ in weights]
    x, order = torch.randn(512, 64, generator=given), torch.randperm(512, generator=given)

    def layers(x: Tensor, weights: Sequence[Tensor], written: Sequence[Tensor]) -> Tensor:
        for weight, each in zip(weights, written, strict=True):
            x = write(each, torch.tanh(x @ weight), order)
        return x.square().mean()

    def results(run: Callable[..., Tensor]) -> list[Tensor]:
        parameters = [weight.clone().requires_grad_() for weight in weights]
        own = [each.clone() for each in written]
        loss = run(x, parameters, own)
        loss.backward()
        return [loss.detach(), *(each.detach() for each in own), *(each.grad for each in parameters)]

    def check(budget: int | None) -> None:
        torch.compiler.reset()
        more = {"recompute": recompute, "device_budget": budget}
        for found, want in zip(results(compiled(layers, {**options, **more})), wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)

    wanted = results(layers)
    with faulty_engine() as engine:
        check(None)
        problem = tencache_fx.regions()[-1].problem
        floor, peak = planned_floor(problem), int(live_bytes(problem).max())
        check(floor + (peak - floor) // 4)
        assert engine.stats.take()["offloads"] > 0
