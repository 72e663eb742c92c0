"""Functions that Inductor compiles for any length."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tencache_fx import compat, thread_safe
from tencache_fx.errors import InvariantError
from tencache_fx.model_state.decoded_update import on_parts
from tencache_fx.model_state.eight_bit_form import SIGNED_8BIT
from tencache_fx.model_state.stored_form import BLOCK
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


_LENGTHS = (1, 7, 1 << 14, (1 << 20) + 3)


def _decaying(gradient: Tensor, weight: Tensor, moment: Tensor, numbers: Tensor) -> None:
    moment.copy_(moment * numbers[0] + gradient.float() * numbers[1])
    weight.copy_((weight.float() - moment / (moment.abs() + numbers[2])).to(weight.dtype))


@pytest.mark.parametrize("example", [64, 1 << 10, 1003])
def test_any_length_gets_the_bits_of_eager_mode(example: int) -> None:
    numbers = torch.tensor([0.875, 0.25, 0.5])
    given = [torch.zeros(example, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
    decay = compile_for_threads(_decaying, [*given, numbers])
    for length in _LENGTHS:
        generator = torch.Generator().manual_seed(length)
        mine = [torch.randint(-64, 64, (length,), generator=generator).square().to(each.dtype) for each in given]
        others = [each.clone() for each in mine]
        decay(*mine, numbers)
        _decaying(*others, numbers)
        assert all(map(torch.equal, mine, others))


@pytest.mark.parametrize("rows", [1, 2, 7, 4099])
def test_any_number_of_blocks_is_kept_in_8_bits_as_eager_mode_keeps_it(rows: int, blocks: Callable[..., None]) -> None:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, BLOCK, generator=generator)
    codes, scales = torch.zeros(rows, BLOCK, dtype=torch.uint8), torch.zeros(rows, 1)
    blocks(values, codes, scales, torch.ones(1))
    flat_codes, flat_scales = torch.zeros(rows * BLOCK, dtype=torch.uint8), torch.zeros(rows)
    SIGNED_8BIT.store(values.view(-1), [flat_codes, flat_scales])
    assert torch.equal(codes.view(-1), flat_codes)
    assert torch.equal(scales.view(-1), flat_scales)


@pytest.fixture(scope="module")
def blocks() -> Callable[..., None]:
    form = SIGNED_8BIT.on(torch.device("cpu"))
    encode = on_parts(lambda values, array, numbers: array.copy_(values * numbers[0]), [form], 1)
    examples = [torch.zeros(16, BLOCK), torch.zeros(16, BLOCK, dtype=torch.uint8), torch.zeros(16, 1), torch.ones(1)]
    return compile_for_threads(encode, examples)


def test_a_tensor_that_the_function_has_besides_is_read_where_it_is() -> None:
    table = torch.arange(10.0)

    def look_up(places: Tensor, found: Tensor) -> None:
        found.copy_(table[places] + table[0])

    compiled = compile_for_threads(look_up, [torch.zeros(16, dtype=torch.int32), torch.zeros(16)])
    table += 5
    found = torch.zeros(3)
    compiled(torch.tensor([9, 0, 1], dtype=torch.int32), found)
    assert found.tolist() == [19, 10, 11]


class _Seen(TorchDispatchMode):
    """Lets no op be seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is seen")


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.inference_mode(),
        lambda: torch.device("meta"),
        lambda: torch.compiler.set_stance("fail_on_recompile"),
        lambda: torch.compiler.set_stance("force_eager"),
        _Seen,
    ],
)
def test_what_is_compiled_is_the_same_in_whatever_mode_of_the_caller(mode: Callable[[], Any]) -> None:
    def multiply(rows: Tensor) -> None:
        rows.copy_(rows @ square)

    square, rows = torch.rand(8, 8), torch.rand(5, 8)
    examples, product = [torch.zeros(16, 8)], rows @ square
    with mode():
        compiled = compile_for_threads(multiply, examples)
    compiled(rows)
    assert torch.equal(rows, product)


def test_dynamo_is_not_asked() -> None:
    before = compat.dynamo_ns()
    compile_for_threads(_adding, [torch.zeros(16, 4), torch.ones(3)])
    assert compat.dynamo_ns() == before


def test_threads_compile_at_once() -> None:
    def compiled(number: int) -> float:
        rows = torch.zeros(4)
        compile_for_threads(lambda array: array.add_(number), [torch.zeros(16)])(rows)
        return float(rows.sum())

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(compiled, range(3))) == [0, 4, 8]


def test_examples_may_be_made_where_the_caller_trains_nothing() -> None:
    with torch.inference_mode():
        add = compile_for_threads(_adding, [torch.zeros(16, 4), torch.ones(3)])
    rows = torch.zeros(3, 4)
    add(rows, torch.ones(3))
    assert torch.equal(rows, torch.ones(3, 4))


def _halving(array: Tensor) -> None:
    if array.shape[0] > 8:
        array.div_(2)


def _adding_in_fours(array: Tensor) -> None:
    array.add_(array.view(-1, 4).sum(1).repeat_interleave(4))


@pytest.mark.parametrize(
    "function", [_halving, _adding_in_fours, lambda array: array.add_(len(array))], ids=["if", "fours", "number"]
)
def test_a_function_of_the_length_is_refused(function: Callable[[Tensor], None]) -> None:
    with pytest.raises(InvariantError, match="some only: .*(8|4|16)"):
        compile_for_threads(function, [torch.zeros(16)])


def test_more_elements_than_a_gpu_counts_in_32_bits_are_given_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def compile_noting(*args: Any, **options: Any) -> Callable[..., object]:
        compiled: Any = compile_fx(*args, **options)

        def call(*tensors: Tensor) -> object:
            lengths.append(len(tensors[0]))
            return compiled(*tensors)

        return call

    compile_fx = thread_safe.compile_fx
    monkeypatch.setattr(thread_safe, "compile_fx", compile_noting)
    monkeypatch.setattr(thread_safe, "_MOST_ELEMENTS", 64)
    add = compile_for_threads(_adding, [torch.zeros(16, 4), numbers := torch.arange(20.0)])
    rows = torch.zeros(37, 4)
    add(rows, numbers)
    assert torch.equal(rows, torch.full((37, 4), 19.0))
    assert lengths == [16, 16, 16, 5]
