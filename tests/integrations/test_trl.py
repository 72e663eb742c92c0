"""TRL's trainers, with tencache and without: the same losses and rewards."""

from pathlib import Path

import pytest

pytest.importorskip("trl")

from integration import example
from transformers import Trainer

pytestmark = pytest.mark.usefixtures("quick_libraries")


def logged(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.parametrize("way", ["sft", "grpo"])
def test_a_trainer_of_trl_trains_as_without_us(way: str, tmp_path: Path) -> None:
    train = example("trl_training").train
    expected, trainer = train(way, str(tmp_path / "plain"), plain=True), train(way, str(tmp_path / "ours"))
    assert logged(trainer, "tencache/d2h_bytes")[0] > 0
    assert len(logged(trainer, "loss")) == 6
    assert logged(trainer, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-2)
    if way == "sft":
        assert logged(trainer, "loss") == pytest.approx(logged(expected, "loss"), rel=1e-3)
    else:
        assert logged(trainer, "reward") == logged(expected, "reward")
