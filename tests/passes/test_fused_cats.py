"""Tensors that are put together: on a GPU their readers may compute them, and then they take no memory."""

import re
from collections.abc import Callable

import pytest
import torch
from harness import capture_of
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tencache_fx.passes.graphs import RegionGraphs
from tencache_fx.passes.inductor_model import InductorModel
from tencache_fx.passes.lifetimes import measure_lifetimes
from tencache_fx.planning.problem import Storage

_aten = torch.ops.aten
_Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(device: str = "cpu") -> list[Tensor]:
    """Return a picture, one half as large, and a convolution's weight for both, put together."""
    shapes = (2, 8, 16, 16), (2, 8, 8, 8), (8, 16, 1, 1)
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


def grown(x: Tensor) -> Tensor:
    twice = torch.arange(16, device=x.device) // 2
    return _aten._unsafe_index(x.sin(), [None, None, twice[:, None], twice])


def product(skip: Tensor, weight: Tensor) -> Tensor:
    return torch.convolution(skip, weight[:8, :8], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def copied(whole: Tensor, weight: Tensor) -> Tensor:
    laid = whole.clone(memory_format=torch.channels_last)
    return torch.convolution(laid, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def joined(skip: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return copied(torch.cat((product(skip, weight), grown(x)), 1), weight)


def joined_for_a_product(skip: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    whole = torch.cat((product(skip, weight), grown(x)), 1)
    return torch.convolution(whole, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def joined_in_memory(skip: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return copied(torch.cat((product(skip, weight), skip), 1), weight)


def part_read_again(skip: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    found = product(skip, weight)
    return copied(torch.cat((found, grown(x)), 1), weight) + found.exp()


def fresh_part_read_again(skip: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    up = grown(x)
    whole = copied(torch.cat((product(skip, weight), up), 1), weight)
    return whole + up.exp()


def many_parts(skip: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    rows = product(skip, weight).split(1, 1)
    return copied(torch.cat((*rows, grown(x)), 1), weight)


def forward_storages(program: _Program, *, on_gpu: bool) -> dict[str, Storage]:
    capture = capture_of(program, *inputs())
    forward = RegionGraphs(
        forward=capture.forward, backward=None, num_outputs=1, static_inputs=frozenset(), device=capture.device
    )
    for node in reversed(forward.forward.nodes):  # keep the program's own result only
        if node.op == "output":
            node.args = (node.args[0][:1],)
    forward.forward.eliminate_dead_code()
    found = measure_lifetimes(forward, InductorModel.of(forward, on_gpu=on_gpu))
    return {item.storage.name: item.storage for item in found}


@pytest.mark.parametrize(
    ("program", "fused"),
    [
        (joined, True),
        (joined_for_a_product, False),  # that reads it from memory
        (joined_in_memory, False),  # all its parts are there already
        (part_read_again, False),  # from 2.14 on
        (fresh_part_read_again, False),
        (many_parts, False),
    ],
)
def test_a_copy_of_what_is_put_together_needs_only_the_parts(program: _Program, *, fused: bool) -> None:
    found = forward_storages(program, on_gpu=True)
    assert ("cat" in found) != fused
    if fused:
        copy = found["clone"]
        parts = [storage for storage in found.values() if copy.birth in storage.uses and storage is not copy]
        assert {storage.name for storage in parts} >= {"convolution", "primals_2"}
        assert found["convolution"].spillable


def test_on_a_cpu_it_has_memory_of_its_own() -> None:
    assert "cat" in forward_storages(joined, on_gpu=False)


def test_what_is_looked_up_without_checks_is_computed_where_it_is_read() -> None:
    found = forward_storages(lambda skip, x, weight: skip * grown(x), on_gpu=False)
    assert not [name for name in found if "unsafe_index" in name or name == "sin"]


@pytest.mark.gpu
def test_inductor_allocates_the_copy_alone() -> None:
    given = [each.detach() for each in inputs("cuda")]
    _, (code,) = run_and_get_code(torch.compile(joined, dynamic=False), *given)
    assert len(re.findall(r"= empty_strided_cuda\(\(2, 16, 16, 16\)", code)) == 1
