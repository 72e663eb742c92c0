"""`tencache_fx.fit`: the same figures as a real run, by hand where they can be, and no memory for any of it."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Block
from torch import Tensor, nn

import tencache_fx
from tencache_fx.cli import main
from tencache_fx.errors import OptionError, UsageError
from tencache_fx.hardware.device_memory import allocate_workspaces
from tencache_fx.hardware.profiles import find_profile, workspace_bytes, write_profile
from tencache_fx.planning.problem import STATE_BYTES
from tencache_fx.reporting.dump import read_regions
from tencache_fx.reporting.fit_report import Fit
from tencache_fx.reporting.fit_text import show_fit
from tencache_fx.units import format_ns

WIDTH, ROWS, LAYERS = 256, 128, 6
GIVEN = {"compiler": "eager", "calibrate": False, "recompute": "none", "host_budget": "64MiB"}
ROOT = Path(__file__).resolve().parents[2]


def mlp(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())))


def fitted(model: nn.Module | None = None, *inputs: Any, **options: object) -> Fit:
    return tencache_fx.fit(model or mlp(), *(inputs or (torch.randn(ROWS, WIDTH),)), device="cpu", **(GIVEN | options))


def planned(model: nn.Module, options: dict[str, object], *inputs: Tensor) -> list[Any]:
    """Return the plans of a real run of one step, oldest first."""
    before = {record.region for record in tencache_fx.regions()}
    run = torch.compile(tencache_fx.offload(model), backend="tencache", options=GIVEN | options)
    run(*inputs).square().mean().backward()
    return [record for record in tencache_fx.regions() if record.region not in before]


# By Inductor, the run finds out what its code holds besides, and the next compilation, or fit, knows it.
@pytest.mark.parametrize(
    ("budget", "more"),
    [
        ("1200kB", {}),
        ("3MB", {"recompute": "auto"}),
        (None, {}),
        pytest.param("3MB", {"compiler": "inductor"}, marks=pytest.mark.slow),
    ],
)
def test_figures_are_those_of_a_real_run(budget: str | None, more: dict[str, object]) -> None:
    (record,) = planned(mlp(), {"device_budget": budget, **more}, torch.randn(ROWS, WIDTH))
    found = fitted(device_budget=budget, **more)
    (region,) = found.regions
    forecast = record.plan.forecast
    assert found.fits
    assert region.peak_bytes == forecast.peak_bytes
    assert (region.step_ns, region.ideal_ns) == (forecast.makespan_ns, forecast.ideal_ns)
    assert (region.out_bytes, region.in_bytes) == (forecast.d2h_bytes, forecast.h2d_bytes)
    assert (region.buffer_bytes, region.steps) == (forecast.host_bytes, len(record.problem.ops))
    large = WIDTH * WIDTH * 4
    small_bytes = LAYERS * 3 * WIDTH * 4
    assert found.device_parameter_bytes == small_bytes + large * len(record.plan.resident)


@pytest.mark.parametrize(("budget", "here"), [(None, False), ("20MB", True)])
def test_bytes_are_those_counted_by_hand(budget: str | None, here: bool) -> None:  # noqa: FBT001
    """With a budget that has room for all of it, gradients and state of offloaded parameters are on the device."""
    model = mlp(512, 3).bfloat16()
    model[3].requires_grad_(requires_grad=False)  # the second matrix and its bias are frozen
    found = fitted(model, torch.randn(ROWS, 512, dtype=torch.bfloat16), device_budget=budget)
    matrix, vectors = 512 * 512, 9 * 512
    assert found.parameters == 3 * matrix + vectors
    assert found.parameter_bytes == 2 * found.parameters
    assert found.offloaded_bytes == 3 * matrix * 2
    assert found.gradient_bytes == (0 if here else 2 * matrix * 2)
    of_vectors = 12 * 8 * 512  # small ones are updated where they are
    assert found.device_state_bytes == of_vectors + (12 * 2 * matrix if here else 0)
    assert found.state_bytes == (0 if here else 10 * 2 * matrix + 2 * matrix // 8)  # masters without their weights
    assert found.host_bytes == found.offloaded_bytes + found.gradient_bytes + found.state_bytes  # no buffers


def test_no_step_on_a_gpu_is_shorter_than_its_thread_works(tmp_path: Path) -> None:
    known = find_profile("h200")
    slow, file = replace(known.host, transfer_op_ns=10**9), tmp_path / "slow.json"
    write_profile(file, replace(known, name="slow", host=slow))
    given = {**GIVEN, "device_budget": workspace_bytes(9) + 1_200_000}
    fast, bound = (
        tencache_fx.fit(mlp(), torch.randn(ROWS, WIDTH), device_profile=name, **given) for name in ("h200", str(file))
    )
    assert 0 < fast.host_ns <= fast.whole_step_ns
    assert bound.whole_step_ns == bound.host_ns > 10**9
    assert bound.bound is not None
    assert bound.bound.name == "host thread"
    assert "\nbound" in show_fit(bound)
    assert f"{format_ns(bound.host_ns)} a step" in show_fit(bound).splitlines()[0]
    assert fitted(device_budget="3MB").host_ns == 0  # a CPU's thread computes


def test_a_model_that_needs_no_offloading_is_told_so() -> None:
    tight, roomy = fitted(device_budget="3MB"), fitted(device_budget="300MB")
    assert tight.fits
    assert tight.needs_offloading
    assert "needs no offloading" not in show_fit(tight)
    assert not roomy.needs_offloading
    assert "needs no offloading" in show_fit(roomy)
    # Weights and two moments in fp32; then gradients, or what the layers save: by and by there is less of these.
    saved_bytes = LAYERS * 2 * ROWS * WIDTH * 4
    always_bytes = 3 * roomy.parameter_bytes
    most_bytes = always_bytes + roomy.parameter_bytes + saved_bytes
    assert always_bytes + max(roomy.parameter_bytes, saved_bytes) <= roomy.all_on_device_bytes <= most_bytes


def test_a_budget_below_the_floor_is_refused_with_the_least_that_does() -> None:
    found = fitted(device_budget="500kB")
    assert not found.fits
    assert found.least_device_bytes is not None
    assert found.floor_bytes <= found.least_device_bytes <= found.floor_bytes + 4096
    said = (
        "It does not fit: device_budget has to be 1MiB (954 kB) or more, and is 500 kB; raise it, or shrink the batch."
    )
    assert show_fit(found).splitlines()[0] == said
    assert fitted(device_budget=found.least_device_bytes).fits
    assert not fitted(device_budget=found.least_device_bytes * 98 // 100).fits


def test_host_memory_too_small_is_refused_with_what_it_takes() -> None:
    found = fitted(device_budget="3MB", host_budget="2MB")
    assert not found.fits
    assert found.least_device_bytes is None
    assert "host_budget is 2 MB. Set host_budget to " in show_fit(found)
    (enough,) = [word for word in show_fit(found).split() if word.endswith("MiB")]
    assert fitted(device_budget="3MB", host_budget=enough).fits


@pytest.mark.slow
def test_transfers_that_host_memory_has_no_room_for_go_to_disk_or_need_a_larger_device() -> None:
    at_home = fitted(device_budget="1200kB").resting_host_bytes
    short = {"device_budget": "1200kB", "host_budget": at_home + 200_000}
    refused, spilled = fitted(**short), fitted(**short, spill_budget="1GB")
    assert not refused.fits
    assert refused.least_device_bytes is not None
    assert "Else device_budget has to be" in show_fit(refused)
    assert fitted(**short | {"device_budget": refused.least_device_bytes}).fits
    assert spilled.fits
    assert spilled.disk_bytes > 0


class Broken(nn.Module):
    """Two blocks with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(192), Block(192)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_regions_are_reported_one_by_one() -> None:
    found = fitted(Broken(), torch.randn(64, 192), device_budget="1MB")
    first, second = found.regions
    assert found.peak_bytes == max(first.peak_bytes, second.peak_bytes) > 0
    assert found.step_ns == first.step_ns + second.step_ns
    assert found.offloaded_bytes == 4 * 192 * 192 * 4
    assert show_fit(found).count("\nregion ") == 3  # with the heading


def test_the_model_given_stays_as_it_is() -> None:
    model, x = mlp(layers=1), torch.randn(ROWS, WIDTH)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(12):  # more often than torch compiles a code object by default
        assert len(fitted(model, x).regions) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model[0].weight) is nn.Parameter


def test_a_model_without_gradients_is_fitted() -> None:
    found = fitted(mlp().requires_grad_(requires_grad=False), device_budget="1200kB")
    assert found.fits
    assert (found.gradient_bytes, found.state_bytes) == (0, 0)


FACTORIES = """
import torch
from torch import nn

class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = [value.item() for value in torch.linspace(0, 1, 4, device="cpu")]
        self.shift = torch.ones(256)
        self.into = nn.Linear(256, 256)
    def forward(self, x, scale=1.0):
        return self.into(x + self.shift) * self.rate[1] * scale

def model():
    return Tables().to("cuda").to(torch.bfloat16), torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")

def named():
    return Tables(), {"x": torch.randn(64, 256), "scale": 2.0}

def loss():
    target = torch.randn(64, 256)
    return Tables(), (torch.randn(64, 256),), lambda y: (y - target).square().mean()

def speaks():
    return Tables(), torch.randn(64, 256), lambda y: "low"

def huge():
    return nn.Sequential(*(nn.Linear(50_000, 50_000, dtype=torch.bfloat16) for _ in range(20))), torch.randn(
        64, 50_000, dtype=torch.bfloat16)

def reads():
    return Tables(), torch.randn(64, 256).tolist()

def wrong():
    return torch.randn(3)

def fails_in_forward():
    return Tables(), torch.randn(64, 13)

number = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    (tmp_path / "factories.py").write_text(FACTORIES)
    return tmp_path


@pytest.fixture
def command(factories: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["fit", *arguments, "--device", "cpu"])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("name", ["factories:model", "factories:named", "factories.py:loss"])
def test_the_command_calls_a_factory(command: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, out, err = command(name, "--device-budget", "1GiB", "--host-budget", "1GiB")
    assert (code, err) == (0, "")
    assert out.startswith("It fits, and needs no offloading: ")
    assert "parameters          65,792, " in out


def test_the_command_says_by_its_status_that_it_does_not_fit(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("factories:named", "--device-budget", "100kB", "--host-budget", "1TiB", "--json")
    assert code == 1
    assert json.loads(out)["least_device_bytes"] > 256 * 256 * 4


def test_what_is_dumped_can_be_planned_anew(command: Callable[..., tuple[int, str, str]], factories: Path) -> None:
    code, _, _ = command("factories:named", "--device-budget", "1GiB", "--dump-dir", str(factories / "dump"))
    assert code == 0
    (record,) = read_regions(factories / "dump")
    assert record.problem.budgets.device_bytes == 1 << 30


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("factories", "'factories' names no factory; give package.module:function"),
        ("nowhere:make", "nowhere cannot be imported, ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere.py:make", "nowhere.py cannot be imported, FileNotFoundError"),
        ("factories:modle", "factories has no modle; did you mean model?"),
        ("factories:number", "factories:number is no function, but a int; name one that returns (model, inputs)"),
        ("factories:wrong", "factories:wrong returned (Tensor); return (model, inputs)"),
        ("factories:speaks", "the loss function returned an object of type str; return a tensor of one element."),
        ("factories:reads", "factories:reads fails at factories.py:32, in reads, "),
        (
            "factories:fails_in_forward",
            "the model fails at factories.py:12, in forward, RuntimeError: ",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_a_sentence(
    command: Callable[..., tuple[int, str, str]], name: str, said: str
) -> None:
    code, out, err = command(name)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert line.startswith(f"tencache: {said}")


def test_a_file_that_cannot_be_imported_leaves_no_module_behind(
    command: Callable[..., tuple[int, str, str]], factories: Path
) -> None:
    (factories / "colorsys.py").write_text("import nowhere")
    before = importlib.import_module("colorsys")
    for name in ("nowhere", "colorsys"):
        code, _, err = command(f"{name}.py:make")
        assert (code, "cannot be imported" in err) == (2, True)
    assert "nowhere" not in sys.modules
    assert sys.modules["colorsys"] is before


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match=r"the model is a function; give a torch\.nn\.Module"):
        tencache_fx.fit(lambda x: x, torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="device_bugdet is not an option; did you mean device_budget"):
        fitted(device_bugdet="1GB")
    with pytest.raises(OptionError, match="device 'cuda:99' is not there"):
        tencache_fx.fit(mlp(), torch.randn(ROWS, WIDTH), device="cuda:99")
    with pytest.raises(OptionError, match="is a torch.sparse_coo"):
        fitted(mlp(), torch.eye(WIDTH).to_sparse())
    with pytest.raises(UsageError, match="found nothing to compile"):
        fitted(nn.Identity(), torch.ones(3))


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda _: "0.5", "the loss function returned an object of type str; return a tensor of one element"),
        (lambda _: None, "the loss function returned an object of type NoneType"),
        (lambda out: (out.sum(), out), "the loss function returned an object of type tuple"),
        (
            lambda out: out.sum(1),
            r"a tensor of size \(128,\) and torch.float32, and backward begins with",
        ),
        (lambda out: out.sum() > 0, r"a tensor of size \(\) and torch.bool, and backward"),
        (lambda out: out.sum().detach(), "depends on no parameter that is trained"),
    ],
)
def test_a_loss_that_no_backward_can_begin_with_is_refused(loss_fn: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        tencache_fx.fit(mlp(layers=1), torch.randn(ROWS, WIDTH), loss_fn=loss_fn, device="cpu", **GIVEN)


@pytest.mark.parametrize("loss_fn", [torch.mean, lambda out: out.sum().reshape(1)])
def test_a_loss_of_one_number_is_none_to_refuse(loss_fn: Callable[[Tensor], Any]) -> None:
    for trains in (True, False):
        model = mlp(layers=1).requires_grad_(trains)
        assert tencache_fx.fit(model, torch.randn(ROWS, WIDTH), loss_fn=loss_fn, device="cpu", **GIVEN).fits


@pytest.mark.slow
def test_nothing_is_allocated_for_fifty_billion_parameters(factories: Path) -> None:
    program = (
        "import resource, sys, torch\n"
        "from tencache_fx.cli import main\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "budgets = ['--device-budget', '24GiB', '--host-budget', '1TB']\n"
        "code = main(['fit', 'factories:huge', '--device', 'cpu', *budgets])\n"
        "print('grown', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, torch.cuda.is_initialized())\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=factories, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "parameters          50,001,000,000, 100 GB" in done.stdout
    _, grown_kib, initialized = done.stdout.splitlines()[-1].split()
    assert int(grown_kib) < 1 << 20
    assert initialized == "False"


def test_libraries_have_workspaces_beside_the_model() -> None:
    inputs, given = torch.randn(ROWS, WIDTH), {"device_budget": "1GiB", "host_budget": "1GiB"}
    found = [tencache_fx.fit(mlp(), inputs, device_profile=name, **given) for name in ("a100-80gb", "h100")]
    ampere, hopper = (each.regions[0].peak_bytes for each in found)
    more = 2 * (32 << 20) - 2 * ((8 << 20) + (128 << 10))
    assert more <= hopper - ampere <= more * 257 // 256  # a share of all that is held is kept free for small results


@pytest.mark.gpu
def test_a_gpu_is_planned_for_without_its_memory() -> None:
    torch.compiler.reset()  # memory is kept free for forwards of other tests whose backward is still to come
    tencache_fx.close()
    model = mlp(2048).bfloat16()
    allocate_workspaces(torch.device("cuda"))  # other tests may have had them allocated, or not
    taken = workspace_bytes(torch.cuda.get_device_capability()[0])
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    options = {"device_budget": "512MB", "compiler": "eager", "host_budget": "1GiB"}  # 252 MB of it for the state
    found = tencache_fx.fit(model, torch.randn(4096, 2048, dtype=torch.bfloat16), device="cuda", **(GIVEN | options))
    assert torch.cuda.max_memory_allocated() - held < 1 << 20
    assert found.fits
    options["device_budget"] = f"{512_000_000 + held - taken}B"  # as much beside what other tests have left
    (record,) = planned(model.cuda(), options, torch.randn(4096, 2048, dtype=torch.bfloat16, device="cuda"))
    real_bytes = record.plan.forecast.peak_bytes - held  # what a plan takes for state is among what it calls external
    assert abs(found.peak_bytes - taken - real_bytes) < real_bytes // 10  # an activation is a 24th


def test_state_of_what_stays_is_counted_where_it_stays() -> None:
    frozen = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(32))).requires_grad_(False)
    model = torch.nn.Sequential(frozen, torch.nn.Linear(256, 256, bias=False))
    found = tencache_fx.fit(model, torch.ones(4, 256), loss_fn=torch.sum, device="cpu", device_budget="3MB")
    count = 256 * 256
    assert (found.state_bytes, found.device_state_bytes) == (0, STATE_BYTES * count)
    assert found.offloaded_bytes == 32 * 4 * count
