"""Functions that Inductor compiles for any length."""

from collections.abc import Callable

import torch
from torch import Tensor

from tencache_fx.thread_safe import compile_for_threads


def _numbering(start: int) -> Callable[[Tensor], None]:
    def number(array: Tensor) -> None:
        last = torch.arange(array.shape[-1], dtype=array.dtype) + start
        array.copy_(last.expand(array.shape))

    return number


def test_only_the_length_varies_whatever_was_compiled_of_the_same_code() -> None:
    lists, rows = torch.zeros(16), torch.zeros(16, 4)
    compile_for_threads(_numbering(0), [lists])
    number_rows = compile_for_threads(_numbering(1), [rows])
    longer = torch.zeros(32, 4)
    number_rows(longer)
    assert torch.equal(longer, torch.tensor([1.0, 2, 3, 4]).expand(32, 4))


def _adding(array: Tensor, numbers: Tensor) -> None:
    array.add_(numbers[-1])


def test_a_list_of_as_many_numbers_as_there_are_rows_is_no_length() -> None:
    rows, numbers = torch.zeros(16, 4), torch.arange(16.0)
    add = compile_for_threads(_adding, [rows, numbers])
    longer = torch.zeros(32, 4)
    add(longer, numbers)
    assert torch.equal(longer, torch.full((32, 4), 15.0))
