"""Forms in which an optimizer keeps its arrays."""

import pytest
import torch

from tencache_fx.model_state import split_master, stored_form
from tencache_fx.model_state.eight_bit_form import SIGNED_8BIT, UNSIGNED_8BIT
from tencache_fx.model_state.split_master import SPLIT
from tencache_fx.model_state.stored_form import BF16, FP32, Stored, StoredForm, store_values

COUNT = 1003  # ends within a block, and within a byte


@pytest.mark.parametrize("number", [0.0, 0.1, 1 + 2**-8, float("nan")])
@pytest.mark.parametrize("form", [FP32, BF16, SPLIT, SIGNED_8BIT, UNSIGNED_8BIT], ids=lambda form: form.name)
def test_one_number_for_all_is_stored_like_as_many(form: StoredForm, number: float) -> None:
    values = torch.full((COUNT,), number, dtype=torch.float32)
    weight = [values.bfloat16()] if form.reads_weight else []
    expected, found = ([torch.empty(part.count(COUNT), dtype=part.dtype) for part in form.parts] for _ in range(2))
    store_values({"array": form}, expected, {"array": values})
    store_values({"array": form}, found, {"array": number})
    one, other = form.decode([*weight, *found]), form.decode([*weight, *expected])
    assert torch.equal(one, other) or (one.isnan() & other.isnan()).all()


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, float("nan")])
@pytest.mark.parametrize("form", [FP32, BF16, SPLIT, SIGNED_8BIT, UNSIGNED_8BIT], ids=lambda form: form.name)
def test_one_number_for_all_is_stored_like_as_many_where_zeros_were(form: StoredForm, number: float) -> None:
    sevens, zeros = ([torch.full((part.count(COUNT),), n, dtype=part.dtype) for part in form.parts] for n in (7, 0))
    store_values({"array": form}, sevens, {"array": number})
    store_values({"array": form}, zeros, {"array": number}, are_zero=True)
    for one, other in zip(sevens, zeros, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("form", [SPLIT, SIGNED_8BIT, UNSIGNED_8BIT], ids=lambda form: form.name)
def test_what_moves_to_a_device_and_back_has_the_same_values(
    form: StoredForm, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stored_form, split_master):
        monkeypatch.setattr(module, "MOVED", 512)
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).abs()
    values[::3] = values[::3].view(torch.int32).bitwise_and(-0x10000).bitwise_or(0x8000).view(torch.float32)  # ties
    weight = values.bfloat16() if form.reads_weight else None
    parts = [torch.empty(part.count(COUNT), dtype=part.dtype) for part in form.parts]
    form.store(values, parts)
    kept = Stored(values.shape, form, parts, weight)
    whole = torch.empty(COUNT, device=device)
    store_values({"array": FP32}, [whole], {"array": kept})
    expected = form.decode(parts if weight is None else [weight, *parts])
    assert torch.equal(whole.cpu(), expected)
    assert weight is None or torch.equal(expected, values)
    there = [torch.empty_like(part, device=device) for part in parts]
    if weight is None:
        store_values({"array": form}, there, {"array": kept})
        assert all(torch.equal(one.cpu(), other) for one, other in zip(there, parts, strict=True))
    back = [torch.empty_like(part) for part in parts]
    form.store(whole, back)
    assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))
