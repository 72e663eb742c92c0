"""The CPU's kernels as native code: the bits of the same ops one by one, and of Inductor's kernel; their builds."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizer_classes import CLASSES, Lion
from torch import Tensor, nn
from torch._inductor import cpp_builder
from torch.utils._python_dispatch import TorchDispatchMode

import tencache_fx
from tencache_fx import native_code
from tencache_fx.model_state.cpp_prelude import PRELUDE
from tencache_fx.model_state.kernel_source import UncoveredError, write_function
from tencache_fx.model_state.step_kernel import Kernel, Step, find_rule, rule_of
from tencache_fx.model_state.stored_form import parts_of
from tencache_fx.optim import AdamW
from tencache_fx.thread_safe import compile_for_threads

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 6e-8, 3e-8, 65519.0, 65520.0, 3.39e38, 1.0)


class ExactRoots(TorchDispatchMode):
    """Rounds a root to the nearest number, as C++ does: the library that eager mode has it from is off at times."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sqrt.default:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


def next_step(
    optimizer_class: type, state_dtype: torch.dtype, options: dict[str, Any]
) -> tuple[Step, list[torch.dtype]]:
    """Return what is the second step of such an optimizer, and the dtypes of its arrays."""
    rule, group = find_rule(optimizer_class, state_dtype, options)
    arrays = rule.arrays(group, 1)
    first = rule.step(group, 1, {}, frozenset())
    return rule.step(group, 1, first.after, frozenset(arrays)), [part.dtype for part in parts_of(arrays.values())]


def values(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random values that a dtype has, odd ones at the end."""
    found = torch.randn(count, generator=generator).abs()
    found[-len(ODD) :] = torch.tensor(ODD)
    return found.to(dtype)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare bit for bit; one NaN is as good as another."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(nan=1.0), other.nan_to_num(nan=1.0))
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("optimizer_class", "options"), [*CLASSES, (Lion, {})])
def test_a_native_kernel_has_the_bits_of_its_ops_one_by_one(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], state_dtype: torch.dtype
) -> None:
    step, arrays = next_step(optimizer_class, state_dtype, options)
    native, generator = step.kernel, torch.Generator().manual_seed(0)
    for dtype in DTYPES if optimizer_class is torch.optim.AdamW else (state_dtype,):
        assert native._find_native(dtype) is not None
        for function, expected, given in (
            (native.compiled(dtype, CPU), native._update, (dtype, dtype, *arrays)),
            (native.staged(dtype), native._staged, (dtype, dtype, dtype, *arrays)),
        ):
            mine = [values(1003, each, generator) for each in given]
            if len(given) > len(arrays) + 2:
                mine[2][::2] = mine[1][::2]  # as it was written last
            others, before = [each.clone() for each in mine], mine[1].clone()
            function(*mine, step.numbers)
            with ExactRoots(), torch.no_grad():
                expected(*others, step.numbers)
            assert_same(mine, others)
            assert function is native.staged(dtype) or not torch.equal(mine[1], before)


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_native_kernel_has_the_bits_of_inductors(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    step, arrays = next_step(torch.optim.AdamW, state_dtype, {})
    generator = torch.Generator().manual_seed(0)
    mine = [torch.rand(100_003, generator=generator).to(each) for each in (dtype, dtype, *arrays)]
    others = [each.clone() for each in mine]
    step.kernel.compiled(dtype, CPU)(*mine, step.numbers)
    by_inductor = compile_for_threads(step.kernel._update, [*(each.clone() for each in others), step.numbers])
    by_inductor(*others, step.numbers)
    assert_same(mine, others)


def test_all_halves_are_converted_as_torch_does() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    halves = [every.to(torch.int16).view(dtype) for dtype in (torch.bfloat16, torch.float16)]
    singles = every * 65537  # all exponents, each with other digits
    some = [singles.view(torch.float32), *((each.float() * (1 + 2.0**-12)) for each in halves)]

    def convert(half: Tensor, single: Tensor, wide: Tensor, narrow: Tensor, numbers: Tensor) -> None:
        wide.copy_(half.float())
        narrow.copy_(single)

    for half in halves:
        source = PRELUDE + write_function("update", convert, [half.dtype, torch.float32, torch.float32, half.dtype], 1)
        library = native_code.library_of(source).load()
        for single in some:
            wide, narrow = torch.empty(1 << 16), torch.empty_like(half)
            call(library, half, single, wide, narrow, torch.ones(1))
            assert_same([wide, narrow], [half.float(), single.to(half.dtype)])


def call(library: Any, *tensors: Tensor) -> None:
    import ctypes

    arrays = (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors))
    library.update(arrays, ctypes.c_int64(len(tensors[0])), ctypes.c_int(2))


def exponentiates(one: Tensor, numbers: Tensor) -> None:
    one.copy_(one.exp())


def adds_up(one: Tensor, numbers: Tensor) -> None:
    one.copy_(one.cumsum(0))


def takes_another(one: Tensor, numbers: Tensor) -> None:
    one.copy_(one + SOMETHING)


def calculates_in_halves(one: Tensor, numbers: Tensor) -> None:
    one.copy_(one.bfloat16() * 2)


def scales(one: Tensor, numbers: Tensor) -> None:
    one.copy_(torch.add(one, numbers[0], alpha=2))


def changes_bits(one: Tensor, numbers: Tensor) -> None:
    one.view(torch.int32).copy_(one)


def turns_around(one: Tensor, numbers: Tensor) -> None:
    one.copy_(one.flip(0))


def takes_one_element(one: Tensor, numbers: Tensor) -> None:
    one.copy_(one * one[1])


def changes_its_numbers(one: Tensor, numbers: Tensor) -> None:
    numbers.mul_(2)


def copies_into_its_numbers(one: Tensor, numbers: Tensor) -> None:
    numbers.copy_(one)


def changes_in_place(one: Tensor, numbers: Tensor) -> None:
    one.mul_(2)


def changes_a_part(one: Tensor, numbers: Tensor) -> None:
    one[:2].copy_(one[1:])


SOMETHING = torch.ones(3)


@pytest.mark.parametrize(
    "function",
    [
        exponentiates,
        adds_up,
        takes_another,
        calculates_in_halves,
        scales,
        changes_bits,
        turns_around,
        takes_one_element,
        changes_its_numbers,
        copies_into_its_numbers,
        changes_in_place,
        changes_a_part,
    ],
)
def test_what_cannot_be_written_exactly_is_refused(function: Callable[..., None]) -> None:
    with pytest.raises(UncoveredError, match="not written"):
        write_function("update", function, [torch.float32], 3)


def test_float64_is_refused() -> None:
    with pytest.raises(UncoveredError, match="torch.float64 is not written"):
        write_function("update", lambda one, numbers: None, [torch.float64], 1)


class Softened(torch.optim.Optimizer):
    """Does what no native kernel does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad.tanh(), alpha=self.param_groups[0]["lr"])


def test_inductor_compiles_what_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """In both kernels: that of parameters that are offloaded, and that of those which are not."""
    step, _ = next_step(Softened, torch.float32, {})
    with caplog.at_level(logging.INFO, "tencache_fx"):
        kernel, staged = step.kernel.compiled(torch.float32, CPU), step.kernel.staged(torch.float32)
    assert [each.message for each in caplog.records if each.name == "tencache_fx"] == [
        "an optimizer's kernel for the CPU is compiled by Inductor, which takes longer: aten.tanh.default of "
        "torch.float32 is not written"
    ]
    change = torch.randn(100, generator=torch.Generator().manual_seed(0))
    weight, master = torch.ones(100), torch.ones(100)
    kernel(change, weight, master, step.numbers)
    expected = 1 - 0.1 * change.tanh()
    torch.testing.assert_close(weight, expected)
    change, written = change.clone(), torch.ones(100)
    staged(change, torch.ones(100), written, torch.ones(100), step.numbers)
    torch.testing.assert_close(change, expected)


def no_compiler() -> str:
    raise RuntimeError("No working C++ compiler found")


@pytest.fixture
def new_rules() -> Iterator[None]:
    """Let no other test have this one's kernels."""
    rule_of.cache_clear()
    yield
    rule_of.cache_clear()


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("why", ["none", "fails", "gone", "homeless"])
def test_without_a_compiler_inductor_is_asked(
    why: str, new_rules: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As before there were native kernels; what it says of a machine that has none is for the user."""
    fails = tmp_path / "cxx"
    fails.write_text("#!/bin/sh\necho this is no compiler >&2\nexit 3\n")
    fails.chmod(0o755)
    compiler = {"none": no_compiler, "fails": lambda: str(fails), "gone": lambda: str(tmp_path / "gone")}
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", compiler.get(why, cpp_builder.get_cpp_compiler))
    if why == "homeless":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(native_code, "_LIBRARIES", native_code._Libraries())
    kernel, asked = next_step(torch.optim.AdamW, torch.float32, {})[0].kernel, []
    monkeypatch.setattr(Kernel, "_by_inductor", lambda *given: asked.append(given) or (lambda *tensors: None))
    with caplog.at_level(logging.INFO, "tencache_fx"):
        kernel.begin(torch.float32)
        kernel.compiled(torch.float32, CPU)
    assert len(asked) == 1
    said = {
        "none": "there is no C++ compiler",
        "fails": "failed (this is no compiler)",
        "gone": "cannot be asked",
        "homeless": "no cache folder",
    }
    assert said[why] in caplog.text


def source(value: int) -> str:
    return f'extern "C" int answer() {{ return {value}; }}\n'


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the builds of a test, which has no library yet."""
    monkeypatch.setattr(native_code, "_LIBRARIES", native_code._Libraries())
    begun: list[object] = []
    begin = native_code._Build.__init__

    def noted(self: native_code._Build, source: str) -> None:
        begun.append(self)
        begin(self, source)

    monkeypatch.setattr(native_code._Build, "__init__", noted)
    return begun


def keep(*numbers: int) -> None:
    """Keep libraries on disk, without loading them: one of the same path would not be loaded again."""
    for number in numbers:
        build = native_code._Build(source(number))
        native_code._keep(build.wait(), native_code._kept(source(number)))
        build.stop()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no library, as a new process."""
    monkeypatch.setattr(native_code, "_LIBRARIES", native_code._Libraries())


def test_a_library_is_built_once_and_kept(
    builds: list[object], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native_code.library_of(source(1))
    assert native_code.library_of(source(1)) is library
    library.start()
    library.start()
    assert library.load().answer() == library.load().answer() == 1
    assert len(builds) == 1
    assert len(list(cache_folder.glob("native-*"))) == len(list(cache_folder.iterdir())) == 1
    forget(monkeypatch)
    again = native_code.library_of(source(1))
    again.start()
    assert again.load().answer() == 1
    assert len(builds) == 1
    monkeypatch.setattr(native_code, "_cpu", lambda: "another one")
    forget(monkeypatch)
    assert native_code.library_of(source(1)).load().answer() == 1
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "another", "folder"])
def test_a_damaged_file_is_never_loaded(
    damage: str, builds: list[object], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(2, 3)
    files = {path.name: path.read_bytes() for path in cache_folder.iterdir()}
    for path, (content, another) in zip(files, [list(files.values())[::step] for step in (1, -1)], strict=True):
        (cache_folder / path).unlink()
        middle = len(content) // 2
        if damage == "folder":
            (cache_folder / path).mkdir()
        else:
            changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            wrong = {"cut": content[:middle], "changed": changed, "empty": b"", "another": another}[damage]
            (cache_folder / path).write_bytes(wrong)
    assert [native_code.library_of(source(k)).load().answer() for k in (2, 3)] == [2, 3]
    assert len(builds) == 4
    if damage != "folder":
        assert {path.name for path in cache_folder.iterdir()} == files.keys()
        forget(monkeypatch)
        assert [native_code.library_of(source(k)).load().answer() for k in (2, 3)] == [2, 3]
        assert len(builds) == 4


def test_what_is_intact_and_cannot_be_loaded_is_built_again(builds: list[object], cache_folder: Path) -> None:
    """It was built where other libraries are, say."""
    keep(4)
    (path,) = cache_folder.iterdir()
    path.unlink()
    path.write_bytes(b"no library" + native_code._digest(path.name, b"no library"))
    library = native_code.library_of(source(4))
    library.start()
    assert len(builds) == 1
    assert library.load().answer() == 4
    assert len(builds) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(builds: list[object], cache_folder: Path) -> None:
    cache_folder.parent.joinpath("tencache_fx").write_text("a file in the folder's place")
    assert native_code.library_of(source(5)).load().answer() == 5


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a file that has the id of the compiler that runs: it takes a minute."""
    script = tmp_path / "cxx"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\necho $$ > {tmp_path}/pid\nexec sleep 60\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: str(script))
    return tmp_path / "pid"


def test_close_ends_builds_that_nobody_waited_for(
    builds: list[Any], slow_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native_code.library_of(source(6))
    library.start()
    (build,) = builds
    folder = build._folder
    assert folder.exists()
    assert build._process.poll() is None
    tencache_fx.close()
    assert build._process.poll() is not None
    assert not folder.exists()
    monkeypatch.undo()
    assert library.load().answer() == 6


def test_a_compiler_that_does_not_end_is_given_up(
    builds: list[Any], slow_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_code, "_MOST_S", 0.2)
    monkeypatch.setattr(native_code, "_version", lambda compiler: "slow")
    with pytest.raises(native_code.BuildError, match="not done after 0.2 s"):
        native_code.library_of(source(7)).load()
    assert builds[0]._process.poll() is not None
    assert not builds[0]._folder.exists()


def test_an_optimizer_begins_its_kernels_when_it_is_made(
    builds: list[Any], new_rules: None, cache_folder: Path
) -> None:
    """One for each dtype that it updates, and those of another group when that is added."""
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    frozen = nn.Parameter(torch.ones(4).half(), requires_grad=False)
    optimizer = AdamW([*parameters, frozen])
    assert len(builds) == 2
    more = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [more], "amsgrad": True})
    assert len(builds) == 3
    assert not list(cache_folder.glob("native-*"))  # nobody has waited
    for _ in range(3):
        for parameter in (*parameters, more):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert len(builds) == 3
    assert len(list(cache_folder.glob("native-*"))) == 3


def test_an_optimizer_that_never_steps_leaves_no_compiler(
    builds: list[Any], new_rules: None, slow_compiler: Path
) -> None:
    """It does not wait for one either."""
    AdamW([nn.Parameter(torch.ones(4))])
    (build,) = builds
    assert build._process.poll() is None
    tencache_fx.close()
    assert build._process.poll() is not None
    assert not build._folder.exists()


def test_a_step_after_close_builds_anew(builds: list[Any], new_rules: None, cache_folder: Path) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=0.1)
    tencache_fx.close()
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert len(builds) == 2
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 0.899))


@pytest.mark.slow
def test_builds_end_with_the_process(tmp_path: Path) -> None:
    """Also where nothing was closed."""
    code = f"from tencache_fx import native_code\nnative_code.library_of({source(8)!r}).start()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.glob("tencache_fx-*"))


def test_a_step_of_an_optimizer_compiles_nothing_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "_by_inductor", None)
    monkeypatch.setattr(Kernel, "_staged_by_inductor", None)
    for device_state in (True, False):
        size = 4 if device_state else 1 << 17
        parameter, other = nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(size))
        mine, theirs = AdamW([parameter], lr=0.1), torch.optim.AdamW([other], lr=0.1)
        for each, optimizer in ((parameter, mine), (other, theirs)):
            each.grad = torch.full((size,), 0.5)
            optimizer.step()
        torch.testing.assert_close(parameter, other)
