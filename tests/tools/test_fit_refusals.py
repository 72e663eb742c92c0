"""`tencache fit` with models, inputs and factories that cannot be fitted: one sentence says what, where and why."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tencache_fx.cli import main

PROGRAM = """
import functools
import sys
import torch
from torch import nn

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)) for _ in range(2))
    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))

class Calls(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.called, self.into = called, nn.Linear(64, 64)
    def forward(self, x):
        return self.called(self.into(x))

class OwnError(Exception):
    pass

def fails(error):
    raise error

def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))

x = torch.randn(4, 64)

def wrong_width(): return mlp(), torch.randn(4, 63)
def wrong_depth(): return Blocks(), x
def no_tensor(): return mlp(), None
def two_inputs(): return mlp(), (x, x)
def a_dict(): return mlp(), {"batch": x}
def reads_random(): return Calls(lambda y: y * torch.rand(()).item()), x
def reads_index(): return Calls(lambda y: y[: y.argmax().item()]), x
def reads_list(): return Calls(lambda y: y * y.tolist()[0][0]), x
def sizes_by_value(): return Calls(lambda y: y[y > 0]), x
def exits(): sys.exit(3)
def interrupts(): raise KeyboardInterrupt
def exits_in_silence(): sys.exit()
def raises_own(): raise OwnError("my own")
def divides(): return 1 / 0
def imports(): import nowhere
def takes(rows): return mlp(), torch.randn(rows, 64)
def loads(): open("nowhere.bin")
def shuffles(): return mlp(), torch.randperm(4).tolist()
def forward_exits(): return Calls(lambda y: sys.exit(4)), x
def forward_raises_own(): return Calls(lambda y: fails(OwnError("later"))), x
def forward_divides(): return Calls(lambda y: y * (1 / 0)), x
def is_lazy(): return nn.LazyLinear(8), x
def is_locked():
    import threading
    return Calls(threading.Lock()), x
def loss_of_two(): return mlp(), x, nn.CrossEntropyLoss()
def loss_class(): return mlp(), x, nn.CrossEntropyLoss
def loss_raises(): return mlp(), x, lambda y: fails(ValueError("no loss"))
def loss_reads(): return mlp(), x, lambda y: y.sum().item()
def offloads():
    import tencache_fx
    return tencache_fx.offload(mlp()), x

def is_compiled(): return torch.compile(mlp()), x
def prints():
    print("made")
    return mlp(), x
def partial_loss(): return mlp(), x, functools.partial(nn.functional.mse_loss, torch.zeros(4, 8))
def closed_over():
    weighted, target = nn.CrossEntropyLoss(weight=torch.ones(8)), torch.zeros(4, dtype=torch.int64)
    return mlp(), x, lambda y, *, scale=2.0: weighted(y, target) * scale

instance = mlp()
"""

VALUE = "and nothing is run here that would give it one; keep it a tensor there, or have the model take a Python number"


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "odd.py").write_text(PROGRAM)
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(5)\n")

    def run(*arguments: str) -> tuple[int, str, str]:
        torch.compiler.reset()
        code = main(["fit", *arguments, "--device", "cpu"])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def line_of(text: str) -> int:
    """Return the line of the program that begins so."""
    return next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.strip().startswith(text))


@pytest.mark.parametrize(
    ("name", "begins", "says"),
    [
        ("wrong_width", "the model's 0 (Linear) fails, RuntimeError: ", "float32 4x63: give others, or mend it there"),
        (
            "wrong_depth",
            f"the model's blocks.1.0 (Linear) fails at odd.py:{line_of('return self.blocks')}, in forward, Runtime",
            "float32 4x64: give others",
        ),
        ("no_tensor", "the model's 0 (Linear) fails, TypeError: ", "its inputs were NoneType"),
        ("two_inputs", "the model fails, TypeError: ", "its inputs were float32 4x64, float32 4x64"),
        ("a_dict", "the model fails, TypeError: ", "a dict names the model's arguments (batch)"),
        ("forward_exits", f"the model fails at odd.py:{line_of('def forward_exits')}, in <lambda>, SystemExit: 4", ""),
        ("forward_raises_own", f"the model fails at odd.py:{line_of('raise error')}, in fails, OwnError: later", ""),
        ("forward_divides", f"the model fails at odd.py:{line_of('def forward_div')}, in <lambda>, ZeroDivision", ""),
        ("is_lazy", "a parameter of the model has no size before a first call", "call the model once"),
        ("is_locked", "the model cannot be copied, TypeError: cannot pickle", "must work with copy.deepcopy"),
        ("loss_of_two", "the loss function fails, TypeError: ", "it is given the model's output and nothing else"),
        ("loss_class", "the loss function returned an object of type CrossEntropyLoss", "a tensor of one element"),
        ("loss_raises", f"the loss function fails at odd.py:{line_of('raise error')}, in fails, ValueError: no", ""),
    ],
)
def test_a_model_that_fails_is_told_with_the_module_and_the_inputs(
    command: Callable[..., tuple[int, str, str]], name: str, begins: str, says: str
) -> None:
    code, out, err = command(f"odd.py:{name}")
    line = err.strip().splitlines()[-1]  # torch may have warned
    assert (code, out) == (2, "")
    assert line.startswith(f"tencache: {begins}")
    assert says in line
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["reads_random", "reads_index", "reads_list", "loss_reads"])
def test_a_value_that_is_known_only_by_running_is_told_with_its_line(
    command: Callable[..., tuple[int, str, str]], name: str
) -> None:
    code, out, err = command(f"odd.py:{name}")
    who = "loss function" if name == "loss_reads" else "model"
    place = f"odd.py:{line_of(f'def {name}')}, in <lambda>"
    assert (code, out) == (2, "")
    assert (
        err.strip().splitlines()[-1].startswith(f"tencache: the {who} reads the value of a tensor at {place}, {VALUE}")
    )


def test_a_size_that_is_known_only_by_running_is_told_with_its_line(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, err = command("odd.py:sizes_by_value")
    said = (
        f"the model makes a tensor whose size depends on values at odd.py:{line_of('def sizes_by_value')}, in <lambda>"
    )
    assert code == 2
    assert err.strip().splitlines()[-1].startswith(f"tencache: {said} (aten.nonzero.default), and nothing is run here")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exits", "SystemExit: 3 (it ends the program); mend it there, or give it other arguments with --set"),
        ("exits_in_silence", "SystemExit (it ends the program); mend it there"),
        ("raises_own", "OwnError: my own; mend it there"),
        ("divides", "ZeroDivisionError: division by zero; mend it there"),
        ("imports", "ModuleNotFoundError: No module named 'nowhere'; mend it there"),
        ("loads", "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.bin'; mend it there"),
        ("shuffles", 'tensors have no values here: make those whose values are asked for with device="cpu"'),
    ],
)
def test_a_factory_that_fails_is_told_with_its_line(
    command: Callable[..., tuple[int, str, str]], name: str, says: str
) -> None:
    code, out, err = command(f"odd.py:{name}")
    (line,) = err.strip().splitlines()
    assert (code, out) == (2, "")
    assert line.startswith(f"tencache: odd.py:{name} fails at odd.py:{line_of(f'def {name}()')}, in {name}, ")
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ends.py:make"], "ends.py cannot be imported at ends.py:2, SystemExit: 5 (it ends the program); mend it"),
        (
            ["odd.py:takes"],
            "odd.py:takes(rows) cannot be called with no arguments, missing a required argument: 'rows'",
        ),
        (
            ["odd.py:takes", "--set", "rows=4", "row=3"],
            "odd.py:takes(rows) cannot be called with rows, row, got an unex",
        ),
        (["odd.py:wrong_width", "--input", "4x64"], "--input is for a module's class, and odd.py:wrong_width is none"),
        (["hf:LlamaConfig", "--input", "4x64"], "--input is for a module's class, and hf:LlamaConfig makes its own"),
        (["odd.py:Blocks", "--input", f"{10**20}x64"], f"--input {10**20}x64 cannot be made, TypeError: "),
        (["odd.py:Blocks.forwrd"], "odd.py has no Blocks.forwrd; did you mean forward?"),
        (["odd.py:instance"], "odd.py:instance is no function, but a Sequential; name one that returns"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(
    command: Callable[..., tuple[int, str, str]], arguments: list[str], said: str
) -> None:
    code, out, err = command(*arguments)
    (line,) = err.strip().splitlines()
    assert (code, out) == (2, "")
    assert line.startswith(f"tencache: {said}")


def test_a_factory_that_offloads_is_told_to_leave_that_out(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = command("odd.py:offloads")
    assert code == 2
    assert "return the model as it is before it is offloaded or trained: it is planned as if it were." in err


@pytest.mark.parametrize("name", ["is_compiled", "partial_loss", "closed_over", "prints"])
def test_what_only_looks_odd_is_fitted(command: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, out, err = command(f"odd.py:{name}", "--json")
    assert (code, err) == (0, "made\n" if name == "prints" else "")
    assert out.startswith("{")


def test_an_interrupt_ends_the_command_without_a_traceback(command: Callable[..., tuple[int, str, str]]) -> None:
    assert command("odd.py:interrupts") == (130, "", "tencache: interrupted.\n")
