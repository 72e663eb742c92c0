"""`tencache fit` for transformers' configurations and for devices that are not here: a few layers stand for all."""

import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tencache_fx
from tencache_fx.cli import main
from tencache_fx.errors import BudgetError, OptionError
from tencache_fx.fitting import few_layers, fitness
from tencache_fx.fitting.captures import Capture, whole_problem
from tencache_fx.fitting.config_fit import _Captures, capture_largest, fit_config
from tencache_fx.fitting.fake_model import FactoryResult
from tencache_fx.fitting.micro_batches import NotEvenError, Planned, _next, between, find_setting
from tencache_fx.fitting.other_process import other_process
from tencache_fx.fitting.repetition import NotRepeatedError, repeat_layers
from tencache_fx.fitting.target import Target
from tencache_fx.fitting.transformers_model import ConfiguredModel
from tencache_fx.fitting.trial import Trial
from tencache_fx.fitting.workload import Request, Workload
from tencache_fx.hardware.profiles import PROFILES, find_profile, write_profile
from tencache_fx.planning.host_work import HostWork
from tencache_fx.planning.parameter_schedule import step_ns
from tencache_fx.planning.problem import Problem
from tencache_fx.planning.search import plan_region
from tencache_fx.reporting.fit_report import Setting
from tencache_fx.reporting.fit_text import show_fit
from tencache_fx.units import format_ns

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
GIVEN = {"device_budget": "112MiB", "host_budget": "8GiB"}
LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 2048}
CONFIGS: dict[str, dict[str, object]] = {
    "LlamaConfig": {**LLAMA, "num_hidden_layers": 8},
    "GPT2Config": {"n_embd": 256, "n_layer": 8, "n_head": 4, "vocab_size": 2048},
    "OPTConfig": {
        "hidden_size": 256,
        "ffn_dim": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 8,
        "vocab_size": 2048,
    },
    "BertConfig": {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 2048},
    "ViTConfig": {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 512},
}

QUICK = ("LlamaConfig",)  # the others take another three minutes on two cores


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * scale


class Stacked(nn.Module):
    """Layers that share what is computed before them; no two of them need be of the same width."""

    def __init__(self, depth: int, growth: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(256, 512 + growth * index) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, scale)
        return x.square().mean()


def captured(depth: int, rows: int = 512, growth: int = 0) -> Problem:
    target = Target.find(None, "h100", {**GIVEN, "policy": "none"})
    with torch.device("meta"):
        made = FactoryResult(model=Stacked(depth, growth), inputs=(torch.empty(rows, 256),))
    torch.compiler.reset()
    trial = Trial(made, target, FakeTensorMode())
    trial.capture()
    (plan,) = trial.plans()
    return plan.captured


def lives(problem: Problem) -> list[tuple[object, ...]]:
    """Return all that a problem's storages are but for their names, in an order that does not depend on these."""
    own = (dataclasses.astuple(dataclasses.replace(storage, name="")) for storage in problem.storages)
    return sorted(own, key=repr)


@pytest.mark.parametrize("depth", [7, 11])
def test_repeated_layers_are_as_captured_ones(depth: int) -> None:
    repeated, whole = repeat_layers(captured(6), "layers", 1, depth - 6), captured(depth)
    assert sum(op.duration_ns for op in repeated.ops) == pytest.approx(
        sum(op.duration_ns for op in whole.ops), rel=0.01
    )
    assert [op.scratch_bytes for op in repeated.ops] == [op.scratch_bytes for op in whole.ops]
    assert (repeated.boundary, repeated.barriers) == (whole.boundary, whole.barriers)
    assert lives(repeated) == lives(whole)
    assert sorted(recipe.steps for recipe in repeated.recipes) == sorted(recipe.steps for recipe in whole.recipes)
    assert len(whole.recipes) > depth


def test_units_of_several_layers_are_repeated_together() -> None:
    repeated, whole = repeat_layers(captured(9), "layers", 2, 2), captured(13)
    assert lives(repeated) == lives(whole)


@pytest.mark.parametrize(
    ("stack", "growth", "said"),
    [("layers", 256, "do not repeat"), ("blocks", 0, "no offloaded parameters of blocks")],
)
def test_what_does_not_repeat_is_refused(stack: str, growth: int, said: str) -> None:
    with pytest.raises(NotRepeatedError, match=said):
        repeat_layers(captured(6, growth=growth), stack, 1, 2)


def test_micro_batches_in_between_are_as_captured_ones() -> None:
    low, high = captured(4, rows=1 << 15), captured(4, rows=1 << 17)
    found, whole = between(low, high, (2, 8), 6), captured(4, rows=3 << 15)
    assert lives(found) == lives(whole)
    assert sum(op.duration_ns for op in found.ops) == pytest.approx(sum(op.duration_ns for op in whole.ops), rel=0.01)
    with pytest.raises(NotEvenError):
        between(low, captured(5), (2, 8), 6)


@pytest.mark.parametrize(
    ("unlike", "ends"),
    [((2,), (4, 64)), ((64,), (2, 32)), ((2, 64), (4, 32))],
    ids=["smallest", "largest", "both"],
)
def test_where_a_micro_batch_is_unlike_the_others_the_next_one_takes_its_place(
    unlike: tuple[int, ...], ends: tuple[int, int]
) -> None:
    captures = _Captures(Workload(config="any", samples=64), Target.find(None, "h100", GIVEN))
    captures.sequence = 1
    asked = []

    def capture(micro_batch: int) -> tuple[Capture, Problem]:
        asked.append(micro_batch)
        problem = captured(3 + micro_batch) if micro_batch in unlike else captured(2, rows=micro_batch)
        return cast(Capture, None), problem

    captures._captured = capture  # type: ignore[method-assign]
    found = {each: captures.problem(each) for each in captures.tried}
    assert list(found) == [1, 2, 4, 8, 16, 32, 64]
    assert len(asked) == len({*asked}) <= 4
    low, high = (captures._found[each][1] for each in ends)
    assert all(found[each] == between(low, high, ends, each) for each in found if each not in asked)
    assert 16 not in asked


class Beside:
    """Another planner, which answers, or has ended."""

    def __init__(self, *, answers: bool) -> None:
        self.answers, self.asked = answers, list[Problem]()

    def begin_plan(self, captured: Problem, policy: str) -> None:
        assert policy == "joint"
        self.asked.append(captured)

    def planned(self) -> Planned | None:
        try:
            return plan_region(self.asked[-1], "joint") if self.answers else None
        except BudgetError as refusal:
            return refusal


def test_where_no_neighbour_may_be_faster_another_one_is_planned() -> None:
    took_ns = {1: 9, 2: 4, 4: 5, 8: 7, 16: 6}
    settings = {
        each: Setting(micro_batch=each, accumulation=1, floor_bytes=0, step_ns=ns) for each, ns in took_ns.items()
    }
    hopeful = list(settings)
    assert [_next(hopeful, settings, planned) for planned in ({8}, {16}, {16, 8}, {16, 8, 2})] == [4, 2, 2, None]


def test_the_setting_that_is_found_is_the_fastest_of_all() -> None:
    tried = [1, 2, 4, 8, 16]
    low, high = captured(4, rows=1024), captured(4, rows=8192)

    def problems(micro_batch: int) -> Problem:
        return between(low, high, (2, 16), micro_batch)

    found = find_setting(problems, 16, tried, "joint", HostWork(costs=None, trained=0))
    assert found.planned is not None
    for answers in (True, False):
        other = Beside(answers=answers)
        assert find_setting(problems, 16, tried, "joint", HostWork(costs=None, trained=0), other) == found
        assert other.asked
    assert sum(setting.planned for setting in found.settings) <= 3
    steps_ns = []
    for micro_batch in tried:
        with contextlib.suppress(BudgetError):
            problem, plan = plan_region(replace(problems(micro_batch), accumulation=16 // micro_batch), "joint")
            steps_ns.append(step_ns(problem, plan.forecast))
    assert len(steps_ns) > 2
    assert found.setting.step_ns <= min(steps_ns) * 1.005


@needs_transformers
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
)
def test_few_layers_tell_what_all_of_them_do(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sequence = None if name == "ViTConfig" else 256
    load = Workload(config=name, settings=CONFIGS[name], micro_batch=16, sequence=sequence)
    given = GIVEN | {"device_budget": "264MiB"}
    few = fit_config(load, None, given, profile="h100")
    monkeypatch.setattr(ConfiguredModel, "shorter", lambda model, ends: (model, 1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    every = fit_config(load, None, given, profile="h100")
    assert (few.traced, every.traced) == ("4 of 8 layers", "all layers")
    assert few.fits
    for figure in ("peak_bytes", "whole_step_ns", "host_bytes", "all_on_device_bytes", "device_parameter_bytes"):
        assert getattr(few, figure) == pytest.approx(getattr(every, figure), rel=0.01), figure
    assert few.offloaded_bytes == every.offloaded_bytes


@needs_transformers
def test_updates_in_the_backward_are_offered_with_what_they_gain(tmp_path: Path) -> None:
    """The host's thread has next to nothing to do, and its memory is the bound neither way."""
    known, file = find_profile("h100"), tmp_path / "quick.json"
    quick = replace(known.host, transfer_op_ns=100, device_update_ns=100, host_update_ns=100)
    write_profile(file, replace(known, host=quick, links=replace(known.links, host_bytes_per_s=20 * 10**9)))
    load = Workload(config="LlamaConfig", settings=CONFIGS["LlamaConfig"], micro_batch=16, sequence=256)
    found = fit_config(load, None, GIVEN | {"device_budget": "170MiB"}, profile=str(file))
    assert found.early_step_ns < found.whole_step_ns
    offer = f"a step takes {format_ns(found.early_step_ns)} instead of {format_ns(found.whole_step_ns)}"
    assert f"{offer} with the optimizer's step_in_backward=True" in show_fit(found)


@needs_transformers
def test_two_micro_batches_are_traced_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    make = ConfiguredModel.make

    def counted(model: ConfiguredModel, micro_batch: int) -> object:
        if model.depths["num_hidden_layers"] < 8:
            traced.append(micro_batch)
        return make(model, micro_batch)

    monkeypatch.setattr(ConfiguredModel, "make", counted)
    load = Workload(config="LlamaConfig", settings=CONFIGS["LlamaConfig"], samples=16, sequence=256)
    found = fit_config(load, None, GIVEN | {"device_budget": "264MiB"}, profile="h100")
    assert [setting.micro_batch for setting in found.settings] == [1, 2, 4, 8, 16]
    assert traced == [2, 16]


def request(device: str | None = None, **given: str) -> Request:
    load = Workload(config="LlamaConfig", settings=CONFIGS["LlamaConfig"], sequence=64, samples=8)
    return Request(load=load, device=device, options=GIVEN | given, profile="h100")


@needs_transformers
def test_another_process_captures_and_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    asked = request()
    with other_process() as other:
        assert other is not None
        other.begin_capture(asked)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # it keeps what it captures elsewhere
        capture = capture_largest(asked)
        assert other.captured() == capture
        problem = whole_problem(capture, Target.find(None, "h100", GIVEN))
        other.begin_plan(problem, "joint")
        assert other.planned() == plan_region(problem, "joint")
        other.begin_plan(problem.within(device_bytes=1), "joint")
        assert isinstance(other.planned(), BudgetError)


@needs_transformers
def test_what_another_process_cannot_do_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    expected = fit_config(request().load, None, GIVEN, profile="h100")
    with other_process() as other:
        assert other is not None
        other.begin_capture(request(device="cuda:9"))
        assert other.captured() is None  # it has ended
        other.begin_plan(captured(4), "joint")
        assert other.planned() is None
        assert fit_config(request().load, None, GIVEN, profile="h100", other=other) == expected
    with other_process() as other:
        pass  # it ends with the context, whatever it does by then
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with other_process() as other:
        assert other is None


@needs_transformers
def test_what_was_captured_is_kept_for_all_budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = replace(request().load, samples=None, micro_batch=2)
    other_budget = GIVEN | {"device_budget": "144MiB", "host_budget": "4GiB"}
    found = [fit_config(load, None, given, profile="h100") for given in (GIVEN, other_budget)]
    with monkeypatch.context() as patch:
        patch.setattr(few_layers, "capture_layers", None)
        assert [fit_config(load, None, given, profile="h100") for given in (GIVEN, other_budget)] == found
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fit_config(load, None, other_budget, profile="h100") == found[1]


@needs_transformers
def test_what_is_kept_needs_no_torch() -> None:
    asked = ["fit", "hf:LlamaConfig", "--set", *(f"{name}={value}" for name, value in CONFIGS["LlamaConfig"].items())]
    asked += ["--sequence", "64", "--micro-batch", "2", "--device-profile", "h100", "--device-budget", "112MiB"]
    asked += ["--host-budget", "8GiB"]
    assert main(asked) == 0
    code = f"import sys; from tencache_fx.cli import main; sys.exit(main({asked}) or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@needs_transformers
def test_what_follows_from_this_machine_is_not_kept(cache_folder: Path) -> None:
    fit_config(replace(request().load, samples=1), "cpu", GIVEN)
    assert not list(cache_folder.glob("fit*"))


def test_garbage_is_looked_for_seldom_while_the_command_works(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    during: list[int] = []

    def watched(*_: object, **__: object) -> None:
        during.append(gc.get_threshold()[0])
        raise OptionError("enough.")

    monkeypatch.setattr(fitness, "fit_factory", watched)
    assert main(["fit", "anything:at_all", "--device", "cpu"]) == 2
    assert during[0] > 100 * before[0]
    assert gc.get_threshold() == before


@needs_transformers
def test_the_command_answers_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [f"{name}={value}" for name, value in CONFIGS["LlamaConfig"].items()]
    given = ["--device-profile", "a100-40gb", "--device-budget", "65MiB", "--host-budget", "8GiB"]
    asked = ["fit", "hf:LlamaConfig", "--set", *sets, *given, "--tokens", "4096", "--sequence", "256"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 30
    assert max(map(len, out.splitlines()[2:])) <= 150
    for expected in (
        "traced with 4 of 8 layers",
        "tokens/s",
        "bound ",
        "of the step's",
        "fastest",
        "a100-40gb: published",
    ):
        assert expected in out
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 4096
    (best,) = (each for each in found["settings"] if each["micro_batch"] == found["micro_batch"])
    assert best["planned"]
    assert best["step_ns"] == found["whole_step_ns"] == min(s["step_ns"] for s in found["settings"] if s["planned"])
    assert best["micro_batch"] * best["accumulation"] * 256 == 4096
    assert {load["name"] for load in found["loads"]} >= {"compute", "host memory", "link out", "link in", "disk read"}
    assert max(load["busy_ns"] for load in found["loads"]) <= found["whole_step_ns"]


@needs_transformers
def test_a_budget_that_is_too_small_is_told_with_the_least_that_suffices() -> None:
    load = Workload(config="LlamaConfig", settings=CONFIGS["LlamaConfig"], micro_batch=4, sequence=256)
    tight = fit_config(load, None, GIVEN | {"device_budget": "1MiB"}, profile="h100")
    assert not tight.fits
    least = tight.least_device_bytes
    assert least is not None
    assert fit_config(load, None, GIVEN | {"device_budget": least}, profile="h100").fits


@needs_transformers
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hf:LamaConfig"], "transformers has no LamaConfig; did you mean LlamaConfig?"),
        (["hf:LlamaConfig", "--set", "hidden_sizes=3"], "has no hidden_sizes; did you mean hidden_size?"),
        (["hf:LlamaConfig", "--set", "hidden_size"], "'hidden_size' sets nothing; give NAME=VALUE"),
        (["hf:LlamaConfig", "--set", "hidden_size=100"], "LlamaConfig cannot be made, "),
        (["hf:LlamaConfig", "--tokens", "100", "--sequence", "64"], "100 tokens are no whole sequences of 64"),
        (["hf:LlamaConfig", "--micro-batch", "3", "--samples", "4"], "4 samples a step are no multiple of micro_batch"),
        (["hf:LlamaConfig", "--tokens", "64", "--samples", "4"], "tokens and samples are both given"),
        (["hf:LlamaConfig", "--dtype", "bfloat"], "dtype is 'bfloat'; did you mean bfloat16?"),
        (["hf:LlamaConfig", "--sequence", "0"], "sequence is 0; give 1 or more"),
        (["hf:ViTConfig", "--sequence", "8"], "ViTConfig is for images, which have no sequence"),
        (["hf:ViTConfig", "--tokens", "8"], "ViTConfig is for images, which are no tokens"),
        (["hf:Wav2Vec2Config"], "Wav2Vec2Config is of no model that is trained on text or on images"),
    ],
)
def test_what_transformers_does_not_know_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *arguments, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_transformers_a_sentence_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["fit", "hf:LlamaConfig", "--device", "cpu"]) == 2
    said = "hf:LlamaConfig needs transformers, which is not installed; pip install 'tencache_fx[models]'."
    assert capsys.readouterr().err == f"tencache: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device-profile", "h10"], "'h10' is no device profile; did you mean h100? there are h100, h200"),
        (["--device-profile", "empty.json"], "empty.json is no device profile: "),
        (["--device-profile", "h100", "--device", "cuda"], "device is cuda, and there is a device profile"),
        (["--tokens", "8"], "--tokens is for hf:CONFIG"),
        ([], "test_fit_config.py:Stacked is a module; say what it is called with"),
        (["--input", "axb"], "--input axb is no tensor; give SHAPE:DTYPE"),
        (["--input", "8x256:float31"], "--input 8x256:float31 is no tensor"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    assert main(["fit", f"{__file__}:Stacked", "--set", "depth=4", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_class_is_fitted_with_its_arguments_and_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device-profile", "rtx4090", "--host-budget", "1GiB", "--json"]
    assert main(["fit", f"{__file__}:Stacked", "--set", "depth=2", "--input", "64x256", *given]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 2 * (2 * 256 * 512 + 256 + 512)
    assert found["device"] == "rtx4090"
    assert found["device_budget_bytes"] == (24 << 30) * 9 // 10


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = dataclasses.replace(PROFILES["h100"], name="mine")
    write_profile(path, mine)
    assert find_profile(str(path)) == mine
    with pytest.raises(OptionError, match="cannot be written: Is a directory"):
        write_profile(tmp_path, mine)


def test_a_faster_device_takes_less_time() -> None:
    with torch.device("meta"):
        model, inputs = Stacked(4).bfloat16(), torch.empty(4096, 256, dtype=torch.bfloat16)
    slow, fast = (
        tencache_fx.fit(model, inputs, device_profile=name, host_budget="1GiB") for name in ("rtx3090", "h100")
    )
    assert fast.step_ns < slow.step_ns
    assert fast.measured
    assert fast.device == "h100"
