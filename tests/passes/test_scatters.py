"""What a scatter writes: computed where it is written, and not in memory, if Inductor generates the scatter."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tencache_fx.passes.inductor_model import InductorModel

_aten = torch.ops.aten
_Program = Callable[[Tensor, Tensor], Tensor]


def half() -> Tensor:
    return torch.arange(16) // 2


def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(8, 16, dtype=dtype)


def written(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.index_put(zeros(), [half()], (x @ weight).cos(), True).sin()


def written_unchecked(x: Tensor, weight: Tensor) -> Tensor:
    return _aten._unsafe_index_put(zeros(), [half()], (x @ weight).cos(), True).sin()


def replaced_in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.index_put(zeros(torch.bfloat16), [half()], (x @ weight).bfloat16().cos()).sin()


def added_in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.index_put(zeros(torch.bfloat16), [half()], (x @ weight).bfloat16().cos(), True).sin()


def chosen(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.index_put(torch.zeros(16, 16), [half() > 3], (x @ weight)[:8].cos(), True).sin()


def into_an_input(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.index_put(weight, [half()], (x @ weight).cos(), True).sin()


def of_what_is_written_to(x: Tensor, weight: Tensor) -> Tensor:
    begun = (x @ weight).exp()
    return _aten.index_put(begun, [half()], begun.cos(), True).sin()


def begins_with_it(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.index_put((x @ weight).cos(), [half()], x, True).sin()


def added(x: Tensor, weight: Tensor) -> Tensor:
    return _aten.scatter_add(zeros(), 0, half()[:, None].expand(16, 16), (x @ weight).cos()).sin()


def is_computed_inside(program: _Program) -> bool:
    with FakeTensorMode() as mode:
        graph: fx.Graph = make_fx(program)(*(mode.from_tensor(each) for each in given())).graph
    (value,) = graph.find_nodes(op="call_function", target=_aten.cos.default)
    return value in InductorModel([node for node in graph.nodes if node.op == "call_function"]).registers


def given() -> list[Tensor]:
    return [torch.randn(16, 16), torch.randn(16, 16)]


@pytest.mark.parametrize("program", [written, written_unchecked, replaced_in_bf16])
def test_what_is_written_is_computed_there(program: _Program) -> None:
    assert is_computed_inside(program)


@pytest.mark.parametrize(
    "program",
    [added_in_bf16, chosen, into_an_input, of_what_is_written_to, begins_with_it, added],
)
def test_what_torchs_own_kernel_may_write_is_in_memory(program: _Program) -> None:
    assert not is_computed_inside(program)


def test_a_deterministic_scatter_is_torchs_own() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_computed_inside(written)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inductor_allocates_nothing_for_what_is_written() -> None:
    _, (code,) = run_and_get_code(torch.compile(written, dynamic=False), *given())
    assert len(re.findall(r"= empty_strided_cpu\(\(16, 16\)", code)) == 1  # of the product
