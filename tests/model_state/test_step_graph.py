"""The graph of an optimizer's step: what tells two apart, and what it costs to have one for each step."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tencache_fx.model_state.step_graph import Node, StepGraph
from tencache_fx.model_state.step_kernel import find_rule
from tencache_fx.model_state.step_tracing import trace_step


def graph_of(name: str, *more: Any, **kwargs: Any) -> StepGraph:
    x, y = Node(), Node()
    call = Node(name, (x, y, *more), kwargs)
    return StepGraph.of((x, y), [call], [call])


def test_graphs_that_do_the_same_have_one_key_and_others_have_others() -> None:
    assert graph_of("mul").key == graph_of("mul").key
    x, y = Node(), Node()
    swapped, same, other_result = Node("mul", (y, x)), Node("mul", (x, x)), Node("mul", (x, y))
    keys = [
        *(each.key for each in (graph_of("mul"), graph_of("div"), graph_of("mul", 2), graph_of("mul", 2.0))),
        *(graph_of("div", rounding_mode=mode).key for mode in ("floor", "trunc", None)),
        graph_of("mul", "%0").key,
        *(StepGraph.of((x, y), [call], [call]).key for call in (swapped, same)),
        StepGraph.of((x, y), [other_result], [other_result, x]).key,
        StepGraph.of((x, y, Node()), [other_result], [other_result]).key,
    ]
    assert len(set(keys)) == len(keys)


def test_what_has_no_use_is_neither_in_the_key_nor_compiled() -> None:
    x = Node()
    unused = Node("neg", (x,))
    used = Node("abs", (x,))
    graph = StepGraph.of((x,), [unused, Node("sqrt", (unused,)), used], [used])
    assert graph.key == StepGraph.of((x,), [used], [used]).key
    assert [node.op for node in graph.as_fx().nodes] == ["placeholder", "call_function", "output"]


class Weighs(torch.optim.Optimizer):
    """Has an array of ones, and adds to it what it also makes of a new one; ends with one that is never read."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                state = self.state[p]
                weights = state.setdefault("weights", torch.ones_like(p))
                weights.add_(torch.full_like(p, 3.0)).mul_(torch.ones_like(p))
                state.setdefault("last", torch.full_like(p, 7.0))
                p.sub_(p.grad / weights, alpha=group["lr"])


def test_arrays_full_of_a_number_are_read_where_they_are_kept_and_made_where_they_are_not() -> None:
    parameter = nn.Parameter(torch.ones(4))
    inner = Weighs([parameter])
    weight, arrays = parameter.detach().clone(), {}
    for _ in range(3):
        parameter.grad = torch.arange(4.0)
        traced = trace_step(Weighs, {}, inner.param_groups[0], (4,), {}, tuple(arrays))
        assert traced.reads == ("weights", "last")
        if not arrays:
            assert traced.initial == {"weights": 1.0, "last": 7.0}
            arrays = {name: torch.full((4,), value) for name, value in traced.initial.items()}
        given: list[Tensor] = [parameter.grad, weight, *arrays.values(), torch.tensor(traced.numbers)]
        weight, *made = fx.Interpreter(fx.GraphModule(nn.Module(), traced.graph.as_fx())).run(*given)
        arrays = dict(zip(traced.names, made, strict=True))
        inner.step()
        assert torch.equal(weight, parameter.detach())
        assert all(torch.equal(arrays[name], inner.state[parameter][name]) for name in arrays)


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_a_step_with_a_known_kernel_makes_no_graph_for_a_compiler(state_dtype: Any) -> None:
    """That took most of the time of a step of a small model: rates change, so each step is traced."""
    rule, group = find_rule(torch.optim.AdamW, state_dtype, {"lr": 1e-3})
    made = frozenset(rule.arrays(group, 2))
    scalars = dict(rule.step(group, 2, {}, frozenset()).after)
    known = rule.step(group, 2, scalars, made).kernel
    compilers, called = str(Path(fx.__file__).parent), []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(compilers):
            called.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step = rule.step({**group, "lr": 1e-4}, 2, scalars, made)
    finally:
        sys.setprofile(before)
    assert step.kernel is known
    assert called == []
