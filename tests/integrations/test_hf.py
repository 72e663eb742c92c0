"""The Trainer of transformers, with tencache and without: the same losses, checkpoints and weights."""

import enum
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.utils import DynamoBackend
from integration import example, spilled_bytes
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import tencache_fx
from tencache_fx.integrations import dynamo_backend, hf

pytestmark = pytest.mark.usefixtures("quick_libraries")


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_backend_is_a_member_like_any_other() -> None:
    hf.register()
    before = list(DynamoBackend)
    hf.register()
    assert list(DynamoBackend) == before
    assert isinstance(DynamoBackend.TENCACHE, DynamoBackend)
    assert DynamoBackend("TENCACHE") is DynamoBackend["TENCACHE"] is DynamoBackend.TENCACHE
    assert str(DynamoBackend.TENCACHE) == DynamoBackend.list()[-1] == "TENCACHE"
    with pytest.raises(AttributeError):
        DynamoBackend.TENCACHE = "another"


def test_an_enumeration_that_has_changed_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grown(enum.StrEnum):
        NO = "NO"

    class Kept(SimpleNamespace):
        pass

    for other in (Kept(__members__={}), Kept(__members__={}, _member_names_=[])):
        names = vars(other).copy()
        monkeypatch.setattr(dynamo_backend, "DynamoBackend", other)
        with pytest.raises(tencache_fx.UsageError, match=r"^accelerate \d.* call model\.compile\(.*\) before"):
            dynamo_backend.register()
        assert vars(other) == names
    monkeypatch.setattr(dynamo_backend, "DynamoBackend", Grown)
    dynamo_backend.register()
    assert [member.value for member in Grown] == ["NO", "TENCACHE"]


def test_the_example_trains_as_without_us_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    train = example("hf_trainer").train
    expected = train(str(tmp_path / "plain"), plain=True)
    trainer = train(str(tmp_path / "ours"))
    assert spilled_bytes() > 0
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-4)
    line = next(line for line in trainer.state.log_history if "loss" in line)
    assert line["tencache/d2h_bytes"] > 0
    assert line["tencache/updates"] > 0

    weights: dict[str, Tensor] = load_file(tmp_path / "ours" / "checkpoint-8" / "model.safetensors")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-8").state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(weights[name], value)
        assert torch.equal(plain[name], value)

    shutil.rmtree(tmp_path / "ours" / "checkpoint-8")
    again = train(str(tmp_path / "ours"), resume=True)
    assert losses(again) == losses(trainer)
    assert all(torch.equal(weights[name], value) for name, value in again.model.state_dict().items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_precision_checkpointing_and_schedules_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reentrant: bool,  # noqa: FBT001
) -> None:
    module = example("hf_trainer")
    more = {"bf16": True, "gradient_checkpointing": True, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    more |= {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, "gradient_accumulation_steps": 3}
    for name, value in more.items():
        monkeypatch.setitem(module.USUAL, name, value)
    expected = module.train(str(tmp_path / "plain"), plain=True)
    trainer = module.train(str(tmp_path / "ours"))
    assert spilled_bytes() > 0
    assert losses(trainer) == pytest.approx(losses(expected), rel=1e-2)
    norms = [
        [line["grad_norm"] for line in each.state.log_history if "grad_norm" in line] for each in (trainer, expected)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=5e-2)


def test_what_the_runtime_did_reaches_those_who_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *_: object, logs: dict[str, float], **more: object) -> None:
            seen.append(dict(logs))

    def with_reporter(*args: object, **more: object) -> Trainer:
        return Trainer(*args, callbacks=[Reporter()], **more)

    module = example("hf_trainer")
    monkeypatch.setattr(module, "Trainer", with_reporter)
    monkeypatch.setitem(module.USUAL, "logging_steps", 4)
    monkeypatch.setitem(module.USUAL, "eval_strategy", "no")
    trainer = module.train(str(tmp_path))
    lines = [line for line in seen if "loss" in line]
    assert len(lines) == 2
    for line, kept in zip(lines, (line for line in trainer.state.log_history if "loss" in line), strict=True):
        metrics = {
            name.removeprefix("tencache/"): value for name, value in line.items() if name.startswith("tencache/")
        }
        assert metrics.items() <= {k.removeprefix("tencache/"): v for k, v in kept.items()}.items()
        assert 0 <= metrics["hit_rate"] <= 1
        assert metrics["stall_ms"] >= 0
        assert 0 < metrics["host_high_water_bytes"] <= metrics["host_pool_bytes"]
    moved = [line["tencache/h2d_bytes"] for line in lines]
    assert moved[0] == pytest.approx(moved[1], rel=0.5), "of a step, not of all so far"
    assert not [name for line in seen if "loss" not in line for name in line if name.startswith("tencache/")]


def test_the_devices_peak_is_logged_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dict.fromkeys((*hf._PER_STEP, *hf._GAUGES, "stall_ns"), 3) | {"hit_rate": 0.5}
    monkeypatch.setattr(hf, "stats", lambda: taken)
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
        callback, state = hf.TencacheCallback(), SimpleNamespace(log_history=[{}])
        callback.on_step_end(None, state, None)
        line: dict[str, float] = {"loss": 1.0}
        callback.on_log(None, state, None, logs=line)
        assert line.get("tencache/device_peak_bytes") == (7 if on_gpu else None)
        assert line["tencache/hit_rate"] == state.log_history[-1]["tencache/hit_rate"] == 0.5
