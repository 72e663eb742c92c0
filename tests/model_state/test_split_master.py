"""Masters kept as what they have besides their bf16 weights: every bit comes back, whoever sets a weight meanwhile."""

import contextlib
import copy
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_streams import FaultyCpuStreams
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_native_kernel import ExactRoots, assert_same
from test_optimizer_classes import Lion
from tied_model import TIGHT_BF16, compiled, network, train, weights
from torch import Tensor, nn

import tencache_fx
from tencache_fx import native_code
from tencache_fx.model_state import decoded_update, optimizer_state, placement, split_master, step_kernel
from tencache_fx.model_state.cpp_prelude import PRELUDE
from tencache_fx.model_state.kernel_source import write_function
from tencache_fx.model_state.parameter_store import find_offloaded
from tencache_fx.model_state.split_master import SPLIT, decode_into, drop_changed
from tencache_fx.model_state.step_kernel import StateDtype, Step, find_rule
from tencache_fx.model_state.stored_form import BLOCK, parts_of, store_values
from tencache_fx.model_state.update import set_master
from tencache_fx.model_state.update_room import Room
from tencache_fx.optim import AdamW, OffloadedOptimizer
from tencache_fx.planning.problem import Kind, Tier
from tencache_fx.runtime.engine import Engine
from tencache_fx.runtime.engine_registry import install_engine
from tencache_fx.runtime.store import Store

CPU = torch.device("cpu")
LOWS = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 1e-2}),
    (Lion, {"lr": 1e-3}),
]


def split(master: Tensor) -> list[Tensor]:
    """Return the weight and the parts of a master."""
    parts = [torch.empty(part.count(len(master)), dtype=part.dtype) for part in SPLIT.parts]
    SPLIT.store(master, parts)
    return [master.bfloat16(), *parts]


def words(numbers: Any) -> Tensor:
    """Return fp32 values with these bits, given as numbers below 2 ** 32."""
    return (
        torch.as_tensor(numbers, dtype=torch.int64)
        .sub(1 << 31)
        .to(torch.int32)
        .bitwise_xor(-1 << 31)
        .view(torch.float32)
    )


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Compare all bits; one NaN is as good as another."""
    assert torch.equal(found.isnan(), expected.isnan())
    left = ~expected.isnan()
    assert torch.equal(found.view(torch.int32)[left], expected.view(torch.int32)[left])


@settings(max_examples=200)
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=40))
@example([0, 1 << 31, 0x00008000, 0x80008000, 0x00018000, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001])
def test_every_master_comes_back(numbers: list[int]) -> None:
    master = words(numbers)
    assert_same_bits(SPLIT.decode(split(master)), master)


@pytest.mark.parametrize("zeros", [False, True])
def test_many_are_decoded_in_pieces(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    monkeypatch.setattr(split_master, "_PIECE", 64)
    generator = torch.Generator().manual_seed(0)
    master = words(torch.randint(0, 1 << 32, (1003,), generator=generator))
    master[torch.rand(1003, generator=generator) < 0.05] = words([0x3F808000])
    weight, *parts = split(master)
    if zeros:
        weight[::5] = 0.0
    found = torch.empty(1003)
    decode_into(found, [weight, *parts])
    assert_same_bits(found, SPLIT.decode([weight, *parts]))
    assert zeros or torch.equal(found[~master.isnan()], master[~master.isnan()])


def test_all_weights_with_odd_remainders_and_some_with_all() -> None:
    """Zeros of both signs, subnormals, ties to either side, carries into the exponent and to infinity."""
    highs = torch.arange(1 << 16, dtype=torch.int64) << 16
    lows = torch.arange(1 << 16, dtype=torch.int64)
    some = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF81, 0xFF7F, 0xFF80)
    for numbers in (*(highs + low for low in LOWS), *((high << 16) + lows for high in some)):
        master = words(numbers)
        assert_same_bits(SPLIT.decode(split(master)), master)


def convert(single: Tensor, weight: Tensor, kept: Tensor, numbers: Tensor) -> None:
    """Exchange the master with `single`, and let the weight be the new one."""
    before = kept.clone()
    kept.copy_(single)
    single.copy_(before)
    weight.copy_(kept)


@pytest.mark.parametrize("count", [1, 7, BLOCK, 40 * BLOCK + 77])
def test_native_code_has_the_same_bits(count: int) -> None:
    arguments = [torch.float32, torch.bfloat16, SPLIT]
    source = f"{PRELUDE}\n{SPLIT.code}\n{write_function('update', convert, arguments, 1, other=2)}"
    library = native_code.library_of(source).load()
    generator = torch.Generator().manual_seed(count)
    old, new = (words(torch.randint(0, 1 << 32, (count,), generator=generator)) for _ in range(2))
    for values in (old, new):
        values[::3] = words((torch.randint(0, 1 << 16, (count,), generator=generator) << 16) + 0x8000)[::3]  # ties
    old_parts, single = split(old), new.clone()
    tensors = single, *old_parts, torch.ones(1)
    arrays = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
    library.update(arrays, ctypes.c_int64(count), ctypes.c_int(2))
    assert_same_bits(single, old)
    assert all(torch.equal(one, other) for one, other in zip(old_parts[1:], split(new)[1:], strict=True))
    assert torch.equal(old_parts[0].view(torch.int16)[~new.isnan()], new.bfloat16().view(torch.int16)[~new.isnan()])


def test_a_zero_that_was_set_behind_everybodys_back_is_zero() -> None:
    for zero in (0.0, -0.0):
        weight, *parts = split(torch.linspace(-1, 1, 1001))
        found = SPLIT.decode([weight.fill_(zero), *parts])
        assert found.abs().max() < 1e-40


@settings(max_examples=50)
@given(st.integers(0, 1 << 20), st.integers(1, 700))
def test_elements_that_change_lose_their_remainder_and_others_keep_it(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    master = words(torch.randint(0, 1 << 32, (count,), generator=generator)).nan_to_num(nan=1.0)
    master[::2] = words(torch.randint(0, 0x7F80, (count,), generator=generator) * 65536 + 0x8000)[::2]
    before, *parts = split(master)
    now = before.where(torch.rand(count, generator=generator) > 0.3, torch.randn(count, generator=generator).bfloat16())
    drop_changed(parts, before, now)
    changed = before.view(torch.int16) != now.view(torch.int16)
    assert_same_bits(SPLIT.decode([now, *parts]), master.where(~changed, now.float()))


def second_step(
    optimizer_class: type, options: dict[str, Any], state_dtype: StateDtype, *, is_split: bool
) -> tuple[Step, list[Any]]:
    rule, group = find_rule(optimizer_class, state_dtype, options)
    arrays = rule.arrays(group, 1, split=is_split)
    first = rule.step(group, 1, {}, frozenset(), split=is_split)
    return rule.step(group, 1, first.after, frozenset(arrays), split=is_split), list(arrays.values())


def inputs(optimizer_class: type, options: dict[str, Any], state_dtype: StateDtype, count: int) -> Any:
    """Return both forms' steps, a gradient and a weight, and the parts of both forms, of the same values."""
    generator = torch.Generator().manual_seed(count)
    gradient = (torch.randn(count, generator=generator) * 1e-2).bfloat16()
    master = torch.randn(count, generator=generator) * 0.02
    master[::5] = words(master[::5].view(torch.int32).to(torch.int64) % (1 << 32) // 65536 * 65536 + 0x8000)
    steps, states = [], []
    for is_split in (False, True):
        step, forms = second_step(optimizer_class, options, state_dtype, is_split=is_split)
        parts = [torch.empty(part.count(count), dtype=part.dtype) for part in parts_of(forms)]
        values = torch.rand(count, generator=torch.Generator().manual_seed(1)) * 1e-4
        store_values({str(k): form for k, form in enumerate(forms)}, parts, {str(k): values for k in range(len(forms))})
        forms[0].store(master, parts[: len(forms[0].parts)])
        steps.append(step)
        states.append(parts)
    return steps, gradient, master.bfloat16(), states


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"])
@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_an_update_has_the_bits_of_a_whole_masters(
    optimizer_class: type, options: dict[str, Any], state_dtype: StateDtype
) -> None:
    (whole, ours), gradient, weight, (whole_parts, parts) = inputs(optimizer_class, options, state_dtype, 9 * BLOCK + 5)
    others = weight.clone()
    assert ours.kernel._find_native(torch.bfloat16) is not None
    for _ in range(3):
        before = weight.clone()
        whole.kernel.compiled(torch.bfloat16, CPU)(gradient, others, *whole_parts, whole.numbers)
        ours.kernel.compiled(torch.bfloat16, CPU)(gradient, weight, *parts, ours.numbers)
        assert not torch.equal(before, weight)
        assert torch.equal(weight, others)
        assert_same_bits(SPLIT.decode([weight, *parts[:2]]), whole_parts[0])
        assert all(torch.equal(one, other) for one, other in zip(parts[2:], whole_parts[1:], strict=True))


@pytest.mark.parametrize("compiler", ["torch's ops", "Inductor"])
def test_without_native_code_masters_have_the_same_bits(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler != "Inductor":
        monkeypatch.setattr(step_kernel, "compile_for_threads", lambda update, examples: update)
    monkeypatch.setattr(decoded_update, "_PIECE", 64 * BLOCK)
    with ExactRoots() if compiler != "Inductor" else contextlib.nullcontext(), torch.no_grad():
        update = None
        for count in (200 * BLOCK + 44, 2 * BLOCK, BLOCK, 1):
            (_, step), gradient, weight, (_, parts) = inputs(torch.optim.AdamW, {"lr": 1e-2}, torch.float32, count)
            update = update or step.kernel._by_inductor(torch.bfloat16, CPU)
            others = [weight.clone(), *(each.clone() for each in parts)]
            step.kernel.compiled(torch.bfloat16, CPU)(gradient, *others, step.numbers)
            update(gradient, weight, *parts, step.numbers)
            found, expected = SPLIT.decode([weight, *parts[:2]]), SPLIT.decode(others[:3])
            assert_same([weight, found, *parts[2:]], [others[0], expected, *others[3:]])


def test_pieces_that_are_streamed_through_a_device_have_their_ties() -> None:
    count = 300_001
    (_, step), gradient, weight, (_, arrays) = inputs(torch.optim.AdamW, {}, torch.float32, count)
    others = [each.clone() for each in (weight, *arrays)]
    kernel = step.kernel.compiled(torch.bfloat16, CPU)
    kernel(gradient, *others, step.numbers)

    def work(pieces: Any) -> None:
        change, *some, value = pieces
        kernel(change, value, *some, step.numbers)

    parts = dict(
        zip(arrays, parts_of(second_step(torch.optim.AdamW, {}, torch.float32, is_split=True)[1]), strict=True)
    )
    room = Room(FaultyCpuStreams(poison=True), 3 << 20)
    room.stream(count, [gradient, *arrays, weight], [*arrays, weight], work, (), parts).synchronize()
    assert all(torch.equal(one, other) for one, other in zip([weight, *arrays], others, strict=True))


Edit = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change nothing."""


def prune(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set some elements of weights, in each third step, and all of them in step 7."""
    if step % 3 == 1:
        generator = torch.Generator().manual_seed(step)
        with tencache_fx.summon(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_((torch.rand(parameter.shape, generator=generator) > 0.1).to(parameter.dtype))
    if step == 7:
        model.load_state_dict({name: 1.25 * value for name, value in weights(model).items()})


class GoBack:
    """Loads a checkpoint of step 4 in step 8, the optimizer or the model first; and in step 11 the state alone."""

    def __init__(self, order: tuple[int, int]) -> None:
        self._order = order
        self._saved: Any = None

    def __call__(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 4:
            self._saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 8:
            for index in self._order:
                (model, optimizer)[index].load_state_dict(self._saved[index])
        if step == 11:  # whose masters are those of other weights
            optimizer.load_state_dict(self._saved[1])


@contextlib.contextmanager
def whole_masters(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as inner:
        inner.setattr(optimizer_state, "is_split", lambda *_: False)
        inner.setattr(optimizer_state, "will_be_split", lambda *_: False)
        yield


Result = tuple[list[float], dict[str, Tensor], dict[int, dict[str, Tensor]]]


def trained(
    steps: int, make: Callable[[Any], torch.optim.Optimizer], edit: Edit, *, is_split: bool, scaled: bool, **how: Any
) -> Result:
    model = tencache_fx.offload(network(torch.bfloat16))
    optimizer, run = make(model.parameters()), compiled(model, how.pop("budget", TIGHT_BF16))
    losses: list[float] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
    for step in range(steps):
        losses += train(
            model, run, Scaled(optimizer, scaler, step) if scaled else optimizer, range(step, step + 1), **how
        )
        edit(step, model, optimizer)
    forms = {next(iter(held.forms.values())) for held in optimizer._states.values() if held.place is Tier.HOST}  # type: ignore[attr-defined]
    assert forms == ({SPLIT} if is_split else {step_kernel.FP32})
    found = losses, weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    torch.compiler.reset()
    tencache_fx.close()
    return found


class Scaled:
    """An optimizer whose step is one of a scaler, that skips each fifth one for an infinite gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
        self.param_groups = optimizer.param_groups
        self._optimizer, self._scaler, self._step = optimizer, scaler, step

    def step(self) -> None:
        self._scaler.scale(torch.ones(()))
        if self._step % 5 == 4:
            next(p for group in self.param_groups for p in group["params"] if p.grad is not None).grad.mul_(
                float("inf")
            )
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()


def momentum(params: Any) -> torch.optim.Optimizer:
    return OffloadedOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9, state_dtype="8bit")


@pytest.mark.parametrize(
    ("steps", "make", "edit", "how"),
    [
        (50, lambda p: AdamW(p, weight_decay=0.1), nothing, {}),
        (12, AdamW, nothing, {"clip": 0.5, "parts": 2}),
        (12, AdamW, nothing, {"scaled": True}),
        (12, lambda p: AdamW(p, step_in_backward=True), nothing, {}),
        (12, lambda p: AdamW(p, amsgrad=True, state_dtype=torch.bfloat16), nothing, {}),
        (12, momentum, nothing, {}),
        (15, AdamW, prune, {}),
        (15, AdamW, GoBack((0, 1)), {}),
        (15, AdamW, GoBack((1, 0)), {}),
    ],
    ids=["50 steps", "clip", "scaler", "in backward", "amsgrad", "8bit", "prune", "model first", "optimizer first"],
)
def test_training_has_the_bits_of_whole_masters(
    steps: int,
    make: Callable[[Any], torch.optim.Optimizer],
    edit: Edit,
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = {"scaled": False, **how}
    ours = trained(steps, make, edit, is_split=True, **how)
    with whole_masters(monkeypatch):
        expected = trained(steps, make, edit, is_split=False, **how)
    assert_same_results(ours, expected)


def assert_same_results(ours: Result, expected: Result) -> None:
    assert ours[0] == expected[0]
    assert all(torch.equal(value, ours[1][name]) for name, value in expected[1].items())
    assert ours[2].keys() == expected[2].keys()
    for index, state in expected[2].items():
        assert ours[2][index].keys() == state.keys()
        assert all(torch.equal(value, ours[2][index][name]) for name, value in state.items())


def on_disk(folder: Path, make: Callable[[Any], torch.optim.Optimizer], edit: Edit) -> tuple[Result, int]:
    engine = Engine(CPU, host_budget_bytes=2_400_000, streams=FaultyCpuStreams(delay_s=0.001, poison=True))
    engine.attach_store(Store([folder], 1 << 28))
    install_engine(engine)
    model = tencache_fx.offload(network(torch.bfloat16))
    optimizer = make(model.parameters())
    run = compiled(model, TIGHT_BF16, spill_dir=str(folder), spill_budget=1 << 28, host_budget=2_400_000)
    losses: list[float] = []
    for step in range(9):
        losses += train(model, run, optimizer, range(step, step + 1))
        edit(step, model, optimizer)
    held = [each for each in optimizer._states.values() if each.place is Tier.NVME]  # type: ignore[attr-defined]
    assert held
    found = losses, weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    nbytes = sum(each.nbytes for each in held)
    torch.compiler.reset()
    tencache_fx.close()
    return found, nbytes


@pytest.mark.parametrize("edit", [nothing, prune, GoBack((0, 1)), GoBack((1, 0))])
def test_state_on_disk_has_the_bits_of_whole_masters(
    edit: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "line_bytes", lambda _: 1 << 40)  # so there is no room for state
    ours, nbytes = on_disk(tmp_path, AdamW, edit)
    with whole_masters(monkeypatch):
        expected, whole_bytes = on_disk(tmp_path, AdamW, edit)
    assert_same_results(ours, expected)
    assert nbytes / whole_bytes == pytest.approx(10.125 / 12, rel=1e-3)


def pair(size: int = 1 << 16, *, offloaded: bool = True) -> tuple[nn.Module, nn.Parameter]:
    model = nn.Linear(256, size // 256, bias=False).bfloat16()
    if offloaded:
        tencache_fx.offload(model, "cpu")
    return model, model.weight


def give(parameter: nn.Parameter, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_parameter_and_its_state_take_twelve_bytes_and_an_eighth(offloaded: bool) -> None:  # noqa: FBT001
    model, weight = pair(1 << 20, offloaded=offloaded)
    optimizer = AdamW(model.parameters())
    give(weight, 0)
    optimizer.step()
    held = optimizer._states[weight]
    assert held.nbytes == (10 << 20) + (1 << 17)
    assert {name: value.dtype for name, value in optimizer.state[weight].items() if name != "step"} == {
        "master_rest": torch.int16,
        "master_ties": torch.uint8,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    saved = optimizer.state_dict()["state"][0]
    assert saved["master"].dtype == torch.float32
    assert saved["master"].shape == weight.shape
    if offloaded:
        assert tencache_fx.stats()["host_pool_bytes"] <= 1 << 20 << 4  # with its gradient
        found = find_offloaded(weight)
        assert found is not None
        assert (found.host_state_bytes, found.state_bytes) == (held.nbytes, 12 << 20)


def test_plans_count_state_as_it_is_in_host_memory_and_on_the_device() -> None:
    model = tencache_fx.offload(network(torch.bfloat16))
    optimizer = AdamW(model.parameters())
    train(model, compiled(model, TIGHT_BF16), optimizer, range(1))
    stored = [s for s in tencache_fx.regions()[-1].captured.storages if s.kind is Kind.STORED]
    held = {}
    for parameter, each in optimizer._states.items():
        if (found := find_offloaded(parameter)) is not None:
            held[found.name] = each.nbytes, parameter.numel()
    assert stored
    for storage in stored:
        nbytes, count = held[storage.parameter]
        assert storage.state_bytes == 12 * count
        assert storage.host_state_bytes == 10 * count + -(-count // 8)
        assert 0 <= nbytes - storage.host_state_bytes < 4 * 64  # each part begins at a cache line


def test_a_parameter_says_what_its_state_takes_in_host_memory_while_that_is_on_the_device() -> None:
    """A plan by which it leaves the device counts that."""
    _, weight = pair(1 << 20)
    optimizer, found = AdamW([weight]), find_offloaded(weight)
    assert found is not None
    expected = found.host_state_bytes, found.state_bytes
    found.stay(updated_here=True)
    give(weight, 0)
    optimizer.step()
    assert optimizer._states[weight].place is Tier.DEVICE
    assert (found.host_state_bytes, found.state_bytes) == expected == ((10 << 20) + (1 << 17), 12 << 20)


@pytest.mark.parametrize("offloaded", [True, False])
def test_masters_are_those_of_torch_on_fp32(offloaded: bool) -> None:  # noqa: FBT001
    torch.manual_seed(0)
    model, weight = pair(offloaded=offloaded)
    value = model.state_dict()["weight"].clone()
    master = value.float()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    other = nn.Parameter(master.clone())
    theirs = torch.optim.AdamW([other], lr=1e-3, weight_decay=0.1)
    for step in range(20):
        give(weight, step)
        assert weight.grad is not None
        other.grad = weight.grad.float()
        optimizer.step()
        theirs.step()
    found = optimizer.state_dict()["state"][0]
    torch.testing.assert_close(found["master"], other.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(model.state_dict()["weight"], found["master"].bfloat16())
    again = torch.optim.AdamW([nn.Parameter(other.detach().clone())])
    again.load_state_dict(optimizer.state_dict())
    old = AdamW([nn.Parameter(other.detach().bfloat16())])
    old.load_state_dict(theirs.state_dict())  # of fp32 weights, without masters


def test_two_optimizers_of_one_weight_each_go_on_from_what_the_other_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model, weight = pair()
        both = AdamW([weight], lr=1e-3), AdamW([weight], lr=1e-2)
        for step in range(9):
            give(weight, step)
            both[step % 3 == 2].step()
        found = [model.state_dict()["weight"].clone()]
        found += [each.state_dict()["state"][0]["master"].clone() for each in both]
        tencache_fx.close()
        return found

    ours = run()
    with whole_masters(monkeypatch):
        assert all(map(torch.equal, ours, run()))


def after_three_steps() -> tuple[nn.Module, nn.Parameter, AdamW, Tensor]:
    """Return a model, its weight, the optimizer that has trained it, and the master that it has then."""
    torch.manual_seed(0)
    model, weight = pair()
    optimizer = AdamW([weight], lr=1e-3)
    for step in range(3):
        give(weight, step)
        optimizer.step()
    return model, weight, optimizer, optimizer.state_dict()["state"][0]["master"].clone()


def test_masters_are_there_once_the_model_is_ordinary_again() -> None:
    _model, weight, optimizer, before = after_three_steps()
    tencache_fx.close()
    with torch.no_grad():
        weight[0] = 9.0
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], before)
    optimizer.param_groups[0]["lr"] = 0.0
    give(weight, 3)
    optimizer.step()
    after = optimizer.state_dict()["state"][0]["master"]
    assert after[0].tolist() == [9.0] * 256
    assert torch.equal(after[1:], before[1:])


def test_a_master_that_is_replaced_in_the_state_is_taken_over() -> None:
    model, weight = pair()
    optimizer = AdamW([weight], lr=0.0)
    give(weight, 0)
    optimizer.step()
    master = model.state_dict()["weight"].float() * (1 + 2.0**-12)
    optimizer.state[weight]["master"] = master.clone()
    give(weight, 1)
    optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], master)
    assert "master" not in optimizer.state[weight]


def test_what_is_written_to_a_state_dicts_tensor_is_the_weight_to_its_last_digit() -> None:
    """Elements that were not written to keep their digits; nobody knows which of them were."""
    model, weight, optimizer, before = after_three_steps()
    optimizer.param_groups[0]["lr"] = 0.0
    kept = model.state_dict()["weight"]
    kept[0], kept[1] = 3.0, 0.0
    give(weight, 3)
    optimizer.step()
    after, value = optimizer.state_dict()["state"][0]["master"], model.state_dict()["weight"]
    assert torch.equal(after[2:], before[2:])
    assert torch.equal(value, after.bfloat16())
    torch.testing.assert_close(after[0], torch.full((256,), 3.0), rtol=2.0**-7, atol=0)
    assert after[1].abs().max() < 1e-40


def test_a_whole_master_of_other_weights_is_taken_where_it_is_of_these() -> None:
    """As `set_master` does for whole ones."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(256, 256, generator=generator)
    model, weight = pair()
    value = master.bfloat16()
    value[:7] = torch.randn(7, 256, generator=generator).bfloat16()
    optimizer = AdamW([weight], lr=0.0)
    state = {"step": torch.tensor(1.0), "master": master, "exp_avg": 0 * master, "exp_avg_sq": 0 * master}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    model.load_state_dict({"weight": value})
    give(weight, 0)
    optimizer.step()
    expected = master.clone()
    set_master(expected.flatten(), value.flatten())
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], expected)
