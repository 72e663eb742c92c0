"""State in memory that nobody had before is not set to zeros, which it is; any other is."""

from collections.abc import Callable

import pytest
import torch

from tencache_fx.model_state.host_state import State
from tencache_fx.model_state.stored_form import FP32, store_values
from tencache_fx.runtime.buffers import Use
from tencache_fx.runtime.engine import Engine

COUNT = 1 << 16
FORMS = {"first": FP32, "second": FP32}


def state(engine: Engine) -> State:
    return State(engine.object_buffers, torch.zeros(COUNT), FORMS, on_device=False)


def test_memory_that_nobody_had_is_known_to_be_zero(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    fresh = state(engine)
    assert fresh.is_zero
    assert not torch.cat(fresh.arrays).any()


@pytest.mark.parametrize("use", ["released", "small", "on the device"])
def test_any_other_memory_is_not(new_engine: Callable[..., Engine], use: str) -> None:
    engine = new_engine()
    if use == "released":
        buffer = engine.object_buffers.acquire_settled(2 * 4 * COUNT, Use.STATE)
        buffer.memory.fill_(1)
        engine.pool.release(buffer)
        again = state(engine)
        assert again.arrays[0].data_ptr() == buffer.memory.data_ptr()
    elif use == "small":
        again = State(engine.object_buffers, torch.zeros(4), FORMS, on_device=False)
    else:
        again = State(engine.object_buffers, torch.zeros(COUNT), FORMS, on_device=True)
    assert not again.is_zero
    store_values(FORMS, again.arrays, {"first": 0.0, "second": 0.0}, are_zero=again.is_zero)
    assert not torch.cat(again.arrays).any()


def test_what_was_mapped_ahead_is_zero_and_is_not_written(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    engine.map_ahead([2 * 4 * COUNT], Use.STATE)
    fresh = state(engine)
    assert fresh.is_zero
    filled: list[float] = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda array, value: filled.append(value) or array)
    store_values(FORMS, fresh.arrays, {"first": 0.0, "second": 1.0}, are_zero=fresh.is_zero)
    assert filled == [1.0]
