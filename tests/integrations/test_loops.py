"""Accelerate, Lightning and PEFT over tencache: losses, checkpoints and weights are those of a run without it."""

from pathlib import Path

import pytest
import torch

import tencache_fx
from tencache_fx.model_state.offloaded_parameter import is_on_device

pytest.importorskip("transformers")

from integration import example, spilled_bytes

pytestmark = pytest.mark.usefixtures("quick_libraries")


def test_accelerate_trains_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    train = example("accelerate_loop").train
    expected, losses_expected = train(str(tmp_path / "plain"), plain=True)
    AcceleratorState._reset_state(True)  # there is one in a process, which remembers the first backend
    model, losses = train(str(tmp_path / "ours"))
    assert spilled_bytes() > 0
    assert tencache_fx.stats()["updates"] > 0
    assert losses == pytest.approx(losses_expected, rel=1e-4)
    torch.testing.assert_close(dict(model._orig_mod.state_dict()), dict(expected.state_dict()), rtol=1e-2, atol=1e-3)
    saved = [load_file(tmp_path / way / "model.safetensors") for way in ("plain", "ours")]
    torch.testing.assert_close(saved[1], saved[0], rtol=1e-2, atol=1e-3)
    again, resumed = train(str(tmp_path / "ours"), resume=True)
    assert resumed == losses[8:]
    after = again.state_dict()
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())


def test_lightning_trains_saves_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    module = example("lightning_fit")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet["enable_checkpointing"] = False

    def fit(*, plain: bool = False, epochs: int = 2, resume: str | None = None) -> tuple[object, list[float]]:
        task = module.Task()
        task.plain = plain
        trainer = module.fit(task, resume=resume, max_epochs=epochs, default_root_dir=tmp_path, **quiet)
        return trainer, torch.stack(task.losses).tolist()

    _, losses_expected = fit(plain=True)
    _, losses = fit()
    assert losses == pytest.approx(losses_expected, rel=1e-4)
    trainer, first = fit(epochs=1)
    assert first == losses[:12]
    assert spilled_bytes() > 0
    assert tencache_fx.stats()["updates"] > 0
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    kept = torch.load(tmp_path / "half.ckpt")["state_dict"]
    assert set(kept) == set(trainer.lightning_module.state_dict())
    assert not [name for name in kept if "_orig_mod" in name]
    module.BertForMaskedLM(module.BertConfig(**module.SHAPE)).load_state_dict(
        {name.removeprefix("model."): value for name, value in kept.items()}
    )
    assert fit(resume=str(tmp_path / "half.ckpt"))[1] == losses[12:]


def test_lora_trains_over_weights_that_stream(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = example("peft_lora")
    plain = module.make()
    expected = module.train(plain)
    model = tencache_fx.offload(module.make())
    model.compile(backend="tencache", options={"device_budget": "4MB", "host_budget": "64MiB"})
    assert module.train(model) == pytest.approx(expected, rel=1e-5)
    record = tencache_fx.regions()[-1]
    assert sum(parameter.nbytes for parameter in model.parameters()) > 2 * record.plan.forecast.peak_bytes
    assert spilled_bytes() > 0
    assert tencache_fx.stats()["h2d_bytes"] > 0
    assert all(is_on_device(p) for p in model.parameters() if p.requires_grad), "adapters stay"
    before, after = plain.state_dict(), model.state_dict()
    for name, value in after.items():
        if "lora" in name:
            torch.testing.assert_close(value, before[name], rtol=1e-2, atol=1e-4)
        else:
            assert torch.equal(value, before[name]), "frozen weights are as they were"

    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(module.make().unload(), tmp_path)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, model.get_base_model()(input_ids=tokens).logits)
        with tencache_fx.summon(model):
            merged = model.merge_and_unload()
        expected_merged = loaded.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        assert torch.equal(value, expected_merged[name])
