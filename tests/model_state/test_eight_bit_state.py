"""Optimizer state in 8 bits: its codes beside an independent reference, and training with it wherever it is."""

import contextlib
import copy
import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_native_kernel import ExactRoots, assert_same, next_step
from test_optimizer_classes import Lion
from tied_model import TIGHT, compiled, network, train, weights
from torch import Tensor, nn

import tencache_fx
from tencache_fx import native_code
from tencache_fx.errors import OptionError
from tencache_fx.model_state import decoded_update, placement, step_kernel
from tencache_fx.model_state.cpp_prelude import PRELUDE
from tencache_fx.model_state.eight_bit_form import SIGNED_8BIT, UNSIGNED_8BIT, dynamic_map
from tencache_fx.model_state.kernel_source import write_function
from tencache_fx.model_state.step_kernel import find_rule
from tencache_fx.model_state.stored_form import BLOCK, StoredForm, parts_of, store_values
from tencache_fx.model_state.update_room import Room
from tencache_fx.optim import AdamW, OffloadedOptimizer
from tencache_fx.planning.problem import Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.store import Store

FORMS = [(SIGNED_8BIT, True), (UNSIGNED_8BIT, False)]
CPU = torch.device("cpu")


def encoded(form: StoredForm, values: Tensor) -> list[Tensor]:
    parts = [torch.empty(part.count(len(values)), dtype=part.dtype) for part in form.parts]
    form.store(values, parts)
    return parts


def published_map(*, signed: bool) -> Tensor:
    """Return the map as bitsandbytes makes it (`create_dynamic_map`)."""
    data = []
    for i in range(7):
        items = 2**i + 1 if signed else 2 ** (i + 1) + 1
        boundaries = torch.linspace(0.1, 1, items)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += ((10 ** (-6 + i)) * means).tolist()
        if signed:
            data += (-(10 ** (-6 + i)) * means).tolist()
    return torch.tensor(sorted([*data, 0.0, 1.0]))


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed: bool) -> None:  # noqa: FBT001
    found = torch.tensor(dynamic_map(signed=signed))
    assert len(found) == 256
    torch.testing.assert_close(found, published_map(signed=signed), rtol=1e-6, atol=0)


def odd_values(seed: int, count: int, decades: float) -> Tensor:
    """Return values whose magnitudes are spread over decades, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 10 ** (-decades * torch.rand(count, generator=generator))
    return values.where(torch.rand(count, generator=generator) > 0.1, 0.0)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 20),
    count=st.integers(1, 1500),
    decades=st.floats(0, 9),
    power=st.integers(-95, 120),
    sign=st.sampled_from([1.0, -1.0]),
)
@example(seed=0, count=256, decades=0.0, power=0, sign=-1.0)
def test_codes_are_the_nearest_and_are_found_again(
    seed: int, count: int, decades: float, power: int, sign: float
) -> None:
    for form, signed in FORMS:
        values = odd_values(seed, count, decades) * 2.0**power
        values = values * sign if signed else values.abs()
        codes, scales = encoded(form, values)
        numbers = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
        scale = scales.repeat_interleave(BLOCK)[:count].double()
        wanted = torch.where(scale > 0, values.double() / scale, 0.0)
        distance = (wanted[:, None] - numbers).abs()
        nearest = distance.min(1).values
        found = distance.gather(1, codes.long()[:, None])[:, 0]
        low = ~torch.tensor(signed) & (wanted > 0) & (wanted < 0.325e-6)  # never zero
        assert bool((found <= nearest * (1 + 1e-4) + 1e-6 * wanted.abs() + low * 0.4e-6).all())
        decoded = form.decode([codes, scales])
        assert bool((decoded[values == 0] == 0).all())
        assert signed or bool((decoded[values >= 2.0**-95] > 0).all())
        assert bool(((decoded - values).abs() <= 0.0071 * scale).all())  # half of the widest bin
        again = encoded(form, decoded)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)


def test_the_largest_element_of_a_block_keeps_its_value() -> None:
    """A negative one, too: there is no code for -1."""
    for largest, other, most in ((-0.7, 0.1, 1e-6), (0.7, -0.6, 1e-6), (0.7, -0.6999, 4e-3)):
        values = torch.tensor([largest, other])
        decoded = SIGNED_8BIT.decode(encoded(SIGNED_8BIT, values))
        torch.testing.assert_close(decoded[0], values[0], rtol=most, atol=0)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_what_is_no_number_is_none_and_others_are_as_they_were(odd: float) -> None:
    values = odd_values(0, 3 * BLOCK, 3).abs()
    values[BLOCK + 7] = odd
    for form, _ in FORMS:
        decoded = form.decode(encoded(form, values))
        assert bool(decoded[BLOCK : 2 * BLOCK].isnan().all())
        assert bool(decoded[:BLOCK].isfinite().all())
        assert bool(decoded[2 * BLOCK :].isfinite().all())


@pytest.mark.parametrize("portable", [False, True])  # without instructions that this machine may have
@pytest.mark.parametrize(("form", "signed"), FORMS)
def test_native_code_has_the_same_codes(form: StoredForm, signed: bool, portable: bool) -> None:  # noqa: FBT001
    """Also of what is not finite, too small to keep, negative where that is not expected, and of a part of a block."""

    def convert(single: Tensor, kept: Tensor, numbers: Tensor) -> None:
        before = kept.clone()
        kept.copy_(single)
        single.copy_(before)

    code = f"{PRELUDE}\n{form.code}\n{write_function('update', convert, [torch.float32, form], 1)}"
    library = native_code.library_of(code.replace("__AVX2__", "ANOTHER") if portable else code).load()
    count = 40 * BLOCK + 77
    values = odd_values(1, count, 8)
    blocks = values[: 40 * BLOCK].view(40, BLOCK)
    blocks *= 10.0 ** torch.arange(-40, 40, 2)[:, None]  # subnormal, zero and infinite ones
    blocks[26, ::2] *= -0.0
    blocks[20, 3], blocks[21, 4], blocks[22] = float("nan"), float("-inf"), 0.0
    blocks[23], blocks[24] = -torch.finfo(torch.float32).max, -blocks[24].abs()
    numbers = torch.tensor(dynamic_map(signed=signed))
    blocks[25, :255] = (numbers[1:] + numbers[:-1]) / 2 * blocks[25, 255].fill_(1.0)  # ties
    old = encoded(form, odd_values(2, count, 3))
    single, mine = values.clone(), [each.clone() for each in old]
    arrays = (ctypes.c_void_p * 4)(*(each.data_ptr() for each in (single, *mine, torch.ones(1))))
    library.update(arrays, ctypes.c_int64(count), ctypes.c_int(2))
    assert torch.equal(single, form.decode(old))
    assert_same(mine, encoded(form, values))


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (Lion, {"lr": 1e-3}),
]


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_an_update_decodes_steps_and_encodes(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """The same bits as the class's own step in fp32 between our decoding and encoding, in native code."""
    rule, group = find_rule(optimizer_class, "8bit", options)
    step, _ = next_step(optimizer_class, "8bit", options)
    forms = rule.arrays(group, 1)
    count = 9 * BLOCK + 5
    parts = [torch.empty(part.count(count), dtype=part.dtype) for part in parts_of(forms.values())]
    store_values(forms, parts, {name: odd_values(3, count, 2).abs() for name in forms})
    gradient, weight = odd_values(4, count, 2), parts[0].clone()
    others = [each.clone() for each in (gradient, weight, *parts)]
    step.kernel.compiled(torch.float32, CPU)(gradient, weight, *parts, step.numbers)
    with ExactRoots(), torch.no_grad():
        step.kernel._update(*others, step.numbers)
    assert_same([weight, *parts], others[1:])
    assert not torch.equal(parts[1], torch.zeros_like(parts[1]))


def test_twenty_steps_are_those_of_a_loop_around_torch() -> None:
    """Which decodes, steps and encodes; roots of torch's are off by a bit at times, so a code may be its neighbour."""
    size = 5000
    torch.manual_seed(0)
    mine, other = (nn.Parameter(torch.linspace(-1, 1, size)) for _ in range(2))
    ours, theirs = AdamW([mine], lr=1e-3, state_dtype="8bit"), torch.optim.AdamW([other], lr=1e-3, foreach=False)
    for _ in range(20):
        mine.grad = torch.randn(size) * torch.linspace(0, 1, size) ** 4
        other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
        for name, form in (("exp_avg", SIGNED_8BIT), ("exp_avg_sq", UNSIGNED_8BIT)):
            moment = theirs.state[other][name]
            moment.copy_(form.decode(codes := encoded(form, moment)))
            away = (ours.state[mine][name].int() - codes[0].int()).abs()
            assert away.max() <= 1
            assert (away > 0).float().mean() < 0.002
    torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)


def test_training_follows_that_with_fp32_state() -> None:
    """60 steps of a small model: its matrices have state in 8 bits, its vectors in fp32."""
    curves = []
    for state_dtype in (torch.float32, "8bit"):
        model = network()
        optimizer = AdamW(model.parameters(), state_dtype=state_dtype)
        curves.append(torch.tensor(train(model, model, optimizer, range(60))))
        kinds = {p.numel() >= 4096: optimizer.state[p]["exp_avg"].dtype for p in model.parameters() if p.requires_grad}
        assert kinds == {True: torch.uint8 if state_dtype == "8bit" else torch.float32, False: torch.float32}
    exact, short = curves
    assert exact[-5:].mean() < 0.8 * exact[:5].mean()
    assert (short - exact).abs().max() < 0.02 * exact[0]
    assert not torch.equal(exact, short)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Path]:
    """Return an engine that keeps all state on disk, to be installed, and its folder."""
    monkeypatch.setattr(placement, "line_bytes", lambda _: 1 << 40)  # so there is no room for state
    engine = Engine(CPU, host_budget_bytes=3_700_000, streams=FaultyCpuStreams(delay_s=0.001, poison=True))
    engine.attach_store(Store([tmp_path], 1 << 28))
    return engine, tmp_path


@pytest.mark.parametrize("now", [False, True])
def test_state_on_disk_and_in_memory_give_the_same_bits(disk: tuple[Engine, Path], now: bool) -> None:  # noqa: FBT001
    engine, folder = disk
    how: dict[str, Any] = (
        {} if now else {"parts": 2, "clip": 1e6}
    )  # which scales nothing: norms are added up in another order here
    plain = network()
    run = compiled(plain, None)
    expected = train(plain, run, AdamW(plain.parameters(), state_dtype="8bit"), range(4), **how)
    tencache_fx.close()
    torch.compiler.reset()
    install_engine(engine)
    model = tencache_fx.offload(network())
    optimizer = AdamW(model.parameters(), state_dtype="8bit", step_in_backward=now)
    run = compiled(model, TIGHT, spill_dir=str(folder), spill_budget=1 << 28, host_budget=3_700_000)
    losses = train(model, run, optimizer, range(2), **how)
    on_disk = [p for p, held in optimizer._states.items() if held.place is Tier.NVME]
    assert any(p.numel() >= 4096 for p in on_disk)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {value.dtype for each in saved["state"].values() for value in each.values()} == {torch.float32}
    optimizer.load_state_dict(saved)
    assert losses + train(model, run, optimizer, range(2, 4), **how) == expected
    after = weights(plain)
    assert all(torch.equal(value, after[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("size", [(80, 70), (512, 300)])  # with state on the device, and in host memory
def test_a_checkpoint_goes_on_to_the_last_bit_and_is_torchs_own(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(size, generator=generator).t() for _ in range(4)]
    start = torch.randn(size, generator=generator).t()  # not in the order of its sizes
    options: dict[str, Any] = {"lr": 0.1, "state_dtype": "8bit"}

    def steps(optimizer: torch.optim.Optimizer, which: range) -> Tensor:
        (parameter,) = optimizer.param_groups[0]["params"]
        for step in which:
            parameter.grad = noise[step].clone()
            optimizer.step()
        return parameter.detach()  # type: ignore[no-any-return]

    first = AdamW([nn.Parameter(start.clone())], **options)
    middle = steps(first, range(2)).clone()
    saved, copied = copy.deepcopy(first.state_dict()), copy.deepcopy(first)
    expected = steps(first, range(2, 4))
    assert set(saved["state"][0]) == {"step", "master", "exp_avg", "exp_avg_sq"}
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    again = AdamW([nn.Parameter(middle.clone())], **options)
    again.load_state_dict(saved)
    assert torch.equal(steps(again, range(2, 4)), expected)
    assert torch.equal(steps(copied, range(2, 4)), expected)
    for other in (torch.optim.AdamW([nn.Parameter(middle.clone())], lr=0.1), AdamW([nn.Parameter(middle.clone())])):
        other.load_state_dict(copy.deepcopy(saved))
        torch.testing.assert_close(steps(other, range(2, 4)), expected, rtol=0, atol=0.05)
        again.load_state_dict(other.state_dict())
        assert again.state_dict()["state"][0]["exp_avg"].isfinite().all()


def test_pieces_that_are_streamed_through_a_device_have_their_blocks() -> None:
    step, _ = next_step(torch.optim.AdamW, "8bit", {})
    rule, group = find_rule(torch.optim.AdamW, "8bit", {})
    forms, count = rule.arrays(group, 1), 300_001
    arrays = [torch.empty(part.count(count), dtype=part.dtype) for part in parts_of(forms.values())]
    store_values(forms, arrays, {name: odd_values(5, count, 2).abs() for name in forms})
    gradient, weight = odd_values(6, count, 1), torch.zeros(count)
    others = [each.clone() for each in (gradient, weight, *arrays)]
    kernel = step.kernel.compiled(torch.float32, CPU)
    kernel(*others, step.numbers)

    def work(pieces: Any) -> None:
        change, *some, value = pieces
        kernel(change, value, *some, step.numbers)

    parts = dict(zip(arrays, parts_of(forms.values()), strict=True))
    room = Room(FaultyCpuStreams(poison=True), 3 << 20)
    room.stream(count, [gradient, *arrays], [*arrays, weight], work, (), parts).synchronize()
    assert_same([weight, *arrays], others[1:])


@pytest.mark.parametrize("compiler", ["torch's ops", "Inductor"])
def test_without_native_code_blocks_have_the_same_codes(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, with an end of a block; one that is all, and one of one element."""
    step, _ = next_step(torch.optim.AdamW, "8bit", {})
    rule, group = find_rule(torch.optim.AdamW, "8bit", {})
    forms = rule.arrays(group, 1)
    if compiler != "Inductor":
        monkeypatch.setattr(step_kernel, "compile_for_threads", lambda update, examples: update)
    monkeypatch.setattr(decoded_update, "_PIECE", 64 * BLOCK)
    with ExactRoots() if compiler != "Inductor" else contextlib.nullcontext(), torch.no_grad():
        update = step.kernel._by_inductor(torch.float32, CPU)
        for count in (200 * BLOCK + 44, 2 * BLOCK, BLOCK, 1):
            arrays = [torch.empty(part.count(count), dtype=part.dtype) for part in parts_of(forms.values())]
            store_values(forms, arrays, {name: odd_values(5, count, 2).abs() for name in forms})
            mine = [odd_values(6, count, 1), torch.zeros(count), *arrays]
            others = [each.clone() for each in mine]
            step.kernel.compiled(torch.float32, CPU)(*others, step.numbers)
            update(*mine, step.numbers)
            assert_same(mine[1:], others[1:])
            assert mine[0]._version == 0, "a gradient is its owner's"


class Turned(torch.optim.Optimizer):
    """Keeps a sum whose sign is that of its rate."""

    def __init__(self, params: Any, rate: float = 1.0) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                total = self.state[p].setdefault("total", torch.zeros_like(p))
                total.add_(p.grad * p.grad * group["rate"])
                p.sub_(total)


def test_what_cannot_be_kept_in_8_bits_is_refused() -> None:
    with pytest.raises(OptionError, match="state_dtype is '4bit'; choose torch.float32, torch.bfloat16 or '8bit'"):
        AdamW([nn.Parameter(torch.ones(4))], state_dtype="4bit")  # type: ignore[arg-type]
    parameter = nn.Parameter(torch.ones(5000))
    optimizer = OffloadedOptimizer([parameter], Turned, state_dtype="8bit")
    parameter.grad = torch.ones(5000)
    optimizer.step()
    optimizer.param_groups[0]["rate"] = -1.0
    before = parameter.detach().clone()
    with pytest.raises(OptionError, match="Turned has total at or above zero in its first steps only; use state_dtype"):
        optimizer.step()
    assert torch.equal(parameter, before)
