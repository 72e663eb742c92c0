"""The rewrite, carried out and run: interpreted graphs give the values of the graphs before, for any legal plan."""

import copy
from typing import Any

import pytest
import torch
from harness import capture_of, faulty_engine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from problems import legal_swap
from torch import Tensor, fx

import tencache_fx.model_state.parameter_ops
import tencache_fx.runtime.op_kernels  # noqa: F401  (registers the ops' kernels)
from tencache_fx.hardware.rates import FIXED_LINKS
from tencache_fx.ops import RUNTIME_OPS
from tencache_fx.passes.fake_aliasing import repair_view_fakes
from tencache_fx.passes.graphs import RegionGraphs, placeholders
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.lifetimes import measure_lifetimes
from tencache_fx.passes.transfers import insert_transfers
from tencache_fx.passes.verify_graph import verify_graphs
from tencache_fx.planning.liveness import inactive_intervals, is_candidate
from tencache_fx.planning.plan import Transfer
from tencache_fx.planning.planner import build_plan
from tencache_fx.planning.problem import Budgets, Op, Problem
from tencache_fx.planning.verify import verify_plan
from tencache_fx.tensors import storage_of


def views_of_one_product(x: Tensor, w: Tensor) -> Tensor:
    a, b, c = (x @ w).split(32, dim=1)
    values, order = (a * b.sin()).sort(dim=1)
    return torch.tanh(values * c.exp() + order) + (x @ w).t().reshape(x.shape[0], -1).tanh().sum(1, keepdim=True)


def deep(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ w)[:, :96].sin()
        x = (x.unflatten(1, (3, 32)).transpose(1, 2).flatten(1) * x.sigmoid()).clamp(-2, 2)
        x = torch.nn.functional.pad(x, (0, 0))
    return x


def conjugates(x: Tensor, w: Tensor) -> Tensor:
    z, v = torch.complex(x, x.sin()), torch.complex(w, w.cos())
    for _ in range(3):
        z = (z @ v).conj()
        z = z * z.abs().sigmoid()
    return z.real * torch.tanh(z.conj().imag)


PROGRAMS = {f.__name__: (f, (64, 96), (96, 96)) for f in (views_of_one_product, deep, conjugates)}


def run(capture: RegionGraphs, inputs: list[Tensor], num_outputs: int) -> list[Tensor]:
    """Interpret the forward, then the backward with tangents of ones; return outputs and gradients."""
    outs = list(fx.Interpreter(fx.GraphModule({}, capture.forward)).run(*inputs))
    results = [out.clone() for out in outs[:num_outputs]]
    saved = outs[num_outputs:]
    assert capture.backward is not None
    names = placeholders(capture.backward)
    tangents = [torch.ones(node.meta["val"].shape) for node in names[len(saved) :]]
    args = [*saved, *tangents]
    del outs, saved
    grads: Any = fx.Interpreter(fx.GraphModule({}, capture.backward)).run(*args)
    return [*results, *(grad for grad in grads if grad is not None)]


def random_spills(data: st.DataObject, problem: Problem) -> tuple[Transfer, ...]:
    """Draw legal transfers, with every freedom that a policy has."""
    transfers = []
    for storage in problem.storages:
        intervals = inactive_intervals(storage)
        if not (is_candidate(problem, storage) and intervals and data.draw(st.booleans())):
            continue
        interval = data.draw(st.sampled_from(intervals))
        transfers.append(legal_swap(problem, storage, interval, lambda low, high: data.draw(st.integers(low, high))))
    return tuple(transfers)


@pytest.mark.parametrize("name", PROGRAMS)
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_legal_plan_keeps_the_values(name: str, data: st.DataObject) -> None:
    function, *shapes = PROGRAMS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    capture = capture_of(function, *inputs)
    repair_view_fakes(capture)
    values = [x.detach() for x in inputs]
    plain = run(copy.deepcopy(capture), values, capture.num_outputs)
    model = InductorModel.of(capture) if data.draw(st.booleans()) else None
    storages = measure_lifetimes(capture, model)
    problem = Problem(
        ops=tuple(Op(name=node.name, duration_ns=1000) for node in capture.nodes),
        boundary=capture.boundary,
        storages=tuple(item.storage for item in storages),
        links=FIXED_LINKS,
        budgets=Budgets(device_bytes=None, host_bytes=1 << 30),
        min_spill_bytes=4096,
    )
    plan = build_plan(problem, "teraio", random_spills(data, problem))
    verify_plan(problem, plan)
    with faulty_engine(delay_s=0.0002) as engine:
        copied = insert_transfers(
            capture, storages, plan, frozenset(model.registers if model else ()), engine=engine.id
        )
        verify_graphs(problem, plan, capture, copied)
        ops = sum(node.target in RUNTIME_OPS for graph in capture.graphs for node in graph.nodes)
        assert ops == 4 * len(plan.transfers)
        ours = run(capture, values, capture.num_outputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_what_a_generator_draws_has_a_fake() -> None:
    """On a CUDA device, torch's partitioner leaves what it draws by a generator without one."""
    capture = capture_of(lambda x: x.exp().t().sin(), torch.randn(4, 6, requires_grad=True))
    graph = capture.forward
    (drawn,) = (node for node in graph.nodes if node.target is torch.ops.aten.exp.default)
    last = placeholders(graph)[-1]
    with graph.inserting_after(last):
        generator = graph.placeholder("fwd_rng_state_0")
    generator.meta["val"] = torch.Generator()
    with graph.inserting_before(drawn):
        instead = graph.call_function(
            torch.ops.higher_order.graphsafe_run_with_rng_state, (drawn.target, *drawn.args), {"rng_state": generator}
        )
    shape = drawn.meta["val"].shape
    drawn.replace_all_uses_with(instead)
    graph.erase_node(drawn)
    repair_view_fakes(capture)
    assert instead.meta["val"].shape == shape
    (turned,) = (
        node for node in instead.users if node.target in (torch.ops.aten.t.default, torch.ops.aten.permute.default)
    )
    assert storage_of(turned.meta["val"]) == storage_of(instead.meta["val"])
